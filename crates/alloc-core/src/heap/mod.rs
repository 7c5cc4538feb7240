//! The bookkeeping of one heap: all memory of one pool that belongs to one stream.
//!
//! Nothing here knows a backend, takes a lock or calls out; every function runs under the lock of
//! its heap and finishes in bounded time. Memory moves between four states: `Unmapped` → `Free` →
//! `Live` → (`Draining` →) `Free`.

mod cut;
mod expandable;
mod lives;
mod moving;
mod ready;
mod recent;
mod restore;
mod segment;
mod variety;

pub(crate) use expandable::PageRun;
use lives::Lives;
pub(crate) use moving::LastUse;
use recent::Recent;
pub(crate) use recent::WaitingList;
pub(crate) use restore::{LiveMark, Obstacle, Restoration};
pub(crate) use segment::{SegmentId, SegmentInfo, SegmentKind, SegmentTable};

use crate::block::{Block, BlockId, BlockIdx, BlockSlab, BlockState};
use crate::config::Rules;
use crate::free_index::{Found, FreeIndex};
use crate::lane::Lane;
use crate::size_class::{BLOCK_BYTES_MIN, SMALL_BYTES_MAX, SizeClass};
use crate::stats::{Gauge, StatTable};
use crate::trace::{TraceAction, TraceBuffer, TraceEntry};
use crate::units::{Addr, DeviceId, PoolId, StreamId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use variety::Variety;

/// What all heaps of one pool share.
#[derive(Debug)]
pub(crate) struct PoolShared {
    pub(crate) id: PoolId,
    /// Searches of each class so far: the clock of garbage collection (spec §2.9). Advances only
    /// while a collection threshold is set, so that heaps share no written cache line otherwise.
    searches: [AtomicU64; 2],
    /// Blocks are whole segments (spec §5.3).
    pub(crate) no_split: bool,
}

impl PoolShared {
    pub(crate) const fn new(id: PoolId, no_split: bool) -> Self {
        PoolShared { id, searches: [AtomicU64::new(0), AtomicU64::new(0)], no_split }
    }

    pub(crate) fn searches(&self, class: SizeClass) -> u64 {
        self.searches[class.index()].load(Ordering::Relaxed)
    }

    pub(crate) fn count_search(&self, class: SizeClass) {
        self.searches[class.index()].fetch_add(1, Ordering::Relaxed);
    }
}

/// Where an operation writes its statistics and trace.
pub(crate) struct Ledger<'a> {
    pub(crate) stats: &'a mut StatTable,
    /// `None` where nobody listens.
    pub(crate) trace: Option<&'a mut TraceBuffer>,
}

/// The free blocks and holes of one lane.
#[derive(Debug, Default)]
pub(crate) struct LaneIndex {
    pub(crate) free: FreeIndex,
    /// Unmapped blocks of expandable segments, by address.
    pub(crate) unmapped: BTreeMap<Addr, BlockIdx>,
}

/// One request on its way through the allocator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    /// What the client asked for, in bytes.
    pub(crate) requested: u64,
    /// What it will get at least: `requested` rounded.
    pub(crate) rounded: u64,
    pub(crate) class: SizeClass,
    /// Whether the request may use and grow expandable segments.
    pub(crate) expandable: bool,
    /// Where blocks of its size wait.
    pub(crate) list: WaitingList,
}

/// A block that was just handed out, as its caller learns of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LiveBlock {
    pub(crate) id: BlockId,
    pub(crate) addr: Addr,
    pub(crate) bytes: u64,
}

/// The bookkeeping of one heap.
#[derive(Debug)]
pub(crate) struct Heap {
    pub(crate) device: DeviceId,
    pub(crate) stream: StreamId,
    pub(crate) pool: Arc<PoolShared>,
    pub(crate) rules: Rules,
    pub(crate) blocks: BlockSlab,
    pub(crate) lanes: [LaneIndex; Lane::COUNT],
    pub(crate) segments: SegmentTable,
    /// Frees so far, wrapping: how long ago memory became free is told by it.
    pub(crate) clock: u32,
    /// The clock at the latest growth of the large class, and how many growths in a row saw it like
    /// that.
    grown: (u32, u32),
    recent: Recent,
    /// Of the large class in expandable segments, with policy `ours`.
    lives: Lives,
    variety: Variety,
}

