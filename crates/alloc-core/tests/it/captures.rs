//! The memory of a graph as a state machine: every step in every state, and failures at each.

use crate::rig::*;
use alloc_core::backend::ErrorKind;
use alloc_core::{AllocError, BackendOp, CaptureError, GraphMemory, GraphState, Policy};
use mock_backend::{Call, CaptureMode, Fault, MockBackend, MockError, MockStream};

type Memory = GraphMemory<MockBackend>;
type Outcome = Result<(), CaptureError<MockError>>;

const STATES: [GraphState; 4] =
    [GraphState::Idle, GraphState::Expecting, GraphState::Capturing, GraphState::Captured];

/// A step, with what the driver does before it.
type Step = fn(&Rig, &mut Memory, &MockStream) -> Outcome;
const STEPS: [(&str, Step, [bool; 4]); 6] = [
    ("expect", |_, memory, _| memory.expect(), [true, false, false, false]),
    (
        "begin",
        |rig, memory, s| {
            let _ = rig.backend.begin_capture(s, CaptureMode::Global);
            let begun = memory.begin(s);
            if begun.is_err() && memory.state() != GraphState::Capturing {
                rig.backend.end_capture(s).unwrap();
            }
            begun
        },
        [true, true, false, false],
    ),
    (
        "end",
        |rig, memory, s| {
            let _ = rig.backend.end_capture(s);
            memory.end()
        },
        [false, false, true, false],
    ),
    (
        "abort",
        |rig, memory, s| {
            let _ = rig.backend.end_capture(s);
            memory.abort()
        },
        [false, true, true, false],
    ),
    ("note_replay", |_, memory, s| memory.note_replay(s), [false, false, false, true]),
    ("reset", |_, memory, _| memory.reset(), [true, false, false, true]),
];

/// Brings a memory into a state, with a block in it if it can have one.
fn bring(rig: &Rig, memory: &mut Memory, s: &MockStream, state: GraphState) {
    if state != GraphState::Idle {
        memory.expect().unwrap();
    }
    if matches!(state, GraphState::Capturing | GraphState::Captured) {
        rig.backend.begin_capture(s, CaptureMode::Global).unwrap();
        memory.begin(s).unwrap();
        let block = rig.alloc(3 * MIB, s);
        rig.free(block);
    }
    if state == GraphState::Captured {
        rig.backend.end_capture(s).unwrap();
        memory.end().unwrap();
    }
    assert_eq!(memory.state(), state);
}

fn is_over(rig: &Rig, memory: Memory, s: &MockStream) {
    let _ = rig.backend.end_capture(s);
    drop(memory);
    rig.empty();
    assert_eq!((rig.reserved(), rig.pools(DEV0).unwrap().len()), (0, 0));
}

#[test]
fn steps_that_do_not_follow_are_refused_and_change_nothing() {
    for (name, step, allowed) in STEPS {
        for (state, allowed) in STATES.into_iter().zip(allowed) {
            let rig = Rig::new(Policy::Ours, "");
            let s = rig.s(1);
            let mut memory = rig.graph_memory();
            bring(&rig, &mut memory, &s, state);
            let pinned = |rig: &Rig| rig.pools(DEV0).unwrap().iter().any(|pool| pool.pinned);
            let before = pinned(&rig);
            let outcome = step(&rig, &mut memory, &s);
            assert_eq!(outcome.is_ok(), allowed, "{name} in {state:?}: {outcome:?}");
            if let Err(error) = outcome {
                let CaptureError::WrongState { state: told, .. } = error else {
                    panic!("{name} in {state:?}: {error}")
                };
                assert_eq!((told, memory.state()), (state, state));
                assert_eq!(pinned(&rig), before, "{name} in {state:?}");
                assert!(error.to_string().starts_with("cannot "), "{error}");
            }
            rig.verify();
            is_over(&rig, memory, &s);
        }
    }
}

#[test]
fn a_capture_must_be_there_and_not_taken() {
    for expecting in [false, true] {
        let rig = Rig::new(Policy::Ours, "");
        let [s, other, eager] = [1, 2, 3].map(|n| rig.s(n));
        let mut first = rig.graph_memory();
        bring(&rig, &mut first, &s, GraphState::Capturing);
        let state = if expecting { GraphState::Expecting } else { GraphState::Idle };
        let refused = |mut memory: Memory, stream: &MockStream| {
            bring(&rig, &mut memory, stream, state);
            let error = memory.begin(stream).unwrap_err();
            assert_eq!(memory.state(), state, "{error}");
            rig.verify();
            error
        };
        let error = refused(rig.graph_memory(), &eager);
        assert!(matches!(error, CaptureError::NotCapturing { .. }), "{error}");
        let error = refused(rig.graph_memory(), &s);
        assert!(matches!(error, CaptureError::TakenCapture { .. }), "{error}");
        rig.backend.begin_capture(&other, CaptureMode::Global).unwrap();
        let error = refused(rig.graph_memory_in(first.pool()).unwrap(), &other);
        assert!(matches!(error, CaptureError::BusyPool { .. }), "{error}");
        rig.backend.invalidate_capture(&other);
        let error = refused(rig.graph_memory(), &other);
        assert!(matches!(error, CaptureError::Invalidated { .. }), "{error}");
        assert!(error.to_string().contains("abort"), "{error}");
        rig.backend.end_capture(&other).unwrap_err();
        is_over(&rig, first, &s);
    }
    let rig = Rig::new(Policy::Ours, "");
    let error = rig.graph_memory_in(alloc_core::PoolId::DEFAULT).unwrap_err();
    assert!(matches!(error, AllocError::InvalidArgument { .. }), "{error}");
}

