//! A request, from the call to the block: the hit path in full, the miss up to the ladder.

use super::{AllocResult, Allocation, HeapBody, HeapCell, Op, Shared};
use crate::backend::{Backend, Completion};
use crate::block::{BlockId, BlockIdx};
use crate::error::{AllocError, BackendOp};
use crate::events::{Head, Pending};
use crate::heap::{Ledger, Request};
use crate::size_class::{REQUEST_BYTES_MAX, SizeClass};
use crate::trace::TraceBuffer;
use crate::units::{Addr, DeviceId};
use std::sync::atomic::Ordering;

/// A block that was just handed out.
#[derive(Clone, Copy, Debug)]
pub(super) struct HandedOut {
    /// Position of its heap: a pool that helps out has others than the request was for.
    heap: u32,
    id: BlockId,
    addr: Addr,
    bytes: u64,
}

impl<B: Backend> Shared<B> {
    #[inline]
    pub(super) fn allocate(
        &self,
        cell: &HeapCell<B>,
        requested: u64,
    ) -> AllocResult<Allocation, B> {
        // Of 0 bytes, too large, for a shard, watched by a trace sink, while a scope chooses pools or
        // events are pending: all rare, or worth a call.
        let usual = cell.shards.leave(requested)
            && !self.tracing.load(Ordering::Relaxed)
            && cell.home.pools.scopes.is_empty()
            && cell.home.events.is_empty();
        if !usual {
            return self.allocate_in_full(cell, requested);
        }
        let found = cell.hit(None, |body, ledger| body.serve_cached(requested, ledger));
        match found {
            Ok(block) => Ok(self.allocation(cell, requested, block)),
            Err(request) => self.allocate_missed(cell, &request, self.begin()),
        }
    }

    #[cold]
    #[inline(never)]
    fn allocate_in_full(&self, cell: &HeapCell<B>, requested: u64) -> AllocResult<Allocation, B> {
        if let Some(shard) = self.shard_for(cell, requested) {
            return self.allocate(shard, requested);
        }
        if !cell.home.pools.scopes.is_empty()
            && let Some(routed) = self.route(cell)?
        {
            return self.allocate_here(&routed.cell, requested);
        }
        self.allocate_here(cell, requested)
    }

    /// [`allocate`](Self::allocate) whatever scopes are in force.
    pub(super) fn allocate_here(
        &self,
        cell: &HeapCell<B>,
        requested: u64,
    ) -> AllocResult<Allocation, B> {
        if requested >= REQUEST_BYTES_MAX {
            return Err(AllocError::TooLarge { requested });
        }
        if requested == 0 {
            return Ok(Allocation {
                addr: Addr::NULL,
                bytes: 0,
                requested,
                stream: cell.stream_id,
                block: None,
                heap: cell.index,
                allocator: self.id,
            });
        }
        let mut op = self.begin();
        if !cell.home.events.is_empty() {
            self.free_what_is_done(cell, &mut op.trace)?;
        }
        let found =
            cell.hit(Some(&mut op.trace), |body, ledger| body.serve_cached(requested, ledger));
        match found {
            Ok(block) => Ok(self.allocation(cell, requested, block)),
            Err(request) => self.allocate_missed(cell, &request, op),
        }
    }

    #[cold]
    #[inline(never)]
    fn allocate_missed(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        mut op: Op<'_, B>,
    ) -> AllocResult<Allocation, B> {
        let block = self.climb(cell, request, &mut op)?;
        Ok(self.allocation(cell, request.requested, block))
    }

    #[inline]
    pub(super) fn allocation(
        &self,
        cell: &HeapCell<B>,
        requested: u64,
        block: HandedOut,
    ) -> Allocation {
        Allocation {
            addr: block.addr,
            bytes: block.bytes,
            requested,
            stream: cell.stream_id,
            block: Some(block.id),
            heap: block.heap,
            allocator: self.id,
        }
    }

    /// Frees the blocks of a device whose events are reached, in the order of the queue. Never
    /// waits.
    pub(super) fn process_events(
        &self,
        device: DeviceId,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        let events = &self.devices[device.index()].events;
        for stream in events.streams() {
            while let Some(head) = events.take_head(stream) {
                match self.backend.query(&head.entry().event) {
                    Ok(Completion::Reached) => self.settle(head, trace),
                    Ok(Completion::Pending) => break,
                    Err(source) => {
                        return Err(AllocError::Backend { op: BackendOp::Query, source });
                    }
                }
            }
        }
        Ok(())
    }

    /// One event of a block is reached.
    pub(super) fn settle(&self, head: Head<'_, B>, trace: &mut TraceBuffer) {
        let Pending { heap, block, .. } = *head.entry();
        let cell = self.heaps.get(heap).expect("I10: a pending block names a heap");
        cell.hit(Some(trace), |body, ledger| {
            let block = body.heap.blocks.resolve(block).expect("I5: a pending block exists");
            body.heap.event_reached(block, ledger)
        });
        // Last, so that whoever waits for the head finds the block free.
        head.finish();
    }
}

impl<B: Backend> HeapBody<B> {
    /// Serves a request of `requested` bytes from the free index, or describes what is missing.
    #[inline]
    fn serve_cached(
        &mut self,
        requested: u64,
        ledger: &mut Ledger<'_>,
    ) -> Result<HandedOut, Request> {
        let (rounded, list) = self.heap.rules.round(requested);
        let class = SizeClass::of(rounded, self.heap.rules.small_bytes_max);
        let expandable = self.heap.rules.expandable;
        let request = Request { requested, rounded, class, expandable, list };
        let block = self.heap.serve_hit(&request, ledger).ok_or(request)?;
        Ok(self.handed_out(block))
    }

    /// Serves a request from the free index.
    #[inline]
    pub(super) fn serve(
        &mut self,
        request: &Request,
        ledger: &mut Ledger<'_>,
    ) -> Option<HandedOut> {
        let block = self.heap.serve(request, ledger)?;
        Some(self.handed_out(block))
    }

    /// Hands out a `Held` block.
    pub(super) fn hand_out(
        &mut self,
        block: BlockIdx,
        request: &Request,
        ledger: &mut Ledger<'_>,
    ) -> HandedOut {
        self.heap.hand_out(block, request, ledger);
        self.handed_out(block)
    }

    /// A block as its caller learns of it.
    #[inline]
    pub(super) fn handed_out(&self, block: BlockIdx) -> HandedOut {
        let id = self.heap.blocks.id(block);
        let block = &self.heap.blocks[block];
        HandedOut { heap: self.index, id, addr: block.addr, bytes: block.bytes }
    }
}
