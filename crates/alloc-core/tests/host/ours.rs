//! What policy `ours` adds: slabs, bounds, nodes, and a ladder.

use crate::support::*;
use alloc_core::DeviceId;
use alloc_core::host::{HostConfig, HostError, HostStep, NodeId, PinMethod, Place};
use mock_backend::{Call, MockBackend};
use std::time::Duration;

fn config() -> HostConfig {
    HostConfig::ours()
}

#[test]
fn blocks_are_cut_from_one_segment_and_merged_again() {
    let rig = Rig::new(machine(), HostConfig { growth_bytes_min: 64 * MIB, ..config() });
    let blocks: Vec<_> = (1..=8).map(|i| rig.allocate(i * MIB + 4096)).collect();
    assert_eq!((rig.calls(Call::Pin), rig.pinned()), (1, 64 * MIB));
    rig.check();
    for block in blocks {
        rig.free(block);
        rig.check();
    }
    let whole = rig.allocate(64 * MIB);
    assert_eq!(rig.calls(Call::Pin), 1, "merged into one block");
    rig.free(whole);
    rig.finish();
}

#[test]
fn the_smallest_block_that_fits_is_taken_and_of_equals_the_lowest() {
    let rig = Rig::new(machine(), HostConfig { growth_bytes_min: 64 * MIB, ..config() });
    // Holes of 12, 8, 8 and 16 MiB between live blocks, and 12 MiB at the end.
    let sizes = [12, 2, 8, 2, 8, 2, 16, 2].map(|mib| mib * MIB);
    let mut blocks = sizes.map(|bytes| Some(rig.allocate(bytes)));
    let holes = [0, 2, 4, 6].map(|i| blocks[i].take().expect("live"));
    let addrs = holes.each_ref().map(|hole| hole.addr());
    holes.into_iter().for_each(|hole| rig.free(hole));
    // Merges what is kept apart, and trims nothing.
    rig.host.trim(Duration::MAX).expect("nothing to do");
    let nearly = rig.allocate(8 * MIB - 512 * KIB);
    assert_eq!(nearly.addr(), addrs[1]);
    let more = rig.allocate(10 * MIB);
    assert_eq!(more.addr(), addrs[0]);
    rig.check();
    blocks.into_iter().flatten().chain([nearly, more]).for_each(|block| rig.free(block));
    rig.finish();
}

#[test]
fn growth_is_a_share_of_what_is_pinned() {
    let rig = ours();
    let first = rig.allocate(64);
    assert_eq!(rig.pinned(), 2 * MIB);
    let huge = rig.allocate(GIB);
    assert_eq!(rig.pinned(), 2 * MIB + GIB, "a large request is pinned as large as it is");
    let next = rig.allocate(3 * MIB);
    assert_eq!(rig.pinned(), 2 * MIB + GIB + 24 * MIB, "more than 1/64, for eight blocks");
    [first, huge, next].into_iter().for_each(|block| rig.free(block));
    rig.finish();
}

#[test]
fn large_segments_are_registered_by_threads_in_bounded_pieces() {
    let rig = ours();
    let a = rig.allocate(100 * GIB);
    let (_, request) = rig.backend.pins()[0];
    assert_eq!(
        request.method,
        PinMethod::Register { threads: HostConfig::ours().register_threads }
    );
    assert_eq!(request.piece_bytes_max, 64 * GIB);
    assert_eq!(request.node, Some(NodeId::new(0)));
    rig.free(a);
    rig.finish();
}

#[test]
fn finished_events_are_used_before_memory_is_pinned() {
    // One block waits with an event, the other in an open batch that is closed for the purpose.
    for (bytes, draining_bytes_max) in [(8 * MIB, 8 * MIB), (2 * MIB, 0)] {
        let rig = Rig::new(machine(), HostConfig { draining_bytes_max, ..config() });
        let stream = rig.stream();
        let a = rig.allocate(bytes);
        rig.use_on(&a, &stream);
        rig.free(a);
        rig.backend.pass(&stream);
        let b = rig.allocate(bytes);
        assert_eq!(rig.calls(Call::Pin), 1);
        rig.free(b);
        rig.finish();
    }
}

