//! Spans of memory cut into blocks: split on demand, best fit, merged when free.
//!
//! A *central* heap's spans are pinned segments; a *shard*'s spans are runs that the central heap
//! lends it. Both are this type. It knows numbers only, and nobody's lock.

use super::block::{BlockId, BlockTable, NONE, State};
use super::check::{Violation, ensure};
use super::free_index::{FreeBlock, FreeIndex};
use super::home::{Home, Released, Span, Taken};
use super::recent::{Recent, slack};
use super::stats::Ledger;
use crate::units::Addr;
use std::collections::BTreeMap;

/// A span that is wholly free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Idle {
    pub(crate) span: Span,
    /// Differs for every time that a span of this heap became idle.
    pub(crate) stamp: u64,
}

#[derive(Debug)]
pub(crate) struct Heap<S> {
    table: BlockTable<S>,
    free: FreeIndex,
    recent: Recent,
    /// First addresses of all blocks that are not in `free`.
    starts: BTreeMap<Addr, u32>,
    /// Spans that are one free block: its slot, and the stamp.
    idle: BTreeMap<Addr, (u32, u64)>,
    next_stamp: u64,
    /// Bytes of all spans.
    bytes: u64,
    /// Bytes lent to shards.
    lent: u64,
    ledger: Ledger,
}

impl<S: PartialEq> Heap<S> {
    /// Block sizes will be multiples of `granule`, a power of two.
    pub(crate) fn new(granule: u64) -> Self {
        Heap {
            table: BlockTable::default(),
            free: FreeIndex::new(granule),
            recent: Recent::default(),
            starts: BTreeMap::new(),
            idle: BTreeMap::new(),
            next_stamp: 0,
            bytes: 0,
            lent: 0,
            ledger: Ledger::default(),
        }
    }

