//! Blocks and the slab that holds them.

use crate::free_index::FreeKey;
use crate::heap::SegmentId;
use crate::size_class::SizeClass;
use crate::units::Addr;
use std::ops::{Index, IndexMut};

/// Names a block of one heap. The generation makes a stale id a checked error.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct BlockId {
    index: u32,
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
}

/// A sub-range of exactly one segment: the unit of split and merge.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) addr: Addr,
    pub(crate) bytes: u64,
    /// What the client asked for; meaningful while `Live` or `Draining`.
    pub(crate) requested: u64,
    pub(crate) state: BlockState,
    pub(crate) class: SizeClass,
    pub(crate) segment: SegmentId,
    /// Address neighbours in the same segment.
    pub(crate) prev: Option<BlockId>,
    pub(crate) next: Option<BlockId>,
    /// The pool's search count when the block last became free.
    pub(crate) free_since: u64,
}

impl Block {
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

#[derive(Debug)]
struct Slot {
    generation: u32,
    block: Option<Block>,
}

/// All blocks of a heap, by id.
#[derive(Debug, Default)]
pub(crate) struct BlockSlab {
    slots: Vec<Slot>,
    vacant: Vec<u32>,
}

impl BlockSlab {
    pub(crate) fn insert(&mut self, block: Block) -> BlockId {
        if let Some(index) = self.vacant.pop() {
            let slot = &mut self.slots[index as usize];
            slot.block = Some(block);
            return BlockId { index, generation: slot.generation };
        }
        let index = u32::try_from(self.slots.len()).expect("fewer than 2^32 blocks in a heap");
        self.slots.push(Slot { generation: 0, block: Some(block) });
        BlockId { index, generation: 0 }
    }

    pub(crate) fn remove(&mut self, id: BlockId) -> Block {
        let slot = &mut self.slots[id.index as usize];
        assert_eq!(slot.generation, id.generation, "I10: stale block id");
        slot.generation = slot.generation.wrapping_add(1);
        self.vacant.push(id.index);
        slot.block.take().expect("I10: block id names a block")
    }

    /// The block, unless the id is stale.
    pub(crate) fn get(&self, id: BlockId) -> Option<&Block> {
        let slot = self.slots.get(id.index as usize)?;
        if slot.generation == id.generation { slot.block.as_ref() } else { None }
    }

    /// Every block with its id, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockId, &Block)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let id = BlockId { index: index as u32, generation: slot.generation };
            slot.block.as_ref().map(|block| (id, block))
        })
    }
}

impl Index<BlockId> for BlockSlab {
    type Output = Block;
    fn index(&self, id: BlockId) -> &Block {
        self.get(id).expect("I10: block id names a block")
    }
}

impl IndexMut<BlockId> for BlockSlab {
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        let slot = &mut self.slots[id.index as usize];
        assert_eq!(slot.generation, id.generation, "I10: stale block id");
        slot.block.as_mut().expect("I10: block id names a block")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block() -> Block {
        Block {
            addr: Addr::new(512),
            bytes: 512,
            requested: 1,
            state: BlockState::Live,
            class: SizeClass::Small,
            segment: SegmentId::new(0),
            prev: None,
            next: None,
            free_since: 0,
        }
    }

    #[test]
    fn a_stale_id_names_nothing() {
        let mut slab = BlockSlab::default();
        let old = slab.insert(block());
        slab.remove(old);
        let new = slab.insert(block());
        assert_ne!(old, new);
        assert!(slab.get(old).is_none());
        assert!(slab.get(new).is_some());
        assert_eq!(slab.iter().count(), 1);
    }
}
