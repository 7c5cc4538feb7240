//! Who refers to a pool: counted references, pins, and the owner of a user's pool.

use super::{Pool, PoolInfo, info_of};
use crate::allocator::{AllocResult, Allocation, HeapCell, Shared, Snapshot, StreamHandle};
use crate::backend::{Backend, Stream};
use crate::error::AllocError;
use crate::units::{DeviceId, PoolId};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A counted reference to a private pool of one device. Cloning it makes another one.
///
/// When it is dropped, the pool has one reference less, and nothing else happens. Without any, the
/// pool serves nobody; its blocks stay until they are freed, what is free of it goes back with the
/// next [`empty_cache`](crate::CachingAllocator::empty_cache) or before an out of memory, and with its last
/// segment it ends. Until then [`open_pool`](crate::CachingAllocator::open_pool) finds it as it is. A
/// [`MemPool`] also gives back what is free.
pub struct PoolRef<B: Backend> {
    pub(super) shared: Arc<Shared<B>>,
    pub(super) device: DeviceId,
    pub(super) pool: Arc<Pool>,
}

impl<B: Backend> PoolRef<B> {
    /// Counts the reference. The caller has another one, or the lock of the registry.
    pub(super) fn new(shared: &Arc<Shared<B>>, device: DeviceId, pool: &Arc<Pool>) -> Self {
        pool.refs.fetch_add(1, Ordering::AcqRel);
        PoolRef { shared: Arc::clone(shared), device, pool: Arc::clone(pool) }
    }

    /// Its id.
    pub fn id(&self) -> PoolId {
        self.pool.id()
    }

    /// Its device.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// What is known of it.
    pub fn info(&self) -> PoolInfo {
        info_of(&self.pool)
    }

    /// Whether requests of the default pool may be served from what is free in this one before they
    /// run out of memory.
    pub fn set_use_on_oom(&self, on: bool) {
        self.pool.use_on_oom.store(on, Ordering::Relaxed);
    }

    /// Allocates from this pool, whatever scopes are in force.
    ///
    /// # Errors
    /// As [`CachingAllocator::allocate`](crate::CachingAllocator::allocate);
    /// [`AllocError::InvalidArgument`] if the stream is of another device than the pool.
    pub fn allocate(&self, bytes: u64, stream: &B::Stream) -> AllocResult<Allocation, B> {
        let cell = self.heap_of(stream)?;
        self.shared.allocate(&cell, bytes)
    }

    /// A handle that allocates from this pool on `stream`. It refers to the pool.
    ///
    /// # Errors
    /// [`AllocError::InvalidArgument`] if the stream is of another device than the pool.
    pub fn stream(&self, stream: &B::Stream) -> AllocResult<StreamHandle<B>, B> {
        let cell = self.heap_of(stream)?;
        Ok(StreamHandle { shared: Arc::clone(&self.shared), cell, pool: Some(self.clone()) })
    }

    fn heap_of(&self, stream: &B::Stream) -> AllocResult<Arc<HeapCell<B>>, B> {
        if stream.device() == self.device {
            return Ok(self.shared.heap_in(&self.pool, stream));
        }
        Err(AllocError::InvalidArgument {
            what: "stream",
            why: format!(
                "{} is of {}, pool {:?} of {}: use a stream of that device, or a pool of the stream's",
                stream.id(),
                stream.device(),
                self.id(),
                self.device
            ),
        })
    }

    /// Until the pin is dropped, the memory of this pool stays where it is: nothing of it is given
    /// back, lent to other pools or moved, also when nobody refers to the pool any more. A captured
    /// graph needs this, for it uses addresses that are free to the allocator. Pins may overlap.
    pub fn pin(&self) -> PoolPin {
        self.pool.pins.fetch_add(1, Ordering::AcqRel);
        // Who is giving memory back or moving it has looked at the pins already.
        drop(self.shared.devices[self.device.index()].lock_growth());
        PoolPin(Arc::clone(&self.pool))
    }

    /// What this pool holds now. Leaves a `snapshot` entry in the trace.
    pub fn snapshot(&self) -> Snapshot {
        self.shared
            .snapshot(self.device, &self.shared.devices[self.device.index()].heaps_of(self.id()))
    }
}

impl<B: Backend> Clone for PoolRef<B> {
    fn clone(&self) -> Self {
        PoolRef::new(&self.shared, self.device, &self.pool)
    }
}

impl<B: Backend> fmt::Debug for PoolRef<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolRef").field("device", &self.device).field("pool", &self.info()).finish()
    }
}

impl<B: Backend> Drop for PoolRef<B> {
    fn drop(&mut self) {
        if self.pool.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.end_pool(self.device, self.id());
        }
    }
}

/// See [`PoolRef::pin`].
#[derive(Debug)]
pub struct PoolPin(Arc<Pool>);

impl Drop for PoolPin {
    fn drop(&mut self) {
        self.0.pins.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A pool that somebody owns.
///
/// When it is dropped, the pool is no longer [used on out of memory](PoolRef::set_use_on_oom), and
/// if nobody else refers to it, what is free of it goes back to the backend. Blocks that are still
/// handed out stay; their memory goes back with a flush after they are freed. Failures on the way
/// are left to that flush too; [`release`](MemPool::release) reports them.
///
/// ```
/// use alloc_core::{CachingAllocator, Config, DeviceId, PoolOptions};
/// use mock_backend::MockBackend;
///
/// let gpu = MockBackend::builder().device(1 << 30).build();
/// let stream = gpu.default_stream(DeviceId::new(0));
/// let allocator = CachingAllocator::new(gpu, Config::pytorch())?;
///
/// let cache = allocator.create_pool(DeviceId::new(0), PoolOptions::new())?;
/// let table = {
///     let _scope = cache.enter(); // for requests of this thread
///     allocator.allocate(30 << 20, &stream)?
/// };
/// assert_eq!(cache.live_blocks(), [table.addr()]);
/// allocator.free(table)?;
/// assert_eq!(cache.empty_cache()?, 30 << 20);
/// cache.release()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MemPool<B: Backend> {
    pool: PoolRef<B>,
    /// Whether it was given up already.
    released: bool,
}

impl<B: Backend> MemPool<B> {
    pub(super) fn new(pool: PoolRef<B>) -> Self {
        MemPool { pool, released: false }
    }

    /// Gives the pool up and reports what dropping it could not.
    ///
    /// # Errors
    /// [`AllocError::Backend`] at the first call that fails; the memory that was to go back then goes
    /// with the next flush.
    pub fn release(mut self) -> AllocResult<(), B> {
        self.released = true;
        self.give_up()
    }

    fn give_up(&self) -> AllocResult<(), B> {
        let PoolRef { shared, device, pool } = &self.pool;
        pool.use_on_oom.store(false, Ordering::Relaxed);
        // This handle's own reference goes right after.
        if pool.refs.load(Ordering::Acquire) > 1 {
            return Ok(());
        }
        shared.trim_pool(*device, pool).map(drop)
    }
}

impl<B: Backend> std::ops::Deref for MemPool<B> {
    type Target = PoolRef<B>;
    fn deref(&self) -> &PoolRef<B> {
        &self.pool
    }
}

impl<B: Backend> Drop for MemPool<B> {
    fn drop(&mut self) {
        if !self.released {
            let _ = self.give_up();
        }
    }
}
