//! How memory leaves pools, and how pools end.

use super::{Pool, PoolRef, Registered};
use crate::allocator::{AllocResult, HeapCell, Shared};
use crate::backend::Backend;
use crate::size_class::SizeClass;
use crate::trace::TraceBuffer;
use crate::units::{DeviceId, PoolId};
use std::collections::HashSet;
use std::sync::Arc;

impl<B: Backend> PoolRef<B> {
    /// Waits for the pending events of this pool's blocks and gives back what is free of it, however
    /// many refer to it. Returns the bytes given back: none while the pool is
    /// [pinned](PoolRef::pin) or a graph is being captured.
    ///
    /// # Errors
    /// [`AllocError::Backend`](crate::AllocError::Backend) at the first call that fails; what was
    /// given back before stays so.
    pub fn empty_cache(&self) -> AllocResult<u64, B> {
        self.shared.trim_pool(self.device, &self.pool)
    }
}

impl<B: Backend> Shared<B> {
    pub(super) fn trim_pool(&self, device: DeviceId, pool: &Arc<Pool>) -> AllocResult<u64, B> {
        let mut op = self.begin();
        let home = &self.devices[device.index()];
        let _growth = home.lock_growth();
        if pool.is_pinned() || self.captures_under_way() {
            return Ok(0);
        }
        self.wait_for_events_of(device, pool.id(), &mut op.trace)?;
        let before = home.reserved();
        self.release_pool(device, pool, &mut op.trace)?;
        Ok(before.saturating_sub(home.reserved()))
    }

    /// Waits until no block of a pool is pending; blocks of other pools come back on the way.
    pub(in crate::allocator) fn wait_for_events_of(
        &self,
        device: DeviceId,
        pool: PoolId,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        let home = &self.devices[device.index()];
        let heaps: HashSet<u32> = home.heaps_of(pool).iter().map(|cell| cell.index).collect();
        self.wait_while(device, |stream| home.events.concerns(stream, &heaps), trace)
    }

    /// Gives back what is free in the pools that nobody refers to, and ends those that hold nothing
    /// any more.
    pub(in crate::allocator) fn release_unreferenced(
        &self,
        device: DeviceId,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        for pool in self.devices[device.index()].pools.in_flush_order() {
            if pool.is_unreferenced() {
                let released = self.release_pool(device, &pool, trace);
                self.end_pool(device, pool.id());
                released?;
            }
        }
        Ok(())
    }

    /// Gives back what is free in the pools that are referred to. Returns whether anything was.
    pub(in crate::allocator) fn release_referenced(
        &self,
        device: DeviceId,
        trace: &mut TraceBuffer,
    ) -> AllocResult<bool, B> {
        let home = &self.devices[device.index()];
        let before = home.reserved();
        for pool in home.pools.in_flush_order() {
            self.release_pool(device, &pool, trace)?;
        }
        Ok(home.reserved() < before)
    }

    /// Gives back what is free in a private pool, unless it is pinned: the small class first (spec
    /// §2.10). Under the growth lock.
    fn release_pool(
        &self,
        device: DeviceId,
        pool: &Pool,
        trace: &mut TraceBuffer,
    ) -> AllocResult<(), B> {
        // I8.
        if pool.is_pinned() {
            return Ok(());
        }
        let source = self.devices[device.index()].pools.source_of(pool);
        if source.is_some() {
            self.tidy(device, &source, trace);
        }
        for class in [SizeClass::Small, SizeClass::Large] {
            self.release_class(device, pool.id(), class, trace)?;
        }
        for cell in self.devices[device.index()].heaps_of(pool.id()) {
            self.release_empty_reservations(&cell)?;
        }
        Ok(())
    }

    /// Ends a pool if nobody refers to it and it holds nothing. Its heaps, which are empty, wait for
    /// other pools.
    pub(super) fn end_pool(&self, device: DeviceId, id: PoolId) {
        let device = &self.devices[device.index()];
        let mut private = device.pools.private.write();
        let Some(Registered { pool, .. }) = private.get(&id) else { return };
        let mut heaps = device.heaps.write();
        let holds_memory = |cell: &Arc<HeapCell<B>>| !cell.lock().body.heap.segments.is_empty();
        if pool.is_idle() && !heaps.of_pool(id).any(holds_memory) {
            let ended = private.remove(&id);
            heaps.vacate(id);
            drop((heaps, private));
            // A source of its own may go with it, which is the user's.
            drop(ended);
        }
    }
}
