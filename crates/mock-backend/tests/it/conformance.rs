//! The simulator passes its own suite, in each of its modes; broken backends do not.

use std::collections::HashSet;

use alloc_core::DeviceId;
use alloc_core::backend::*;
use mock_backend::conformance::{self, CaptureHarness, Harness};
use mock_backend::{CaptureMode, MockBackend, MockEvent, MockSegment, MockStream, Placement};

use crate::rules::{DEV0, MIB};

struct Plain(MockBackend);

impl Harness for Plain {
    type Backend = MockBackend;

    fn backend(&self) -> &MockBackend {
        &self.0
    }

    fn stream(&self) -> MockStream {
        self.0.stream(DEV0)
    }

    fn queue_work(&self, stream: &MockStream) {
        self.0.launch(stream, mock_backend::Work::new());
    }

    fn synchronize(&self, stream: &MockStream) {
        self.0.sync_stream(stream);
    }
}

impl CaptureHarness for Plain {
    fn begin_capture(&self, stream: &MockStream) {
        self.0.begin_capture(stream, CaptureMode::Global).unwrap();
    }

    fn end_capture(&self, stream: &MockStream) -> bool {
        self.0.end_capture(stream).is_ok()
    }

    fn order(&self, before: &MockStream, after: &MockStream) {
        self.0.order(before, after);
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.0.assert_clean();
        }
    }
}

#[test]
fn the_simulator_conforms() {
    let base = || MockBackend::builder().device(512 * MIB).strict();
    let fresh = || Plain(base().placement(Placement::Fresh { gap: 4096 }).build());
    let by_chance = || Plain(base().ends_by_chance(1, 0.1).build());
    let coarse = || Plain(base().granularity(4 * MIB).build());
    conformance::run(|| Plain(base().build()));
    conformance::run(fresh);
    conformance::run(by_chance);
    conformance::run_virtual_memory(|| Plain(base().build()));
    conformance::run_pools(|| Plain(base().build()));
    conformance::run_pools(fresh);
    conformance::run_virtual_memory(fresh);
    conformance::run_virtual_memory(coarse);
    conformance::run_share_pages(|| Plain(base().build()));
    conformance::run_share_pages(coarse);
    conformance::run_capture(|| Plain(base().build()));
    conformance::run_capture(by_chance);
}

/// What a broken backend does wrong.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// Segments of half the size.
    Small,
    /// Events that are always reached, until they are waited for.
    EarlyThenNot,
    /// Waits that return at once.
    NoWait,
    /// Out of memory that says something else.
    WrongKind,
    /// Memory that is never given back.
    NoRelease,
    /// Captures whose ids come back.
    SameCapture,
    /// Pasts without anything but the tips.
    ShortPast,
    /// Pasts that hold everything.
    WholePast,
    /// Events that cannot be asked about while anything captures.
    NoQueries,
}

/// The simulator with one thing broken.
struct Broken(MockBackend, Fault);

impl Backend for Broken {
    type Stream = MockStream;
    type Event = MockEvent;
    type Segment = MockSegment;
    type Error = Wrapped;

    fn device_count(&self) -> u16 {
        1
    }

    fn acquire(&self, d: DeviceId, bytes: u64, s: &MockStream) -> Result<MockSegment, Wrapped> {
        let bytes = if self.1 == Fault::Small { bytes / 1024 * 512 + 512 } else { bytes };
        self.0.acquire(d, bytes, s).map_err(|e| Wrapped(e, self.1))
    }

    fn release(&self, segment: MockSegment) -> Result<(), Refused<MockSegment, Wrapped>> {
        if self.1 == Fault::NoRelease {
            return Ok(());
        }
        let wrap = |r: Refused<_, _>| Refused { value: r.value, error: Wrapped(r.error, self.1) };
        self.0.release(segment).map_err(wrap)
    }

    fn record(&self, s: &MockStream) -> Result<MockEvent, Wrapped> {
        self.0.record(s).map_err(|e| Wrapped(e, self.1))
    }

    fn query(&self, event: &MockEvent) -> Result<Completion, Wrapped> {
        let answer = self.0.query(event).map_err(|e| Wrapped(e, self.1))?;
        let flip = self.1 == Fault::EarlyThenNot;
        Ok(match answer {
            Completion::Pending if flip => Completion::Reached,
            Completion::Reached if flip => Completion::Pending,
            answer => answer,
        })
    }

