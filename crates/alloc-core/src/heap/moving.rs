//! Memory that changes place: parts of free blocks become holes, parts of holes become free blocks.

use super::{Heap, Ledger, PageRun, SegmentId};
use crate::block::{BlockIdx, BlockState};
use crate::size_class::SizeClass;
use crate::units::Addr;

/// A stretch of free memory next to a hole that it can grow into.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HoleSpan {
    pub(crate) segment: SegmentId,
    pub(crate) base: Addr,
    pub(crate) addr: Addr,
    pub(crate) bytes: u64,
    /// The free block right below, with its size.
    pub(crate) below: Option<(BlockIdx, u64)>,
    /// The free block right above, with its size.
    pub(crate) above: Option<(BlockIdx, u64)>,
}

impl Heap {
    /// Every hole of a class, by address.
    pub(crate) fn holes(&self, class: SizeClass) -> Vec<HoleSpan> {
        let sized = |id: BlockIdx| (id, self.blocks[id].bytes);
        let holes = self.classes[class.index()].unmapped.values();
        holes
            .map(|id| {
                let block = &self.blocks[*id];
                HoleSpan {
                    segment: block.segment,
                    base: self.segments[block.segment].base,
                    addr: block.addr,
                    bytes: block.bytes,
                    below: self.free_neighbour(block.prev).map(sized),
                    above: self.free_neighbour(block.next).map(sized),
                }
            })
            .collect()
    }

    /// Makes `run`, inside the free block `id`, a hole: its memory goes elsewhere.
    pub(crate) fn close(&mut self, id: BlockIdx, run: &PageRun, ledger: &mut Ledger<'_>) {
        self.remove_free(id);
        self.commit_unmap(id, run, ledger);
    }

    /// Makes `run`, inside a hole, backed. It joins `held`, the block in hand right below it, if any,
    /// and a free block above. Returns the joined block, `Held`.
    pub(crate) fn open(
        &mut self,
        run: &PageRun,
        held: Option<BlockIdx>,
        ledger: &mut Ledger<'_>,
    ) -> BlockIdx {
        let class = self.segments[run.segment].class;
        let holes = &self.classes[class.index()].unmapped;
        let (addr, hole) =
            holes.range(..=run.addr).next_back().expect("E3: the run lies in a hole");
        let (addr, mut hole) = (*addr, *hole);
        if addr < run.addr {
            hole = self.split(hole, run.addr - addr);
            self.blocks[hole].state = BlockState::Unmapped;
            self.classes[class.index()].unmapped.insert(run.addr, hole);
        }
        self.commit_map(hole, run, held, ledger)
    }

    /// [`open`](Self::open), and what is joined becomes free. Returns it.
    pub(crate) fn open_free(&mut self, run: &PageRun, ledger: &mut Ledger<'_>) -> BlockIdx {
        let held = self.open(run, None, ledger);
        self.merge_and_insert(held).0
    }
}