#[test]
fn a_busy_stream_makes_it_grow_rather_than_wait() {
    let rig = ours();
    let stream = rig.stream();
    let a = rig.allocate(2 * MIB);
    rig.use_on(&a, &stream);
    rig.free(a);
    let b = rig.allocate(2 * MIB);
    assert_eq!((rig.calls(Call::Pin), rig.calls(Call::Wait)), (2, 0));
    rig.free(b);
    rig.backend.pass(&stream);
    rig.finish();
}

#[test]
fn free_memory_beyond_the_bound_is_given_back() {
    let rig = Rig::new(machine(), HostConfig { cached_bytes_max: Some(100 * MIB), ..config() });
    let blocks: Vec<_> = (0..4).map(|_| rig.allocate(64 * MIB)).collect();
    for (freed, block) in (1..).zip(blocks) {
        rig.free(block);
        let live = (4 - freed) * 64 * MIB;
        assert!(rig.pinned() <= live + 100 * MIB, "{} with {live} live", rig.pinned());
        rig.check();
    }
    assert_eq!(rig.pinned(), 64 * MIB);
    rig.finish();
}

#[test]
fn segments_that_are_free_for_long_are_given_back() {
    let age = Duration::from_secs(60);
    let rig = Rig::new(machine(), HostConfig { cached_age_max: Some(age), ..config() });
    let idle = rig.allocate(64 * MIB);
    let reused = rig.allocate(128 * MIB);
    rig.free(idle);
    rig.free(reused);
    rig.host.process_events().expect("seen free");
    rig.backend.advance(40_000_000_000);
    let reused = rig.allocate(128 * MIB);
    rig.free(reused);
    rig.backend.advance(25_000_000_000);
    rig.host.process_events().expect("old ones go");
    assert_eq!(rig.pinned(), 128 * MIB, "the one in use between is younger");
    rig.backend.advance(61_000_000_000);
    rig.host.process_events().expect("old ones go");
    assert_eq!(rig.pinned(), 0);
    rig.check();
    rig.finish();
}

#[test]
fn trim_gives_back_what_is_old_enough() {
    let rig = ours();
    let a = rig.allocate(64 * MIB);
    rig.free(a);
    rig.host.trim(Duration::from_secs(1)).expect("seen free");
    assert_eq!(rig.pinned(), 64 * MIB);
    rig.backend.advance(2_000_000_000);
    rig.host.trim(Duration::from_secs(1)).expect("given back");
    assert_eq!(rig.pinned(), 0);
    rig.finish();
}

#[test]
fn the_limit_is_never_exceeded_and_the_report_names_it() {
    let rig = Rig::new(machine(), HostConfig { reserved_bytes_max: Some(64 * MIB), ..config() });
    let a = rig.allocate(40 * MIB);
    let error = rig.try_allocate(30 * MIB).expect_err("beyond the limit");
    let HostError::OutOfMemory(report) = error else { panic!("{error}") };
    assert_eq!((report.limit, report.source), (Some(64 * MIB), None));
    assert_eq!((report.requested, report.active), (30 * MIB, 40 * MIB));
    let steps = [
        HostStep::Grow,
        HostStep::GrowExactly,
        HostStep::ProcessEvents,
        HostStep::EmptyCache,
        HostStep::WaitForEvents,
    ];
    assert_eq!(report.steps, steps);
    rig.free(a);
    let b = rig.allocate(60 * MIB);
    assert_eq!(rig.pinned(), 60 * MIB, "the cached segment made room");
    rig.check();
    rig.free(b);
    rig.finish();
}