    fn wait(&self, event: &MockEvent) -> Result<(), Wrapped> {
        if self.1 == Fault::NoWait {
            return Ok(());
        }
        self.0.wait(event).map_err(|e| Wrapped(e, self.1))
    }
}

impl MemoryInfo for Broken {
    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, Wrapped> {
        self.0.memory(device).map_err(|e| Wrapped(e, self.1))
    }
}

impl Capture for Broken {
    fn capture_status(&self, s: &MockStream) -> Result<CaptureStatus, Wrapped> {
        let status = self.0.capture_status(s).map_err(|e| Wrapped(e, self.1))?;
        Ok(match status {
            CaptureStatus::Active(_) if self.1 == Fault::SameCapture => {
                CaptureStatus::Active(CaptureId::new(1))
            }
            status => status,
        })
    }

    fn capture_tips(&self, s: &MockStream) -> Result<Option<CaptureTips>, Wrapped> {
        self.0.capture_tips(s).map_err(|e| Wrapped(e, self.1))
    }

    fn extend_past(&self, s: &MockStream, past: &mut HashSet<GraphNodeId>) -> Result<(), Wrapped> {
        match self.1 {
            Fault::ShortPast => {
                past.extend(self.capture_tips(s)?.into_iter().flat_map(|tips| tips.nodes));
                Ok(())
            }
            Fault::WholePast if self.0.is_capturing(s) => {
                past.extend((0..99).map(GraphNodeId::new));
                Ok(())
            }
            _ => self.0.extend_past(s, past).map_err(|e| Wrapped(e, self.1)),
        }
    }
}

impl CaptureHarness for Broken {
    fn begin_capture(&self, stream: &MockStream) {
        self.0.begin_capture(stream, CaptureMode::Global).unwrap();
    }

    fn end_capture(&self, stream: &MockStream) -> bool {
        self.0.end_capture(stream).is_ok()
    }

    fn order(&self, before: &MockStream, after: &MockStream) {
        self.0.order(before, after);
    }
}

struct Wrapped(mock_backend::MockError, Fault);

impl std::fmt::Debug for Wrapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::fmt::Display for Wrapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Wrapped {}

impl BackendError for Wrapped {
    fn kind(&self) -> ErrorKind {
        if self.1 == Fault::WrongKind { ErrorKind::Other } else { self.0.kind() }
    }
}

impl Harness for Broken {
    type Backend = Broken;

    fn backend(&self) -> &Broken {
        self
    }

    fn stream(&self) -> MockStream {
        self.0.stream(DEV0)
    }

    fn queue_work(&self, stream: &MockStream) {
        self.0.busy(stream);
    }

    fn synchronize(&self, stream: &MockStream) {
        self.0.sync_stream(stream);
    }
}

#[test]
fn broken_backends_do_not_conform() {
    for (fault, message) in [
        (Fault::Small, "asked for"),
        (Fault::EarlyThenNot, "a later event was reached first"),
        (Fault::NoWait, "assertion"),
        (Fault::WrongKind, "assertion"),
        (Fault::NoRelease, "acquire failed"),
    ] {
        let make = || Broken(MockBackend::builder().device(512 * MIB).build(), fault);
        let panic = std::panic::catch_unwind(|| conformance::run(make)).expect_err("it is broken");
        let literal = panic.downcast_ref::<&str>().copied();
        let text = literal.or(panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("");
        assert!(text.starts_with(message), "{text}");
    }
}

#[test]
fn backends_with_broken_captures_do_not_conform() {
    for (fault, message) in [
        (Fault::SameCapture, "an id was used twice"),
        (Fault::ShortPast, "earlier work of the stream itself is missing"),
        (Fault::WholePast, "work of a stream that was not joined is in the past"),
        (Fault::NoQueries, "query failed"),
    ] {
        let make = || {
            let machine = MockBackend::builder().device(512 * MIB);
            let obeys = fault == Fault::NoQueries;
            let machine = if obeys { machine.obeys_capture_modes() } else { machine };
            Broken(machine.build(), fault)
        };
        let panic = std::panic::catch_unwind(|| conformance::run_capture(make));
        let panic = panic.expect_err("it is broken");
        let literal = panic.downcast_ref::<&str>().copied();
        let text = literal.or(panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("");
        assert!(text.starts_with(message), "{text}");
    }
}
