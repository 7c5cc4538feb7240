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
use crate::block::{Block, BlockIdx, BlockState};
use crate::lane::Lane;
use crate::size_class::FewSize;

/// The list of the large class; the others are numbered as the sizes of the small class are.
pub(crate) const LARGE_LIST: usize = 0;

/// The blocks that wait, by size; each list is linked through [`BlockState::Waiting`].
#[derive(Debug)]
pub(crate) struct Recent {
    first: [Option<BlockIdx>; FewSize::COUNT],
    /// How many wait.
    len: u32,
}

impl Default for Recent {
    fn default() -> Self {
        Recent { first: [None; FewSize::COUNT], len: 0 }
    }
}

/// The list that a block may wait in; `None` if it was cut before sizes were few.
#[inline]
fn list_of(block: &Block) -> Option<usize> {
    if block.lane != Lane::Small {
        return Some(LARGE_LIST);
    }
    let few = FewSize::of(block.bytes);
    ((few.bytes == block.bytes) & (few.number < FewSize::COUNT)).then_some(few.number)
}

impl Heap {
    /// Leaves a block that nothing touches any more as it is.
    #[inline]
    pub(super) fn put_off(&mut self, id: BlockIdx) {
        let block = &mut self.blocks[id];
        let Some(list) = list_of(block) else { return self.merge_late(id) };
        let next = self.recent.first[list].replace(id);
        block.state = BlockState::Waiting { next };
        self.recent.len += 1;
        if (self.recent.len > self.rules.waiting_max) | ((list == LARGE_LIST) & next.is_some()) {
            self.make_room(next.filter(|_| list == LARGE_LIST));
        }
    }

    #[inline(never)]
    fn merge_late(&mut self, id: BlockIdx) {
        self.end_life(id);
        self.merge_and_insert(id);
    }

    /// Merges the block of the large class that waited before, or all that wait.
    #[inline(never)]
    fn make_room(&mut self, large: Option<BlockIdx>) {
        let Some(large) = large else { return self.settle_all() };
        if let Some(latest) = self.recent.first[LARGE_LIST] {
            self.blocks[latest].state = BlockState::Waiting { next: None };
        }
        self.recent.len -= 1;
        self.merge_late(large);
    }

    /// Serves a request from its list or else from the free index.
    #[inline]
    pub(crate) fn serve_hit(
        &mut self,
        request: &Request,
        ledger: &mut Ledger<'_>,
    ) -> Option<BlockIdx> {
        let list = request.list;
        let Some(first) = self.recent.first[list] else {
            return self.serve_index(request, ledger);
        };
        let block = &self.blocks[first];
        let BlockState::Waiting { next } = block.state else {
            unreachable!("I4: a block in a list waits")
        };
        let fits = (block.bytes == request.rounded) & (block.lane.class() == request.class);
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
        for list in 0..FewSize::COUNT {
            let mut first = self.recent.first[list].take();
            while let Some(id) = first {
                let BlockState::Waiting { next } = self.blocks[id].state else {
                    unreachable!("I4: a block in a list waits")
                };
                self.merge_late(id);
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
                if list_of(block) != Some(list) || listed == self.recent.len as usize {
                    return None;
                }
                listed += 1;
                cursor = next;
            }
        }
        (listed == self.recent.len as usize).then_some(listed)
    }
}
