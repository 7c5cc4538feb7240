//! Splitting, merging and the free index.

use super::Heap;
use crate::block::{BlockIdx, BlockState};
use crate::free_index::{Found, FreeKey};
use crate::units::Addr;

/// Free neighbours that a block swallowed, or that swallowed it.
#[derive(Debug, Default)]
pub(super) struct Absorbed {
    pub(super) blocks: u64,
    pub(super) bytes: u64,
}

impl Heap {
    /// Cuts a request of `bytes` from the beginning of a free block, whose place in the index the rest
    /// takes.
    #[inline]
    pub(super) fn carve(&mut self, free: &Found, bytes: u64) {
        let (rest, key) = self.blocks.split(free.block, bytes, BlockState::Free);
        let block = &mut self.blocks[rest];
        block.free_since = self.pool.searches(block.lane.class());
        self.lanes[block.lane.index()].free.put_in_place(free, key, rest);
    }

    /// Cuts a block after its first `bytes`; it keeps those. Returns the rest, which is `Held`.
    pub(super) fn split(&mut self, id: BlockIdx, bytes: u64) -> BlockIdx {
        self.blocks.split(id, bytes, BlockState::Held).0
    }

    /// Makes a part of a free block, `bytes` from `addr` on, a block of its own, which is `Held`; what
    /// is left is free. Returns it, and how many blocks there are now.
    pub(super) fn cut_part(&mut self, free: BlockIdx, addr: Addr, bytes: u64) -> (BlockIdx, u64) {
        self.remove_free(free);
        let below = addr - self.blocks[free].addr;
        let (mut block, mut pieces) = (free, 1);
        if below > 0 {
            block = self.split(free, below);
            self.insert_free(free);
            pieces += 1;
        }
        if self.blocks[block].bytes > bytes {
            let above = self.split(block, bytes);
            self.insert_free(above);
            pieces += 1;
        }
        (block, pieces)
    }

    /// Merges a block that is in no index with its free neighbours; the result is free.
    #[inline]
    pub(super) fn merge_and_insert(&mut self, id: BlockIdx) -> (BlockIdx, Absorbed) {
        let block = &self.blocks[id];
        let (prev, next, lane) = (block.prev, block.next, block.lane.index());
        // Carried along: what was just written to a block is slow to read back.
        let mut key = block.key();
        let mut absorbed = Absorbed::default();
        let below = self.blocks.free_neighbour(prev);
        let above = self.blocks.free_neighbour(next);
        let mut merged = id;
        // The place in the index that the result takes over.
        let mut place = None;
        if let Some(above) = above {
            let gone = self.blocks[above].key();
            absorbed.count(gone);
            self.blocks.join(id, above, self.clock);
            key.bytes += gone.bytes;
            place = Some(gone);
        }
        if let Some(below) = below {
            let lower = self.blocks[below].key();
            absorbed.count(lower);
            if let Some(above) = place.replace(lower) {
                self.lanes[lane].free.remove(above);
            }
            self.blocks.join(below, id, self.clock);
            key = FreeKey { bytes: lower.bytes + key.bytes, addr: lower.addr };
            merged = below;
        }
        match place {
            Some(old) => self.replace_free(old, key, merged),
            None => {
                self.blocks[id].state = BlockState::Held;
                self.insert_free(id);
            }
        }
        (merged, absorbed)
    }

    /// `Held` → `Free`.
    #[inline]
    pub(crate) fn insert_free(&mut self, id: BlockIdx) {
        let block = &mut self.blocks[id];
        debug_assert_eq!(block.state, BlockState::Held);
        block.state = BlockState::Free;
        block.free_since = self.pool.searches(block.lane.class());
        self.lanes[block.lane.index()].free.insert(block.key(), id);
    }

    /// A block, which has `key`, becomes free in the place of one with the key `old`.
    #[inline]
    fn replace_free(&mut self, old: FreeKey, key: FreeKey, id: BlockIdx) {
        let block = &mut self.blocks[id];
        debug_assert_eq!(block.key(), key);
        block.state = BlockState::Free;
        block.free_since = self.pool.searches(block.lane.class());
        self.lanes[block.lane.index()].free.replace(old, key, id);
    }

    /// `Free` → `Held`.
    #[inline]
    pub(crate) fn remove_free(&mut self, id: BlockIdx) {
        let block = &mut self.blocks[id];
        debug_assert_eq!(block.state, BlockState::Free);
        block.state = BlockState::Held;
        self.lanes[block.lane.index()].free.remove(block.key());
    }

    /// Puts back a block that was taken out but not used, without renewing its age unless a
    /// neighbour became free meanwhile.
    pub(crate) fn restore_free(&mut self, id: BlockIdx) {
        let since = self.blocks[id].free_since;
        let (merged, absorbed) = self.merge_and_insert(id);
        if absorbed.blocks == 0 {
            self.blocks[merged].free_since = since;
        }
    }
}

impl Absorbed {
    #[inline]
    fn count(&mut self, key: FreeKey) {
        self.blocks += 1;
        self.bytes += key.bytes;
    }
}
