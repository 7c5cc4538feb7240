//! The shortest way: a block of a size that was freed just now serves the next request of that size.
//!
//! Most requests of most programs go this way, so it is kept free of calls: a call, even one that is
//! never made, costs a dozen stores, and the lock waits for all of them. Whatever is not as expected
//! is left to the usual way, which gets the heap locked as it is.

use super::allocation::{HostAllocation, Place};
use super::allocator::HostAllocator;
use super::backend::HostBackend;
use super::block::{BlockId, State};
use super::engine::{Ask, Result};
use super::error::HostFreeError;
use super::heap::{Cut, Heap};
use super::home::{After, Freed, Home, Taken};
use super::pools::DEFAULT;
use super::store::Store;
use crate::sync::ShortGuard;

impl<S: PartialEq> Heap<S> {
    /// What [`take`](Heap::take) does if the block freed last fits, and requests of the same size come
    /// in a row; else nothing.
    #[inline(always)]
    fn take_again(&mut self, bytes: u64, requested: u64) -> Option<Taken> {
        let (size, index) = self.recent.youngest(bytes)?;
        if !self.ledger.is_run_of(size, requested) {
            return None;
        }
        let block = self.table.get_mut(index)?;
        self.recent.pop();
        if block.is_whole_span() {
            self.idle -= 1;
            self.idle_bytes -= size;
        }
        self.ledger.start_again();
        Some(block.start(index, requested))
    }

    /// What [`free_unused`](Home::free_unused) does if nothing else is to be done after it; else
    /// nothing.
    #[inline(always)]
    fn free_again(&mut self, id: BlockId) -> bool {
        let free = self.free_bytes();
        let Some(block) = self.table.live(id) else { return false };
        let bytes = block.bytes;
        if !block.uses.is_empty()
            || block.uncached
            || self.recent.is_full()
            || !self.ledger.is_run_of(bytes, block.requested)
            || self.idle >= self.idle_max
            || free + bytes > self.free_bytes_max
        {
            return false;
        }
        self.ledger.end_again();
        block.state = State::Recent;
        if block.is_whole_span() {
            self.idle += 1;
            self.idle_bytes += bytes;
            block.idle_stamp = self.next_stamp;
            self.next_stamp += 1;
        }
        self.recent.add(bytes, id.index);
        true
    }
}

impl<B: HostBackend> HostAllocator<B> {
    /// See [`allocate_on`](HostAllocator::allocate_on).
    #[inline(always)]
    pub(super) fn hit(&self, bytes: u64, place: Place) -> Result<HostAllocation, B> {
        let engine = self.engine();
        let pool = engine.pools.default_pool();
        if let Store::Slabs(slabs) = &pool.store
            && engine.options.is_cached(bytes)
            && bytes > 0
            && place == Place::Anywhere
        {
            let node = engine.any_node;
            let ask = Ask { pool, node, bytes };
            let (home, rounded) = slabs.at_hand(node, bytes);
            if let Some(mut heap) = slabs.try_enter(home, bytes) {
                return match heap.take_again(rounded, bytes) {
                    Some(taken) => Ok(engine.wrap(ask, (home, taken))),
                    None => self.serve_from(ask, rounded, home, heap),
                };
            }
        }
        self.serve(bytes, place, pool)
    }

    /// Serves a request from a heap, or from elsewhere.
    #[inline(never)]
    fn serve_from(
        &self,
        ask: Ask<'_, B>,
        rounded: u64,
        home: u32,
        mut heap: ShortGuard<'_, Heap<super::engine::StreamOf<B>>>,
    ) -> Result<HostAllocation, B> {
        match heap.take(rounded, ask.bytes, Cut::Sparingly) {
            Some(taken) => Ok(self.engine().wrap(ask, (home, taken))),
            None => {
                drop(heap);
                self.serve_from_afar(ask)
            }
        }
    }

    /// See [`free`](HostAllocator::free).
    #[inline(always)]
    pub(super) fn free_hit(
        &self,
        allocation: HostAllocation,
    ) -> std::result::Result<(), HostFreeError<B::Error>> {
        let engine = self.engine();
        let context = &allocation.context;
        if context.owner == engine.owner
            && context.block.pool == DEFAULT
            && let Store::Slabs(slabs) = &engine.pools.default_pool().store
            && let Some(mut heap) = slabs.try_heap(context.block.home)
        {
            return match heap.free_again(context.block.id) {
                true => Ok(()),
                false => self.free_in(allocation, heap),
            };
        }
        self.finish_free(allocation, Freed::Used)
    }

    /// Frees a block of a heap.
    #[inline(never)]
    fn free_in(
        &self,
        allocation: HostAllocation,
        mut heap: ShortGuard<'_, Heap<super::engine::StreamOf<B>>>,
    ) -> std::result::Result<(), HostFreeError<B::Error>> {
        let freed = heap.free_unused(allocation.context.block.id);
        drop(heap);
        match freed {
            Freed::Done(After::Nothing) => Ok(()),
            freed => self.finish_free(allocation, freed),
        }
    }
}
