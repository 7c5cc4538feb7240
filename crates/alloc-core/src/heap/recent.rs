//! Freed blocks that wait to be asked for again, by size.
//!
//! What a program frees it mostly asks for again, in the same size, before long. To merge the block
//! with its neighbours only to search for it and cut it off again is most of the work of such a pair.
//! So a free leaves the block as it is, in the list of its size, and a request of just that size takes
//! it: a perfect fit, that leaves no rest. Blocks are merged when many wait, or as soon as anybody
//! looks at free memory ([`Heap::settle`]): a miss of their own heap, growth of another, a flush. So
//! only hits know of them.
//!
//! In the large class, where a block kept whole may be missing elsewhere, only the latest one waits,
//! and only until the next request of that class.

use super::{Heap, Ledger, Request};
use crate::block::{BlockIdx, BlockState};
use crate::size_class::{BLOCK_BYTES_MIN, OURS_SMALL_BYTES_MAX, SizeClass};

/// One list for each size of the small class; the first is the large class's.
const LISTS: usize = (OURS_SMALL_BYTES_MAX / BLOCK_BYTES_MIN) as usize + 1;
const LARGE: usize = 0;

/// The blocks that wait, by size; each list is linked through [`BlockState::Waiting`].
#[derive(Debug)]
pub(crate) struct Recent {
    first: [Option<BlockIdx>; LISTS],
    /// How many wait.
    len: u32,
}

impl Default for Recent {
    fn default() -> Self {
        Recent { first: [None; LISTS], len: 0 }
    }
}

/// The list of a size in one class.
#[inline]
fn list_of(class: SizeClass, bytes: u64) -> usize {
    match class {
        SizeClass::Small => (bytes / BLOCK_BYTES_MIN) as usize,
        SizeClass::Large => LARGE,
    }
}

impl Heap {
    /// Leaves a block that nothing touches any more as it is.
    #[inline]
    pub(super) fn put_off(&mut self, id: BlockIdx) {
        let block = &mut self.blocks[id];
        let list = list_of(block.class, block.bytes);
        let Some(first) = self.recent.first.get_mut(list) else {
            // Larger than its class, since the settings changed.
            return self.merge_late(id);
        };
        let next = first.replace(id);
        block.state = BlockState::Waiting { next };
        self.recent.len += 1;
        if (self.recent.len > self.rules.waiting_max) | ((list == LARGE) & next.is_some()) {
            self.make_room(next.filter(|_| list == LARGE));
        }
    }

    #[inline(never)]
    fn merge_late(&mut self, id: BlockIdx) {
        self.merge_and_insert(id);
    }

    /// Merges the block of the large class that waited before, or all that wait.
    #[inline(never)]
    fn make_room(&mut self, large: Option<BlockIdx>) {
        let Some(large) = large else { return self.settle_all() };
        if let Some(latest) = self.recent.first[LARGE] {
            self.blocks[latest].state = BlockState::Waiting { next: None };
        }
        self.recent.len -= 1;
        self.merge_and_insert(large);
    }

    /// Serves a request from the lists or else from the free index.
    #[inline]
    pub(crate) fn serve_hit(
        &mut self,
        request: &Request,
        ledger: &mut Ledger<'_>,
    ) -> Option<BlockIdx> {
        let list = list_of(request.class, request.rounded);
        let Some(Some(first)) = self.recent.first.get(list).copied() else {
            return self.serve_index(request, ledger);
        };
        let block = &self.blocks[first];
        let BlockState::Waiting { next } = block.state else {
            unreachable!("I4: a block in a list waits")
        };
        let fits = block.bytes == request.rounded;
        self.recent.first[list] = next;
        self.recent.len -= 1;
        if !fits {
            self.merge_late(first);
            return self.serve_index(request, ledger);
        }
        self.make_live(first, request, ledger);
        Some(first)
    }

    /// [`serve_hit`](Self::serve_hit) where no block of just that size waits.
    #[inline(never)]
    fn serve_index(&mut self, request: &Request, ledger: &mut Ledger<'_>) -> Option<BlockIdx> {
        let served = self.serve(request, ledger);
        if served.is_some() | (self.recent.len == 0) {
            return served;
        }
        self.settle_all();
        self.serve_again(request, ledger)
    }

    /// Merges every block that waits.
    #[inline]
    pub(crate) fn settle(&mut self) {
        if self.recent.len != 0 {
            self.settle_all();
        }
    }

    #[inline(never)]
    fn settle_all(&mut self) {
        for list in 0..LISTS {
            let mut first = self.recent.first[list].take();
            while let Some(id) = first {
                let BlockState::Waiting { next } = self.blocks[id].state else {
                    unreachable!("I4: a block in a list waits")
                };
                self.merge_and_insert(id);
                first = next;
            }
        }
        self.recent.len = 0;
    }

    /// How many blocks the lists have; `None` if one is of another size or does not wait, or if they
    /// were counted wrong.
    pub(crate) fn listed(&self) -> Option<usize> {
        let mut listed = 0;
        for (list, first) in self.recent.first.iter().enumerate() {
            let mut cursor = *first;
            while let Some(id) = cursor {
                let block = &self.blocks[id];
                let BlockState::Waiting { next } = block.state else { return None };
                if list_of(block.class, block.bytes) != list || listed == self.recent.len as usize {
                    return None;
                }
                listed += 1;
                cursor = next;
            }
        }
        (listed == self.recent.len as usize).then_some(listed)
    }
}
