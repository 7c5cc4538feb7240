//! PyTorch's rules for pinned memory, one test each: events, the cache, the backend, settings.
//! Where the policies differ, both are tested.

use crate::support::*;
use alloc_core::DeviceId;
use alloc_core::backend::ErrorKind;
use alloc_core::host::{HostConfig, HostError, HostOp, NodeId, PinMethod, Place};
use mock_backend::{Call, Fault, Work};

// Process events.

#[test]
fn an_event_that_is_not_reached_holds_up_nobody_else() {
    let rig = pytorch();
    let (stuck, quick) = (rig.stream(), rig.stream());
    let a = rig.allocate(64);
    rig.use_on(&a, &stuck);
    rig.free(a);
    let blocks = [(); 3].map(|()| rig.allocate(4096));
    for block in blocks {
        rig.use_on(&block, &quick);
        rig.free(block);
    }
    rig.backend.pass(&quick);
    rig.host.process_events().expect("asked");
    let stats = rig.host.stats();
    assert_eq!(stats.draining_bytes, 64, "only the stuck one is left");
    rig.backend.pass(&stuck);
    rig.finish();
}

#[test]
fn one_pass_asks_an_unready_stream_once() {
    let rig = pytorch();
    let stream = rig.stream();
    let blocks = [(); 5].map(|()| rig.allocate(64));
    for block in blocks {
        rig.use_on(&block, &stream);
        rig.free(block);
    }
    let before = rig.calls(Call::Query);
    rig.host.process_events().expect("asked");
    assert_eq!(rig.calls(Call::Query) - before, 1, "later events of the stream cannot be reached");
    rig.backend.pass(&stream);
    rig.host.process_events().expect("asked");
    assert_eq!(rig.host.stats().draining_bytes, 0);
    rig.finish();
}

#[test]
fn blocks_come_back_in_the_order_of_their_frees() {
    let rig = pytorch();
    let (s1, s2) = (rig.stream(), rig.stream());
    let blocks = [(); 3].map(|()| rig.allocate(64));
    let order = [1, 0, 2].map(|i| blocks[i].addr());
    let mut blocks: Vec<_> = blocks.into_iter().map(Some).collect();
    for (i, stream) in [(1, &s1), (0, &s2), (2, &s1)] {
        let block = blocks[i].take().expect("once");
        rig.use_on(&block, stream);
        rig.free(block);
    }
    rig.backend.sync();
    let again = [(); 3].map(|()| rig.allocate(64));
    let youngest_first = [2, 1, 0].map(|i| order[i]);
    assert_eq!(again.each_ref().map(|block| block.addr()), youngest_first);
    again.into_iter().for_each(|block| rig.free(block));
    rig.finish();
}

#[test]
fn one_class_is_processed_until_one_block_is_free() {
    let rig = pytorch();
    let stream = rig.stream();
    let small = [(); 2].map(|()| rig.allocate(64));
    let large = rig.allocate(4096);
    for block in [large].into_iter().chain(small) {
        rig.use_on(&block, &stream);
        rig.free(block);
    }
    rig.backend.pass(&stream);
    rig.host.process_events_for(64).expect("asked");
    let stats = rig.host.stats();
    assert_eq!(stats.draining_bytes, 4096 + 64, "one block of the class was enough");
    rig.host.process_events_for(64).expect("asked");
    rig.host.process_events_for(64).expect("asked");
    assert_eq!(rig.host.stats().draining_bytes, 4096, "other classes are left alone");
    rig.finish();
}

#[test]
fn a_failed_query_does_not_stop_the_others() {
    for rig in both() {
        let (bad, good) = (rig.stream(), rig.stream());
        for stream in [&bad, &good] {
            let a = rig.allocate(16 * MIB);
            rig.use_on(&a, stream);
            rig.free(a);
        }
        rig.backend.pass(&bad);
        rig.backend.pass(&good);
        rig.backend.set_faults([Fault::nth(1).of(Call::Query)]);
        rig.host.process_events().expect_err("the first query failed");
        assert_eq!(rig.host.stats().draining_bytes, 16 * MIB);
        rig.check();
        rig.host.process_events().expect("asked again");
        assert_eq!(rig.host.stats().draining_bytes, 0);
        rig.finish();
    }
}

