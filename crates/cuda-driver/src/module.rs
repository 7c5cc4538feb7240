//! Kernels from PTX text.

use crate::context::Context;
use crate::error::DriverError;
use crate::stream::Stream;
use crate::symbols::call;
use cudarc::driver::sys;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

/// Compiled code on a device.
#[derive(Debug)]
pub struct Module {
    context: Arc<Context>,
    /// The handle as a number: the driver's functions may be called on it from any thread.
    raw: usize,
}

impl Module {
    /// Compiles PTX text for the device.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_PTX`, `CUDA_ERROR_NO_BINARY_FOR_GPU`, …
    pub fn load_ptx(context: &Arc<Context>, text: &CStr) -> Result<Arc<Module>, DriverError> {
        let _current = context.enter()?;
        let mut raw: sys::CUmodule = std::ptr::null_mut();
        // SAFETY: the place for the result is valid; PTX is passed as a string that ends in NUL.
        unsafe { call!(context.driver(), module_load_data(&raw mut raw, text.as_ptr().cast())) }?;
        Ok(Arc::new(Module { context: context.clone(), raw: raw.expose_provenance() }))
    }

    /// A kernel by name. It holds the module.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_FOUND`.
    pub fn kernel(self: &Arc<Self>, name: &CStr) -> Result<Kernel, DriverError> {
        let _current = self.context.enter()?;
        let mut raw: sys::CUfunction = std::ptr::null_mut();
        // SAFETY: the place for the result is valid and the module is alive.
        unsafe {
            call!(
                self.context.driver(),
                module_get_function(&raw mut raw, self.handle(), name.as_ptr())
            )
        }?;
        Ok(Kernel { module: self.clone(), raw: raw.expose_provenance() })
    }

    fn handle(&self) -> sys::CUmodule {
        std::ptr::with_exposed_provenance_mut(self.raw)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // Failures mean that the driver is gone, and the module with it.
        if let Ok(_current) = self.context.enter() {
            // SAFETY: the module is ours; no kernel of it is left, since they hold it.
            let _ = unsafe { call!(self.context.driver(), module_unload(self.handle())) };
        }
    }
}

/// A value passed to a kernel, of the size its parameter has in the PTX.
#[derive(Clone, Copy, Debug)]
pub enum Argument {
    /// A `.u32` parameter.
    Word(u32),
    /// A `.u64` parameter: an address or a count.
    Long(u64),
}

/// How many threads run.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Blocks, in one dimension.
    pub blocks: u32,
    /// Threads of each block.
    pub threads: u32,
}

/// A function of a module that runs on the device.
#[derive(Debug)]
pub struct Kernel {
    module: Arc<Module>,
    raw: usize,
}

impl Kernel {
    /// Queues a run.
    ///
    /// # Safety
    /// * `arguments` must be as many as the kernel has parameters, and of their sizes.
    /// * What the kernel writes with them must be device memory, or host memory that no reference
    ///   points into until it is done.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a shape that the device cannot run.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        shape: Shape,
        arguments: &[Argument],
    ) -> Result<(), DriverError> {
        let context = &self.module.context;
        let _current = context.enter()?;
        let mut values: Vec<u64> = arguments.iter().map(Argument::bits).collect();
        let mut places: Vec<*mut c_void> =
            values.iter_mut().map(|value| std::ptr::from_mut(value).cast()).collect();
        let kernel: sys::CUfunction = std::ptr::with_exposed_provenance_mut(self.raw);
        // SAFETY: the kernel and the stream are alive; every place holds a value of at least the
        // parameter's size, read before the call returns; the caller vouches for the rest.
        unsafe {
            call!(
                context.driver(),
                launch_kernel(
                    kernel,
                    shape.blocks,
                    1,
                    1,
                    shape.threads,
                    1,
                    1,
                    0,
                    stream.handle(),
                    places.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            )
        }
    }
}

impl Argument {
    /// The value in the low bytes, where a little-endian device reads either size.
    fn bits(&self) -> u64 {
        match *self {
            Argument::Word(value) => u64::from(value).to_le(),
            Argument::Long(value) => value.to_le(),
        }
    }
}
