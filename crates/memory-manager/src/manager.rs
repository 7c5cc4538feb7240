//! The manager.

use crate::block::Block;
use crate::buffers::{DeviceBuffer, PinnedBuffer};
use crate::config::ManagerConfig;
use crate::copy::{CopyJob, Direction};
use crate::engine::Engines;
use crate::error::{ManagerError, MemoryKind};
use crate::mode::{DeviceAllocatorMode, ModeReport};
use crate::platform::{Platform, StreamOf};
use crate::table::Table;
use alloc_core::backend::Stream;
use alloc_core::ordered::StreamOrdered;
use alloc_core::{Addr, DeviceId};
use parking_lot::{RwLock, RwLockReadGuard};
use std::fmt;
use std::sync::Arc;

/// Memory that users have by address.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Outstanding {
    /// Pinned allocations: address and bytes, by address.
    pub pinned: Vec<(Addr, u64)>,
    /// Device allocations: address and bytes, by address.
    pub device: Vec<(Addr, u64)>,
}

impl Outstanding {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.pinned.is_empty() && self.device.is_empty()
    }
}

/// What a shutdown left.
#[derive(Debug)]
pub struct ShutdownReport {
    /// Memory that users still have. It stays valid until the process ends, and is never freed.
    pub outstanding: Outstanding,
    /// What went wrong when cached memory was given back, if anything did.
    pub failure: Option<ManagerError>,
}

/// Figures, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ManagerStats {
    /// Pinned memory that users have, in buffers and by address.
    pub pinned_allocated: u64,
    /// Pinned memory held of the system.
    pub pinned_reserved: u64,
    /// Device memory that users have, in buffers and by address.
    pub device_allocated: u64,
    /// Device memory held of the devices.
    pub device_reserved: u64,
}

pub(crate) struct Inner<P: Platform> {
    pub(crate) platform: P,
    pub(crate) engines: Engines<P>,
    pinned: Table<P>,
    device: Table<P>,
    /// Whether it was shut down. Every call holds it for reading, so that a shutdown waits for those
    /// that are running.
    closed: RwLock<bool>,
}

/// Pools of pinned and device memory, with copies between them. Clones are the same manager. Any
/// thread may call any method at any time.
///
/// Memory is by address, as in C, or in [buffers](Self::pinned_buffer) that own it. Calls that name no
/// stream are for the default stream of the manager's device.
///
/// What is allocated for one stream may be used on others: copies and
/// [`record_use`](Self::record_use) order their stream after the allocation, and memory is not handed
/// out again before the work of all recorded streams is done.
pub struct MemoryManager<P: Platform> {
    pub(crate) inner: Arc<Inner<P>>,
}

impl<P: Platform> Clone for MemoryManager<P> {
    fn clone(&self) -> Self {
        MemoryManager { inner: Arc::clone(&self.inner) }
    }
}

impl<P: Platform> fmt::Debug for MemoryManager<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryManager")
            .field("mode", &self.requested_device_allocator_mode())
            .field("is_shut_down", &*self.inner.closed.read_recursive())
            .finish_non_exhaustive()
    }
}

impl<P: Platform> MemoryManager<P> {
    /// A manager. Nothing is allocated, and no pool made, before the first request.
    pub fn new(platform: P, config: ManagerConfig) -> Self {
        let inner = Inner {
            platform,
            engines: Engines::new(config),
            pinned: Table::new(MemoryKind::Pinned),
            device: Table::new(MemoryKind::Device),
            closed: RwLock::new(false),
        };
        MemoryManager { inner: Arc::new(inner) }
    }

    /// The device of calls that name no stream.
    pub fn device(&self) -> DeviceId {
        self.inner.engines.config().device
    }

    /// What it stands on.
    pub fn platform(&self) -> &P {
        &self.inner.platform
    }
}

/// # Pinned memory
impl<P: Platform> MemoryManager<P> {
    /// Allocates pinned memory near the manager's device.
    ///
    /// # Errors
    /// [`ManagerError::ZeroSize`], [`ManagerError::TooLarge`], [`ManagerError::OutOfMemory`],
    /// [`ManagerError::ShutDown`].
    pub fn allocate_pinned(&self, bytes: u64) -> Result<Addr, ManagerError> {
        let _open = self.inner.enter()?;
        let block = self.inner.take_pinned(bytes, None)?;
        Ok(enter(&self.inner.pinned, block))
    }

    /// Allocates pinned memory for work on `stream`, near its device.
    ///
    /// # Errors
    /// As [`allocate_pinned`](Self::allocate_pinned).
    pub fn allocate_pinned_on(
        &self,
        bytes: u64,
        stream: &StreamOf<P>,
    ) -> Result<Addr, ManagerError> {
        let _open = self.inner.enter()?;
        let block = self.inner.take_pinned(bytes, Some(stream))?;
        Ok(enter(&self.inner.pinned, block))
    }

