//! Pinned host memory: what the driver can copy from and to without a detour.

use crate::context::Context;
use crate::error::DriverError;
use crate::memory::size;
use crate::symbols::call;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::ptr::NonNull;

/// How pinned memory may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HostFlags {
    /// Counts as pinned in every context, not only in this one.
    pub portable: bool,
    /// Kernels may use it (on current systems they may anyway).
    pub device_map: bool,
    /// Not cached by the processor: fast to write and for the device, very slow to read. Only for
    /// allocation; registration ignores it.
    pub write_combined: bool,
}

impl HostFlags {
    /// Flags of `cuMemHostAlloc`.
    fn for_allocation(self) -> u32 {
        let write_combined = u32::from(self.write_combined) * sys::CU_MEMHOSTALLOC_WRITECOMBINED;
        self.common() | write_combined
    }

    /// Flags that both calls share, under equal numbers.
    fn common(self) -> u32 {
        const { assert!(sys::CU_MEMHOSTALLOC_PORTABLE == sys::CU_MEMHOSTREGISTER_PORTABLE) };
        const { assert!(sys::CU_MEMHOSTALLOC_DEVICEMAP == sys::CU_MEMHOSTREGISTER_DEVICEMAP) };
        let portable = u32::from(self.portable) * sys::CU_MEMHOSTALLOC_PORTABLE;
        let device_map = u32::from(self.device_map) * sys::CU_MEMHOSTALLOC_DEVICEMAP;
        portable | device_map
    }
}

impl Context {
    /// Allocates pinned host memory, page aligned. Slow: pages are faulted in and locked.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn host_allocate(&self, bytes: u64, flags: HostFlags) -> Result<NonNull<u8>, DriverError> {
        let _current = self.enter()?;
        let mut place: *mut c_void = std::ptr::null_mut();
        let flags = flags.for_allocation();
        // SAFETY: the place for the result is valid.
        unsafe { call!(self.driver(), mem_host_alloc(&raw mut place, size(bytes), flags)) }?;
        let memory = NonNull::new(place.cast::<u8>());
        memory.ok_or(DriverError::new("cuMemHostAlloc", crate::code::OUT_OF_MEMORY))
    }

    /// Gives back memory of [`host_allocate`](Self::host_allocate). Waits for the device.
    ///
    /// # Safety
    /// `memory` must come from there, not have been freed, and nothing may use it any more.
    ///
    /// # Errors
    /// `CUDA_ERROR_DEINITIALIZED` once the driver is gone; the memory goes with the process.
    pub unsafe fn host_free(&self, memory: NonNull<u8>) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: passed on from the caller.
        unsafe { call!(self.driver(), mem_free_host(memory.as_ptr().cast())) }
    }

    /// Pins `bytes` of ordinary memory from `memory` on; whole pages are best.
    ///
    /// # Safety
    /// The range must be mapped, and stay so until [`host_unregister`](Self::host_unregister).
    ///
    /// # Errors
    /// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED` if any of it is pinned already;
    /// `CUDA_ERROR_NOT_SUPPORTED` where the system cannot.
    pub unsafe fn host_register(
        &self,
        memory: NonNull<u8>,
        bytes: u64,
        flags: HostFlags,
    ) -> Result<(), DriverError> {
        let _current = self.enter()?;
        let start = memory.as_ptr().cast();
        // SAFETY: passed on from the caller.
        unsafe { call!(self.driver(), mem_host_register(start, size(bytes), flags.common())) }
    }

    /// Unpins memory of [`host_register`](Self::host_register), by its first address.
    ///
    /// # Safety
    /// No queued work may use it any more as pinned memory.
    ///
    /// # Errors
    /// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED` if it was not registered.
    pub unsafe fn host_unregister(&self, memory: NonNull<u8>) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: passed on from the caller.
        unsafe { call!(self.driver(), mem_host_unregister(memory.as_ptr().cast())) }
    }
}
