//! The glue between the traits and the driver, on the imitation of the driver.

use crate::{CudaAllocator, CudaBackend, CudaError, CudaStream};
use alloc_core::backend::{
    Backend, BackendError, Completion, ErrorKind, MemoryInfo, Page, Reservation, Segment, Share,
    Stream, Token, TokenKind, VirtualMemory,
};
use alloc_core::{Addr, Config, DeviceId};
use cuda_driver::fake::Session;
use cuda_driver::{CaptureMode, Stream as DriverStream, code};
use std::sync::mpsc;

const MIB: u64 = 1 << 20;
const FIRST: DeviceId = DeviceId::new(0);
const SECOND: DeviceId = DeviceId::new(1);

fn backend(session: &Session) -> CudaBackend {
    CudaBackend::with_driver(session.driver()).expect("starts")
}

/// Holds a stream up until the sender is dropped.
fn gate(stream: &CudaStream) -> mpsc::Sender<()> {
    let (open, wait) = mpsc::channel();
    let hold = move || {
        let _ = wait.recv();
    };
    stream.driver_stream().call_host(hold).expect("queued");
    open
}

#[test]
fn contexts_are_made_when_needed_and_released_with_the_last_owner() {
    let session = Session::new(&[64 * MIB, 64 * MIB]);
    let backend = backend(&session);
    assert_eq!(backend.device_count(), 2);
    assert_eq!(backend.memory(SECOND).expect("asks").total, 64 * MIB);
    assert_eq!(session.outstanding(), 0, "nothing was made for that");
    let stream = backend.create_stream(FIRST).expect("stream");
    let segment = backend.acquire(FIRST, 2 * MIB, &stream).expect("room");
    assert_eq!(backend.memory(FIRST).expect("asks").free, 62 * MIB);
    assert_eq!(session.current_device(), None, "put back");
    backend.release(segment).expect("releases");
    drop(backend);
    assert_eq!(session.outstanding(), 1, "the stream holds the context");
    drop(stream);
    assert_eq!(session.outstanding(), 0);
}

#[test]
fn default_streams_never_alias() {
    let session = Session::new(&[64 * MIB, 64 * MIB]);
    let backend = backend(&session);
    let (first, second) = (backend.default_stream(FIRST), backend.default_stream(SECOND));
    let (first, second) = (first.expect("stream"), second.expect("stream"));
    let own = backend.per_thread_stream(FIRST).expect("stream");
    let theirs = std::thread::scope(|scope| {
        let made = scope.spawn(|| backend.per_thread_stream(FIRST).expect("stream"));
        made.join().expect("thread")
    });
    let mut ids = [first.id(), second.id(), own.id(), theirs.id()].map(|id| id.get()).to_vec();
    assert_eq!(ids[..2], [0, 1], "the default streams come first, by device");
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 4);
    assert_eq!((first.device(), second.device()), (FIRST, SECOND));

    let adopt = |device, raw: usize| {
        let raw = std::ptr::without_provenance_mut(raw);
        // SAFETY: a special handle.
        unsafe { backend.adopt(device, raw) }.expect("adopts")
    };
    for (device, raw, expected) in [
        (FIRST, 0, &first),
        (FIRST, DriverStream::LEGACY, &first),
        (SECOND, 0, &second),
        (FIRST, DriverStream::PER_THREAD, &own),
    ] {
        assert_eq!(adopt(device, raw), *expected);
    }
}

#[test]
fn a_foreign_stream_is_one_stream_however_often_it_is_adopted() {
    let session = Session::new(&[64 * MIB, 64 * MIB]);
    let backend = backend(&session);
    let context = backend.context(FIRST).expect("context");
    let foreign = DriverStream::create(&context).expect("stream");
    // SAFETY: `foreign` outlives its use here.
    let adopt = |device| unsafe { backend.adopt(device, foreign.raw()) };
    let once = adopt(FIRST).expect("adopts");
    assert!(once.is_foreign());
    assert_eq!(adopt(FIRST).expect("adopts").id(), once.id());
    assert_eq!(adopt(SECOND).err(), Some(CudaError::WrongContext { device: SECOND }));
    let own = backend.create_stream(FIRST).expect("stream");
    // SAFETY: `own` lives.
    let readopted = unsafe { backend.adopt(FIRST, own.raw()) }.expect("adopts");
    assert_eq!(readopted, own);
    let id = once.id();
    drop(once);
    assert_ne!(adopt(FIRST).expect("adopts").id(), id, "nobody knew it any more");
    let no_such = DeviceId::new(7);
    assert_eq!(adopt(no_such).err(), Some(CudaError::NoSuchDevice { device: no_such, count: 2 }));
}

