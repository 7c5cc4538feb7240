//! Segments from `cuMemAlloc`.

use crate::error::CudaError;
use alloc_core::backend::{Refused, SEGMENT_ALIGN, Segment};
use alloc_core::{Addr, align_up};
use cuda_driver::{Context, DeviceMemory, DriverError, code};
use std::sync::Arc;

/// Memory from `cuMemAlloc`. Dropping it leaks: work may still be using it.
#[derive(Debug)]
pub struct CudaSegment {
    memory: DeviceMemory,
    base: Addr,
    bytes: u64,
}

impl Segment for CudaSegment {
    fn base(&self) -> Addr {
        self.base
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl CudaSegment {
    /// Allocates. The driver hands out whole 2 MiB from multiples of 2 MiB when asked for multiples
    /// of it, and may pack smaller requests together; so it is asked for those only.
    pub(crate) fn allocate(context: &Arc<Context>, bytes: u64) -> Result<Self, CudaError> {
        let whole = align_up(bytes, SEGMENT_ALIGN).ok_or(too_large())?;
        let memory = DeviceMemory::allocate(context, whole)?;
        let base = Addr::new(memory.addr());
        if base.is_aligned(SEGMENT_ALIGN) {
            return Ok(CudaSegment { memory, base, bytes });
        }
        // Nothing promises that alignment. Without it, a little more holds an aligned range.
        memory.free().map_err(|refused| refused.error)?;
        let more = whole.checked_add(SEGMENT_ALIGN).ok_or(too_large())?;
        let memory = DeviceMemory::allocate(context, more)?;
        let base = align_up(memory.addr(), SEGMENT_ALIGN).map(Addr::new).ok_or(too_large())?;
        Ok(CudaSegment { memory, base, bytes })
    }

    /// The whole allocation that it lies in.
    pub(crate) fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// Frees, waiting for the device.
    pub(crate) fn release(self) -> Result<(), Refused<Self, CudaError>> {
        let CudaSegment { memory, base, bytes } = self;
        memory.free().map_err(|refused| Refused {
            value: CudaSegment { memory: refused.value, base, bytes },
            error: refused.error.into(),
        })
    }
}

/// No device has memory at the end of the address space.
fn too_large() -> DriverError {
    DriverError::new("cuMemAlloc_v2", code::OUT_OF_MEMORY)
}
