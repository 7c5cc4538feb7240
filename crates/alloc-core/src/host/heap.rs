//! Spans of memory cut into blocks: split on demand, best fit, merged when free.
//!
//! A *central* heap's spans are pinned segments; a *shard*'s spans are runs that the central heap
//! lends it. Both are this type. It knows numbers only, and nobody's lock.

mod fit;
mod verify;

use super::block::{BlockId, BlockTable, NONE, State};
use super::free_index::{FreeBlock, FreeIndex};
use super::home::{After, Home, Run, Span, Taken};
use super::ledger::Ledger;
use super::recent::Recent;
use crate::units::Addr;
use std::collections::BTreeMap;

/// A span that is wholly free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Idle {
    pub(crate) span: Span,
    /// Differs for every time that a span of this heap became idle.
    pub(crate) stamp: u64,
    /// Its block.
    index: u32,
}

#[derive(Debug)]
pub(crate) struct Heap<S> {
    pub(super) table: BlockTable<S>,
    free: FreeIndex,
    pub(super) recent: Recent,
    /// First addresses of all blocks that are not in `free`, from the first search on. Programs that
    /// keep their allocations never search.
    starts: Option<BTreeMap<Addr, u32>>,
    /// How many spans are one free block, and their bytes.
    pub(super) idle: u32,
    pub(super) idle_bytes: u64,
    pub(super) next_stamp: u64,
    /// Wholly free spans, and free bytes, that it keeps at most.
    pub(super) idle_max: u32,
    pub(super) free_bytes_max: u64,
    /// Bytes of the smallest span ever added: no idle one is smaller.
    span_bytes_min: u64,
    /// Bytes of all spans.
    bytes: u64,
    /// Bytes lent to shards.
    lent: u64,
    pub(super) ledger: Ledger,
    role: Role,
    /// Memory of blocks that were not to be cached.
    leaving: Vec<Span>,
}

/// Whether a request may be served from whatever is free.
///
/// A small block cut from a large segment that is wholly free can cost another such segment, when
/// the next large request finds none. While not much memory is idle so, growing by a little is
/// cheaper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cut {
    /// Wholly free spans of more than 1/32 of the heap are left alone by requests of less than a
    /// quarter of them, unless more than a quarter of the heap is idle so.
    Sparingly,
    /// From anything.
    Freely,
}

/// What a heap is for, and with it how much free memory it keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    /// Over pinned segments; keeps so many free bytes.
    Central { free_bytes_max: u64 },
    /// Over borrowed runs; keeps some that are wholly free.
    Shard,
}

/// Wholly free runs that a shard holds at most. More than it gives back at once, as a run that
/// empties is often wanted again soon, and the way to the central heap and back is long.
const SPARE_RUNS_MAX: u32 = 8;

impl<S: PartialEq> Heap<S> {
    /// Block sizes will be multiples of `granule`, a power of two.
    pub(crate) fn new(granule: u64, role: Role) -> Self {
        let (idle_max, free_bytes_max) = match role {
            Role::Central { free_bytes_max } => (u32::MAX, free_bytes_max),
            Role::Shard => (SPARE_RUNS_MAX, u64::MAX),
        };
        Heap {
            table: BlockTable::default(),
            free: FreeIndex::new(granule),
            recent: Recent::default(),
            starts: None,
            idle: 0,
            idle_bytes: 0,
            next_stamp: 0,
            idle_max,
            free_bytes_max,
            span_bytes_min: u64::MAX,
            bytes: 0,
            lent: 0,
            ledger: Ledger::default(),
            role,
            leaving: Vec::new(),
        }
    }

