//! The manager: its state, its settings and its end.

mod memory;

use crate::config::ManagerConfig;
use crate::engine::Engines;
use crate::error::{ManagerError, MemoryKind};
use crate::mode::{DeviceAllocatorMode, ModeReport};
use crate::platform::Platform;
use crate::table::Table;
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

impl<P: Platform> Inner<P> {
    /// Begins a call. Recursive, because a driver may call back into the manager.
    pub(crate) fn enter(&self) -> Result<RwLockReadGuard<'_, bool>, ManagerError> {
        let closed = self.closed.read_recursive();
        if *closed { Err(ManagerError::ShutDown) } else { Ok(closed) }
    }
}

impl<P: Platform> Drop for Inner<P> {
    fn drop(&mut self) {
        self.pinned.forget();
        self.device.forget();
    }
}
