//! One device's allocator: search, split, free, merge, events.

use alloc_core::{Addr, DeviceId, PoolId, StreamId};

use super::driver::Driver;
use super::pools::PoolModel;
use super::{ModelAction, ModelBlock, ModelStats, ModelTrace};
use crate::SpanKind;

const MIB: u64 = 1 << 20;
/// The smallest remainder worth splitting off in the small class and in expandable mode.
const SMALL_REMAINDER: u64 = 512;
/// A remainder of the large class must be larger than this.
const LARGE_REMAINDER: u64 = MIB;
/// The largest rounded request of the small class.
const SMALL_MAX: u64 = MIB;

#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) addr: u64,
    pub(super) bytes: u64,
    pub(super) requested: u64,
    pub(super) stream: StreamId,
    pub(super) pool: PoolId,
    pub(super) small: bool,
    /// Which segment it is part of; a number never used twice.
    pub(super) segment: u64,
    /// First address and page size, if the segment is expandable.
    pub(super) pages: Option<(u64, u64)>,
    pub(super) mapped: bool,
    pub(super) live: bool,
    /// Streams it was used on, of a live block.
    pub(super) uses: Vec<StreamId>,
    /// Events it waits for.
    pub(super) events: usize,
    /// Searches of its pool when it was last put into it.
    pub(super) stamp: u64,
}

impl Block {
    /// Neither handed out nor waiting for events.
    pub(super) fn is_idle(&self) -> bool {
        !self.live && self.events == 0 && self.uses.is_empty()
    }

    /// In the pool: could be handed out.
    pub(super) fn is_free(&self) -> bool {
        self.is_idle() && self.mapped
    }

    pub(super) fn is_expandable(&self) -> bool {
        self.pages.is_some()
    }

    pub(super) fn end(&self) -> u64 {
        self.addr + self.bytes
    }
}

pub(super) struct PendingEvent {
    pub(super) stream: StreamId,
    pub(super) position: u64,
    pub(super) block: u64,
}

/// What is being asked for.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) requested: u64,
    pub(super) rounded: u64,
    pub(super) segment_bytes: u64,
    pub(super) small: bool,
    pub(super) stream: StreamId,
    pub(super) pool: PoolId,
}

/// The allocator of one device.
pub(super) struct DeviceModel {
    pub(super) id: DeviceId,
    pub(super) limit: Option<u64>,
    pub(super) stats: ModelStats,
    /// Bytes taken from the driver.
    pub(super) total: u64,
    /// All blocks by address; neighbours in this list are neighbours in memory if they are of one
    /// segment.
    pub(super) blocks: Vec<Block>,
    pub(super) segments_made: u64,
    /// Searches of the small and of the large class, counted while collection is on.
    pub(super) searches: [u64; 2],
    /// In order of recording.
    pub(super) pending: Vec<PendingEvent>,
    /// The private ones.
    pub(super) pools: Vec<PoolModel>,
}

impl DeviceModel {
    pub(super) fn new(id: DeviceId, max_split: Option<u64>) -> Self {
        DeviceModel {
            id,
            limit: None,
            stats: ModelStats::new(max_split),
            total: 0,
            blocks: Vec::new(),
            segments_made: 0,
            searches: [0; 2],
            pending: Vec::new(),
            pools: Vec::new(),
        }
    }

    pub(super) fn trace(
        &self,
        driver: &mut Driver,
        action: ModelAction,
        (addr, bytes): (u64, u64),
        stream: StreamId,
    ) {
        let addr = Addr::new(addr);
        driver.trace.push(ModelTrace { action, device: self.id, addr, bytes, stream });
    }

    // --- allocate ---

    pub(super) fn allocate(
        &mut self,
        driver: &mut Driver,
        bytes: u64,
        stream: StreamId,
        pool: PoolId,
    ) -> Option<Addr> {
        self.process_events(driver);
        let rounded = driver.conf.round(bytes);
        let request = Request {
            requested: bytes,
            rounded,
            segment_bytes: driver.conf.segment_bytes(rounded),
            small: rounded <= SMALL_MAX,
            stream,
            pool,
        };
        let found = self.take_cached(driver, &request).or_else(|| self.grow(driver, &request));
        let Some(addr) = found else {
            self.stats.num_ooms += 1;
            self.trace(driver, ModelAction::Oom, (0, rounded), stream);
            return None;
        };
        Some(self.hand_out(driver, &request, addr))
    }

