//! Blocks and the slab that holds them.

use crate::free_index::FreeKey;
use crate::heap::{SegmentId, WaitingList};
use crate::lane::Lane;
use crate::units::Addr;
use std::num::NonZeroU32;
use std::ops::{Index, IndexMut};

/// Position of a block in its heap's slab. Valid while its block exists; what outlives that uses
/// [`BlockId`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct BlockIdx(NonZeroU32);

impl BlockIdx {
    /// # Panics
    /// If `index` is 0, the place of nobody, or 2^32 and more.
    pub(crate) fn new(index: usize) -> Self {
        let raw = u32::try_from(index).ok().and_then(NonZeroU32::new);
        BlockIdx(raw.expect("a heap has fewer than 2^32 blocks, counted from 1"))
    }

    #[inline]
    const fn get(self) -> usize {
        self.0.get() as usize
    }

    /// The position of a neighbour, or of the block that stands for none.
    #[inline]
    fn or_nobody(index: Option<Self>) -> usize {
        index.map_or(0, Self::get)
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
    /// Freed, and as it was, in the list of its size before `next`.
    Waiting { next: Option<BlockIdx> },
    /// In the hands of a slow path that is about to call the backend, or has just called it.
    Held,
    /// A place in the slab that holds no block.
    Vacant,
}

/// A sub-range of exactly one segment: the unit of split and merge. A free and a split each look at up
/// to three blocks: one cache line apiece.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(crate) struct Block {
    pub(crate) addr: Addr,
    pub(crate) bytes: u64,
    /// What the client asked for; meaningful while `Live` or `Draining`.
    pub(crate) requested: u64,
    /// The pool's search count when the block last became free.
    pub(crate) free_since: u64,
    pub(crate) state: BlockState,
    pub(crate) segment: SegmentId,
    /// Address neighbours in the same segment. In a vacant place, `next` is the next vacant one.
    pub(crate) prev: Option<BlockIdx>,
    pub(crate) next: Option<BlockIdx>,
    /// Times that this place in the slab was vacated or its block freed.
    generation: u32,
    /// The heap's clock when part of the block last became free.
    pub(crate) freed_at: u32,
    pub(crate) lane: Lane,
    /// Whether its segment is an expandable one.
    pub(crate) expandable: bool,
    /// Whether streams other than the heap's own are recorded for it.
    pub(crate) used: bool,
    /// Where it waits once it is freed; meaningful while `Live`, `Draining` or `Waiting`.
    pub(crate) list: WaitingList,
}

const _: () = assert!(size_of::<Block>() == 64);

impl Block {
    pub(crate) const fn new(
        addr: Addr,
        bytes: u64,
        state: BlockState,
        segment: SegmentId,
        lane: Lane,
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
            lane,
            expandable,
            used: false,
            list: WaitingList::NONE,
        }
    }

    /// Its id, as it is at `index`.
    #[inline]
    pub(crate) const fn id(&self, index: BlockIdx) -> BlockId {
        BlockId { index, generation: self.generation }
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

    /// Whether the block can be one for which streams are recorded (`used`) or which is shared, or
    /// neither (I10): a live one says whether it has either, a draining one can still be shared.
    pub(crate) const fn can_have(&self, used: bool, shared: bool) -> bool {
        match self.state {
            BlockState::Live => self.used == (used || shared),
            BlockState::Draining { .. } => !self.used && !used,
            _ => !self.used && !used && !shared,
        }
    }
}

/// Places that are read through at most: 256 KiB, a part of the second cache.
const READ_MAX: usize = 4096;
/// Places that are vacant at least where room was made.
const ROOM: usize = 128;

/// All blocks of a heap.
#[derive(Debug)]
pub(crate) struct BlockSlab {
    /// The first is nobody: it is what a missing neighbour is, always vacant, and takes what is
    /// written about such.
    slots: Vec<Block>,
    /// The first of the vacant places.
    vacant: Option<BlockIdx>,
}

impl Default for BlockSlab {
    fn default() -> Self {
        let (segment, state) = (SegmentId::new(0), BlockState::Vacant);
        let nobody = Block::new(Addr::NULL, 0, state, segment, Lane::Small, false);
        BlockSlab { slots: vec![nobody], vacant: None }
    }
}

impl BlockSlab {
    /// Finds a place for a block.
    pub(crate) fn insert(&mut self, block: Block) -> BlockIdx {
        let index = self.place();
        let slot = &mut self.slots[index.get()];
        *slot = Block { generation: slot.generation, ..block };
        index
    }

    #[inline]
    fn place(&mut self) -> BlockIdx {
        match self.vacant {
            Some(index) => {
                self.vacant = self.slots[index.get()].next;
                index
            }
            None => self.new_place(),
        }
    }

    #[cold]
    #[inline(never)]
    fn new_place(&mut self) -> BlockIdx {
        let index = BlockIdx::new(self.slots.len());
        self.slots.push(self.slots[0].clone());
        index
    }