#[test]
fn a_stream_adopted_while_captured_keeps_its_capture_whole() {
    let session = Session::new(&[64 * MIB]);
    let backend = backend(&session);
    let context = backend.context(FIRST).expect("context");
    let (known, unknown) = (DriverStream::create(&context), DriverStream::create(&context));
    let (known, unknown) = (known.expect("stream"), unknown.expect("stream"));
    // SAFETY: both outlive their use here.
    let adopt = |stream: &DriverStream| unsafe { backend.adopt(FIRST, stream.raw()) };
    let before = adopt(&known).expect("adopts");
    known.begin_capture(CaptureMode::Global).expect("begin");
    unknown.begin_capture(CaptureMode::Global).expect("begin");
    assert_eq!(adopt(&known).expect("adopts"), before);
    let inside = adopt(&unknown).expect("adopts");
    assert_eq!(adopt(&unknown).expect("adopts"), inside);
    assert!(inside.is_captured().expect("asks"));
    assert!(backend.record(&inside).is_err(), "an event would be part of the graph");
    known.end_capture().expect("whole");
    unknown.end_capture().expect("whole");
    assert_eq!(adopt(&known).expect("adopts"), before);
    assert_ne!(adopt(&unknown).expect("adopts"), inside, "not known to be the same");
}

#[test]
fn events_follow_their_stream_and_are_used_again() {
    let session = Session::new(&[64 * MIB]);
    let backend = backend(&session);
    let stream = backend.create_stream(FIRST).expect("stream");
    let open = gate(&stream);
    let event = backend.record(&stream).expect("records");
    assert_eq!(backend.query(&event).expect("query"), Completion::Pending);
    drop(open);
    backend.wait(&event).expect("waits");
    assert_eq!(backend.query(&event).expect("query"), Completion::Reached);
    drop(event);
    let before = session.outstanding();
    for _ in 0..10 {
        drop(backend.record(&stream).expect("records"));
    }
    session.fail("cuEventRecord", 0, code::UNKNOWN);
    assert_eq!(backend.record(&stream).expect_err("scripted").kind(), ErrorKind::Other);
    assert_eq!(session.outstanding(), before, "one event did for all");
}

#[test]
fn an_event_on_another_threads_default_stream_comes_after_its_work() {
    let session = Session::new(&[64 * MIB]);
    let backend = backend(&session);
    let (theirs, open) = std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let stream = backend.per_thread_stream(FIRST).expect("stream");
            let open = gate(&stream);
            (stream, open)
        });
        worker.join().expect("thread")
    });
    let event = backend.record(&theirs).expect("records");
    assert_eq!(backend.query(&event).expect("query"), Completion::Pending);
    drop(open);
    backend.wait(&event).expect("waits");
}

#[test]
fn memory_used_on_a_retired_stream_waits_for_its_end_without_touching_the_handle() {
    let session = Session::new(&[64 * MIB]);
    let backend = backend(&session);
    let context = backend.context(FIRST).expect("context");
    let foreign = DriverStream::create(&context).expect("stream");
    // SAFETY: retired before it is destroyed.
    let stream = unsafe { backend.adopt(FIRST, foreign.raw()) }.expect("adopts");
    let open = gate(&stream);
    backend.retire(&stream).expect("retires");
    let event = backend.record(&stream).expect("records");
    assert_eq!(backend.query(&event).expect("query"), Completion::Pending);
    drop(open);
    backend.wait(&event).expect("waits");
    drop(foreign);
    let late = backend.record(&stream).expect("the handle is not asked");
    assert_eq!(backend.query(&late).expect("query"), Completion::Reached);
}

#[test]
fn segments_start_at_whole_2_mib_wherever_the_driver_puts_them() {
    let session = Session::new(&[64 * MIB]);
    let backend = backend(&session);
    let stream = backend.default_stream(FIRST).expect("stream");
    for odd in [false, true] {
        if odd {
            session.use_odd_addresses();
        }
        for bytes in [512, MIB, 2 * MIB, 20 * MIB] {
            let segment = backend.acquire(FIRST, bytes, &stream).expect("room");
            assert!(segment.base().is_aligned(2 * MIB), "{}", segment.base());
            assert_eq!(segment.bytes(), bytes);
            backend.release(segment).expect("releases");
        }
    }
    assert_eq!(backend.memory(FIRST).expect("asks").free, 64 * MIB);
}

