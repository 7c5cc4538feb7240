//! Each rule of the judge has a test that breaks it, and one that just keeps it where that is not
//! obvious. A judge that cannot fail is worthless.

use alloc_core::backend::{Backend, BackendError, ErrorKind, Segment, VirtualMemory};
use alloc_core::backend::{Page, Reservation};
use alloc_core::{Addr, DeviceId};
use mock_backend::*;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const DEV0: DeviceId = DeviceId::new(0);
pub(crate) const DEV1: DeviceId = DeviceId::new(1);

/// Two devices; streams: default of 0, default of 1, side of 0.
fn machine() -> (MockBackend, [MockStream; 3]) {
    let backend = MockBackend::builder().device(64 * MIB).device(64 * MIB).build();
    let side = backend.stream(DEV0);
    let streams = [backend.default_stream(DEV0), backend.default_stream(DEV1), side];
    (backend, streams)
}

#[track_caller]
fn expect(backend: &MockBackend, rules: &[Rule]) {
    let found: Vec<Rule> = backend.take_violations().iter().map(|v| v.rule).collect();
    assert_eq!(found, rules);
}

/// A reservation of 8 MiB with a page of 2 MiB mapped at its start, accessible.
fn mapped(backend: &MockBackend) -> (MockReservation, MockPage) {
    let range = backend.reserve(DEV0, 8 * MIB).unwrap();
    let page = backend.create(DEV0, 2 * MIB).unwrap();
    backend.map(&range, range.base(), &page).unwrap();
    backend.set_access(&range, range.base(), 2 * MIB, DEV0).unwrap();
    (range, page)
}

#[test]
fn overlap() {
    let (backend, [s0, ..]) = machine();
    let segment = backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
    backend.judge().allocated(segment.base(), 1024, &s0);
    backend.judge().allocated(segment.base() + 1024, 512, &s0);
    expect(&backend, &[]);
    backend.judge().allocated(segment.base() + 512, 512, &s0);
    expect(&backend, &[Rule::Overlap]);
}

#[test]
fn overlap_through_another_mapping_of_the_page() {
    let (backend, [s0, ..]) = machine();
    let (range, page) = mapped(&backend);
    let alias = range.base() + 4 * MIB;
    backend.map(&range, alias, &page).unwrap();
    backend.set_access(&range, alias, 2 * MIB, DEV0).unwrap();
    backend.judge().allocated(range.base(), 512, &s0);
    backend.judge().allocated(alias + 512, 512, &s0);
    expect(&backend, &[]);
    backend.judge().allocated(alias, 512, &s0);
    expect(&backend, &[Rule::Overlap]);
}

#[test]
fn outside_memory() {
    let (backend, [s0, ..]) = machine();
    let segment = backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
    backend.judge().allocated(segment.base() + (2 * MIB - 512), 1024, &s0);
    expect(&backend, &[Rule::OutsideMemory]);
    let (range, _page) = mapped(&backend);
    backend.judge().allocated(range.base() + MIB, 2 * MIB, &s0);
    expect(&backend, &[Rule::OutsideMemory]);
    backend.judge().allocated(Addr::new(u64::MAX - 100), 512, &s0);
    expect(&backend, &[Rule::OutsideMemory]);
}

#[test]
fn no_access() {
    let (backend, [s0, s1, _]) = machine();
    let (range, _page) = mapped(&backend);
    let page = backend.create(DEV0, 2 * MIB).unwrap();
    backend.map(&range, range.base() + 2 * MIB, &page).unwrap();
    backend.judge().allocated(range.base() + MIB, 2 * MIB, &s0);
    expect(&backend, &[Rule::NoAccess]);
    backend.judge().allocated(range.base(), MIB, &s0);
    assert!(backend.judge().is_accessible(range.base(), DEV0));
    assert!(!backend.judge().is_accessible(range.base(), DEV1));
    backend.launch(&s1, Work::new().touching(range.base(), 512));
    expect(&backend, &[Rule::NoAccess]);
    backend.set_access(&range, range.base(), 4 * MIB, DEV1).unwrap();
    backend.launch(&s1, Work::new().touching(range.base(), 512));
    expect(&backend, &[]);
}

