//! Stream capture and graphs.

use crate::context::Context;
use crate::error::{DriverError, code};
use crate::loader::Driver;
use crate::stream::{CaptureStatus, Stream};
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

/// Where a stream stands in the graph of a capture that goes on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CaptureTips {
    /// The capture's number; see [`CaptureStatus::Active`].
    pub capture: u64,
    /// The nodes that the stream's next work comes right after, as numbers that mean nothing
    /// once the capture is over.
    pub nodes: Vec<usize>,
}

impl Stream {
    /// Whether the stream is being captured.
    ///
    /// # Errors
    /// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT` on the legacy stream while a blocking one is captured.
    pub fn capture_status(&self) -> Result<CaptureStatus, DriverError> {
        let _current = self.context().enter()?;
        let (mut status, mut id) = (0u32, 0);
        let place = (&raw mut status).cast::<sys::CUstreamCaptureStatus>();
        // SAFETY: the places are valid, the status one as large as the C enum and read back as a
        // number; the other results are not wanted.
        unsafe {
            call!(
                self.context().driver(),
                stream_get_capture_info(
                    self.handle(),
                    place,
                    &raw mut id,
                    std::ptr::null_mut(),
                    std::ptr::null_mut(),
                    std::ptr::null_mut()
                )
            )
        }?;
        Ok(match status {
            0 => CaptureStatus::None,
            1 => CaptureStatus::Active(id),
            _ => CaptureStatus::Invalidated,
        })
    }

    /// Where the stream stands in the graph of its capture; `None` if it is not being captured, or
    /// if the driver cannot tell because the graph has edges with data (`cuLaunchKernelEx` with
    /// programmatic launch).
    ///
    /// # Safety
    /// Until it returns, no other thread may queue work on the stream or end its capture.
    ///
    /// # Errors
    /// As [`capture_status`](Self::capture_status).
    pub unsafe fn capture_tips(&self) -> Result<Option<CaptureTips>, DriverError> {
        let _current = self.context().enter()?;
        let (mut status, mut capture) = (0u32, 0);
        let place = (&raw mut status).cast::<sys::CUstreamCaptureStatus>();
        let mut nodes: *const sys::CUgraphNode = std::ptr::null();
        let mut count = 0;
        // SAFETY: as in `capture_status`; the graph is not wanted.
        let asked = unsafe {
            call!(
                self.context().driver(),
                stream_get_capture_info(
                    self.handle(),
                    place,
                    &raw mut capture,
                    std::ptr::null_mut(),
                    &raw mut nodes,
                    &raw mut count
                )
            )
        };
        match asked {
            Err(error) if error.code == code::LOSSY_QUERY => return Ok(None),
            result => result?,
        }
        if status != 1 {
            return Ok(None);
        }
        let mut tips = Vec::with_capacity(count);
        for index in 0..count {
            // SAFETY: the driver's array has as many entries, and stays until the next call about
            // the stream, which the caller rules out.
            let node = unsafe { nodes.wrapping_add(index).read() };
            tips.push(node.expose_provenance());
        }
        Ok(Some(CaptureTips { capture, nodes: tips }))
    }

    /// Shows `note` the nodes that the stream's next work comes after, at however many removes. It
    /// returns whether the node is new to it: if not, what comes before that node
    /// is not walked. Shows none if the stream is not being captured, and stops where the driver
    /// cannot tell what a node comes after.
    ///
    /// # Safety
    /// As [`capture_tips`](Self::capture_tips).
    ///
    /// # Errors
    /// As [`capture_status`](Self::capture_status).
    pub unsafe fn walk_captured_past(
        &self,
        mut note: impl FnMut(usize) -> bool,
    ) -> Result<(), DriverError> {
        // SAFETY: passed on from the caller.
        let Some(tips) = (unsafe { self.capture_tips() })? else { return Ok(()) };
        let mut found = tips.nodes;
        while let Some(node) = found.pop() {
            if note(node) {
                // SAFETY: the node was just found in the graph of the capture, which goes on.
                unsafe { dependencies(self.context().driver(), node, &mut found) }?;
            }
        }
        Ok(())
    }
}

/// Adds the nodes that a node comes right after to `found`; none if the driver cannot tell.
///
/// # Safety
/// The node must exist.
unsafe fn dependencies(
    driver: &Driver,
    node: usize,
    found: &mut Vec<usize>,
) -> Result<(), DriverError> {
    // Almost every node has at most two.
    let mut nodes = vec![std::ptr::null_mut(); 4];
    let mut count = nodes.len();
    loop {
        let raw: sys::CUgraphNode = std::ptr::with_exposed_provenance_mut(node);
        let room = nodes.len();
        // SAFETY: the caller vouches for the node; the array has the room that is said.
        let asked = unsafe {
            call!(driver, graph_node_get_dependencies(raw, nodes.as_mut_ptr(), &raw mut count))
        };
        match asked {
            Err(error) if error.code == code::LOSSY_QUERY => return Ok(()),
            result => result?,
        }
        // The driver says how many there are, or fills what there is room for.
        let entries = nodes.iter().take(count).filter(|node| !node.is_null());
        if count < room {
            found.extend(entries.map(|node| node.expose_provenance()));
            return Ok(());
        }
        nodes = vec![std::ptr::null_mut(); 4 * room.max(count)];
        count = nodes.len();
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
