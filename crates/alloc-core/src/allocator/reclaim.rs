//! Giving cached memory back to the backend. Runs under the growth lock of the device.

use super::pools::{OwnSource, Token};
use super::{AllocResult, HeapCell, Heaps, Paging, Shared};
use crate::backend::{Backend, Refused, Stream};
use crate::block::{Block, BlockId, BlockIdx, BlockState};
use crate::config::Policy;
use crate::directory::Owner;
use crate::error::{AllocError, BackendOp};
use crate::events::Head;
use crate::free_index::FreeKey;
use crate::heap::{Heap, PageRun, Request};
use crate::lane::Lane;
use crate::pager::Pager;
use crate::size_class::SizeClass;
use crate::trace::TraceBuffer;
use crate::units::{Addr, DeviceId, PoolId, StreamId};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A free block seen under a heap lock that has been given back since.
struct Candidate<B: Backend> {
    cell: Arc<HeapCell<B>>,
    index: BlockIdx,
    /// Names the block as it was seen.
    id: BlockId,
    key: FreeKey,
    /// Searches of its pool since it became free.
    age: u64,
    split: bool,
    expandable: bool,
}

impl<B: Backend> Shared<B> {
    /// Waits for everything pending on `device`, then gives all its cached memory back.
    pub(super) fn empty_cache(
        &self,
        device: DeviceId,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        let _growth = self.devices[device.index()].lock_growth();
        if self.captures_under_way() {
            return Ok(());
        }
        self.wait_for_events(device, trace)?;
        self.release_cached(device, trace)
    }

    /// Waits for every pending event of the blocks of a device and frees those blocks.
    pub(super) fn wait_for_events(
        &self,
        device: DeviceId,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        self.devices[device.index()].counters.lock().num_sync_all_streams += 1;
        self.wait_while(device, |_| true, trace)
    }

    /// Waits for the events of a device, stream by stream while `wanted` says so, and frees their
    /// blocks.
    pub(super) fn wait_while(
        &self,
        device: DeviceId,
        wanted: impl Fn(StreamId) -> bool,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        let events = &self.devices[device.index()].events;
        self.settle_deferred(device, trace);
        for stream in events.streams() {
            while wanted(stream)
                && let Some(head) = events.wait_for_head(stream)
            {
                self.wait_for(head, trace)?;
            }
        }
        Ok(())
    }

