//! Policy `pytorch`: 64 size classes, each with a last-in-first-out list of free blocks.
//!
//! Every block is a segment of its own (or a piece of the reserve). No block is ever split or
//! merged, and a request looks into its own class only.

use super::block::{BlockId, BlockTable, State};
use super::check::{Violation, ensure};
use super::home::{After, Home, Span, Taken};
use super::ledger::Ledger;
use super::stats::{BUCKETS, bucket_of};
use crate::padded::Padded;
use crate::sync::{RwLock, ShortGuard, ShortLock};
use crate::units::Addr;
use std::collections::BTreeMap;

/// One size class.
#[derive(Debug)]
pub(crate) struct Bucket<S> {
    table: BlockTable<S>,
    /// Slots of the free blocks, the youngest last.
    free: Vec<u32>,
    ledger: Ledger,
    /// Blocks above this size leave when freed.
    cached_max: u64,
    leaving: Vec<Span>,
}

impl<S: PartialEq> Bucket<S> {
    fn new(cached_max: u64) -> Self {
        Bucket {
            table: BlockTable::default(),
            free: Vec::new(),
            ledger: Ledger::default(),
            cached_max,
            leaving: Vec::new(),
        }
    }

    /// The youngest free block that is large enough. All are, unless sizes above the rounding
    /// threshold share the class.
    fn take(&mut self, bytes: u64, requested: u64) -> Option<Taken> {
        let fits = |&index: &u32| self.table[index].bytes >= bytes;
        let at = self.free.iter().rposition(fits)?;
        let index = self.free.remove(at);
        Some(self.hand_out(index, requested))
    }

    fn hand_out(&mut self, index: u32, requested: u64) -> Taken {
        let taken = self.table.start(index, requested);
        self.ledger.start(taken.bytes, requested);
        taken
    }
}

impl<S: PartialEq> Home<S> for Bucket<S> {
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
        block.state = State::Free;
        let span = Span { base: block.addr, bytes: block.bytes };
        if span.bytes > self.cached_max {
            self.table.remove(index);
            self.leaving.push(span);
            return After::Unpin;
        }
        self.free.push(index);
        After::Nothing
    }
}

#[derive(Debug)]
pub(crate) struct ClassStore<S> {
    buckets: Box<[Padded<ShortLock<Bucket<S>>>]>,
    /// Where the block that starts at an address is: its class and slot. Changes only when memory
    /// comes or goes.
    by_addr: RwLock<BTreeMap<Addr, (u32, u32)>>,
}

impl<S: PartialEq> ClassStore<S> {
    /// Freed blocks above `cached_max` bytes leave.
    pub(crate) fn new(cached_max: Option<u64>) -> Self {
        let bucket = || Bucket::new(cached_max.unwrap_or(u64::MAX));
        ClassStore {
            buckets: (0..BUCKETS).map(|_| Padded(ShortLock::new(bucket()))).collect(),
            by_addr: RwLock::new(BTreeMap::new()),
        }
    }