    /// Bytes of all spans.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that are neither a client's nor a shard's.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.bytes - self.lent - self.ledger.active_bytes.current as u64
    }

    /// Bytes of the largest free block, as far as merged.
    pub(crate) fn largest_free(&self) -> u64 {
        self.free.largest()
    }

    pub(crate) fn stats(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    pub(crate) fn idle_count(&self) -> usize {
        self.idle.len()
    }

    /// Adds memory. Its length is a multiple of the granule.
    pub(crate) fn add_span(&mut self, span: Span) {
        let index = self.table.insert(span.base, span.bytes);
        self.bytes += span.bytes;
        self.shelve(index);
    }

    /// Adds memory as one block that is handed out at once and leaves when it is freed.
    pub(crate) fn add_uncached(&mut self, span: Span, requested: u64) -> Taken {
        let index = self.table.insert(span.base, span.bytes);
        self.table[index].uncached = true;
        self.bytes += span.bytes;
        self.starts.insert(span.base, index);
        self.hand_out(index, requested)
    }

    /// Hands out a block of at least `bytes`, a multiple of the granule.
    pub(crate) fn take(&mut self, bytes: u64, requested: u64) -> Option<Taken> {
        let index = self.pick(bytes)?;
        Some(self.hand_out(index, requested))
    }

    /// Lends a run of at least `bytes` to the shard of that home.
    pub(crate) fn lend(&mut self, bytes: u64, to: u32) -> Option<Span> {
        let index = self.pick(bytes)?;
        let block = &mut self.table[index];
        block.state = State::Lent { to };
        self.lent += block.bytes;
        Some(Span { base: block.addr, bytes: block.bytes })
    }

    /// Takes a lent run back.
    ///
    /// # Panics
    /// If no run that starts at `base` is lent.
    pub(crate) fn reclaim(&mut self, base: Addr) {
        let index = self.starts[&base];
        let block = &self.table[index];
        let is_lent = matches!(block.state, State::Lent { .. });
        assert!(is_lent, "H7: the run at {base} is {:?}", block.state);
        self.lent -= block.bytes;
        self.merge(index);
    }

    /// Merges everything that was kept apart.
    pub(crate) fn consolidate(&mut self) {
        while let Some(index) = self.recent.pop() {
            self.merge(index);
        }
    }

    /// The wholly free spans, by address. [`consolidate`](Heap::consolidate) first to see them all.
    pub(crate) fn idle(&self) -> impl Iterator<Item = Idle> + '_ {
        self.idle.iter().map(|(&base, &(index, stamp))| {
            let span = Span { base, bytes: self.table[index].bytes };
            Idle { span, stamp }
        })
    }

    /// Removes the span at `base` if it is wholly free, and has been since it got that stamp.
    pub(crate) fn remove_idle(&mut self, base: Addr, stamp: Option<u64>) -> Option<Span> {
        let &(index, idle_stamp) = self.idle.get(&base)?;
        if stamp.is_some_and(|stamp| stamp != idle_stamp) {
            return None;
        }
        self.idle.remove(&base);
        let bytes = self.table[index].bytes;
        self.free.remove(bytes, base);
        self.table.remove(index);
        self.bytes -= bytes;
        Some(Span { base, bytes })
    }

    /// Removes the last wholly free span unless it is the only one.
    pub(crate) fn remove_surplus(&mut self) -> Option<Span> {
        if self.idle.len() < 2 {
            return None;
        }
        let (&base, _) = self.idle.last_key_value()?;
        self.remove_idle(base, None)
    }

    /// The block that holds `addr` and is not free.
    pub(crate) fn find(&self, addr: Addr) -> Option<Found> {
        let (&start, &index) = self.starts.range(..=addr).next_back()?;
        let block = &self.table[index];
        if addr - start >= block.bytes {
            return None;
        }
        match block.state {
            State::Lent { to } => Some(Found::Lent { to }),
            _ => self.table.live_id(index).map(|id| Found::Live { id, start }),
        }
    }

    fn hand_out(&mut self, index: u32, requested: u64) -> Taken {
        let id = self.table.start(index, requested);
        let block = &self.table[index];
        let taken = Taken { id, addr: block.addr, bytes: block.bytes };
        self.ledger.start(taken.bytes, requested);
        taken
    }

    /// Finds a free block for `bytes` and cuts it to size. It is in no list afterwards.
    fn pick(&mut self, bytes: u64) -> Option<u32> {
        if let Some(index) = self.recent.take(bytes) {
            return Some(index);
        }
        let FreeBlock { addr, index, .. } = self.free.take_best(bytes)?;
        if self.is_whole_span(index) {
            self.idle.remove(&addr);
        }
        self.starts.insert(addr, index);
        self.trim(index, bytes);
        Some(index)
    }

    /// Splits off what a block has beyond `bytes`, if it is worth a block.
    fn trim(&mut self, index: u32, bytes: u64) {
        let block = &self.table[index];
        let (addr, excess, next) = (block.addr, block.bytes - bytes, block.next);
        if excess <= slack(bytes) {
            return;
        }
        let rest = self.table.insert(addr + bytes, excess);
        self.table[rest].prev = index;
        self.table[rest].next = next;
        if next != NONE {
            self.table[next].prev = rest;
        }
        let block = &mut self.table[index];
        block.bytes = bytes;
        block.next = rest;
        self.free.insert(FreeBlock { bytes: excess, addr: addr + bytes, index: rest });
    }

    fn is_whole_span(&self, index: u32) -> bool {
        let block = &self.table[index];
        block.prev == NONE && block.next == NONE
    }

    /// Joins a block with its free neighbours and makes the result available.
    fn merge(&mut self, index: u32) {
        self.starts.remove(&self.table[index].addr);
        self.table[index].state = State::Free;
        let mut index = index;
        let prev = self.table[index].prev;
        if self.is_free(prev) {
            self.free.remove(self.table[prev].bytes, self.table[prev].addr);
            self.absorb_next(prev);
            index = prev;
        }
        let next = self.table[index].next;
        if self.is_free(next) {
            self.free.remove(self.table[next].bytes, self.table[next].addr);
            self.absorb_next(index);
        }
        self.shelve(index);
    }

    fn is_free(&self, index: u32) -> bool {
        index != NONE && self.table[index].state == State::Free
    }

    fn absorb_next(&mut self, index: u32) {
        let gone = self.table[index].next;
        let (bytes, next) = (self.table[gone].bytes, self.table[gone].next);
        self.table[index].bytes += bytes;
        self.table[index].next = next;
        if next != NONE {
            self.table[next].prev = index;
        }
        self.table.remove(gone);
    }

    /// Puts a merged block into the index.
    fn shelve(&mut self, index: u32) {
        let FreeBlock { bytes, addr, .. } = self.free_block(index);
        self.free.insert(FreeBlock { bytes, addr, index });
        if self.is_whole_span(index) {
            self.idle.insert(addr, (index, self.next_stamp));
            self.next_stamp += 1;
        }
    }

    fn free_block(&self, index: u32) -> FreeBlock {
        let block = &self.table[index];
        FreeBlock { bytes: block.bytes, addr: block.addr, index }
    }
}

