//! Expandable segments: address space that is backed and unbacked in runs of whole pages
//! (spec §4).
//!
//! Holes change only under the growth lock of the device, so a plan made here stays valid while the
//! backend maps or unmaps; mapped blocks in a plan are `Held`.

use super::{Heap, Ledger, SegmentId, SegmentKind};
use crate::block::{Block, BlockIdx, BlockState};
use crate::lane::Lane;
use crate::stats::Gauge;
use crate::trace::TraceAction;
use crate::units::Addr;

/// A run of whole pages that is to be mapped or unmapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PageRun {
    pub(crate) segment: SegmentId,
    pub(crate) addr: Addr,
    pub(crate) bytes: u64,
    pub(crate) page_bytes: u64,
}

impl Heap {
    /// A new reservation: one hole.
    pub(crate) fn adopt_reservation(
        &mut self,
        id: SegmentId,
        base: Addr,
        bytes: u64,
        lane: Lane,
        page_bytes: u64,
    ) -> BlockIdx {
        let kind = SegmentKind::Expandable { page_bytes };
        let hole = self.adopt(id, base, bytes, lane, kind, BlockState::Unmapped);
        self.lanes[lane.index()].unmapped.insert(base, hole);
        hole
    }

    /// The lowest hole that, together with free memory around it, has room for `bytes`; or the free
    /// block right below it, where that counts too (spec §4.4).
    pub(crate) fn find_growable(&self, lane: Lane, bytes: u64) -> Option<BlockIdx> {
        self.lanes[lane.index()].unmapped.values().find_map(|hole| {
            let start = self.blocks[*hole].prev.filter(|prev| self.is_growable(*prev));
            let start = start.unwrap_or(*hole);
            (self.growable_run(start) >= bytes).then_some(start)
        })
    }

    fn is_growable(&self, id: BlockIdx) -> bool {
        matches!(self.blocks[id].state, BlockState::Free | BlockState::Unmapped)
    }

    /// Bytes from `start` on that are free or unmapped without a gap.
    fn growable_run(&self, start: BlockIdx) -> u64 {
        let mut bytes = 0;
        let mut cursor = Some(start);
        while let Some(id) = cursor.filter(|id| self.is_growable(*id)) {
            bytes += self.blocks[id].bytes;
            cursor = self.blocks[id].next;
        }
        bytes
    }

    /// The pages to map so that the hole starts with at least `wanted` backed bytes, or all of it.
    pub(crate) fn plan_map(&self, hole: BlockIdx, wanted: u64) -> PageRun {
        let block = &self.blocks[hole];
        debug_assert_eq!(block.state, BlockState::Unmapped);
        let page_bytes = self.page_bytes(block);
        // A hole is whole pages, so the rounded length stays inside it.
        let bytes = wanted.min(block.bytes).next_multiple_of(page_bytes);
        PageRun { segment: block.segment, addr: block.addr, bytes, page_bytes }
    }

    fn page_bytes(&self, block: &Block) -> u64 {
        match self.segments[block.segment].kind {
            SegmentKind::Expandable { page_bytes } => page_bytes,
            SegmentKind::Whole => unreachable!("holes exist in expandable segments only"),
        }
    }

