//! Stream capture: whose memory a graph gets, and what must not be done meanwhile.
//!
//! A graph uses the addresses that it was captured with whenever it runs, so its memory comes from
//! a pinned pool ([`GraphMemory`]). While a stream captures, events on it mean nothing and cannot be
//! had (I9); what that keeps from being reused is in `deferred`. `docs/adr/0018-capture.md` has the
//! reasons.

mod deferred;
mod error;
mod graph;

pub(super) use deferred::Waits;
pub use error::{CaptureError, GraphState};
pub use graph::GraphMemory;

use super::check::{Violation, ensure};
use super::{AllocResult, HeapCell, Shared};
use crate::backend::{Backend, Capture, CaptureId, CaptureStatus, CaptureTips, GraphNodeId};
use crate::config::Policy;
use crate::error::{AllocError, BackendOp};
use crate::sync::Mutex;
use crate::trace::TraceBuffer;
use crate::units::{PoolId, StreamId};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

type Status<B> = fn(&B, &<B as Backend>::Stream) -> Result<CaptureStatus, <B as Backend>::Error>;
type Tips<B> =
    fn(&B, &<B as Backend>::Stream) -> Result<Option<CaptureTips>, <B as Backend>::Error>;
type ExtendPast<B> =
    fn(&B, &<B as Backend>::Stream, &mut HashSet<GraphNodeId>) -> Result<(), <B as Backend>::Error>;

/// What a backend with [`Capture`] answers, for code that serves every backend.
struct Power<B: Backend> {
    status: Status<B>,
    tips: Tips<B>,
    extend_past: ExtendPast<B>,
}

impl<B: Capture> Power<B> {
    fn new() -> Self {
        Power { status: B::capture_status, tips: B::capture_tips, extend_past: B::extend_past }
    }
}

/// A capture that goes on, or that is part of one.
#[derive(Debug)]
struct Known {
    pool: PoolId,
    /// The capture that it is part of; itself, most often.
    root: CaptureId,
    /// What is known to come before the next work of its streams.
    pasts: HashMap<StreamId, HashSet<GraphNodeId>>,
}

/// The captures that an allocator was told of.
pub(super) struct Captures<B: Backend> {
    /// Set before the first of them.
    power: OnceLock<Power<B>>,
    /// Those expected or going on. Looked at off the hit path only, but wherever memory could be
    /// given back.
    under_way: AtomicUsize,
    known: Mutex<BTreeMap<CaptureId, Known>>,
}

impl<B: Backend> Captures<B> {
    pub(super) fn new() -> Self {
        Captures {
            power: OnceLock::new(),
            under_way: AtomicUsize::new(0),
            known: Mutex::new(BTreeMap::new()),
        }
    }

    fn knows(&self, capture: CaptureId) -> bool {
        self.known.lock().contains_key(&capture)
    }

    /// Takes what is known to come before the next work of a stream, to learn more about it.
    fn take_past(&self, capture: CaptureId, stream: StreamId) -> HashSet<GraphNodeId> {
        let mut known = self.known.lock();
        known.get_mut(&capture).and_then(|known| known.pasts.remove(&stream)).unwrap_or_default()
    }

    fn put_past(&self, capture: CaptureId, stream: StreamId, past: HashSet<GraphNodeId>) {
        if let Some(known) = self.known.lock().get_mut(&capture) {
            known.pasts.insert(stream, past);
        }
    }
}

impl<B: Backend> Shared<B> {
    /// Whether a capture is expected or goes on. Then nothing is given back to the backend.
    pub(super) fn captures_under_way(&self) -> bool {
        self.captures.under_way.load(Ordering::Acquire) > 0
    }

    /// What becomes of work queued on `stream` now. Asks the backend only while a capture is under
    /// way.
    pub(super) fn capture_status(&self, stream: &B::Stream) -> AllocResult<CaptureStatus, B> {
        match self.captures.power.get() {
            Some(power) if self.captures_under_way() => (power.status)(&self.backend, stream)
                .map_err(|source| AllocError::Backend { op: BackendOp::Capture, source }),
            _ => Ok(CaptureStatus::None),
        }
    }

    /// Records an event after all work queued on `stream` so far; `None` on a capturing stream, of
    /// which no event can tell anything (I9).
    pub(super) fn record(&self, stream: &B::Stream) -> AllocResult<Option<B::Event>, B> {
        if self.capture_status(stream)? != CaptureStatus::None {
            return Ok(None);
        }
        let recorded = self.backend.record(stream);
        recorded.map(Some).map_err(|source| AllocError::Backend { op: BackendOp::Record, source })
    }

    /// Whether events may be processed for a request on a stream of this status.
    pub(super) fn may_process_events(&self, status: CaptureStatus) -> bool {
        // PyTorch leaves all events alone while anything is captured (spec §5.6).
        let everywhere = self.policy == Policy::Pytorch && self.captures_under_way();
        status == CaptureStatus::None && !everywhere
    }

    /// Frees the blocks that wait and need not any longer, as far as a request of `cell` may find
    /// out. Never waits.
    pub(super) fn free_what_is_done(
        &self,
        cell: &HeapCell<B>,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        let status = self.capture_status(&cell.stream)?;
        if let CaptureStatus::Active(capture) = status {
            return self.reuse_by_order(cell, capture, trace);
        }
        if !self.captures_under_way() {
            self.settle_deferred(cell.device, trace);
        }
        if self.may_process_events(status) {
            self.process_events(cell.device, trace)?;
        }
        Ok(())
    }

    /// I9: every capture that goes on has a pinned pool, of its own alone, on every device.
    pub(super) fn check_captures(&self) -> Result<(), Violation> {
        let known = self.captures.known.lock();
        let under_way = self.captures.under_way.load(Ordering::Acquire);
        let roots = known.iter().filter(|(capture, own)| own.root == **capture).count();
        ensure(roots <= under_way, "I9", || {
            format!("{roots} captures go on, {under_way} are under way")
        })?;
        for (capture, own) in known.iter() {
            let twin = known.values().any(|other| other.root != own.root && other.pool == own.pool);
            ensure(!twin, "I9", || format!("pool {:?} serves two captures", own.pool))?;
            for device in &self.devices {
                let pinned = device.pools.is_pinned(own.pool);
                ensure(pinned, "I9", || format!("pool {:?} of {capture} is not pinned", own.pool))?;
            }
        }
        Ok(())
    }
}
