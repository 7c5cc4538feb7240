//! Captures and graphs of the imitation: work that is recorded, in what order it stands, and what
//! breaks a capture.

use super::memory::Code;
use super::state::{State, Work};
use crate::error::code;
use std::collections::{BTreeMap, BTreeSet};
use std::thread::{self, ThreadId};

/// The driver's numbers of capture modes.
const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;

/// The part of a stream, or of an event, in a capture.
#[derive(Clone)]
pub(super) struct Captured {
    pub(super) id: u64,
    /// Handles of the nodes that what follows comes right after, ascending.
    pub(super) tips: Vec<usize>,
}

/// A piece of recorded work.
struct Node {
    work: Work,
    /// The nodes that it comes right after.
    before: Vec<usize>,
}

/// A capture that goes on.
struct Capture {
    origin: usize,
    thread: ThreadId,
    mode: u32,
    valid: bool,
    /// In the order of recording, which is one in which they can run.
    nodes: Vec<usize>,
}

/// Captures, and the graphs that came of them.
#[derive(Default)]
pub(super) struct Captures {
    active: BTreeMap<u64, Capture>,
    nodes: BTreeMap<usize, Node>,
    /// Work of graphs and of executable graphs, by handle.
    pub(super) graphs: BTreeMap<usize, Vec<Work>>,
}

impl Captures {
    /// Whether nothing has broken the capture.
    pub(super) fn is_valid(&self, id: u64) -> bool {
        self.active.get(&id).is_some_and(|capture| capture.valid)
    }

    fn strike(&mut self, id: u64) {
        if let Some(capture) = self.active.get_mut(&id) {
            capture.valid = false;
        }
    }

    /// Whether captures forbid a thread whose mode is `mode` calls that might disturb them; those
    /// that do are broken by the attempt.
    pub(super) fn forbid_unsafe_call(&mut self, mode: u32) -> bool {
        let this = thread::current().id();
        let mut forbidden = false;
        for capture in self.active.values_mut() {
            let own = capture.thread == this && capture.mode <= THREAD_LOCAL;
            let other = capture.thread != this && capture.mode == GLOBAL;
            if mode <= THREAD_LOCAL && own || mode == GLOBAL && other {
                capture.valid = false;
                forbidden = true;
            }
        }
        forbidden
    }

    /// The nodes that a node comes right after.
    pub(super) fn before(&self, node: usize) -> Result<&[usize], Code> {
        let node = self.nodes.get(&node).ok_or(code::INVALID_VALUE)?;
        Ok(&node.before)
    }

    /// All that comes before what follows `tips`.
    fn past(&self, tips: &[usize]) -> BTreeSet<usize> {
        let (mut past, mut found) = (BTreeSet::new(), tips.to_vec());
        while let Some(node) = found.pop() {
            if past.insert(node) {
                found.extend(self.before(node).unwrap_or_default());
            }
        }
        past
    }
}

impl State {
    pub(super) fn begin_capture(&mut self, stream: usize, mode: u32) -> Result<(), Code> {
        let id = self.handle() as u64;
        let own = self.streams.get_mut(&stream).ok_or(code::INVALID_HANDLE)?;
        if own.captured.is_some() {
            return Err(code::ILLEGAL_STATE);
        }
        own.captured = Some(Captured { id, tips: Vec::new() });
        let thread = thread::current().id();
        let capture = Capture { origin: stream, thread, mode, valid: true, nodes: Vec::new() };
        self.captures.active.insert(id, capture);
        Ok(())
    }

    /// Ends the capture that a stream began; the handle of its graph. It is over in any case.
    pub(super) fn end_capture(&mut self, stream: usize) -> Result<usize, Code> {
        let own = self.streams.get(&stream).ok_or(code::INVALID_HANDLE)?;
        let Captured { id, tips } = own.captured.clone().ok_or(code::ILLEGAL_STATE)?;
        let capture = self.captures.active.get(&id).ok_or(code::ILLEGAL_STATE)?;
        if capture.origin != stream {
            return Err(code::STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode <= THREAD_LOCAL && capture.thread != thread::current().id() {
            return Err(code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let joined = self.captures.past(&tips);
        let mut unjoined = false;
        for side in self.streams.values_mut() {
            if side.captured.as_ref().is_some_and(|captured| captured.id == id) {
                let captured = side.captured.take();
                let mut ends = captured.into_iter().flat_map(|captured| captured.tips);
                unjoined |= ends.any(|node| !joined.contains(&node));
            }
        }
        let capture = self.captures.active.remove(&id).ok_or(code::ILLEGAL_STATE)?;
        let nodes = capture.nodes.iter().filter_map(|node| self.captures.nodes.remove(node));
        let work: Vec<Work> = nodes.map(|node| node.work).collect();
        match (capture.valid, unjoined) {
            (false, _) => Err(code::STREAM_CAPTURE_INVALIDATED),
            (true, true) => Err(code::STREAM_CAPTURE_UNJOINED),
            (true, false) => {
                let handle = self.handle();
                self.captures.graphs.insert(handle, work);
                Ok(handle)
            }
        }
    }

    /// Records work of a stream that is being captured.
    pub(super) fn record_work(&mut self, stream: usize, work: Work) -> Result<(), Code> {
        let node = self.handle();
        let own = self.streams.get_mut(&stream).ok_or(code::INVALID_HANDLE)?;
        let captured = own.captured.as_mut().ok_or(code::ILLEGAL_STATE)?;
        let before = std::mem::replace(&mut captured.tips, vec![node]);
        let capture = self.captures.active.get_mut(&captured.id).ok_or(code::ILLEGAL_STATE)?;
        if !capture.valid {
            return Err(code::STREAM_CAPTURE_INVALIDATED);
        }
        capture.nodes.push(node);
        self.captures.nodes.insert(node, Node { work, before });
        Ok(())
    }

    /// Makes a stream, captured or not, wait for an event that was recorded in a capture.
    pub(super) fn join(&mut self, stream: usize, event: &Captured) -> Result<(), Code> {
        let own = self.streams.get_mut(&stream).ok_or(code::INVALID_HANDLE)?;
        if !self.captures.is_valid(event.id) {
            return Err(code::STREAM_CAPTURE_INVALIDATED);
        }
        match &mut own.captured {
            None => own.captured = Some(event.clone()),
            Some(captured) if captured.id == event.id => {
                captured.tips.extend(&event.tips);
                captured.tips.sort_unstable();
                captured.tips.dedup();
            }
            Some(other) => {
                self.captures.strike(other.id);
                self.captures.strike(event.id);
                return Err(code::STREAM_CAPTURE_MERGE);
            }
        }
        Ok(())
    }

    /// Captured work cannot wait for work that is not.
    pub(super) fn refuse_isolated(&mut self, id: u64) -> Code {
        self.captures.strike(id);
        code::STREAM_CAPTURE_ISOLATION
    }

    /// Nobody can ask about an event of a capture; the attempt breaks it.
    pub(super) fn refuse_captured(&mut self, id: u64) -> Code {
        self.captures.strike(id);
        code::CAPTURED_EVENT
    }
}
