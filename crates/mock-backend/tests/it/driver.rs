//! What the simulated driver does when nobody breaks a rule.

use std::collections::HashSet;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use alloc_core::backend::{
    Backend, BackendError, Capture, CaptureStatus, Completion, ErrorKind, MemoryInfo, Page,
    Refused, Reservation, Segment, Share, SharePages, Stream, Token, VirtualMemory,
};
use alloc_core::host::{PinMethod, PinRequest, PinnedSegment};
use alloc_core::ordered::{PoolOptions, PoolReuse, StreamOrdered};
use alloc_core::{Addr, StreamId};
use mock_backend::*;

use crate::rules::{DEV0, DEV1, MIB};

#[test]
fn stream_ids_ascend_default_streams_first() {
    let backend = MockBackend::builder().device(MIB).device(MIB).build();
    let side = backend.stream(DEV0);
    let ids = [backend.default_stream(DEV0), backend.default_stream(DEV1), side].map(|s| s.id());
    assert_eq!(ids, [0, 1, 2].map(StreamId::new));
    assert_eq!(side.device(), DEV0);
}

#[test]
fn capacity_is_shared_by_segments_and_pages() {
    let backend = MockBackend::builder().device_with(6 * MIB, 10 * MIB).build();
    let s0 = backend.default_stream(DEV0);
    let segment = backend.acquire(DEV0, 4 * MIB, &s0).unwrap();
    let page = backend.create(DEV0, 2 * MIB).unwrap();
    assert_eq!(backend.memory(DEV0).unwrap().free, 0);
    assert_eq!(backend.memory(DEV0).unwrap().total, 10 * MIB);
    for error in
        [backend.acquire(DEV0, 512, &s0).unwrap_err(), backend.create(DEV0, 2 * MIB).unwrap_err()]
    {
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert!(!error.is_injected());
    }
    backend.set_capacity(DEV0, 8 * MIB);
    assert!(backend.acquire(DEV0, 2 * MIB, &s0).is_ok());
    backend.release(segment).unwrap();
    backend.destroy(page).unwrap();
    assert_eq!(backend.used(DEV0), 2 * MIB);
    assert!(backend.violations().is_empty());
}

