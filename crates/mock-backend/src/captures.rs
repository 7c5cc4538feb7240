//! Stream capture: which streams capture into which graph, and what that forbids.
//!
//! Captured work does not run, so it is kept apart from the streams' queues: within a capture each
//! stream has a [`Lane`] of its own, in which the same rules of order hold. Replaying graphs, and
//! judging what a replay may alias, would build on [`Graph`].

use std::collections::BTreeMap;
use std::thread::{self, ThreadId};

use alloc_core::{Addr, StreamId};

use crate::streams::{Lane, id_of};

/// Whom a capture forbids calls that are unsafe during it (CUDA's stream capture modes).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CaptureMode {
    /// Every thread.
    Global,
    /// The thread that began it.
    ThreadLocal,
    /// Nobody.
    Relaxed,
}

/// What a finished capture holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Graph {
    /// Streams that took part, ascending.
    pub streams: Vec<StreamId>,
    /// Memory that its work touches, as (address, bytes), in the order of queueing.
    pub touches: Vec<(Addr, u64)>,
}

/// Why a capture could not be begun or ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CaptureError {
    /// The stream captures already.
    AlreadyCapturing,
    /// The stream does not capture, or did not begin the capture.
    NotTheOrigin,
    /// Ended on another thread than it was begun on (allowed for [`CaptureMode::Relaxed`]).
    WrongThread,
    /// A forbidden call happened during it.
    Invalidated,
    /// A stream that joined has work that the first stream was not ordered after.
    Unjoined,
}

impl std::fmt::Display for CaptureError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            CaptureError::AlreadyCapturing => "the stream is capturing already",
            CaptureError::NotTheOrigin => "the stream did not begin a capture",
            CaptureError::WrongThread => "a capture must end on the thread that began it",
            CaptureError::Invalidated => "a forbidden call invalidated the capture",
            CaptureError::Unjoined => "a stream of the capture was not joined to the first one",
        })
    }
}

impl std::error::Error for CaptureError {}

#[derive(Debug)]
pub(crate) struct Capture {
    origin: usize,
    mode: CaptureMode,
    thread: ThreadId,
    valid: bool,
    pub(crate) lanes: BTreeMap<usize, Lane>,
    pub(crate) touches: Vec<(Addr, u64)>,
}

/// The captures going on.
#[derive(Debug, Default)]
pub(crate) struct Captures {
    next: u64,
    active: BTreeMap<u64, Capture>,
}

impl Captures {
    pub(crate) fn begin(&mut self, stream: usize, mode: CaptureMode) -> Result<(), CaptureError> {
        if self.of(stream).is_some() {
            return Err(CaptureError::AlreadyCapturing);
        }
        self.next += 1;
        let capture = Capture {
            origin: stream,
            mode,
            thread: thread::current().id(),
            valid: true,
            lanes: BTreeMap::from([(stream, Lane::default())]),
            touches: Vec::new(),
        };
        self.active.insert(self.next, capture);
        Ok(())
    }

    /// Ends the capture that `stream` began. It is over also if this is an error, unless it was the
    /// wrong stream or thread.
    pub(crate) fn end(&mut self, stream: usize) -> Result<Graph, CaptureError> {
        let id = self.of(stream).ok_or(CaptureError::NotTheOrigin)?;
        let capture = &self.active[&id];
        if capture.origin != stream {
            return Err(CaptureError::NotTheOrigin);
        }
        if capture.mode != CaptureMode::Relaxed && capture.thread != thread::current().id() {
            return Err(CaptureError::WrongThread);
        }
        let Some(capture) = self.active.remove(&id) else {
            return Err(CaptureError::NotTheOrigin);
        };
        if !capture.valid {
            return Err(CaptureError::Invalidated);
        }
        let joined = &capture.lanes[&stream].clock;
        let mut sides = capture.lanes.iter().filter(|(side, _)| **side != stream);
        if sides.any(|(side, lane)| joined.get(*side) < lane.queued) {
            return Err(CaptureError::Unjoined);
        }
        let streams = capture.lanes.keys().map(|&s| id_of(s)).collect();
        Ok(Graph { streams, touches: capture.touches })
    }

    /// The capture that `stream` takes part in.
    pub(crate) fn of(&self, stream: usize) -> Option<u64> {
        self.active.iter().find(|(_, c)| c.lanes.contains_key(&stream)).map(|(&id, _)| id)
    }

    pub(crate) fn get(&self, id: u64) -> Option<&Capture> {
        self.active.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: u64) -> Option<&mut Capture> {
        self.active.get_mut(&id)
    }

    /// Invalidates the captures that forbid this thread unsafe calls; whether there were any.
    pub(crate) fn strike_unsafe_call(&mut self) -> bool {
        let this = thread::current().id();
        self.invalidate(|capture| match capture.mode {
            CaptureMode::Global => true,
            CaptureMode::ThreadLocal => capture.thread == this,
            CaptureMode::Relaxed => false,
        })
    }

    /// Invalidates every capture; whether there were any.
    pub(crate) fn strike_all(&mut self) -> bool {
        self.invalidate(|_| true)
    }

    /// Invalidates one capture.
    pub(crate) fn strike(&mut self, id: u64) {
        if let Some(capture) = self.active.get_mut(&id) {
            capture.valid = false;
        }
    }

    fn invalidate(&mut self, which: impl Fn(&Capture) -> bool) -> bool {
        let mut any = false;
        for capture in self.active.values_mut().filter(|c| which(c)) {
            capture.valid = false;
            any = true;
        }
        any
    }
}
