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
//! and only until the next request of that class; while time is short, those of few sizes have lists
//! too (`variety`).

use super::{Heap, Ledger, LiveBlock, Request};
use crate::block::{Block, BlockIdx, BlockState};
use crate::size_class::{FewSize, SizeClass};

/// Where blocks wait for a request: by size those of few sizes, other large ones in one list.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WaitingList(u8);

impl WaitingList {
    const COUNT: usize = FewSize::COUNT + 1;
    /// Of blocks that do not wait.
    pub(crate) const NONE: WaitingList = WaitingList(0);
    pub(crate) const LARGE: WaitingList = WaitingList(1);

    #[inline]
    pub(crate) const fn of_few(size: FewSize) -> Self {
        WaitingList(size.number as u8 + 1)
    }

    /// The list of a block of an expandable segment.
    pub(super) fn of(class: SizeClass, bytes: u64) -> Self {
        if class == SizeClass::Large {
            return WaitingList::LARGE;
        }
        let few = FewSize::of(bytes);
        let waits = (few.bytes == bytes) & (bytes <= FewSize::BYTES_MAX);
        if waits { WaitingList::of_few(few) } else { WaitingList::NONE }
    }

    /// Whether a block may wait there.
    fn may_have(self, block: &Block) -> bool {
        let few = FewSize::of(block.bytes);
        match self {
            WaitingList::NONE => false,
            WaitingList::LARGE => block.lane.class() == SizeClass::Large,
            list => few.bytes == block.bytes && list == WaitingList::of_few(few),
        }
    }

    const fn index(self) -> usize {
        self.0 as usize
    }
}

const _: () = assert!(WaitingList::COUNT <= 1 << u8::BITS);

impl Request {
    /// The list of a block that serves it.
    #[inline]
    pub(super) fn list_of(&self, block: &Block) -> WaitingList {
        let waits = block.expandable & (block.bytes == self.rounded);
        if waits { self.list } else { WaitingList::NONE }
    }
}

/// The blocks that wait; each list is linked through [`BlockState::Waiting`].
#[derive(Debug)]
pub(crate) struct Recent {
    first: [Option<BlockIdx>; WaitingList::COUNT],
    /// How many wait.
    len: u32,
}

impl Default for Recent {
    fn default() -> Self {
        Recent { first: [None; WaitingList::COUNT], len: 0 }
    }
}

impl Heap {
    /// Leaves a block that nothing touches any more as it is.
    #[inline]
    pub(super) fn put_off(&mut self, id: BlockIdx) {
        let block = &mut self.blocks[id];
        let list = block.list;
        let next = self.recent.first[list.index()].replace(id);
        block.state = BlockState::Waiting { next };
        self.recent.len += 1;
        let displaced = if list == WaitingList::LARGE { next } else { None };
        if (self.recent.len > self.rules.waiting_max) | displaced.is_some() {
            self.make_room(displaced);
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
        if let Some(latest) = self.recent.first[WaitingList::LARGE.index()] {
            self.blocks[latest].state = BlockState::Waiting { next: None };
        }
        self.recent.len -= 1;
        self.merge_late(large);
    }

    /// Serves a request from its list or else from the free index.
    #[inline]
    pub(crate) fn serve_hit(
        &mut self,
        request: Request,
        ledger: &mut Ledger<'_>,
    ) -> Option<LiveBlock> {
        let list = request.list.index();
        let Some(first) = self.recent.first[list] else {
            return self.serve_index(request, ledger).map(|id| self.live_block(id));
        };
        let block = &self.blocks[first];
        let BlockState::Waiting { next } = block.state else {
            unreachable!("I4: a block in a list waits")
        };
        // In the other lists, all do.
        let fits = block.bytes == request.rounded;
        self.recent.first[list] = next;
        self.recent.len -= 1;
        if !fits {
            self.merge_late(first);
            return self.serve_index(request, ledger).map(|id| self.live_block(id));
        }
        Some(self.make_live(first, &request, ledger))
    }

    /// [`serve_hit`](Self::serve_hit) where no block of just that size waits.
    #[inline(never)]
    fn serve_index(&mut self, request: Request, ledger: &mut Ledger<'_>) -> Option<BlockIdx> {
        if self.asks_for_the_time(request.class) {
            return None;
        }
        let served = self.serve(&request, ledger);
        if served.is_some() | (self.recent.len == 0) {
            return served;
        }
        if self.rules.is_wide() {
            return self.serve_waiting(&request, ledger);
        }
        self.settle_all();
        self.serve_again(&request, ledger)
    }

    /// Serves a request from larger blocks that wait, or else from all of its class. Blocks wait so that
    /// time is saved: no more of them merge than it takes.
    fn serve_waiting(&mut self, request: &Request, ledger: &mut Ledger<'_>) -> Option<BlockIdx> {
        for list in request.list.index()..WaitingList::COUNT {
            while let Some(first) = self.take_waiting(list) {
                self.merge_late(first);
                let served = self.serve_again(request, ledger);
                if served.is_some() {
                    return served;
                }
            }
        }
        let class = |heap: &Self, id: BlockIdx| heap.blocks[id].lane.class();
        for list in 0..request.list.index() {
            while self.recent.first[list].is_some_and(|id| class(self, id) == request.class)
                && let Some(first) = self.take_waiting(list)
            {
                self.merge_late(first);
            }
        }
        self.serve_again(request, ledger)
    }

    /// Takes the block that came last off a list.
    fn take_waiting(&mut self, list: usize) -> Option<BlockIdx> {
        let first = self.recent.first[list]?;
        let BlockState::Waiting { next } = self.blocks[first].state else {
            unreachable!("I4: a block in a list waits")
        };
        self.recent.first[list] = next;
        self.recent.len -= 1;
        Some(first)
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
        for list in 0..WaitingList::COUNT {
            while let Some(first) = self.take_waiting(list) {
                self.merge_late(first);
            }
        }
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
                let right = block.list.index() == list && block.list.may_have(block);
                if !right || listed == self.recent.len as usize {
                    return None;
                }
                listed += 1;
                cursor = next;
            }
        }
        (listed == self.recent.len as usize).then_some(listed)
    }
}
