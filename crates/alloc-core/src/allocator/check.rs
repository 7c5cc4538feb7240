//! The checker: rebuilds every total and relation from the blocks and compares.
//!
//! The numbers are those of `docs/invariants.md`.

use super::pools::{OwnSource, check_pools, is_same};
use super::shards::check_shards;
use super::{CachingAllocator, Device, HeapBody, HeapCell, Paging, Shared};
use crate::backend::{Backend, SEGMENT_ALIGN};
use crate::block::{Block, BlockId, BlockState};
use crate::directory::Owner;
use crate::handles::Layout;
use crate::heap::{Heap, SegmentId, SegmentInfo, SegmentKind};
use crate::stats::{Gauge, StatTable};
use crate::units::{Addr, DeviceId};
use std::collections::{BTreeMap, HashMap};
use std::fmt;

/// The first broken invariant that [`CachingAllocator::check`] found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// Its number in `docs/invariants.md`.
    pub invariant: &'static str,
    /// What is wrong, and where.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.what)
    }
}

impl std::error::Error for Violation {}

pub(super) fn ensure(
    holds: bool,
    invariant: &'static str,
    what: impl FnOnce() -> String,
) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(Violation { invariant, what: what() }) }
}

impl<B: Backend> CachingAllocator<B> {
    /// Recomputes everything from scratch. For tests and fuzzing: it looks at every block, and other
    /// threads must leave the allocator alone meanwhile.
    ///
    /// # Errors
    /// The first violated invariant.
    pub fn check(&self) -> Result<(), Violation> {
        let shared = &*self.shared;
        let mut ranges = BTreeMap::new();
        for (index, device) in shared.devices.iter().enumerate() {
            shared.check_device(DeviceId::new(index as u16), device, &mut ranges)?;
        }
        shared.check_captures()?;
        check_disjoint(&ranges)
    }
}

/// I2: segments of all heaps and devices are disjoint.
fn check_disjoint(ranges: &BTreeMap<Addr, u64>) -> Result<(), Violation> {
    let mut end = Addr::NULL;
    for (base, bytes) in ranges {
        ensure(*base >= end, "I2", || format!("the segment at {base} overlaps the one below"))?;
        end = *base + *bytes;
    }
    Ok(())
}

impl<B: Backend> Shared<B> {
    fn check_device(
        &self,
        id: DeviceId,
        device: &Device<B>,
        ranges: &mut BTreeMap<Addr, u64>,
    ) -> Result<(), Violation> {
        let mut pending: HashMap<(u32, BlockId), u32> = HashMap::new();
        for entry in device.events.entries() {
            *pending.entry(entry).or_default() += 1;
        }
        let entries: u32 = pending.values().sum();
        ensure(device.events.len() == entries as usize, "I5", || {
            format!("{} events counted, {entries} queued", device.events.len())
        })?;
        let mut sums = StatTable::default();
        let mut draining = 0;
        for cell in device.heaps() {
            let state = cell.state.lock();
            let body = &state.body;
            draining += check_draining(&cell, body, &pending)?;
            check_tokens(body)?;
            for (segment_id, segment) in body.heap.segments.iter() {
                ensure(ranges.insert(segment.base, segment.bytes).is_none(), "I2", || {
                    format!("two segments start at {}", segment.base)
                })?;
                check_tiling(&body.heap, segment_id, segment)?;
                self.check_directory(&cell, &body.heap, segment_id, segment)?;
                if let Some(Paging::Handles(store)) = self.paging_of(&body.source)
                    && segment.is_expandable()
                {
                    check_homes(&body.heap, segment, &store.layout())?;
                }
            }
            check_indexes(&body.heap)?;
            add_up(&body.heap, &mut sums);
        }
        ensure(draining == pending.len(), "I5", || {
            format!("{} blocks in event queues, {draining} draining", pending.len())
        })?;
        check_pools(device)?;
        check_shards(device)?;
        self.check_sums(id, device, &sums)?;
        self.check_pages(id, device, &None)?;
        for source in device.pools.sources() {
            self.check_pages(id, device, &Some(source))?;
        }
        Ok(())
    }

