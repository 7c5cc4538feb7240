//! GPUs of NVIDIA as a platform.

use crate::buffers::PinnedBuffer;
use crate::config::ManagerConfig;
use crate::copy::{CopyJob, Direction};
use crate::error::ManagerError;
use crate::manager::MemoryManager;
use crate::platform::{HostMemory, Platform};
use alloc_api::{AllocatorStats, DeviceType, Level};
use alloc_core::host::{HostAllocation, HostConfig, HostStat, Place};
use alloc_core::{AllocError, CachingAllocator, Config, DeviceId};
use alloc_cuda::{CudaAllocError, CudaAllocator, CudaBackend, CudaStream};
use alloc_host_cuda::{NewError, OfBackend, PinOptions, PinnedAllocator};
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The GPUs that the process sees. Pinned memory is pinned through one of them.
#[derive(Clone, Debug)]
pub struct Cuda {
    backend: CudaBackend,
    device: DeviceId,
}

impl Cuda {
    /// Loads the driver. Pinned memory will be pinned through `device`, whose context is made when the
    /// first is; no other context is made before a stream of its device is used.
    ///
    /// # Errors
    /// [`ManagerError::DeviceLost`] without a driver or a GPU; [`ManagerError::Other`] if there is no
    /// such device.
    pub fn new(device: DeviceId) -> Result<Cuda, ManagerError> {
        Cuda::on(CudaBackend::new().map_err(ManagerError::from_backend)?, device)
    }

    /// As [`new`](Self::new), on a backend that others use too.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn on(backend: CudaBackend, device: DeviceId) -> Result<Cuda, ManagerError> {
        backend.has_virtual_memory(device).map_err(ManagerError::from_backend)?;
        Ok(Cuda { backend, device })
    }

    /// Its backend, for streams among others.
    pub fn cuda(&self) -> &CudaBackend {
        &self.backend
    }
}

type Pinned = PinnedAllocator<OfBackend<CudaBackend>>;

impl Platform for Cuda {
    type Backend = CudaBackend;
    const KIND: DeviceType = DeviceType::Cuda;

    fn backend(&self) -> &CudaBackend {
        &self.backend
    }

    fn caching(&self, config: Config) -> Result<CachingAllocator<CudaBackend>, ManagerError> {
        match CudaAllocator::on(self.backend.clone(), config) {
            Ok(allocator) => Ok((*allocator).clone()),
            Err(error) => Err(cannot_start(error)),
        }
    }

    fn pinned(&self, config: HostConfig) -> Result<Box<dyn HostMemory<CudaStream>>, ManagerError> {
        let context = self.backend.context(self.device).map_err(ManagerError::from_backend)?;
        let source = OfBackend(self.backend.clone());
        let made = Pinned::with_source(source, &[context], config, PinOptions::default());
        match made {
            Ok(pinned) => Ok(Box::new(pinned)),
            Err(NewError::Backend(error)) => Err(ManagerError::from_backend(error)),
            Err(error) => Err(ManagerError::Other(Box::new(error))),
        }
    }

    fn default_stream(&self, device: DeviceId) -> Result<CudaStream, ManagerError> {
        self.backend.default_stream(device).map_err(ManagerError::from_backend)
    }

    fn new_stream(&self, device: DeviceId) -> Result<CudaStream, ManagerError> {
        self.backend.create_stream(device).map_err(ManagerError::from_backend)
    }

    fn queue_copy(&self, job: &CopyJob, stream: &CudaStream) -> Result<(), ManagerError> {
        let (device, host) = (job.device().get(), job.host().get() as usize);
        let stream = stream.driver_stream();
        let queued = match job.direction() {
            Direction::ToDevice => {
                let host = std::ptr::with_exposed_provenance(host);
                // SAFETY: only a manager makes a job: both ranges are of allocations of its own, which
                // it keeps until the copy is done, and slices of pinned memory are in its hands then.
                unsafe { stream.copy_to_device(device, host, job.bytes()) }
            }
            Direction::ToHost => {
                let host = std::ptr::with_exposed_provenance_mut(host);
                // SAFETY: as above.
                unsafe { stream.copy_to_host(host, device, job.bytes()) }
            }
        };
        queued.map_err(|error| ManagerError::from_backend(alloc_cuda::CudaError::from(error)))
    }

    fn synchronise(&self, stream: &CudaStream) -> Result<(), ManagerError> {
        let done = stream.driver_stream().synchronize();
        done.map_err(|error| ManagerError::from_backend(alloc_cuda::CudaError::from(error)))
    }
}

fn cannot_start(error: CudaAllocError) -> ManagerError {
    match error {
        AllocError::Backend { source, .. } => ManagerError::from_backend(source),
        error => ManagerError::Other(Box::new(error)),
    }
}

impl HostMemory<CudaStream> for Pinned {
    fn allocate(&self, bytes: u64, place: Place) -> Result<HostAllocation, ManagerError> {
        Pinned::allocate(self, bytes, place).map_err(|error| ManagerError::from_host(bytes, error))
    }

    fn free(&self, allocation: HostAllocation) -> Result<(), (HostAllocation, ManagerError)> {
        Pinned::free(self, allocation)
            .map_err(|refused| (refused.allocation, ManagerError::from_host(0, refused.error)))
    }

    fn record_use(
        &self,
        allocation: &HostAllocation,
        stream: &CudaStream,
    ) -> Result<(), ManagerError> {
        Pinned::record_use(self, allocation, stream)
            .map_err(|error| ManagerError::from_host(0, error))
    }

    fn empty_cache(&self) -> Result<(), ManagerError> {
        Pinned::empty_cache(self).map_err(|error| ManagerError::from_host(0, error))
    }

    fn stats(&self) -> AllocatorStats {
        let stats = Pinned::stats(self);
        let level = |stat: HostStat| Level { current: stat.current as u64, peak: stat.peak as u64 };
        AllocatorStats {
            allocated: level(stats.active_bytes),
            reserved: level(stats.allocated_bytes),
        }
    }
}

impl MemoryManager<Cuda> {
    /// The manager of the process, on device 0, made with the first call.
    ///
    /// # Errors
    /// [`ManagerError::DeviceLost`] without a driver or a GPU; the next call tries again.
    pub fn instance() -> Result<&'static MemoryManager<Cuda>, ManagerError> {
        static INSTANCE: OnceLock<MemoryManager<Cuda>> = OnceLock::new();
        static MAKING: Mutex<()> = Mutex::new(());
        if let Some(manager) = INSTANCE.get() {
            return Ok(manager);
        }
        let _one_at_a_time = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(manager) = INSTANCE.get() {
            return Ok(manager);
        }
        let config = ManagerConfig::default();
        let manager = MemoryManager::new(Cuda::new(config.device)?, config);
        Ok(INSTANCE.get_or_init(|| manager))
    }
}

/// Pinned bytes. New ones are zero, or what the last user of the memory left there.
impl Deref for PinnedBuffer<Cuda> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let start = std::ptr::with_exposed_provenance(self.addr().get() as usize);
        // SAFETY: the bytes are this buffer's own until it is dropped, pinned and so mapped, and never
        // uninitialised: pages of the system start as zeros. The device writes to them only in copies,
        // which take the buffer.
        unsafe { std::slice::from_raw_parts(start, self.bytes() as usize) }
    }
}

impl DerefMut for PinnedBuffer<Cuda> {
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = std::ptr::with_exposed_provenance_mut(self.addr().get() as usize);
        // SAFETY: as above, and the buffer is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(start, self.bytes() as usize) }
    }
}