    /// Books a mapped run at the start of `hole` (spec §4.5). What was mapped joins `held`, the
    /// block in hand right below the hole, and the free block above, if the hole is full now.
    /// Returns the joined block, `Held`.
    pub(crate) fn commit_map(
        &mut self,
        hole: BlockIdx,
        run: &PageRun,
        held: Option<BlockIdx>,
        ledger: &mut Ledger<'_>,
    ) -> BlockIdx {
        let lane = self.blocks[hole].lane;
        self.lanes[lane.index()].unmapped.remove(&run.addr);
        if self.blocks[hole].bytes > run.bytes {
            let rest = self.split(hole, run.bytes);
            self.blocks[rest].state = BlockState::Unmapped;
            let addr = self.blocks[rest].addr;
            self.lanes[lane.index()].unmapped.insert(addr, rest);
        }
        self.blocks[hole].state = BlockState::Held;
        let end = run.addr - self.segments[run.segment].base + run.bytes;
        self.segments.prepare(run.segment, end);
        ledger.stats.increase(Gauge::ReservedBytes, lane.class(), run.bytes);
        self.trace(ledger, TraceAction::SegmentMap, run.addr, run.bytes);
        let mut joined = hole;
        if let Some(held) = held {
            self.blocks.join(held, hole, self.clock);
            joined = held;
        }
        if let Some(next) = self.blocks.free_neighbour(self.blocks[joined].next) {
            self.remove_free(next);
            self.blocks.join(joined, next, self.clock);
        }
        joined
    }

    /// Puts a block back that growth took or made but could not finish.
    pub(crate) fn abandon_growth(&mut self, held: BlockIdx) {
        self.merge_and_insert(held);
    }

    /// The whole pages inside a free block of an expandable segment, or `None` if there are none.
    pub(crate) fn plan_unmap(&self, id: BlockIdx) -> Option<PageRun> {
        let block = &self.blocks[id];
        let page_bytes = self.page_bytes(block);
        let base = self.segments[block.segment].base;
        let first = (block.addr - base).next_multiple_of(page_bytes);
        let end = (block.end() - base) / page_bytes * page_bytes;
        (first < end).then(|| PageRun {
            segment: block.segment,
            addr: base + first,
            bytes: end - first,
            page_bytes,
        })
    }

    /// Books an unmapped run inside `id`, a `Held` block: what is left below and above becomes free,
    /// the hole joins the holes around it (spec §4.7). Returns the hole.
    pub(crate) fn commit_unmap(
        &mut self,
        id: BlockIdx,
        run: &PageRun,
        ledger: &mut Ledger<'_>,
    ) -> BlockIdx {
        let class = self.blocks[id].lane.class();
        ledger.stats.decrease(Gauge::ReservedBytes, class, run.bytes);
        self.trace(ledger, TraceAction::SegmentUnmap, run.addr, run.bytes);
        let mut middle = id;
        if self.blocks[id].addr < run.addr {
            middle = self.split(id, run.addr - self.blocks[id].addr);
            // Neighbours may have become free while the block was held.
            self.merge_and_insert(id);
        }
        if self.blocks[middle].bytes > run.bytes {
            let tail = self.split(middle, run.bytes);
            self.merge_and_insert(tail);
        }
        self.join_holes(middle)
    }

    /// `Held` → `Unmapped`, joined with the holes around it.
    fn join_holes(&mut self, id: BlockIdx) -> BlockIdx {
        let lane = self.blocks[id].lane.index();
        self.blocks[id].state = BlockState::Unmapped;
        let mut joined = id;
        if let Some(prev) = self.hole_neighbour(self.blocks[id].prev) {
            self.blocks.join(prev, id, self.clock);
            joined = prev;
        } else {
            self.lanes[lane].unmapped.insert(self.blocks[id].addr, id);
        }
        if let Some(next) = self.hole_neighbour(self.blocks[joined].next) {
            self.lanes[lane].unmapped.remove(&self.blocks[next].addr);
            self.blocks.join(joined, next, self.clock);
        }
        joined
    }

    fn hole_neighbour(&self, neighbour: Option<BlockIdx>) -> Option<BlockIdx> {
        neighbour.filter(|id| self.blocks[*id].state == BlockState::Unmapped)
    }

    /// Forgets a reservation that is one hole. The caller gives the address space back.
    pub(crate) fn forget_reservation(&mut self, hole: BlockIdx) {
        let block = &self.blocks[hole];
        debug_assert!(!block.is_split() && block.state == BlockState::Unmapped);
        self.lanes[block.lane.index()].unmapped.remove(&block.addr);
        self.segments.remove(block.segment);
        self.blocks.remove(hole);
    }
}
