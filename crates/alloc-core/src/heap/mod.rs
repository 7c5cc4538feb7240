//! The bookkeeping of one heap: all memory of one pool that belongs to one stream.
//!
//! Nothing here knows a backend, takes a lock or calls out; every function runs under the lock of
//! its heap and finishes in bounded time. Memory moves between four states: `Unmapped` → `Free` →
//! `Live` → (`Draining` →) `Free`.

mod expandable;
mod moving;
mod restore;
mod segment;

pub(crate) use expandable::PageRun;
pub(crate) use restore::{LiveMark, Obstacle, Restoration};
pub(crate) use segment::{SegmentId, SegmentInfo, SegmentKind, SegmentTable};

use crate::block::{Block, BlockIdx, BlockSlab, BlockState};
use crate::config::Rules;
use crate::free_index::{FreeIndex, FreeKey};
use crate::size_class::{BLOCK_BYTES_MIN, SMALL_BYTES_MAX, SizeClass};
use crate::stats::{Gauge, StatTable};
use crate::trace::{TraceAction, TraceBuffer, TraceEntry};
use crate::units::{Addr, DeviceId, PoolId, StreamId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
    pub(crate) trace: &'a mut TraceBuffer,
}

/// The free blocks and holes of one size class.
#[derive(Debug, Default)]
pub(crate) struct ClassIndex {
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
}