impl Heap {
    pub(crate) fn new(
        device: DeviceId,
        stream: StreamId,
        pool: Arc<PoolShared>,
        rules: Rules,
    ) -> Self {
        Heap {
            device,
            stream,
            pool,
            rules,
            blocks: BlockSlab::default(),
            lanes: Default::default(),
            segments: SegmentTable::default(),
            clock: 0,
            grown: (0, 0),
            recent: Recent::default(),
            lives: Lives::default(),
            variety: Variety::default(),
        }
    }

    /// Serves `request` with the best fit, if one is cached (spec §2.6).
    #[inline]
    pub(crate) fn serve(&mut self, request: &Request, ledger: &mut Ledger<'_>) -> Option<BlockIdx> {
        if self.rules.counts_searches {
            self.pool.count_search(request.class);
        }
        self.serve_again(request, ledger)
    }

    /// [`serve`](Self::serve) for a request whose search was counted before.
    #[inline]
    pub(crate) fn serve_again(
        &mut self,
        request: &Request,
        ledger: &mut Ledger<'_>,
    ) -> Option<BlockIdx> {
        let found = self.candidate(request)?;
        let free = found.block;
        let block = &self.blocks[free];
        if self.refuses_oversize(block, request) {
            return None;
        }
        let (is_cut, lane) = (self.should_split(found.key.bytes, request), block.lane.index());
        self.note_piece(free, is_cut, request, ledger);
        if is_cut {
            self.carve(&found, request.rounded);
        } else {
            self.lanes[lane].free.take(&found);
        }
        self.first_live(free, request, ledger);
        Some(free)
    }

    /// Makes a `Held` block that is large enough `Live`, giving back what is over (spec §2.14).
    pub(crate) fn hand_out(&mut self, id: BlockIdx, request: &Request, ledger: &mut Ledger<'_>) {
        let is_cut = self.should_split(self.blocks[id].bytes, request);
        self.note_piece(id, is_cut, request, ledger);
        if is_cut {
            let rest = self.split(id, request.rounded);
            // What lies above may have become free while the block was in hand.
            self.merge_and_insert(rest);
        }
        self.first_live(id, request, ledger);
    }

    /// [`make_live`](Self::make_live) of a block that did not wait: none that waits is oversize.
    #[inline(always)]
    fn first_live(&mut self, id: BlockIdx, request: &Request, ledger: &mut Ledger<'_>) {
        self.begin_life(id);
        let block = &mut self.blocks[id];
        block.list = request.list_of(block);
        if self.rules.is_oversize(block.bytes) {
            ledger.stats.count_oversize_allocation(true);
        }
        self.make_live(id, request, ledger);
    }

    #[inline(always)]
    fn make_live(&mut self, id: BlockIdx, request: &Request, ledger: &mut Ledger<'_>) -> LiveBlock {
        let block = &mut self.blocks[id];
        block.state = BlockState::Live;
        block.requested = request.requested;
        let (addr, bytes, segment) = (block.addr, block.bytes, block.segment);
        let live = LiveBlock { id: block.id(id), addr, bytes };
        if self.segments.are_searched() {
            self.segments[segment].note_live(addr, id);
        }
        ledger.stats.hand_out(request.class, bytes, request.requested);
        self.trace(ledger, TraceAction::Alloc, addr, request.requested);
        live
    }

    /// A block that is handed out.
    pub(crate) fn live_block(&self, id: BlockIdx) -> LiveBlock {
        let block = &self.blocks[id];
        LiveBlock { id: block.id(id), addr: block.addr, bytes: block.bytes }
    }