    /// The ladder of a miss.
    fn grow(&mut self, driver: &mut Driver, request: &Request) -> Option<u64> {
        if self.collects(driver) {
            self.collect_garbage(driver);
        }
        if let Some(addr) = self.new_block(driver, request) {
            return Some(addr);
        }
        if let Some(addr) = self.lent(driver, request) {
            return Some(addr);
        }
        if self.release_available(driver, request)
            && let Some(addr) = self.new_block(driver, request)
        {
            return Some(addr);
        }
        self.release_cached(driver);
        self.stats.num_alloc_retries += 1;
        self.new_block(driver, request)
    }

    /// Whether garbage collection is configured.
    pub(super) fn collects(&self, driver: &Driver) -> bool {
        self.limit.is_some() && driver.conf.gc_threshold > 0.0
    }

    /// Free blocks that a request may use, in the order of the pool: by size, then address.
    pub(super) fn free_of(&self, request: &Request) -> Vec<&Block> {
        let Request { small, stream, pool, .. } = *request;
        let mine = move |b: &Block| (b.small, b.stream, b.pool) == (small, stream, pool);
        let fits = |b: &&Block| b.is_free() && mine(b);
        let mut free: Vec<&Block> = self.blocks.iter().filter(fits).collect();
        free.sort_by_key(|b| (b.bytes, b.addr));
        free
    }

    /// Searches the pool; the address of the block to use.
    pub(super) fn take_cached(&mut self, driver: &Driver, request: &Request) -> Option<u64> {
        // Only the default pool is collected, so only its searches matter.
        if self.collects(driver) && request.pool == PoolId::DEFAULT {
            self.searches[usize::from(!request.small)] += 1;
        }
        let conf = &driver.conf;
        let free = self.free_of(request);
        let mut candidates = free.into_iter().filter(|b| b.bytes >= request.rounded);
        let mut found = candidates.next()?;
        if found.is_expandable() && conf.expandable {
            // Walk on while that spares a tail that could grow.
            for next in candidates {
                if !found.is_expandable() || self.growable(next) >= self.growable(found) {
                    break;
                }
                found = next;
            }
        } else if found.is_expandable() {
            found = candidates.find(|b| !b.is_expandable())?;
        }
        let max_split = conf.max_split.unwrap_or(u64::MAX);
        let oversize = request.rounded >= max_split;
        if !oversize && found.bytes >= max_split {
            return None;
        }
        let largest = request.rounded + conf.non_split_rounding();
        if oversize && !found.is_expandable() && found.bytes >= largest {
            return None;
        }
        Some(found.addr)
    }

    /// Size of a block and of the hole behind it.
    fn growable(&self, block: &Block) -> u64 {
        let next = self.neighbours(self.index(block.addr)).1.map(|at| &self.blocks[at]);
        block.bytes + next.filter(|next| !next.mapped).map_or(0, |next| next.bytes)
    }

    /// One attempt to get memory from the driver; the address of a free block that is large enough.
    fn new_block(&mut self, driver: &mut Driver, request: &Request) -> Option<u64> {
        let bytes = request.segment_bytes;
        if self.limit.is_some_and(|limit| self.total + bytes > limit) {
            return None;
        }
        if driver.conf.expandable {
            return self.new_expandable_block(driver, request);
        }
        if !driver.take(self.id, bytes) {
            return None;
        }
        let addr = driver.address(SpanKind::Segment, bytes).get();
        self.total += bytes;
        self.stats.segment.up(request.small, 1);
        self.stats.reserved_bytes.up(request.small, bytes);
        self.stats.num_device_alloc += 1;
        if driver.conf.max_split.is_some_and(|max| bytes >= max) {
            self.stats.oversize_segments.up(1);
        }
        self.trace(driver, ModelAction::SegmentAlloc, (addr, bytes), request.stream);
        self.add_segment(request, addr, bytes, None);
        Some(addr)
    }

    /// Adds the one block of a new segment: free, or unmapped if expandable.
    pub(super) fn add_segment(
        &mut self,
        request: &Request,
        addr: u64,
        bytes: u64,
        pages: Option<(u64, u64)>,
    ) {
        self.segments_made += 1;
        let block = Block {
            addr,
            bytes,
            requested: 0,
            stream: request.stream,
            pool: request.pool,
            small: request.small,
            segment: self.segments_made,
            pages,
            mapped: pages.is_none(),
            live: false,
            uses: Vec::new(),
            events: 0,
            stamp: self.searches[usize::from(!request.small)],
        };
        self.insert(block);
    }

