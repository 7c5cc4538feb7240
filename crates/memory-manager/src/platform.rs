//! What a manager stands on.

use crate::copy::CopyJob;
use crate::error::ManagerError;
use alloc_api::{AllocatorStats, DeviceType, Level};
use alloc_core::backend::{Backend, MemoryInfo};
use alloc_core::host::{HostAllocation, HostAllocator, HostBackend, HostConfig, HostStat, Place};
use alloc_core::ordered::StreamOrdered;
use alloc_core::{CachingAllocator, Config, DeviceId};

/// The streams of a platform.
pub type StreamOf<P> = <<P as Platform>::Backend as Backend>::Stream;

/// Devices, their streams, the host's pinned memory, and copies between the two.
pub trait Platform: Send + Sync + 'static {
    /// The devices.
    type Backend: StreamOrdered + MemoryInfo + Clone;

    /// What kind of devices they are, in reports.
    const KIND: DeviceType;

    /// The devices.
    fn backend(&self) -> &Self::Backend;

    /// The caching allocator of device memory. Called once at most.
    ///
    /// # Errors
    /// Any.
    fn caching(&self, config: Config) -> Result<CachingAllocator<Self::Backend>, ManagerError>;

    /// The allocator of pinned memory. Called once at most.
    ///
    /// # Errors
    /// Any.
    fn pinned(
        &self,
        config: HostConfig,
    ) -> Result<Box<dyn HostMemory<StreamOf<Self>>>, ManagerError>;

    /// The stream of calls that name none.
    ///
    /// # Errors
    /// If there is no such device.
    fn default_stream(&self, device: DeviceId) -> Result<StreamOf<Self>, ManagerError>;

    /// A stream that nobody else uses.
    ///
    /// # Errors
    /// If there is no such device.
    fn new_stream(&self, device: DeviceId) -> Result<StreamOf<Self>, ManagerError>;

    /// Queues a copy. The manager has checked both ends, and keeps them until the copy is done.
    ///
    /// # Errors
    /// Any; nothing is queued then.
    fn queue_copy(&self, job: &CopyJob, stream: &StreamOf<Self>) -> Result<(), ManagerError>;

    /// Waits for all work of a stream. Called where nothing else can be done.
    ///
    /// # Errors
    /// If the stream can do no more work.
    fn synchronise(&self, stream: &StreamOf<Self>) -> Result<(), ManagerError>;
}

/// An allocator of pinned memory, for streams of type `S`.
pub trait HostMemory<S>: Send + Sync {
    /// Allocates.
    ///
    /// # Errors
    /// [`ManagerError::OutOfMemory`], [`ManagerError::TooLarge`].
    fn allocate(&self, bytes: u64, place: Place) -> Result<HostAllocation, ManagerError>;

    /// Frees, once the streams that were recorded are done.
    ///
    /// # Errors
    /// Hands the allocation back.
    fn free(&self, allocation: HostAllocation) -> Result<(), (HostAllocation, ManagerError)>;

    /// Declares a use.
    ///
    /// # Errors
    /// None for a live allocation.
    fn record_use(&self, allocation: &HostAllocation, stream: &S) -> Result<(), ManagerError>;

    /// Gives cached memory back to the system.
    ///
    /// # Errors
    /// Any.
    fn empty_cache(&self) -> Result<(), ManagerError>;

    /// Its figures.
    fn stats(&self) -> AllocatorStats;
}

impl<B: HostBackend> HostMemory<B::Stream> for HostAllocator<B> {
    fn allocate(&self, bytes: u64, place: Place) -> Result<HostAllocation, ManagerError> {
        self.allocate_on(bytes, place).map_err(|error| ManagerError::from_host(bytes, error))
    }

    fn free(&self, allocation: HostAllocation) -> Result<(), (HostAllocation, ManagerError)> {
        HostAllocator::free(self, allocation)
            .map_err(|refused| (refused.allocation, ManagerError::from_host(0, refused.error)))
    }

    fn record_use(
        &self,
        allocation: &HostAllocation,
        stream: &B::Stream,
    ) -> Result<(), ManagerError> {
        HostAllocator::record_use(self, allocation, stream)
            .map_err(|error| ManagerError::from_host(0, error))
    }

    fn empty_cache(&self) -> Result<(), ManagerError> {
        HostAllocator::empty_cache(self).map_err(|error| ManagerError::from_host(0, error))
    }

    fn stats(&self) -> AllocatorStats {
        let stats = HostAllocator::stats(self);
        let level = |stat: HostStat| Level { current: stat.current as u64, peak: stat.peak as u64 };
        AllocatorStats {
            allocated: level(stats.active_bytes),
            reserved: level(stats.allocated_bytes),
        }
    }
}
