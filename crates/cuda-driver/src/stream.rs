//! Streams.

use crate::context::Context;
use crate::error::{DriverError, code};
use crate::event::Event;
use crate::loader::Driver;
use crate::symbols::call;
use cudarc::driver::sys;
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

/// What a stream's capture is up to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CaptureStatus {
    /// Work is executed, as usual.
    None,
    /// Work is recorded into a graph. No other capture of the process has or had this number.
    Active(u64),
    /// Was being captured until something not allowed happened; the capture must still be ended.
    Invalidated,
}

/// A queue of work on a context's device.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    /// The handle as a number: the driver's functions may be called on it from any thread.
    raw: usize,
    owned: bool,
}

impl Stream {
    /// The raw handle of a context's legacy default stream; the null handle means the same.
    pub const LEGACY: usize = 1;
    /// The raw handle of the calling thread's default stream: every thread has its own behind it.
    pub const PER_THREAD: usize = 2;

    /// Creates a stream that does not wait for the legacy default stream.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` among others.
    pub fn create(context: &Arc<Context>) -> Result<Stream, DriverError> {
        let _current = context.enter()?;
        let mut raw: sys::CUstream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the place for the result is valid; priority 0 is the usual one.
        unsafe { call!(context.driver(), stream_create(&raw mut raw, flags, 0)) }?;
        Ok(Stream { context: context.clone(), raw: raw.expose_provenance(), owned: true })
    }

    /// The context's legacy default stream.
    pub fn legacy(context: &Arc<Context>) -> Stream {
        Stream { context: context.clone(), raw: Self::LEGACY, owned: false }
    }

    /// The default stream of whatever thread calls a method on the value.
    pub fn per_thread(context: &Arc<Context>) -> Stream {
        Stream { context: context.clone(), raw: Self::PER_THREAD, owned: false }
    }

    /// A stream that somebody else owns. It is not destroyed with the value.
    ///
    /// # Safety
    /// `raw` must be a stream of `context` that is alive for as long as methods are called on the
    /// value, or one of the special handles (null, [`LEGACY`](Self::LEGACY),
    /// [`PER_THREAD`](Self::PER_THREAD)). The driver follows a stale handle into freed memory.
    pub unsafe fn from_raw(context: &Arc<Context>, raw: *mut c_void) -> Stream {
        Stream { context: context.clone(), raw: raw.expose_provenance(), owned: false }
    }

