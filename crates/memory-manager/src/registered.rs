//! The memory of a manager as allocators of `alloc-api`, for its registry.

use crate::buffers::{DeviceBuffer, PinnedBuffer};
use crate::error::ManagerError;
use crate::manager::MemoryManager;
use crate::platform::{Platform, StreamOf};
use alloc_api::{Allocator, AllocatorError, AllocatorStats, DataPtr, Device, Level};
use alloc_core::backend::Stream;
use std::fmt;

/// Device memory of a manager, for one stream.
pub struct ManagedDevice<P: Platform> {
    manager: MemoryManager<P>,
    stream: StreamOf<P>,
}

/// Pinned memory of a manager.
pub struct ManagedPinned<P: Platform> {
    manager: MemoryManager<P>,
}

impl<P: Platform> ManagedDevice<P> {
    /// Memory of the stream's device, for work that is queued on it.
    pub fn new(manager: MemoryManager<P>, stream: StreamOf<P>) -> Self {
        ManagedDevice { manager, stream }
    }
}

impl<P: Platform> ManagedPinned<P> {
    /// Pinned memory near the manager's device.
    pub fn new(manager: MemoryManager<P>) -> Self {
        ManagedPinned { manager }
    }
}

impl<P: Platform> fmt::Debug for ManagedDevice<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ManagedDevice").field("device", &self.device()).finish_non_exhaustive()
    }
}

impl<P: Platform> fmt::Debug for ManagedPinned<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ManagedPinned").finish_non_exhaustive()
    }
}

impl<P: Platform> DeviceBuffer<P> {
    /// The buffer as a data pointer, whose context it is.
    pub fn into_data_ptr(self) -> DataPtr {
        let device = Device::new(P::KIND, self.device());
        DataPtr::owned(self.addr(), self, device)
    }
}

impl<P: Platform> PinnedBuffer<P> {
    /// The buffer as a data pointer, whose context it is.
    pub fn into_data_ptr(self) -> DataPtr {
        DataPtr::owned(self.addr(), self, Device::CPU)
    }
}

impl<P: Platform> Allocator for ManagedDevice<P> {
    fn device(&self) -> Device {
        Device::new(P::KIND, self.stream.device())
    }

    fn allocate(&self, bytes: u64) -> Result<DataPtr, AllocatorError> {
        if bytes == 0 {
            return Ok(DataPtr::null(self.device()));
        }
        let buffer = self.manager.device_buffer(bytes, &self.stream);
        buffer.map(DeviceBuffer::into_data_ptr).map_err(|error| explain(error, self.device()))
    }

    fn empty_cache(&self) -> Result<(), AllocatorError> {
        self.manager.empty_caches().map_err(|error| explain(error, self.device()))
    }

    fn stats(&self) -> Result<AllocatorStats, AllocatorError> {
        let stats = self.manager.stats().map_err(|error| explain(error, self.device()))?;
        Ok(levels(stats.device_allocated, stats.device_reserved))
    }
}

impl<P: Platform> Allocator for ManagedPinned<P> {
    fn device(&self) -> Device {
        Device::CPU
    }

    fn allocate(&self, bytes: u64) -> Result<DataPtr, AllocatorError> {
        if bytes == 0 {
            return Ok(DataPtr::null(Device::CPU));
        }
        let buffer = self.manager.pinned_buffer(bytes);
        buffer.map(PinnedBuffer::into_data_ptr).map_err(|error| explain(error, Device::CPU))
    }

    fn empty_cache(&self) -> Result<(), AllocatorError> {
        self.manager.empty_caches().map_err(|error| explain(error, Device::CPU))
    }

    fn stats(&self) -> Result<AllocatorStats, AllocatorError> {
        let stats = self.manager.stats().map_err(|error| explain(error, Device::CPU))?;
        Ok(levels(stats.pinned_allocated, stats.pinned_reserved))
    }
}

/// A manager does not follow the peaks of its figures: they are those of now.
fn levels(allocated: u64, reserved: u64) -> AllocatorStats {
    let level = |current| Level { current, peak: current };
    AllocatorStats { allocated: level(allocated), reserved: level(reserved) }
}

fn explain(error: ManagerError, device: Device) -> AllocatorError {
    match error {
        ManagerError::OutOfMemory { bytes, source, .. } => {
            AllocatorError::OutOfMemory { bytes, device, source }
        }
        ManagerError::TooLarge { bytes } => {
            AllocatorError::TooLarge { bytes, max: i64::MAX as u64 }
        }
        ManagerError::UnknownAddress { addr, .. } => AllocatorError::UnknownAddress(addr),
        error => AllocatorError::Other(Box::new(error)),
    }
}