    /// E1, E2: expandable segments of a source are its reservations, and their mapped blocks cover exactly the
    /// pages mapped there.
    fn check_pages(
        &self,
        id: DeviceId,
        device: &Device<B>,
        source: &OwnSource<B>,
    ) -> Result<(), Violation> {
        let Some(paging) = self.paging_of(source) else { return Ok(()) };
        let mut mapped = paging.pager().mapped(id);
        for cell in device.heaps() {
            let state = cell.state.lock();
            if !is_same(source, &state.body.source) {
                continue;
            }
            let heap = &state.body.heap;
            for (_, segment) in heap.segments.iter().filter(|(_, s)| s.is_expandable()) {
                let base = segment.base;
                let pages = mapped.remove(&(base, segment.bytes)).ok_or_else(|| Violation {
                    invariant: "E1",
                    what: format!("the segment at {base} is not a reservation"),
                })?;
                let backed: Vec<_> = blocks_of(heap, segment)
                    .filter(|block| block.state != BlockState::Unmapped)
                    .map(|block| (block.addr, block.bytes))
                    .collect();
                ensure(runs(&backed) == runs(&pages), "E2", || {
                    format!("the mapped blocks of the segment at {base} are not its pages")
                })?;
            }
        }
        ensure(mapped.is_empty(), "E1", || {
            format!("{} reservations without a segment", mapped.len())
        })
    }

    /// I6: totals are the sums over blocks and segments.
    fn check_sums(
        &self,
        id: DeviceId,
        device: &Device<B>,
        sums: &StatTable,
    ) -> Result<(), Violation> {
        let kept = self.stat_table(id);
        for gauge in Gauge::ALL {
            let (kept, sum) = (kept.get(gauge), sums.get(gauge));
            for (class, kept, sum) in [
                ("all", kept.all, sum.all),
                ("small_pool", kept.small, sum.small),
                ("large_pool", kept.large, sum.large),
            ] {
                ensure(kept.current == sum.current, "I6", || {
                    let name = gauge.name();
                    format!("{name}.{class} is {}, blocks say {}", kept.current, sum.current)
                })?;
                ensure(kept.peak >= kept.current, "I6", || {
                    format!("{}.{class} is above its peak", gauge.name())
                })?;
            }
        }
        let ceilings = device.check_ceilings();
        ensure(ceilings.is_ok(), "I6", || ceilings.err().unwrap_or_default())?;
        let reserved = sums.get(Gauge::ReservedBytes).all.current as u64;
        ensure(device.reserved() == reserved, "I6", || {
            format!("{id} counts {} reserved, segments hold {reserved}", device.reserved())
        })
    }

    /// I11: the directory leads from every backed page to its segment.
    fn check_directory(
        &self,
        cell: &HeapCell<B>,
        heap: &Heap,
        id: SegmentId,
        segment: &SegmentInfo,
    ) -> Result<(), Violation> {
        let owner = Some(Owner { heap: cell.index, segment: id });
        for block in blocks_of(heap, segment) {
            if block.state == BlockState::Unmapped {
                self.check_hole(block)?;
                continue;
            }
            // The first page of a small block may begin in its lower neighbour, which is as well
            // backed as the block itself.
            for addr in [block.addr, Addr::new(block.end().get() - 1)] {
                let found = self.directory.owner(addr) == owner;
                ensure(found, "I11", || {
                    format!("the directory is wrong about {addr} ({:?})", block.state)
                })?;
            }
        }
        Ok(())
    }

    /// I11: a page without a backed byte is nobody's. A hole can share its outer pages with blocks.
    fn check_hole(&self, hole: &Block) -> Result<(), Violation> {
        let first = hole.addr.get().next_multiple_of(SEGMENT_ALIGN);
        let end = hole.end().get() / SEGMENT_ALIGN * SEGMENT_ALIGN;
        if first >= end {
            return Ok(());
        }
        for addr in [Addr::new(first), Addr::new(end - 1)] {
            ensure(self.directory.owner(addr).is_none(), "I11", || {
                format!("the directory names an owner for {addr}, which is in a hole")
            })?;
        }
        Ok(())
    }
}

/// Ascending ranges, with those that touch joined.
fn runs(ranges: &[(Addr, u64)]) -> Vec<(Addr, Addr)> {
    let mut runs: Vec<(Addr, Addr)> = Vec::new();
    for (at, bytes) in ranges {
        match runs.last_mut() {
            Some(last) if last.1 == *at => last.1 = *at + *bytes,
            _ => runs.push((*at, *at + *bytes)),
        }
    }
    runs
}

