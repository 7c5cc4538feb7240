//! The segments of a heap, and where the blocks handed out start in them.

use crate::backend::SEGMENT_ALIGN;
use crate::block::BlockId;
use crate::size_class::{BLOCK_BYTES_MIN, SizeClass};
use crate::units::Addr;
use smallvec::SmallVec;

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
    pub(crate) class: SizeClass,
    pub(crate) kind: SegmentKind,
    /// The block at `base`. Splits keep the low part's id and merges the lower block's, so this
    /// never changes.
    pub(crate) head: BlockId,
    live: Vec<LiveBlocks>,
}

impl SegmentInfo {
    pub(crate) const fn new(
        base: Addr,
        bytes: u64,
        class: SizeClass,
        kind: SegmentKind,
        head: BlockId,
    ) -> Self {
        SegmentInfo { base, bytes, class, kind, head, live: Vec::new() }
    }

    pub(crate) const fn is_expandable(&self) -> bool {
        matches!(self.kind, SegmentKind::Expandable { .. })
    }

    /// Position of `addr` in `live`, and within that page in block quanta.
    fn position(&self, addr: Addr) -> (usize, u16) {
        let offset = addr - self.base;
        let page = (offset / SEGMENT_ALIGN) as usize;
        (page, (offset % SEGMENT_ALIGN / BLOCK_BYTES_MIN) as u16)
    }

    /// Remembers that the block at `addr` is handed out.
    pub(crate) fn add_live(&mut self, addr: Addr, id: BlockId) {
        let (page, quantum) = self.position(addr);
        if self.live.len() <= page {
            self.live.resize_with(page + 1, LiveBlocks::default);
        }
        self.live[page].insert(quantum, id);
    }

    /// Forgets the block at `addr`.
    pub(crate) fn remove_live(&mut self, addr: Addr) {
        let (page, quantum) = self.position(addr);
        self.live[page].remove(quantum);
    }

    /// The block handed out at exactly `addr`, an address inside this segment.
    pub(crate) fn live_at(&self, addr: Addr) -> Option<BlockId> {
        if !(addr - self.base).is_multiple_of(BLOCK_BYTES_MIN) {
            return None;
        }
        let (page, quantum) = self.position(addr);
        self.live.get(page)?.find(quantum)
    }
}

/// Block quanta in one 2 MiB page.
const QUANTA: usize = (SEGMENT_ALIGN / BLOCK_BYTES_MIN) as usize;
/// More blocks than this in one page are looked up by index instead of by scanning.
const SCANNED_MAX: usize = 6;

/// The blocks handed out that start in one 2 MiB page. Those of the large class are at most two;
/// those of the small class may be thousands.
#[derive(Debug)]
enum LiveBlocks {
    Few(SmallVec<[(u16, BlockId); 2]>),
    Many(Box<[Option<BlockId>; QUANTA]>),
}

impl Default for LiveBlocks {
    fn default() -> Self {
        LiveBlocks::Few(SmallVec::new())
    }
}

impl LiveBlocks {
    fn insert(&mut self, quantum: u16, id: BlockId) {
        match self {
            LiveBlocks::Few(blocks) if blocks.len() < SCANNED_MAX => blocks.push((quantum, id)),
            LiveBlocks::Few(blocks) => {
                let mut table = Box::new([None; QUANTA]);
                for (at, block) in blocks.drain(..).chain([(quantum, id)]) {
                    table[at as usize] = Some(block);
                }
                *self = LiveBlocks::Many(table);
            }
            LiveBlocks::Many(table) => table[quantum as usize] = Some(id),
        }
    }

    fn remove(&mut self, quantum: u16) {
        match self {
            LiveBlocks::Few(blocks) => blocks.retain(|(at, _)| *at != quantum),
            LiveBlocks::Many(table) => table[quantum as usize] = None,
        }
    }

    fn find(&self, quantum: u16) -> Option<BlockId> {
        match self {
            LiveBlocks::Few(blocks) => {
                blocks.iter().find(|(at, _)| *at == quantum).map(|(_, id)| *id)
            }
            LiveBlocks::Many(table) => table[quantum as usize],
        }
    }
}

/// The segments of a heap, by id. Ids of segments given back are used again.
#[derive(Debug, Default)]
pub(crate) struct SegmentTable {
    slots: Vec<Option<SegmentInfo>>,
}

impl SegmentTable {
    /// The id that the next [`insert`](Self::insert) gives.
    pub(crate) fn next_id(&self) -> SegmentId {
        let free = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        SegmentId(u32::try_from(free).expect("fewer than 2^32 segments in a heap"))
    }

    pub(crate) fn insert(&mut self, id: SegmentId, segment: SegmentInfo) {
        if id.index() == self.slots.len() {
            self.slots.push(None);
        }
        let before = self.slots[id.index()].replace(segment);
        assert!(before.is_none(), "I10: the segment id is vacant");
    }

    pub(crate) fn remove(&mut self, id: SegmentId) -> SegmentInfo {
        self.slots[id.index()].take().expect("I10: segment id names a segment")
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
        self.slots.iter().all(Option::is_none)
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
