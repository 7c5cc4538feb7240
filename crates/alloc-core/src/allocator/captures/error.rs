//! What a graph's memory is up to, and why a step of it was not taken.

use crate::backend::CaptureId;
use crate::error::AllocError;
use crate::units::{PoolId, StreamId};
use std::error::Error;
use std::fmt;

/// What a [`GraphMemory`](crate::GraphMemory) is up to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GraphState {
    /// There is no graph.
    Idle,
    /// A capture is about to begin.
    Expecting,
    /// A capture goes on.
    Capturing,
    /// The graph may be replayed.
    Captured,
}

impl fmt::Display for GraphState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GraphState::Idle => "has no graph",
            GraphState::Expecting => "expects a capture",
            GraphState::Capturing => "is being captured into",
            GraphState::Captured => "belongs to a graph",
        })
    }
}

/// Why a step of a [`GraphMemory`](crate::GraphMemory) was not taken. Nothing has changed then.
#[derive(Debug)]
#[non_exhaustive]
pub enum CaptureError<E> {
    /// The step does not follow from the state.
    WrongState {
        /// The step.
        step: &'static str,
        /// The state.
        state: GraphState,
    },
    /// The stream does not capture. Begin the capture with the driver first.
    NotCapturing {
        /// The stream.
        stream: StreamId,
    },
    /// The capture has failed already: end it with the driver, and abort it here.
    Invalidated {
        /// The stream.
        stream: StreamId,
    },
    /// The capture has memory already.
    TakenCapture {
        /// The capture.
        capture: CaptureId,
    },
    /// Another capture allocates from the pool. Graphs that share a pool are captured one after the
    /// other.
    BusyPool {
        /// The pool.
        pool: PoolId,
        /// The other capture.
        capture: CaptureId,
    },
    /// No such capture is part of this one, or it has ended.
    UnknownCapture {
        /// What was passed.
        capture: CaptureId,
    },
    /// The capture goes on: end it with the driver first.
    StillCapturing {
        /// The stream that it was begun on.
        stream: StreamId,
    },
    /// The allocator failed.
    Alloc(AllocError<E>),
}

impl<E: fmt::Display> fmt::Display for CaptureError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CaptureError::WrongState { step, state } => {
                write!(f, "cannot {step}: the memory {state}")
            }
            CaptureError::NotCapturing { stream } => {
                write!(f, "{stream} does not capture: begin the capture with the driver first")
            }
            CaptureError::Invalidated { stream } => write!(
                f,
                "the capture on {stream} has failed: end it with the driver, then abort it here"
            ),
            CaptureError::TakenCapture { capture } => write!(f, "{capture} has memory already"),
            CaptureError::BusyPool { pool, capture } => write!(
                f,
                "{capture} allocates from pool {pool:?}: graphs that share a pool are captured one \
                 after the other"
            ),
            CaptureError::UnknownCapture { capture } => {
                write!(f, "{capture} is not a part of this capture that goes on")
            }
            CaptureError::StillCapturing { stream } => {
                write!(f, "{stream} still captures: end the capture with the driver first")
            }
            CaptureError::Alloc(error) => error.fmt(f),
        }
    }
}

impl<E: Error + 'static> Error for CaptureError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            CaptureError::Alloc(error) => error.source(),
            _ => None,
        }
    }
}