    /// Frees pinned memory. Copies that are queued still have it. Null is nothing.
    ///
    /// # Errors
    /// [`ManagerError::UnknownAddress`], [`ManagerError::ShutDown`].
    pub fn free_pinned(&self, addr: Addr) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        self.inner.free(&self.inner.pinned, addr, None)
    }

    /// Frees pinned memory once the work queued so far on `stream` is done, too.
    ///
    /// # Errors
    /// As [`free_pinned`](Self::free_pinned).
    pub fn free_pinned_on(&self, addr: Addr, stream: &StreamOf<P>) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        self.inner.free(&self.inner.pinned, addr, Some(stream))
    }

    /// Pinned memory with an owner.
    ///
    /// # Errors
    /// As [`allocate_pinned`](Self::allocate_pinned).
    pub fn pinned_buffer(&self, bytes: u64) -> Result<PinnedBuffer<P>, ManagerError> {
        let _open = self.inner.enter()?;
        let block = self.inner.take_pinned(bytes, None)?;
        Ok(PinnedBuffer::new(self.clone(), block))
    }
}

/// # Device memory
impl<P: Platform> MemoryManager<P> {
    /// Allocates memory of the manager's device, for its default stream.
    ///
    /// # Errors
    /// [`ManagerError::ZeroSize`], [`ManagerError::TooLarge`], [`ManagerError::OutOfMemory`],
    /// [`ManagerError::ShutDown`], or whatever the driver reports.
    pub fn allocate_device(&self, bytes: u64) -> Result<Addr, ManagerError> {
        let _open = self.inner.enter()?;
        let block = self.inner.take_device(bytes, None)?;
        Ok(enter(&self.inner.device, block))
    }

    /// Allocates memory of the stream's device for work that is queued on it from now on.
    ///
    /// # Errors
    /// As [`allocate_device`](Self::allocate_device).
    pub fn allocate_device_on(
        &self,
        bytes: u64,
        stream: &StreamOf<P>,
    ) -> Result<Addr, ManagerError> {
        let _open = self.inner.enter()?;
        let block = self.inner.take_device(bytes, Some(stream))?;
        Ok(enter(&self.inner.device, block))
    }

    /// Frees device memory once the work queued so far on its own stream, and on the streams that were
    /// recorded, is done. Null is nothing.
    ///
    /// # Errors
    /// [`ManagerError::UnknownAddress`], [`ManagerError::ShutDown`]; or whatever the driver reports,
    /// and it is still allocated.
    pub fn free_device(&self, addr: Addr) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        self.inner.free(&self.inner.device, addr, None)
    }

    /// Frees device memory once the work queued so far on `stream` is done, too.
    ///
    /// # Errors
    /// As [`free_device`](Self::free_device); [`ManagerError::WrongStream`].
    pub fn free_device_on(&self, addr: Addr, stream: &StreamOf<P>) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        self.inner.free(&self.inner.device, addr, Some(stream))
    }

    /// Device memory with an owner, for work on `stream`.
    ///
    /// # Errors
    /// As [`allocate_device`](Self::allocate_device).
    pub fn device_buffer(
        &self,
        bytes: u64,
        stream: &StreamOf<P>,
    ) -> Result<DeviceBuffer<P>, ManagerError> {
        let _open = self.inner.enter()?;
        let block = self.inner.take_device(bytes, Some(stream))?;
        Ok(DeviceBuffer::new(self.clone(), block))
    }

    /// Declares that work of `stream`, queued from now on, uses device memory. That work comes after
    /// the allocation, and a free comes after that work.
    ///
    /// # Errors
    /// [`ManagerError::UnknownAddress`], [`ManagerError::WrongStream`], [`ManagerError::ShutDown`].
    pub fn record_use(&self, addr: Addr, stream: &StreamOf<P>) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        let block = self.inner.device.at(addr)?;
        block.record_use(stream, self.inner.platform.backend())
    }
}

/// # Copies
impl<P: Platform> MemoryManager<P> {
    /// Queues a copy from pinned to device memory. Both may be freed at once: their memory is kept
    /// until the copy is done. What is copied must not be written before.
    ///
    /// # Errors
    /// [`ManagerError::ZeroSize`]; [`ManagerError::UnknownAddress`] or [`ManagerError::OutOfRange`]
    /// unless each range lies inside an allocation of this manager; [`ManagerError::WrongStream`];
    /// [`ManagerError::ShutDown`]; or whatever the driver reports.
    pub fn copy_to_device_async(
        &self,
        to: Addr,
        from: Addr,
        bytes: u64,
        stream: &StreamOf<P>,
    ) -> Result<(), ManagerError> {
        self.copy(Direction::ToDevice, (to, from), bytes, stream)
    }

