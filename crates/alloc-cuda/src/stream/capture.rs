//! Capture: what the driver says of streams whose work is recorded.

use super::CudaStream;
use crate::backend::CudaBackend;
use crate::error::CudaError;
use alloc_core::backend::{Capture, CaptureId, CaptureStatus, CaptureTips, GraphNodeId};
use cuda_driver::{CaptureStatus as DriverStatus, Stream};
use std::collections::HashSet;

impl CudaStream {
    /// Whether its work is being captured into a graph instead of run.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn is_captured(&self) -> Result<bool, CudaError> {
        Ok(self.capture_status()? != CaptureStatus::None)
    }

    fn capture_status(&self) -> Result<CaptureStatus, CudaError> {
        let Some(stream) = self.capturable() else { return Ok(CaptureStatus::None) };
        Ok(match stream.capture_status()? {
            DriverStatus::None => CaptureStatus::None,
            DriverStatus::Active(id) => CaptureStatus::Active(CaptureId::new(id)),
            DriverStatus::Invalidated => CaptureStatus::Invalidated,
        })
    }

    /// What to ask the driver about. `None` for a legacy default stream, which is never captured and
    /// must not even be asked about while another one is; and for another thread's default stream,
    /// which no handle names here.
    fn capturable(&self) -> Option<&Stream> {
        let state = &*self.state;
        let elsewhere = |(owner, _): &(_, _)| *owner != std::thread::current().id();
        let out_of_reach = state.thread.as_ref().is_some_and(elsewhere);
        let legacy = state.stream.raw().addr() == Stream::LEGACY;
        (!legacy && !out_of_reach && state.last.get().is_none()).then_some(&state.stream)
    }
}

/// While a stream is captured, the thread that queues its work is also the one that allocates for
/// it: no other thread may do either at the same time. The driver demands as much.
impl Capture for CudaBackend {
    fn capture_status(&self, stream: &CudaStream) -> Result<CaptureStatus, CudaError> {
        stream.capture_status()
    }

    fn capture_tips(&self, stream: &CudaStream) -> Result<Option<CaptureTips>, CudaError> {
        let Some(stream) = stream.capturable() else { return Ok(None) };
        // SAFETY: only this thread queues work on the stream, as documented above.
        let tips = unsafe { stream.capture_tips() }?;
        let node = |number| GraphNodeId::new(number as u64);
        Ok(tips.map(|tips| CaptureTips {
            capture: CaptureId::new(tips.capture),
            nodes: tips.nodes.into_iter().map(node).collect(),
        }))
    }

    fn extend_past(
        &self,
        stream: &CudaStream,
        past: &mut HashSet<GraphNodeId>,
    ) -> Result<(), CudaError> {
        let Some(stream) = stream.capturable() else { return Ok(()) };
        // SAFETY: only this thread queues work on the stream, as documented above.
        let walk =
            unsafe { stream.walk_captured_past(|node| past.insert(GraphNodeId::new(node as u64))) };
        Ok(walk?)
    }
}
