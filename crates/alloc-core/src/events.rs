//! Blocks that wait for events before they are reused (I7): one queue per stream that used them.
//!
//! Events of one stream are reached in the order in which they were recorded, so only the head of a
//! queue is ever asked. An unfinished stream never hides what another one has finished.
//!
//! Beside the queues are blocks that wait for a stream capture: there is no event for those.

use crate::backend::{Backend, CaptureId, GraphNodeId, Stream};
use crate::block::BlockId;
use crate::config::EventOrder;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::thread::{self, ThreadId};
use crate::sync::{Condvar, Mutex};
use crate::units::StreamId;
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashSet, VecDeque};

/// A block that waits for an event.
pub(crate) struct Pending<E> {
    pub(crate) event: E,
    /// Position of its heap in the allocator's table.
    pub(crate) heap: u32,
    pub(crate) block: BlockId,
    /// The younger, the larger; of all queues of a device.
    number: u64,
}

impl<E> Pending<E> {
    pub(crate) const fn new(event: E, heap: u32, block: BlockId) -> Self {
        Pending { event, heap, block, number: 0 }
    }
}

/// A block that was used on capturing streams.
pub(crate) struct Deferred<S> {
    /// Position of its heap in the allocator's table.
    pub(crate) heap: u32,
    pub(crate) block: BlockId,
    /// The captures that its uses are part of, until they are over.
    pub(crate) captured: SmallVec<[CaptureId; 1]>,
    /// Streams that used it before they captured, and must record an event when they can again.
    pub(crate) later: SmallVec<[S; 1]>,
    pub(crate) proof: Option<Proof>,
}

/// What must come before a request of the same capture and stream for it to get the block.
pub(crate) struct Proof {
    pub(crate) capture: CaptureId,
    pub(crate) nodes: Vec<GraphNodeId>,
}

struct Fifo<E> {
    entries: VecDeque<Pending<E>>,
    /// The thread that has the head in hand and asks the backend about it. Others leave the queue
    /// alone so that its order stays.
    holder: Option<ThreadId>,
    /// The backend, asked about the head, asks for memory that has to wait for somebody else's growth.
    holder_waits: bool,
}

impl<E> Default for Fifo<E> {
    fn default() -> Self {
        Fifo { entries: VecDeque::new(), holder: None, holder_waits: false }
    }
}

/// The head of a queue, in hand. Goes back to where it was unless it is [`finish`](Head::finish)ed.
pub(crate) struct Head<'a, B: Backend> {
    queue: &'a EventQueue<B>,
    stream: StreamId,
    entry: Option<Pending<B::Event>>,
}

impl<B: Backend> Head<'_, B> {
    pub(crate) fn entry(&self) -> &Pending<B::Event> {
        self.entry.as_ref().expect("a head in hand is unfinished")
    }

    /// The event is reached, and its block knows.
    pub(crate) fn finish(mut self) {
        self.entry = None;
    }
}

impl<B: Backend> Drop for Head<'_, B> {
    fn drop(&mut self) {
        self.queue.give_up(self.stream, self.entry.take());
    }
}

/// All pending events of the blocks of one device.
pub(crate) struct EventQueue<B: Backend> {
    fifos: Mutex<BTreeMap<StreamId, Fifo<B::Event>>>,
    /// Told whenever a head leaves a hand.
    let_go: Condvar,
    /// In the order in which they were freed.
    deferred: Mutex<Vec<Deferred<B::Stream>>>,
    /// Entries in all queues, those in hand included, and deferred blocks. Read on every allocation,
    /// written only when blocks used across streams come and go.
    pending: AtomicUsize,
    /// Entries that ever were in a queue.
    pushed: AtomicU64,
    order: EventOrder,
    /// Lowest stream id of the device that was ever seen.
    lowest: AtomicU64,
}