/// The bookkeeping of one heap.
#[derive(Debug)]
pub(crate) struct Heap {
    pub(crate) device: DeviceId,
    pub(crate) stream: StreamId,
    pub(crate) pool: Arc<PoolShared>,
    pub(crate) rules: Rules,
    pub(crate) blocks: BlockSlab,
    pub(crate) classes: [ClassIndex; 2],
    pub(crate) segments: SegmentTable,
    /// Frees so far, wrapping: how long ago memory became free is told by it.
    pub(crate) clock: u32,
    /// The clock at the latest growth of the large class, and how many growths in a row saw it like
    /// that.
    grown: (u32, u32),
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
            classes: Default::default(),
            segments: SegmentTable::default(),
            clock: 0,
            grown: (0, 0),
        }
    }

    /// Best fit for `request`, taken out of the free index and `Held` (spec §2.6).
    #[inline]
    pub(crate) fn take_best_fit(&mut self, request: &Request) -> Option<BlockIdx> {
        if self.rules.counts_searches {
            self.pool.count_search(request.class);
        }
        let (key, id) = self.candidate(request)?;
        if self.refuses_oversize(&self.blocks[id], request) {
            return None;
        }
        self.classes[request.class.index()].free.remove(key);
        self.blocks[id].state = BlockState::Held;
        Some(id)
    }

    #[inline]
    fn candidate(&self, request: &Request) -> Option<(FreeKey, BlockIdx)> {
        let free = &self.classes[request.class.index()].free;
        let mut found = free.best_fit(request.rounded)?;
        if !request.expandable {
            while self.blocks[found.1].expandable {
                found = free.after(found.0)?;
            }
            return Some(found);
        }
        // Prefer the block with the least room to grow behind it; the walk is PyTorch's.
        while self.blocks[found.1].expandable {
            match free.after(found.0) {
                Some(next) if self.growable_bytes(next.1) < self.growable_bytes(found.1) => {
                    found = next;
                }
                _ => break,
            }
        }
        Some(found)
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
    fn should_split(&self, block: &Block, request: &Request) -> bool {
        if self.pool.no_split {
            return false;
        }
        let rest = block.bytes - request.rounded;
        if request.class == SizeClass::Small || request.expandable {
            return rest >= BLOCK_BYTES_MIN;
        }
        let splittable = self.rules.max_split_bytes.is_none_or(|max| request.rounded < max);
        splittable && rest > SMALL_BYTES_MAX
    }

    /// Makes a `Held` block that is large enough `Live`, giving back what is over (spec §2.14).
    #[inline]
    pub(crate) fn hand_out(&mut self, id: BlockIdx, request: &Request, ledger: &mut Ledger<'_>) {
        let block = &self.blocks[id];
        let class = request.class;
        let was_split = block.is_split();
        let counts_split = !block.expandable;
        if self.should_split(block, request) {
            let rest = self.split(id, request.rounded);
            let rest_bytes = self.blocks[rest].bytes;
            self.insert_free(rest);
            if counts_split && was_split {
                ledger.stats.decrease(Gauge::InactiveSplitBytes, class, request.rounded);
            } else if counts_split {
                ledger.stats.increase(Gauge::InactiveSplitBytes, class, rest_bytes);
                ledger.stats.increase(Gauge::InactiveSplit, class, 1);
            }
        } else if counts_split && was_split {
            ledger.stats.decrease(Gauge::InactiveSplitBytes, class, block.bytes);
            ledger.stats.decrease(Gauge::InactiveSplit, class, 1);
        }
        let block = &mut self.blocks[id];
        block.state = BlockState::Live;
        block.requested = request.requested;
        let (addr, bytes, segment) = (block.addr, block.bytes, block.segment);
        self.segments[segment].add_live(addr, id);
        ledger.stats.increase(Gauge::Allocation, class, 1);
        ledger.stats.increase(Gauge::AllocatedBytes, class, bytes);
        ledger.stats.increase(Gauge::Active, class, 1);
        ledger.stats.increase(Gauge::ActiveBytes, class, bytes);
        ledger.stats.increase(Gauge::RequestedBytes, class, request.requested);
        if self.rules.is_oversize(bytes) {
            ledger.stats.oversize_allocations.increase(1);
        }
        self.trace(ledger, TraceAction::Alloc, addr, request.requested);
    }

    /// Cuts a block after its first `bytes`; it keeps those. Returns the rest, which is `Held`.
    #[inline]
    fn split(&mut self, id: BlockIdx, bytes: u64) -> BlockIdx {
        let block = &self.blocks[id];
        let (addr, rest_bytes) = (block.addr + bytes, block.bytes - bytes);
        let (segment, class, expandable) = (block.segment, block.class, block.expandable);
        let (after, freed_at) = (block.next, block.freed_at);
        let mut rest = Block::new(addr, rest_bytes, BlockState::Held, segment, class, expandable);
        rest.prev = Some(id);
        rest.next = after;
        rest.freed_at = freed_at;
        let rest = self.blocks.insert(rest);
        if let Some(after) = after {
            self.blocks[after].prev = Some(rest);
        }
        let block = &mut self.blocks[id];
        block.bytes = bytes;
        block.next = Some(rest);
        rest
    }

    /// The first half of a free: the client lets go (spec §3.1). The block stays active until
    /// [`finish_free`](Self::finish_free); `pending` events must be reached before that.
    #[inline]
    pub(crate) fn request_free(&mut self, id: BlockIdx, pending: u32, ledger: &mut Ledger<'_>) {
        let block = &mut self.blocks[id];
        debug_assert_eq!(block.state, BlockState::Live);
        block.state = BlockState::Draining { pending };
        let (addr, bytes, requested) = (block.addr, block.bytes, block.requested);
        let (class, segment) = (block.class, block.segment);
        self.segments[segment].remove_live(addr);
        ledger.stats.decrease(Gauge::Allocation, class, 1);
        ledger.stats.decrease(Gauge::AllocatedBytes, class, bytes);
        self.trace(ledger, TraceAction::FreeRequested, addr, requested);
        if self.rules.is_oversize(bytes) {
            ledger.stats.oversize_allocations.decrease(1);
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
        self.finish_free(id, ledger);
        true
    }

    /// The second half of a free: nothing touches the block any more (spec §3.2).
    #[inline]
    pub(crate) fn finish_free(&mut self, id: BlockIdx, ledger: &mut Ledger<'_>) {
        let block = &self.blocks[id];
        let (addr, bytes, requested, class) =
            (block.addr, block.bytes, block.requested, block.class);
        let counts_split = !block.expandable;
        self.clock = self.clock.wrapping_add(1);
        self.blocks[id].freed_at = self.clock;
        self.trace(ledger, TraceAction::FreeCompleted, addr, requested);
        let (merged, absorbed) = self.merge_and_insert(id);
        if counts_split {
            let block = &self.blocks[merged];
            let now = if block.is_split() { (1, block.bytes) } else { (0, 0) };
            adjust(ledger.stats, Gauge::InactiveSplit, class, absorbed.blocks, now.0);
            adjust(ledger.stats, Gauge::InactiveSplitBytes, class, absorbed.bytes, now.1);
        }
        ledger.stats.decrease(Gauge::Active, class, 1);
        ledger.stats.decrease(Gauge::ActiveBytes, class, bytes);
        ledger.stats.decrease(Gauge::RequestedBytes, class, requested);
    }

    /// Merges a block with its free neighbours and puts the result into the free index.
    #[inline]
    fn merge_and_insert(&mut self, id: BlockIdx) -> (BlockIdx, Absorbed) {
        let mut absorbed = Absorbed::default();
        self.blocks[id].state = BlockState::Held;
        let mut merged = id;
        if let Some(prev) = self.free_neighbour(self.blocks[id].prev) {
            absorbed.count(self.blocks[prev].bytes);
            self.remove_free(prev);
            self.join(prev, id);
            merged = prev;
        }
        if let Some(next) = self.free_neighbour(self.blocks[merged].next) {
            absorbed.count(self.blocks[next].bytes);
            self.remove_free(next);
            self.join(merged, next);
        }
        self.insert_free(merged);
        (merged, absorbed)
    }

    #[inline]
    fn free_neighbour(&self, neighbour: Option<BlockIdx>) -> Option<BlockIdx> {
        neighbour.filter(|id| self.blocks[*id].state == BlockState::Free)
    }

    /// Makes `upper`, the block right above `lower`, a part of it.
    #[inline]
    fn join(&mut self, lower: BlockIdx, upper: BlockIdx) {
        let gone = &self.blocks[upper];
        let (addr, bytes, next, freed_at) = (gone.addr, gone.bytes, gone.next, gone.freed_at);
        self.blocks.remove(upper);
        let block = &mut self.blocks[lower];
        debug_assert_eq!(block.end(), addr, "I1: neighbours touch");
        block.bytes += bytes;
        block.next = next;
        if self.clock.wrapping_sub(freed_at) < self.clock.wrapping_sub(block.freed_at) {
            block.freed_at = freed_at;
        }
        if let Some(after) = next {
            self.blocks[after].prev = Some(lower);
        }
    }

    /// `Held` → `Free`.
    #[inline]
    pub(crate) fn insert_free(&mut self, id: BlockIdx) {
        let block = &mut self.blocks[id];
        debug_assert_eq!(block.state, BlockState::Held);
        block.state = BlockState::Free;
        block.free_since = self.pool.searches(block.class);
        self.classes[block.class.index()].free.insert(block.key(), id);
    }

    /// `Free` → `Held`.
    #[inline]
    pub(crate) fn remove_free(&mut self, id: BlockIdx) {
        let block = &mut self.blocks[id];
        debug_assert_eq!(block.state, BlockState::Free);
        block.state = BlockState::Held;
        self.classes[block.class.index()].free.remove(block.key());
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

    /// A new segment obtained whole; its one block is `Held` (spec §2.8).
    pub(crate) fn adopt_whole(
        &mut self,
        id: SegmentId,
        base: Addr,
        bytes: u64,
        class: SizeClass,
        ledger: &mut Ledger<'_>,
    ) -> BlockIdx {
        let block = self.adopt(id, base, bytes, class, SegmentKind::Whole, BlockState::Held);
        self.segments[id].prepare(bytes);
        ledger.stats.increase(Gauge::Segment, class, 1);
        ledger.stats.increase(Gauge::ReservedBytes, class, bytes);
        if self.rules.is_oversize(bytes) {
            ledger.stats.oversize_segments.increase(1);
        }
        self.trace(ledger, TraceAction::SegmentAlloc, base, bytes);
        block
    }

    fn adopt(
        &mut self,
        id: SegmentId,
        base: Addr,
        bytes: u64,
        class: SizeClass,
        kind: SegmentKind,
        state: BlockState,
    ) -> BlockIdx {
        let expandable = kind != SegmentKind::Whole;
        let block = Block::new(base, bytes, state, id, class, expandable);
        let block = self.blocks.insert(block);
        self.segments.insert(id, SegmentInfo::new(base, bytes, class, kind, block));
        block
    }

    /// Forgets a segment obtained whole that was given back; its one block is `Held`.
    pub(crate) fn forget_whole(&mut self, id: BlockIdx, ledger: &mut Ledger<'_>) {
        debug_assert_eq!(self.blocks[id].state, BlockState::Held);
        let segment = self.segments.remove(self.blocks[id].segment);
        self.blocks.remove(id);
        let (class, bytes) = (segment.class, segment.bytes);
        self.trace(ledger, TraceAction::SegmentFree, segment.base, bytes);
        ledger.stats.decrease(Gauge::Segment, class, 1);
        ledger.stats.decrease(Gauge::ReservedBytes, class, bytes);
        if self.rules.is_oversize(bytes) {
            ledger.stats.oversize_segments.decrease(1);
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
        ledger.trace.push(|| TraceEntry {
            action,
            device: self.device,
            addr,
            bytes,
            stream: self.stream,
            pool: self.pool.id,
        });
    }
}

/// Free neighbours that a block swallowed.
#[derive(Debug, Default)]
struct Absorbed {
    blocks: u64,
    bytes: u64,
}

impl Absorbed {
    fn count(&mut self, bytes: u64) {
        self.blocks += 1;
        self.bytes += bytes;
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