#[test]
fn the_driver_ends_a_capture_first() {
    let rig = Rig::new(Policy::Ours, "");
    let s = rig.s(1);
    let mut memory = rig.graph_memory();
    bring(&rig, &mut memory, &s, GraphState::Capturing);
    let error = memory.end().unwrap_err();
    assert!(matches!(error, CaptureError::StillCapturing { .. }), "{error}");
    let block = rig.alloc(MIB, &s);
    assert_eq!(rig.pool_of(&block), memory.pool(), "it goes on");
    rig.free(block);
    rig.backend.end_capture(&s).unwrap();
    memory.end().unwrap();
    // A replay is waited for, and that is impossible on a stream that captures.
    memory.note_replay(&s).unwrap();
    let mut other = rig.graph_memory();
    rig.begin(&mut other, &s);
    let error = memory.reset().unwrap_err();
    assert!(matches!(error, CaptureError::StillCapturing { .. }), "{error}");
    assert_eq!(memory.state(), GraphState::Captured);
    let graph = rig.end(&mut other, &s);
    memory.reset().unwrap();
    drop(graph);
    is_over(&rig, other, &s);
}

/// TracksConditionalCaptureTree: bodies of conditional nodes, captured apart, have the memory of the
/// whole, however deep.
#[test]
fn parts_of_a_capture_share_its_memory() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let [s, body, inner, other] = [1, 2, 3, 4].map(|n| rig.s(n));
        let begin = |stream: &MockStream, pool| {
            rig.backend.begin_capture(stream, CaptureMode::Global).unwrap();
            rig.backend.judge().capture_shares(stream, number(pool));
        };
        let mut memory = rig.graph_memory();
        rig.begin(&mut memory, &s);
        let root = memory.capture().unwrap();
        let error = memory.begin_part(root, &body).unwrap_err();
        assert!(matches!(error, CaptureError::NotCapturing { .. }), "{error}");
        begin(&body, memory.pool());
        let before = rig.alloc(MIB, &body);
        assert_eq!(rig.pool_of(&before), alloc_core::PoolId::DEFAULT, "nobody was told");
        let part = memory.begin_part(root, &body).unwrap();
        let error = memory.begin_part(root, &body).unwrap_err();
        assert!(matches!(error, CaptureError::TakenCapture { .. }), "{error}");
        begin(&inner, memory.pool());
        let deep = memory.begin_part(part, &inner).unwrap();
        let blocks = [&s, &body, &inner].map(|stream| rig.alloc(MIB, stream));
        assert!(blocks.iter().all(|block| rig.pool_of(block) == memory.pool()));
        blocks.into_iter().for_each(|block| rig.free(block));
        rig.backend.end_capture(&inner).unwrap();
        memory.end_part(deep).unwrap();
        let error = memory.end_part(deep).unwrap_err();
        assert!(matches!(error, CaptureError::UnknownCapture { .. }), "{error}");
        begin(&other, memory.pool());
        let error = memory.begin_part(deep, &other).unwrap_err();
        assert!(
            matches!(error, CaptureError::UnknownCapture { .. }),
            "its parent has ended: {error}"
        );
        rig.backend.end_capture(&other).unwrap();
        rig.backend.end_capture(&body).unwrap();
        memory.end_part(part).unwrap();
        let error = memory.end_part(root).unwrap_err();
        assert!(matches!(error, CaptureError::UnknownCapture { .. }), "that is `end`: {error}");
        let graph = rig.end(&mut memory, &s);
        let error = memory.begin_part(root, &body).unwrap_err();
        assert!(matches!(error, CaptureError::WrongState { .. }), "{error}");
        rig.free(before);
        drop(graph);
        is_over(&rig, memory, &s);
    }
}

