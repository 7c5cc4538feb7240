//! What buckets and heaps have in common: a table of blocks under one lock, and what happens to a
//! block between its client's free and its reuse.

use super::block::{BlockId, BlockTable, State, Use, Uses};
use super::ledger::Ledger;
use crate::units::Addr;

/// A block just handed out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Taken {
    pub(crate) id: BlockId,
    pub(crate) addr: Addr,
    pub(crate) bytes: u64,
}

/// Where an allocation's block is: in which container of which pool's store.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct BlockRef {
    pub(crate) pool: u32,
    pub(crate) home: u32,
    pub(crate) id: BlockId,
}

/// A piece of memory: a span of a heap, or a segment.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Span {
    pub(crate) base: Addr,
    pub(crate) bytes: u64,
}

/// A run of a central heap that a shard holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    pub(crate) span: Span,
    /// Its slot in the central heap.
    pub(crate) slot: u32,
}

/// What is left to do, without the lock, after a block was released.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum After {
    /// Nothing: it can be handed out again.
    Nothing,
    /// The container has forgotten the block: give its memory back to the system. It waits in
    /// [`take_leaving`](Home::take_leaving).
    Unpin,
    /// The shard holds a run too many.
    Surplus,
    /// The central heap holds more than the bound on free bytes.
    Excess,
}

/// The answer to a client's free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Freed {
    /// Nothing used the block: it is free already.
    Done(After),
    /// It has uses, and is as before.
    Used,
    /// No such allocation: stale or foreign.
    Unknown,
}

/// A bucket or a heap, locked.
pub(crate) trait Home<S: PartialEq> {
    fn table(&mut self) -> &mut BlockTable<S>;

    fn ledger(&mut self) -> &mut Ledger;

    /// Makes an unused block available again. Its state is still that of a used one.
    fn put_back(&mut self, index: u32) -> After;

    /// Takes out the memory of blocks that the container has forgotten.
    fn take_leaving(&mut self) -> Vec<Span>;

    /// A client gives its allocation back: done, if nothing used it.
    #[inline(always)]
    fn free_unused(&mut self, id: BlockId) -> Freed {
        match self.table().live(id) {
            Some(block) if block.uses.is_empty() => Freed::Done(self.end(id.index)),
            Some(_) => Freed::Used,
            None => Freed::Unknown,
        }
    }

    /// A client gives an allocation back that has uses: it drains, until as many conditions have
    /// come true. `None` if it is not live.
    fn begin_draining(&mut self, id: BlockId) -> Option<(Uses<S>, u64)> {
        let block = self.table().live(id)?;
        let bytes = block.bytes;
        let uses = std::mem::take(&mut block.uses);
        block.state = State::Draining { pending: uses.len() as u32 };
        self.ledger().draining_bytes += bytes;
        Some((uses, bytes))
    }

    /// Takes [`begin_draining`](Home::begin_draining) back: the client holds its allocation again.
    fn undo_draining(&mut self, id: BlockId, uses: Uses<S>) {
        let block = &mut self.table()[id.index];
        block.state = State::Live;
        block.uses = uses;
        let bytes = block.bytes;
        self.ledger().draining_bytes -= bytes;
    }

    /// Notes a use of a live allocation, once. False if it is not live.
    fn note_use(&mut self, id: BlockId, used: Use<S>) -> bool {
        self.table().note_use(id, used)
    }

    /// One of the conditions of a draining block came true. `None` if others are left.
    fn count_down(&mut self, id: BlockId) -> Option<After> {
        if !self.table().count_down(id) {
            return None;
        }
        let bytes = self.table()[id.index].bytes;
        self.ledger().draining_bytes -= bytes;
        Some(self.end(id.index))
    }

    fn end(&mut self, index: u32) -> After {
        let block = &self.table()[index];
        let (bytes, requested) = (block.bytes, block.requested);
        self.ledger().end(bytes, requested);
        self.put_back(index)
    }
}