#[test]
fn address_space_runs_out_as_out_of_memory() {
    let space = Addr::new(64 * MIB);
    let backend = MockBackend::builder().address_space(space, 8 * MIB).build();
    let held = backend.reserve(DEV0, 6 * MIB).unwrap();
    assert_eq!(held.base(), space);
    let error = backend.reserve(DEV0, 4 * MIB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    backend.unreserve(held).unwrap();
    assert_eq!(backend.reserve(DEV0, 4 * MIB).unwrap().bytes(), 4 * MIB);
}

/// The device model of the recordings: an event is ready if its stream was idle when it was
/// recorded, whatever is queued later.
#[test]
fn events_are_positions() {
    let backend = MockBackend::new();
    let s0 = backend.default_stream(DEV0);
    let before = backend.record(&s0).unwrap();
    backend.busy(&s0);
    let during = backend.record(&s0).unwrap();
    assert_eq!(backend.query(&before).unwrap(), Completion::Reached);
    assert_eq!(backend.query(&during).unwrap(), Completion::Pending);
    backend.pass(&s0);
    backend.busy(&s0);
    assert_eq!(backend.query(&during).unwrap(), Completion::Reached);
    assert!(backend.is_busy(&s0));
    let late = backend.record(&s0).unwrap();
    backend.sync();
    assert_eq!(backend.query(&late).unwrap(), Completion::Reached);
}

#[test]
fn waits_force_only_what_they_need_and_are_logged() {
    let backend = MockBackend::builder().device(64 * MIB).device(64 * MIB).log(100).build();
    let (s0, other) = (backend.default_stream(DEV0), backend.default_stream(DEV1));
    let (side, third) = (backend.stream(DEV0), backend.stream(DEV0));
    backend.busy(&side);
    let on_side = backend.record(&side).unwrap();
    backend.busy(&side);
    backend.wait_event(&third, &on_side).unwrap();
    let on_third = backend.record(&third).unwrap();
    backend.busy(&third);
    backend.busy(&other);
    assert_eq!(backend.query(&on_third).unwrap(), Completion::Pending);
    backend.take_log();
    backend.wait(&on_third).unwrap();
    let [entry] = &backend.take_log()[..] else { panic!("one call") };
    assert_eq!((entry.info.call, entry.info.stream), (Call::Wait, Some(third.id())));
    assert_eq!(entry.waited_for, [side.id()], "only what the event depends on");
    assert!(backend.is_busy(&side) && backend.is_busy(&third));
    let segment = backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
    let base = segment.base();
    assert!(backend.is_busy(&side), "acquiring waits for nothing");
    backend.release(segment).unwrap();
    let log = backend.take_log();
    assert_eq!((log[0].info.call, log[0].info.addr), (Call::Acquire, base));
    assert_eq!(log[1].waited_for, [side.id(), third.id()]);
    assert!(backend.is_busy(&other), "releasing waits for its own device");
}

#[test]
fn the_log_is_bounded() {
    let backend = MockBackend::builder().log(2).build();
    let s0 = backend.default_stream(DEV0);
    for _ in 0..5 {
        backend.record(&s0).unwrap();
    }
    let log = backend.take_log();
    assert_eq!(log.iter().map(|e| e.operation).collect::<Vec<_>>(), [4, 5]);
}

#[test]
fn work_with_durations_takes_simulated_time() {
    let backend = MockBackend::new();
    let s0 = backend.default_stream(DEV0);
    backend.launch(&s0, Work::new().lasting(1_000_000));
    let event = backend.record(&s0).unwrap();
    assert_eq!(backend.query(&event).unwrap(), Completion::Pending);
    backend.advance(1_000_000);
    assert_eq!(backend.query(&event).unwrap(), Completion::Reached);
    backend.launch(&s0, Work::new().lasting(5_000_000));
    let before_ns = backend.now_ns();
    backend.sync_stream(&s0);
    assert_eq!(backend.now_ns() - before_ns, 5_000_000);
    assert_eq!(backend.costs().waited_ns, 5_000_000);
}

#[test]
fn chance_is_a_matter_of_the_seed() {
    let run = |seed| {
        let backend = MockBackend::builder().ends_by_chance(seed, 0.3).build();
        let s0 = backend.default_stream(DEV0);
        let mut polls = Vec::new();
        for _ in 0..20 {
            backend.launch(&s0, Work::new());
            let event = backend.record(&s0).unwrap();
            let pending = |e| backend.query(e).unwrap() == Completion::Pending;
            polls.push((0..).take_while(|_| pending(&event)).count());
        }
        polls
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
    assert!(run(1).iter().any(|&n| n > 0));
}

/// The token, as of another machine: a process cannot open what it exported itself.
fn elsewhere(mut token: Token<File>) -> Token<File> {
    token.bytes[0] ^= 1;
    token
}

/// A scenario without the judge, every call of which is made to fail in turn.
fn scenario(backend: &MockBackend) -> Result<(), MockError> {
    fn back<T>(refused: Refused<T, MockError>) -> MockError {
        refused.error
    }
    let s0 = backend.default_stream(DEV0);
    let segment = backend.acquire(DEV0, 2 * MIB, &s0)?;
    let event = backend.record(&s0)?;
    backend.query(&event)?;
    backend.wait(&event)?;
    backend.wait_event(&s0, &event)?;
    backend.memory(DEV0)?;
    backend.device_key(DEV0)?;
    let opened =
        backend.open_segment(DEV0, 2 * MIB, elsewhere(backend.export_segment(&segment)?))?;
    backend.close_segment(opened).map_err(back)?;
    let (_shared, token) = backend.export_event(&s0)?;
    backend.await_event(&s0, &token)?;
    backend.release(segment).map_err(back)?;
    let range = backend.reserve(DEV0, 4 * MIB)?;
    let page = backend.create(DEV0, 2 * MIB)?;
    backend.map(&range, range.base(), &page)?;
    backend.set_access(&range, range.base(), page.bytes(), DEV0)?;
    backend.unmap(&range, range.base(), page.bytes())?;
    // What is imported stays: destroying it would be a second call of that kind.
    backend.import_page(DEV0, 2 * MIB, elsewhere(backend.export_page(&page)?))?;
    backend.destroy(page).map_err(back)?;
    backend.unreserve(range).map_err(back)?;
    let request = PinRequest {
        bytes: 2 * MIB,
        align: 1,
        node: None,
        method: PinMethod::Allocate,
        piece_bytes_max: 2 * MIB,
    };
    let pinned = alloc_core::host::HostBackend::pin(backend, &request)?;
    let base = pinned.base();
    backend.judge().allocated_on_host(base, 2 * MIB);
    backend.copy_on_host(base, base + MIB, MIB)?;
    backend.judge().freed(base);
    alloc_core::host::HostBackend::unpin(backend, pinned).map_err(back)?;
    let pool = backend.create_pool(DEV0, None)?;
    let options = PoolOptions { reuse: PoolReuse::ALL, release_threshold: u64::MAX };
    backend.set_pool_options(&pool, options)?;
    let memory = backend.allocate_ordered(&pool, 2 * MIB, &s0)?;
    backend.free_ordered(memory, &s0).map_err(back)?;
    backend.pool_usage(&pool)?;
    backend.trim_pool(&pool, 0)?;
    backend.destroy_pool(pool).map_err(back)?;
    assert_eq!(backend.capture_status(&s0)?, CaptureStatus::None);
    assert_eq!(backend.capture_tips(&s0)?, None);
    backend.extend_past(&s0, &mut HashSet::new())
}

#[test]
fn every_call_can_be_made_to_fail() {
    let mut failed = Vec::new();
    for n in 1.. {
        let backend = MockBackend::builder().faults([Fault::nth(n)]).build();
        match scenario(&backend) {
            Ok(()) => {
                assert_eq!(backend.fault_counts(), (n - 1, 0));
                break;
            }
            Err(error) => {
                assert!(error.is_injected());
                assert_eq!(backend.fault_counts(), (n, 1));
                let oom = error.kind() == ErrorKind::OutOfMemory;
                assert_eq!(oom, error.call().takes_memory());
                failed.push(error.call());
            }
        }
        assert!(backend.violations().is_empty());
    }
    failed.sort();
    assert_eq!(failed, Call::ALL, "every kind of call is fallible");
}

#[test]
fn costs_add_up_exactly() {
    let backend = MockBackend::new();
    scenario(&backend).unwrap();
    scenario(&backend).unwrap();
    let costs = backend.costs();
    assert!(Call::ALL.iter().all(|&call| costs.calls(call) == 2));
    let bytes = |call| match call {
        Call::Reserve | Call::Unreserve => 4 * MIB,
        Call::Copy => MIB,
        _ => 2 * MIB,
    };
    let calls: u64 = Call::ALL.iter().map(|&call| call_ns(call, bytes(call))).sum();
    let growth = [Call::Create, Call::Map, Call::SetAccess].map(|call| call_ns(call, 2 * MIB));
    // The page and the growth of the pool are mapped for the first time.
    let once = calls + growth.iter().sum::<u64>() + 2 * FIRST_MAP_NS;
    assert_eq!(costs.stall_ns, 2 * once);
    assert_eq!(backend.now_ns(), 2 * once);
}

/// Only its first mapping ever makes a page dear, wherever it was and whether it still is there.
#[test]
fn the_first_mapping_of_a_page_costs_more() {
    let backend = MockBackend::new();
    let reservation = backend.reserve(DEV0, 16 * MIB).unwrap();
    let base = reservation.base();
    let pages = [backend.create(DEV0, 2 * MIB).unwrap(), backend.create(DEV0, 2 * MIB).unwrap()];
    let spent = |act: &dyn Fn()| {
        let before_ns = backend.costs().stall_ns;
        act();
        backend.costs().stall_ns - before_ns
    };
    let map = |page: usize, at: u64| {
        spent(&|| backend.map(&reservation, base + at * MIB, &pages[page]).unwrap())
    };
    let usual = call_ns(Call::Map, 2 * MIB);
    assert_eq!(map(0, 0), usual + FIRST_MAP_NS);
    assert_eq!(map(0, 2), usual);
    for at in [0, 2] {
        backend.unmap(&reservation, base + at * MIB, 2 * MIB).unwrap();
    }
    assert_eq!(map(0, 4), usual);
    // One that fails maps nothing.
    backend.set_faults([Fault::nth(1).of(Call::Map)]);
    assert_eq!(spent(&|| _ = backend.map(&reservation, base, &pages[1]).unwrap_err()), usual);
    assert_eq!(map(1, 0), usual + FIRST_MAP_NS);
}

/// A hook may call back into the backend: no lock is held.
#[test]
fn hooks_run_unlocked_before_the_call() {
    let backend = MockBackend::new();
    let s0 = backend.default_stream(DEV0);
    let seen = Arc::new(AtomicUsize::new(0));
    let (inner, count) = (backend.clone(), seen.clone());
    backend.set_hook(Call::Acquire, move |info| {
        assert_eq!((info.device, info.bytes, inner.used(DEV0)), (DEV0, 2 * MIB, 0));
        inner.record(&s0).unwrap();
        count.fetch_add(1, Ordering::Relaxed);
    });
    backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
    backend.clear_hook(Call::Acquire);
    backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
    assert_eq!(seen.load(Ordering::Relaxed), 1);
    assert_eq!(backend.costs().calls(Call::Record), 1);
}

#[test]
fn threads_share_a_machine() {
    let backend = MockBackend::builder().device(64 * MIB).strict().build();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let backend = backend.clone();
            scope.spawn(move || {
                let stream = backend.stream(DEV0);
                for _ in 0..200 {
                    let segment = backend.acquire(DEV0, 2 * MIB, &stream).unwrap();
                    backend.judge().allocated(segment.base(), 512, &stream);
                    backend.launch(&stream, Work::new().touching(segment.base(), 512));
                    backend.judge().freed(segment.base());
                    backend.wait(&backend.record(&stream).unwrap()).unwrap();
                    backend.release(segment).unwrap();
                }
            });
        }
    });
    backend.assert_clean();
}
