//! Events: positions in a stream's work.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use alloc_core::StreamId;

use crate::clock::Clock;
use crate::streams::id_of;

/// An event of a [`MockBackend`](crate::MockBackend).
#[derive(Debug)]
pub struct MockEvent {
    pub(crate) backend: u32,
    pub(crate) stream: usize,
    /// It is reached when this many items of the stream are done.
    pub(crate) items: u64,
    /// What it comes after, its own stream included.
    pub(crate) clock: Clock,
    /// The capture it was recorded in.
    pub(crate) capture: Option<u64>,
    /// The nodes of that capture that it comes right after.
    pub(crate) tips: BTreeSet<u64>,
    /// Held for its drop.
    pub(crate) _alive: Alive,
}

impl MockEvent {
    /// The stream it was recorded on.
    pub fn stream(&self) -> StreamId {
        id_of(self.stream)
    }
}

/// Counts the events of a backend that exist.
#[derive(Debug)]
pub(crate) struct Alive(Arc<AtomicUsize>);

impl Alive {
    pub(crate) fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Alive(Arc::clone(count))
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
