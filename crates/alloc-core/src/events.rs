//! Blocks that wait for events: one queue per stream that used them.
//!
//! Events of one stream are reached in the order in which they were recorded, so only the head of a
//! queue is ever asked. An unfinished stream never hides what another one has finished.

use crate::backend::{Backend, Stream};
use crate::block::BlockId;
use crate::config::EventOrder;
use crate::units::StreamId;
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A block that waits for an event.
pub(crate) struct Pending<E> {
    pub(crate) event: E,
    /// Position of its heap in the allocator's table.
    pub(crate) heap: u32,
    pub(crate) block: BlockId,
}

struct Fifo<E> {
    entries: VecDeque<Pending<E>>,
    /// The head is with a thread that asks the backend about it; others leave the queue alone so
    /// that its order stays.
    head_taken: bool,
}

impl<E> Default for Fifo<E> {
    fn default() -> Self {
        Fifo { entries: VecDeque::new(), head_taken: false }
    }
}

/// All pending events of the blocks of one device.
pub(crate) struct EventQueue<B: Backend> {
    fifos: Mutex<BTreeMap<StreamId, Fifo<B::Event>>>,
    /// Entries in all queues, those in hand included. Read on every allocation, written only when
    /// blocks used across streams come and go.
    pending: AtomicUsize,
    order: EventOrder,
    /// Lowest stream id of the device that was ever seen.
    lowest: AtomicU64,
}

impl<B: Backend> EventQueue<B> {
    pub(crate) const fn new(order: EventOrder) -> Self {
        EventQueue {
            fifos: Mutex::new(BTreeMap::new()),
            pending: AtomicUsize::new(0),
            order,
            lowest: AtomicU64::new(u64::MAX),
        }
    }

    /// Tells the queue that the device has this stream.
    pub(crate) fn note_stream(&self, stream: StreamId) {
        self.lowest.fetch_min(stream.get(), Ordering::Relaxed);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pending.load(Ordering::Acquire) == 0
    }

    pub(crate) fn len(&self) -> usize {
        self.pending.load(Ordering::Acquire)
    }

    pub(crate) fn push(&self, stream: &B::Stream, entry: Pending<B::Event>) {
        self.note_stream(stream.id());
        let mut fifos = self.fifos.lock();
        fifos.entry(stream.id()).or_default().entries.push_back(entry);
        self.pending.fetch_add(1, Ordering::Release);
    }

    /// The streams that have a queue, in processing order.
    pub(crate) fn streams(&self) -> Vec<StreamId> {
        let fifos = self.fifos.lock();
        let mut streams: Vec<_> = fifos.keys().copied().collect();
        if self.order == EventOrder::DefaultThenDescending {
            let lowest = StreamId::new(self.lowest.load(Ordering::Relaxed));
            let others = usize::from(streams.first() == Some(&lowest));
            streams[others..].reverse();
        }
        streams
    }

    /// Takes the head of a stream's queue in hand, unless another thread has it or there is none.
    pub(crate) fn take_head(&self, stream: StreamId) -> Option<Pending<B::Event>> {
        let mut fifos = self.fifos.lock();
        let fifo = fifos.get_mut(&stream)?;
        if fifo.head_taken {
            return None;
        }
        let head = fifo.entries.pop_front()?;
        fifo.head_taken = true;
        Some(head)
    }

    /// Puts the head back where it was.
    pub(crate) fn put_back(&self, stream: StreamId, head: Pending<B::Event>) {
        let mut fifos = self.fifos.lock();
        let fifo = fifos.entry(stream).or_default();
        fifo.entries.push_front(head);
        fifo.head_taken = false;
    }

    /// The head in hand is reached and gone for good.
    pub(crate) fn finish_head(&self, stream: StreamId) {
        let mut fifos = self.fifos.lock();
        if let Some(fifo) = fifos.get_mut(&stream) {
            fifo.head_taken = false;
            if fifo.entries.is_empty() {
                fifos.remove(&stream);
            }
        }
        self.pending.fetch_sub(1, Ordering::Release);
    }

    /// (heap, block) of every entry, for checks.
    pub(crate) fn entries(&self) -> Vec<(u32, BlockId)> {
        let fifos = self.fifos.lock();
        fifos.values().flat_map(|fifo| &fifo.entries).map(|e| (e.heap, e.block)).collect()
    }
}
