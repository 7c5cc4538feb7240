//! The contract of the backend traits as a suite that any backend can run, real GPUs included.
//!
//! A backend's test says how to make work and to wait for it ([`Harness`]) and calls [`run`], and
//! [`run_virtual_memory`], [`run_pools`] and [`run_capture`] if it has those powers. Each check panics
//! with what is wrong. They need about 100 MiB on one device that nothing else fills up meanwhile.
//!
//! ```
//! use alloc_core::DeviceId;
//! use mock_backend::conformance::{self, Harness};
//! use mock_backend::{MockBackend, MockStream};
//!
//! struct Mock(MockBackend);
//!
//! impl Harness for Mock {
//!     type Backend = MockBackend;
//!     fn backend(&self) -> &MockBackend { &self.0 }
//!     fn stream(&self) -> MockStream { self.0.stream(DeviceId::new(0)) }
//!     fn queue_work(&self, stream: &MockStream) { self.0.busy(stream) }
//!     fn synchronize(&self, stream: &MockStream) { self.0.sync_stream(stream) }
//! }
//!
//! let make = || Mock(MockBackend::builder().device(1 << 30).strict().build());
//! conformance::run(make);
//! conformance::run_virtual_memory(make);
//! ```

mod capture;
mod pools;

pub use capture::{CaptureHarness, run_capture};
pub use pools::run_pools;

use std::fmt::Debug;

use alloc_core::backend::{
    Backend, BackendError, Completion, ErrorKind, MemoryInfo, Page, Refused, Reservation,
    SEGMENT_ALIGN, Segment, Share, SharePages, Stream, TOKEN_BYTES_MAX, Token, TokenKind,
    VirtualMemory,
};
use alloc_core::{Addr, DeviceId, align_up};

const MIB: u64 = 1 << 20;

/// What the suite cannot do through the traits alone.
pub trait Harness {
    /// The backend under test.
    type Backend: Backend;

    /// The backend, with at least one device; the suite uses the one of [`stream`](Self::stream).
    fn backend(&self) -> &Self::Backend;

    /// A stream that was not returned before, always of the same device.
    fn stream(&self) -> <Self::Backend as Backend>::Stream;

    /// Queues work that takes a while, some milliseconds on a GPU, and returns at once.
    fn queue_work(&self, stream: &<Self::Backend as Backend>::Stream);

    /// Waits until all work of the stream is done.
    fn synchronize(&self, stream: &<Self::Backend as Backend>::Stream);
}

type StreamOf<H> = <<H as Harness>::Backend as Backend>::Stream;

/// Unwraps with a message that names the call.
#[track_caller]
fn must<T, E: Debug>(what: &str, result: Result<T, E>) -> T {
    result.unwrap_or_else(|error| panic!("{what} failed: {error:?}"))
}

/// Unwraps a call that consumes its argument.
#[track_caller]
fn must_take<T, E: Debug>(what: &str, result: Result<(), Refused<T, E>>) {
    if let Err(Refused { error, .. }) = result {
        panic!("{what} failed: {error:?}");
    }
}

/// Everything that every backend must do. `make` is called once for each check.
///
/// # Panics
/// If the backend breaks the contract.
pub fn run<H: Harness>(make: impl Fn() -> H)
where
    H::Backend: MemoryInfo,
{
    streams_have_identities(&make());
    segments_are_aligned_and_apart(&make());
    segments_come_back(&make());
    too_much_is_out_of_memory(&make());
    memory_figures_follow_segments(&make());
    events_follow_their_stream(&make());
    waiting_reaches_the_event(&make());
    events_may_be_dropped_unreached(&make());
    releasing_may_follow_work_at_once(&make());
    handles_cross_threads(&make());
}

/// Stream ids are unique, clones are the same stream, and the device exists.
fn streams_have_identities<H: Harness>(harness: &H) {
    let streams: Vec<StreamOf<H>> = (0..8).map(|_| harness.stream()).collect();
    for (at, stream) in streams.iter().enumerate() {
        assert_eq!(stream.clone().id(), stream.id(), "a clone has another id");
        assert_eq!(stream.device(), streams[0].device(), "the harness changed devices");
        assert!(
            stream.device().index() < usize::from(harness.backend().device_count()),
            "a stream of a device that does not exist"
        );
        let twin = streams[..at].iter().find(|other| other.id() == stream.id());
        assert!(twin.is_none(), "two streams share the id {}", stream.id());
    }
}