    /// Queues a copy from device to pinned memory. Both may be freed at once: their memory is kept
    /// until the copy is done. What is written must not be read before.
    ///
    /// # Errors
    /// As [`copy_to_device_async`](Self::copy_to_device_async).
    pub fn copy_to_host_async(
        &self,
        to: Addr,
        from: Addr,
        bytes: u64,
        stream: &StreamOf<P>,
    ) -> Result<(), ManagerError> {
        self.copy(Direction::ToHost, (from, to), bytes, stream)
    }

    fn copy(
        &self,
        direction: Direction,
        (device, host): (Addr, Addr),
        bytes: u64,
        stream: &StreamOf<P>,
    ) -> Result<(), ManagerError> {
        let inner = &self.inner;
        let _open = inner.enter()?;
        if bytes == 0 {
            return Err(ManagerError::ZeroSize("the length of the copy"));
        }
        let on_device = inner.device.holding(device, bytes)?;
        let on_host = inner.pinned.holding(host, bytes)?;
        inner.queue((&on_device, &on_host), &CopyJob { direction, device, host, bytes }, stream)
    }
}

/// # Pools and modes
impl<P: Platform> MemoryManager<P> {
    /// Bounds the pinned pool: it never holds more. To be set before the first pinned allocation.
    ///
    /// # Errors
    /// [`ManagerError::PoolInUse`] after it, [`ManagerError::ZeroSize`], [`ManagerError::ShutDown`].
    pub fn set_pinned_pool_size(&self, bytes: u64) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        self.inner.engines.set_pinned_pool(bytes)
    }

    /// Bounds the device pool, of each device and mode: in caching mode and with a private pool, what
    /// is held; on the default pool, which others use too, what is allocated. To be set before the
    /// first device allocation.
    ///
    /// # Errors
    /// As [`set_pinned_pool_size`](Self::set_pinned_pool_size).
    pub fn set_device_pool_size(&self, bytes: u64) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        self.inner.engines.set_device_pool(bytes)
    }

    /// Lets stream-ordered pools keep so many bytes when the host synchronises; what is unused beyond
    /// goes back to the device then. Without it that is the size of the device pool, or all if that has
    /// none. To be set before the first device allocation.
    ///
    /// # Errors
    /// [`ManagerError::PoolInUse`] after it, [`ManagerError::ShutDown`].
    pub fn set_release_threshold(&self, bytes: u64) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        self.inner.engines.set_release_threshold(bytes)
    }

    /// Gives unused memory of stream-ordered pools back to the devices until each pool holds
    /// `keep_bytes` at most. Waits for nothing: memory whose free the host has not seen stays.
    ///
    /// # Errors
    /// [`ManagerError::ShutDown`]; or whatever the driver reports. Each pool is tried.
    pub fn trim_device_pools(&self, keep_bytes: u64) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        self.inner.engines.trim(keep_bytes)
    }

    /// Chooses where device memory comes from, from now on: what is allocated already stays where it
    /// is. If the device lacks the mode, a simpler one is used, and the report says so.
    ///
    /// # Errors
    /// [`ManagerError::ShutDown`]; or if the device cannot be asked, and nothing has changed.
    pub fn set_device_allocator_mode(
        &self,
        mode: DeviceAllocatorMode,
    ) -> Result<ModeReport, ManagerError> {
        let _open = self.inner.enter()?;
        let engines = &self.inner.engines;
        let before = engines.requested_mode();
        engines.set_mode(mode);
        let report = engines.mode_on(&self.inner.platform, engines.config().device);
        if report.is_err() {
            engines.set_mode(before);
        }
        report
    }

    /// The mode that was asked for last.
    pub fn requested_device_allocator_mode(&self) -> DeviceAllocatorMode {
        self.inner.engines.requested_mode()
    }

    /// The mode that new allocations on the manager's device use.
    ///
    /// # Errors
    /// [`ManagerError::ShutDown`]; or if the device cannot be asked.
    pub fn effective_device_allocator_mode(&self) -> Result<DeviceAllocatorMode, ManagerError> {
        let _open = self.inner.enter()?;
        let engines = &self.inner.engines;
        Ok(engines.mode_on(&self.inner.platform, engines.config().device)?.effective)
    }

    /// Whether the manager's device has the stream-ordered modes.
    ///
    /// # Errors
    /// [`ManagerError::ShutDown`]; or if the device cannot be asked.
    pub fn supports_async_device_allocator(&self) -> Result<bool, ManagerError> {
        let _open = self.inner.enter()?;
        let device = self.inner.engines.config().device;
        self.inner.platform.backend().has_pools(device).map_err(ManagerError::from_backend)
    }

    /// Gives memory that nobody uses back to the system and the devices. Waits for work that uses
    /// memory which was freed.
    ///
    /// # Errors
    /// [`ManagerError::ShutDown`]; or whatever the driver reports. Each pool is tried.
    pub fn empty_caches(&self) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        self.inner.engines.empty_caches()
    }

    /// Its figures.
    ///
    /// # Errors
    /// [`ManagerError::ShutDown`].
    pub fn stats(&self) -> Result<ManagerStats, ManagerError> {
        let _open = self.inner.enter()?;
        let engines = &self.inner.engines;
        let (pinned_reserved, device_reserved) = engines.reserved(&self.inner.platform);
        Ok(ManagerStats {
            pinned_allocated: engines.allocated(MemoryKind::Pinned),
            pinned_reserved,
            device_allocated: engines.allocated(MemoryKind::Device),
            device_reserved,
        })
    }

    /// Memory that users have by address.
    pub fn outstanding(&self) -> Outstanding {
        Outstanding { pinned: self.inner.pinned.list(), device: self.inner.device.list() }
    }

    /// Ends the manager: every later call is an error, except this one. Calls that are running finish
    /// first. Memory that nobody has goes back to the system; memory that users still have is reported
    /// and left alone for as long as the process lives. Buffers that own their memory still free it.
    ///
    /// # Errors
    /// None; what cannot be given back is in the report.
    pub fn shutdown(&self) -> ShutdownReport {
        let was_closed = std::mem::replace(&mut *self.inner.closed.write(), true);
        let failure = if was_closed { None } else { self.inner.engines.empty_caches().err() };
        self.inner.engines.close();
        ShutdownReport { outstanding: self.outstanding(), failure }
    }

    /// Whether it was shut down.
    pub fn is_shut_down(&self) -> bool {
        *self.inner.closed.read_recursive()
    }
}