    /// Hands a free block out, split if that is worth it.
    pub(super) fn hand_out(&mut self, driver: &mut Driver, request: &Request, addr: u64) -> Addr {
        let at = self.index(addr);
        let was_split = self.is_split(at);
        let block = &self.blocks[at];
        let (bytes, expandable) = (block.bytes, block.is_expandable());
        let rest = bytes - request.rounded;
        let small = request.small;
        let splits = if self.is_no_split(self.blocks[at].pool) {
            false
        } else if small || driver.conf.expandable {
            rest >= SMALL_REMAINDER
        } else {
            request.rounded < driver.conf.max_split.unwrap_or(u64::MAX) && rest > LARGE_REMAINDER
        };
        if splits {
            self.cut(at, request.rounded);
            self.stamp(at + 1);
            if !expandable && was_split {
                self.stats.inactive_split_bytes.down(small, request.rounded);
            } else if !expandable {
                self.stats.inactive_split.up(small, 1);
                self.stats.inactive_split_bytes.up(small, rest);
            }
        } else if was_split && !expandable {
            self.stats.inactive_split.down(small, 1);
            self.stats.inactive_split_bytes.down(small, bytes);
        }
        let block = &mut self.blocks[at];
        block.live = true;
        block.requested = request.requested;
        let bytes = block.bytes;
        self.trace(driver, ModelAction::Alloc, (addr, request.requested), request.stream);
        self.stats.allocation.up(small, 1);
        self.stats.allocated_bytes.up(small, bytes);
        self.stats.active.up(small, 1);
        self.stats.active_bytes.up(small, bytes);
        self.stats.requested_bytes.up(small, request.requested);
        if driver.conf.max_split.is_some_and(|max| bytes >= max) {
            self.stats.oversize_allocations.up(1);
        }
        Addr::new(addr)
    }

    // --- free ---

    pub(super) fn is_live(&self, addr: Addr) -> bool {
        self.blocks.iter().any(|b| b.addr == addr.get() && b.live)
    }

    pub(super) fn record_stream(&mut self, addr: Addr, stream: StreamId) {
        let at = self.index(addr.get());
        let block = &mut self.blocks[at];
        if stream != block.stream && !block.uses.contains(&stream) {
            block.uses.push(stream);
        }
    }

    pub(super) fn free(&mut self, driver: &mut Driver, addr: Addr) {
        let at = self.index(addr.get());
        let block = &mut self.blocks[at];
        block.live = false;
        let uses = std::mem::take(&mut block.uses);
        block.events = uses.len();
        let (bytes, small, stream) = (block.bytes, block.small, block.stream);
        let requested = block.requested;
        self.stats.allocation.down(small, 1);
        self.stats.allocated_bytes.down(small, bytes);
        if driver.conf.max_split.is_some_and(|max| bytes >= max) {
            self.stats.oversize_allocations.down(1);
        }
        self.trace(driver, ModelAction::FreeRequested, (addr.get(), requested), stream);
        if uses.is_empty() {
            self.complete_free(driver, addr.get());
        }
        for stream in uses {
            let position = driver.position(stream);
            self.pending.push(PendingEvent { stream, position, block: addr.get() });
        }
    }

    /// The block goes back into its pool and merges with its neighbours.
    fn complete_free(&mut self, driver: &mut Driver, addr: u64) {
        let at = self.index(addr);
        let Block { bytes, requested, small, stream, .. } = self.blocks[at];
        let expandable = self.blocks[at].is_expandable();
        self.trace(driver, ModelAction::FreeCompleted, (addr, requested), stream);
        let (at, merged) = self.merge(at);
        self.stamp(at);
        if !expandable {
            let split = self.is_split(at);
            let now = if split { self.blocks[at].bytes } else { 0 };
            let blocks = i64::from(split) - merged.len() as i64;
            let split_bytes = now as i64 - merged.iter().sum::<u64>() as i64;
            change(&mut self.stats.inactive_split, small, blocks);
            change(&mut self.stats.inactive_split_bytes, small, split_bytes);
        }
        self.stats.active.down(small, 1);
        self.stats.active_bytes.down(small, bytes);
        self.stats.requested_bytes.down(small, requested);
    }