#[test]
fn early_reuse_until_the_host_has_seen_the_work_finish() {
    let (backend, [s0, _, side]) = machine();
    let segment = backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
    let (judge, at) = (backend.judge(), segment.base());
    judge.allocated(at, MIB, &s0);
    backend.launch(&side, Work::new().touching(at, 512));
    judge.freed(at);
    judge.allocated(at + 512, 512, &s0);
    expect(&backend, &[]);
    judge.allocated(at, 512, &s0);
    expect(&backend, &[Rule::EarlyReuse]);
    judge.freed(at);
    // Finished by luck: nobody knows.
    backend.pass(&side);
    judge.allocated(at, 512, &s0);
    expect(&backend, &[Rule::EarlyReuse]);
    judge.freed(at);
    let event = backend.record(&side).unwrap();
    assert_eq!(backend.query(&event).unwrap(), alloc_core::backend::Completion::Reached);
    judge.allocated(at, 512, &s0);
    expect(&backend, &[]);
}

#[test]
fn early_reuse_does_not_hit_the_same_stream_or_ordered_ones() {
    let (backend, [s0, _, side]) = machine();
    let segment = backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
    let (judge, at) = (backend.judge(), segment.base());
    judge.allocated(at, 512, &side);
    backend.launch(&side, Work::new().touching(at, 512));
    judge.freed(at);
    judge.allocated(at, 512, &side);
    judge.freed(at);
    let event = backend.record(&side).unwrap();
    backend.wait_event(&s0, &event).unwrap();
    judge.allocated(at, 512, &s0);
    expect(&backend, &[]);
    judge.freed(at);
    // Work after the event is not covered by it.
    judge.allocated(at, 512, &side);
    backend.launch(&side, Work::new().touching(at, 512));
    judge.freed(at);
    judge.allocated(at, 512, &s0);
    expect(&backend, &[Rule::EarlyReuse]);
}

/// The three-stream hand-over: C takes from B what B took from A. C's order after B carries A's
/// only if B was ordered after A before B's event.
#[test]
fn early_reuse_through_a_third_stream() {
    for ordered_first in [true, false] {
        let (backend, [a, _, b]) = machine();
        let c = backend.stream(DEV0);
        let segment = backend.acquire(DEV0, 2 * MIB, &a).unwrap();
        backend.judge().allocated(segment.base(), MIB, &a);
        backend.launch(&a, Work::new().touching(segment.base(), MIB));
        backend.judge().freed(segment.base());
        if ordered_first {
            backend.order(&a, &b);
            backend.order(&b, &c);
        } else {
            backend.order(&b, &c);
            backend.order(&a, &b);
        }
        backend.judge().allocated(segment.base(), MIB, &c);
        expect(&backend, if ordered_first { &[] } else { &[Rule::EarlyReuse] });
    }
}

/// A page that moved to another address takes its unfinished work along.
#[test]
fn early_reuse_of_a_remapped_page() {
    let (backend, [s0, _, side]) = machine();
    let (range, page) = mapped(&backend);
    backend.judge().allocated(range.base(), MIB, &side);
    backend.launch(&side, Work::new().touching(range.base(), MIB));
    backend.judge().freed(range.base());
    let alias = range.base() + 2 * MIB;
    backend.map(&range, alias, &page).unwrap();
    backend.set_access(&range, alias, 2 * MIB, DEV0).unwrap();
    backend.judge().allocated(alias + MIB, MIB, &s0);
    expect(&backend, &[]);
    backend.judge().allocated(alias, MIB, &s0);
    expect(&backend, &[Rule::EarlyReuse]);
}

#[test]
fn unallocated_use() {
    let (backend, [s0, ..]) = machine();
    let segment = backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
    backend.judge().allocated(segment.base(), 1024, &s0);
    backend.launch(&s0, Work::new().touching(segment.base() + 512, 512));
    expect(&backend, &[]);
    backend.launch(&s0, Work::new().touching(segment.base() + 512, 1024));
    expect(&backend, &[Rule::UnallocatedUse]);
    backend.judge().freed(segment.base());
    backend.launch(&s0, Work::new().touching(segment.base(), 512));
    expect(&backend, &[Rule::UnallocatedUse]);
}

#[test]
fn unknown_free() {
    let (backend, [s0, ..]) = machine();
    let segment = backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
    backend.judge().allocated(segment.base(), 512, &s0);
    backend.judge().freed(segment.base());
    expect(&backend, &[]);
    backend.judge().freed(segment.base());
    expect(&backend, &[Rule::UnknownFree]);
}