    /// Waits for one event and frees its block, if that was the last one that it waits for.
    pub(super) fn wait_for(
        &self,
        head: Head<'_, B>,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        if let Err(source) = self.backend.wait(&head.entry().event) {
            return Err(AllocError::Backend { op: BackendOp::Wait, source });
        }
        self.settle(head, trace);
        Ok(())
    }

    /// Gives all cached memory of the default pool back, then that of the pools that nobody refers
    /// to. The default pool's large class goes first; in each class the segments obtained whole go
    /// first, by stream, size and address (spec §2.10).
    pub(super) fn release_cached(
        &self,
        device: DeviceId,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        self.tidy(device, &None, trace);
        for class in [SizeClass::Large, SizeClass::Small] {
            self.release_class(device, PoolId::DEFAULT, class, trace)?;
        }
        self.release_unreferenced(device, trace)
    }

    /// Makes what `source` got ready to be given back, as far as that was put off.
    pub(super) fn tidy(&self, device: DeviceId, source: &OwnSource<B>, trace: &mut TraceBuffer) {
        if let Some(paging) = self.paging_of(source)
            && let Some(_paging) = self.devices[device.index()].begin_paging()
        {
            paging.pager().tidy(device);
            self.devices[device.index()].pace.forget_extra();
            if let Paging::Handles(store) = paging {
                self.reunite_all(&**store, device, source, trace);
            }
        }
    }

    pub(super) fn release_class(
        &self,
        device: DeviceId,
        pool: PoolId,
        class: SizeClass,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        let free = self.free_blocks(device, pool, class);
        for block in free.iter().filter(|block| !block.expandable && !block.split) {
            self.release_whole(block, trace)?;
        }
        // All heaps of a pool have one source.
        let source = free.first().and_then(|block| block.cell.owner().1);
        let Some(paging) = self.paging_of(&source) else { return Ok(()) };
        let Some(_paging) = self.devices[device.index()].begin_paging() else { return Ok(()) };
        for block in free.iter().filter(|block| block.expandable) {
            self.release_pages(paging, block, trace)?;
        }
        Ok(())
    }

    /// All free blocks of one class of a pool, by stream, size and address.
    fn free_blocks(&self, device: DeviceId, pool: PoolId, class: SizeClass) -> Vec<Candidate<B>> {
        let mut found = Vec::new();
        for cell in self.devices[device.index()].heaps_of(pool) {
            let state = cell.lock();
            let heap = &state.body.heap;
            let searches = heap.pool.searches(class);
            let lanes = Lane::of(class).iter().map(|lane| &heap.lanes[lane.index()]);
            for (_, index) in lanes.flat_map(|lane| lane.free.iter()) {
                let block = &heap.blocks[index];
                found.push(Candidate {
                    cell: Arc::clone(&cell),
                    index,
                    id: heap.blocks.id(index),
                    key: block.key(),
                    age: searches - block.free_since,
                    split: block.is_split(),
                    expandable: block.expandable,
                });
            }
        }
        found
    }

    /// Gives one cached segment back, unless it was taken meanwhile. Returns the bytes freed.
    fn release_whole(&self, block: &Candidate<B>, trace: &mut TraceBuffer) -> AllocResult<u64, B> {
        let cell = &*block.cell;
        let Some(token) = self.take_segment(block) else { return Ok(0) };
        let (base, bytes) = (token.base(), token.bytes());
        let device = &self.devices[cell.device.index()];
        match self.release_segment(cell, token) {
            Ok(()) => {
                device.reserved.fetch_sub(bytes, Ordering::Relaxed);
                device.counters.lock().num_device_free += 1;
                self.edit(cell, trace, |body, ledger| body.heap.forget_whole(block.index, ledger));
                Ok(bytes)
            }
            Err(Refused { value, error }) => {
                let mut state = cell.lock();
                let segment = state.body.heap.blocks[block.index].segment;
                let owner = Owner { heap: cell.index, segment };
                self.directory.register(base, bytes, owner);
                state.body.tokens.insert(segment, value);
                state.body.heap.restore_free(block.index);
                error.map_or(Ok(0), Err)
            }
        }
    }

    /// Takes a cached segment out of its heap. From here on nobody finds its address, so the backend
    /// may hand it out again the moment it has it back.
    fn take_segment(&self, block: &Candidate<B>) -> Option<Token<B>> {
        let mut state = block.cell.lock();
        let body = &mut state.body;
        let current = unchanged(&body.heap, block).filter(|current| !current.is_split())?;
        let segment = current.segment;
        let token = body.tokens.remove(&segment)?;
        body.heap.remove_free(block.index);
        self.directory.unregister(token.base(), token.bytes());
        Some(token)
    }

    /// Unmaps the whole pages of a cached block of an expandable segment, after waiting for its
    /// stream: unmapping, unlike cudaFree, does not wait by itself.
    fn release_pages(
        &self,
        paging: &Paging<B>,
        block: &Candidate<B>,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        let (cell, pager) = (&*block.cell, paging.pager());
        let Some((run, base)) = self.take_pages(pager, block) else { return Ok(()) };
        let quiet = self.synchronize(&cell.stream);
        if !matches!(quiet, Ok(true)) {
            self.directory_register(cell, &run, run.bytes);
            cell.lock().body.heap.restore_free(block.index);
            return quiet.map(drop);
        }
        let unmapped = pager.unmap(base, run.addr, run.bytes);
        if unmapped.bytes < run.bytes {
            let rest = PageRun {
                addr: run.addr + unmapped.bytes,
                bytes: run.bytes - unmapped.bytes,
                ..run
            };
            self.directory_register(cell, &rest, rest.bytes);
        }
        if unmapped.bytes == 0 {
            cell.lock().body.heap.restore_free(block.index);
        } else {
            self.book_unmapped(paging, block, PageRun { bytes: unmapped.bytes, ..run }, trace)?;
        }
        match unmapped.error {
            None => Ok(()),
            Some(error) => Err(AllocError::Backend { op: error.op, source: error.source }),
        }
    }

    fn directory_register(&self, cell: &HeapCell<B>, run: &PageRun, bytes: u64) {
        let owner = Owner { heap: cell.index, segment: run.segment };
        self.directory.register(run.addr, bytes, owner);
    }

    /// Takes a cached block with whole pages in it out of the free index.
    fn take_pages(
        &self,
        pager: &dyn Pager<B::Error>,
        block: &Candidate<B>,
    ) -> Option<(PageRun, Addr)> {
        let mut state = block.cell.lock();
        let heap = &mut state.body.heap;
        unchanged(heap, block)?;
        let run = heap.plan_unmap(block.index)?;
        let base = heap.segments[run.segment].base;
        let (addr, bytes) = pager.whole_pages(base, run.addr, run.bytes)?;
        let run = PageRun { addr, bytes, ..run };
        heap.remove_free(block.index);
        self.directory.unregister(run.addr, run.bytes);
        Some((run, base))
    }

    fn book_unmapped(
        &self,
        paging: &Paging<B>,
        block: &Candidate<B>,
        run: PageRun,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        let cell = &*block.cell;
        let device = &self.devices[cell.device.index()];
        device.reserved.fetch_sub(run.bytes, Ordering::Relaxed);
        device.counters.lock().num_device_free += 1;
        let (hole, empty) = self.edit(cell, trace, |body, ledger| {
            let hole = body.heap.commit_unmap(block.index, &run, ledger);
            (hole, !body.heap.blocks[hole].is_split())
        });
        if !empty || is_claimed(paging) {
            return Ok(());
        }
        // Nothing is left of the segment but address space. Holes change under the growth lock only,
        // so it is still one hole when the address space is gone.
        let base = cell.lock().body.heap.segments[run.segment].base;
        paging
            .pager()
            .unreserve(base)
            .map_err(|error| AllocError::Backend { op: error.op, source: error.source })?;
        cell.lock().body.heap.forget_reservation(hole);
        Ok(())
    }

    /// Gives back the reservations of a heap in which nothing is its own: memory that was mapped there
    /// has gone elsewhere, or none ever was.
    pub(super) fn release_empty_reservations(&self, cell: &HeapCell<B>) -> AllocResult<(), B> {
        let source = cell.owner().1;
        let Some(paging) = self.paging_of(&source) else { return Ok(()) };
        let device = &self.devices[cell.device.index()];
        let empty = || {
            let state = cell.lock();
            let heap = &state.body.heap;
            let hole = |head: BlockIdx| {
                let block = &heap.blocks[head];
                block.state == BlockState::Unmapped && !block.is_split()
            };
            let mut segments = heap.segments.iter();
            segments.find(|(_, s)| hole(s.head)).map(|(_, s)| (s.base, s.head))
        };
        if is_claimed(paging) || empty().is_none() {
            return Ok(());
        }
        let Some(_paging) = device.begin_paging() else { return Ok(()) };
        // Views may be left of what was mapped there, and work that uses them.
        if matches!(paging, Paging::Handles(_)) && !self.synchronize(&cell.stream)? {
            return Ok(());
        }
        while let Some((base, hole)) = empty() {
            paging
                .pager()
                .unreserve(base)
                .map_err(|error| AllocError::Backend { op: error.op, source: error.source })?;
            cell.lock().body.heap.forget_reservation(hole);
        }
        Ok(())
    }

    /// Waits for everything queued on a stream so far. Returns whether it could: not on a capturing
    /// stream.
    pub(super) fn synchronize(&self, stream: &B::Stream) -> AllocResult<bool, B> {
        let Some(event) = self.record(stream)? else { return Ok(false) };
        let waited = self.backend.wait(&event);
        waited.map(|()| true).map_err(|source| AllocError::Backend { op: BackendOp::Wait, source })
    }

    /// With `max_split_size` set: gives back the one smallest oversize block that makes room, or
    /// several, largest first (spec §2.10). Returns whether enough was freed.
    pub(super) fn release_oversize(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        trace: &mut TraceBuffer,
    ) -> AllocResult<bool, B> {
        let Some(max_split) = cell.lock().body.heap.rules.max_split_bytes else {
            return Ok(false);
        };
        let pool = cell.pool();
        if pool.is_pinned() {
            return Ok(false);
        }
        let wanted = request.rounded.max(max_split);
        let free: Vec<_> = self
            .free_blocks(cell.device, pool.id(), request.class)
            .into_iter()
            .filter(|block| block.cell.index == cell.index)
            .collect();
        let enough = free.partition_point(|block| block.key.bytes < wanted);
        if let Some(block) = free.get(enough).filter(|block| !block.expandable) {
            return Ok(self.release_whole(block, trace)? > 0);
        }
        let mut freed = 0;
        let several = free[..enough].iter().rev().take_while(|block| block.key.bytes >= max_split);
        for block in several.filter(|block| !block.expandable && !block.split) {
            if freed >= wanted {
                break;
            }
            freed += self.release_whole(block, trace)?;
        }
        Ok(freed >= wanted)
    }

    /// With `garbage_collection_threshold` set: gives back cached segments of the default pool's
    /// large class that are at least of average age, until the device is below the threshold (spec
    /// §2.9). Returns whether anything was freed.
    pub(super) fn collect_garbage(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        trace: &mut TraceBuffer,
    ) -> AllocResult<bool, B> {
        let Some(excess) = self.garbage_excess(cell, request) else { return Ok(false) };
        let mut candidates = self.free_blocks(cell.device, PoolId::DEFAULT, SizeClass::Large);
        candidates.retain(|block| !block.split);
        let mut count = candidates.len() as u64;
        let mut total_age: f64 = candidates.iter().map(|block| block.age as f64).sum();
        candidates.retain(|block| !block.expandable);
        let mut freed = 0;
        let mut progress = true;
        while freed < excess && progress && count > 0 {
            let average = total_age / count as f64;
            progress = false;
            let mut kept = Vec::new();
            for block in candidates {
                if (block.age as f64) < average {
                    kept.push(block);
                    continue;
                }
                freed += self.release_whole(&block, trace)?;
                total_age -= block.age as f64;
                count -= 1;
                progress = true;
            }
            candidates = kept;
        }
        Ok(freed > 0)
    }

    /// Bytes above the collection threshold, if any.
    fn garbage_excess(&self, cell: &HeapCell<B>, request: &Request) -> Option<u64> {
        let device = &self.devices[cell.device.index()];
        let fraction = self.settings.lock().gc_threshold?;
        let (whole, reserved) = match (device.limit(), self.policy) {
            (Some(limit), Policy::Pytorch) => (limit, device.reserved()),
            (None, Policy::Pytorch) => return None,
            // Without a limit the threshold is a fraction of the device, and what is about to be
            // obtained counts.
            (limit, Policy::Ours) => {
                let growth = self.segment_bytes(cell, request);
                (limit.unwrap_or(device.total), device.reserved() + growth)
            }
        };
        let threshold = (fraction * whole as f64) as u64;
        reserved.checked_sub(threshold).filter(|excess| *excess > 0)
    }
}

