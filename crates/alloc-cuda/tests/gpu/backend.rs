//! The backend by itself: segments, events, capture, and the parts of the driver beside it.

use crate::Scenario;
use crate::rig::{FIRST, Gate, KIB, MIB, Rig};
use alloc_core::Addr;
use alloc_core::backend::{Backend, Completion, SEGMENT_ALIGN, Segment, SharePages, VirtualMemory};
use alloc_core::ordered::StreamOrdered;
use alloc_cuda::{CudaBackend, CudaStream};
use cuda_driver::fake::Outcome;
use cuda_driver::{CaptureMode, HostFlags, MemoryPool, PoolCounter};
use mock_backend::conformance::{self, CaptureHarness, Harness};
use std::ptr::NonNull;
use std::time::Duration;

pub(crate) const SCENARIOS: &[Scenario] = &[
    ("backend::conformance", conformance),
    ("backend::conformance_of_virtual_memory", conformance_of_virtual_memory),
    ("backend::conformance_of_sharing", conformance_of_sharing),
    ("backend::conformance_of_capture", conformance_of_capture),
    ("backend::conformance_of_pools", conformance_of_pools),
    ("backend::segments", segments),
    ("backend::events", events),
    ("backend::capture", capture),
    ("backend::pinned_memory", pinned_memory),
    ("backend::driver_pool", driver_pool),
];

/// The suite that every backend of the workspace passes.
struct OfRig<'a>(&'a Rig);

impl Harness for OfRig<'_> {
    type Backend = CudaBackend;

    fn backend(&self) -> &CudaBackend {
        &self.0.backend
    }

    fn stream(&self) -> CudaStream {
        self.0.stream()
    }

    fn queue_work(&self, stream: &CudaStream) {
        if stream.is_captured().expect("asks") {
            return self.0.touch(stream);
        }
        let work = || std::thread::sleep(Duration::from_millis(3));
        stream.driver_stream().call_host(work).expect("queued");
    }

    fn synchronize(&self, stream: &CudaStream) {
        stream.synchronize().expect("no failed work");
    }
}

impl CaptureHarness for OfRig<'_> {
    fn begin_capture(&self, stream: &CudaStream) {
        stream.driver_stream().begin_capture(CaptureMode::Global).expect("begin");
    }

    fn end_capture(&self, stream: &CudaStream) -> bool {
        stream.driver_stream().end_capture().is_ok()
    }

    fn order(&self, before: &CudaStream, after: &CudaStream) {
        self.0.order(before, after);
    }
}

fn conformance(rig: &Rig) -> Outcome {
    conformance::run(|| OfRig(rig));
    Outcome::Done
}

fn conformance_of_virtual_memory(rig: &Rig) -> Outcome {
    if !rig.backend.has_virtual_memory(FIRST).expect("the device exists") {
        return Outcome::Skipped("the device has no virtual memory");
    }
    conformance::run_virtual_memory(|| OfRig(rig));
    Outcome::Done
}

fn conformance_of_sharing(rig: &Rig) -> Outcome {
    if !rig.backend.has_virtual_memory(FIRST).expect("the device exists") {
        return Outcome::Skipped("the device has no virtual memory");
    }
    let page = rig.backend.create(FIRST, rig.backend.granularity(FIRST)).expect("room");
    let exported = rig.backend.export_page(&page);
    rig.backend.destroy(page).expect("destroys");
    if exported.is_err() {
        return Outcome::Skipped("memory cannot be exported here");
    }
    conformance::run_share_pages(|| OfRig(rig));
    Outcome::Done
}

fn conformance_of_capture(rig: &Rig) -> Outcome {
    conformance::run_capture(|| OfRig(rig));
    Outcome::Done
}

fn conformance_of_pools(rig: &Rig) -> Outcome {
    if !rig.backend.has_pools(FIRST).expect("the device exists") {
        return Outcome::Skipped("the device has no memory pools");
    }
    conformance::run_pools(|| OfRig(rig));
    Outcome::Done
}

fn segments(rig: &Rig) -> Outcome {
    let stream = rig.stream();
    let before = rig.free_bytes(FIRST);
    let sizes = [512, 3 * KIB, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 22 * MIB, 130 * MIB];
    let segments = sizes.map(|bytes| {
        let segment = rig.backend.acquire(FIRST, bytes, &stream).expect("room");
        assert!(segment.base().is_aligned(SEGMENT_ALIGN), "{bytes} bytes at {}", segment.base());
        assert_eq!(segment.bytes(), bytes);
        rig.fill(&stream, segment.base(), bytes, 1);
        segment
    });
    let wanted: u64 = sizes.iter().sum();
    // Less a little, which the driver may have had in hand.
    let taken = before.saturating_sub(rig.free_bytes(FIRST));
    assert!(taken + 16 * MIB >= wanted, "the driver's figures count them: {taken} of {wanted}");
    for segment in &segments {
        rig.check(&stream, segment.base(), segment.bytes(), 1);
    }
    assert_eq!(rig.wrong_words(FIRST), 0);
    for segment in segments {
        rig.backend.release(segment).expect("releases");
    }
    Outcome::Done
}

