//! Policy `ours`: one event for many freed blocks, and what that may cost.

use crate::support::*;
use alloc_core::host::HostConfig;
use mock_backend::{Call, MockBackend};

/// A program that copies one buffer after the other gets by with one event for many of them, and
/// pins little for it.
#[test]
fn few_events_serve_many_copies() {
    let rig = ours();
    let stream = rig.stream();
    for _ in 0..200 {
        let a = rig.allocate(MIB);
        rig.use_on(&a, &stream);
        rig.free(a);
        rig.backend.pass(&stream);
    }
    assert!(rig.calls(Call::Record) <= 200 / 8, "{} events", rig.calls(Call::Record));
    assert!(rig.calls(Call::Query) <= 2 * 200 / 8, "{} questions", rig.calls(Call::Query));
    assert!(rig.pinned() <= 24 * MIB, "{} bytes", rig.pinned());
    rig.finish();
}

/// So do large blocks, as soon as there are some: half of what is pinned may wait for one event.
#[test]
fn large_blocks_share_events() {
    let rig = ours();
    let stream = rig.stream();
    for round in 0..600 {
        let a = rig.allocate(16 * MIB);
        rig.use_on(&a, &stream);
        rig.free(a);
        if round % 10 == 0 {
            rig.backend.pass(&stream);
        }
    }
    assert!(rig.calls(Call::Record) <= 600 / 6, "{} events", rig.calls(Call::Record));
    assert!(rig.pinned() <= 20 * 16 * MIB, "{} bytes", rig.pinned());
    rig.finish();
}

/// Frees and asks for one size, round after round; the stream has always done by then what it was
/// given. Time passes besides what the driver's calls take.
fn use_over_and_over(rig: &Rig, bytes: u64, rounds: u32, pause_ns: u64) {
    let stream = rig.stream();
    for _ in 0..rounds {
        let a = rig.allocate(bytes);
        rig.use_on(&a, &stream);
        rig.free(a);
        rig.backend.pass(&stream);
        rig.backend.advance(pause_ns);
    }
}

/// Where they follow each other closely, enough is pinned that large blocks share events, too.
#[test]
fn events_that_come_too_often_are_shared() {
    for (mib, per_event, most_mib) in [(4, 8, 40), (16, 8, 144), (32, 8, 288), (64, 4, 256)] {
        let rig = Rig::new(MockBackend::builder().strict().build(), HostConfig::ours());
        use_over_and_over(&rig, mib * MIB, 20_000, 0);
        let [records, queries] = [Call::Record, Call::Query].map(|call| rig.calls(call));
        use_over_and_over(&rig, mib * MIB, 1000, 0);
        let calls = [rig.calls(Call::Record) - records, rig.calls(Call::Query) - queries];
        assert!(calls.into_iter().max() <= Some(1000 / per_event + 4), "{mib} MiB: {calls:?}");
        assert!(rig.pinned() <= most_mib * MIB, "{mib} MiB: {} bytes", rig.pinned());
        rig.finish();
    }
}

/// A copy of a buffer takes longer than its event: nothing is pinned to save the event.
#[test]
fn events_that_come_seldom_cost_no_memory() {
    let rig = Rig::new(MockBackend::builder().strict().build(), HostConfig::ours());
    use_over_and_over(&rig, 16 * MIB, 20_000, 25_000);
    assert!(rig.pinned() <= 32 * MIB, "{} bytes", rig.pinned());
    rig.finish();
}

/// Blocks that gather are found when there is no more to pin.
#[test]
fn blocks_that_gather_serve_when_the_limit_is_reached() {
    let limit = HostConfig { reserved_bytes_max: Some(48 * MIB), ..HostConfig::ours() };
    let rig = Rig::new(MockBackend::builder().strict().build(), limit);
    use_over_and_over(&rig, 16 * MIB, 5000, 0);
    assert_eq!(rig.pinned(), 48 * MIB);
    let all: Vec<_> = (0..3).map(|_| rig.allocate(16 * MIB)).collect();
    all.into_iter().for_each(|block| rig.free(block));
    rig.finish();
}

/// A batch that is open costs no memory when a large request finds nothing.
#[test]
fn open_batches_are_closed_for_large_requests() {
    let rig = ours();
    let stream = rig.stream();
    for _ in 0..4 {
        let blocks: Vec<_> = (0..8).map(|_| rig.allocate(2 * MIB)).collect();
        for block in blocks {
            rig.use_on(&block, &stream);
            rig.free(block);
        }
        rig.backend.pass(&stream);
    }
    assert!(rig.pinned() <= 18 * MIB, "{} bytes", rig.pinned());
    rig.finish();
}
