//! Giving cached memory back to the backend. Runs under the growth lock of the device.

use super::{AllocResult, HeapCell, Shared};
use crate::backend::{Backend, Refused, Segment};
use crate::block::{Block, BlockId, BlockState};
use crate::config::Policy;
use crate::directory::Owner;
use crate::error::{AllocError, BackendOp};
use crate::heap::{PageRun, Request};
use crate::pager::Pager;
use crate::size_class::SizeClass;
use crate::trace::TraceBuffer;
use crate::units::{Addr, DeviceId, PoolId};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A free block seen under a heap lock that has been given back since.
struct Candidate<B: Backend> {
    cell: Arc<HeapCell<B>>,
    id: BlockId,
    addr: Addr,
    bytes: u64,
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
        let _growth = self.devices[device.index()].growth.lock();
        self.wait_for_events(device, trace)?;
        self.release_cached(device, trace)
    }

    /// Waits for every pending event of the blocks of a device and frees those blocks.
    pub(super) fn wait_for_events(
        &self,
        device: DeviceId,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        let device = &self.devices[device.index()];
        device.counters.lock().num_sync_all_streams += 1;
        for stream in device.events.streams() {
            while let Some(head) = device.events.take_head(stream) {
                if let Err(source) = self.backend.wait(&head.event) {
                    device.events.put_back(stream, head);
                    return Err(AllocError::Backend { op: BackendOp::Wait, source });
                }
                device.events.finish_head(stream);
                self.settle(head.heap, head.block, trace);
            }
        }
        Ok(())
    }

    /// Gives all cached memory of the default pool back: the large class first; in each class the
    /// segments obtained whole first, by stream, size and address (spec §2.10).
    pub(super) fn release_cached(
        &self,
        device: DeviceId,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        for class in [SizeClass::Large, SizeClass::Small] {
            self.release_class(device, PoolId::DEFAULT, class, trace)?;
        }
        Ok(())
    }

    fn release_class(
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
        let Some(pager) = &self.pager else { return Ok(()) };
        for block in free.iter().filter(|block| block.expandable) {
            self.release_pages(&**pager, block, trace)?;
        }
        Ok(())
    }

    /// All free blocks of one class of a pool, by stream, size and address.
    fn free_blocks(&self, device: DeviceId, pool: PoolId, class: SizeClass) -> Vec<Candidate<B>> {
        let mut found = Vec::new();
        for cell in self.devices[device.index()].heaps_of(pool) {
            let state = cell.state.lock();
            let heap = &state.body.heap;
            let searches = heap.pool.searches(class);
            for (_, id) in heap.classes[class.index()].free.iter() {
                let block = &heap.blocks[id];
                found.push(Candidate {
                    cell: Arc::clone(&cell),
                    id,
                    addr: block.addr,
                    bytes: block.bytes,
                    age: searches - block.free_since,
                    split: block.is_split(),
                    expandable: heap.is_expandable(block),
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
        match self.backend.release(token) {
            Ok(()) => {
                device.reserved.fetch_sub(bytes, Ordering::Relaxed);
                device.counters.lock().num_device_free += 1;
                self.edit(cell, trace, |body, ledger| body.heap.forget_whole(block.id, ledger));
                Ok(bytes)
            }
            Err(Refused { value, error }) => {
                let mut state = cell.state.lock();
                let segment = state.body.heap.blocks[block.id].segment;
                let owner = Owner { heap: cell.index, segment };
                self.directory.register(base, bytes, owner);
                state.body.tokens.insert(segment, value);
                state.body.heap.restore_free(block.id);
                Err(AllocError::Backend { op: BackendOp::Release, source: error })
            }
        }
    }

    /// Takes a cached segment out of its heap. From here on nobody finds its address, so the backend
    /// may hand it out again the moment it has it back.
    fn take_segment(&self, block: &Candidate<B>) -> Option<B::Segment> {
        let mut state = block.cell.state.lock();
        let body = &mut state.body;
        let current = body.heap.blocks.get(block.id)?;
        if !is_unchanged(current, block) || current.is_split() {
            return None;
        }
        let segment = current.segment;
        let token = body.tokens.remove(&segment)?;
        body.heap.remove_free(block.id);
        self.directory.unregister(token.base(), token.bytes());
        Some(token)
    }

    /// Unmaps the whole pages of a cached block of an expandable segment, after waiting for its
    /// stream: unmapping, unlike cudaFree, does not wait by itself.
    fn release_pages(
        &self,
        pager: &dyn Pager<B::Error>,
        block: &Candidate<B>,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        let cell = &*block.cell;
        let Some((run, base)) = self.take_pages(block) else { return Ok(()) };
        if let Err(error) = self.synchronize(&cell.stream) {
            self.directory_register(cell, &run, run.bytes);
            cell.state.lock().body.heap.restore_free(block.id);
            return Err(error);
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
            cell.state.lock().body.heap.restore_free(block.id);
        } else {
            self.book_unmapped(pager, block, PageRun { bytes: unmapped.bytes, ..run }, trace)?;
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
    fn take_pages(&self, block: &Candidate<B>) -> Option<(PageRun, Addr)> {
        let mut state = block.cell.state.lock();
        let heap = &mut state.body.heap;
        if !is_unchanged(heap.blocks.get(block.id)?, block) {
            return None;
        }
        let run = heap.plan_unmap(block.id)?;
        heap.remove_free(block.id);
        self.directory.unregister(run.addr, run.bytes);
        Some((run, heap.segments[run.segment].base))
    }

    fn book_unmapped(
        &self,
        pager: &dyn Pager<B::Error>,
        block: &Candidate<B>,
        run: PageRun,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        let cell = &*block.cell;
        let device = &self.devices[cell.device.index()];
        device.reserved.fetch_sub(run.bytes, Ordering::Relaxed);
        device.counters.lock().num_device_free += 1;
        let (hole, empty) = self.edit(cell, trace, |body, ledger| {
            let hole = body.heap.commit_unmap(block.id, &run, ledger);
            (hole, !body.heap.blocks[hole].is_split())
        });
        if !empty {
            return Ok(());
        }
        // Nothing is left of the segment but address space. Holes change under the growth lock only,
        // so it is still one hole when the address space is gone.
        let base = cell.state.lock().body.heap.segments[run.segment].base;
        pager
            .unreserve(base)
            .map_err(|error| AllocError::Backend { op: error.op, source: error.source })?;
        cell.state.lock().body.heap.forget_reservation(hole);
        Ok(())
    }

    /// Waits for everything queued on a stream so far.
    pub(super) fn synchronize(&self, stream: &B::Stream) -> AllocResult<(), B> {
        let event = self
            .backend
            .record(stream)
            .map_err(|source| AllocError::Backend { op: BackendOp::Record, source })?;
        self.backend
            .wait(&event)
            .map_err(|source| AllocError::Backend { op: BackendOp::Wait, source })
    }

    /// With `max_split_size` set: gives back the one smallest oversize block that makes room, or
    /// several, largest first (spec §2.10). Returns whether enough was freed.
    pub(super) fn release_oversize(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        trace: &mut TraceBuffer,
    ) -> AllocResult<bool, B> {
        let Some(max_split) = cell.state.lock().body.heap.rules.max_split_bytes else {
            return Ok(false);
        };
        let wanted = request.rounded.max(max_split);
        let free: Vec<_> = self
            .free_blocks(cell.device, cell.pool, request.class)
            .into_iter()
            .filter(|block| block.cell.index == cell.index)
            .collect();
        let enough = free.partition_point(|block| block.bytes < wanted);
        if let Some(block) = free.get(enough).filter(|block| !block.expandable) {
            return Ok(self.release_whole(block, trace)? > 0);
        }
        let mut freed = 0;
        let several = free[..enough].iter().rev().take_while(|block| block.bytes >= max_split);
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

/// Whether a block is as it was when it was listed.
fn is_unchanged<B: Backend>(current: &Block, seen: &Candidate<B>) -> bool {
    current.state == BlockState::Free && current.addr == seen.addr && current.bytes == seen.bytes
}

impl<B: Backend> Drop for Shared<B> {
    /// Best effort and quiet: a backend that is gone has taken everything with it.
    fn drop(&mut self) {
        let mut trace = TraceBuffer::new(false);
        for index in 0..self.devices.len() {
            let _ = self.wait_for_events(DeviceId::new(index as u16), &mut trace);
        }
        for cell in self.heaps.iter() {
            // What is still allocated may be in use by work on its own stream.
            let _ = self.synchronize(&cell.stream);
            let tokens = std::mem::take(&mut cell.state.lock().body.tokens);
            let mut tokens: Vec<_> = tokens.into_values().collect();
            tokens.sort_by_key(Segment::base);
            for token in tokens {
                let _ = self.backend.release(token);
            }
        }
    }
}
