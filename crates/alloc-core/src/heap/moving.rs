//! Memory that changes place: parts of free blocks become holes, parts of holes become free blocks.

use super::{Heap, Ledger, PageRun};
use crate::block::{BlockIdx, BlockState};
use crate::lane::Lane;
use crate::size_class::SizeClass;
use crate::units::Addr;

/// When the stream of a heap last used memory that the heap gets. In order: the latest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum LastUse {
    /// Maybe just now, through another heap of the stream.
    Now,
    /// Before so many frees of this heap.
    Ago(u32),
    /// Never, or its work is known to be done.
    Done,
}

impl Heap {
    /// Notes that a class is about to grow. Returns how many growths of the large class in a row,
    /// before this one, had no free between them.
    pub(crate) fn note_growth(&mut self, class: SizeClass) -> u32 {
        let (clock, growths) = self.grown;
        let calm = if clock == self.clock { growths } else { 0 };
        if class == SizeClass::Large {
            self.grown = (self.clock, calm + 1);
        }
        calm
    }

    /// The free block that ends where the hole at `at` starts, if there are such.
    pub(crate) fn free_below(&self, lane: Lane, at: Addr) -> Option<BlockIdx> {
        let hole = self.lanes[lane.index()].unmapped.get(&at)?;
        self.blocks.free_neighbour(self.blocks[*hole].prev)
    }

    /// The free blocks right below and right above a hole.
    pub(crate) fn free_around(&self, hole: BlockIdx) -> [Option<BlockIdx>; 2] {
        let hole = &self.blocks[hole];
        [self.blocks.free_neighbour(hole.prev), self.blocks.free_neighbour(hole.next)]
    }

    /// Makes `run`, inside the free block `id`, a hole: its memory goes elsewhere. Returns the hole with
    /// those that it joined.
    pub(crate) fn close(
        &mut self,
        id: BlockIdx,
        run: &PageRun,
        ledger: &mut Ledger<'_>,
    ) -> BlockIdx {
        self.remove_free(id);
        self.commit_unmap(id, run, ledger)
    }

    /// Makes `run`, inside a hole, backed. It joins `held`, the block in hand right below it, if any,
    /// and a free block above. Returns the joined block, `Held`.
    ///
    /// Memory takes along when it was last in use: by that others tell what work may still use.
    pub(crate) fn open(
        &mut self,
        run: &PageRun,
        used: LastUse,
        held: Option<BlockIdx>,
        ledger: &mut Ledger<'_>,
    ) -> BlockIdx {
        let lane = self.segments[run.segment].lane.index();
        let holes = &self.lanes[lane].unmapped;
        let (addr, hole) =
            holes.range(..=run.addr).next_back().expect("E3: the run lies in a hole");
        let (addr, mut hole) = (*addr, *hole);
        if addr < run.addr {
            hole = self.split(hole, run.addr - addr);
            self.blocks[hole].state = BlockState::Unmapped;
            self.lanes[lane].unmapped.insert(run.addr, hole);
        }
        match used {
            LastUse::Now => {
                // After every event that was recorded so far.
                self.clock = self.clock.wrapping_add(1);
                self.blocks[hole].freed_at = self.clock;
            }
            LastUse::Ago(frees) => self.blocks[hole].freed_at = self.clock.wrapping_sub(frees),
            LastUse::Done => {}
        }
        self.commit_map(hole, run, held, ledger)
    }

    /// [`open`](Self::open), and what is joined becomes free. Returns it.
    pub(crate) fn open_free(
        &mut self,
        run: &PageRun,
        used: LastUse,
        ledger: &mut Ledger<'_>,
    ) -> BlockIdx {
        let held = self.open(run, used, None, ledger);
        self.merge_and_insert(held).0
    }
}

#[cfg(test)]
mod tests {
    use super::super::PoolShared;
    use super::*;
    use crate::config::{Policy, Rules, Settings};
    use crate::stats::StatTable;
    use crate::units::{DeviceId, PoolId, StreamId};
    use std::sync::Arc;

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_comes_as_young_as_it_was() {
        let rules = Rules::new(Policy::Ours, &Settings::default(), false, true);
        let pool = Arc::new(PoolShared::new(PoolId::DEFAULT, false));
        let mut heap = Heap::new(DeviceId::new(0), StreamId::new(0), pool, rules);
        let mut stats = StatTable::default();
        let ledger = &mut Ledger { stats: &mut stats, trace: None };
        let base = Addr::new(1 << 30);
        let segment = heap.segments.next_id();
        heap.adopt_reservation(segment, base, 64 * MIB, Lane::Large, 2 * MIB);
        heap.clock = 100;
        let mut open = |at: u64, used: LastUse| {
            let run =
                PageRun { segment, addr: base + at * MIB, bytes: 2 * MIB, page_bytes: 2 * MIB };
            let before = heap.clock;
            let block = heap.open_free(&run, used, ledger);
            let freed_at = heap.blocks[block].freed_at;
            // An event that is recorded now is later than this, one recorded before is not.
            (freed_at <= before, heap.clock - freed_at)
        };
        assert_eq!(open(0, LastUse::Ago(30)), (true, 30));
        assert_eq!(open(2, LastUse::Ago(40)), (true, 30), "the younger of two that merge");
        assert_eq!(open(8, LastUse::Now), (false, 0));
        let uses = [LastUse::Done, LastUse::Ago(2), LastUse::Now, LastUse::Ago(1)];
        assert_eq!(uses.into_iter().min(), Some(LastUse::Now));
        assert_eq!(uses[..2].iter().min(), Some(&LastUse::Ago(2)));
    }
}
