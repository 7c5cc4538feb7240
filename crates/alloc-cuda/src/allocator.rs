//! The allocator, and memory that frees itself.

use crate::backend::CudaBackend;
use crate::buffer::{DeviceBuffer, Plain};
use crate::error::CudaError;
use crate::stream::CudaStream;
use alloc_core::backend::Backend;
use alloc_core::{AllocError, CachingAllocator, Config, DeviceId};
use std::ops::Deref;
use std::time::Instant;

/// An error of a [`CudaAllocator`].
pub type CudaAllocError = AllocError<CudaError>;

/// A caching allocator for the memory of all GPUs that the process sees. Clones are the same
/// allocator.
///
/// It dereferences to the generic [`CachingAllocator`], which has the interfaces by handle and by raw
/// address, statistics, limits and traces.
#[derive(Clone, Debug)]
pub struct CudaAllocator {
    inner: CachingAllocator<CudaBackend>,
}

impl Deref for CudaAllocator {
    type Target = CachingAllocator<CudaBackend>;

    fn deref(&self) -> &Self::Target {
        &self.inner
    }
}

impl CudaAllocator {
    /// An allocator on a backend of its own.
    ///
    /// # Errors
    /// [`AllocError::Backend`] with [`CudaError::Load`] without a driver or GPU, or with
    /// [`CudaError::NoVirtualMemory`] if `config` asks for expandable segments that a device lacks.
    pub fn new(config: Config) -> Result<CudaAllocator, CudaAllocError> {
        let backend = CudaBackend::new().map_err(cannot_start)?;
        Self::on(backend, config)
    }

    /// An allocator on a backend that others use too.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn on(backend: CudaBackend, config: Config) -> Result<CudaAllocator, CudaAllocError> {
        for device in (0..backend.device_count()).map(DeviceId::new) {
            if backend.has_virtual_memory(device).map_err(cannot_start)? {
                continue;
            }
            if config.settings.expandable_segments == Some(true) {
                return Err(cannot_start(CudaError::NoVirtualMemory { device }));
            }
            return Ok(CudaAllocator { inner: CachingAllocator::new(backend, config)? });
        }
        let inner = CachingAllocator::with_virtual_memory(backend, config)?;
        let begin = Instant::now();
        inner.set_clock(move || begin.elapsed());
        Ok(CudaAllocator { inner })
    }

    /// `count` values of device memory for use on `stream`, not initialised. They go back to the
    /// allocator when the buffer is dropped.
    ///
    /// # Errors
    /// As [`CachingAllocator::allocate`].
    pub fn buffer<T: Plain>(
        &self,
        count: usize,
        stream: &CudaStream,
    ) -> Result<DeviceBuffer<T>, CudaAllocError> {
        let bytes = (count as u64).checked_mul(size_of::<T>() as u64);
        let too_large = AllocError::TooLarge { requested: u64::MAX };
        let allocation = self.inner.allocate(bytes.ok_or(too_large)?, stream)?;
        Ok(DeviceBuffer::new(self.clone(), allocation, count, stream.clone()))
    }
}

/// The first call that needs the driver is the one for the devices' memory.
fn cannot_start(source: CudaError) -> CudaAllocError {
    AllocError::Backend { op: alloc_core::BackendOp::Memory, source }
}
