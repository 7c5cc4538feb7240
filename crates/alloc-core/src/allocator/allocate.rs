//! A request, from the call to the block: the hit path in full, the miss up to the ladder.

use super::allocation::HeapName;
use super::{AllocResult, Allocation, HeapBody, HeapCell, Op, Shared};
use crate::backend::{Backend, Completion};
use crate::block::BlockIdx;
use crate::error::{AllocError, BackendOp};
use crate::events::{Head, Pending};
use crate::heap::{Ledger, LiveBlock, Request};
use crate::size_class::REQUEST_BYTES_MAX;
use crate::trace::TraceBuffer;
use crate::units::{Addr, DeviceId};
use std::sync::atomic::Ordering;

/// A block that was just handed out.
#[derive(Clone, Copy, Debug)]
pub(super) struct HandedOut {
    /// Its heap: a pool that helps out has others than the request was for.
    pub(super) heap: HeapName,
    pub(super) block: LiveBlock,
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
        let home = &*cell.home;
        let usual = !self.tracing.load(Ordering::Relaxed)
            & home.pools.scopes.is_empty()
            & home.events.is_empty()
            & cell.shards.leave(requested);
        if !usual {
            return self.allocate_in_full(cell, requested);
        }
        match cell.hit(None, |body, ledger| body.serve_cached(requested, ledger)) {
            // Its own index is at hand, the one under the lock in another cache line.
            Some(block) => {
                Ok(self.allocation(cell, requested, HandedOut { heap: cell.name, block }))
            }
            None => self.miss(cell, requested),
        }
    }

    #[cold]
    #[inline(never)]
    fn miss(&self, cell: &HeapCell<B>, requested: u64) -> AllocResult<Allocation, B> {
        self.allocate_missed(cell, requested, self.begin())
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
                home: cell.name,
            });
        }
        let mut op = self.begin();
        if !cell.home.events.is_empty() {
            self.free_what_is_done(cell, &mut op.trace)?;
        }
        let found =
            cell.hit(Some(&mut op.trace), |body, ledger| body.serve_cached(requested, ledger));
        match found {
            Some(block) => {
                Ok(self.allocation(cell, requested, HandedOut { heap: cell.name, block }))
            }
            None => self.allocate_missed(cell, requested, op),
        }
    }

    #[cold]
    #[inline(never)]
    fn allocate_missed(
        &self,
        cell: &HeapCell<B>,
        requested: u64,
        mut op: Op<'_, B>,
    ) -> AllocResult<Allocation, B> {
        if self.choose_sizes(cell)
            && let Some(block) =
                cell.hit(Some(&mut op.trace), |body, ledger| body.serve_cached(requested, ledger))
        {
            return Ok(self.allocation(cell, requested, HandedOut { heap: cell.name, block }));
        }
        let request = cell.state.lock().body.heap.rules.request(requested);
        let block = self.climb(cell, &request, &mut op)?;
        cell.state.lock().body.heap.make_ready();
        Ok(self.allocation(cell, requested, block))
    }

    /// Lets the heap decide about the sizes of large requests; see [`Heap::choose_sizes`]. Shards have few
    /// sizes anyway, what is in private pools may stay for good, and there must be room for it.
    ///
    /// [`Heap::choose_sizes`]: crate::heap::Heap::choose_sizes
    fn choose_sizes(&self, cell: &HeapCell<B>) -> bool {
        let device = &*cell.home;
        let peak = device.needed_peak.load(Ordering::Relaxed);
        let most = device.limit().unwrap_or(u64::MAX).min(device.total);
        let may_widen = cell.may_divide() && peak.saturating_add(peak / 4) <= most;
        let now = self.now();
        cell.state.lock().body.heap.choose_sizes(now, may_widen)
    }

    #[inline]
    pub(super) fn allocation(
        &self,
        cell: &HeapCell<B>,
        requested: u64,
        HandedOut { heap, block }: HandedOut,
    ) -> Allocation {
        Allocation {
            addr: block.addr,
            bytes: block.bytes,
            requested,
            stream: cell.stream_id,
            block: Some(block.id),
            home: heap,
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
    /// Serves a request of `requested` bytes from what is cached.
    #[inline]
    fn serve_cached(&mut self, requested: u64, ledger: &mut Ledger<'_>) -> Option<LiveBlock> {
        let request = self.heap.rules.request(requested);
        self.heap.serve_hit(request, ledger)
    }

    /// Serves a request from the free index.
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
    pub(super) fn handed_out(&self, block: BlockIdx) -> HandedOut {
        HandedOut { heap: self.name, block: self.heap.live_block(block) }
    }
}
