//! The streams that use pinned memory, each with the freed blocks that wait for its next event.

use super::home::BlockRef;
use crate::backend::Stream;
use crate::sync::{Mutex, RwLock};
use crate::units::StreamId;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Freed blocks whose stream has no event for them yet.
///
/// An event recorded later than the last use still orders the reuse after it, so blocks may wait
/// for one event together. It costs one driver call for many frees.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) blocks: Vec<BlockRef>,
    pub(crate) bytes: u64,
}

#[derive(Debug)]
pub(crate) struct StreamSlot<T> {
    pub(crate) stream: T,
    open: Mutex<Batch>,
}

/// A stream of the table. Clones are the same stream.
pub(crate) struct StreamRef<T>(Arc<StreamSlot<T>>);

impl<T> Clone for StreamRef<T> {
    fn clone(&self) -> Self {
        StreamRef(Arc::clone(&self.0))
    }
}

impl<T> PartialEq for StreamRef<T> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<T: Stream> fmt::Debug for StreamRef<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.id().fmt(f)
    }
}

impl<T: Stream> StreamRef<T> {
    pub(crate) fn id(&self) -> StreamId {
        self.0.stream.id()
    }

    pub(crate) fn stream(&self) -> &T {
        &self.0.stream
    }

    /// Adds a block to the open batch; what the batch holds now.
    pub(crate) fn add(&self, block: BlockRef, bytes: u64) -> (usize, u64) {
        let mut open = self.0.open.lock();
        open.blocks.push(block);
        open.bytes += bytes;
        (open.blocks.len(), open.bytes)
    }

    /// Takes the open batch out. The taker must record an event for it or put it back.
    pub(crate) fn take_batch(&self) -> Batch {
        std::mem::take(&mut *self.0.open.lock())
    }

    /// Puts a batch back before what has gathered since.
    pub(crate) fn put_back(&self, mut batch: Batch) {
        let mut open = self.0.open.lock();
        batch.blocks.append(&mut open.blocks);
        batch.bytes += open.bytes;
        *open = batch;
    }

    fn is_unused(&self) -> bool {
        // Only the table itself still refers to it, and under the table's lock none can be added.
        Arc::strong_count(&self.0) == 1 && self.0.open.lock().blocks.is_empty()
    }

    /// Visits the blocks of the open batch under its lock.
    pub(crate) fn each_waiting(&self, visit: impl FnMut(&BlockRef)) {
        self.0.open.lock().blocks.iter().for_each(visit);
    }
}

/// With so many streams, and every time that their number doubles, unused ones are forgotten.
const FORGET_FROM: usize = 16;

/// All streams in use.
#[derive(Debug)]
pub(crate) struct StreamTable<T: Stream> {
    slots: RwLock<BTreeMap<StreamId, StreamRef<T>>>,
}

impl<T: Stream> StreamTable<T> {
    pub(crate) fn new() -> Self {
        StreamTable { slots: RwLock::new(BTreeMap::new()) }
    }

    /// The entry of a stream, made if it is new.
    pub(crate) fn get(&self, stream: &T) -> StreamRef<T> {
        let id = stream.id();
        if let Some(known) = self.slots.read().get(&id) {
            return known.clone();
        }
        let slot = StreamSlot { stream: stream.clone(), open: Mutex::new(Batch::default()) };
        let new = StreamRef(Arc::new(slot));
        let (entry, streams) = {
            let mut slots = self.slots.write();
            let entry = slots.entry(id).or_insert(new).clone();
            (entry, slots.len())
        };
        if streams >= FORGET_FROM && streams.is_power_of_two() {
            self.forget_unused();
        }
        entry
    }

    /// All streams, by id.
    pub(crate) fn all(&self) -> Vec<StreamRef<T>> {
        self.slots.read().values().cloned().collect()
    }

    /// Forgets streams that no block refers to, so that short-lived streams do not pile up.
    pub(crate) fn forget_unused(&self) {
        let mut unused = Vec::new();
        self.slots.write().retain(|_, slot| {
            let keep = !slot.is_unused();
            if !keep {
                unused.push(slot.clone());
            }
            keep
        });
        // Dropping a stream may call the driver, so it happens after the lock is released.
        drop(unused);
    }
}
