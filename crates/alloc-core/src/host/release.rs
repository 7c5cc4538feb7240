//! A client gives memory back.

use super::backend::HostBackend;
use super::block::{Use, Uses};
use super::engine::{Ask, Engine, PoolOf, Result, StreamOf};
use super::error::{HostError, HostOp};
use super::events::{Pending, Scan};
use super::home::{After, BlockRef, Freed};
use super::pace::SHARED_ENOUGH;
use super::pools::{DEFAULT, Held};
use smallvec::{SmallVec, smallvec};
use std::sync::atomic::Ordering::Relaxed;

/// No batch is larger, however much is pinned, unless the setting says so, or blocks gather.
const BATCH_BYTES_LIMIT: u64 = 128 << 20;

/// Blocks gather up to so many bytes.
const GATHER_BYTES_MAX: u64 = 256 << 20;

impl<B: HostBackend> Engine<B> {
    /// Notes that work queued on `stream` may touch an allocation. False if it is not live.
    pub(crate) fn note_use(&self, block: BlockRef, stream: &B::Stream) -> bool {
        let BlockRef { pool, home, id } = block;
        let capture = self.pools.capturing(crate::backend::Stream::id(stream));
        let stream = self.streams.get(stream);
        let used = match capture {
            Some(capture) => Use::Graph(capture.slot, stream),
            // Made while capturing, so a graph may read it whenever it runs.
            None if pool != DEFAULT => Use::Graph(pool, stream),
            None => Use::Stream(stream),
        };
        self.pools.with(pool, |pool| pool.store.note_use(home, id, used)).unwrap_or(false)
    }

    /// Frees an allocation. False if it is not live.
    ///
    /// # Errors
    /// Policy `pytorch`, if an event cannot be recorded: the allocation stays live, with its uses.
    #[inline]
    pub(crate) fn free(&self, block: BlockRef) -> Result<bool, B> {
        let BlockRef { pool, home, id } = block;
        match self.pools.with(pool, |pool| pool.store.free_unused(home, id)) {
            Some(Freed::Done(After::Nothing)) if pool == DEFAULT => Ok(true),
            Some(Freed::Done(after)) => {
                self.settle(pool, home, after);
                Ok(true)
            }
            Some(Freed::Used) => self.free_used(block),
            Some(Freed::Unknown) | None => Ok(false),
        }
    }

    fn free_used(&self, block: BlockRef) -> Result<bool, B> {
        let BlockRef { pool, home, id } = block;
        let begun = self.pools.with(pool, |pool| pool.store.begin_draining(home, id)).flatten();
        let Some((uses, bytes)) = begun else { return Ok(false) };
        if self.is_ours() {
            self.wait_in_batches(block, uses, bytes);
        } else {
            self.record_each(block, uses, bytes)?;
        }
        Ok(true)
    }

    /// Policy `ours`: the block joins the open batches of its streams.
    fn wait_in_batches(&self, block: BlockRef, uses: Uses<StreamOf<B>>, bytes: u64) {
        for used in uses {
            if let Some(stream) = self.hold_for_graph(block, used, bytes) {
                let (blocks, waiting) = self.park(&stream, block, bytes);
                if self.is_full(blocks, waiting, bytes) && self.flush(&stream).is_ok() {
                    // One event was added, and hardly is reached yet: asking about two older ones
                    // keeps the queue short. A failed query is asked again, and by then by someone
                    // who can report it.
                    let older = self.queue.len().saturating_sub(1);
                    let _ = self.process_events(Scan::Few(older.min(2)));
                    self.trim_now_and_then();
                }
            }
        }
    }

    /// Whether an open batch gets its event, now that it has so many blocks with `waiting` bytes, the
    /// last one with `bytes`. They serve nobody until it is reached, so they may be a share of what
    /// there is: the rest lasts until then. If events cost too much, the rest may be pinned.
    fn is_full(&self, blocks: usize, waiting: u64, bytes: u64) -> bool {
        let most = self.config.batch_bytes_max;
        let share = (self.pins.bytes() / 2).min(BATCH_BYTES_LIMIT);
        blocks >= usize::from(self.config.batch_blocks_max)
            || (waiting >= most.max(share)
                && (waiting >= GATHER_BYTES_MAX
                    || !self.pace.concerns(blocks)
                    || !self.should_gather(bytes)))
    }