    #[inline]
    fn candidate(&self, request: &Request) -> Option<Found> {
        if self.rules.plain_fit {
            return self.plain_fit(request);
        }
        let free = &self.lanes[Lane::from(request.class).index()].free;
        let mut found = free.best_fit(request.rounded)?;
        if !request.expandable {
            while self.blocks[found.block].expandable {
                found = free.after(found.key)?;
            }
            return Some(found);
        }
        // Prefer the block with the least room to grow behind it; the walk is PyTorch's.
        while self.blocks[found.block].expandable {
            let room = self.growable_bytes(found.block);
            match free.after(found.key) {
                Some(next) if self.growable_bytes(next.block) < room => {
                    found = next;
                }
                _ => break,
            }
        }
        Some(found)
    }

    /// The smallest block that suffices: of the lane where the request belongs, else of the other one of
    /// its class. To leave that to its own would take a move where there is room, and with it more
    /// time and, as it turned out, more memory.
    #[inline]
    fn plain_fit(&self, request: &Request) -> Option<Found> {
        let fit = |lane: Lane| self.lanes[lane.index()].free.best_fit(request.rounded);
        let lane = self.lane_for(request.class, request.rounded);
        fit(lane).or_else(|| fit(lane.other()?))
    }

    /// The bytes of a free block and of the hole behind it.
    fn growable_bytes(&self, id: BlockIdx) -> u64 {
        let block = &self.blocks[id];
        let hole = block.next.map(|next| &self.blocks[next]);
        let hole = hole.filter(|next| next.state == BlockState::Unmapped);
        block.bytes + hole.map_or(0, |next| next.bytes)
    }

    /// The rules that keep oversize blocks whole (spec §2.6, rule 4).
    #[inline]
    fn refuses_oversize(&self, block: &Block, request: &Request) -> bool {
        let Some(max_split) = self.rules.max_split_bytes else { return false };
        let expandable = block.expandable;
        if expandable && !self.rules.oversize_covers_expandable {
            return false;
        }
        if request.rounded < max_split {
            return block.bytes >= max_split;
        }
        !expandable && block.bytes >= request.rounded + self.rules.max_non_split_rounding_bytes
    }

    #[inline]
    fn should_split(&self, bytes: u64, request: &Request) -> bool {
        // The class changes from request to request, so it decides without a branch.
        let fine = (request.class == SizeClass::Small) | request.expandable;
        let splittable = self.rules.max_split_bytes.is_none_or(|max| request.rounded < max);
        let rest_min = if fine { BLOCK_BYTES_MIN } else { SMALL_BYTES_MAX + 1 };
        let rest = bytes - request.rounded;
        !self.pool.no_split & (fine | splittable) & (rest >= rest_min)
    }

    /// A request takes the beginning of a free block, or all of it. Blocks of expandable segments do not
    /// count as split.
    #[inline]
    fn note_piece(&self, id: BlockIdx, is_cut: bool, request: &Request, ledger: &mut Ledger<'_>) {
        let block = &self.blocks[id];
        if block.expandable {
            return;
        }
        let (stats, class) = (&mut *ledger.stats, request.class);
        let (was_split, bytes) = (block.is_split(), block.bytes);
        match (is_cut, was_split) {
            (true, true) => stats.decrease(Gauge::InactiveSplitBytes, class, request.rounded),
            (true, false) => {
                stats.increase(Gauge::InactiveSplitBytes, class, bytes - request.rounded);
                stats.increase(Gauge::InactiveSplit, class, 1);
            }
            (false, true) => {
                stats.decrease(Gauge::InactiveSplitBytes, class, bytes);
                stats.decrease(Gauge::InactiveSplit, class, 1);
            }
            (false, false) => {}
        }
    }

    /// A free that waits for nothing: the client lets go (spec §3.1) and the block can be used again
    /// (spec §3.2).
    #[inline(always)]
    pub(crate) fn free(&mut self, id: BlockIdx, ledger: &mut Ledger<'_>) {
        let block = &self.blocks[id];
        debug_assert_eq!(block.state, BlockState::Live);
        let (addr, bytes, requested) = (block.addr, block.bytes, block.requested);
        ledger.stats.give_back(block.lane.class(), bytes, requested);
        self.trace(ledger, TraceAction::FreeRequested, addr, requested);
        if self.rules.is_oversize(bytes) {
            ledger.stats.count_oversize_allocation(false);
        }
        self.trace(ledger, TraceAction::FreeCompleted, addr, requested);
        self.become_free(id, ledger);
    }