// Empty cache.

#[test]
fn empty_cache_gives_back_what_is_free_and_only_that() {
    for rig in both() {
        let stream = rig.stream();
        let live = rig.allocate(64 * MIB);
        let waiting = rig.allocate(64 * MIB);
        let free = rig.allocate(64 * MIB);
        rig.use_on(&waiting, &stream);
        rig.free(waiting);
        rig.free(free);
        rig.host.empty_cache().expect("given back");
        assert_eq!(rig.pinned(), 128 * MIB);
        rig.backend.pass(&stream);
        rig.host.empty_cache().expect("given back");
        assert_eq!(rig.pinned(), 64 * MIB, "events are processed first");
        rig.free(live);
        rig.host.empty_cache().expect("given back");
        assert_eq!(rig.pinned(), 0);
        rig.finish();
    }
}

#[test]
fn what_the_system_does_not_take_back_stays_cached() {
    for rig in both() {
        for _ in 0..2 {
            let [a, b] = [(); 2].map(|()| rig.allocate(64 * MIB));
            rig.free(a);
            rig.free(b);
        }
        rig.backend.set_faults([Fault::nth(1).of(Call::Unpin)]);
        rig.host.empty_cache().expect_err("one unpin failed");
        rig.check();
        let stats = rig.host.stats();
        assert_eq!((stats.allocated_bytes.current, stats.unpin_failures), (64 << 20, 1));
        let a = rig.allocate(64 * MIB);
        assert_eq!(rig.calls(Call::Pin), 2, "it still serves");
        rig.free(a);
        rig.finish();
    }
}

#[test]
fn empty_cache_works_in_both_modes_and_after_toggling() {
    for rig in both() {
        for register in ["True", "False", "True"] {
            let conf = format!("pinned_use_cuda_host_register:{register}");
            rig.host.apply(&conf).expect("valid");
            let a = rig.allocate(8 * MIB);
            rig.free(a);
            rig.host.empty_cache().expect("given back");
            assert_eq!(rig.pinned(), 0);
        }
        rig.finish();
    }
}

// Backend calls.

#[test]
fn pinning_fails_only_after_events_cache_and_waiting_were_tried() {
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        let machine = mock_backend::MockBackend::builder().strict().host_node(128 * MIB).build();
        let rig = Rig::new(machine, config);
        let stream = rig.stream();
        // Half is cached in a size that does not fit, half waits for a stream.
        let [a, b] = [(); 2].map(|()| rig.allocate(64 * MIB));
        rig.use_on(&b, &stream);
        rig.free(a);
        rig.free(b);
        let c = rig.allocate(128 * MIB);
        assert_eq!(c.bytes(), 128 * MIB);
        assert_eq!(rig.host.stats().num_ooms, 0);
        let error = rig.try_allocate(MIB).expect_err("full");
        let HostError::OutOfMemory(report) = error else { panic!("{error}") };
        assert_eq!((report.requested, report.reserved, report.cached), (MIB, 128 * MIB, 0));
        assert_eq!((report.active, report.draining), (128 * MIB, 0));
        assert_eq!(report.source.map(|e| e.call()), Some(Call::Pin));
        assert_eq!(rig.host.stats().num_ooms, 1);
        rig.check();
        rig.free(c);
        rig.finish();
    }
}

