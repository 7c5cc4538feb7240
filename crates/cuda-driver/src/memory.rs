//! Device memory and copies.
//!
//! Nothing here makes a reference into device memory, so a wrong device address is a fault that the
//! driver reports, not undefined behaviour. What is `unsafe` takes host pointers, or writes to
//! addresses that might be host memory the GPU can also reach.

use crate::context::Context;
use crate::error::{DriverError, Refused};
use crate::stream::Stream;
use crate::symbols::call;
use std::sync::Arc;

/// Free and total memory of a device, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryInfo {
    /// Used by no process.
    pub free: u64,
    /// The whole device.
    pub total: u64,
}

impl Context {
    /// How much memory the device has and has left.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn memory_info(&self) -> Result<MemoryInfo, DriverError> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both places are valid.
        unsafe { call!(self.driver(), mem_get_info(&raw mut free, &raw mut total)) }?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }

    /// Copies from host to device and waits for it. Ordered after the legacy default stream only.
    ///
    /// # Safety
    /// The bytes from `to` on must be device memory, or host memory that no reference points into.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if they are not all accessible.
    pub unsafe fn copy_to_device(&self, to: u64, from: &[u8]) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: the source is a slice; the caller vouches for the target.
        unsafe { call!(self.driver(), memcpy_htod(to, from.as_ptr().cast(), from.len())) }
    }

    /// Copies from device to host and waits for it. Ordered after the legacy default stream only.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the source is not accessible.
    pub fn copy_to_host(&self, to: &mut [u8], from: u64) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: the target is a slice, and any bytes are valid in it.
        unsafe { call!(self.driver(), memcpy_dtoh(to.as_mut_ptr().cast(), from, to.len())) }
    }
}

/// Memory from `cuMemAlloc`. Owned; dropping it without [`free`](DeviceMemory::free) leaks, because
/// work may still be using it.
#[derive(Debug)]
#[must_use = "dropping it leaks the memory"]
pub struct DeviceMemory {
    context: Arc<Context>,
    addr: u64,
    bytes: u64,
}

impl DeviceMemory {
    /// Allocates. Waits for nothing.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn allocate(context: &Arc<Context>, bytes: u64) -> Result<DeviceMemory, DriverError> {
        let _current = context.enter()?;
        let mut addr = 0;
        // SAFETY: the place for the result is valid.
        unsafe { call!(context.driver(), mem_alloc(&raw mut addr, size(bytes))) }?;
        Ok(DeviceMemory { context: context.clone(), addr, bytes })
    }

    /// Its first address.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where it is.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Gives it back. Waits for all work of the device that came before.
    ///
    /// # Errors
    /// Hands the memory back with the reason.
    pub fn free(self) -> Result<(), Refused<DeviceMemory>> {
        match self.try_free() {
            Ok(()) => Ok(()),
            Err(error) => Err(Refused { value: self, error }),
        }
    }

    /// The call. On success the value owns nothing any more.
    fn try_free(&self) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        // SAFETY: the address came from cuMemAlloc in this context and was not freed since.
        unsafe { call!(self.context.driver(), mem_free(self.addr)) }
    }
}

/// Copies and fills that are queued. All ranges must stay valid until the stream has done them.
impl Stream {
    /// Queues a copy from host to device. From pageable memory the source is read before the call
    /// returns; from pinned memory later.
    ///
    /// # Safety
    /// * `from` must be readable for `bytes` until the copy is done.
    /// * The bytes from `to` on must be device memory, or host memory that no reference points into
    ///   until then.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if a range is not accessible.
    pub unsafe fn copy_to_device(
        &self,
        to: u64,
        from: *const u8,
        bytes: u64,
    ) -> Result<(), DriverError> {
        let _current = self.context().enter()?;
        // SAFETY: the caller vouches for both ranges; the stream is alive.
        unsafe {
            call!(
                self.context().driver(),
                memcpy_htod_async(to, from.cast(), size(bytes), self.handle())
            )
        }
    }

    /// Queues a copy from device to host. Into pageable memory it is done before the call returns.
    ///
    /// # Safety
    /// `to` must be writable for `bytes`, and nothing may read it, until the copy is done.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if a range is not accessible.
    pub unsafe fn copy_to_host(
        &self,
        to: *mut u8,
        from: u64,
        bytes: u64,
    ) -> Result<(), DriverError> {
        let _current = self.context().enter()?;
        // SAFETY: the caller vouches for the target; the stream is alive.
        unsafe {
            call!(
                self.context().driver(),
                memcpy_dtoh_async(to.cast(), from, size(bytes), self.handle())
            )
        }
    }

    /// Queues a copy within or between devices.
    ///
    /// # Safety
    /// As [`fill`](Self::fill), for the bytes from `to` on.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if a range is not accessible.
    pub unsafe fn copy_on_device(&self, to: u64, from: u64, bytes: u64) -> Result<(), DriverError> {
        let _current = self.context().enter()?;
        // SAFETY: the caller vouches for the target; the stream is alive.
        unsafe {
            call!(self.context().driver(), memcpy_dtod_async(to, from, size(bytes), self.handle()))
        }
    }

    /// Queues writing `byte` to `bytes` bytes from `to` on.
    ///
    /// # Safety
    /// The bytes must be device memory, or host memory that no reference points into until the
    /// write is done.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if they are not accessible.
    pub unsafe fn fill(&self, to: u64, byte: u8, bytes: u64) -> Result<(), DriverError> {
        let _current = self.context().enter()?;
        // SAFETY: the caller vouches for the target; the stream is alive.
        unsafe {
            call!(self.context().driver(), memset_d8_async(to, byte, size(bytes), self.handle()))
        }
    }

    /// Queues writing `word` to `words` 32-bit words from `to` on, a multiple of 4.
    ///
    /// # Safety
    /// As [`fill`](Self::fill).
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if they are not accessible.
    pub unsafe fn fill_words(&self, to: u64, word: u32, words: u64) -> Result<(), DriverError> {
        let _current = self.context().enter()?;
        // SAFETY: the caller vouches for the target; the stream is alive.
        unsafe {
            call!(self.context().driver(), memset_d32_async(to, word, size(words), self.handle()))
        }
    }
}

/// A size as the driver takes it. On a machine with short pointers a larger one saturates, and the
/// driver refuses it.
pub(crate) fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
