//! Stream capture and graphs.

use crate::context::Context;
use crate::error::DriverError;
use crate::loader::Driver;
use crate::stream::Stream;
use crate::symbols::call;
use cudarc::driver::sys;
use std::marker::PhantomData;
use std::sync::Arc;

/// Which calls a capture forbids while it runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CaptureMode {
    /// Those that could disturb it, on every thread.
    Global,
    /// The same, on the capturing thread only.
    ThreadLocal,
    /// None.
    Relaxed,
}

impl CaptureMode {
    fn raw(self) -> sys::CUstreamCaptureMode {
        use sys::CUstreamCaptureMode_enum::*;
        match self {
            CaptureMode::Global => CU_STREAM_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Relaxed => CU_STREAM_CAPTURE_MODE_RELAXED,
        }
    }
}

impl Driver {
    /// Lets this thread call what captures forbid, until the guard is dropped. For calls known not
    /// to disturb them, such as allocating memory.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn relax_captures(&self) -> Result<RelaxedCaptures<'_>, DriverError> {
        let before = self.exchange_capture_mode(CaptureMode::Relaxed.raw() as u32)?;
        Ok(RelaxedCaptures { driver: self, before, this_thread: PhantomData })
    }

    /// Sets the thread's mode and returns the one it had.
    fn exchange_capture_mode(&self, mode: u32) -> Result<u32, DriverError> {
        let mut mode = mode;
        let place = (&raw mut mode).cast::<sys::CUstreamCaptureMode>();
        // SAFETY: the place holds a mode and is as large as the C enum; it is read as a number.
        unsafe { call!(self, thread_exchange_capture_mode(place)) }?;
        Ok(mode)
    }
}

/// Captures forbid this thread nothing. Dropping it restores what they forbade before.
#[derive(Debug)]
#[must_use]
pub struct RelaxedCaptures<'a> {
    driver: &'a Driver,
    before: u32,
    /// The mode is a matter of the thread, so the guard stays on it.
    this_thread: PhantomData<*const ()>,
}

impl Drop for RelaxedCaptures<'_> {
    fn drop(&mut self) {
        // Fails only once the driver is gone.
        let _ = self.driver.exchange_capture_mode(self.before);
    }
}

impl Stream {
    /// Starts recording the stream's work in place of running it.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` on the legacy default stream.
    pub fn begin_capture(&self, mode: CaptureMode) -> Result<(), DriverError> {
        let _current = self.context().enter()?;
        let driver = self.context().driver();
        // SAFETY: the stream is alive.
        unsafe { call!(driver, stream_begin_capture(self.handle(), mode.raw())) }
    }

    /// Ends the recording.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED` and others if something broke it on the way; the
    /// stream is back to normal all the same.
    pub fn end_capture(&self) -> Result<Graph, DriverError> {
        let _current = self.context().enter()?;
        let mut raw: sys::CUgraph = std::ptr::null_mut();
        let driver = self.context().driver();
        // SAFETY: the place for the result is valid and the stream is alive.
        unsafe { call!(driver, stream_end_capture(self.handle(), &raw mut raw)) }?;
        Ok(Graph { context: self.context().clone(), raw: raw.expose_provenance() })
    }
}

/// Recorded work.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    /// The handle as a number; only used through `&mut` or by value, as graphs are not thread-safe.
    raw: usize,
}

impl Graph {
    /// Makes the work executable.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn instantiate(self) -> Result<ExecutableGraph, DriverError> {
        let _current = self.context.enter()?;
        let graph: sys::CUgraph = std::ptr::with_exposed_provenance_mut(self.raw);
        let mut raw: sys::CUgraphExec = std::ptr::null_mut();
        // SAFETY: the place for the result is valid; the graph is ours; no flags.
        unsafe { call!(self.context.driver(), graph_instantiate(&raw mut raw, graph, 0)) }?;
        Ok(ExecutableGraph { context: self.context.clone(), raw: raw.expose_provenance() })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let graph: sys::CUgraph = std::ptr::with_exposed_provenance_mut(self.raw);
        // SAFETY: the graph is ours. Failures mean that the driver is gone.
        let _ = unsafe { call!(self.context.driver(), graph_destroy(graph)) };
    }
}

/// Recorded work, ready to run again and again.
#[derive(Debug)]
pub struct ExecutableGraph {
    context: Arc<Context>,
    raw: usize,
}

impl ExecutableGraph {
    /// Queues a run on `stream`.
    ///
    /// # Safety
    /// What the recorded work reads and writes must still be valid.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub unsafe fn launch(&mut self, stream: &Stream) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        let graph: sys::CUgraphExec = std::ptr::with_exposed_provenance_mut(self.raw);
        // SAFETY: graph and stream are alive; the caller vouches for the memory.
        unsafe { call!(self.context.driver(), graph_launch(graph, stream.handle())) }
    }
}

impl Drop for ExecutableGraph {
    fn drop(&mut self) {
        let graph: sys::CUgraphExec = std::ptr::with_exposed_provenance_mut(self.raw);
        // SAFETY: the graph is ours; a running one is freed after. Failures mean that the driver
        // is gone.
        let _ = unsafe { call!(self.context.driver(), graph_exec_destroy(graph)) };
    }
}
