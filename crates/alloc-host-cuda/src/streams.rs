//! Streams and events of this crate's own, for programs that use no device allocator.

use crate::error::kind_of;
use crate::source::StreamSource;
use alloc_core::backend::{BackendError, Completion, ErrorKind, Stream as StreamTrait};
use alloc_core::{DeviceId, StreamId};
use cuda_driver::{CaptureStatus, Context, DriverError, Event, Stream, code};
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Streams of the devices that it was made for. Clones are the same source.
#[derive(Clone, Debug)]
pub struct Streams {
    devices: Arc<[Arc<DeviceEvents>]>,
}

/// A device's context, and its events to record again.
#[derive(Debug)]
struct DeviceEvents {
    id: DeviceId,
    context: Arc<Context>,
    events: Mutex<Vec<Event>>,
}

impl Streams {
    /// A source of streams on the devices of these contexts.
    pub fn new(contexts: &[Arc<Context>]) -> Self {
        let device = |context: &Arc<Context>| {
            Arc::new(DeviceEvents {
                id: DeviceId::new(context.device().ordinal()),
                context: context.clone(),
                events: Mutex::new(Vec::new()),
            })
        };
        Streams { devices: contexts.iter().map(device).collect() }
    }

    /// Makes a stream that does not wait for the legacy default stream. Destroyed with its last
    /// clone, some of which an allocator keeps.
    ///
    /// # Errors
    /// Unless the source was made for that device; or whatever the driver reports.
    pub fn create(&self, device: DeviceId) -> Result<HostStream, StreamError> {
        let device = self.device(device)?;
        Ok(HostStream::new(device, Stream::create(&device.context)?))
    }

    /// The legacy default stream of a device. Every call gives another value for it.
    ///
    /// # Errors
    /// Unless the source was made for that device.
    pub fn default_stream(&self, device: DeviceId) -> Result<HostStream, StreamError> {
        let device = self.device(device)?;
        Ok(HostStream::new(device, Stream::legacy(&device.context)))
    }

    fn device(&self, id: DeviceId) -> Result<&Arc<DeviceEvents>, StreamError> {
        self.devices.iter().find(|device| device.id == id).ok_or(StreamError::NoSuchDevice(id))
    }
}

/// A stream of [`Streams`]. Clones are the same stream.
#[derive(Clone, Debug)]
pub struct HostStream {
    state: Arc<StreamState>,
}

#[derive(Debug)]
struct StreamState {
    id: StreamId,
    device: Arc<DeviceEvents>,
    stream: Stream,
}

impl HostStream {
    fn new(device: &Arc<DeviceEvents>, stream: Stream) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = StreamId::new(NEXT.fetch_add(1, Ordering::Relaxed));
        HostStream { state: Arc::new(StreamState { id, device: device.clone(), stream }) }
    }

    /// The driver's stream, to queue work on.
    pub fn driver_stream(&self) -> &Stream {
        &self.state.stream
    }
}

impl StreamTrait for HostStream {
    fn id(&self) -> StreamId {
        self.state.id
    }

    fn device(&self) -> DeviceId {
        self.state.device.id
    }
}

impl AsRef<Stream> for HostStream {
    fn as_ref(&self) -> &Stream {
        self.driver_stream()
    }
}

/// An event of [`Streams`]. Dropping it lets the driver's event be used again.
#[derive(Debug)]
pub struct HostEvent {
    /// `None` only while being dropped.
    event: Option<Event>,
    device: Arc<DeviceEvents>,
}

impl Drop for HostEvent {
    fn drop(&mut self) {
        self.device.events.lock().extend(self.event.take());
    }
}

impl StreamSource for Streams {
    type Stream = HostStream;
    type Event = HostEvent;
    type Error = StreamError;

    fn record(&self, stream: &HostStream) -> Result<HostEvent, StreamError> {
        let StreamState { device, stream, .. } = &*stream.state;
        // In a capture it would become part of the graph, and nobody could ask about it.
        if stream.capture_status()? != CaptureStatus::None {
            return Err(DriverError::new("cuEventRecord", code::STREAM_CAPTURE_UNSUPPORTED).into());
        }
        let known = device.events.lock().pop();
        let event = known.map_or_else(|| Event::create(&device.context), Ok)?;
        let recorded = event.record(stream);
        // Back among the others on failure, too.
        let event = HostEvent { event: Some(event), device: device.clone() };
        recorded?;
        Ok(event)
    }

    fn query(&self, event: &HostEvent) -> Result<Completion, StreamError> {
        let _relaxed = event.device.context.driver().relax_captures()?;
        let reached = event.event.as_ref().map_or(Ok(true), Event::is_reached)?;
        Ok(if reached { Completion::Reached } else { Completion::Pending })
    }

    fn wait(&self, event: &HostEvent) -> Result<(), StreamError> {
        let _relaxed = event.device.context.driver().relax_captures()?;
        Ok(event.event.as_ref().map_or(Ok(()), Event::synchronize)?)
    }
}

/// A failed call about a stream or event of [`Streams`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum StreamError {
    /// A driver call failed.
    Driver(DriverError),
    /// The source was not made for that device.
    NoSuchDevice(DeviceId),
}

impl From<DriverError> for StreamError {
    fn from(error: DriverError) -> Self {
        StreamError::Driver(error)
    }
}

impl BackendError for StreamError {
    fn kind(&self) -> ErrorKind {
        match self {
            StreamError::Driver(error) => kind_of(error),
            StreamError::NoSuchDevice(_) => ErrorKind::Other,
        }
    }
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StreamError::Driver(error) => error.fmt(f),
            StreamError::NoSuchDevice(device) => write!(f, "no streams were asked for on {device}"),
        }
    }
}

impl std::error::Error for StreamError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            StreamError::Driver(error) => Some(error),
            StreamError::NoSuchDevice(_) => None,
        }
    }
}
