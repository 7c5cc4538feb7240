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
//! and only until the next request of that class. If the ones before it did not come back, it merges at
//! once, and is cut out again should that request be of its size; blocks are the same either way.
//! While time is short, those of few sizes have lists
//! too (`variety`).

use super::{Heap, Ledger, LiveBlock, Request};
use crate::block::{Block, BlockIdx, BlockState};
use crate::size_class::{FewSize, SizeClass};
use crate::units::Addr;

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
    /// How many large blocks in a row were asked for again at once, up to [`RETURNS`].
    returned: u8,
    /// The latest large block, if it did not wait.
    merged: Option<Merged>,
}

/// So many large blocks in a row that were asked for again let one expect it of the next.
const RETURNS: u8 = 2;

/// A block that merged with its neighbours but may be asked for again: until then it has not died.
#[derive(Clone, Copy, Debug)]
struct Merged {
    /// The free block that it is a part of.
    into: BlockIdx,
    addr: Addr,
    bytes: u64,
}

impl Default for Recent {
    fn default() -> Self {
        Recent { first: [None; WaitingList::COUNT], len: 0, returned: RETURNS, merged: None }
    }
}

impl Heap {
    /// Leaves a block that nothing touches any more as it is.
    #[inline(always)]
    pub(super) fn put_off(&mut self, id: BlockIdx) {
        let block = &mut self.blocks[id];
        let list = block.list;
        if (list == WaitingList::LARGE) & (self.recent.returned < RETURNS) {
            return self.merge_early(id);
        }
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

    /// Merges a large block at once: it is not expected back, and the next large request has enough to
    /// do. It gets the block all the same if it is of its size.
    #[inline(never)]
    fn merge_early(&mut self, id: BlockIdx) {
        self.forget_merged();
        let Block { addr, bytes, .. } = self.blocks[id];
        let (into, _) = self.merge_and_insert(id);
        self.recent.merged = Some(Merged { into, addr, bytes });
    }

    /// The latest large block is not asked for again, or what it merged with may change.
    pub(super) fn forget_merged(&mut self) {
        if let Some(merged) = self.recent.merged.take() {
            self.lives.end(merged.bytes);
        }
    }

    /// Hands out a block that has merged, where it was.
    #[inline(never)]
    fn take_back(
        &mut self,
        merged: Merged,
        request: &Request,
        ledger: &mut Ledger<'_>,
    ) -> BlockIdx {
        let (block, _) = self.cut_part(merged.into, merged.addr, merged.bytes);
        self.blocks[block].list = request.list;
        self.make_live(block, request, ledger);
        block
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
    #[inline(always)]
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
            self.recent.returned = 0;
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
        if request.class == SizeClass::Large
            && let Some(merged) = self.recent.merged
        {
            if (merged.bytes == request.rounded) & (request.list == WaitingList::LARGE) {
                self.recent.merged = None;
                self.recent.returned += 1;
                return Some(self.take_back(merged, &request, ledger));
            }
            self.forget_merged();
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
        let own = request.list.index();
        let is_few = own > WaitingList::LARGE.index();
        let larger = if is_few { own } else { WaitingList::COUNT };
        for list in larger..WaitingList::COUNT {
            while self.merge_waiting(list, request.class) {
                let served = self.serve_again(request, ledger);
                if served.is_some() {
                    return served;
                }
            }
        }
        for list in 0..larger {
            while self.merge_waiting(list, request.class) {}
        }
        self.serve_again(request, ledger)
    }

    /// Merges the block that came last to a list, if it is of that class.
    fn merge_waiting(&mut self, list: usize, class: SizeClass) -> bool {
        let first = self.recent.first[list];
        let first = first.filter(|id| self.blocks[*id].lane.class() == class);
        if let Some(first) = first {
            self.take_waiting(list);
            self.merge_late(first);
        }
        first.is_some()
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
        if (self.recent.len != 0) | self.recent.merged.is_some() {
            self.settle_all();
        }
    }

    /// The size of the latest large block, if it has merged and may be asked for again; 0, which no block
    /// has, if it is not where it should be.
    pub(super) fn merged_bytes(&self) -> Option<u64> {
        let Merged { into, addr, bytes } = self.recent.merged?;
        let block = &self.blocks[into];
        let is_inside = block.addr <= addr && addr + bytes <= block.end();
        Some(if block.state == BlockState::Free && is_inside { bytes } else { 0 })
    }

    #[inline(never)]
    fn settle_all(&mut self) {
        self.forget_merged();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Policy, Rules, Settings};
    use crate::heap::PoolShared;
    use crate::lane::Lane;
    use crate::stats::StatTable;
    use crate::units::{DeviceId, PoolId, StreamId};
    use std::sync::Arc;

    const MIB: u64 = 1 << 20;

    /// The large class of a heap, and what is counted there.
    struct Rig {
        heap: Heap,
        stats: StatTable,
    }

    impl Rig {
        /// With 40 MiB free.
        fn new() -> Self {
            let rules = Rules::new(Policy::Ours, &Settings::default(), false, true);
            let pool = Arc::new(PoolShared::new(PoolId::DEFAULT, false));
            let heap = Heap::new(DeviceId::new(0), StreamId::new(0), pool, rules);
            let mut rig = Rig { heap, stats: StatTable::default() };
            let segment = rig.heap.segments.next_id();
            let (base, lane) = (Addr::new(1 << 30), Lane::Large);
            let hole = rig.heap.adopt_reservation(segment, base, 64 * MIB, lane, 2 * MIB);
            let run = rig.heap.plan_map(hole, 40 * MIB);
            let ledger = &mut Ledger { stats: &mut rig.stats, trace: None };
            let held = rig.heap.commit_map(hole, &run, None, ledger);
            rig.heap.insert_free(held);
            rig
        }

        fn allocate(&mut self, bytes: u64) -> BlockIdx {
            let ledger = &mut Ledger { stats: &mut self.stats, trace: None };
            let request = self.heap.rules.request(bytes);
            let served = self.heap.serve_hit(request, ledger).expect("there is memory");
            self.heap.blocks.resolve(served.id).expect("it is live")
        }

        fn free(&mut self, block: BlockIdx) {
            self.heap.free(block, &mut Ledger { stats: &mut self.stats, trace: None });
            assert!(self.heap.lives_are_right() && self.heap.listed().is_some());
        }

        /// Whether the latest large block waits, and whether one merged that may be asked for again.
        fn latest(&self) -> (bool, bool) {
            let waits = self.heap.recent.first[WaitingList::LARGE.index()].is_some();
            (waits, self.heap.recent.merged.is_some())
        }
    }

    #[test]
    fn large_blocks_wait_while_they_return() {
        let mut rig = Rig::new();
        let (mut waits, merged) = ((true, false), (false, true));
        for bytes in [4 * MIB, 5 * MIB, 6 * MIB] {
            let block = rig.allocate(bytes);
            rig.free(block);
            assert_eq!(rig.latest(), waits);
            waits = merged;
        }
        // The first that returns may do so by chance.
        for expected in [merged, (true, false), (true, false)] {
            let block = rig.allocate(6 * MIB);
            assert_eq!(rig.latest(), (false, false));
            rig.free(block);
            assert_eq!(rig.latest(), expected);
        }
        rig.heap.settle();
        assert_eq!(rig.latest(), (false, false));
        assert!(rig.heap.lives_are_right());
        assert_eq!(rig.heap.lanes[Lane::Large.index()].free.len(), 1);
    }

    #[test]
    fn a_block_that_merged_dies_when_another_is_asked_for_or_freed() {
        let mut rig = Rig::new();
        for bytes in [4 * MIB, 5 * MIB] {
            let block = rig.allocate(bytes);
            rig.free(block);
        }
        assert_eq!(rig.latest(), (false, true));
        let first = rig.allocate(3 * MIB);
        assert_eq!(rig.latest(), (false, false));
        let second = rig.allocate(3 * MIB);
        rig.free(first);
        rig.free(second);
        assert_eq!(rig.latest(), (false, true));
        rig.heap.settle();
        assert_eq!(rig.heap.listed(), Some(0));
    }
}
