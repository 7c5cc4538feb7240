//! Primary contexts, and making one current for the length of a call.

use crate::device::Device;
use crate::error::{DriverError, code};
use crate::loader::Driver;
use crate::symbols::call;
use cudarc::driver::sys;
use std::marker::PhantomData;
use std::sync::Arc;

/// A device's primary context, retained: the one that the CUDA runtime, PyTorch and cudarc use too.
/// Released with its last owner; streams, events and memory hold it.
#[derive(Debug)]
pub struct Context {
    device: Device,
    /// The handle as a number: the driver's functions may be called on it from any thread.
    raw: usize,
}

impl Context {
    /// Retains the primary context of `device`, creating it if nobody has yet (which takes some
    /// hundred milliseconds and some hundred MiB of the device).
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if the device is full; `CUDA_ERROR_DEVICE_UNAVAILABLE` if another
    /// process holds it alone.
    pub fn retain(device: Device) -> Result<Arc<Context>, DriverError> {
        let mut raw: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: the place for the result is valid.
        unsafe { call!(device.driver(), primary_ctx_retain(&raw mut raw, device.raw())) }?;
        Ok(Arc::new(Context { device, raw: raw.expose_provenance() }))
    }

    /// Its device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &'static Driver {
        self.device.driver()
    }

    /// The driver's handle.
    pub(crate) fn raw(&self) -> sys::CUcontext {
        std::ptr::with_exposed_provenance_mut(self.raw)
    }

    /// Makes the context current on this thread until the guard is dropped, which puts back what was
    /// current before, nothing included. Costs one cheap call if it is current already.
    ///
    /// # Errors
    /// `CUDA_ERROR_DEINITIALIZED` or `CUDA_ERROR_INVALID_CONTEXT` once it is gone.
    pub fn enter(&self) -> Result<Current<'_>, DriverError> {
        let driver = self.driver();
        let mut now: sys::CUcontext = std::ptr::null_mut();
        // SAFETY: the place for the result is valid.
        unsafe { call!(driver, ctx_get_current(&raw mut now)) }?;
        let pushed = now != self.raw();
        if pushed {
            // SAFETY: the context is retained, so the handle is valid.
            unsafe { call!(driver, ctx_push_current(self.raw())) }?;
        }
        Ok(Current { context: self, pushed, this_thread: PhantomData })
    }

    /// Waits for all work on the device.
    ///
    /// # Errors
    /// The failure of any of that work.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: takes no arguments; a context is current.
        unsafe { call!(self.driver(), ctx_synchronize()) }
    }

    /// Lets kernels of this context use `cuMemAlloc` memory of `peer`. Once enabled, no matter.
    /// Virtual memory has access rights of its own ([`AddressRange::set_access`]).
    ///
    /// [`AddressRange::set_access`]: crate::AddressRange::set_access
    ///
    /// Returns whether that is new.
    ///
    /// # Errors
    /// `CUDA_ERROR_PEER_ACCESS_UNSUPPORTED` if the devices are not connected.
    pub fn enable_peer_access(&self, peer: &Context) -> Result<bool, DriverError> {
        let _current = self.enter()?;
        // SAFETY: both contexts are retained; flags must be 0.
        match unsafe { call!(self.driver(), ctx_enable_peer_access(peer.raw(), 0)) } {
            Err(error) if error.code == code::PEER_ACCESS_ALREADY_ENABLED => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// Undoes [`enable_peer_access`](Self::enable_peer_access).
    ///
    /// # Errors
    /// `CUDA_ERROR_PEER_ACCESS_NOT_ENABLED` if there is nothing to undo.
    pub fn disable_peer_access(&self, peer: &Context) -> Result<(), DriverError> {
        let _current = self.enter()?;
        // SAFETY: both contexts are retained.
        unsafe { call!(self.driver(), ctx_disable_peer_access(peer.raw())) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: gives back what `retain` took, once. A failure means that the driver is gone,
        // and the context with it.
        let _ = unsafe { call!(self.driver(), primary_ctx_release(self.device.raw())) };
    }
}

/// A context is current on this thread. Dropping it restores what was current before.
#[derive(Debug)]
#[must_use]
pub struct Current<'a> {
    context: &'a Context,
    pushed: bool,
    /// What is current is a matter of the thread, so the guard stays on it.
    this_thread: PhantomData<*const ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: sys::CUcontext = std::ptr::null_mut();
            // SAFETY: the place for the result is valid. Fails only once the driver is gone, and
            // with it what was current.
            let _ = unsafe { call!(self.context.driver(), ctx_pop_current(&raw mut popped)) };
        }
    }
}