#[test]
fn another_failure_to_pin_is_not_out_of_memory() {
    for rig in both() {
        rig.backend.set_faults([Fault::from(1).of(Call::Pin).kind(ErrorKind::DeviceLost)]);
        let error = rig.try_allocate(MIB).expect_err("lost");
        assert!(matches!(error, HostError::Backend { op: HostOp::Pin, .. }));
        assert_eq!(rig.calls(Call::Pin), 1, "asked once");
        assert!(!error.is_out_of_memory());
        rig.backend.set_faults([]);
        rig.finish();
    }
}

#[test]
fn the_method_of_pinning_follows_the_setting_of_the_moment() {
    let rig = pytorch_with("pinned_num_register_threads:8");
    let a = rig.allocate(64);
    rig.host.apply("pinned_use_cuda_host_register:True").expect("valid");
    let b = rig.allocate(64);
    let methods: Vec<_> = rig.backend.pins().iter().map(|(_, request)| request.method).collect();
    assert_eq!(methods, [PinMethod::Allocate, PinMethod::Register { threads: 8 }]);
    rig.free(a);
    rig.free(b);
    rig.finish();
}

#[test]
fn a_bad_settings_string_changes_nothing() {
    let rig = pytorch();
    rig.host.apply("pinned_use_cuda_host_register:True,pinned_what:1").expect_err("unknown key");
    assert_eq!(rig.host.config(), HostConfig::pytorch());
    rig.finish();
}

#[test]
fn the_reserve_serves_until_it_is_full() {
    let rig = pytorch_with("pinned_reserve_segment_size_mb:1");
    let a = rig.allocate(600 * KIB);
    assert_eq!((a.bytes(), rig.pinned()), (MIB, MIB), "the reserve is pinned, and used whole");
    let b = rig.allocate(600 * KIB);
    assert_eq!(rig.pinned(), 2 * MIB, "full: pinned the usual way");
    rig.free(a);
    rig.free(b);
    rig.finish();
}

#[test]
fn the_reserve_takes_memory_back_when_the_cache_is_emptied() {
    let rig = pytorch_with("pinned_reserve_segment_size_mb:1");
    for _ in 0..3 {
        let blocks: Vec<_> = (0..4).map(|_| rig.allocate(256 * KIB)).collect();
        assert_eq!(rig.pinned(), MIB, "all four from the reserve");
        blocks.into_iter().for_each(|block| rig.free(block));
        rig.host.empty_cache().expect("given back");
        assert_eq!(rig.pinned(), MIB, "the reserve itself stays");
        rig.check();
    }
    assert_eq!(rig.calls(Call::Pin), 1);
    assert_eq!(rig.host.stats().num_host_alloc(), 1, "pieces are no driver calls");
    rig.finish();
}

#[test]
fn without_room_for_the_reserve_there_is_none() {
    let machine = mock_backend::MockBackend::builder().strict().host_node(MIB).build();
    let mut config = HostConfig::pytorch();
    config.reserve_bytes = 2 * MIB;
    let rig = Rig::new(machine, config);
    let a = rig.allocate(MIB);
    rig.free(a);
    rig.finish();
}

// Thresholds.

#[test]
fn sizes_above_the_round_threshold_are_exact() {
    let rig = pytorch_with("pinned_max_round_threshold_mb:64");
    let a = rig.allocate(80 * MIB);
    assert_eq!((a.bytes(), rig.pinned()), (80 * MIB, 80 * MIB));
    let b = rig.allocate(40 * MIB);
    assert_eq!(b.bytes(), 64 * MIB);
    rig.free(a);
    rig.free(b);
    rig.finish();
}

#[test]
fn blocks_above_the_cached_threshold_leave_when_they_are_freed() {
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        let mut config = config;
        config.apply("pinned_max_cached_size_mb:16").expect("valid");
        let rig = Rig::new(machine(), config);
        let stream = rig.stream();
        let a = rig.allocate(17 * MIB);
        assert_eq!((a.bytes(), rig.pinned()), (17 * MIB, 17 * MIB), "nor are they rounded");
        rig.free(a);
        assert_eq!(rig.pinned(), 0);
        let b = rig.allocate(17 * MIB);
        rig.use_on(&b, &stream);
        rig.free(b);
        assert_eq!(rig.pinned(), 17 * MIB, "not before its event");
        rig.backend.pass(&stream);
        rig.host.process_events().expect("asked");
        assert_eq!(rig.pinned(), 0);
        let c = rig.allocate(16 * MIB);
        rig.free(c);
        assert_eq!(rig.pinned(), 16 * MIB, "smaller ones are kept");
        rig.check();
        rig.finish();
    }
}