/// Enters a new allocation in a table; its address.
fn enter<P: Platform>(table: &Table<P>, block: Block<P>) -> Addr {
    let addr = block.addr();
    table.insert(Arc::new(block));
    addr
}

impl<P: Platform> Inner<P> {
    /// Begins a call. Recursive, because a driver may call back into the manager.
    pub(crate) fn enter(&self) -> Result<RwLockReadGuard<'_, bool>, ManagerError> {
        let closed = self.closed.read_recursive();
        if *closed { Err(ManagerError::ShutDown) } else { Ok(closed) }
    }

    fn take_pinned(
        &self,
        bytes: u64,
        stream: Option<&StreamOf<P>>,
    ) -> Result<Block<P>, ManagerError> {
        if bytes == 0 {
            return Err(ManagerError::ZeroSize("the size of the request"));
        }
        let device = stream.map_or(self.engines.config().device, Stream::device);
        self.engines.allocate_pinned(&self.platform, bytes, device)
    }

    fn take_device(
        &self,
        bytes: u64,
        stream: Option<&StreamOf<P>>,
    ) -> Result<Block<P>, ManagerError> {
        if bytes == 0 {
            return Err(ManagerError::ZeroSize("the size of the request"));
        }
        match stream {
            Some(stream) => self.engines.allocate_device(&self.platform, bytes, stream),
            None => {
                let stream = self.platform.default_stream(self.engines.config().device)?;
                self.engines.allocate_device(&self.platform, bytes, &stream)
            }
        }
    }

    fn free(
        &self,
        table: &Table<P>,
        addr: Addr,
        stream: Option<&StreamOf<P>>,
    ) -> Result<(), ManagerError> {
        if addr.is_null() {
            return Ok(());
        }
        // While it is held here the address is nobody else's: what is taken out is this block, or
        // another thread has freed it.
        let block = table.at(addr)?;
        if let Some(stream) = stream {
            block.record_use(stream, self.platform.backend())?;
        }
        let taken = table.remove(addr)?;
        drop(block);
        match Arc::try_unwrap(taken) {
            Ok(mut block) => {
                let freed = block.release();
                if freed.is_err() {
                    table.insert(Arc::new(block));
                }
                freed
            }
            // A copy is being queued, or another thread tries the same; the last holder frees it.
            Err(shared) => {
                drop(shared);
                Ok(())
            }
        }
    }

    /// Queues a copy between two allocations, which keeps both until it is done.
    pub(crate) fn queue(
        &self,
        (device, host): (&Block<P>, &Block<P>),
        job: &CopyJob,
        stream: &StreamOf<P>,
    ) -> Result<(), ManagerError> {
        device.check_stream(stream)?;
        // Recorded first: a copy that fails half way has still been queued in part.
        device.record_use(stream, self.platform.backend())?;
        host.record_use(stream, self.platform.backend())?;
        self.platform.queue_copy(job, stream)
    }
}

impl<P: Platform> Drop for Inner<P> {
    fn drop(&mut self) {
        self.pinned.forget();
        self.device.forget();
    }
}
