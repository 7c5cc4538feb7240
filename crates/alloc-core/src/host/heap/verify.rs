//! What a heap keeps, recomputed from its blocks.

use super::super::block::{Block, BlockId, NONE, State};
use super::super::check::{Violation, ensure};
use super::super::home::Span;
use super::Heap;

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
            ensure(block.bytes >= self.span_bytes_min || block.next != NONE, "H1", || {
                format!("the span at {} is smaller than all", block.addr)
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
        let [requests, active, requested] = self.ledger.active();
        let recent: Vec<_> = self.recent.iter().collect();
        let same = |name: &str, kept: u64, counted: u64| {
            ensure(kept == counted, "H6", || format!("{name} is {kept}, blocks say {counted}"))
        };
        same("bytes of spans", self.bytes, total)?;
        same("number of blocks in spans", self.table.iter().count() as u64, seen.blocks)?;
        same("idle spans", self.idle.into(), seen.idle)?;
        same("bytes of idle spans", self.idle_bytes, seen.idle_bytes)?;
        same("lent bytes", self.lent, seen.lent)?;
        same("active requests", requests, seen.active)?;
        same("active bytes", active, seen.active_bytes)?;
        same("requested bytes", requested, seen.requested)?;
        same("draining bytes", self.ledger.draining_bytes, seen.draining)?;
        let starts = self.starts.as_ref().map_or(seen.started, |starts| starts.len() as u64);
        same("starts", starts, seen.started)?;
        same("free bytes in the index", self.free.bytes(), seen.free)?;
        same("blocks kept apart", recent.len() as u64, seen.recent)?;
        let recent_bytes = recent.iter().map(|(bytes, _)| bytes).sum();
        same("bytes kept apart", self.recent.bytes(), recent_bytes)?;
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
    idle_bytes: u64,
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
        block: &Block<S>,
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
                self.count_idle(block, heap.is_whole_span(index));
                return Ok(());
            }
            State::Recent => {
                self.recent += 1;
                self.count_idle(block, heap.is_whole_span(index));
            }
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
        let starts = heap.starts.as_ref();
        let found = starts.is_none_or(|starts| starts.get(&block.addr) == Some(&index));
        ensure(found, "H4", || {
            format!("the block at {} cannot be found by its address", block.addr)
        })
    }

    fn count_idle<S>(&mut self, block: &Block<S>, is_whole_span: bool) {
        if is_whole_span {
            self.idle += 1;
            self.idle_bytes += block.bytes;
        }
    }

    fn free_blocks(&self) -> Vec<u32> {
        let mut blocks = self.free_indices.clone();
        blocks.sort_unstable();
        blocks
    }
}