#[test]
fn the_ladder_waits_for_the_oldest_events_and_no_longer_than_needed() {
    // Frees ask about events that are not reached, which changes their order in the queue.
    for count in 2..=4 {
        let machine = MockBackend::builder().strict().host_node(count * 32 * MIB).build();
        let rig = Rig::new(machine, config());
        let streams: Vec<_> = (0..count).map(|_| rig.stream()).collect();
        for stream in &streams {
            let a = rig.allocate(32 * MIB);
            rig.use_on(&a, stream);
            rig.free(a);
        }
        let b = rig.allocate(32 * MIB);
        assert_eq!(rig.calls(Call::Wait), 1);
        let waited_for = streams.iter().position(|stream| !rig.backend.is_busy(stream));
        assert_eq!(waited_for, Some(0), "of {count}");
        assert!(streams[1..].iter().all(|stream| rig.backend.is_busy(stream)));
        rig.check();
        rig.free(b);
        rig.finish();
    }
}

#[test]
fn memory_is_taken_on_the_node_of_the_device_that_asks() {
    let machine = MockBackend::builder()
        .strict()
        .device(GIB)
        .device(GIB)
        .host_node(GIB)
        .host_node(GIB)
        .build();
    let rig = Rig::new(machine, config());
    let place = |device| Place::Device(DeviceId::new(device));
    let a = rig.allocate_on(8 * MIB, place(1));
    assert_eq!(rig.backend.pinned(NodeId::new(1)), 8 * MIB);
    assert_eq!(rig.backend.pinned(NodeId::new(0)), 0);
    let addr = a.addr();
    rig.free(a);
    let b = rig.allocate_on(8 * MIB, place(0));
    assert_ne!(b.addr(), addr, "free memory of another node is left alone");
    assert_eq!(rig.backend.pinned(NodeId::new(0)), 8 * MIB);
    let c = rig.allocate_on(8 * MIB, Place::Node(NodeId::new(1)));
    assert_eq!(c.addr(), addr);
    rig.check();
    rig.free(b);
    rig.free(c);
    rig.finish();
}

#[test]
fn another_node_helps_out_before_a_request_fails() {
    let machine = MockBackend::builder().strict().host_node(16 * MIB).host_node(64 * MIB).build();
    let rig = Rig::new(machine, config());
    let keeper = rig.allocate_on(4 * MIB, Place::Node(NodeId::new(1)));
    let near = rig.allocate_on(16 * MIB, Place::Node(NodeId::new(0)));
    // Node 1 keeps a free piece that cannot be given back, as its segment is in use.
    let far = rig.allocate_on(2 * MIB + 4096, Place::Node(NodeId::new(1)));
    let small = rig.allocate_on(64, Place::Node(NodeId::new(1)));
    rig.free(far);
    let helped = rig.host.allocate_on(64, Place::Node(NodeId::new(0)));
    let helped = helped.expect("from the other node");
    rig.backend.judge().allocated_on_host(helped.addr(), helped.bytes());
    rig.check();
    [keeper, near, small, helped].into_iter().for_each(|block| rig.free(block));
    rig.finish();
}

#[test]
fn policy_pytorch_knows_no_nodes() {
    let machine = MockBackend::builder().strict().host_node(GIB).host_node(GIB).build();
    let rig = Rig::new(machine, HostConfig::pytorch());
    let a = rig.allocate_on(4096, Place::Node(NodeId::new(1)));
    let addr = a.addr();
    rig.free(a);
    let b = rig.allocate_on(4096, Place::Node(NodeId::new(0)));
    assert_eq!(b.addr(), addr);
    rig.free(b);
    rig.finish();
}

