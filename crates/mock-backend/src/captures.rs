//! Stream capture: which streams capture into which graph, and what that forbids.
//!
//! Captured work does not run, so it is kept apart from the streams' queues: within a capture each
//! stream has a [`Lane`] of its own, in which the same rules of order hold. What becomes of it is in
//! `graphs`.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::thread::{self, ThreadId};

use alloc_core::backend::{CaptureId, CaptureStatus, CaptureTips, GraphNodeId};

use crate::graphs::{Recorded, Sharing};
use crate::streams::Lane;

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

/// A stream within a capture.
#[derive(Debug, Default)]
pub(crate) struct CaptureLane {
    pub(crate) lane: Lane,
    /// The nodes that the next one comes right after.
    pub(crate) tips: BTreeSet<u64>,
}

#[derive(Debug)]
pub(crate) struct Capture {
    origin: usize,
    mode: CaptureMode,
    thread: ThreadId,
    valid: bool,
    pub(crate) lanes: BTreeMap<usize, CaptureLane>,
    /// What each node comes right after.
    before: Vec<Vec<u64>>,
    pub(crate) recorded: Recorded,
}

impl Capture {
    /// Adds a piece of work of `stream`; the lane, in which it is the latest.
    pub(crate) fn add_node(&mut self, stream: usize) -> &mut CaptureLane {
        let node = self.before.len() as u64;
        let own = self.lanes.entry(stream).or_default();
        let before = std::mem::replace(&mut own.tips, BTreeSet::from([node]));
        self.before.push(before.into_iter().collect());
        own.lane.queued += 1;
        own
    }
}

/// The captures going on.
#[derive(Debug)]
pub(crate) struct Captures {
    next: u64,
    active: BTreeMap<u64, Capture>,
}

impl Captures {
    /// None yet. Ids are above `first`.
    pub(crate) fn above(first: u64) -> Self {
        Captures { next: first, active: BTreeMap::new() }
    }

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
            lanes: BTreeMap::from([(stream, CaptureLane::default())]),
            before: Vec::new(),
            recorded: Recorded::new(Sharing::Alone(self.next)),
        };
        self.active.insert(self.next, capture);
        Ok(())
    }

    /// Ends the capture that `stream` began. It is over also if this is an error, unless it was the
    /// wrong stream or thread.
    pub(crate) fn end(&mut self, stream: usize) -> Result<Recorded, CaptureError> {
        let id = self.of(stream).ok_or(CaptureError::NotTheOrigin)?;
        let capture = &self.active[&id];
        if capture.origin != stream {
            return Err(CaptureError::NotTheOrigin);
        }
        if capture.mode != CaptureMode::Relaxed && capture.thread != thread::current().id() {
            return Err(CaptureError::WrongThread);
        }
        let Some(mut capture) = self.active.remove(&id) else {
            return Err(CaptureError::NotTheOrigin);
        };
        if !capture.valid {
            return Err(CaptureError::Invalidated);
        }
        let joined = &capture.lanes[&stream].lane.clock;
        let mut sides = capture.lanes.iter().filter(|(side, _)| **side != stream);
        if sides.any(|(side, own)| joined.get(*side) < own.lane.queued) {
            return Err(CaptureError::Unjoined);
        }
        capture.recorded.streams = capture.lanes.into_keys().collect();
        Ok(capture.recorded)
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.active.len()
    }

    /// What all of them have recorded so far, with their ids.
    pub(crate) fn recorded(&self) -> impl Iterator<Item = (u64, &Recorded)> {
        self.active.iter().map(|(&id, capture)| (id, &capture.recorded))
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

    pub(crate) fn status(&self, stream: usize) -> CaptureStatus {
        match self.of(stream) {
            None => CaptureStatus::None,
            Some(id) if self.active[&id].valid => CaptureStatus::Active(CaptureId::new(id)),
            Some(_) => CaptureStatus::Invalidated,
        }
    }

    pub(crate) fn tips(&self, stream: usize) -> Option<CaptureTips> {
        let id = self.of(stream).filter(|id| self.active[id].valid)?;
        let tips = &self.active[&id].lanes[&stream].tips;
        let nodes = tips.iter().map(|&node| GraphNodeId::new(node)).collect();
        Some(CaptureTips { capture: CaptureId::new(id), nodes })
    }

    pub(crate) fn extend_past(&self, stream: usize, past: &mut HashSet<GraphNodeId>) {
        let Some(tips) = self.tips(stream) else { return };
        let before = &self.active[&tips.capture.get()].before;
        let mut found = tips.nodes;
        while let Some(node) = found.pop() {
            if past.insert(node) {
                found.extend(before[node.get() as usize].iter().map(|&n| GraphNodeId::new(n)));
            }
        }
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