/// Segments have the size asked for, are aligned, and do not overlap while they live.
fn segments_are_aligned_and_apart<H: Harness>(harness: &H) {
    let (backend, stream) = (harness.backend(), harness.stream());
    let mut held = Vec::new();
    for bytes in [2 * MIB, 20 * MIB, 512, 2 * MIB, 14 * MIB, 4 * MIB, 2 * MIB + 512] {
        let segment = must("acquire", backend.acquire(stream.device(), bytes, &stream));
        assert!(segment.bytes() >= bytes, "asked for {bytes}, got {}", segment.bytes());
        assert!(!segment.base().is_null(), "a segment at null");
        assert!(
            segment.base().is_aligned(SEGMENT_ALIGN),
            "the base {} is no multiple of 2 MiB",
            segment.base()
        );
        held.push(segment);
    }
    let mut ranges: Vec<(Addr, u64)> = held.iter().map(|s| (s.base(), s.bytes())).collect();
    ranges.sort();
    for pair in ranges.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "segments overlap: {pair:?}");
    }
    for segment in held {
        must_take("release", backend.release(segment));
    }
}

/// What is released can be had again, many times over.
fn segments_come_back<H: Harness>(harness: &H) {
    let (backend, stream) = (harness.backend(), harness.stream());
    for _ in 0..50 {
        let segment = must("acquire", backend.acquire(stream.device(), 20 * MIB, &stream));
        must_take("release", backend.release(segment));
    }
}

/// More than there is fails as out of memory, leaves nothing behind, and harms nothing.
fn too_much_is_out_of_memory<H: Harness>(harness: &H)
where
    H::Backend: MemoryInfo,
{
    let (backend, stream) = (harness.backend(), harness.stream());
    let total = must("memory", backend.memory(stream.device())).total;
    for bytes in [align_up(total, 2 * MIB).unwrap_or(total) + 2 * MIB, 1 << 59] {
        let Err(error) = backend.acquire(stream.device(), bytes, &stream) else {
            panic!("{bytes} bytes were granted, the device has {total}");
        };
        assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    }
    let segment = must("acquire", backend.acquire(stream.device(), 2 * MIB, &stream));
    must_take("release", backend.release(segment));
}

/// A held segment is missing from the free bytes.
fn memory_figures_follow_segments<H: Harness>(harness: &H)
where
    H::Backend: MemoryInfo,
{
    let (backend, stream) = (harness.backend(), harness.stream());
    let before = must("memory", backend.memory(stream.device()));
    assert!(before.free <= before.total, "{before:?}");
    let segment = must("acquire", backend.acquire(stream.device(), 64 * MIB, &stream));
    let during = must("memory", backend.memory(stream.device()));
    assert_eq!(during.total, before.total, "the device changed its size");
    assert!(during.free + 32 * MIB < before.free, "64 MiB are held: {before:?} then {during:?}");
    must_take("release", backend.release(segment));
}

/// Events are reached in the order of recording, and all of them once the stream is idle.
fn events_follow_their_stream<H: Harness>(harness: &H) {
    let (backend, stream) = (harness.backend(), harness.stream());
    let mut events = vec![must("record", backend.record(&stream))];
    for _ in 0..3 {
        harness.queue_work(&stream);
        events.push(must("record", backend.record(&stream)));
    }
    for _ in 0..100 {
        // From the last to the first: once one is reached, so are all before it.
        let mut later_reached = false;
        for event in events.iter().rev() {
            let reached = must("query", backend.query(event)) == Completion::Reached;
            assert!(reached || !later_reached, "a later event was reached first");
            later_reached |= reached;
        }
    }
    harness.synchronize(&stream);
    for event in &events {
        assert_eq!(must("query", backend.query(event)), Completion::Reached);
        must("wait", backend.wait(event));
    }
    harness.queue_work(&stream);
    let first = must("query", backend.query(&events[0]));
    assert_eq!(first, Completion::Reached, "later work made an event unreached");
    harness.synchronize(&stream);
}

/// After a wait the event is reached, whatever other streams do.
fn waiting_reaches_the_event<H: Harness>(harness: &H) {
    let backend = harness.backend();
    let (stream, other) = (harness.stream(), harness.stream());
    harness.queue_work(&other);
    harness.queue_work(&stream);
    let event = must("record", backend.record(&stream));
    must("wait", backend.wait(&event));
    assert_eq!(must("query", backend.query(&event)), Completion::Reached);
    harness.synchronize(&other);
}

/// Events are recycled when dropped, also before they are reached; there is no small limit.
fn events_may_be_dropped_unreached<H: Harness>(harness: &H) {
    let (backend, stream) = (harness.backend(), harness.stream());
    harness.queue_work(&stream);
    for _ in 0..1000 {
        drop(must("record", backend.record(&stream)));
    }
    let held: Vec<_> = (0..1000).map(|_| must("record", backend.record(&stream))).collect();
    harness.synchronize(&stream);
    for event in &held {
        assert_eq!(must("query", backend.query(event)), Completion::Reached);
    }
}