#[test]
fn the_reserve_is_pinned_ahead_and_kept() {
    let rig = Rig::new(machine(), HostConfig { reserve_bytes: 256 * MIB, ..config() });
    assert_eq!(rig.pinned(), 0, "not before the first request");
    let blocks: Vec<_> = (0..4).map(|_| rig.allocate(60 * MIB)).collect();
    assert_eq!((rig.calls(Call::Pin), rig.pinned()), (1, 256 * MIB));
    blocks.into_iter().for_each(|block| rig.free(block));
    rig.host.empty_cache().expect("emptied");
    rig.host.trim(Duration::ZERO).expect("trimmed");
    assert_eq!(rig.pinned(), 256 * MIB);
    let whole = rig.allocate(256 * MIB);
    assert_eq!(rig.calls(Call::Pin), 1);
    rig.free(whole);
    rig.finish();
}

#[test]
fn threads_that_do_not_collide_share_their_memory() {
    let rig = ours();
    let addr = {
        let a = rig.allocate(4096);
        let addr = a.addr();
        rig.free(a);
        addr
    };
    let host = rig.host.clone();
    let other = std::thread::spawn(move || {
        let a = host.allocate(4096).expect("memory");
        let addr = a.addr();
        host.free(a).expect("freed");
        addr
    });
    assert_eq!(other.join().expect("no panic"), addr);
    rig.finish();
}

#[test]
fn many_threads_leave_a_consistent_allocator() {
    let backend = MockBackend::builder().strict().ends_by_chance(1, 0.5).build();
    let rig = Rig::new(backend, HostConfig { shards: 8, batch_blocks_max: 4, ..config() });
    std::thread::scope(|scope| {
        for seed in 0..4_u64 {
            let rig = &rig;
            scope.spawn(move || busy_thread(rig, seed));
        }
    });
    rig.check();
    rig.finish();
}

/// Allocates, uses and frees; every hand-out is judged.
fn busy_thread(rig: &Rig, seed: u64) {
    let stream = rig.stream();
    let mut random = mock_backend::Rng::new(seed);
    let mut held = Vec::new();
    for _ in 0..2000 {
        if held.len() > 20 || (random.chance(0.4) && !held.is_empty()) {
            let at = random.below(held.len() as u64) as usize;
            rig.free(held.swap_remove(at));
        } else {
            let below = if random.chance(0.1) { 4 * MIB } else { 64 * KIB };
            let bytes = 1 + random.below(below);
            let block = rig.allocate(bytes);
            if random.chance(0.3) {
                rig.use_on(&block, &stream);
            }
            held.push(block);
        }
        if random.chance(0.02) {
            rig.backend.pass(&stream);
        }
    }
    held.into_iter().for_each(|block| rig.free(block));
    rig.backend.pass(&stream);
}

#[test]
fn a_small_request_spares_a_large_free_segment_while_little_is_free() {
    let rig = ours();
    let used = rig.allocate(GIB);
    let idle = rig.allocate(64 * MIB);
    let addr = idle.addr();
    rig.free(idle);
    let pins = rig.calls(Call::Pin);
    let small = rig.allocate(3 * MIB);
    assert_eq!(rig.calls(Call::Pin), pins + 1, "pinned for it");
    let more = rig.allocate(24 * MIB);
    assert_eq!((rig.calls(Call::Pin), more.addr()), (pins + 1, addr), "cut from the segment");
    rig.free(more);
    rig.free(used);
    rig.host.process_events().expect("merged");
    let small_too = rig.allocate(30 * MIB);
    assert_eq!(small_too.addr(), addr, "much is free: the best fit is cut");
    rig.check();
    rig.free(small);
    rig.free(small_too);
    rig.finish();
}

#[test]
fn one_large_segment_takes_the_place_of_small_free_ones() {
    let rig = ours();
    let blocks = [20, 30, 40].map(|mib| rig.allocate(mib * MIB));
    blocks.into_iter().for_each(|block| rig.free(block));
    let large = rig.allocate(60 * MIB);
    assert_eq!(rig.pinned(), 90 * MIB, "40 and 30 gave way to 70; 20 were not needed for that");
    assert_eq!(rig.calls(Call::Unpin), 2);
    rig.check();
    rig.free(large);
    rig.finish();
}
