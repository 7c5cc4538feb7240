//! Giving blocks back, and remembering which streams used them.

use super::{AllocResult, Allocation, HeapCell, Shared};
use crate::backend::{Backend, Stream};
use crate::block::{BlockId, BlockState};
use crate::error::{AllocError, BackendOp};
use crate::events::Pending;
use crate::units::Addr;
use smallvec::SmallVec;

impl<B: Backend> Shared<B> {
    pub(super) fn free(&self, allocation: &Allocation) -> AllocResult<(), B> {
        match self.cell_of(allocation)? {
            Some((cell, id)) => self.free_block(cell, id, allocation.addr),
            None => Ok(()),
        }
    }

    pub(super) fn free_raw(&self, addr: Addr) -> AllocResult<(), B> {
        let (cell, id) = self.find_live(addr).ok_or(AllocError::UnknownAddress { addr })?;
        self.free_block(cell, id, addr)
    }

    /// The heap and block of an allocation; `None` for one of 0 bytes.
    fn cell_of(&self, allocation: &Allocation) -> AllocResult<Option<(&HeapCell<B>, BlockId)>, B> {
        let Some(id) = allocation.block else { return Ok(None) };
        if allocation.allocator != self.id {
            return Err(AllocError::ForeignAllocation { addr: allocation.addr });
        }
        let cell = self.heaps.get(allocation.heap).expect("I10: an allocation names its heap");
        Ok(Some((cell, id)))
    }

    fn free_block(&self, cell: &HeapCell<B>, id: BlockId, addr: Addr) -> AllocResult<(), B> {
        let mut op = self.begin();
        let uses = self.edit(cell, &mut op.trace, |body, ledger| {
            // By address, another thread may have freed the block since it was looked up.
            let live = body
                .heap
                .blocks
                .get(id)
                .is_some_and(|block| block.state == BlockState::Live && block.addr == addr);
            if !live {
                return Err(AllocError::UnknownAddress { addr });
            }
            let uses = body.uses.remove(&id);
            if uses.is_none() {
                body.heap.request_free(id, 0, ledger);
                body.heap.finish_free(id, ledger);
            } else {
                body.heap.blocks[id].state = BlockState::Held;
            }
            Ok(uses)
        })?;
        let Some(uses) = uses else { return Ok(()) };
        match self.record_all(&uses) {
            Ok(events) => {
                self.edit(cell, &mut op.trace, |body, ledger| {
                    body.heap.blocks[id].state = BlockState::Live;
                    body.heap.request_free(id, events.len() as u32, ledger);
                });
                let queue = &self.devices[cell.device.index()].events;
                for (stream, event) in uses.iter().zip(events) {
                    queue.push(stream, Pending { event, heap: cell.index, block: id });
                }
                Ok(())
            }
            Err(source) => {
                let mut state = cell.state.lock();
                state.body.heap.blocks[id].state = BlockState::Live;
                state.body.uses.insert(id, uses);
                Err(AllocError::Backend { op: BackendOp::Record, source })
            }
        }
    }

    /// One event on each stream, recorded at the time of the free (spec §3.4), or none at all.
    fn record_all(&self, streams: &[B::Stream]) -> Result<SmallVec<[B::Event; 2]>, B::Error> {
        streams.iter().map(|stream| self.backend.record(stream)).collect()
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
        let mut state = cell.state.lock();
        let body = &mut state.body;
        let block = body.heap.blocks.get(id).filter(|block| block.addr == addr);
        if block.is_none_or(|block| block.state != BlockState::Live) {
            return Err(AllocError::UnknownAddress { addr });
        }
        if stream.id() == body.heap.stream {
            return Ok(());
        }
        let uses = body.uses.entry(id).or_default();
        if uses.iter().all(|used| used.id() != stream.id()) {
            uses.push(stream.clone());
        }
        Ok(())
    }
}