#[test]
fn memory_can_be_had_while_anything_is_captured() {
    let session = Session::new(&[64 * MIB]);
    let backend = backend(&session);
    let (captured, other) = (backend.create_stream(FIRST), backend.create_stream(FIRST));
    let (captured, other) = (captured.expect("stream"), other.expect("stream"));
    let event = backend.record(&other).expect("records");
    captured.driver_stream().begin_capture(CaptureMode::Global).expect("begin");
    let segment = backend.acquire(FIRST, 2 * MIB, &other).expect("allowed");
    assert_eq!(backend.query(&event).expect("allowed"), Completion::Reached);
    backend.release(segment).expect("allowed");
    captured.driver_stream().end_capture().expect("whole");
}

#[test]
fn pages_are_made_with_less_when_the_driver_refuses_more() {
    let session = Session::new(&[64 * MIB]);
    let backend = backend(&session);
    session.fail("cuMemCreate", 0, code::NOT_PERMITTED);
    let page = backend.create(FIRST, 2 * MIB).expect("plain memory");
    assert_eq!(page.bytes(), 2 * MIB);
    session.fail("cuMemCreate", 0, code::OUT_OF_MEMORY);
    let full = backend.create(FIRST, 2 * MIB).expect_err("scripted");
    assert_eq!(full.kind(), ErrorKind::OutOfMemory, "that is not about the kind");
    backend.destroy(page).expect("destroys");
    assert!(backend.create(FIRST, 12345).is_err(), "no multiple of the granularity");
}

#[test]
fn refused_calls_hand_their_argument_back() {
    let session = Session::new(&[64 * MIB]);
    let backend = backend(&session);
    let stream = backend.default_stream(FIRST).expect("stream");
    let segment = backend.acquire(FIRST, 2 * MIB, &stream).expect("room");
    session.fail("cuMemFree_v2", 0, code::UNKNOWN);
    let segment = backend.release(segment).expect_err("scripted").value;
    backend.release(segment).expect("second try");

    let reservation = backend.reserve(FIRST, 16 * MIB).expect("addresses");
    assert!(reservation.base().is_aligned(2 * MIB));
    let page = backend.create(FIRST, 2 * MIB).expect("room");
    backend.map(&reservation, reservation.base(), &page).expect("maps");
    let reservation = backend.unreserve(reservation).expect_err("mapped").value;
    backend.unmap(&reservation, reservation.base(), 2 * MIB).expect("unmaps");
    session.fail("cuMemRelease", 0, code::UNKNOWN);
    let page = backend.destroy(page).expect_err("scripted").value;
    backend.destroy(page).expect("second try");
    backend.unreserve(reservation).expect("second try");
}

#[test]
fn a_new_peer_reaches_old_pages_and_new_ones() {
    let session = Session::new(&[64 * MIB, 64 * MIB]);
    let backend = backend(&session);
    let reservation = backend.reserve(FIRST, 16 * MIB).expect("addresses");
    let base = reservation.base();
    let pages = [0, 1, 2].map(|_| backend.create(FIRST, 2 * MIB).expect("room"));
    let at = |index: u64| Addr::new(base.get() + index * 2 * MIB);
    backend.map(&reservation, at(0), &pages[0]).expect("maps");
    backend.map(&reservation, at(1), &pages[1]).expect("maps");
    backend.set_access(&reservation, at(0), 2 * MIB, FIRST).expect("access");
    // Each call of the driver that gives access, counted by making the next one fail.
    let accesses = |action: &dyn Fn() -> Result<(), CudaError>| {
        (0..).find(|&successes| {
            session.fail("cuMemSetAccess", successes, code::UNKNOWN);
            let failed = action().is_err();
            session.clear_faults();
            !failed
        })
    };
    session.fail("cuMemSetAccess", 0, code::UNKNOWN);
    assert!(backend.enable_peer_access(SECOND, FIRST).is_err(), "the accessible page is visited");
    let enable = || backend.enable_peer_access(SECOND, FIRST);
    assert_eq!(accesses(&enable), Some(1), "and visited again, once");
    let give = || backend.set_access(&reservation, at(1), 2 * MIB, FIRST);
    assert_eq!(accesses(&give), Some(2), "the device itself and its peer");
    backend.map(&reservation, at(2), &pages[2]).expect("maps");
    let give = || backend.set_access(&reservation, at(2), 2 * MIB, FIRST);
    assert_eq!(accesses(&give), Some(2));
    backend.enable_peer_access(FIRST, FIRST).expect("nothing to do");
}