/// I5: a block drains iff events of it are queued or it is shared, and as many as it counts.
fn check_draining<B: Backend>(
    cell: &HeapCell<B>,
    body: &HeapBody<B>,
    queued: &HashMap<(u32, BlockId), u32>,
) -> Result<usize, Violation> {
    let heap = &body.heap;
    let mut draining = 0;
    for (index, block) in heap.blocks.iter() {
        ensure(block.state != BlockState::Held, "I12", || {
            format!("the block at {} is in nobody's hands", block.addr)
        })?;
        let queued = queued.get(&(cell.index, heap.blocks.id(index))).copied().unwrap_or(0);
        let (counted, shares) = match block.state {
            BlockState::Draining { pending } => (pending, body.shares_of(index)),
            _ => (0, 0),
        };
        ensure(queued + shares == counted, "I5", || {
            format!(
                "the block at {} counts {counted} events and shares, there are {queued} and {shares}",
                block.addr
            )
        })?;
        draining += usize::from(queued > 0);
        ensure(counted > 0 || !matches!(block.state, BlockState::Draining { .. }), "I5", || {
            format!("the block at {} drains without an event or share", block.addr)
        })?;
    }
    Ok(draining)
}

/// I10: every segment obtained whole has its token, and every recorded use a live block.
fn check_tokens<B: Backend>(body: &HeapBody<B>) -> Result<(), Violation> {
    let mut whole = 0;
    for (id, segment) in body.heap.segments.iter() {
        if segment.kind != SegmentKind::Whole {
            continue;
        }
        whole += 1;
        let token = body.tokens.get(&id);
        let same = token.is_some_and(|t| t.base() == segment.base && t.bytes() == segment.bytes);
        ensure(same, "I10", || format!("the segment at {} has no token", segment.base))?;
    }
    ensure(body.tokens.len() == whole, "I10", || "a token has no segment".to_owned())?;
    let (mut uses, mut shares, mut good) = (0, 0, true);
    for (index, block) in body.heap.blocks.iter() {
        let (used, shared) = (body.uses.contains_key(&index), body.shares_of(index) > 0);
        good &= block.can_have(used, shared);
        uses += usize::from(used);
        shares += usize::from(shared);
    }
    ensure(good && body.uses.len() == uses && body.shares.len() == shares, "I10", || {
        "streams or shares are recorded for a block that is not live".to_owned()
    })
}

/// E2: what is backed in a reservation is what belongs to its views; every byte of a handle belongs
/// to one view.
fn check_homes(heap: &Heap, segment: &SegmentInfo, layout: &Layout) -> Result<(), Violation> {
    let mut backed: Vec<(Addr, Addr)> = Vec::new();
    for block in blocks_of(heap, segment).filter(|b| b.state != BlockState::Unmapped) {
        join_run(&mut backed, block.addr, block.end());
    }
    let mut owned: Vec<(Addr, Addr)> = Vec::new();
    for (at, id) in layout.views(segment.base, segment.base, segment.base + segment.bytes) {
        let mut cursor = 0;
        for home in &layout[id].homes {
            ensure(home.from == cursor, "E2", || format!("bytes of a handle at {at} are lost"))?;
            cursor += home.bytes;
            if home.view.at == at {
                join_run(&mut owned, at + home.from, at + cursor);
            }
        }
        ensure(cursor == 0 || cursor == layout[id].bytes, "E2", || {
            format!("the end of a handle at {at} is lost")
        })?;
    }
    ensure(backed == owned, "E2", || {
        let base = segment.base;
        format!("blocks and handles differ about what is backed in the segment at {base}")
    })
}

fn join_run(runs: &mut Vec<(Addr, Addr)>, from: Addr, to: Addr) {
    match runs.last_mut() {
        Some(last) if last.1 == from => last.1 = to,
        _ => runs.push((from, to)),
    }
}

fn blocks_of<'a>(heap: &'a Heap, segment: &SegmentInfo) -> impl Iterator<Item = &'a Block> {
    std::iter::successors(Some(&heap.blocks[segment.head]), |block| {
        block.next.map(|next| &heap.blocks[next])
    })
}