/// RootEndClearsActiveDescendants: the end of a capture ends its parts. What they used on side streams
/// is settled then, not before.
#[test]
fn the_end_of_a_capture_ends_its_parts() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let [s, body, side] = [1, 2, 3].map(|n| rig.s(n));
        let mut memory = rig.graph_memory();
        rig.begin(&mut memory, &s);
        let root = memory.capture().unwrap();
        let block = rig.alloc(3 * MIB, &s);
        rig.backend.begin_capture(&body, CaptureMode::Global).unwrap();
        rig.backend.judge().capture_shares(&body, number(memory.pool()));
        let part = memory.begin_part(root, &body).unwrap();
        rig.backend.order(&body, &side);
        rig.record(&block, &side);
        rig.free(block);
        rig.backend.order(&side, &body);
        let graph_of_body = rig.backend.end_capture(&body).unwrap();
        assert!(rig.active() > 0, "the whole goes on");
        let graph = rig.end(&mut memory, &s);
        assert_eq!(rig.active(), 0);
        let error = memory.end_part(part).unwrap_err();
        assert!(matches!(error, CaptureError::WrongState { .. }), "{error}");
        drop((graph, graph_of_body));
        is_over(&rig, memory, &s);
    }
}

/// A memory can be used for one graph after another.
#[test]
fn around_and_around() {
    let rig = Rig::new(Policy::Ours, "");
    let s = rig.s(1);
    let mut memory = rig.graph_memory();
    let pool = memory.pool();
    for _ in 0..3 {
        bring(&rig, &mut memory, &s, GraphState::Captured);
        memory.reset().unwrap();
        bring(&rig, &mut memory, &s, GraphState::Expecting);
        memory.abort().unwrap();
        assert_eq!(memory.pool(), pool);
    }
    is_over(&rig, memory, &s);
}

#[track_caller]
fn assert_capture_failed<T: std::fmt::Debug>(result: Result<T, AllocError<MockError>>) {
    match result {
        Err(AllocError::Backend { op: BackendOp::Capture, source }) if source.is_injected() => {}
        other => panic!("{other:?}"),
    }
}

/// A backend that cannot tell whether a stream captures is an error, never memory of the wrong pool.
#[test]
fn failures_to_ask_change_nothing() {
    for policy in BOTH {
        let rig = Rig::new(policy, "graph_capture_record_stream_reuse:True");
        let (s, side) = (rig.s(1), rig.s(2));
        let fail = |call| rig.backend.set_faults([Fault::nth(1).of(call).kind(ErrorKind::Other)]);
        let mut memory = rig.graph_memory();
        memory.expect().unwrap();
        rig.backend.begin_capture(&s, CaptureMode::Global).unwrap();
        rig.backend.judge().capture_shares(&s, number(memory.pool()));
        fail(Call::CaptureStatus);
        let error = memory.begin(&s).unwrap_err();
        assert!(matches!(error, CaptureError::Alloc(_)), "{error}");
        assert_eq!(memory.state(), GraphState::Expecting);
        memory.begin(&s).unwrap();

        fail(Call::CaptureStatus);
        assert_capture_failed(rig.try_alloc(MIB, &s));
        let block = rig.alloc(MIB, &s);
        rig.backend.order(&s, &side);
        fail(Call::CaptureStatus);
        assert_capture_failed(rig.record_stream(&block, &side));
        rig.record(&block, &side);
        fail(Call::CaptureTips);
        let (block, error) = rig.try_free(block).unwrap_err();
        assert_capture_failed::<()>(Err(error));
        rig.free(block);
        rig.backend.order(&side, &s);
        fail(Call::ExtendPast);
        assert_capture_failed(rig.try_alloc(MIB, &s));
        let again = rig.alloc(MIB, &s);
        rig.free(again);

        rig.backend.end_capture(&s).unwrap();
        fail(Call::CaptureStatus);
        let error = memory.end().unwrap_err();
        assert!(matches!(error, CaptureError::Alloc(_)), "{error}");
        assert_eq!(memory.state(), GraphState::Capturing);
        memory.end().unwrap();
        memory.note_replay(&side).unwrap();
        fail(Call::Record);
        memory.reset().unwrap_err();
        assert_eq!(memory.state(), GraphState::Captured);
        memory.reset().unwrap();
        rig.backend.set_faults([]);
        is_over(&rig, memory, &s);
    }
}

/// What a failed capture used on a side stream is free when it has been ended, and a use on the
/// failed stream from before waits for its event.
#[test]
fn uses_of_a_failed_capture_are_settled() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let (s, side) = (rig.s(1), rig.s(2));
        let earlier = rig.alloc(3 * MIB, &rig.s(0));
        let at = earlier.addr();
        rig.record(&earlier, &s);
        let mut memory = rig.graph_memory();
        rig.begin(&mut memory, &s);
        let inside = rig.alloc(3 * MIB, &s);
        rig.backend.order(&s, &side);
        rig.record(&inside, &side);
        rig.free(inside);
        rig.backend.invalidate_capture(&s);
        rig.free(earlier);
        let held = rig.active();
        assert!(held > 0, "neither can be reused yet");
        rig.backend.end_capture(&s).unwrap_err();
        memory.abort().unwrap();
        rig.verify();
        let next = rig.alloc(3 * MIB, &rig.s(0));
        assert_eq!((next.addr(), rig.active()), (at, next.bytes()));
        rig.free(next);
        is_over(&rig, memory, &s);
    }
}
