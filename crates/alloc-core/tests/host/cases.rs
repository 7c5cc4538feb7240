//! Reports of users of pinned memory, as sequences of operations with the behaviour that is right.

use crate::support::*;
use alloc_core::PoolId;
use alloc_core::host::{HostAllocator, HostConfig, Place};
use mock_backend::{Call, MockBackend};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

/// A request of 200 MiB must not get a cached block of 150 MiB of the same class.
#[test]
fn case_j1_a_block_is_never_smaller_than_the_request() {
    let conf = "pinned_max_round_threshold_mb:128,pinned_max_cached_size_mb:1024";
    let mut config = HostConfig::ours();
    config.apply(conf).expect("valid");
    for rig in [pytorch_with(conf), Rig::new(machine(), config)] {
        let h = rig.allocate(150 * MIB);
        let active = |rig: &Rig| rig.host.stats().active_bytes.current as u64;
        assert_eq!(active(&rig), h.bytes());
        rig.free(h);
        assert_eq!(active(&rig), 0);
        let g = rig.allocate(200 * MIB);
        assert!(g.bytes() >= 200 * MIB);
        assert_eq!(active(&rig), g.bytes(), "by the block, not by the request");
        rig.free(g);
        let before = rig.calls(Call::Pin);
        let again = rig.allocate(140 * MIB);
        assert_eq!(rig.calls(Call::Pin), before, "served by one of the two cached blocks");
        rig.check();
        rig.free(again);
        rig.finish();
    }
}

/// Twice the memory for a little more than a power of two.
#[test]
fn case_j2_large_requests_are_not_rounded_to_a_power_of_two() {
    let bytes = 4_347_592_704 * 2;
    let rig = pytorch();
    let h = rig.allocate(bytes);
    assert_eq!(h.bytes(), 16 * GIB, "the documented rule");
    rig.free(h);
    rig.finish();

    let rig = pytorch_with("pinned_max_round_threshold_mb:1024");
    let h = rig.allocate(bytes);
    assert_eq!((h.bytes(), rig.pinned()), (bytes, bytes), "exact above the threshold");
    rig.free(h);
    rig.finish();

    let rig = ours();
    let h = rig.allocate(bytes);
    assert!(rig.pinned() < bytes + bytes / 64, "{} for {bytes}", rig.pinned());
    rig.free(h);
    rig.finish();
}

/// A small request must not take a huge cached block.
#[test]
fn case_j2_a_small_request_leaves_a_huge_block_alone() {
    let rig = pytorch();
    let huge = rig.allocate(4 * GIB);
    rig.free(huge);
    let small = rig.allocate(10 * KIB);
    assert_eq!(small.bytes(), 16 * KIB);
    let huge = rig.allocate(4 * GIB);
    assert_eq!(rig.pinned(), 4 * GIB + 16 * KIB);
    rig.free(huge);
    rig.free(small);
    rig.finish();

    // Here it takes a piece of it, and the rest still serves.
    let rig = ours();
    let huge = rig.allocate(4 * GIB);
    rig.free(huge);
    let small = rig.allocate(10 * KIB);
    let rest = rig.allocate(4 * GIB - 64 * MIB);
    assert_eq!(rig.pinned(), 4 * GIB);
    rig.free(rest);
    rig.free(small);
    rig.finish();
}

/// The event for a slice of a buffer must not be dropped.
#[test]
fn case_j4_a_use_of_a_slice_protects_the_buffer() {
    for rig in both() {
        let stream = rig.stream();
        for by_slice in [true, false] {
            let h = rig.allocate(MIB);
            let addr = h.addr();
            let found = if by_slice {
                rig.host.record_event(addr + 4096, Some(h.context()), &stream)
            } else {
                rig.host.record_event(addr, None, &stream)
            };
            assert!(found);
            rig.launch_on(&h, &stream);
            rig.free(h);
            let g = rig.allocate(MIB);
            assert_ne!(g.addr(), addr);
            rig.free(g);
        }
        let unknown = alloc_core::Addr::new(0xdead_0000_0000);
        assert!(!rig.host.record_event(unknown, None, &stream), "no effect, no crash");
        rig.backend.sync();
        rig.finish();
    }
}

/// The background thread must not outlive the allocator.
#[test]
fn case_j5_the_thread_is_joined_before_the_allocator_is_gone() {
    let backend = MockBackend::builder().strict().build();
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        let config = HostConfig { background: true, ..config };
        for _ in 0..500 {
            let host = HostAllocator::new(backend.clone(), config.clone()).expect("valid");
            let h = host.allocate(64).expect("memory");
            host.free(h).expect("freed");
            drop(host);
            // Whatever a thread that still ran did would show in the log or leak an event.
            let leaks = backend.leaks();
            assert!(leaks.is_empty(), "{leaks:?}");
        }
    }
    let calls = backend.costs().total_calls();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(backend.costs().total_calls(), calls, "no use after drop");
}