#[test]
fn a_cached_threshold_of_zero_keeps_nothing() {
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        let mut config = config;
        config.apply("pinned_max_cached_size_mb:0").expect("valid");
        let rig = Rig::new(machine(), config);
        for bytes in [1, 4096, MIB] {
            let a = rig.allocate(bytes);
            rig.free(a);
            assert_eq!(rig.pinned(), 0);
        }
        rig.finish();
    }
}

#[test]
fn what_cannot_leave_when_freed_stays_cached() {
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        let mut config = config;
        config.apply("pinned_max_cached_size_mb:0").expect("valid");
        let rig = Rig::new(machine(), config);
        let a = rig.allocate(MIB);
        rig.backend.set_faults([Fault::nth(1).of(Call::Unpin)]);
        rig.free(a);
        assert_eq!((rig.pinned(), rig.host.stats().unpin_failures), (MIB, 1));
        rig.check();
        rig.host.empty_cache().expect("given back now");
        assert_eq!(rig.pinned(), 0);
        rig.finish();
    }
}

// Copying.

#[test]
fn copies_stay_inside_what_was_asked_for() {
    for rig in both() {
        let mut a = rig.allocate(1000);
        let b = rig.allocate(2000);
        rig.host.copy_data((&mut a, 0), (&b, 1000), 1000).expect("inside");
        rig.host.copy_data((&mut a, 1000), (&b, 0), 0).expect("nothing");
        for (to, from, bytes) in [(1, 0, 1000), (0, 1001, 1000), (0, 0, u64::MAX), (5000, 0, 1)] {
            let error = rig.host.copy_data((&mut a, to), (&b, from), bytes).expect_err("outside");
            assert!(matches!(error, HostError::BadRange { .. }));
        }
        assert_eq!(rig.calls(Call::Copy), 1);
        rig.free(a);
        rig.free(b);
        rig.finish();
    }
}

// Places.

#[test]
fn places_that_do_not_exist_are_refused() {
    for rig in both() {
        for place in [Place::Device(DeviceId::new(7)), Place::Node(NodeId::new(1))] {
            let error = rig.host.allocate_on(64, place).expect_err("no such place");
            assert!(matches!(error, HostError::NoSuchPlace(p) if p == place));
        }
        rig.finish();
    }
}

#[test]
fn work_queued_but_not_recorded_is_the_clients_own_mistake() {
    // The judge sees it: this is what recording is for.
    let backend = mock_backend::MockBackend::new();
    let rig = Rig::new(backend, HostConfig::ours());
    let stream = rig.stream();
    let a = rig.allocate(4096);
    rig.backend.launch(&stream, Work::new().touching(a.addr(), 4096).endless());
    rig.free(a);
    let b = rig.allocate(4096);
    assert_eq!(rig.backend.take_violations()[0].rule, mock_backend::Rule::EarlyReuse);
    rig.free(b);
}

#[test]
fn the_limit_is_exact() {
    let config = HostConfig { reserved_bytes_max: Some(100), ..HostConfig::pytorch() };
    let rig = Rig::new(machine(), config);
    let blocks = [64, 32, 4].map(|bytes| rig.allocate(bytes));
    assert_eq!(rig.pinned(), 100);
    assert!(rig.try_allocate(1).expect_err("one byte too many").is_out_of_memory());
    blocks.into_iter().for_each(|block| rig.free(block));
    rig.finish();
}
