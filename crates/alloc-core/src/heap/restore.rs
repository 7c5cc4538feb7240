//! Putting the live blocks of a heap back to where they were at another time.

use super::{Heap, Ledger, Request, SegmentId, WaitingList, adjust};
use crate::block::{BlockIdx, BlockState};
use crate::stats::Gauge;
use crate::units::Addr;
use std::collections::HashMap;

/// A live block as it was. Blocks tile their segments and free neighbours are merged (I1, I3), so
/// the live ones say all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LiveMark {
    /// First address of its segment.
    pub(crate) base: Addr,
    pub(crate) addr: Addr,
    pub(crate) bytes: u64,
    pub(crate) requested: u64,
}

impl LiveMark {
    fn end(&self) -> Addr {
        self.addr + self.bytes
    }
}

/// What has to change so that the live blocks are those of the marks.
#[derive(Debug, Default)]
pub(crate) struct Restoration {
    /// Live now, but not then.
    pub(crate) stale: Vec<BlockIdx>,
    /// Live then, but not now; by address.
    pub(crate) revived: Vec<LiveMark>,
    /// Live then and now.
    pub(crate) kept: Vec<Addr>,
}

/// Why a block cannot be where it was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Obstacle {
    /// Work that was queued for a freed block there may still run.
    Pending(Addr),
    /// There is no memory any more.
    Gone(Addr),
}

impl Heap {
    /// The live blocks, by address.
    pub(crate) fn live_marks(&self) -> Vec<LiveMark> {
        let live = self.blocks.iter().filter(|(_, block)| block.state == BlockState::Live);
        let mark = |block: &crate::block::Block| LiveMark {
            base: self.segments[block.segment].base,
            addr: block.addr,
            bytes: block.bytes,
            requested: block.requested,
        };
        let mut marks: Vec<_> = live.map(|(_, block)| mark(block)).collect();
        marks.sort_unstable_by_key(|mark| mark.addr);
        marks
    }

    /// How to get back to `marks`, which are in order of address.
    pub(crate) fn plan_restore(&self, marks: &[LiveMark]) -> Result<Restoration, Obstacle> {
        let mut plan = Restoration::default();
        for (index, block) in self.blocks.iter().filter(|(_, b)| b.state == BlockState::Live) {
            let then = marks.binary_search_by_key(&block.addr, |mark| mark.addr);
            let then = then.ok().map(|at| &marks[at]);
            let same =
                |mark: &LiveMark| (mark.bytes, mark.requested) == (block.bytes, block.requested);
            if then.is_some_and(same) {
                plan.kept.push(block.addr);
            } else {
                plan.stale.push(index);
            }
        }
        plan.kept.sort_unstable();
        plan.stale.sort_unstable_by_key(|index| self.blocks[*index].addr);
        let revived = marks.iter().filter(|mark| plan.kept.binary_search(&mark.addr).is_err());
        plan.revived.extend(revived);
        let mut walk = Walk::new(self);
        for mark in &plan.revived {
            walk.check(self, mark)?;
        }
        Ok(plan)
    }

    /// Hands out the blocks of `marks` where they were: there is nothing but free memory now.
    pub(crate) fn revive(&mut self, marks: &[LiveMark], ledger: &mut Ledger<'_>) -> Vec<BlockIdx> {
        self.settle();
        let mut walk = Walk::new(self);
        let mut revived = Vec::new();
        for mark in marks {
            let free = walk.to(self, mark).expect("I12: the plan was checked");
            let block = self.cut_out(free, mark, ledger);
            let class = self.blocks[block].lane.class();
            let request = Request {
                requested: mark.requested,
                rounded: mark.bytes,
                class,
                expandable: self.blocks[block].expandable,
                list: WaitingList::of(class, mark.bytes),
            };
            self.hand_out(block, &request, ledger);
            walk.cursor = Some(block);
            revived.push(block);
        }
        revived
    }

    /// Makes the part of a free block that `mark` names a block of its own, `Held`, booked as if it had
    /// been free by itself.
    fn cut_out(&mut self, free: BlockIdx, mark: &LiveMark, ledger: &mut Ledger<'_>) -> BlockIdx {
        let whole = &self.blocks[free];
        let (class, bytes) = (whole.lane.class(), whole.bytes);
        let before = if whole.is_split() { (1, bytes) } else { (0, 0) };
        let counts_split = !whole.expandable;
        let (block, pieces) = self.cut_part(free, mark.addr, mark.bytes);
        if counts_split && self.blocks[block].is_split() {
            adjust(ledger.stats, Gauge::InactiveSplit, class, before.0, pieces);
            adjust(ledger.stats, Gauge::InactiveSplitBytes, class, before.1, bytes);
        }
        block
    }
}

/// Goes through the segments of a heap along marks in order of address.
struct Walk {
    segments: HashMap<Addr, SegmentId>,
    base: Addr,
    cursor: Option<BlockIdx>,
}

impl Walk {
    fn new(heap: &Heap) -> Self {
        let segments = heap.segments.iter().map(|(id, segment)| (segment.base, id)).collect();
        Walk { segments, base: Addr::NULL, cursor: None }
    }

    /// The block that holds the first byte of `mark`.
    fn to(&mut self, heap: &Heap, mark: &LiveMark) -> Option<BlockIdx> {
        if self.base != mark.base {
            self.base = mark.base;
            self.cursor = self.segments.get(&mark.base).map(|id| heap.segments[*id].head);
        }
        while let Some(at) = self.cursor
            && heap.blocks[at].end() <= mark.addr
        {
            self.cursor = heap.blocks[at].next;
        }
        self.cursor
    }

    /// Whether `mark` can be live again once the stale blocks are free.
    fn check(&mut self, heap: &Heap, mark: &LiveMark) -> Result<(), Obstacle> {
        let mut cursor = self.to(heap, mark);
        loop {
            let block = &heap.blocks[cursor.ok_or(Obstacle::Gone(mark.addr))?];
            match block.state {
                BlockState::Free | BlockState::Live => {}
                BlockState::Waiting { .. } => unreachable!("I4: restoring settles the heap first"),
                BlockState::Draining { .. } | BlockState::Held => {
                    return Err(Obstacle::Pending(mark.addr));
                }
                BlockState::Unmapped | BlockState::Vacant => {
                    return Err(Obstacle::Gone(mark.addr));
                }
            }
            if block.end() >= mark.end() {
                return Ok(());
            }
            cursor = block.next;
        }
    }
}
