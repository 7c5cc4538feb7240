//! Waiting for streams: recording events, asking about them, and what follows when one is reached.

use super::backend::HostBackend;
use super::engine::{Engine, Result, StreamOf};
use super::error::{HostError, HostOp};
use super::home::{After, BlockRef};
use super::store::Store;
use crate::backend::Completion;
use crate::units::StreamId;
use smallvec::SmallVec;
use std::fmt;
use std::sync::atomic::Ordering::Relaxed;

/// An event, and the freed blocks that wait for it.
pub(crate) struct Pending<B: HostBackend> {
    pub(crate) event: B::Event,
    pub(crate) stream: StreamOf<B>,
    pub(crate) blocks: SmallVec<[BlockRef; 1]>,
}

impl<B: HostBackend> fmt::Debug for Pending<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} blocks on {:?}", self.blocks.len(), self.stream)
    }
}

/// Which queued events to ask about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scan {
    /// All that are queued now.
    All,
    /// So many of the oldest.
    Few(usize),
    /// Those of blocks of one class, until one block is free.
    Class(u32),
}

impl<B: HostBackend> Engine<B> {
    /// Asks about queued events and frees the blocks of those that are reached. An event that is not
    /// reached holds up nothing but later events of its own stream. Returns how many blocks became
    /// free.
    ///
    /// # Errors
    /// The first failed query; the others are made nevertheless, and no event is lost.
    pub(crate) fn process_events(&self, scan: Scan) -> Result<usize, B> {
        let mut skip = SmallVec::<[StreamId; 4]>::new();
        let mut freed = 0;
        let mut outcome = Ok(());
        let limit = match scan {
            Scan::Few(limit) => limit.min(self.queue.len()),
            Scan::All | Scan::Class(_) => self.queue.len(),
        };
        for _ in 0..limit {
            let Some(pending) = self.queue.pop() else { break };
            let stream = pending.stream.id();
            if !pending.concerns(scan) || skip.contains(&stream) || self.is_capturing(stream) {
                self.queue.put_back(pending);
                continue;
            }
            match self.backend.query(&pending.event) {
                Ok(Completion::Reached) => {
                    freed += self.reached(pending.into_inner());
                    if matches!(scan, Scan::Class(_)) && freed > 0 {
                        break;
                    }
                }
                Ok(Completion::Pending) => {
                    skip.push(stream);
                    self.queue.put_back(pending);
                }
                Err(source) => {
                    skip.push(stream);
                    self.queue.put_back(pending);
                    outcome = outcome.and(Err(HostError::Backend { op: HostOp::Query, source }));
                }
            }
        }
        outcome.map(|()| freed)
    }

    /// Blocks until the first queued event is reached: the oldest, after
    /// [`sort`](super::queue::EventQueue::sort). False if none is queued that may be waited for.
    ///
    /// # Errors
    /// If waiting failed; the event goes to the end of the queue.
    pub(crate) fn wait_for_first(&self) -> Result<bool, B> {
        for _ in 0..self.queue.len() {
            let Some(pending) = self.queue.pop() else { break };
            if self.is_capturing(pending.stream.id()) {
                self.queue.put_back(pending);
                continue;
            }
            if let Err(source) = self.backend.wait(&pending.event) {
                self.queue.put_back(pending);
                return Err(HostError::Backend { op: HostOp::Wait, source });
            }
            self.reached(pending.into_inner());
            return Ok(true);
        }
        Ok(false)
    }

    /// Records an event for the open batch of a stream, if it has one. A stream that is being
    /// captured keeps its batch: an event recorded there would become part of the graph.
    ///
    /// # Errors
    /// If recording failed; the batch stays open.
    pub(crate) fn flush(&self, stream: &StreamOf<B>) -> Result<(), B> {
        if self.is_capturing(stream.id()) {
            return Ok(());
        }
        let batch = stream.take_batch();
        if batch.blocks.is_empty() {
            return Ok(());
        }
        match self.backend.record(stream.stream()) {
            Ok(event) => {
                self.counters.parked.fetch_sub(batch.blocks.len() as u64, Relaxed);
                if self.pace.concerns(batch.blocks.len()) {
                    self.pace.note(self.backend.now());
                }
                let blocks = SmallVec::from_vec(batch.blocks);
                self.queue.push(Pending { event, stream: stream.clone(), blocks });
                Ok(())
            }
            Err(source) => {
                stream.put_back(batch);
                self.counters.deferred_failures.fetch_add(1, Relaxed);
                Err(HostError::Backend { op: HostOp::Record, source })
            }
        }
    }

    /// Puts a freed block into the open batch of a stream; what the batch holds now.
    pub(crate) fn park(&self, stream: &StreamOf<B>, block: BlockRef, bytes: u64) -> (usize, u64) {
        self.counters.parked.fetch_add(1, Relaxed);
        stream.add(block, bytes)
    }

    /// Flushes the open batches of all streams.
    ///
    /// # Errors
    /// The first failure; the other streams are flushed nevertheless.
    pub(crate) fn flush_all(&self) -> Result<(), B> {
        if self.counters.parked.load(Relaxed) == 0 {
            return Ok(());
        }
        let mut outcome = Ok(());
        for stream in self.streams.all() {
            outcome = outcome.and(self.flush(&stream));
        }
        outcome
    }

    /// Whether work queued on a stream now becomes part of a graph. Nothing may be recorded there,
    /// and no event of it be asked about.
    pub(crate) fn is_capturing(&self, stream: StreamId) -> bool {
        self.pools.capturing(stream).is_some()
    }

    /// An event was reached. Returns how many blocks became free.
    pub(crate) fn reached(&self, pending: Pending<B>) -> usize {
        let freed = pending.blocks.iter().filter(|&&block| self.count_down(block)).count();
        // The event goes back to its pool here, and no lock is held.
        drop(pending);
        freed
    }

    /// One of the conditions of a draining block came true; whether the block is free now.
    fn count_down(&self, block: BlockRef) -> bool {
        let BlockRef { pool, home, id } = block;
        let after = self.pools.with(pool, |pool| pool.store.count_down(home, id)).flatten();
        let Some(after) = after else { return false };
        self.settle(pool, home, after);
        true
    }

    /// Does what is left to do after a block was released.
    pub(crate) fn settle(&self, pool: u32, home: u32, after: After) {
        match after {
            After::Nothing => {}
            After::Unpin => self.give_back_leaving(pool, home),
            After::Surplus => {
                self.pools.with(pool, |pool| {
                    if let Store::Slabs(slabs) = &pool.store {
                        slabs.return_surplus(home);
                        self.give_back_excess(pool, slabs, slabs.node_of(home));
                    }
                });
            }
            After::Excess => {
                self.pools.with(pool, |pool| {
                    if let Store::Slabs(slabs) = &pool.store {
                        self.give_back_excess(pool, slabs, slabs.node_of(home));
                    }
                });
            }
        }
        if pool != super::pools::DEFAULT {
            self.reabsorb_if_released(pool);
        }
    }

    /// Gives the memory of forgotten blocks back to the system, or keeps it as free memory if the
    /// system does not take it.
    fn give_back_leaving(&self, pool: u32, home: u32) {
        self.pools.with(pool, |pool| {
            for span in pool.store.take_leaving(home) {
                // Errors are counted; the caller's own work is done.
                let _ = self.give_back(pool, span);
            }
        });
    }
}

impl<B: HostBackend> Pending<B> {
    fn concerns(&self, scan: Scan) -> bool {
        match scan {
            Scan::All | Scan::Few(_) => true,
            Scan::Class(class) => self.blocks.iter().any(|block| block.home == class),
        }
    }
}
