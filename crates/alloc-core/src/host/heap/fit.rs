//! Best fit: which free block serves a request, how it is cut, and how blocks merge again.

use super::{Cut, Heap, Role};
use crate::host::block::{NONE, State};
use crate::host::free_index::FreeBlock;
use crate::host::recent::slack;

impl<S: PartialEq> Heap<S> {
    /// Finds the best free block for `bytes` and cuts it to size. It is in no list afterwards.
    pub(super) fn pick_best(&mut self, bytes: u64, cut: Cut) -> Option<u32> {
        let FreeBlock { index, .. } = match cut {
            Cut::Sparingly if self.spares_spans() => self.take_best_unspared(bytes)?,
            _ => self.free.take_best(bytes)?,
        };
        self.note_busy(index);
        self.note_start(index);
        self.trim(index, bytes);
        Some(index)
    }

    /// Shards hold only what they need at the moment, and spare nothing.
    fn spares_spans(&self) -> bool {
        self.role != Role::Shard && self.idle > 0 && self.idle_bytes <= self.bytes / 4
    }

    fn take_best_unspared(&mut self, bytes: u64) -> Option<FreeBlock> {
        // Fewer than 32 spans are so large that they are passed over.
        let spared = |free: &FreeBlock| {
            let large = free.bytes > self.bytes / 32 && bytes < free.bytes / 4;
            large && self.is_whole_span(free.index)
        };
        let best = self.free.iter_from(bytes).find(|free| !spared(free))?;
        self.free.remove(best.bytes, best.addr);
        Some(best)
    }

    /// Splits off what a block has beyond `bytes`, if it is worth a block.
    fn trim(&mut self, index: u32, bytes: u64) {
        let block = &self.table[index];
        let (addr, excess, next) = (block.addr, block.bytes - bytes, block.next);
        let origin = block.origin;
        if excess <= slack(bytes) {
            return;
        }
        let rest = self.table.insert(addr + bytes, excess);
        let block = &mut self.table[rest];
        (block.prev, block.next, block.origin) = (index, next, origin);
        if next != NONE {
            self.table[next].prev = rest;
        }
        let block = &mut self.table[index];
        block.bytes = bytes;
        block.next = rest;
        self.free.insert(FreeBlock { bytes: excess, addr: addr + bytes, index: rest });
    }

    /// Joins a block with its free neighbours and makes the result available.
    #[inline(never)]
    pub(super) fn merge(&mut self, index: u32) {
        self.forget_start(index);
        let was_idle = self.table[index].state == State::Recent && self.is_whole_span(index);
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
        if !was_idle {
            self.note_idle(index);
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
    pub(super) fn shelve(&mut self, index: u32) {
        let FreeBlock { bytes, addr, .. } = self.free_block(index);
        self.free.insert(FreeBlock { bytes, addr, index });
    }

    fn free_block(&self, index: u32) -> FreeBlock {
        let block = &self.table[index];
        FreeBlock { bytes: block.bytes, addr: block.addr, index }
    }
}
