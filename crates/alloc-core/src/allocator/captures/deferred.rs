//! Blocks that were used on capturing streams and freed, and how they come back.
//!
//! Such a use has no event. One that was captured is over when the capture is: what replays it is
//! ordered by whoever replays. Before that, requests of the same capture may have the block as soon
//! as the graph itself orders them after the use (spec §3.5). A use from before the capture gets its
//! event when the stream can record one again.

use crate::allocator::{AllocResult, HeapCell, Shared, Use};
use crate::backend::{Backend, CaptureId, CaptureStatus, GraphNodeId};
use crate::config::Policy;
use crate::error::{AllocError, BackendOp};
use crate::events::{Deferred, Pending, Proof};
use crate::trace::TraceBuffer;
use crate::units::DeviceId;
use smallvec::SmallVec;

/// What a freed block has to wait for.
pub(in crate::allocator) struct Waits<B: Backend> {
    pub(in crate::allocator) events: SmallVec<[(B::Stream, B::Event); 2]>,
    pub(in crate::allocator) deferred: Option<Uses<B::Stream>>,
}

/// The uses of a deferred block.
pub(in crate::allocator) struct Uses<S> {
    captured: SmallVec<[CaptureId; 1]>,
    later: SmallVec<[S; 1]>,
    proof: Option<Proof>,
}

impl<S> Uses<S> {
    pub(in crate::allocator) fn of(self, heap: u32, block: crate::block::BlockId) -> Deferred<S> {
        let Uses { captured, later, proof } = self;
        Deferred { heap, block, captured, later, proof }
    }
}

impl<B: Backend> Shared<B> {
    /// The capture that a use declared now on `stream` is part of.
    pub(in crate::allocator) fn capture_of_use(
        &self,
        stream: &B::Stream,
    ) -> AllocResult<Option<CaptureId>, B> {
        Ok(match self.capture_status(stream)? {
            CaptureStatus::Active(capture) if self.captures.knows(capture) => Some(capture),
            _ => None,
        })
    }

    /// What a block of `cell` with these uses must wait for, with the events recorded now (spec
    /// §3.4).
    pub(in crate::allocator) fn waits_of(
        &self,
        cell: &HeapCell<B>,
        uses: &[Use<B::Stream>],
    ) -> AllocResult<Waits<B>, B> {
        let (mut events, mut later) = (SmallVec::new(), SmallVec::new());
        let mut captured = SmallVec::<[(&B::Stream, CaptureId); 2]>::new();
        for Use { stream, capture } in uses {
            match capture {
                Some(capture) if self.captures.knows(*capture) => captured.push((stream, *capture)),
                Some(_) => {}
                None => match self.record(stream)? {
                    Some(event) => events.push((stream.clone(), event)),
                    None => later.push(stream.clone()),
                },
            }
        }
        if captured.is_empty() && later.is_empty() {
            return Ok(Waits { events, deferred: None });
        }
        let provable = events.is_empty() && later.is_empty();
        let proof = if provable { self.proof(cell, &captured)? } else { None };
        let captured = captured.iter().map(|(_, capture)| *capture).collect();
        Ok(Waits { events, deferred: Some(Uses { captured, later, proof }) })
    }

    /// The captured work after which a block of `cell` may be used again within the capture; `None`
    /// if only the end of the capture will do.
    fn proof(
        &self,
        cell: &HeapCell<B>,
        uses: &[(&B::Stream, CaptureId)],
    ) -> AllocResult<Option<Proof>, B> {
        let wanted =
            self.policy == Policy::Ours || self.settings.lock().graph_capture_record_stream_reuse;
        let (Some(power), true) = (self.captures.power.get(), wanted) else { return Ok(None) };
        let CaptureStatus::Active(capture) = self.capture_status(&cell.stream)? else {
            return Ok(None);
        };
        let mut nodes: Vec<GraphNodeId> = Vec::new();
        for (stream, of) in uses {
            let tips = (power.tips)(&self.backend, stream)
                .map_err(|source| AllocError::Backend { op: BackendOp::Capture, source })?;
            match tips {
                Some(tips) if *of == capture && tips.capture == capture => nodes.extend(tips.nodes),
                _ => return Ok(None),
            }
        }
        Ok(Some(Proof { capture, nodes }))
    }

    /// For a request of `cell` inside a capture: frees the blocks of the heap whose uses come before
    /// the request in every replay.
    pub(super) fn reuse_by_order(
        &self,
        cell: &HeapCell<B>,
        capture: CaptureId,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        let events = &self.devices[cell.device.index()].events;
        let Some(power) = self.captures.power.get() else { return Ok(()) };
        if !events.has_provable(cell.index, capture) {
            return Ok(());
        }
        let mut past = self.captures.take_past(capture, cell.stream_id);
        let walked = (power.extend_past)(&self.backend, &cell.stream, &mut past);
        let proven = events.take_proven(cell.index, capture, &past);
        self.captures.put_past(capture, cell.stream_id, past);
        for block in proven {
            self.free_deferred(&block, SmallVec::new(), trace);
        }
        walked.map_err(|source| AllocError::Backend { op: BackendOp::Capture, source })
    }

    /// Lets the blocks go on whose captures are over: free, or to the events of earlier uses. What
    /// cannot be settled now is left for another time.
    pub(in crate::allocator) fn settle_deferred(&self, device: DeviceId, trace: &mut TraceBuffer) {
        let queue = &self.devices[device.index()].events;
        let over = |capture: &CaptureId| !self.captures.knows(*capture);
        for block in queue.take_deferred(|block| block.captured.iter().all(over)) {
            let record = |stream: &B::Stream| Some((stream.clone(), self.record(stream).ok()??));
            match block.later.iter().map(record).collect() {
                Some(events) => self.free_deferred(&block, events, trace),
                None => {
                    queue.defer(block);
                    queue.undeferred();
                }
            }
        }
    }

    /// A deferred block waits for `events` from now on, and for nothing else.
    fn free_deferred(
        &self,
        block: &Deferred<B::Stream>,
        events: SmallVec<[(B::Stream, B::Event); 2]>,
        trace: &mut TraceBuffer,
    ) {
        let &Deferred { heap, block: id, .. } = block;
        let cell = self.heaps.get(heap).expect("I10: a deferred block names a heap");
        let queue = &self.devices[cell.device.index()].events;
        self.edit(cell, trace, |body, ledger| {
            let block = body.heap.blocks.resolve(id).expect("I5: a deferred block exists");
            body.heap.await_more(block, events.len() as u32);
            for (stream, event) in events {
                queue.push(&stream, Pending::new(event, heap, id));
            }
            body.heap.event_reached(block, ledger);
        });
        queue.undeferred();
    }
}