/// Releasing waits for the segment's own device only (case A5).
#[test]
fn release_under_work() {
    let (backend, [s0, s1, side]) = machine();
    for (stream, broken) in [(&s0, false), (&side, false), (&s1, true)] {
        let segment = backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
        backend.judge().allocated(segment.base(), 512, &s0);
        backend.launch(stream, Work::new().touching(segment.base(), 512));
        backend.judge().freed(segment.base());
        backend.release(segment).unwrap();
        expect(&backend, if broken { &[Rule::ReleaseUnderWork] } else { &[] });
        assert_eq!(backend.is_busy(stream), broken);
    }
}

#[test]
fn unmap_under_work() {
    for seen in [true, false] {
        let (backend, [s0, ..]) = machine();
        let (range, _page) = mapped(&backend);
        backend.judge().allocated(range.base(), 512, &s0);
        backend.launch(&s0, Work::new().touching(range.base(), 512));
        backend.judge().freed(range.base());
        if seen {
            backend.wait(&backend.record(&s0).unwrap()).unwrap();
        }
        backend.unmap(&range, range.base(), 2 * MIB).unwrap();
        expect(&backend, if seen { &[] } else { &[Rule::UnmapUnderWork] });
    }
}

#[test]
fn release_of_allocated() {
    let (backend, [s0, ..]) = machine();
    let segment = backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
    backend.judge().allocated(segment.base() + MIB, 512, &s0);
    backend.release(segment).unwrap();
    expect(&backend, &[Rule::ReleaseOfAllocated]);
    let (backend, [s0, ..]) = machine();
    let (range, _page) = mapped(&backend);
    backend.judge().allocated(range.base() + MIB, 512, &s0);
    backend.unmap(&range, range.base(), 2 * MIB).unwrap();
    expect(&backend, &[Rule::ReleaseOfAllocated]);
}

#[test]
fn map_over_mapping() {
    let (backend, _) = machine();
    let (range, page) = mapped(&backend);
    let large = backend.create(DEV0, 4 * MIB).unwrap();
    for (at, rules) in [(0, &[Rule::MapOverMapping][..]), (2 * MIB, &[])] {
        assert_eq!(backend.map(&range, range.base() + at, &large).is_ok(), rules.is_empty());
        expect(&backend, rules);
    }
    assert!(backend.map(&range, range.base() + 4 * MIB, &page).is_err());
    expect(&backend, &[Rule::MapOverMapping]);
}

#[test]
fn bad_range() {
    let (backend, _) = machine();
    let (range, page) = mapped(&backend);
    let base = range.base();
    assert!(backend.map(&range, base + 8 * MIB, &page).is_err());
    assert!(backend.map(&range, base + 2 * MIB + 4096, &page).is_err());
    assert!(backend.set_access(&range, base, 4 * MIB, DEV0).is_err());
    assert!(backend.set_access(&range, base, MIB, DEV0).is_err());
    assert!(backend.set_access(&range, base, 0, DEV0).is_err());
    expect(&backend, &[Rule::BadRange; 5]);
}

#[test]
fn partial_unmap() {
    let (backend, _) = machine();
    let (range, page) = mapped(&backend);
    backend.map(&range, range.base() + 2 * MIB, &page).unwrap();
    assert!(backend.unmap(&range, range.base(), 4 * MIB).is_err());
    assert!(backend.unmap(&range, range.base(), MIB).is_err());
    assert!(backend.unmap(&range, range.base() + 4 * MIB, 2 * MIB).is_err());
    expect(&backend, &[Rule::PartialUnmap; 3]);
    assert_eq!(backend.leaks().mappings.len(), 2, "a refused call does nothing");
}

#[test]
fn unreserve_mapped_and_destroy_mapped() {
    let (backend, _) = machine();
    let (range, page) = mapped(&backend);
    let range = backend.unreserve(range).unwrap_err().value;
    expect(&backend, &[Rule::UnreserveMapped]);
    let page = backend.destroy(page).unwrap_err().value;
    expect(&backend, &[Rule::DestroyMapped]);
    backend.unmap(&range, range.base(), page.bytes()).unwrap();
    backend.unreserve(range).unwrap();
    backend.destroy(page).unwrap();
    backend.assert_clean();
}

