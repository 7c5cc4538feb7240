//! Events, recycled.

use crate::device::DeviceState;
use crate::error::CudaError;
use alloc_core::backend::Completion;
use cuda_driver::{Event, Stream};
use std::sync::Arc;

/// A point in a stream's work. Dropping it lets the driver's event be used again.
#[derive(Debug)]
pub struct CudaEvent {
    inner: Inner,
}

#[derive(Debug)]
enum Inner {
    /// From the device's pool; `None` only while being dropped.
    Pooled { event: Option<Event>, device: Arc<DeviceState> },
    /// The last event of a stream that has ended.
    Last(Arc<Event>),
}

impl CudaEvent {
    /// Records an event of the device's pool after all work queued on `stream` so far.
    pub(crate) fn record(device: &Arc<DeviceState>, stream: &Stream) -> Result<Self, CudaError> {
        let event = device.take_event()?;
        let recorded = event.record(stream);
        // Back in the pool on failure, too.
        let event =
            CudaEvent { inner: Inner::Pooled { event: Some(event), device: device.clone() } };
        recorded?;
        Ok(event)
    }

    /// Wraps the last event of a stream.
    pub(crate) fn last(event: &Arc<Event>) -> Self {
        CudaEvent { inner: Inner::Last(event.clone()) }
    }

    fn event(&self) -> Option<&Event> {
        match &self.inner {
            Inner::Pooled { event, .. } => event.as_ref(),
            Inner::Last(event) => Some(event),
        }
    }

    /// Whether all work before it is done.
    pub(crate) fn query(&self) -> Result<Completion, CudaError> {
        let reached = self.event().map_or(Ok(true), Event::is_reached)?;
        Ok(if reached { Completion::Reached } else { Completion::Pending })
    }

    /// Makes what is queued on `stream` from now on wait for it.
    pub(crate) fn order(&self, stream: &Stream) -> Result<(), CudaError> {
        Ok(self.event().map_or(Ok(()), |event| stream.wait_event(event))?)
    }

    /// Blocks until all work before it is done.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        Ok(self.event().map_or(Ok(()), Event::synchronize)?)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Inner::Pooled { event, device } = &mut self.inner
            && let Some(event) = event.take()
        {
            device.put_event(event);
        }
    }
}
