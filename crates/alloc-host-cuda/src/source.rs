//! Where streams and events come from.

use alloc_core::backend::{Backend, BackendError, Completion, Stream};

/// Streams that use pinned memory, and events on them. The rules of
/// [`HostBackend`](alloc_core::host::HostBackend) hold for its methods.
pub trait StreamSource: Send + Sync + 'static {
    /// Its streams.
    type Stream: Stream;
    /// Its events. Dropping one recycles it and must not fail.
    type Event: Send + 'static;
    /// Its errors.
    type Error: BackendError;

    /// Records an event after all work queued on `stream` so far.
    ///
    /// # Errors
    /// Any, among others if the stream is being captured.
    fn record(&self, stream: &Self::Stream) -> Result<Self::Event, Self::Error>;

    /// Asks, without waiting, whether an event is reached.
    ///
    /// # Errors
    /// Any.
    fn query(&self, event: &Self::Event) -> Result<Completion, Self::Error>;

    /// Blocks until the event is reached.
    ///
    /// # Errors
    /// Any.
    fn wait(&self, event: &Self::Event) -> Result<(), Self::Error>;
}

/// The streams of a device backend, so that one stream can use device memory and pinned memory.
#[derive(Clone, Debug)]
pub struct OfBackend<B>(pub B);

impl<B: Backend> StreamSource for OfBackend<B> {
    type Stream = B::Stream;
    type Event = B::Event;
    type Error = B::Error;

    fn record(&self, stream: &B::Stream) -> Result<B::Event, B::Error> {
        self.0.record(stream)
    }

    fn query(&self, event: &B::Event) -> Result<Completion, B::Error> {
        self.0.query(event)
    }

    fn wait(&self, event: &B::Event) -> Result<(), B::Error> {
        self.0.wait(event)
    }
}