#[test]
fn foreign_handles() {
    let (backend, [s0, ..]) = machine();
    let (other, [t0, ..]) = machine();
    let segment = backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
    let (range, page) = mapped(&backend);
    let event = backend.record(&s0).unwrap();
    assert!(other.acquire(DEV0, 2 * MIB, &s0).is_err());
    assert!(other.record(&s0).is_err());
    assert!(other.query(&event).is_err());
    assert!(other.wait(&event).is_err());
    assert!(other.wait_event(&t0, &event).is_err());
    let segment = other.release(segment).unwrap_err().value;
    assert!(other.map(&range, range.base(), &page).is_err());
    assert!(other.set_access(&range, range.base(), 2 * MIB, DEV0).is_err());
    assert!(other.unmap(&range, range.base(), 2 * MIB).is_err());
    assert!(other.unreserve(range).is_err());
    assert!(other.destroy(page).is_err());
    expect(&other, &[Rule::ForeignHandle; 11]);
    backend.release(segment).unwrap();
    expect(&backend, &[]);
}

#[test]
fn bad_requests() {
    let (backend, [s0, ..]) = machine();
    let nowhere = DeviceId::new(9);
    assert!(backend.acquire(DEV0, 0, &s0).is_err());
    assert!(backend.acquire(DEV0, 513, &s0).is_err());
    assert!(backend.acquire(DEV1, 512, &s0).is_err());
    assert!(backend.create(DEV0, MIB).is_err());
    assert!(backend.reserve(nowhere, 2 * MIB).is_err());
    expect(&backend, &[Rule::BadRequest; 5]);
    assert_eq!(backend.used(DEV0), 0);
}

#[test]
fn feeds_are_checked() {
    let at = |mib: u64| Addr::new(mib * MIB);
    let list = [(at(100), 4 * MIB), (at(102), 2 * MIB), (at(201), 2 * MIB), (at(300), 4 * MIB)];
    let backend = MockBackend::builder().feed(recorded_segments(list)).build();
    let s0 = backend.default_stream(DEV0);
    let first = backend.acquire(DEV0, 4 * MIB, &s0).unwrap();
    assert_eq!(first.base(), at(100));
    expect(&backend, &[]);
    assert!(backend.acquire(DEV0, 2 * MIB, &s0).is_err(), "overlaps the first");
    assert!(backend.acquire(DEV0, 2 * MIB, &s0).is_err(), "not a multiple of 2 MiB");
    expect(&backend, &[Rule::FedBadAddress; 2]);
    assert_eq!(backend.acquire(DEV0, 2 * MIB, &s0).unwrap().base(), at(300));
    expect(&backend, &[Rule::FedWrongSize]);
    assert!(backend.acquire(DEV0, 2 * MIB, &s0).is_ok());
    expect(&backend, &[Rule::FeedExhausted]);
    assert_eq!(backend.used(DEV0), 8 * MIB, "failed calls took nothing");
}

#[test]
fn captured_events() {
    let (backend, [s0, _, side]) = machine();
    backend.begin_capture(&side, CaptureMode::Relaxed).unwrap();
    let event = backend.record(&side).unwrap();
    expect(&backend, &[Rule::CapturedEvent]);
    assert!(backend.query(&event).is_err());
    assert!(backend.wait(&event).is_err());
    expect(&backend, &[Rule::CapturedEvent; 2]);
    let plain = backend.record(&s0).unwrap();
    backend.query(&plain).unwrap();
    expect(&backend, &[]);
    assert_eq!(backend.end_capture(&side), Err(CaptureError::Invalidated));
    assert!(backend.query(&event).is_err(), "also after the capture");
    expect(&backend, &[Rule::CapturedEvent]);
}

#[test]
fn calls_that_captures_forbid() {
    for (mode, own_thread, other_thread) in [
        (CaptureMode::Global, false, false),
        (CaptureMode::ThreadLocal, false, true),
        (CaptureMode::Relaxed, true, true),
    ] {
        let backend = MockBackend::builder().obeys_capture_modes().build();
        let (s0, side) = (backend.default_stream(DEV0), backend.stream(DEV0));
        let event = backend.record(&s0).unwrap();
        backend.begin_capture(&side, mode).unwrap();
        let segment = backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
        let elsewhere = std::thread::scope(|scope| {
            scope.spawn(|| backend.query(&event).is_ok()).join().unwrap()
        });
        assert_eq!(elsewhere, other_thread, "{mode:?}");
        assert_eq!(backend.query(&event).is_ok(), own_thread, "{mode:?}");
        assert_eq!(backend.wait(&event).is_ok(), own_thread, "{mode:?}");
        let forbidden = 2 * usize::from(!own_thread) + usize::from(!other_thread);
        expect(&backend, &vec![Rule::CallDuringCapture; forbidden]);
        assert_eq!(backend.end_capture(&side).is_ok(), own_thread, "{mode:?}");
        backend.begin_capture(&side, mode).unwrap();
        let segment = backend.release(segment).unwrap_err().value;
        expect(&backend, &[Rule::CallDuringCapture]);
        assert_eq!(backend.end_capture(&side), Err(CaptureError::Invalidated));
        backend.release(segment).unwrap();
    }
}

