//! What backends whose streams can be captured must do besides.

use std::collections::HashSet;

use alloc_core::backend::{Backend, Capture, CaptureId, CaptureStatus, CaptureTips, GraphNodeId};

use super::{Harness, MIB, StreamOf, must, must_take};
use alloc_core::backend::{Completion, Stream};

/// What the suite cannot do through the traits alone, for captures.
pub trait CaptureHarness: Harness {
    /// Begins a capture on `stream`, in the mode that forbids other threads most.
    fn begin_capture(&self, stream: &<Self::Backend as Backend>::Stream);

    /// Ends the capture that was begun on `stream`. Returns whether it gave a graph, which is not
    /// needed any more.
    fn end_capture(&self, stream: &<Self::Backend as Backend>::Stream) -> bool;

    /// What is queued on `after` from now on comes after all that is queued on `before`. If `before`
    /// captures, `after` joins its capture.
    fn order(
        &self,
        before: &<Self::Backend as Backend>::Stream,
        after: &<Self::Backend as Backend>::Stream,
    );
}

/// Everything that a backend with [`Capture`] must do about it. `make` is called once for each
/// check.
///
/// # Panics
/// If the backend breaks the contract.
pub fn run_capture<H: CaptureHarness>(make: impl Fn() -> H)
where
    H::Backend: Capture,
{
    captures_have_identities(&make());
    streams_join_a_capture(&make());
    pasts_hold_what_comes_before(&make());
    other_calls_do_not_disturb(&make());
    captures_are_apart(&make());
}

fn status<H: Harness>(harness: &H, stream: &StreamOf<H>) -> CaptureStatus
where
    H::Backend: Capture,
{
    must("capture_status", harness.backend().capture_status(stream))
}

#[track_caller]
fn active<H: Harness>(harness: &H, stream: &StreamOf<H>) -> CaptureId
where
    H::Backend: Capture,
{
    match status(harness, stream) {
        CaptureStatus::Active(id) => id,
        other => panic!("the stream captures, and the status is {other:?}"),
    }
}

#[track_caller]
fn tips<H: Harness>(harness: &H, stream: &StreamOf<H>) -> HashSet<GraphNodeId>
where
    H::Backend: Capture,
{
    let tips = must("capture_tips", harness.backend().capture_tips(stream));
    let CaptureTips { capture, nodes } = tips.expect("a capturing stream has tips");
    assert_eq!(capture, active(harness, stream), "the tips are of another capture");
    nodes.into_iter().collect()
}

fn past<H: Harness>(harness: &H, stream: &StreamOf<H>) -> HashSet<GraphNodeId>
where
    H::Backend: Capture,
{
    let mut past = HashSet::new();
    must("extend_past", harness.backend().extend_past(stream, &mut past));
    past
}

/// A stream captures from begin to end, under an id that never comes back.
fn captures_have_identities<H: CaptureHarness>(harness: &H)
where
    H::Backend: Capture,
{
    let stream = harness.stream();
    let mut ids = HashSet::new();
    for _ in 0..3 {
        assert_eq!(status(harness, &stream), CaptureStatus::None, "nothing is captured");
        let tips = must("capture_tips", harness.backend().capture_tips(&stream));
        assert_eq!(tips, None, "nothing is captured");
        assert!(past(harness, &stream).is_empty(), "nothing is captured");
        harness.begin_capture(&stream);
        assert!(ids.insert(active(harness, &stream)), "an id was used twice");
        harness.queue_work(&stream);
        assert!(ids.contains(&active(harness, &stream)), "a capture changed its id");
        assert!(harness.end_capture(&stream), "the capture failed");
    }
    assert_eq!(status(harness, &stream), CaptureStatus::None, "the capture is over");
}

/// A stream that is ordered after a capturing one takes part in its capture, others do not.
fn streams_join_a_capture<H: CaptureHarness>(harness: &H)
where
    H::Backend: Capture,
{
    let [main, side, other] = [0; 3].map(|_| harness.stream());
    harness.begin_capture(&main);
    harness.queue_work(&main);
    assert_eq!(status(harness, &side), CaptureStatus::None, "it has not joined");
    harness.order(&main, &side);
    assert_eq!(active(harness, &side), active(harness, &main));
    assert_eq!(status(harness, &other), CaptureStatus::None, "it takes no part");
    harness.queue_work(&side);
    harness.order(&side, &main);
    assert!(harness.end_capture(&main), "the capture failed");
    assert_eq!(status(harness, &side), CaptureStatus::None, "the capture is over");
}

/// The past of a stream holds its own work and that of streams it was ordered after, and no more.
fn pasts_hold_what_comes_before<H: CaptureHarness>(harness: &H)
where
    H::Backend: Capture,
{
    let [main, side] = [0; 2].map(|_| harness.stream());
    harness.begin_capture(&main);
    assert!(tips(harness, &main).is_empty(), "no work is captured yet");
    harness.queue_work(&main);
    let first = tips(harness, &main);
    assert!(!first.is_empty(), "captured work leaves no trace");
    harness.order(&main, &side);
    harness.queue_work(&side);
    let used = tips(harness, &side);
    harness.queue_work(&main);
    let mut known = past(harness, &main);
    assert!(known.is_superset(&first), "earlier work of the stream itself is missing");
    assert!(past(harness, &side).is_superset(&first), "work before the fork is missing");
    assert!(known.is_disjoint(&used), "work of a stream that was not joined is in the past");
    harness.order(&side, &main);
    assert!(past(harness, &main).is_superset(&used), "work of a joined stream is missing");
    harness.queue_work(&main);
    must("extend_past", harness.backend().extend_past(&main, &mut known));
    assert_eq!(known, past(harness, &main), "a past that is extended lacks something");
    assert!(known.is_superset(&tips(harness, &main)), "the latest work is missing");
    assert!(harness.end_capture(&main), "the capture failed");
}

/// Memory and events of other streams may be had while a stream captures.
fn other_calls_do_not_disturb<H: CaptureHarness>(harness: &H)
where
    H::Backend: Capture,
{
    let backend = harness.backend();
    let [main, other] = [0; 2].map(|_| harness.stream());
    let early = must("record", backend.record(&other));
    harness.begin_capture(&main);
    harness.queue_work(&main);
    let segments =
        [&main, &other].map(|s| must("acquire", backend.acquire(s.device(), 2 * MIB, s)));
    harness.queue_work(&other);
    let event = must("record", backend.record(&other));
    must("query", backend.query(&event));
    must("wait", backend.wait(&early));
    must("wait", backend.wait(&event));
    assert_eq!(must("query", backend.query(&event)), Completion::Reached);
    assert!(harness.end_capture(&main), "a call on another stream broke the capture");
    for segment in segments {
        must_take("release", backend.release(segment));
    }
}

/// Captures that go on at once know nothing of each other.
fn captures_are_apart<H: CaptureHarness>(harness: &H)
where
    H::Backend: Capture,
{
    let streams = [0; 2].map(|_| harness.stream());
    for stream in &streams {
        harness.begin_capture(stream);
        harness.queue_work(stream);
    }
    let [first, second] = [0, 1].map(|n| active(harness, &streams[n]));
    assert_ne!(first, second, "two captures have one id");
    assert!(harness.end_capture(&streams[0]), "the capture failed");
    assert_eq!(active(harness, &streams[1]), second, "it goes on");
    assert!(harness.end_capture(&streams[1]), "the capture failed");
}
