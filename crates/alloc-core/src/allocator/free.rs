//! Giving blocks back, and remembering which streams used them.

use super::captures::Waits;
use super::{AllocResult, Allocation, HeapBody, HeapCell, Shared, Use};
use crate::backend::{Backend, Stream};
use crate::block::{BlockId, BlockIdx, BlockState};
use crate::error::AllocError;
use crate::events::Pending;
use crate::trace::TraceBuffer;
use crate::units::Addr;
use smallvec::SmallVec;
use std::sync::atomic::Ordering;

impl<B: Backend> Shared<B> {
    pub(super) fn free(&self, allocation: &Allocation) -> AllocResult<(), B> {
        match self.cell_of(allocation)? {
            Some((cell, _)) if self.free_at_once(cell, allocation) => Ok(()),
            Some((cell, id)) => self.free_in_full(cell, id, allocation.addr),
            None => Ok(()),
        }
    }

    /// [`free`](Self::free) of an allocation of the heap `cell`, if it is live and unused by other streams,
    /// and nobody listens.
    #[inline]
    pub(super) fn free_at_once(&self, cell: &HeapCell<B>, allocation: &Allocation) -> bool {
        let Some(id) = allocation.block else { return false };
        (allocation.home == cell.name)
            && !self.tracing.load(Ordering::Relaxed)
            && cell.free_unused(None, id, allocation.addr)
    }

    pub(super) fn free_raw(&self, addr: Addr) -> AllocResult<(), B> {
        let unknown = AllocError::UnknownAddress { addr };
        let Some((cell, segment)) = self.owner_of(addr) else { return Err(unknown) };
        if !self.tracing.load(Ordering::Relaxed)
            && cell.free_if_unused(None, |body| body.heap.live_at(segment, addr))
        {
            return Ok(());
        }
        let (cell, id) = self.find_live(addr).ok_or(unknown)?;
        self.free_in_full(cell, id, addr)
    }

    /// The heap and block of an allocation; `None` for one of 0 bytes.
    pub(super) fn cell_of(
        &self,
        allocation: &Allocation,
    ) -> AllocResult<Option<(&HeapCell<B>, BlockId)>, B> {
        let Some(id) = allocation.block else { return Ok(None) };
        if allocation.home.allocator() != self.id {
            return Err(AllocError::ForeignAllocation { addr: allocation.addr });
        }
        let cell =
            self.heaps.get(allocation.home.heap()).expect("I10: an allocation names its heap");
        Ok(Some((cell, id)))
    }

    #[cold]
    #[inline(never)]
    fn free_in_full(&self, cell: &HeapCell<B>, id: BlockId, addr: Addr) -> AllocResult<(), B> {
        let mut op = self.begin();
        if cell.free_unused(Some(&mut op.trace), id, addr) {
            return Ok(());
        }
        self.free_used(cell, id, addr, &mut op.trace)
    }

    /// Frees a block that other streams used or other processes share, or says that it is none. It
    /// stays live until all events are recorded, and drains until they are reached and the shares have
    /// ended.
    fn free_used(
        &self,
        cell: &HeapCell<B>,
        id: BlockId,
        addr: Addr,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        let queue = &cell.home.events;
        loop {
            let uses = cell.state.lock().body.uses_of(id, addr);
            let uses = uses.ok_or(AllocError::UnknownAddress { addr })?;
            // One event on each stream, recorded at the time of the free (spec §3.4), or none at all.
            let Waits { events, deferred } = self.waits_of(cell, &uses)?;
            let freed = self.edit(cell, trace, |body, ledger| {
                // Unless a use was recorded meanwhile, or the block was freed.
                if body.uses_of(id, addr).is_none_or(|now| now.len() != uses.len()) {
                    return false;
                }
                let block = body.forget_uses(id);
                let pending =
                    events.len() as u32 + u32::from(deferred.is_some()) + body.shares_of(block);
                if pending == 0 {
                    body.heap.free(block, ledger);
                    return true;
                }
                body.heap.request_free(block, pending, ledger);
                for (stream, event) in events {
                    queue.push(&stream, Pending::new(event, cell.index, id));
                }
                if let Some(deferred) = deferred {
                    queue.defer(deferred.of(cell.index, id));
                }
                true
            });
            if freed {
                return Ok(());
            }
        }
    }

    pub(super) fn record_stream(
        &self,
        allocation: &Allocation,
        stream: &B::Stream,
    ) -> AllocResult<(), B> {
        match self.cell_of(allocation)? {
            Some((cell, id)) => self.add_use(cell, id, allocation.addr, stream),
            None => Ok(()),
        }
    }

    pub(super) fn record_stream_raw(&self, addr: Addr, stream: &B::Stream) -> AllocResult<(), B> {
        let (cell, id) = self.find_live(addr).ok_or(AllocError::UnknownAddress { addr })?;
        self.add_use(cell, id, addr, stream)
    }

    fn add_use(
        &self,
        cell: &HeapCell<B>,
        id: BlockId,
        addr: Addr,
        stream: &B::Stream,
    ) -> AllocResult<(), B> {
        let capture = self.capture_of_use(stream)?;
        let mut state = cell.state.lock();
        let body = &mut state.body;
        let block = body.live(id, addr).ok_or(AllocError::UnknownAddress { addr })?;
        if stream.id() == body.heap.stream {
            return Ok(());
        }
        body.heap.blocks[block].used = true;
        let uses = body.uses.entry(block).or_default();
        if uses.iter().all(|used| used.stream.id() != stream.id() || used.capture != capture) {
            uses.push(Use { stream: stream.clone(), capture });
        }
        Ok(())
    }
}

impl<B: Backend> HeapCell<B> {
    /// Frees a block, if it is live and no other stream used it.
    #[inline]
    fn free_unused(&self, trace: Option<&mut TraceBuffer>, id: BlockId, addr: Addr) -> bool {
        // By address, another thread may have freed the block since it was looked up.
        self.free_if_unused(trace, |body| body.live(id, addr))
    }

    /// Frees the block that `find` finds, if it does and no other stream used it.
    #[inline]
    fn free_if_unused(
        &self,
        trace: Option<&mut TraceBuffer>,
        find: impl FnOnce(&mut HeapBody<B>) -> Option<BlockIdx>,
    ) -> bool {
        self.hit(trace, |body, ledger| {
            let block = find(body).filter(|block| !body.heap.blocks[*block].used);
            if let Some(block) = block {
                body.heap.free(block, ledger);
            }
            block.is_some()
        })
    }
}

impl<B: Backend> HeapBody<B> {
    /// The uses of a block on other streams; `None` if it is not live.
    fn uses_of(&self, id: BlockId, addr: Addr) -> Option<SmallVec<[Use<B::Stream>; 2]>> {
        let block = self.live(id, addr)?;
        Some(self.uses.get(&block).cloned().unwrap_or_default())
    }

    /// Takes the uses off a block.
    fn forget_uses(&mut self, id: BlockId) -> BlockIdx {
        let block = self.heap.blocks.resolve(id).expect("I10: the block was live just now");
        self.uses.remove(&block);
        self.heap.blocks[block].used = false;
        block
    }

    /// The block that an id names, if it is live and starts at `addr`.
    #[inline]
    pub(super) fn live(&self, id: BlockId, addr: Addr) -> Option<BlockIdx> {
        let index = self.heap.blocks.resolve(id)?;
        let block = &self.heap.blocks[index];
        (block.state == BlockState::Live && block.addr == addr).then_some(index)
    }
}