    /// Sees to it that some blocks can be cut without a call of the host's allocator.
    pub(crate) fn make_room(&mut self) {
        let next = |at: &BlockIdx| self.slots[at.get()].next;
        let vacant = std::iter::successors(self.vacant, next).take(ROOM).count();
        let (first, wanted) = (self.slots.len(), ROOM - vacant);
        self.slots.resize(first + wanted, self.slots[0].clone());
        // Those that come first are taken first.
        for index in (first..first + wanted).rev().map(BlockIdx::new) {
            self.slots[index.get()].next = self.vacant.replace(index);
        }
    }

    /// Reads every place once, as far as caches hold them. What it returns means nothing.
    pub(crate) fn read_through(&self) -> u64 {
        self.slots.iter().take(READ_MAX).map(|block| block.bytes).fold(0, u64::wrapping_add)
    }

    /// Cuts a block after its first `bytes`; it keeps those. Returns the rest, which is in `state`, and
    /// its key.
    #[inline(always)]
    pub(crate) fn split(
        &mut self,
        id: BlockIdx,
        bytes: u64,
        state: BlockState,
    ) -> (BlockIdx, FreeKey) {
        let rest = self.place();
        let slots = &mut self.slots[..];
        let block = &mut slots[id.get()];
        let after = block.next.replace(rest);
        let (addr, rest_bytes) = (block.addr + bytes, block.bytes - bytes);
        block.bytes = bytes;
        let (segment, lane, expandable) = (block.segment, block.lane, block.expandable);
        let freed_at = block.freed_at;
        let slot = &mut slots[rest.get()];
        slot.addr = addr;
        slot.bytes = rest_bytes;
        slot.requested = 0;
        slot.state = state;
        slot.segment = segment;
        slot.prev = Some(id);
        slot.next = after;
        slot.freed_at = freed_at;
        slot.lane = lane;
        slot.expandable = expandable;
        slot.used = false;
        slots[BlockIdx::or_nobody(after)].prev = Some(rest);
        (rest, FreeKey { bytes: rest_bytes, addr })
    }

    /// Makes `upper`, the block right above `lower`, a part of it, at the heap's time `clock`.
    #[inline]
    pub(crate) fn join(&mut self, lower: BlockIdx, upper: BlockIdx, clock: u32) {
        let slots = &mut self.slots[..];
        let gone = &mut slots[upper.get()];
        let (addr, bytes, freed_at) = (gone.addr, gone.bytes, gone.freed_at);
        gone.state = BlockState::Vacant;
        gone.generation = gone.generation.wrapping_add(1);
        let next = std::mem::replace(&mut gone.next, self.vacant.replace(upper));
        let block = &mut slots[lower.get()];
        debug_assert_eq!(block.end(), addr, "I1: neighbours touch");
        block.bytes += bytes;
        block.next = next;
        // The later of two times that wrap around.
        if clock.wrapping_sub(freed_at) < clock.wrapping_sub(block.freed_at) {
            block.freed_at = freed_at;
        }
        slots[BlockIdx::or_nobody(next)].prev = Some(lower);
    }

    /// A neighbour, if it is free.
    #[inline]
    pub(crate) fn free_neighbour(&self, neighbour: Option<BlockIdx>) -> Option<BlockIdx> {
        let state = self.slots[BlockIdx::or_nobody(neighbour)].state;
        neighbour.filter(|_| state == BlockState::Free)
    }

    /// Vacates a place; ids of its block are stale from now on.
    #[inline]
    pub(crate) fn remove(&mut self, index: BlockIdx) {
        let slot = &mut self.slots[index.get()];
        debug_assert_ne!(slot.state, BlockState::Vacant, "I10: an index names a block");
        slot.state = BlockState::Vacant;
        slot.generation = slot.generation.wrapping_add(1);
        slot.next = self.vacant.replace(index);
    }

    /// Makes all ids of a block stale; it stays where it is.
    #[inline]
    pub(crate) fn renew(&mut self, index: BlockIdx) {
        let slot = &mut self.slots[index.get()];
        slot.generation = slot.generation.wrapping_add(1);
    }

    /// The id of a block, for use outside the lock of its heap.
    #[inline]
    pub(crate) fn id(&self, index: BlockIdx) -> BlockId {
        self.slots[index.get()].id(index)
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
            .map(|(index, block)| (BlockIdx::new(index), block))
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
        Block::new(Addr::new(512), 512, BlockState::Live, segment, Lane::Small, false)
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

    #[test]
    fn streams_are_recorded_for_live_blocks_and_shares_for_active_ones() {
        let (live, draining) = (BlockState::Live, BlockState::Draining { pending: 1 });
        let idle = [BlockState::Free, BlockState::Unmapped, BlockState::Held];
        // What the block says, whether streams are recorded, whether it is shared.
        let sound = [
            (live, [false, false, false]),
            (live, [true, true, false]),
            (live, [true, false, true]),
            (live, [true, true, true]),
            (draining, [false, false, false]),
            (draining, [false, false, true]),
        ];
        for state in [live, draining].into_iter().chain(idle) {
            for bits in 0..8 {
                let flags = [0, 1, 2].map(|bit| bits >> bit & 1 == 1);
                let expected =
                    sound.contains(&(state, flags)) || (idle.contains(&state) && bits == 0);
                let [says, used, shared] = flags;
                let block = Block { state, used: says, ..block() };
                assert_eq!(block.can_have(used, shared), expected, "{state:?}, {flags:?}");
            }
        }
    }
}
