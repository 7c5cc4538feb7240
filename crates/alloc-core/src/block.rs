//! Blocks and the slab that holds them.

use crate::free_index::FreeKey;
use crate::heap::SegmentId;
use crate::size_class::SizeClass;
use crate::units::Addr;
use std::num::NonZeroU32;
use std::ops::{Index, IndexMut};

/// Position of a block in its heap's slab. Valid while its block exists; what outlives that uses
/// [`BlockId`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct BlockIdx(NonZeroU32);

impl BlockIdx {
    pub(crate) const fn new(index: u32) -> Self {
        // Stored plus one, so that an optional position takes no more room.
        match NonZeroU32::new(index.wrapping_add(1)) {
            Some(raw) => BlockIdx(raw),
            None => panic!("a heap has fewer than 2^32 blocks"),
        }
    }

    const fn get(self) -> usize {
        self.0.get() as usize - 1
    }
}

/// Names a block of one heap outside its lock. The generation makes a stale id a checked error.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct BlockId {
    index: BlockIdx,
    generation: u32,
}

/// What a block is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BlockState {
    /// Backed by memory, in the free index.
    Free,
    /// Handed out to the client.
    Live,
    /// Given back by the client; this many events of other streams are not yet reached.
    Draining { pending: u32 },
    /// Address space of an expandable segment with no memory behind it.
    Unmapped,
    /// In the hands of a slow path that is about to call the backend, or has just called it.
    Held,
    /// A place in the slab that holds no block.
    Vacant,
}

/// A sub-range of exactly one segment: the unit of split and merge.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) addr: Addr,
    pub(crate) bytes: u64,
    /// What the client asked for; meaningful while `Live` or `Draining`.
    pub(crate) requested: u64,
    /// The pool's search count when the block last became free.
    pub(crate) free_since: u64,
    pub(crate) state: BlockState,
    pub(crate) segment: SegmentId,
    /// Address neighbours in the same segment.
    pub(crate) prev: Option<BlockIdx>,
    pub(crate) next: Option<BlockIdx>,
    /// Times that this place in the slab was vacated.
    generation: u32,
    /// The heap's clock when part of the block last became free.
    pub(crate) freed_at: u32,
    pub(crate) class: SizeClass,
    /// Whether its segment is an expandable one.
    pub(crate) expandable: bool,
    /// Whether streams other than the heap's own are recorded for it.
    pub(crate) used: bool,
}

// A free and a split each look at up to three blocks: one cache line apiece.
const _: () = assert!(size_of::<Block>() <= 64);

impl Block {
    pub(crate) const fn new(
        addr: Addr,
        bytes: u64,
        state: BlockState,
        segment: SegmentId,
        class: SizeClass,
        expandable: bool,
    ) -> Self {
        Block {
            addr,
            bytes,
            requested: 0,
            free_since: 0,
            state,
            segment,
            prev: None,
            next: None,
            generation: 0,
            freed_at: 0,
            class,
            expandable,
            used: false,
        }
    }

    pub(crate) const fn key(&self) -> FreeKey {
        FreeKey { bytes: self.bytes, addr: self.addr }
    }

    pub(crate) fn end(&self) -> Addr {
        self.addr + self.bytes
    }

    /// Whether the block shares its segment with another one.
    pub(crate) const fn is_split(&self) -> bool {
        self.prev.is_some() || self.next.is_some()
    }

    /// Whether a client may touch it or work may still do.
    pub(crate) const fn is_active(&self) -> bool {
        matches!(self.state, BlockState::Live | BlockState::Draining { .. })
    }
}

/// All blocks of a heap.
#[derive(Debug, Default)]
pub(crate) struct BlockSlab {
    slots: Vec<Block>,
    vacant: Vec<BlockIdx>,
}

impl BlockSlab {
    #[inline]
    pub(crate) fn insert(&mut self, block: Block) -> BlockIdx {
        if let Some(index) = self.vacant.pop() {
            let slot = &mut self.slots[index.get()];
            *slot = Block { generation: slot.generation, ..block };
            return index;
        }
        let index = BlockIdx::new(u32::try_from(self.slots.len()).unwrap_or(u32::MAX));
        self.slots.push(block);
        index
    }

    /// Vacates a place; ids of its block are stale from now on.
    #[inline]
    pub(crate) fn remove(&mut self, index: BlockIdx) {
        let slot = &mut self.slots[index.get()];
        debug_assert_ne!(slot.state, BlockState::Vacant, "I10: an index names a block");
        slot.state = BlockState::Vacant;
        slot.generation = slot.generation.wrapping_add(1);
        self.vacant.push(index);
    }

    /// Makes all ids of a block stale; it stays where it is.
    pub(crate) fn renew(&mut self, index: BlockIdx) {
        let slot = &mut self.slots[index.get()];
        slot.generation = slot.generation.wrapping_add(1);
    }

    /// The id of a block, for use outside the lock of its heap.
    #[inline]
    pub(crate) fn id(&self, index: BlockIdx) -> BlockId {
        BlockId { index, generation: self.slots[index.get()].generation }
    }

    /// The block that an id names, unless it is gone.
    #[inline]
    pub(crate) fn resolve(&self, id: BlockId) -> Option<BlockIdx> {
        let slot = self.slots.get(id.index.get())?;
        let current = slot.generation == id.generation && slot.state != BlockState::Vacant;
        current.then_some(id.index)
    }

    /// Every block, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockIdx, &Block)> {
        self.slots
            .iter()
            .enumerate()
            .filter(|(_, block)| block.state != BlockState::Vacant)
            .map(|(index, block)| (BlockIdx::new(index as u32), block))
    }
}

impl Index<BlockIdx> for BlockSlab {
    type Output = Block;
    #[inline]
    fn index(&self, index: BlockIdx) -> &Block {
        &self.slots[index.get()]
    }
}

impl IndexMut<BlockIdx> for BlockSlab {
    #[inline]
    fn index_mut(&mut self, index: BlockIdx) -> &mut Block {
        &mut self.slots[index.get()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block() -> Block {
        let segment = SegmentId::new(0);
        Block::new(Addr::new(512), 512, BlockState::Live, segment, SizeClass::Small, false)
    }

    #[test]
    fn a_stale_id_names_nothing() {
        let mut slab = BlockSlab::default();
        let first = slab.insert(block());
        let old = slab.id(first);
        slab.remove(first);
        assert_eq!(slab.resolve(old), None);
        let second = slab.insert(block());
        assert_eq!(first, second, "the place is used again");
        assert_eq!(slab.resolve(old), None);
        assert_eq!(slab.resolve(slab.id(second)), Some(second));
        assert_eq!(slab.iter().count(), 1);
    }
}