    /// The first half of a free that waits for `pending` events: the client lets go. The block stays
    /// active until they are reached.
    pub(crate) fn request_free(&mut self, id: BlockIdx, pending: u32, ledger: &mut Ledger<'_>) {
        let block = &mut self.blocks[id];
        debug_assert_eq!(block.state, BlockState::Live);
        block.state = BlockState::Draining { pending };
        let (addr, bytes, requested, class) =
            (block.addr, block.bytes, block.requested, block.lane.class());
        ledger.stats.let_go(class, bytes);
        self.trace(ledger, TraceAction::FreeRequested, addr, requested);
        if self.rules.is_oversize(bytes) {
            ledger.stats.count_oversize_allocation(false);
        }
    }

    /// A draining block waits for so many more events.
    pub(crate) fn await_more(&mut self, id: BlockIdx, events: u32) {
        let block = &mut self.blocks[id];
        let BlockState::Draining { pending } = block.state else {
            unreachable!("I5: a block that waits is draining")
        };
        block.state = BlockState::Draining { pending: pending + events };
    }

    /// One event of a draining block is reached. Returns whether it was the last, in which case the
    /// block is free now.
    pub(crate) fn event_reached(&mut self, id: BlockIdx, ledger: &mut Ledger<'_>) -> bool {
        let block = &mut self.blocks[id];
        let BlockState::Draining { pending } = block.state else {
            unreachable!("I5: a block in an event queue is draining")
        };
        block.state = BlockState::Draining { pending: pending - 1 };
        if pending > 1 {
            return false;
        }
        let (addr, bytes, requested, class) =
            (block.addr, block.bytes, block.requested, block.lane.class());
        self.trace(ledger, TraceAction::FreeCompleted, addr, requested);
        ledger.stats.drained(class, bytes, requested);
        self.become_free(id, ledger);
        true
    }

    /// Nothing touches the block any more, and nobody names it: the next request may get it as it is.
    #[inline(always)]
    fn become_free(&mut self, id: BlockIdx, ledger: &mut Ledger<'_>) {
        self.clock = self.clock.wrapping_add(1);
        self.blocks.renew(id);
        let block = &mut self.blocks[id];
        block.freed_at = self.clock;
        if block.list == WaitingList::NONE {
            self.merge_freed(id, ledger);
        } else {
            self.put_off(id);
        }
    }

    /// Puts a freed block into the free index.
    #[inline(never)]
    fn merge_freed(&mut self, id: BlockIdx, ledger: &mut Ledger<'_>) {
        self.forget_merged();
        self.end_life(id);
        let block = &self.blocks[id];
        let (class, counts_split) = (block.lane.class(), !block.expandable);
        let (merged, absorbed) = self.merge_and_insert(id);
        if counts_split {
            let block = &self.blocks[merged];
            let now = if block.is_split() { (1, block.bytes) } else { (0, 0) };
            adjust(ledger.stats, Gauge::InactiveSplit, class, absorbed.blocks, now.0);
            adjust(ledger.stats, Gauge::InactiveSplitBytes, class, absorbed.bytes, now.1);
        }
    }

    /// A new segment obtained whole; its one block is `Held` (spec §2.8).
    pub(crate) fn adopt_whole(
        &mut self,
        id: SegmentId,
        base: Addr,
        bytes: u64,
        class: SizeClass,
        ledger: &mut Ledger<'_>,
    ) -> BlockIdx {
        let block = self.adopt(id, base, bytes, class.into(), SegmentKind::Whole, BlockState::Held);
        self.segments.prepare(id, bytes);
        ledger.stats.increase(Gauge::Segment, class, 1);
        ledger.stats.increase(Gauge::ReservedBytes, class, bytes);
        if self.rules.is_oversize(bytes) {
            ledger.stats.count_oversize_segment(true);
        }
        self.trace(ledger, TraceAction::SegmentAlloc, base, bytes);
        block
    }