/// What [`Heap::find`] found at an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// A live allocation, and where it starts.
    Live { id: BlockId, start: Addr },
    /// A run lent to the shard of that home.
    Lent { to: u32 },
}

impl<S: PartialEq> Home<S> for Heap<S> {
    fn table(&mut self) -> &mut BlockTable<S> {
        &mut self.table
    }

    fn ledger(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    fn put_back(&mut self, index: u32) -> Released {
        let block = &mut self.table[index];
        let span = Span { base: block.addr, bytes: block.bytes };
        if block.uncached {
            block.state = State::Free;
            self.table.remove(index);
            self.starts.remove(&span.base);
            self.bytes -= span.bytes;
            return Released::Leaves(span);
        }
        if block.prev == NONE && block.next == NONE {
            self.merge(index);
            return Released::Kept;
        }
        block.state = State::Recent;
        if let Some(oldest) = self.recent.push(span.bytes, index) {
            self.merge(oldest);
        }
        Released::Kept
    }
}

/// What a heap's blocks add up to, for the checks that span heaps.
#[derive(Debug, Default)]
pub(crate) struct HeapSums {
    pub(crate) spans: Vec<Span>,
    /// Runs, and the homes that they are lent to.
    pub(crate) lent: Vec<(u32, Span)>,
    /// Draining allocations and how many conditions each waits for.
    pub(crate) draining: Vec<(BlockId, u32)>,
}

impl<S: PartialEq> Heap<S> {
    /// Recomputes everything that this heap keeps from its blocks alone.
    pub(crate) fn check(&self) -> Result<HeapSums, Violation> {
        let mut sums = HeapSums::default();
        let mut seen = Seen::default();
        for (first, block) in self.table.iter().filter(|(_, block)| block.prev == NONE) {
            let span = self.check_span(first, &mut seen, &mut sums)?;
            let idle = self.idle.get(&block.addr).map(|&(index, _)| index);
            let whole = block.state == State::Free && block.next == NONE;
            ensure(idle == whole.then_some(first), "H1", || {
                format!("the span at {} is in the idle list wrongly", block.addr)
            })?;
            sums.spans.push(span);
        }
        sums.spans.sort();
        self.check_totals(&seen, &sums)?;
        Ok(sums)
    }

    fn check_span(
        &self,
        first: u32,
        seen: &mut Seen,
        sums: &mut HeapSums,
    ) -> Result<Span, Violation> {
        let base = self.table[first].addr;
        let (mut index, mut prev, mut at) = (first, NONE, base);
        while index != NONE {
            let block = &self.table[index];
            ensure(block.addr == at && block.prev == prev && block.bytes > 0, "H1", || {
                format!("a gap or overlap at {at} in the span at {base}")
            })?;
            let after_free = prev != NONE && self.table[prev].state == State::Free;
            ensure(!(after_free && block.state == State::Free), "H3", || {
                format!("two unmerged free blocks at {at}")
            })?;
            seen.count(block, index, self, sums)?;
            at = at + block.bytes;
            (prev, index) = (index, block.next);
        }
        Ok(Span { base, bytes: at - base })
    }