    /// The driver's handle (a `CUstream`, which is also the runtime's `cudaStream_t`).
    pub fn raw(&self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.raw)
    }

    /// The handle in the type of the driver's functions.
    pub(crate) fn handle(&self) -> sys::CUstream {
        std::ptr::with_exposed_provenance_mut(self.raw)
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The driver's own id of the stream, which unlike the handle is never used again. The id of
    /// [`PER_THREAD`](Self::PER_THREAD) is that of the calling thread's stream.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` while the stream is being captured.
    pub fn unique_id(&self) -> Result<u64, DriverError> {
        let _current = self.context.enter()?;
        let mut id = 0;
        // SAFETY: the place for the result is valid; the stream is alive.
        unsafe { call!(self.context.driver(), stream_get_id(self.handle(), &raw mut id)) }?;
        Ok(id)
    }

    /// Whether the stream really was made in its context. A stream of a green context is of none
    /// that can be compared, and so is not.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn is_of_its_context(&self) -> Result<bool, DriverError> {
        let _current = self.context.enter()?;
        let mut owner: sys::CUcontext = std::ptr::null_mut();
        let driver = self.context.driver();
        // SAFETY: the place for the result is valid; the stream is alive.
        match unsafe { call!(driver, stream_get_ctx(self.handle(), &raw mut owner)) } {
            Ok(()) => Ok(owner == self.context.raw()),
            Err(error) if error.code == code::NOT_SUPPORTED => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether all work queued so far is done.
    ///
    /// # Errors
    /// The failure of any of that work.
    pub fn is_idle(&self) -> Result<bool, DriverError> {
        let _current = self.context.enter()?;
        // SAFETY: the stream is alive.
        ready(unsafe { call!(self.context.driver(), stream_query(self.handle())) })
    }

    /// Waits for all work queued so far.
    ///
    /// # Errors
    /// The failure of any of that work.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        // SAFETY: the stream is alive.
        unsafe { call!(self.context.driver(), stream_synchronize(self.handle())) }
    }

    /// Makes later work of this stream wait for `event`, of any device, without the host waiting.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn wait_event(&self, event: &Event) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        // SAFETY: stream and event are alive; flags must be 0.
        unsafe { call!(self.context.driver(), stream_wait_event(self.handle(), event.handle(), 0)) }
    }

    /// Calls `function` on a thread of the driver once all work queued so far is done; later work
    /// of the stream waits for it. It must call nothing of CUDA. A panic ends in it. Should the
    /// device fail before, it is never called (and leaks).
    ///
    /// # Errors
    /// Whatever the driver reports; `function` is dropped uncalled.
    pub fn call_host(&self, function: impl FnOnce() + Send + 'static) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        let boxed: Box<HostCall> = Box::new(Box::new(function));
        let data = Box::into_raw(boxed);
        // SAFETY: the stream is alive; `run_host_call` takes what `data` points to, once.
        let result = unsafe {
            call!(
                self.context.driver(),
                launch_host_func(self.handle(), Some(run_host_call), data.cast())
            )
        };
        if result.is_err() {
            // SAFETY: the call was refused, so the box is still ours alone.
            drop(unsafe { Box::from_raw(data) });
        }
        result
    }
}

impl Driver {
    /// The number of the device that a stream is of; for the special handles, of the device whose
    /// context is current.
    ///
    /// # Safety
    /// `raw` must be a stream that is alive, or a special handle.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_CONTEXT` for a special handle without a current context;
    /// `CUDA_ERROR_NOT_SUPPORTED` for a stream of a green context.
    pub unsafe fn device_of_stream(&self, raw: *mut c_void) -> Result<u16, DriverError> {
        let mut context: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: the place for the result is valid; the caller vouches for the stream.
        unsafe { call!(self, stream_get_ctx(raw.cast(), &raw mut context)) }?;
        let mut device: sys::CUdevice = 0;
        // SAFETY: the context was just returned, so it is valid.
        unsafe { call!(self, ctx_push_current(context)) }?;
        // SAFETY: the place for the result is valid.
        let found = unsafe { call!(self, ctx_get_device(&raw mut device)) };
        // SAFETY: the place for the result is valid; pops what was pushed.
        unsafe { call!(self, ctx_pop_current(&raw mut context)) }?;
        found?;
        // A device's handle is its number.
        u16::try_from(device).map_err(|_| DriverError::new("cuCtxGetDevice", code::INVALID_DEVICE))
    }
}

/// What [`Stream::call_host`] hands through the driver.
type HostCall = Box<dyn FnOnce() + Send>;

/// Runs one.
unsafe extern "C" fn run_host_call(data: *mut c_void) {
    // SAFETY: `data` came from `Box::into_raw` in `call_host`, and the driver calls back once.
    let function = unsafe { Box::from_raw(data.cast::<HostCall>()) };
    // Unwinding into the driver would be undefined; the panic has been printed.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(function));
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        // Work still queued is finished first by the driver. Failures mean that the driver is gone.
        if let Ok(_current) = self.context.enter() {
            // SAFETY: the stream is ours and alive; nobody holds the handle after this.
            let _ = unsafe { call!(self.context.driver(), stream_destroy(self.handle())) };
        }
    }
}

/// "Not ready" as an answer instead of an error.
pub(crate) fn ready(result: Result<(), DriverError>) -> Result<bool, DriverError> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.code == code::NOT_READY => Ok(false),
        Err(error) => Err(error),
    }
}
