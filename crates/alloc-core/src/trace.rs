//! The trace hook: every action of the allocator, in PyTorch's order (spec §8.1).
//!
//! Entries are gathered while an operation runs and handed to the sink after every lock is given
//! back, so a sink may take locks of its own and may call the allocator.

use crate::units::{Addr, DeviceId, PoolId, StreamId};

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum TraceAction {
    /// A block was handed out; bytes are those requested.
    Alloc,
    /// The client gave a block back; bytes are those requested.
    FreeRequested,
    /// The block can be reused, its events being reached; bytes are those requested.
    FreeCompleted,
    /// A segment was obtained.
    SegmentAlloc,
    /// A segment was given back.
    SegmentFree,
    /// A run of pages was mapped.
    SegmentMap,
    /// A run of pages was unmapped.
    SegmentUnmap,
    /// A snapshot was taken; bytes are the active bytes of the device.
    Snapshot,
    /// A request failed; the address is the device's free bytes, bytes are the rounded request.
    Oom,
}

impl TraceAction {
    /// PyTorch's word for it.
    pub const fn name(self) -> &'static str {
        match self {
            TraceAction::Alloc => "alloc",
            TraceAction::FreeRequested => "free_requested",
            TraceAction::FreeCompleted => "free_completed",
            TraceAction::SegmentAlloc => "segment_alloc",
            TraceAction::SegmentFree => "segment_free",
            TraceAction::SegmentMap => "segment_map",
            TraceAction::SegmentUnmap => "segment_unmap",
            TraceAction::Snapshot => "snapshot",
            TraceAction::Oom => "oom",
        }
    }
}

/// One action.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceEntry {
    /// What happened.
    pub action: TraceAction,
    /// On which device.
    pub device: DeviceId,
    /// Where; see [`TraceAction`].
    pub addr: Addr,
    /// How much; see [`TraceAction`].
    pub bytes: u64,
    /// The stream that owns the memory.
    pub stream: StreamId,
    /// The pool that owns it.
    pub pool: PoolId,
}

/// Receives the trace. Called on the thread that ran the operation, with no allocator lock held.
pub trait TraceSink: Send + Sync {
    /// Takes one entry.
    fn record(&self, entry: &TraceEntry);
}

/// The entries of one operation, until the locks are given back.
#[derive(Debug, Default)]
pub(crate) struct TraceBuffer {
    on: bool,
    entries: Vec<TraceEntry>,
}

impl TraceBuffer {
    pub(crate) const fn new(on: bool) -> Self {
        TraceBuffer { on, entries: Vec::new() }
    }

    #[inline]
    pub(crate) fn push(&mut self, entry: impl FnOnce() -> TraceEntry) {
        if self.on {
            self.entries.push(entry());
        }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn deliver(&mut self, sink: &dyn TraceSink) {
        for entry in self.entries.drain(..) {
            sink.record(&entry);
        }
    }
}