#[test]
fn after_the_driver_is_gone_everything_says_device_lost_and_nothing_crashes() {
    let session = Session::new(&[64 * MIB]);
    let backend = backend(&session);
    let allocator = CudaAllocator::on(backend.clone(), Config::pytorch()).expect("starts");
    let (stream, side) = (backend.create_stream(FIRST), backend.create_stream(FIRST));
    let (stream, side) = (stream.expect("stream"), side.expect("stream"));
    let buffer = allocator.buffer::<u32>(1000, &stream).expect("room");
    let used_aside = allocator.buffer::<u32>(1000, &stream).expect("room");
    used_aside.record_stream(&side).expect("records");
    session.shut_down();
    let error = allocator.buffer::<u8>(30 << 20, &stream).expect_err("gone");
    assert!(error.is_device_lost(), "{error}");
    assert_eq!(backend.memory(FIRST).expect_err("gone").kind(), ErrorKind::DeviceLost);
    let error = used_aside.free().expect_err("no event can be recorded");
    assert!(error.is_device_lost(), "{error}");
    drop((buffer, allocator, backend, stream, side));
}

#[test]
fn buffers_hold_values_and_give_their_memory_back() {
    let session = Session::new(&[64 * MIB]);
    let allocator = CudaAllocator::on(backend(&session), Config::ours()).expect("starts");
    let stream = allocator.backend().create_stream(FIRST).expect("stream");
    let values: Vec<u64> = (0..1000).collect();
    let mut buffer = allocator.buffer::<u64>(1000, &stream).expect("room");
    buffer.copy_from_host(&values).expect("copies");
    assert_eq!(buffer.to_vec().expect("copies"), values);
    buffer.clear().expect("clears");
    assert_eq!(buffer.to_vec().expect("copies"), vec![0; 1000]);
    let addr = buffer.addr();
    drop(buffer);
    let again = allocator.buffer::<u64>(1000, &stream).expect("room");
    assert_eq!(again.addr(), addr, "from the cache");
    let raw = again.into_raw();
    allocator.free_raw(raw).expect("the raw interface has it now");
    let mut nothing = allocator.buffer::<f32>(0, &stream).expect("nothing");
    assert!(nothing.addr().is_null() && nothing.is_empty());
    nothing.copy_from_host(&[]).expect("nothing");
    nothing.clear().expect("nothing");
    assert!(allocator.buffer::<u128>(usize::MAX, &stream).expect_err("huge").is_out_of_memory());
    drop((nothing, allocator, stream));
    assert_eq!(session.outstanding(), 0);
}

