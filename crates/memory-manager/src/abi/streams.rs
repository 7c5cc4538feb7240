//! Streams at the C interface.

use super::{Failure, functions, guarded, handle, is_place, mm_manager, mm_status, put};
use crate::error::ManagerError;
use crate::platform::Platform;
use alloc_cuda::{CudaBackend, CudaStream};
use std::ffi::c_void;

/// Handles up to this one are no pointers: the default streams.
const SPECIAL_MAX: usize = 2;

impl mm_manager {
    fn cuda(&self) -> &CudaBackend {
        self.manager.platform().cuda()
    }

    /// The stream of a handle, of whichever device it is; the default streams are those of the
    /// manager's device.
    ///
    /// # Safety
    /// `raw` must be null, 1, 2 or a stream that is alive.
    pub(crate) unsafe fn stream(&self, raw: *mut c_void) -> Result<CudaStream, Failure> {
        if let Some(own) = self.streams.lock().get(&raw.addr()) {
            return Ok(own.clone());
        }
        let device = match raw.addr() {
            ..=SPECIAL_MAX => Ok(self.manager.device()),
            // SAFETY: passed on from the caller.
            _ => unsafe { self.cuda().device_of_stream(raw) },
        };
        let device = device.map_err(ManagerError::from_backend)?;
        // SAFETY: alive by the caller's promise, and kept so until it is retired: that is what the
        // header demands.
        let adopted = unsafe { self.cuda().adopt(device, raw) };
        Ok(adopted.map_err(ManagerError::from_backend)?)
    }
}

functions! {
    /// `mm_stream_create`.
    fn mm_stream_create(out: *mut *mut c_void) |known| {
        is_place(out)?;
        let stream = known.manager.platform().new_stream(known.manager.device())?;
        let raw = stream.raw();
        known.streams.lock().insert(raw.addr(), stream);
        // SAFETY: passed on from the caller.
        unsafe { put(out, raw) }
    }

    /// `mm_stream_synchronize`.
    fn mm_stream_synchronize(stream: *mut c_void) |known| {
        // SAFETY: passed on from the caller.
        let stream = unsafe { known.stream(stream) }?;
        Ok(known.manager.platform().synchronise(&stream)?)
    }

    /// `mm_stream_destroy`.
    fn mm_stream_destroy(stream: *mut c_void) |known| {
        let known = known.streams.lock().remove(&stream.addr());
        // Memory that it uses keeps it for as long as it must.
        known.map(drop).ok_or(Failure::Argument("the stream is not one of mm_stream_create"))
    }

    /// `mm_stream_retire`.
    fn mm_stream_retire(stream: *mut c_void) |known| {
        // SAFETY: passed on from the caller.
        let stream = unsafe { known.stream(stream) }?;
        if !stream.is_foreign() {
            return Err(Failure::Argument("only a stream of somebody else's is retired"));
        }
        Ok(known.cuda().retire(&stream).map_err(ManagerError::from_backend)?)
    }
}
