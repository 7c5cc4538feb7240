//! The free blocks of one class of one heap, ordered by size, then address.

use crate::block::BlockId;
use crate::units::Addr;
use std::collections::BTreeMap;
use std::ops::Bound;

/// Key of a free block: its size in bytes, then its address. The order of keys is the order of best
/// fit and of flushes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct FreeKey {
    pub(crate) bytes: u64,
    pub(crate) addr: Addr,
}

/// Best fit by size, ties by lowest address.
#[derive(Debug, Default)]
pub(crate) struct FreeIndex {
    blocks: BTreeMap<FreeKey, BlockId>,
}

impl FreeIndex {
    /// # Panics
    /// If a block of this key is there already: two free blocks at one address.
    pub(crate) fn insert(&mut self, key: FreeKey, id: BlockId) {
        let before = self.blocks.insert(key, id);
        assert!(before.is_none(), "I2: two free blocks at {}", key.addr);
    }

    /// # Panics
    /// If no block has this key.
    pub(crate) fn remove(&mut self, key: FreeKey) {
        let removed = self.blocks.remove(&key);
        assert!(removed.is_some(), "I4: the free block at {} is not in the index", key.addr);
    }

    /// The smallest block of at least `bytes`; among equals the lowest.
    pub(crate) fn best_fit(&self, bytes: u64) -> Option<(FreeKey, BlockId)> {
        let from = FreeKey { bytes, addr: Addr::NULL };
        self.blocks.range(from..).next().map(|(key, id)| (*key, *id))
    }

    /// The next block in order.
    pub(crate) fn after(&self, key: FreeKey) -> Option<(FreeKey, BlockId)> {
        self.blocks
            .range((Bound::Excluded(key), Bound::Unbounded))
            .next()
            .map(|(key, id)| (*key, *id))
    }

    /// All blocks, ascending.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (FreeKey, BlockId)> + '_ {
        self.blocks.iter().map(|(key, id)| (*key, *id))
    }

    pub(crate) fn contains(&self, key: FreeKey, id: BlockId) -> bool {
        self.blocks.get(&key) == Some(&id)
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }
}