/// A peer reaches everything there is and will be, or, if any call fails, nothing.
#[test]
fn peers_reach_everything_or_nothing() {
    for successes in 0.. {
        let session = Session::new(&[256 * MIB, 256 * MIB]);
        let backend = backend(&session);
        let mut config = Config::pytorch();
        config.settings.expandable_segments = Some(true);
        let growing = CudaAllocator::on(backend.clone(), config).expect("allocator");
        let home = backend.create_stream(SECOND).expect("stream");
        let other = backend.create_stream(SECOND).expect("stream");
        let reached = |addr: Addr| session.reaches(0, addr.get());
        let blocks = [(MIB, &home), (50 * MIB, &home), (30 * MIB, &other)]
            .map(|(bytes, stream)| growing.allocate(bytes, stream).expect("room"));
        let segment = backend.acquire(SECOND, 4 * MIB, &home).expect("room");
        assert!(blocks.iter().all(|block| !reached(block.addr())));

        session.fail("cuMemSetAccess", successes, code::UNKNOWN);
        let enabled = backend.enable_peer_access(FIRST, SECOND);
        if enabled.is_err() {
            assert!(blocks.iter().all(|block| !reached(block.addr())), "{successes}");
            assert!(!reached(segment.base()));
            backend.enable_peer_access(FIRST, SECOND).expect("works now");
        }
        session.clear_faults();
        let later = growing.allocate(70 * MIB, &other).expect("room");
        let imported = {
            let mut token = None;
            let page = backend.create(SECOND, 4 * MIB).expect("room");
            token.replace(alloc_core::backend::SharePages::export_page(&backend, &page).ok());
            let token = token.flatten().expect("exports");
            let imported =
                alloc_core::backend::SharePages::import_page(&backend, SECOND, 4 * MIB, token);
            backend.destroy(page).expect("destroys");
            imported.expect("imports")
        };
        let range = backend.reserve(SECOND, 4 * MIB).expect("addresses");
        backend.map(&range, range.base(), &imported).expect("maps");
        backend.set_access(&range, range.base(), 4 * MIB, SECOND).expect("access");
        let ends = |addr: Addr, bytes: u64| [addr, addr + (bytes - 1)];
        for block in blocks.iter().chain([&later]) {
            assert!(ends(block.addr(), block.bytes()).into_iter().all(reached), "{successes}");
        }
        assert!(reached(segment.base()) && reached(range.base()));
        assert!(!session.reaches(1, 1 << 20), "nothing is there");

        // Memory that a peer cannot be let into is not handed out.
        session.fail("cuMemSetAccess", 1, code::UNKNOWN);
        assert!(growing.allocate(90 * MIB, &home).is_err());
        session.clear_faults();
        backend.unmap(&range, range.base(), 4 * MIB).expect("unmaps");
        backend.unreserve(range).expect("unreserves");
        backend.destroy(imported).expect("destroys");
        backend.release(segment).expect("releases");
        for block in blocks.into_iter().chain([later]) {
            growing.free(block).expect("frees");
        }
        growing.check().expect("sound");
        growing.empty_cache().expect("gives everything back");
        if enabled.is_ok() {
            assert!(successes > 4, "every page was let in");
            break;
        }
    }
}

/// A segment that does not begin where the driver's memory does is opened where it begins.
#[test]
fn segments_are_opened_where_they_begin() {
    for odd in [false, true] {
        let session = Session::new(&[64 * MIB]);
        if odd {
            session.use_odd_addresses();
        }
        let backend = backend(&session);
        let stream = backend.create_stream(FIRST).expect("stream");
        let segment = backend.acquire(FIRST, 4 * MIB, &stream).expect("room");
        let token = backend.export_segment(&segment).expect("exports");
        let again = backend.export_segment(&segment).expect("exports");
        assert_eq!(token.bytes, again.bytes, "two exports are worth the same");
        let opened = backend.open_segment(FIRST, 4 * MIB, token).expect("opens");
        assert_eq!(opened.bytes(), 4 * MIB);
        let context = backend.context(FIRST).expect("context");
        // SAFETY: device memory of the test.
        unsafe { context.copy_to_device(segment.base().get() + 100, b"word") }.expect("copies");
        let mut word = [0; 4];
        context.copy_to_host(&mut word, opened.base().get() + 100).expect("copies");
        assert_eq!(&word, b"word");
        backend.close_segment(opened).expect("closes");
        let short = Token { kind: TokenKind(1), bytes: vec![0; 40], descriptor: None };
        assert_eq!(backend.open_segment(FIRST, MIB, short).unwrap_err(), CudaError::BadToken);
        backend.release(segment).expect("releases");
        let stale = backend.open_segment(FIRST, 4 * MIB, again);
        assert!(stale.is_err(), "it is gone");
    }
}

/// Events of other processes end with them, and are used again by their own.
#[test]
fn shared_events_are_recycled() {
    let session = Session::new(&[64 * MIB]);
    let backend = backend(&session);
    let [stream, side] = [(); 2].map(|()| backend.create_stream(FIRST).expect("stream"));
    let held = gate(&stream);
    let (event, token) = backend.export_event(&stream).expect("exports");
    backend.await_event(&side, &token).expect("waits");
    let after = backend.record(&side).expect("records");
    assert_eq!(backend.query(&after).expect("asks"), Completion::Pending);
    drop(held);
    backend.wait(&after).expect("waits");
    drop(event);
    let before = session.outstanding();
    let (event, again) = backend.export_event(&stream).expect("exports");
    assert_eq!((session.outstanding(), &again.bytes), (before, &token.bytes), "the same event");
    drop(event);
    let strange = Token { kind: TokenKind(1), ..again };
    let error = backend.await_event(&side, &strange).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