    /// Whether events have come so often, for a few blocks each, that more of `bytes` should be pinned
    /// to share them.
    fn should_gather(&self, bytes: u64) -> bool {
        bytes <= GATHER_BYTES_MAX / 2 && self.pace.outweighs(bytes, self.backend.now())
    }

    /// Whether a request that finds nothing free gets new memory instead of asking about freed blocks,
    /// so that those may [gather](Engine::should_gather): not if enough wait already.
    pub(crate) fn leaves_gathering(&self, ask: Ask<'_, B>) -> bool {
        let enough = GATHER_BYTES_MAX.min(ask.bytes * SHARED_ENOUGH as u64);
        ask.bytes > self.config.small_bytes_max
            && self.should_gather(ask.bytes)
            && (1..enough).contains(&ask.pool.store.draining_bytes())
            && self.pace.spend(ask.bytes, self.backend.now())
    }

    /// Policy `pytorch`: one event per stream, all of them recorded before the block is queued.
    fn record_each(&self, block: BlockRef, uses: Uses<StreamOf<B>>, bytes: u64) -> Result<(), B> {
        let mut recorded = SmallVec::<[(StreamOf<B>, Option<B::Event>); 2]>::new();
        for used in &uses {
            let Use::Stream(stream) = used else { continue };
            let event = match self.record_use(stream) {
                Ok(event) => event,
                Err(_) if self.options.free_catch_all() => {
                    self.counters.deferred_failures.fetch_add(1, Relaxed);
                    None
                }
                Err(source) => {
                    let BlockRef { pool, home, id } = block;
                    self.pools.with(pool, |pool| pool.store.undo_draining(home, id, uses));
                    return Err(HostError::Backend { op: HostOp::Record, source });
                }
            };
            recorded.push((stream.clone(), event));
        }
        for used in uses {
            if matches!(used, Use::Graph(..))
                && let Some(stream) = self.hold_for_graph(block, used, bytes)
            {
                self.park(&stream, block, bytes);
            }
        }
        for (stream, event) in recorded {
            match event {
                Some(event) => self.queue.push(Pending { event, stream, blocks: smallvec![block] }),
                None => {
                    self.park(&stream, block, bytes);
                }
            }
        }
        Ok(())
    }

    /// An event after all work of a stream, or `None` if the stream is being captured now.
    fn record_use(&self, stream: &StreamOf<B>) -> std::result::Result<Option<B::Event>, B::Error> {
        if self.is_capturing(stream.id()) {
            return Ok(None);
        }
        self.backend.record(stream.stream()).map(Some)
    }

    /// Keeps a freed block for the graph that uses it. Returns the stream to wait for instead if
    /// there is no such graph.
    fn hold_for_graph(
        &self,
        block: BlockRef,
        used: Use<StreamOf<B>>,
        bytes: u64,
    ) -> Option<StreamOf<B>> {
        let (slot, stream) = match used {
            Use::Stream(stream) => return Some(stream),
            Use::Graph(slot, stream) => (slot, stream),
        };
        let held = Held { stream: stream.clone(), block, bytes };
        match self.pools.with(slot, |pool| pool.hold(held)) {
            Some(Ok(())) => None,
            Some(Err(_)) | None => Some(stream),
        }
    }

    /// The graphs of a pool are gone: memory held for them waits for its streams now.
    pub(crate) fn release_held(&self, pool: &PoolOf<B>, held: Vec<Held<StreamOf<B>>>) {
        let mut streams = SmallVec::<[StreamOf<B>; 2]>::new();
        for Held { stream, block, bytes } in held {
            self.park(&stream, block, bytes);
            if !streams.contains(&stream) {
                streams.push(stream);
            }
        }
        // A failure is counted, and the batch flushed later.
        streams.iter().for_each(|stream| drop(self.flush(stream)));
        self.reabsorb_if_released(pool.slot);
    }
}
