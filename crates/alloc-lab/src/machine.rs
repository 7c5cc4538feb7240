//! The device that an allocator works on: a simulated one, or the first real one.

use std::time::Instant;

use alloc_core::backend::{MemoryInfo, VirtualMemory};
use alloc_core::{CachingAllocator, Config, DeviceId};
use alloc_cuda::{CudaBackend, CudaError};

use crate::error::Failure;

/// The device that is used. Others are left alone.
pub const DEVICE: DeviceId = DeviceId::new(0);

/// What runs the driver calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum BackendName {
    /// A simulated device
    Mock,
    /// The first CUDA device
    Cuda,
}

impl BackendName {
    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            BackendName::Mock => "mock",
            BackendName::Cuda => "cuda",
        }
    }
}

/// The CUDA driver.
///
/// # Errors
/// [`Failure::NoGpu`] if there is no driver or no device; [`Failure::Refused`] if the driver fails
/// otherwise.
pub fn cuda() -> Result<CudaBackend, Failure> {
    CudaBackend::new().map_err(|error| match error {
        CudaError::Load(_) => Failure::NoGpu(error.to_string()),
        _ => Failure::Refused(error.to_string()),
    })
}

/// An allocator on `backend`, without virtual memory if the device has none. It does not know the
/// time, so that it decides as on a simulated device.
///
/// # Errors
/// [`Failure::Refused`] with the driver's reason, or if `config` asks for expandable segments that
/// the device lacks.
pub fn allocator<B: VirtualMemory + MemoryInfo>(
    backend: B,
    config: Config,
    has_virtual_memory: bool,
) -> Result<CachingAllocator<B>, Failure> {
    let allocator = match has_virtual_memory {
        true => CachingAllocator::with_virtual_memory(backend, config),
        false => CachingAllocator::new(backend, config),
    };
    allocator.map_err(|error| Failure::Refused(error.to_string()))
}

/// As [`allocator`], but it knows the time, as that of a program on CUDA does.
///
/// # Errors
/// As there.
pub fn timed_allocator<B: VirtualMemory + MemoryInfo>(
    backend: B,
    config: Config,
    has_virtual_memory: bool,
) -> Result<CachingAllocator<B>, Failure> {
    let allocator = allocator(backend, config, has_virtual_memory)?;
    let begin = Instant::now();
    allocator.set_clock(move || begin.elapsed());
    Ok(allocator)
}