/// Whether a range is being made in some reservation.
fn is_claimed<B: Backend>(paging: &Paging<B>) -> bool {
    match paging {
        Paging::Handles(store) => store.layout().is_pinned(),
        Paging::Pages(_) => false,
    }
}

/// The listed block, if it is still as it was.
fn unchanged<'a, B: Backend>(heap: &'a Heap, seen: &Candidate<B>) -> Option<&'a Block> {
    let block = &heap.blocks[heap.blocks.resolve(seen.id)?];
    let same = block.state == BlockState::Free && block.key() == seen.key;
    same.then_some(block)
}

impl<B: Backend> Drop for Shared<B> {
    /// Best effort and quiet: a backend that is gone has taken everything with it. Memory under work
    /// that cannot be waited for is left with the backend, not taken from under it.
    fn drop(&mut self) {
        if self.wait_for_all_work() {
            self.release_tokens();
        } else {
            std::mem::forget(self.paging.take());
            self.devices.iter().for_each(|device| device.pools.forget());
        }
        // A device and its heaps hold each other.
        for device in &self.devices {
            *device.heaps.write() = Heaps::new();
        }
    }
}

impl<B: Backend> Shared<B> {
    fn release_tokens(&self) {
        for cell in self.heaps.iter() {
            let tokens = std::mem::take(&mut cell.lock().body.tokens);
            let mut tokens: Vec<_> = tokens.into_values().collect();
            tokens.sort_by_key(Token::base);
            for token in tokens {
                let _ = self.give_segment(cell, token);
            }
        }
    }

    /// Waits for all work that may use any block: what is pending, what runs on the streams of
    /// the heaps, what was recorded for blocks that are still live. Returns whether none is left.
    fn wait_for_all_work(&self) -> bool {
        let mut done = true;
        let mut note = |result: AllocResult<bool, B>| {
            done &= result.unwrap_or_else(|error| error.is_device_lost());
        };
        for index in 0..self.devices.len() {
            let device = DeviceId::new(index as u16);
            let waited = self.wait_for_events(device, &mut TraceBuffer::new(false));
            note(waited.map(|()| self.devices[index].events.is_empty()));
        }
        for cell in self.heaps.iter() {
            note(self.synchronize(&cell.stream));
            let uses = std::mem::take(&mut cell.lock().body.uses);
            let uses = uses.into_values().flatten();
            let mut used: Vec<_> = uses.map(|used| used.stream).collect();
            used.sort_by_key(Stream::id);
            used.dedup_by_key(|stream| stream.id());
            for stream in used {
                note(self.synchronize(&stream));
            }
        }
        done
    }
}
