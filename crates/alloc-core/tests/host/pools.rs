//! Private pools: memory for captured graphs.

use crate::support::*;
use alloc_core::backend::Stream;
use alloc_core::host::{HostConfig, HostError};
use alloc_core::{PoolId, StreamId};
use mock_backend::{Call, Fault, MockStream};

const POOL: PoolId = PoolId(1, 0);
const OTHER: PoolId = PoolId(2, 0);

fn only(stream: &MockStream) -> impl Fn(StreamId) -> bool + Send + Sync + use<> {
    let wanted = stream.id();
    move |id| id == wanted
}

#[test]
fn requests_for_a_captured_stream_go_to_its_pool() {
    for rig in both() {
        let (inside, outside) = (rig.stream(), rig.stream());
        let cached = rig.allocate(4096);
        let addr = cached.addr();
        rig.free(cached);
        rig.host.begin_allocate_to_pool(POOL, only(&inside)).expect("begun");
        let a = rig.allocate_for(4096, &inside);
        assert_ne!(a.addr(), addr, "cached memory of the default pool stays there");
        let b = rig.allocate_for(4096, &outside);
        assert_eq!(b.addr(), addr);
        rig.host.end_allocate_to_pool(POOL).expect("ended");
        let (a_addr, c) = (a.addr(), rig.allocate_for(4096, &inside));
        rig.free(a);
        let d = rig.allocate_for(4096, &inside);
        assert_ne!(d.addr(), a_addr, "what was freed went back to the private pool");
        [b, c, d].into_iter().for_each(|x| rig.free(x));
        rig.host.release_pool(POOL).expect("released");
        rig.check();
        rig.finish();
    }
}

#[test]
fn the_first_capture_whose_filter_accepts_wins() {
    for rig in both() {
        let stream = rig.stream();
        rig.host.begin_allocate_to_pool(OTHER, |_| false).expect("begun");
        rig.host.begin_allocate_to_pool(POOL, |_| true).expect("begun");
        let late = PoolId(3, 0);
        rig.host.begin_allocate_to_pool(late, |_| true).expect("begun");
        let a = rig.allocate_for(4096, &stream);
        let addr = a.addr();
        rig.free(a);
        rig.host.end_allocate_to_pool(POOL).expect("ended");
        let b = rig.allocate_for(4096, &stream);
        assert_ne!(b.addr(), addr, "now the later one serves");
        rig.free(b);
        for pool in [OTHER, late] {
            rig.host.end_allocate_to_pool(pool).expect("ended");
        }
        for pool in [POOL, OTHER, late] {
            rig.host.release_pool(pool).expect("released");
        }
        rig.finish();
    }
}

#[test]
fn memory_returns_when_every_use_of_the_pool_is_released() {
    for rig in both() {
        let stream = rig.stream();
        for _ in 0..2 {
            rig.host.begin_allocate_to_pool(POOL, only(&stream)).expect("begun");
            let a = rig.allocate_for(4096, &stream);
            rig.use_on(&a, &stream);
            rig.free(a);
            rig.host.end_allocate_to_pool(POOL).expect("ended");
        }
        rig.backend.pass(&stream);
        rig.host.release_pool(POOL).expect("one use less");
        rig.host.empty_cache().expect("emptied");
        assert!(rig.pinned() > 0, "one graph still uses it");
        rig.check();
        rig.host.release_pool(POOL).expect("the last");
        rig.host.empty_cache().expect("emptied");
        assert_eq!(rig.pinned(), 0);
        let error = rig.host.release_pool(POOL).expect_err("gone");
        assert!(matches!(error, HostError::UnknownPool(POOL)));
        rig.finish();
    }
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    for rig in both() {
        assert!(matches!(
            rig.host.end_allocate_to_pool(POOL),
            Err(HostError::PoolIsNotRecording(POOL))
        ));
        rig.host.begin_allocate_to_pool(POOL, |_| false).expect("begun");
        let again = rig.host.begin_allocate_to_pool(POOL, |_| false);
        assert!(matches!(again, Err(HostError::PoolIsRecording(POOL))));
        let early = rig.host.release_pool(POOL);
        assert!(matches!(early, Err(HostError::PoolIsRecording(POOL))), "capture is underway");
        rig.host.end_allocate_to_pool(POOL).expect("ended");
        rig.host.release_pool(POOL).expect("one use: the failed begin counted for none");
        rig.finish();
    }
}

/// A block of the default pool that captured work uses is kept, too.
#[test]
fn a_captured_use_keeps_memory_of_any_pool() {
    for rig in both() {
        let (stream, eager) = (rig.stream(), rig.stream());
        let a = rig.allocate(4096);
        let addr = a.addr();
        rig.host.begin_allocate_to_pool(POOL, only(&stream)).expect("begun");
        rig.use_on(&a, &eager);
        rig.use_on(&a, &stream);
        rig.host.end_allocate_to_pool(POOL).expect("ended");
        rig.free(a);
        rig.backend.sync();
        rig.host.process_events().expect("asked");
        rig.check();
        let b = rig.allocate(4096);
        assert_ne!(b.addr(), addr, "the graph may run again");
        rig.host.release_pool(POOL).expect("released");
        rig.host.process_events().expect("asked");
        rig.free(b);
        let again = [(); 2].map(|()| rig.allocate(4096));
        assert!(again.iter().any(|x| x.addr() == addr), "the graph is gone");
        again.into_iter().for_each(|x| rig.free(x));
        rig.finish();
    }
}