    fn check_totals(&self, seen: &Seen, sums: &HeapSums) -> Result<(), Violation> {
        let total: u64 = sums.spans.iter().map(|span| span.bytes).sum();
        let ledger = &self.ledger;
        let recent: Vec<_> = self.recent.iter().collect();
        let same = |name: &str, kept: u64, counted: u64| {
            ensure(kept == counted, "H6", || format!("{name} is {kept}, blocks say {counted}"))
        };
        same("bytes of spans", self.bytes, total)?;
        same("number of blocks in spans", self.table.iter().count() as u64, seen.blocks)?;
        same("idle spans", self.idle.len() as u64, seen.idle)?;
        same("lent bytes", self.lent, seen.lent)?;
        same("active requests", ledger.active_requests.current as u64, seen.active)?;
        same("active bytes", ledger.active_bytes.current as u64, seen.active_bytes)?;
        same("requested bytes", ledger.requested_bytes.current as u64, seen.requested)?;
        same("draining bytes", ledger.draining_bytes, seen.draining)?;
        same("starts", self.starts.len() as u64, seen.started)?;
        same("free bytes in the index", self.free.bytes(), seen.free)?;
        same("blocks kept apart", recent.len() as u64, seen.recent)?;
        let mut free: Vec<_> = self.free.iter().map(|block| block.index).collect();
        free.sort_unstable();
        ensure(free == seen.free_blocks(), "H4", || {
            "the index does not hold exactly the free blocks".to_owned()
        })?;
        for (bytes, index) in recent {
            let block = &self.table[index];
            ensure(block.state == State::Recent && block.bytes == bytes, "H4", || {
                format!("the block at {} is kept apart wrongly", block.addr)
            })?;
        }
        Ok(())
    }
}

/// Sums over the blocks of one heap.
#[derive(Debug, Default)]
struct Seen {
    blocks: u64,
    idle: u64,
    lent: u64,
    active: u64,
    active_bytes: u64,
    requested: u64,
    draining: u64,
    started: u64,
    free: u64,
    recent: u64,
    free_indices: Vec<u32>,
}

impl Seen {
    fn count<S: PartialEq>(
        &mut self,
        block: &super::block::Block<S>,
        index: u32,
        heap: &Heap<S>,
        sums: &mut HeapSums,
    ) -> Result<(), Violation> {
        self.blocks += 1;
        let is_live = block.state == State::Live;
        ensure(is_live || block.uses.is_empty(), "H9", || {
            format!("the block at {} has uses but no client", block.addr)
        })?;
        match block.state {
            State::Vacant => {}
            State::Free => {
                self.free += block.bytes;
                self.free_indices.push(index);
                self.idle += u64::from(heap.is_whole_span(index));
                return Ok(());
            }
            State::Recent => self.recent += 1,
            State::Lent { to } => {
                self.lent += block.bytes;
                sums.lent.push((to, Span { base: block.addr, bytes: block.bytes }));
            }
            State::Live | State::Draining { .. } => {
                self.active += 1;
                self.active_bytes += block.bytes;
                self.requested += block.requested;
            }
        }
        if let State::Draining { pending } = block.state {
            self.draining += block.bytes;
            sums.draining.push((BlockId { index, generation: block.generation }, pending));
        }
        self.started += 1;
        ensure(heap.starts.get(&block.addr) == Some(&index), "H4", || {
            format!("the block at {} cannot be found by its address", block.addr)
        })
    }

    fn free_blocks(&self) -> Vec<u32> {
        let mut blocks = self.free_indices.clone();
        blocks.sort_unstable();
        blocks
    }
}