/// A segment may be released while work is queued: the call waits if the driver needs that.
fn releasing_may_follow_work_at_once<H: Harness>(harness: &H) {
    let (backend, stream) = (harness.backend(), harness.stream());
    let segment = must("acquire", backend.acquire(stream.device(), 2 * MIB, &stream));
    harness.queue_work(&stream);
    must_take("release", backend.release(segment));
    harness.synchronize(&stream);
}

/// Segments and events may be given back on another thread than they were made on.
fn handles_cross_threads<H: Harness>(harness: &H) {
    let (backend, stream) = (harness.backend(), harness.stream());
    let segment = must("acquire", backend.acquire(stream.device(), 2 * MIB, &stream));
    let event = must("record", backend.record(&stream));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            must("wait", backend.wait(&event));
            drop(event);
            must_take("release", backend.release(segment));
            let again = must("acquire", backend.acquire(stream.device(), 2 * MIB, &stream));
            must_take("release", backend.release(again));
        });
    });
}

/// What every backend with virtual memory must do besides.
///
/// # Panics
/// If the backend breaks the contract.
pub fn run_virtual_memory<H: Harness>(make: impl Fn() -> H)
where
    H::Backend: VirtualMemory + MemoryInfo,
{
    granularity_is_usable(&make());
    reservations_are_aligned_and_cost_no_memory(&make());
    pages_map_grow_and_go(&make());
    a_page_moves(&make());
    a_page_has_two_addresses(&make());
    too_large_a_page_is_out_of_memory(&make());
}

/// What every backend whose pages other processes can map must do besides; as far as one process can
/// show it.
///
/// # Panics
/// If the backend breaks the contract.
pub fn run_share_pages<H: Harness>(make: impl Fn() -> H)
where
    H::Backend: SharePages,
{
    devices_have_keys(&make());
    a_page_comes_back_from_its_token(&make());
    strange_tokens_are_unsupported(&make());
}

/// No two devices have one key, and a key never changes.
fn devices_have_keys<H: Harness>(harness: &H)
where
    H::Backend: SharePages,
{
    let backend = harness.backend();
    let keys = || -> Vec<_> {
        let devices = (0..backend.device_count()).map(DeviceId::new);
        devices.map(|device| must("device_key", backend.device_key(device))).collect()
    };
    let first = keys();
    for (at, key) in first.iter().enumerate() {
        assert!(!first[..at].contains(key), "two devices have the key {key:?}");
    }
    assert_eq!(first, keys(), "a device has another key now");
}

/// What a token of a page means can be mapped, and outlives the page.
fn a_page_comes_back_from_its_token<H: Harness>(harness: &H)
where
    H::Backend: SharePages,
{
    let (backend, device) = (harness.backend(), harness.stream().device());
    let bytes = page_bytes(harness, device);
    let page = must("create", backend.create(device, bytes));
    let token = must("export_page", backend.export_page(&page));
    assert!(token.bytes.len() <= TOKEN_BYTES_MAX, "{} bytes in a token", token.bytes.len());
    let imported = must("import_page", backend.import_page(device, bytes, token));
    assert_eq!(imported.bytes(), bytes, "an import of another size");
    must_take("destroy", backend.destroy(page));
    let range = must("reserve", backend.reserve(device, bytes));
    must("map", backend.map(&range, range.base(), &imported));
    must("set_access", backend.set_access(&range, range.base(), bytes, device));
    must("unmap", backend.unmap(&range, range.base(), bytes));
    must_take("unreserve", backend.unreserve(range));
    must_take("destroy", backend.destroy(imported));
}

/// A kind of token that nobody knows is `Unsupported`, for pages and for segments.
fn strange_tokens_are_unsupported<H: Harness>(harness: &H)
where
    H::Backend: SharePages,
{
    let (backend, device) = (harness.backend(), harness.stream().device());
    let bytes = page_bytes(harness, device);
    let strange = || Token { kind: TokenKind(u32::MAX), bytes: vec![0; 64], descriptor: None };
    let page = backend.import_page(device, bytes, strange()).map(drop);
    let segment = backend.open_segment(device, bytes, strange()).map(drop);
    for result in [page, segment] {
        let Err(error) = result else { panic!("a strange token was opened") };
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    }
}

fn granularity_is_usable<H: Harness>(harness: &H)
where
    H::Backend: VirtualMemory,
{
    let granularity = harness.backend().granularity(harness.stream().device());
    assert!(granularity > 0, "a granularity of 0");
    let fits =
        granularity.is_multiple_of(SEGMENT_ALIGN) || SEGMENT_ALIGN.is_multiple_of(granularity);
    assert!(fits, "the granularity {granularity} does not go with 2 MiB");
}