/// Replays on the captured stream may still run when the graph is destroyed.
#[test]
fn a_released_pool_waits_for_work_that_is_queued() {
    for rig in both() {
        let stream = rig.stream();
        rig.host.begin_allocate_to_pool(POOL, only(&stream)).expect("begun");
        let a = rig.allocate_for(4096, &stream);
        let addr = a.addr();
        rig.host.record_use(&a, &stream).expect("live");
        rig.host.end_allocate_to_pool(POOL).expect("ended");
        // A replay.
        rig.launch_on(&a, &stream);
        rig.free(a);
        rig.host.release_pool(POOL).expect("released");
        rig.host.process_events().expect("asked");
        let blocks = [(); 3].map(|()| rig.allocate(4096));
        assert!(blocks.iter().all(|block| block.addr() != addr));
        rig.check();
        rig.backend.pass(&stream);
        blocks.into_iter().for_each(|block| rig.free(block));
        rig.finish();
    }
}

/// Memory used before a capture begins may be freed during it: no event is recorded on a stream
/// that is being captured.
#[test]
fn nothing_is_recorded_on_a_stream_while_it_is_captured() {
    for mut config in [HostConfig::pytorch(), HostConfig::ours()] {
        config.batch_blocks_max = 1;
        let rig = Rig::new(machine(), config);
        let stream = rig.stream();
        let a = rig.allocate(4096);
        rig.use_on(&a, &stream);
        rig.backend.begin_capture(&stream, mock_backend::CaptureMode::Relaxed).expect("begun");
        rig.host.begin_allocate_to_pool(POOL, only(&stream)).expect("begun");
        rig.free(a);
        rig.host.process_events().expect("nothing to do");
        assert_eq!(rig.calls(Call::Record), 0);
        rig.check();
        rig.host.end_allocate_to_pool(POOL).expect("ended");
        rig.backend.end_capture(&stream).expect("valid");
        rig.backend.pass(&stream);
        rig.host.process_events().expect("recorded and reached");
        assert_eq!(rig.host.stats().draining_bytes, 0);
        rig.host.release_pool(POOL).expect("released");
        rig.finish();
    }
}

#[test]
fn a_record_that_fails_at_release_is_made_up_for() {
    for rig in both() {
        let stream = rig.stream();
        rig.host.begin_allocate_to_pool(POOL, only(&stream)).expect("begun");
        let a = rig.allocate_for(4096, &stream);
        rig.use_on(&a, &stream);
        rig.free(a);
        rig.host.end_allocate_to_pool(POOL).expect("ended");
        rig.backend.pass(&stream);
        rig.backend.set_faults([Fault::nth(1).of(Call::Record)]);
        rig.host.release_pool(POOL).expect("released all the same");
        rig.check();
        rig.host.process_events().expect("recorded now");
        assert_eq!(rig.host.stats().draining_bytes, 0);
        rig.host.empty_cache().expect("emptied");
        assert_eq!(rig.pinned(), 0);
        rig.finish();
    }
}

#[test]
fn live_memory_of_a_released_pool_comes_back_when_it_is_freed() {
    for rig in both() {
        let stream = rig.stream();
        rig.host.begin_allocate_to_pool(POOL, only(&stream)).expect("begun");
        let small = rig.allocate_for(4096, &stream);
        let large = rig.allocate_for(8 * MIB, &stream);
        rig.host.end_allocate_to_pool(POOL).expect("ended");
        rig.host.release_pool(POOL).expect("released");
        rig.check();
        // The pool's id may be used again meanwhile, for another pool.
        rig.host.begin_allocate_to_pool(POOL, |_| false).expect("begun");
        rig.use_on(&large, &stream);
        rig.free(small);
        rig.free(large);
        rig.backend.pass(&stream);
        rig.host.process_events().expect("asked");
        rig.host.empty_cache().expect("emptied");
        assert_eq!(rig.pinned(), 0);
        rig.check();
        rig.host.end_allocate_to_pool(POOL).expect("ended");
        rig.host.release_pool(POOL).expect("released");
        rig.finish();
    }
}

#[test]
fn ours_reuses_the_memory_of_a_released_pool_without_unpinning_it() {
    let rig = ours();
    let stream = rig.stream();
    rig.host.begin_allocate_to_pool(POOL, only(&stream)).expect("begun");
    let a = rig.allocate_for(8 * MIB, &stream);
    let addr = a.addr();
    rig.free(a);
    rig.host.end_allocate_to_pool(POOL).expect("ended");
    rig.host.release_pool(POOL).expect("released");
    let b = rig.allocate(8 * MIB);
    assert_eq!(b.addr(), addr);
    assert_eq!(rig.calls(Call::Pin), 1);
    rig.check();
    rig.free(b);
    rig.finish();
}