    pub(crate) fn bucket(&self, home: u32) -> ShortGuard<'_, Bucket<S>> {
        self.buckets[home as usize].lock()
    }

    /// A free block of the class of `bytes` (a rounded size).
    pub(crate) fn take(&self, bytes: u64, requested: u64) -> Option<(u32, Taken)> {
        let home = bucket_of(bytes) as u32;
        let taken = self.bucket(home).take(bytes, requested)?;
        Some((home, taken))
    }

    /// Adds new memory as a block, handed out at once.
    pub(crate) fn add(&self, span: Span, requested: u64) -> (u32, Taken) {
        let home = bucket_of(span.bytes) as u32;
        let mut bucket = self.bucket(home);
        let index = bucket.table.insert(span.base, span.bytes);
        self.by_addr.write().insert(span.base, (home, index));
        (home, bucket.hand_out(index, requested))
    }

    /// Adds memory that could not be given back as a free block.
    pub(crate) fn restore(&self, span: Span) {
        let home = bucket_of(span.bytes) as u32;
        let mut bucket = self.bucket(home);
        let index = bucket.table.insert(span.base, span.bytes);
        self.by_addr.write().insert(span.base, (home, index));
        bucket.free.push(index);
    }

    /// Forgets the address of a block that left.
    pub(crate) fn forget(&self, base: Addr) {
        self.by_addr.write().remove(&base);
    }

    /// Takes all free blocks of one class out.
    pub(crate) fn drain(&self, home: u32) -> Vec<Span> {
        let mut bucket = self.bucket(home);
        let mut spans = Vec::with_capacity(bucket.free.len());
        let mut by_addr = self.by_addr.write();
        while let Some(index) = bucket.free.pop() {
            let block = &bucket.table[index];
            let span = Span { base: block.addr, bytes: block.bytes };
            bucket.table.remove(index);
            by_addr.remove(&span.base);
            spans.push(span);
        }
        spans
    }

    /// The live allocation that starts at `addr`.
    pub(crate) fn find(&self, addr: Addr) -> Option<(u32, BlockId)> {
        let (home, index) = *self.by_addr.read().get(&addr)?;
        let bucket = self.bucket(home);
        // The slot may have been reused since the map was read.
        let id = bucket.table.live_id(index)?;
        (bucket.table[index].addr == addr).then_some((home, id))
    }

    /// Changes the size above which freed blocks leave.
    pub(crate) fn set_cached_max(&self, cached_max: Option<u64>) {
        for home in 0..BUCKETS as u32 {
            self.bucket(home).cached_max = cached_max.unwrap_or(u64::MAX);
        }
    }

    pub(crate) fn each_ledger(&self, mut visit: impl FnMut(&mut Ledger)) {
        for home in 0..BUCKETS as u32 {
            visit(&mut self.bucket(home).ledger);
        }
    }

    /// Bytes of free blocks, and of the largest one.
    pub(crate) fn free_bytes(&self) -> (u64, u64) {
        let mut total = 0;
        let mut largest = 0;
        for home in 0..BUCKETS as u32 {
            let bucket = self.bucket(home);
            for &index in &bucket.free {
                let bytes = bucket.table[index].bytes;
                total += bytes;
                largest = largest.max(bytes);
            }
        }
        (total, largest)
    }

    /// Whether no memory is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_addr.read().is_empty()
    }

    /// Recomputes everything from the blocks. Appends all blocks, and the draining ones by class.
    pub(crate) fn check(
        &self,
        spans: &mut Vec<Span>,
        draining: &mut Vec<(u32, BlockId, u32)>,
    ) -> Result<(), Violation> {
        let mut blocks = 0;
        for home in 0..BUCKETS as u32 {
            let bucket = self.bucket(home);
            blocks += self.check_bucket(home, &bucket, spans, draining)?;
        }
        let known = self.by_addr.read().len();
        ensure(known == blocks, "H4", || format!("{known} addresses for {blocks} blocks"))
    }

    fn check_bucket(
        &self,
        home: u32,
        bucket: &Bucket<S>,
        spans: &mut Vec<Span>,
        draining: &mut Vec<(u32, BlockId, u32)>,
    ) -> Result<usize, Violation> {
        let (mut blocks, mut free) = (0, 0);
        let mut sums = [0_u64; 4];
        for (index, block) in bucket.table.iter() {
            blocks += 1;
            ensure(bucket_of(block.bytes) as u32 == home, "H10", || {
                format!("a block of {} bytes is in class {home}", block.bytes)
            })?;
            let known = self.by_addr.read().get(&block.addr) == Some(&(home, index));
            ensure(known, "H4", || format!("the block at {} cannot be found", block.addr))?;
            ensure(block.state == State::Live || block.uses.is_empty(), "H9", || {
                format!("the block at {} has uses but no client", block.addr)
            })?;
            spans.push(Span { base: block.addr, bytes: block.bytes });
            if block.state == State::Free {
                free += 1;
                let listed = bucket.free.contains(&index);
                ensure(listed, "H4", || format!("the free block at {} is lost", block.addr))?;
                continue;
            }
            sums[0] += 1;
            sums[1] += block.bytes;
            sums[2] += block.requested;
            if let State::Draining { pending } = block.state {
                sums[3] += block.bytes;
                let id = BlockId { index, generation: block.generation };
                draining.push((home, id, pending));
            }
        }
        let [requests, active, requested] = bucket.ledger.active();
        let kept = [requests, active, requested, bucket.ledger.draining_bytes];
        ensure(free == bucket.free.len(), "H4", || format!("class {home} lists blocks twice"))?;
        ensure(kept == sums, "H6", || {
            format!("class {home} keeps {kept:?}, its blocks say {sums:?}")
        })?;
        Ok(blocks)
    }
}