/// Bytes of a page for the tests: a multiple of the granularity, and of 2 MiB.
fn page_bytes<H: Harness>(harness: &H, device: DeviceId) -> u64
where
    H::Backend: VirtualMemory,
{
    harness.backend().granularity(device).max(2 * MIB)
}

fn reservations_are_aligned_and_cost_no_memory<H: Harness>(harness: &H)
where
    H::Backend: VirtualMemory + MemoryInfo,
{
    let (backend, device) = (harness.backend(), harness.stream().device());
    let page = page_bytes(harness, device);
    let memory = must("memory", backend.memory(device));
    // As much as an expandable segment takes: 9/8 of the device.
    let bytes = align_up(memory.total / 8 * 9, page).unwrap_or(page);
    let ranges = [bytes, page, bytes].map(|bytes| must("reserve", backend.reserve(device, bytes)));
    for range in &ranges {
        assert!(range.base().is_aligned(SEGMENT_ALIGN), "the base {} is misaligned", range.base());
    }
    let mut spans: Vec<(Addr, u64)> = ranges.iter().map(|r| (r.base(), r.bytes())).collect();
    spans.sort();
    for pair in spans.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "reservations overlap: {pair:?}");
    }
    let during = must("memory", backend.memory(device));
    assert!(during.free + 64 * MIB > memory.free, "reserving took memory");
    for range in ranges {
        must_take("unreserve", backend.unreserve(range));
    }
}

/// Pages are mapped one by one, get access over a run at once, and are unmapped in any order.
fn pages_map_grow_and_go<H: Harness>(harness: &H)
where
    H::Backend: VirtualMemory,
{
    let (backend, stream) = (harness.backend(), harness.stream());
    let device = stream.device();
    let bytes = page_bytes(harness, device);
    for _ in 0..3 {
        let range = must("reserve", backend.reserve(device, 8 * bytes));
        let pages: Vec<_> = (0..4).map(|_| must("create", backend.create(device, bytes))).collect();
        for (slot, page) in (0..).zip(&pages) {
            assert_eq!(page.bytes(), bytes, "a page of another size");
            must("map", backend.map(&range, range.base() + slot * bytes, page));
        }
        must("set_access", backend.set_access(&range, range.base(), 4 * bytes, device));
        for slot in [2, 0, 3, 1] {
            must("unmap", backend.unmap(&range, range.base() + slot * bytes, bytes));
        }
        for page in pages {
            must_take("destroy", backend.destroy(page));
        }
        must_take("unreserve", backend.unreserve(range));
    }
}

/// A page that was unmapped can be mapped elsewhere, in another reservation too.
fn a_page_moves<H: Harness>(harness: &H)
where
    H::Backend: VirtualMemory,
{
    let (backend, device) = (harness.backend(), harness.stream().device());
    let bytes = page_bytes(harness, device);
    let ranges = [0; 2].map(|_| must("reserve", backend.reserve(device, 2 * bytes)));
    let page = must("create", backend.create(device, bytes));
    for range in [&ranges[0], &ranges[1], &ranges[0]] {
        let at = range.base() + bytes;
        must("map", backend.map(range, at, &page));
        must("set_access", backend.set_access(range, at, bytes, device));
        must("unmap", backend.unmap(range, at, bytes));
    }
    must_take("destroy", backend.destroy(page));
    for range in ranges {
        must_take("unreserve", backend.unreserve(range));
    }
}

fn a_page_has_two_addresses<H: Harness>(harness: &H)
where
    H::Backend: VirtualMemory,
{
    let (backend, device) = (harness.backend(), harness.stream().device());
    let bytes = page_bytes(harness, device);
    let range = must("reserve", backend.reserve(device, 2 * bytes));
    let page = must("create", backend.create(device, bytes));
    for at in [range.base(), range.base() + bytes] {
        must("map", backend.map(&range, at, &page));
    }
    must("set_access", backend.set_access(&range, range.base(), 2 * bytes, device));
    for at in [range.base() + bytes, range.base()] {
        must("unmap", backend.unmap(&range, at, bytes));
    }
    must_take("destroy", backend.destroy(page));
    must_take("unreserve", backend.unreserve(range));
}

fn too_large_a_page_is_out_of_memory<H: Harness>(harness: &H)
where
    H::Backend: VirtualMemory + MemoryInfo,
{
    let (backend, device) = (harness.backend(), harness.stream().device());
    let bytes = page_bytes(harness, device);
    let total = must("memory", backend.memory(device)).total;
    let too_much = align_up(total, bytes).unwrap_or(total) + bytes;
    let Err(error) = backend.create(device, too_much) else {
        panic!("a page of {too_much} bytes was granted, the device has {total}");
    };
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    let page = must("create", backend.create(device, bytes));
    must_take("destroy", backend.destroy(page));
}
