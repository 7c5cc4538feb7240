//! Events: points in a stream's work.

use crate::context::Context;
use crate::error::DriverError;
use crate::stream::{Stream, ready};
use crate::symbols::call;
use cudarc::driver::sys;
use std::ffi::c_uint;
use std::sync::Arc;

/// An event without timing. Recording it again moves it.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    /// The handle as a number: the driver's functions may be called on it from any thread.
    raw: usize,
}

impl Event {
    /// Creates an event; until it is first recorded it counts as reached.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn create(context: &Arc<Context>) -> Result<Event, DriverError> {
        Self::with_flags(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint)
    }

    fn with_flags(context: &Arc<Context>, flags: c_uint) -> Result<Event, DriverError> {
        let _current = context.enter()?;
        let mut raw: sys::CUevent = std::ptr::null_mut();
        // SAFETY: the place for the result is valid.
        unsafe { call!(context.driver(), event_create(&raw mut raw, flags)) }?;
        Ok(Self::adopt(context, raw))
    }

    /// Creates an event that other processes can open and wait for, as long as it exists here.
    ///
    /// # Errors
    /// Whatever the driver reports; there are only so many of these.
    pub fn create_shared(context: &Arc<Context>) -> Result<Event, DriverError> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint
            | sys::CUevent_flags::CU_EVENT_INTERPROCESS as c_uint;
        Self::with_flags(context, flags)
    }

    /// Takes over an event that the driver made.
    pub(crate) fn adopt(context: &Arc<Context>, raw: sys::CUevent) -> Event {
        Event { context: context.clone(), raw: raw.expose_provenance() }
    }

    /// The handle in the type of the driver's functions.
    pub(crate) fn handle(&self) -> sys::CUevent {
        std::ptr::with_exposed_provenance_mut(self.raw)
    }

    /// Its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Puts the event after all work queued on `stream` so far.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` if the stream is of another context.
    pub fn record(&self, stream: &Stream) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        // SAFETY: event and stream are alive.
        unsafe { call!(self.context.driver(), event_record(self.handle(), stream.handle())) }
    }

    /// Whether all work before the event is done.
    ///
    /// # Errors
    /// The failure of any of that work; `CUDA_ERROR_CAPTURED_EVENT` if it was recorded in a capture.
    pub fn is_reached(&self) -> Result<bool, DriverError> {
        let _current = self.context.enter()?;
        // SAFETY: the event is alive.
        ready(unsafe { call!(self.context.driver(), event_query(self.handle())) })
    }

    /// Waits until all work before the event is done.
    ///
    /// # Errors
    /// As [`is_reached`](Self::is_reached).
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        // SAFETY: the event is alive.
        unsafe { call!(self.context.driver(), event_synchronize(self.handle())) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // Failures mean that the driver is gone, and the event with it.
        if let Ok(_current) = self.context.enter() {
            // SAFETY: the event is ours and alive; nobody holds the handle after this.
            let _ = unsafe { call!(self.context.driver(), event_destroy(self.handle())) };
        }
    }
}