    fn adopt(
        &mut self,
        id: SegmentId,
        base: Addr,
        bytes: u64,
        lane: Lane,
        kind: SegmentKind,
        state: BlockState,
    ) -> BlockIdx {
        let expandable = kind != SegmentKind::Whole;
        let block = Block::new(base, bytes, state, id, lane, expandable);
        let block = self.blocks.insert(block);
        self.segments.insert(id, SegmentInfo::new(base, bytes, lane, kind, block));
        block
    }

    /// Forgets a segment obtained whole that was given back; its one block is `Held`.
    pub(crate) fn forget_whole(&mut self, id: BlockIdx, ledger: &mut Ledger<'_>) {
        debug_assert_eq!(self.blocks[id].state, BlockState::Held);
        let segment = self.segments.remove(self.blocks[id].segment);
        self.blocks.remove(id);
        let (class, bytes) = (segment.lane.class(), segment.bytes);
        self.trace(ledger, TraceAction::SegmentFree, segment.base, bytes);
        ledger.stats.decrease(Gauge::Segment, class, 1);
        ledger.stats.decrease(Gauge::ReservedBytes, class, bytes);
        if self.rules.is_oversize(bytes) {
            ledger.stats.count_oversize_segment(false);
        }
    }

    #[inline]
    pub(crate) fn trace(
        &self,
        ledger: &mut Ledger<'_>,
        action: TraceAction,
        addr: Addr,
        bytes: u64,
    ) {
        if let Some(trace) = &mut ledger.trace {
            trace.push(|| TraceEntry {
                action,
                device: self.device,
                addr,
                bytes,
                stream: self.stream,
                pool: self.pool.id,
            });
        }
    }
}

/// Books the net change from `before` to `after` as one step: the merges and the insertion of one
/// free do not show separately in peaks and sums (spec §3.2).
#[inline]
fn adjust(stats: &mut StatTable, gauge: Gauge, class: SizeClass, before: u64, after: u64) {
    if after > before {
        stats.increase(gauge, class, after - before);
    } else if before > after {
        stats.decrease(gauge, class, before - after);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Policy, Settings};
    use crate::free_index::FreeKey;

    const MIB: u64 = 1 << 20;

    /// Growth holds a block across calls of the backend, and across locks.
    #[test]
    fn what_is_left_of_a_block_in_hand_merges_with_what_became_free_meanwhile() {
        let rules = Rules::new(Policy::Pytorch, &Settings::default(), false, true);
        let pool = Arc::new(PoolShared::new(PoolId::DEFAULT, false));
        let mut heap = Heap::new(DeviceId::new(0), StreamId::new(0), pool, rules);
        let mut stats = StatTable::default();
        let ledger = &mut Ledger { stats: &mut stats, trace: None };
        let base = Addr::new(1 << 30);
        let segment = heap.segments.next_id();
        let hole = heap.adopt_reservation(segment, base, 64 * MIB, Lane::Large, 2 * MIB);
        let run = heap.plan_map(hole, 20 * MIB);
        let held = heap.commit_map(hole, &run, None, ledger);
        heap.hand_out(held, &heap.rules.request(6 * MIB), ledger);
        let above = heap.serve(&heap.rules.request(4 * MIB), ledger).expect("10 MiB are left");
        heap.free(held, ledger);
        heap.remove_free(held);
        heap.free(above, ledger);
        heap.hand_out(held, &heap.rules.request(2 * MIB), ledger);
        let free: Vec<_> = heap.lanes[Lane::Large.index()].free.iter().collect();
        let [(key, _)] = free[..] else { panic!("not merged: {free:?}") };
        assert_eq!(key, FreeKey { bytes: 18 * MIB, addr: base + 2 * MIB });
    }
}