    /// Bytes of all spans.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that are neither a client's nor a shard's.
    #[inline]
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free.bytes() + self.recent.bytes()
    }

    /// Bytes of the largest free block, as far as merged.
    pub(crate) fn largest_free(&self) -> u64 {
        self.free.largest()
    }

    pub(crate) fn stats(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    /// Adds memory. Its length is a multiple of the granule.
    pub(crate) fn add_span(&mut self, span: Span) {
        self.add_run(Run { span, slot: NONE });
    }

    /// Adds a borrowed run.
    pub(crate) fn add_run(&mut self, run: Run) {
        let index = self.table.insert(run.span.base, run.span.bytes);
        self.table[index].origin = run.slot;
        self.bytes += run.span.bytes;
        self.span_bytes_min = self.span_bytes_min.min(run.span.bytes);
        self.note_idle(index);
        self.shelve(index);
    }

    /// Adds memory as one block that is handed out at once and leaves when it is freed.
    pub(crate) fn add_uncached(&mut self, span: Span, requested: u64) -> Taken {
        let index = self.table.insert(span.base, span.bytes);
        self.table[index].uncached = true;
        self.bytes += span.bytes;
        self.note_start(index);
        self.hand_out(index, requested)
    }

    /// Hands out a block of at least `bytes`, a multiple of the granule.
    pub(crate) fn take(&mut self, bytes: u64, requested: u64, cut: Cut) -> Option<Taken> {
        let index = match self.recent.take(bytes) {
            Some(index) => {
                self.note_busy(index);
                index
            }
            None => self.pick_best(bytes, cut)?,
        };
        Some(self.hand_out(index, requested))
    }

    /// Lends a run of at least `bytes` to the shard of that home.
    pub(crate) fn lend(&mut self, bytes: u64, to: u32, cut: Cut) -> Option<Run> {
        // Blocks kept apart are for clients that ask for the same size again.
        let index = self.pick_best(bytes, cut)?;
        let block = &mut self.table[index];
        block.state = State::Lent { to };
        self.lent += block.bytes;
        Some(Run { span: Span { base: block.addr, bytes: block.bytes }, slot: index })
    }

    /// Takes a lent run back.
    ///
    /// # Panics
    /// If it is not lent.
    pub(crate) fn reclaim(&mut self, run: Run) {
        let block = &self.table[run.slot];
        let is_lent = matches!(block.state, State::Lent { .. }) && block.addr == run.span.base;
        assert!(is_lent, "H7: the run at {} is not lent", run.span.base);
        self.lent -= block.bytes;
        self.merge(run.slot);
    }

    /// Merges everything that was kept apart.
    pub(crate) fn consolidate(&mut self) {
        while let Some(index) = self.recent.pop() {
            self.merge(index);
        }
    }

    /// The wholly free spans, by size, then address.
    pub(crate) fn idle(&mut self) -> Vec<Idle> {
        if self.idle == 0 {
            return Vec::new();
        }
        self.consolidate();
        let free = self.free.iter_from(self.span_bytes_min);
        free.filter(|free| self.is_whole_span(free.index))
            .map(|FreeBlock { bytes, addr, index }| Idle {
                span: Span { base: addr, bytes },
                stamp: self.table[index].idle_stamp,
                index,
            })
            .collect()
    }

    /// Removes a span that is wholly free, and has been since it got that stamp.
    pub(crate) fn remove_idle(&mut self, idle: Idle) -> Option<Run> {
        self.consolidate();
        let Idle { span, stamp, index } = idle;
        let block = self.table.get(index)?;
        let is_same = block.state == State::Free && block.idle_stamp == stamp;
        if !is_same || !self.is_whole_span(index) {
            return None;
        }
        let slot = block.origin;
        self.free.remove(span.bytes, span.base);
        self.table.remove(index);
        self.bytes -= span.bytes;
        self.idle -= 1;
        self.idle_bytes -= span.bytes;
        Some(Run { span, slot })
    }

    /// Removes all wholly free spans but the `keep` smallest.
    pub(crate) fn remove_idle_beyond(&mut self, keep: usize) -> Vec<Run> {
        if self.idle as usize <= keep {
            return Vec::new();
        }
        self.idle().into_iter().skip(keep).filter_map(|idle| self.remove_idle(idle)).collect()
    }

    /// The block that holds `addr` and is not free.
    pub(crate) fn find(&mut self, addr: Addr) -> Option<Found> {
        let Heap { table, starts, .. } = self;
        let starts = starts.get_or_insert_with(|| {
            let used = table.iter().filter(|(_, block)| block.state != State::Free);
            used.map(|(index, block)| (block.addr, index)).collect()
        });
        let (&start, &index) = starts.range(..=addr).next_back()?;
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
        let taken = self.table.start(index, requested);
        self.ledger.start(taken.bytes, requested);
        taken
    }

    #[inline(always)]
    fn note_start(&mut self, index: u32) {
        if let Some(starts) = &mut self.starts {
            starts.insert(self.table[index].addr, index);
        }
    }

    #[inline(always)]
    fn forget_start(&mut self, index: u32) {
        if let Some(starts) = &mut self.starts {
            starts.remove(&self.table[index].addr);
        }
    }

    fn is_whole_span(&self, index: u32) -> bool {
        self.table[index].is_whole_span()
    }

    /// Counts a block that has become free, if it is a whole span.
    fn note_idle(&mut self, index: u32) {
        let block = &mut self.table[index];
        if block.is_whole_span() {
            self.idle += 1;
            self.idle_bytes += block.bytes;
            block.idle_stamp = self.next_stamp;
            self.next_stamp += 1;
        }
    }

    /// Takes [`note_idle`](Heap::note_idle) back.
    fn note_busy(&mut self, index: u32) {
        if self.is_whole_span(index) {
            self.idle -= 1;
            self.idle_bytes -= self.table[index].bytes;
        }
    }

    /// Forgets a block that is not to be cached.
    #[cold]
    fn let_go(&mut self, index: u32) -> After {
        let block = &mut self.table[index];
        let span = Span { base: block.addr, bytes: block.bytes };
        block.state = State::Free;
        self.forget_start(index);
        self.table.remove(index);
        self.bytes -= span.bytes;
        self.leaving.push(span);
        After::Unpin
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

    fn take_leaving(&mut self) -> Vec<Span> {
        std::mem::take(&mut self.leaving)
    }

    fn put_back(&mut self, index: u32) -> After {
        let block = &mut self.table[index];
        if block.uncached {
            return self.let_go(index);
        }
        block.state = State::Recent;
        let bytes = block.bytes;
        self.note_idle(index);
        if let Some(oldest) = self.recent.push(bytes, index) {
            self.merge(oldest);
        }
        if self.idle > self.idle_max {
            After::Surplus
        } else if self.free_bytes() > self.free_bytes_max {
            After::Excess
        } else {
            After::Nothing
        }
    }
}