impl<B: Backend> EventQueue<B> {
    pub(crate) fn new(order: EventOrder) -> Self {
        EventQueue {
            fifos: Mutex::new(BTreeMap::new()),
            let_go: Condvar::new(),
            deferred: Mutex::new(Vec::new()),
            pending: AtomicUsize::new(0),
            pushed: AtomicU64::new(0),
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

    pub(crate) fn push(&self, stream: &B::Stream, mut entry: Pending<B::Event>) {
        self.note_stream(stream.id());
        let mut fifos = self.fifos.lock();
        entry.number = self.pushed.fetch_add(1, Ordering::Relaxed);
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

    /// The stream whose head is the oldest, if that can be had; not one of `except`.
    pub(crate) fn oldest(&self, except: &[StreamId]) -> Option<StreamId> {
        let fifos = self.fifos.lock();
        let others = fifos.iter().filter(|(stream, _)| !except.contains(stream));
        // A queue whose only entry is in another thread's hand comes last.
        let age = |fifo: &Fifo<B::Event>| fifo.entries.front().map_or(u64::MAX, |e| e.number);
        others.min_by_key(|(_, fifo)| age(fifo)).map(|(&stream, _)| stream)
    }

    /// Takes the head of a stream's queue in hand, unless there is none or somebody has it.
    pub(crate) fn take_head(&self, stream: StreamId) -> Option<Head<'_, B>> {
        let mut fifos = self.fifos.lock();
        let fifo = fifos.get_mut(&stream).filter(|fifo| fifo.holder.is_none())?;
        self.take(stream, fifo)
    }

    /// As [`take_head`](Self::take_head), but waits for another thread that has it. `None` if the
    /// queue is empty, this very thread has the head, or whoever has it waits for growth, which the
    /// caller may be about.
    pub(crate) fn wait_for_head(&self, stream: StreamId) -> Option<Head<'_, B>> {
        let mut fifos = self.fifos.lock();
        loop {
            let fifo = fifos.get_mut(&stream)?;
            match fifo.holder {
                None => return self.take(stream, fifo),
                Some(holder) if holder == thread::current().id() => return None,
                Some(_) if fifo.holder_waits => return None,
                Some(_) => self.let_go.wait(&mut fifos),
            }
        }
    }

    /// Says of the heads in this thread's hand whether the thread waits for growth.
    pub(crate) fn set_waiting(&self, waits: bool) {
        let mut fifos = self.fifos.lock();
        let me = thread::current().id();
        for fifo in fifos.values_mut().filter(|fifo| fifo.holder == Some(me)) {
            fifo.holder_waits = waits;
        }
        self.let_go.notify_all();
    }

    fn take(&self, stream: StreamId, fifo: &mut Fifo<B::Event>) -> Option<Head<'_, B>> {
        let entry = fifo.entries.pop_front()?;
        fifo.holder = Some(thread::current().id());
        Some(Head { queue: self, stream, entry: Some(entry) })
    }

    /// A head leaves the hand, back to its place or for good.
    fn give_up(&self, stream: StreamId, entry: Option<Pending<B::Event>>) {
        let mut fifos = self.fifos.lock();
        let fifo = fifos.entry(stream).or_default();
        fifo.holder = None;
        match entry {
            Some(entry) => fifo.entries.push_front(entry),
            None => {
                self.pending.fetch_sub(1, Ordering::Release);
            }
        }
        if fifo.entries.is_empty() {
            fifos.remove(&stream);
        }
        self.let_go.notify_all();
    }

    /// Whether blocks of these heaps wait in the queue of a stream.
    pub(crate) fn concerns(&self, stream: StreamId, heaps: &HashSet<u32>) -> bool {
        let fifos = self.fifos.lock();
        let fifo = fifos.get(&stream);
        fifo.is_some_and(|fifo| {
            // The one in hand is not in the queue.
            fifo.holder.is_some() || fifo.entries.iter().any(|entry| heaps.contains(&entry.heap))
        })
    }

    /// Keeps a block for later.
    pub(crate) fn defer(&self, block: Deferred<B::Stream>) {
        let mut deferred = self.deferred.lock();
        deferred.push(block);
        self.pending.fetch_add(1, Ordering::Release);
    }

    /// Whether the order of a capture may free blocks of a heap.
    pub(crate) fn has_provable(&self, heap: u32, capture: CaptureId) -> bool {
        self.deferred.lock().iter().any(|block| block.is_provable(heap, capture))
    }

    /// Takes the blocks of a heap out that requests of a capture may have after `past`.
    pub(crate) fn take_proven(
        &self,
        heap: u32,
        capture: CaptureId,
        past: &HashSet<GraphNodeId>,
    ) -> Vec<Deferred<B::Stream>> {
        self.take_deferred(|block| {
            let proof = block.proof.as_ref().filter(|_| block.is_provable(heap, capture));
            proof.is_some_and(|proof| proof.nodes.iter().all(|node| past.contains(node)))
        })
    }

    /// Takes the chosen deferred blocks out. Each counts until it is [`undeferred`](Self::undeferred).
    pub(crate) fn take_deferred(
        &self,
        chosen: impl Fn(&Deferred<B::Stream>) -> bool,
    ) -> Vec<Deferred<B::Stream>> {
        self.deferred.lock().extract_if(.., |block| chosen(block)).collect()
    }

    /// A deferred block that was taken out is done with.
    pub(crate) fn undeferred(&self) {
        self.pending.fetch_sub(1, Ordering::Release);
    }

    /// (heap, block) of every entry and every deferred block, for checks.
    pub(crate) fn entries(&self) -> Vec<(u32, BlockId)> {
        let fifos = self.fifos.lock();
        let queued = fifos.values().flat_map(|fifo| &fifo.entries).map(|e| (e.heap, e.block));
        let deferred = self.deferred.lock();
        queued.chain(deferred.iter().map(|block| (block.heap, block.block))).collect()
    }
}

impl<S> Deferred<S> {
    fn is_provable(&self, heap: u32, capture: CaptureId) -> bool {
        self.heap == heap && self.proof.as_ref().is_some_and(|proof| proof.capture == capture)
    }
}