/// What a captured copy reads must not change while the graph lives.
#[test]
fn case_j7_memory_of_a_captured_copy_is_kept_until_the_graph_is_gone() {
    for rig in both() {
        let stream = rig.stream();
        let captured = alloc_core::backend::Stream::id(&stream);
        let pool = PoolId(1, 0);
        rig.backend.begin_capture(&stream, mock_backend::CaptureMode::Global).expect("begun");
        rig.host.begin_allocate_to_pool(pool, move |id| id == captured).expect("begun");
        let h = rig.allocate_for(4 * KIB, &stream);
        let addr = h.addr();
        rig.use_on(&h, &stream);
        rig.free(h);
        let k = rig.allocate_for(4 * KIB, &stream);
        assert_ne!(k.addr(), addr, "a replay would read what is written now");
        let unused = k.addr();
        rig.free(k);
        let again = rig.allocate_for(4 * KIB, &stream);
        assert_eq!(again.addr(), unused, "no copy reads it: reuse is allowed");
        rig.free(again);
        rig.host.process_events().expect("nothing to ask while capturing");
        rig.host.end_allocate_to_pool(pool).expect("ended");
        rig.backend.end_capture(&stream).expect("the capture is still valid");
        rig.check();
        let outside = rig.allocate(4 * KIB);
        assert_ne!(outside.addr(), addr);
        rig.host.empty_cache().expect("emptied");
        assert!(rig.host.is_pinned(addr), "the graph lives");
        rig.host.release_pool(pool).expect("released");
        rig.host.process_events().expect("asked");
        assert_eq!(rig.host.stats().draining_bytes, 0);
        rig.free(outside);
        rig.host.empty_cache().expect("emptied");
        assert_eq!(rig.pinned(), 0, "both went back");
        rig.check();
        rig.finish();
    }
}

/// No lock may be held over a backend call: the backend may call back, or take a lock that another
/// thread holds while it calls the allocator.
#[test]
fn case_j8_every_backend_call_may_call_back() {
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        let (done, finished) = mpsc::channel();
        let worker = std::thread::spawn(move || {
            call_back_from_everywhere(config);
            done.send(()).expect("the test waits");
        });
        let outcome = finished.recv_timeout(Duration::from_secs(60));
        assert!(outcome != Err(mpsc::RecvTimeoutError::Timeout), "deadlock");
        worker.join().expect("no panic");
    }
}

fn call_back_from_everywhere(config: HostConfig) {
    let backend = MockBackend::builder().host_node(64 * MIB).build();
    let mut config = config;
    config.batch_blocks_max = 1;
    let rig = Rig::new(backend, config);
    let inner: Arc<OnceLock<Host>> = Arc::default();
    inner.set(rig.host.clone()).expect("once");
    let depth = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let calls = [Call::Pin, Call::Unpin, Call::Record, Call::Query, Call::Wait];
    let seen = Arc::new(std::sync::Mutex::new(std::collections::BTreeSet::new()));
    for call in calls {
        let (inner, depth, seen) = (Arc::clone(&inner), Arc::clone(&depth), Arc::clone(&seen));
        let stream = rig.stream();
        rig.backend.set_hook(call, move |info| {
            use std::sync::atomic::Ordering::Relaxed;
            if depth.fetch_add(1, Relaxed) == 0 {
                seen.lock().expect("not poisoned").insert(info.call);
                everything(inner.get().expect("set"), &stream);
            }
            depth.fetch_sub(1, Relaxed);
        });
    }
    let stream = rig.stream();
    let a = rig.host.allocate(32 * MIB).expect("memory");
    let b = rig.host.allocate(32 * MIB).expect("memory");
    rig.host.record_use(&b, &stream).expect("live");
    rig.backend.busy(&stream);
    rig.host.free(a).expect("freed");
    rig.host.free(b).expect("freed");
    rig.host.process_events().expect("asked");
    // Needs the wait of the ladder.
    let c = rig.host.allocate(60 * MIB).expect("memory");
    rig.host.free(c).expect("freed");
    rig.host.empty_cache().expect("emptied");
    assert_eq!(seen.lock().expect("not poisoned").len(), calls.len(), "each was called");
    rig.check();
    calls.into_iter().for_each(|call| rig.backend.clear_hook(call));
    drop(inner);
}

/// Calls whatever takes a lock. Results do not matter: the machine may be full at this moment.
fn everything(host: &Host, stream: &mock_backend::MockStream) {
    for bytes in [64, 2 * MIB] {
        if let Ok(a) = host.allocate_for(bytes, Place::Anywhere, stream) {
            let _ = host.record_use(&a, stream);
            host.record_event(a.addr(), None, stream);
            host.is_pinned(a.addr());
            let _ = host.free(a);
        }
    }
    let _ = host.process_events();
    let _ = host.process_events_for(64);
    host.stats();
    let _ = host.empty_cache();
    let pool = PoolId(0, 7);
    if host.begin_allocate_to_pool(pool, |_| false).is_ok() {
        let _ = host.end_allocate_to_pool(pool);
        let _ = host.release_pool(pool);
    }
}

/// "Do not round" and "do not cache" are two settings.
#[test]
fn case_j10_rounding_and_caching_are_set_apart() {
    let round = pytorch_with("pinned_max_round_threshold_mb:8");
    let h = round.allocate(9 * MIB);
    assert_eq!(h.bytes(), 9 * MIB, "not rounded");
    round.free(h);
    assert_eq!(round.pinned(), 9 * MIB, "but cached");
    round.finish();

    let cached = pytorch_with("pinned_max_cached_size_mb:8");
    let stream = cached.stream();
    let h = cached.allocate(9 * MIB);
    cached.use_on(&h, &stream);
    cached.free(h);
    assert_eq!(cached.pinned(), 9 * MIB, "its event has not passed");
    cached.backend.pass(&stream);
    cached.host.process_events().expect("asked");
    assert_eq!(cached.pinned(), 0, "released once it has");
    let h = cached.allocate(5 * MIB);
    assert_eq!(h.bytes(), 8 * MIB, "below it, sizes are rounded");
    cached.free(h);
    assert_eq!(cached.pinned(), 8 * MIB, "and cached");
    cached.finish();
}
