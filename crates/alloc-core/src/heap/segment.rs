//! The segments of a heap, and where the blocks handed out start in them.

use super::Heap;
use crate::block::{BlockIdx, BlockState};
use crate::lane::Lane;
use crate::size_class::{BLOCK_BYTES_MIN, OURS_SMALL_BYTES_MAX, SizeClass};
use crate::units::Addr;

/// Names a segment of one heap.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct SegmentId(u32);

impl SegmentId {
    pub(crate) const fn new(raw: u32) -> Self {
        SegmentId(raw)
    }

    pub(crate) const fn get(self) -> u32 {
        self.0
    }

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// How a segment is backed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SegmentKind {
    /// Obtained and given back whole.
    Whole,
    /// A reservation that is backed page by page, pages counted from its base.
    Expandable { page_bytes: u64 },
}

/// A segment: a span of addresses that its blocks tile exactly.
#[derive(Debug)]
pub(crate) struct SegmentInfo {
    pub(crate) base: Addr,
    pub(crate) bytes: u64,
    pub(crate) lane: Lane,
    pub(crate) kind: SegmentKind,
    /// Names it among all segments that its heap ever had, unlike its id.
    pub(crate) serial: u64,
    /// The block at `base`. Splits keep the low part's place and merges the lower block's, so this
    /// never changes.
    pub(crate) head: BlockIdx,
    /// The blocks handed out last, by where they start. One entry for each place where one can: at
    /// every quantum in the small class; in the large one, whose blocks are larger than that, in every
    /// [`OURS_SMALL_BYTES_MAX`] bytes. Entries stay when blocks are freed: who reads one looks at the
    /// block as well. Empty until somebody does ([`Heap::live_at`]).
    live: Vec<Option<BlockIdx>>,
}

impl SegmentInfo {
    pub(crate) const fn new(
        base: Addr,
        bytes: u64,
        lane: Lane,
        kind: SegmentKind,
        head: BlockIdx,
    ) -> Self {
        SegmentInfo { base, bytes, lane, kind, serial: 0, head, live: Vec::new() }
    }

    pub(crate) const fn is_expandable(&self) -> bool {
        matches!(self.kind, SegmentKind::Expandable { .. })
    }

    /// Makes room for live blocks in the first `bytes` of the segment.
    fn prepare(&mut self, bytes: u64) {
        let places = bytes.div_ceil(self.place_bytes()) as usize;
        if self.live.len() < places {
            self.live.resize(places, None);
        }
    }

    const fn place_bytes(&self) -> u64 {
        match self.lane.class() {
            SizeClass::Small => BLOCK_BYTES_MIN,
            SizeClass::Large => OURS_SMALL_BYTES_MAX,
        }
    }

    #[inline]
    fn place(&self, addr: Addr) -> usize {
        let offset = addr - self.base;
        // Both divisors are constants, so that this is a shift.
        (match self.lane.class() {
            SizeClass::Small => offset / BLOCK_BYTES_MIN,
            SizeClass::Large => offset / OURS_SMALL_BYTES_MAX,
        }) as usize
    }

    /// Remembers that the block at `addr` is handed out.
    #[inline]
    pub(crate) fn note_live(&mut self, addr: Addr, block: BlockIdx) {
        let place = self.place(addr);
        self.live[place] = Some(block);
    }

    /// Where to look for a block that is handed out at `addr`: if there is one, this is it.
    #[inline]
    pub(crate) fn live_at(&self, addr: Addr) -> Option<BlockIdx> {
        *self.live.get(self.place(addr))?
    }
}

impl Heap {
    /// The block handed out at exactly `addr`, which is said to lie in a segment. From the first such
    /// search on the heap remembers where blocks start: handles do without.
    #[inline]
    pub(crate) fn live_at(&mut self, segment: SegmentId, addr: Addr) -> Option<BlockIdx> {
        if !self.segments.are_searched() {
            self.note_all_live();
        }
        let segment = self.segments.get(segment)?;
        if addr < segment.base || addr - segment.base >= segment.bytes {
            return None;
        }
        let index = segment.live_at(addr)?;
        let block = &self.blocks[index];
        (block.state == BlockState::Live && block.addr == addr).then_some(index)
    }

    #[cold]
    #[inline(never)]
    fn note_all_live(&mut self) {
        self.segments.searched = true;
        let backed = self.blocks.iter().filter(|(_, block)| block.state != BlockState::Unmapped);
        for (index, block) in backed {
            let segment = &mut self.segments[block.segment];
            segment.prepare(block.end() - segment.base);
            if block.state == BlockState::Live {
                segment.note_live(block.addr, index);
            }
        }
    }
}

/// The segments of a heap, by id. Ids of segments given back are used again.
#[derive(Debug, Default)]
pub(crate) struct SegmentTable {
    slots: Vec<Option<SegmentInfo>>,
    vacant: Vec<SegmentId>,
    /// Segments so far.
    made: u64,
    /// Whether segments know the blocks handed out in them.
    searched: bool,
}

impl SegmentTable {
    /// Whether segments have to know the blocks handed out in them.
    #[inline]
    pub(crate) const fn are_searched(&self) -> bool {
        self.searched
    }

    /// Makes room for live blocks in the first `bytes` of a segment.
    pub(crate) fn prepare(&mut self, id: SegmentId, bytes: u64) {
        if self.searched {
            self[id].prepare(bytes);
        }
    }

    /// The id that the next [`insert`](Self::insert) gives.
    pub(crate) fn next_id(&self) -> SegmentId {
        let next = || SegmentId(u32::try_from(self.slots.len()).expect("fewer than 2^32 segments"));
        self.vacant.last().copied().unwrap_or_else(next)
    }

    pub(crate) fn insert(&mut self, id: SegmentId, segment: SegmentInfo) {
        debug_assert_eq!(id, self.next_id());
        if self.vacant.pop().is_none() {
            self.slots.push(None);
        }
        self.slots[id.index()] = Some(SegmentInfo { serial: self.made, ..segment });
        self.made += 1;
    }

    pub(crate) fn remove(&mut self, id: SegmentId) -> SegmentInfo {
        let segment = self.slots[id.index()].take().expect("I10: segment id names a segment");
        self.vacant.push(id);
        segment
    }

    pub(crate) fn get(&self, id: SegmentId) -> Option<&SegmentInfo> {
        self.slots.get(id.index())?.as_ref()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SegmentId, &SegmentInfo)> {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(index, slot)| Some((SegmentId(index as u32), slot.as_ref()?)))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots.len() == self.vacant.len()
    }
}

impl std::ops::Index<SegmentId> for SegmentTable {
    type Output = SegmentInfo;
    fn index(&self, id: SegmentId) -> &SegmentInfo {
        self.get(id).expect("I10: segment id names a segment")
    }
}

impl std::ops::IndexMut<SegmentId> for SegmentTable {
    fn index_mut(&mut self, id: SegmentId) -> &mut SegmentInfo {
        self.slots[id.index()].as_mut().expect("I10: segment id names a segment")
    }
}