/// I1, I3, E3: blocks tile their segment, no two free neighbours or holes are left unmerged, holes
/// are whole pages.
fn check_tiling(heap: &Heap, id: SegmentId, segment: &SegmentInfo) -> Result<(), Violation> {
    let mut cursor = segment.base;
    let mut below: Option<&Block> = None;
    for block in blocks_of(heap, segment) {
        let at = block.addr;
        ensure(at == cursor && block.bytes > 0, "I1", || {
            format!("expected a block at {cursor}, found {at} of {} bytes", block.bytes)
        })?;
        ensure(block.segment == id && block.lane == segment.lane, "I10", || {
            format!("the block at {at} names another segment or lane")
        })?;
        let linked = block.prev.map(|prev| heap.blocks[prev].addr) == below.map(|b| b.addr);
        ensure(linked, "I1", || format!("the block at {at} has a wrong lower neighbour"))?;
        let mergeable = matches!(block.state, BlockState::Free | BlockState::Unmapped)
            && below.is_some_and(|below| below.state == block.state);
        ensure(!mergeable, "I3", || format!("the block at {at} was not merged"))?;
        if let SegmentKind::Expandable { page_bytes } = segment.kind
            && block.state == BlockState::Unmapped
        {
            let whole = (at - segment.base).is_multiple_of(page_bytes)
                && block.bytes.is_multiple_of(page_bytes);
            ensure(whole, "E3", || format!("the hole at {at} is not whole pages"))?;
        }
        cursor = block.end();
        below = Some(block);
    }
    ensure(cursor == segment.base + segment.bytes, "I1", || {
        format!("the blocks of the segment at {} end at {cursor}", segment.base)
    })
}

/// I4: a block is in an index iff its state says so.
fn check_indexes(heap: &Heap) -> Result<(), Violation> {
    let (mut free, mut holes, mut waiting, mut tiled) = (0, 0, 0, 0);
    for (_, segment) in heap.segments.iter() {
        tiled += blocks_of(heap, segment).count();
    }
    ensure(tiled == heap.blocks.iter().count(), "I1", || {
        "a block belongs to no segment".to_owned()
    })?;
    for (index, block) in heap.blocks.iter() {
        let lane = &heap.lanes[block.lane.index()];
        let found = heap.segments[block.segment].live_at(block.addr) == Some(index);
        let known = found || block.state != BlockState::Live || !heap.segments.are_searched();
        ensure(known, "I4", || format!("the index of live blocks is wrong about {}", block.addr))?;
        match block.state {
            BlockState::Free => {
                free += 1;
                ensure(lane.free.contains(block.key(), index), "I4", || {
                    format!("the free block at {} is not in the index", block.addr)
                })?;
            }
            BlockState::Unmapped => {
                holes += 1;
                ensure(lane.unmapped.get(&block.addr) == Some(&index), "I4", || {
                    format!("the hole at {} is not in the index", block.addr)
                })?;
            }
            BlockState::Waiting { .. } => waiting += 1,
            _ => {
                ensure(block.bytes >= block.requested, "I6", || {
                    format!("the block at {} is smaller than its request", block.addr)
                })?;
            }
        }
    }
    let indexed: usize = heap.lanes.iter().map(|lane| lane.free.len()).sum();
    let indexed_holes: usize = heap.lanes.iter().map(|lane| lane.unmapped.len()).sum();
    ensure(indexed == free && indexed_holes == holes, "I4", || {
        format!("{indexed} blocks and {indexed_holes} holes indexed, {free} and {holes} exist")
    })?;
    let listed = heap.listed();
    ensure(listed == Some(waiting), "I4", || {
        format!("{waiting} blocks wait, the lists of sizes have {listed:?}")
    })?;
    ensure(heap.lives_are_right(), "I6", || {
        format!("the lives that stream {} records are not those of its blocks", heap.stream.get())
    })
}

/// What the gauges must show for this heap.
fn add_up(heap: &Heap, sums: &mut StatTable) {
    for (_, segment) in heap.segments.iter().filter(|(_, s)| s.kind == SegmentKind::Whole) {
        sums.increase(Gauge::Segment, segment.lane.class(), 1);
        sums.increase(Gauge::ReservedBytes, segment.lane.class(), segment.bytes);
    }
    for (_, block) in heap.blocks.iter() {
        let expandable = block.expandable;
        if expandable && block.state != BlockState::Unmapped {
            sums.increase(Gauge::ReservedBytes, block.lane.class(), block.bytes);
        }
        if block.is_active() {
            sums.hand_out(block.lane.class(), block.bytes, block.requested);
        }
        if matches!(block.state, BlockState::Draining { .. }) {
            sums.let_go(block.lane.class(), block.bytes);
        }
        if block.state == BlockState::Free && block.is_split() && !expandable {
            sums.increase(Gauge::InactiveSplit, block.lane.class(), 1);
            sums.increase(Gauge::InactiveSplitBytes, block.lane.class(), block.bytes);
        }
    }
}