#[test]
fn an_eager_event_cannot_order_a_capture() {
    let (backend, [s0, _, side]) = machine();
    let event = backend.record(&s0).unwrap();
    backend.begin_capture(&side, CaptureMode::Relaxed).unwrap();
    assert!(backend.wait_event(&side, &event).is_err());
    expect(&backend, &[Rule::CallDuringCapture]);
}

#[test]
fn early_reuse_inside_a_capture() {
    for joined in [true, false] {
        let (backend, [main, _, side]) = machine();
        let segment = backend.acquire(DEV0, 2 * MIB, &main).unwrap();
        backend.begin_capture(&main, CaptureMode::ThreadLocal).unwrap();
        backend.judge().allocated(segment.base(), 512, &main);
        backend.order(&main, &side);
        backend.launch(&side, Work::new().touching(segment.base(), 512));
        backend.judge().freed(segment.base());
        if joined {
            backend.order(&side, &main);
        }
        backend.judge().allocated(segment.base(), 512, &main);
        expect(&backend, if joined { &[] } else { &[Rule::EarlyReuse] });
        let graph = backend.end_capture(&main);
        match joined {
            true => assert_eq!(graph.unwrap().touches(), [(segment.base(), 512)]),
            false => assert_eq!(graph, Err(CaptureError::Unjoined)),
        }
        assert!(!backend.is_busy(&side), "captured work does not run");
    }
}

#[test]
fn strict_backends_panic_with_what_and_where() {
    let backend = MockBackend::builder().strict().build();
    let s0 = backend.default_stream(DEV0);
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        backend.judge().allocated(Addr::new(4096), 512, &s0);
    }));
    let message = *panic.unwrap_err().downcast::<String>().unwrap();
    assert_eq!(message, "operation 1: OutsideMemory on stream 0 at 0x1000, 512 bytes");
    assert_eq!(backend.violations().len(), 1);
}

#[test]
fn leaks_name_everything() {
    let (backend, [s0, _, side]) = machine();
    let segment = backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
    let (range, _page) = mapped(&backend);
    let _event = backend.record(&s0).unwrap();
    backend.judge().allocated(segment.base(), 512, &s0);
    backend.begin_capture(&side, CaptureMode::Relaxed).unwrap();
    let expected = Leaks {
        segments: vec![(segment.base(), 2 * MIB)],
        reservations: vec![(range.base(), 8 * MIB)],
        mappings: vec![(range.base(), 2 * MIB)],
        pages: vec![2 * MIB],
        events: 1,
        captures: 1,
        allocations: vec![(segment.base(), 512)],
        ordered: Vec::new(),
        pools: 0,
    };
    assert_eq!(backend.leaks(), expected);
    assert!(
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| backend.assert_clean())).is_err()
    );
    {
        let _gone = segment;
    }
    assert_eq!(backend.leaks().segments.len(), 1, "dropping is not releasing");
    backend.unload();
    assert!(backend.leaks().is_empty());
}

#[test]
fn after_unload_all_fail_quietly() {
    let (backend, [s0, ..]) = machine();
    let segment = backend.acquire(DEV0, 2 * MIB, &s0).unwrap();
    let event = backend.record(&s0).unwrap();
    backend.unload();
    assert_eq!(backend.release(segment).unwrap_err().error.kind(), ErrorKind::DeviceLost);
    assert_eq!(backend.wait(&event).unwrap_err().kind(), ErrorKind::DeviceLost);
    assert_eq!(backend.reserve(DEV0, 2 * MIB).unwrap_err().kind(), ErrorKind::DeviceLost);
    backend.judge().freed(Addr::new(4096));
    backend.launch(&s0, Work::new().touching(Addr::new(4096), 1));
    backend.assert_clean();
}