fn events(rig: &Rig) -> Outcome {
    let (busy, idle) = (rig.stream(), rig.stream());
    let gate = Gate::close(&busy);
    let behind = rig.backend.record(&busy).expect("records");
    let beside = rig.backend.record(&idle).expect("records");
    rig.backend.wait(&beside).expect("waits");
    assert_eq!(rig.backend.query(&beside).expect("query"), Completion::Reached);
    assert_eq!(rig.backend.query(&behind).expect("query"), Completion::Pending);
    gate.open();
    rig.backend.wait(&behind).expect("waits");
    let later = Gate::close(&busy);
    assert_eq!(
        rig.backend.query(&behind).expect("query"),
        Completion::Reached,
        "an event is about the work before it, not about its stream"
    );
    later.open();
    busy.synchronize().expect("no failed work");
    Outcome::Done
}

fn capture(rig: &Rig) -> Outcome {
    let (captured, other) = (rig.stream(), rig.stream());
    let segment = rig.backend.acquire(FIRST, 2 * MIB, &other).expect("room");
    let event = rig.backend.record(&other).expect("records");
    captured.driver_stream().begin_capture(CaptureMode::Global).expect("begin");
    rig.fill(&captured, segment.base(), 2 * MIB, 2);
    // What the strictest capture forbids everybody, the backend may do.
    let inside = rig.backend.acquire(FIRST, 4 * MIB, &other).expect("memory during a capture");
    rig.backend.query(&event).expect("a query during a capture");
    // SAFETY: the stream lives.
    let adopted = unsafe { rig.backend.adopt(FIRST, captured.raw()) }.expect("adopts");
    assert_eq!(adopted, captured);
    let graph = captured.driver_stream().end_capture().expect("the capture is whole");
    let mut graph = graph.instantiate().expect("instantiates");
    rig.check(&other, segment.base(), 2 * MIB, 2);
    assert_ne!(rig.wrong_words(FIRST), 0, "nothing has been written yet");
    // SAFETY: the segment is still there.
    unsafe { graph.launch(captured.driver_stream()) }.expect("launches");
    captured.synchronize().expect("no failed work");
    rig.check(&other, segment.base(), 2 * MIB, 2);
    assert_eq!(rig.wrong_words(FIRST), 0);
    rig.backend.release(inside).expect("releases");
    rig.backend.release(segment).expect("releases");
    Outcome::Done
}

fn pinned_memory(rig: &Rig) -> Outcome {
    const BYTES: usize = 64 * 1024;
    let stream = rig.stream();
    let context = rig.context(FIRST);
    let segment = rig.backend.acquire(FIRST, 2 * MIB, &stream).expect("room");
    let there = segment.base().get();
    let flags = HostFlags { portable: true, ..HostFlags::default() };
    let pinned = context.host_allocate(BYTES as u64, flags).expect("pinned memory");
    let mut pages = vec![0u8; BYTES + 4096];
    let offset = pages.as_ptr().align_offset(4096);
    let registered = NonNull::from(&mut pages[offset..offset + BYTES]).cast::<u8>();
    // SAFETY: the vector outlives the registration.
    unsafe { context.host_register(registered, BYTES as u64, flags) }.expect("registers");

    // SAFETY: pinned memory of that length, used here alone.
    unsafe { pinned.write_bytes(0x5a, BYTES) };
    // SAFETY: both sides have that length and stay until the synchronisation.
    unsafe { stream.driver_stream().copy_to_device(there, pinned.as_ptr(), BYTES as u64) }
        .expect("copies");
    // SAFETY: as above.
    unsafe { stream.driver_stream().copy_to_host(registered.as_ptr(), there, BYTES as u64) }
        .expect("copies");
    stream.synchronize().expect("no failed work");
    // SAFETY: nothing uses it any more.
    unsafe { context.host_unregister(registered) }.expect("unregisters");
    // SAFETY: allocated above, and nothing uses it any more.
    unsafe { context.host_free(pinned) }.expect("frees");
    assert!(pages[offset..offset + BYTES].iter().all(|byte| *byte == 0x5a));
    rig.backend.release(segment).expect("releases");
    Outcome::Done
}

fn driver_pool(rig: &Rig) -> Outcome {
    let stream = rig.stream();
    let driver_stream = stream.driver_stream();
    let Ok(pool) = MemoryPool::default_of(rig.context(FIRST).device()) else {
        return Outcome::Skipped("the device has no memory pools");
    };
    let before = pool.counter(PoolCounter::UsedNow).expect("counter");
    let memory = pool.allocate(6 * MIB, driver_stream).expect("room");
    let addr = memory.addr();
    rig.fill(&stream, Addr::new(addr), 6 * MIB, 3);
    rig.check(&stream, Addr::new(addr), 6 * MIB, 3);
    assert_eq!(rig.wrong_words(FIRST), 0);
    assert!(pool.counter(PoolCounter::UsedNow).expect("counter") >= before + 6 * MIB);
    memory.free(driver_stream).expect("frees");
    stream.synchronize().expect("no failed work");
    pool.trim(0).expect("trims");
    Outcome::Done
}
