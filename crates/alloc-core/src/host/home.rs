//! What buckets and heaps have in common: a table of blocks under one lock, and what happens to a
//! block between its client's free and its reuse.

use super::block::{BlockId, BlockTable, State, Uses};
use super::stats::Ledger;
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

/// What became of a block that nobody uses any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Released {
    /// It can be handed out again.
    Kept,
    /// It is not to be cached: the container has forgotten it, its segment must be given back.
    Leaves(Span),
}

/// The answer to a client's free.
#[derive(Debug)]
pub(crate) enum Begun<S> {
    /// No such allocation: stale or foreign.
    Unknown,
    /// Nothing used the block: it is free already.
    Released(Released),
    /// These must be waited for; the block is draining.
    Used { uses: Uses<S>, bytes: u64 },
}

/// A bucket or a heap, locked.
pub(crate) trait Home<S: PartialEq> {
    fn table(&mut self) -> &mut BlockTable<S>;

    fn ledger(&mut self) -> &mut Ledger;

    /// Makes an unused block available again. Its state is still that of a used one.
    fn put_back(&mut self, index: u32) -> Released;

    /// A client gives its allocation back.
    fn begin_free(&mut self, id: BlockId) -> Begun<S> {
        let Some(block) = self.table().live(id) else { return Begun::Unknown };
        if block.uses.is_empty() {
            return Begun::Released(self.end(id.index));
        }
        let bytes = block.bytes;
        let uses = std::mem::take(&mut block.uses);
        block.state = State::Draining { pending: uses.len() as u32 };
        self.ledger().draining_bytes += bytes;
        Begun::Used { uses, bytes }
    }

    /// Takes [`begin_free`](Home::begin_free) back: the client holds its allocation again.
    fn undo_free(&mut self, id: BlockId, uses: Uses<S>) {
        let block = &mut self.table()[id.index];
        block.state = State::Live;
        block.uses = uses;
        let bytes = block.bytes;
        self.ledger().draining_bytes -= bytes;
    }

    /// One of the conditions of a draining block came true. `None` if others are left.
    fn count_down(&mut self, id: BlockId) -> Option<Released> {
        if !self.table().count_down(id) {
            return None;
        }
        let bytes = self.table()[id.index].bytes;
        self.ledger().draining_bytes -= bytes;
        Some(self.end(id.index))
    }

    fn end(&mut self, index: u32) -> Released {
        let block = &self.table()[index];
        let (bytes, requested) = (block.bytes, block.requested);
        self.ledger().end(bytes, requested);
        self.put_back(index)
    }
}