    /// Takes reached events off, stream by stream, each up to the first one that is not reached.
    fn process_events(&mut self, driver: &mut Driver) {
        for stream in driver.event_order() {
            while let Some(first) = self.pending.iter().position(|e| e.stream == stream)
                && driver.reached(stream, self.pending[first].position)
            {
                self.take_event(driver, first);
            }
        }
    }

    /// Waits for all events.
    pub(super) fn synchronize(&mut self, driver: &mut Driver) {
        self.stats.num_sync_all_streams += 1;
        for stream in driver.event_order() {
            while let Some(first) = self.pending.iter().position(|e| e.stream == stream) {
                driver.wait_until(stream, self.pending[first].position);
                self.take_event(driver, first);
            }
        }
    }

    pub(super) fn take_event(&mut self, driver: &mut Driver, event: usize) {
        let addr = self.pending.remove(event).block;
        let at = self.index(addr);
        self.blocks[at].events -= 1;
        if self.blocks[at].events == 0 {
            self.complete_free(driver, addr);
        }
    }

    // --- the list of blocks ---

    /// Where the block at `addr` is in the list.
    pub(super) fn index(&self, addr: u64) -> usize {
        self.blocks.iter().position(|b| b.addr == addr).expect("no block at this address")
    }

    pub(super) fn insert(&mut self, block: Block) {
        let at = self.blocks.iter().take_while(|b| b.addr < block.addr).count();
        self.blocks.insert(at, block);
    }

    /// The blocks before and behind in the same segment.
    pub(super) fn neighbours(&self, at: usize) -> (Option<usize>, Option<usize>) {
        let segment = self.blocks[at].segment;
        let same = |other: &usize| self.blocks.get(*other).is_some_and(|b| b.segment == segment);
        (at.checked_sub(1).filter(same), Some(at + 1).filter(same))
    }

    pub(super) fn is_split(&self, at: usize) -> bool {
        self.neighbours(at) != (None, None)
    }

    /// Cuts a block in two; the second part follows it in the list, in the same state.
    pub(super) fn cut(&mut self, at: usize, bytes: u64) {
        let mut rest = self.blocks[at].clone();
        rest.addr += bytes;
        rest.bytes -= bytes;
        self.blocks[at].bytes = bytes;
        self.blocks.insert(at + 1, rest);
    }

    /// The block enters its pool now.
    pub(super) fn stamp(&mut self, at: usize) {
        let block = &mut self.blocks[at];
        block.stamp = self.searches[usize::from(!block.small)];
    }

    /// Merges an idle block with idle neighbours of the same mapping. Where it is now, and the sizes
    /// of those that went into it.
    pub(super) fn merge(&mut self, mut at: usize) -> (usize, Vec<u64>) {
        let mapped = self.blocks[at].mapped;
        let (before, behind) = self.neighbours(at);
        let joins = |b: &Option<usize>| {
            b.is_some_and(|b| self.blocks[b].is_idle() && self.blocks[b].mapped == mapped)
        };
        let (joins_before, joins_behind) = (joins(&before), joins(&behind));
        let mut merged = Vec::new();
        if joins_behind {
            let gone = self.blocks.remove(at + 1);
            self.blocks[at].bytes += gone.bytes;
            merged.push(gone.bytes);
        }
        if joins_before {
            let gone = self.blocks.remove(at - 1);
            at -= 1;
            self.blocks[at].addr = gone.addr;
            self.blocks[at].bytes += gone.bytes;
            merged.push(gone.bytes);
        }
        (at, merged)
    }

    pub(super) fn mapped_blocks(&self) -> Vec<ModelBlock> {
        let mapped = self.blocks.iter().filter(|b| b.mapped);
        mapped
            .map(|b| ModelBlock {
                addr: Addr::new(b.addr),
                bytes: b.bytes,
                requested: if b.is_idle() { 0 } else { b.requested },
                stream: b.stream,
                pool: b.pool,
                live: b.live,
                pending: b.events > 0,
            })
            .collect()
    }
}

/// One increase or decrease by a net amount; nothing for 0.
pub(super) fn change(stat: &mut super::stats::Pooled, small: bool, by: i64) {
    if by > 0 {
        stat.up(small, by.unsigned_abs());
    } else if by < 0 {
        stat.down(small, by.unsigned_abs());
    }
}
