//! The driver's own stream-ordered allocator.

use crate::device::Device;
use crate::error::DriverError;
use crate::memory::size;
use crate::stream::Stream;
use crate::symbols::call;
use cudarc::driver::sys;

/// A pool that `cuMemAllocAsync` takes memory from. Lives as long as its device.
#[derive(Debug)]
pub struct MemoryPool {
    device: Device,
    /// The handle as a number: the driver's functions may be called on it from any thread.
    raw: usize,
}

/// A number that a pool knows about itself, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolCounter {
    /// Held of the device now.
    ReservedNow,
    /// The most ever held.
    ReservedPeak,
    /// Handed out now.
    UsedNow,
    /// The most ever handed out.
    UsedPeak,
}

impl MemoryPool {
    /// The pool that allocations on `device` come from unless told otherwise.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` where there are no pools.
    pub fn default_of(device: Device) -> Result<MemoryPool, DriverError> {
        let mut raw: sys::CUmemoryPool = std::ptr::null_mut();
        // SAFETY: the place for the result is valid.
        unsafe { call!(device.driver(), device_get_default_mem_pool(&raw mut raw, device.raw())) }?;
        Ok(MemoryPool { device, raw: raw.expose_provenance() })
    }

    fn handle(&self) -> sys::CUmemoryPool {
        std::ptr::with_exposed_provenance_mut(self.raw)
    }

    /// How much unused memory the pool keeps at a synchronisation; `u64::MAX` for all.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn set_release_threshold(&self, bytes: u64) -> Result<(), DriverError> {
        let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let mut value = bytes;
        let place = (&raw mut value).cast();
        // SAFETY: the attribute is a 64-bit number, and so is what is pointed to.
        unsafe {
            call!(self.device.driver(), mem_pool_set_attribute(self.handle(), attribute, place))
        }
    }

    /// One of its counters.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn counter(&self, counter: PoolCounter) -> Result<u64, DriverError> {
        use sys::CUmemPool_attribute_enum::*;
        let attribute = match counter {
            PoolCounter::ReservedNow => CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
            PoolCounter::ReservedPeak => CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
            PoolCounter::UsedNow => CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
            PoolCounter::UsedPeak => CU_MEMPOOL_ATTR_USED_MEM_HIGH,
        };
        let mut value = 0u64;
        let place = (&raw mut value).cast();
        // SAFETY: the attribute is a 64-bit number, and so is what is pointed to.
        unsafe {
            call!(self.device.driver(), mem_pool_get_attribute(self.handle(), attribute, place))
        }?;
        Ok(value)
    }

    /// Gives unused memory back to the device until at most `keep` bytes are held.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn trim(&self, keep: u64) -> Result<(), DriverError> {
        // SAFETY: the pool lives as long as its device.
        unsafe { call!(self.device.driver(), mem_pool_trim_to(self.handle(), size(keep))) }
    }
}

impl Stream {
    /// Allocates from the device's current pool; usable by work queued on this stream from now on.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn allocate_async(&self, bytes: u64) -> Result<u64, DriverError> {
        let _current = self.context().enter()?;
        let mut addr = 0;
        // SAFETY: the place for the result is valid and the stream is alive.
        unsafe {
            call!(
                self.context().driver(),
                mem_alloc_async(&raw mut addr, size(bytes), self.handle())
            )
        }?;
        Ok(addr)
    }

    /// Gives such memory back once the work queued so far is done.
    ///
    /// # Safety
    /// `addr` must come from [`allocate_async`](Self::allocate_async) and not have been freed.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if it is no such address.
    pub unsafe fn free_async(&self, addr: u64) -> Result<(), DriverError> {
        let _current = self.context().enter()?;
        // SAFETY: passed on from the caller; the stream is alive.
        unsafe { call!(self.context().driver(), mem_free_async(addr, self.handle())) }
    }
}
