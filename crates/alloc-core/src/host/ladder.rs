//! What a request does that no free block serves: pin memory, and if that fails, everything that
//! could make room, in order.

use super::backend::{HostBackend, NodeId, PIN_ALIGN, PinMethod, PinRequest};
use super::engine::{Ask, Engine, Result, StreamOf};
use super::error::{HostError, HostOomReport, HostStep};
use super::events::Scan;
use super::heap::Cut;
use super::home::Span;
use super::pins::PinFailure;
use super::pools::DEFAULT;
use super::slabs::SlabStore;
use super::store::{Served, Store};
use std::sync::atomic::Ordering::Relaxed;

/// Lengths of segments are multiples of this where that costs at most 1/64 of them.
const SEGMENT_GRANULE: u64 = 2 << 20;

/// Blocks of the size asked for that a new segment has room for, within limits: fewer would leave
/// much of it over.
const SEGMENT_BLOCKS: u64 = 8;

/// What has been tried for a request.
#[derive(Debug)]
struct Climb<E> {
    steps: Vec<HostStep>,
    /// What the system said last, if it was asked.
    refusal: Option<E>,
    /// Bytes that had to be pinned at least.
    pin_bytes: u64,
}

impl<B: HostBackend> Engine<B> {
    /// Serves a request that found no free block.
    ///
    /// # Errors
    /// Out of memory, if no step of the ladder helped. Any other failure to pin ends the climb.
    pub(crate) fn serve_miss(&self, ask: Ask<'_, B>) -> Result<Served, B> {
        self.counters.misses.fetch_add(1, Relaxed);
        if let Some(served) = self.take_after_gathering(ask) {
            return Ok(served);
        }
        let pin_bytes = self.least_segment(ask);
        let mut climb = Climb { steps: Vec::new(), refusal: None, pin_bytes };
        for step in self.ladder(ask) {
            climb.steps.push(step);
            if let Some(served) = self.try_step(step, ask, &mut climb)? {
                return Ok(served);
            }
        }
        self.counters.ooms.fetch_add(1, Relaxed);
        Err(HostError::OutOfMemory(Box::new(self.report(ask, climb))))
    }

    /// Policy `ours`, before it grows: blocks whose events are reached by now, then those of open
    /// batches, unless either are to be left alone; then what other shards have, and everything merged.
    fn take_after_gathering(&self, ask: Ask<'_, B>) -> Option<Served> {
        if !self.is_ours() || !self.options.is_cached(ask.bytes) {
            return None;
        }
        if !self.leaves_gathering(ask)
            && let Some(served) = self.take_after_events(ask)
        {
            return Some(served);
        }
        if let Store::Slabs(slabs) = &ask.pool.store
            && !slabs.may_search(ask.node, self.config.growth_bytes_min.max(ask.bytes))
        {
            return None;
        }
        self.take_hard(ask, Cut::Sparingly)
    }

    fn take_after_events(&self, ask: Ask<'_, B>) -> Option<Served> {
        self.count_failure(self.process_events(Scan::All).map(drop));
        let served = self.take(ask, Cut::Sparingly);
        if served.is_some() || !self.should_close_batches(ask) {
            return served;
        }
        self.look_at_events();
        self.take(ask, Cut::Sparingly)
    }

    /// Whether open batches should get their events now, before they are full, as the request could
    /// be served from them. For small requests growing by the least there is costs less than an event
    /// for every block, while not much waits.
    fn should_close_batches(&self, ask: Ask<'_, B>) -> bool {
        self.counters.parked.load(Relaxed) > 0
            && (ask.bytes > self.config.small_bytes_max
                || ask.pool.store.draining_bytes() >= self.config.draining_bytes_max)
    }

    /// A failure to look at events is counted; it leaves the blocks where they were, and the request
    /// may still be served.
    fn count_failure(&self, outcome: Result<(), B>) {
        if outcome.is_err() {
            self.counters.deferred_failures.fetch_add(1, Relaxed);
        }
    }

    /// Frees what can be freed without waiting.
    pub(crate) fn look_at_events(&self) {
        let flushed = self.flush_all();
        self.count_failure(flushed.and(self.process_events(Scan::All).map(drop)));
        self.streams.forget_unused();
    }

    /// A free block, wherever in the pool's memory on that node it hides.
    fn take_hard(&self, ask: Ask<'_, B>, cut: Cut) -> Option<Served> {
        let served = self.take(ask, cut);
        let Store::Slabs(slabs) = &ask.pool.store else { return served };
        if served.is_some() || !self.options.is_cached(ask.bytes) {
            return served;
        }
        slabs.take_from_any_shard(ask.node, ask.bytes).or_else(|| {
            slabs.collect(ask.node);
            self.take(ask, cut)
        })
    }

    fn ladder(&self, ask: Ask<'_, B>) -> impl Iterator<Item = HostStep> + use<B> {
        let grows_by_more = self.is_ours() && self.options.is_cached(ask.bytes);
        [
            (HostStep::Grow, grows_by_more),
            (HostStep::GrowExactly, true),
            (HostStep::ProcessEvents, true),
            (HostStep::EmptyCache, true),
            (HostStep::WaitForEvents, true),
            (HostStep::OtherNodes, self.is_ours() && self.backend.node_count() > 1),
        ]
        .into_iter()
        .filter_map(|(step, applies)| applies.then_some(step))
    }

    fn try_step(
        &self,
        step: HostStep,
        ask: Ask<'_, B>,
        climb: &mut Climb<B::Error>,
    ) -> Result<Option<Served>, B> {
        match step {
            HostStep::Grow => self.grow_generously(ask, climb),
            HostStep::GrowExactly => self.grow(ask, climb, climb.pin_bytes),
            HostStep::ProcessEvents => {
                self.look_at_events();
                Ok(self.take_hard(ask, Cut::Freely))
            }
            HostStep::EmptyCache => self.grow_after_release(ask, climb),
            HostStep::WaitForEvents => {
                self.queue.sort();
                while let Ok(true) = self.wait_for_first() {
                    if let Some(served) = self.take_hard(ask, Cut::Freely) {
                        return Ok(Some(served));
                    }
                }
                self.grow_after_release(ask, climb)
            }
            HostStep::OtherNodes => Ok(self.take_elsewhere(ask)),
        }
    }

    fn grow_after_release(
        &self,
        ask: Ask<'_, B>,
        climb: &mut Climb<B::Error>,
    ) -> Result<Option<Served>, B> {
        // What could not be given back stays cached; pinning says whether it was enough.
        let emptied = self.empty_cache();
        if emptied.and(self.empty_pool(ask.pool)).is_err() {
            self.counters.deferred_failures.fetch_add(1, Relaxed);
        }
        self.grow(ask, climb, climb.pin_bytes)
    }

    fn take_elsewhere(&self, ask: Ask<'_, B>) -> Option<Served> {
        let Store::Slabs(slabs) = &ask.pool.store else { return None };
        slabs
            .node_ids()
            .filter(|&node| node != ask.node)
            .find_map(|node| self.take_hard(Ask { node, ..ask }, Cut::Freely))
    }

    /// Pins more than the request needs, so that later ones find something, but first gives back
    /// segments that are free and too small for it: one large segment takes the place of
    /// several. Such segments would pile up otherwise, as blocks merge within a segment only. A
    /// thread that finds another one growing for the same node takes just what it needs.
    fn grow_generously(
        &self,
        ask: Ask<'_, B>,
        climb: &mut Climb<B::Error>,
    ) -> Result<Option<Served>, B> {
        let Store::Slabs(slabs) = &ask.pool.store else { return Ok(None) };
        let result = if slabs.begin_growth(ask.node) {
            Ok(None)
        } else {
            let growth = self.growth_bytes(slabs.bytes(ask.node), ask.bytes).max(climb.pin_bytes);
            let replaced = self.give_back_small(ask, slabs, climb.pin_bytes, growth);
            self.grow(ask, climb, growth.max(replaced))
        };
        slabs.end_growth(ask.node);
        result
    }

    /// Gives back free segments of less than `bytes`, the largest first, until `growth` bytes have come
    /// together; how many bytes that were.
    fn give_back_small(
        &self,
        ask: Ask<'_, B>,
        slabs: &SlabStore<StreamOf<B>>,
        bytes: u64,
        growth: u64,
    ) -> u64 {
        let mut replaced = 0;
        let idle = slabs.idle_segments(ask.node).into_iter();
        for idle in idle.rev().filter(|idle| idle.span.bytes < bytes) {
            if replaced >= growth {
                break;
            }
            if let Ok(true) = self.give_back_idle(ask.pool, slabs, ask.node, idle) {
                replaced += idle.span.bytes;
            }
        }
        replaced
    }

    /// A share of what is pinned: small, but larger if that gives room for some blocks of the kind, and
    /// for no part of one.
    fn growth_bytes(&self, pinned: u64, requested: u64) -> u64 {
        let (min, max) = (self.config.growth_bytes_min, self.config.growth_bytes_max);
        let share = (pinned / 256).clamp(min, max);
        let block = requested.next_multiple_of(PIN_ALIGN);
        let blocks = (max / 2).min(pinned / 16) / block;
        (blocks.min(SEGMENT_BLOCKS) * block).max(share - share % min)
    }

    /// The segment that a request needs.
    fn least_segment(&self, ask: Ask<'_, B>) -> u64 {
        match &ask.pool.store {
            Store::Classes(_) => self.options.class_bytes(ask.bytes),
            Store::Slabs(_) if !self.options.is_cached(ask.bytes) => {
                ask.bytes.next_multiple_of(PIN_ALIGN)
            }
            Store::Slabs(slabs) => self.segment_bytes(slabs, ask.bytes),
        }
    }

    fn segment_bytes<S: PartialEq>(&self, slabs: &SlabStore<S>, requested: u64) -> u64 {
        let bytes = slabs.round(requested).max(self.config.growth_bytes_min);
        let huge = bytes.next_multiple_of(SEGMENT_GRANULE);
        if huge - bytes <= bytes / 64 { huge } else { bytes.next_multiple_of(PIN_ALIGN) }
    }

    /// Pins a segment of `bytes` and serves the request from it; `None` if there is no room.
    fn grow(
        &self,
        ask: Ask<'_, B>,
        climb: &mut Climb<B::Error>,
        bytes: u64,
    ) -> Result<Option<Served>, B> {
        let pinned = match &ask.pool.store {
            Store::Classes(_) => match self.take_from_reserve(bytes)? {
                Some(span) => Ok(span),
                None => self.pin(ask, bytes, false),
            },
            Store::Slabs(_) => self.pin(ask, bytes, false),
        };
        match pinned {
            Ok(span) => Ok(Some(self.add(ask, span))),
            Err(PinFailure::NoRoom(refusal)) => {
                climb.refusal = refusal.or(climb.refusal.take());
                Ok(None)
            }
            Err(PinFailure::Failed(error)) => Err(error),
        }
    }

    fn add(&self, ask: Ask<'_, B>, span: Span) -> Served {
        match &ask.pool.store {
            Store::Classes(classes) => classes.add(span, ask.bytes),
            Store::Slabs(slabs) if self.options.is_cached(ask.bytes) => {
                slabs.add_and_take(ask.node, span, ask.bytes)
            }
            Store::Slabs(slabs) => slabs.add_uncached(ask.node, span, ask.bytes),
        }
    }

    fn pin(
        &self,
        ask: Ask<'_, B>,
        bytes: u64,
        keep: bool,
    ) -> std::result::Result<Span, PinFailure<B::Error>> {
        let method = match self.options.register() {
            Some(threads) => PinMethod::Register { threads },
            None => PinMethod::Allocate,
        };
        let request = PinRequest {
            bytes,
            // A block of a class is a segment, and lies where it lies.
            align: if self.is_ours() || keep { PIN_ALIGN } else { 1 },
            node: self.is_ours().then_some(ask.node),
            method,
            piece_bytes_max: self.config.piece_bytes_max,
        };
        let limit = self.config.reserved_bytes_max;
        self.pins.pin(&self.backend, &request, limit, ask.pool.slot, keep)
    }

    /// A piece of the reserve, which the first caller pins. Without room for the reserve there is
    /// none, and requests are served as if it had not been asked for.
    fn take_from_reserve(&self, bytes: u64) -> Result<Option<Span>, B> {
        if let Some(reserve) = self.reserve.claim() {
            let ask = Ask { pool: self.pools.default_pool(), node: NodeId::new(0), bytes };
            match self.pin(ask, reserve, true) {
                Ok(span) => self.reserve.ready(span),
                Err(PinFailure::NoRoom(_)) => {}
                Err(PinFailure::Failed(error)) => return Err(error),
            }
        }
        Ok(self.reserve.take(bytes))
    }

    fn report(&self, ask: Ask<'_, B>, climb: Climb<B::Error>) -> HostOomReport<B::Error> {
        let stats = self.stats();
        let (mut cached, mut largest_free) = (0, 0);
        self.each_pool(|pool| {
            let (bytes, largest) = pool.store.free_bytes();
            cached += bytes;
            largest_free = largest_free.max(largest);
        });
        HostOomReport {
            source: climb.refusal,
            requested: ask.bytes,
            rounded: climb.pin_bytes,
            node: ask.node,
            reserved: self.pins.bytes(),
            active: stats.active_bytes.current as u64,
            draining: stats.draining_bytes,
            cached,
            largest_free,
            limit: self.config.reserved_bytes_max,
            steps: climb.steps,
        }
    }

    /// Policy `ours`: pins the reserve as ordinary memory that is never given back. Called before
    /// the first growth of the default pool.
    pub(crate) fn pin_reserve(&self, ask: Ask<'_, B>) -> Result<(), B> {
        let Store::Slabs(slabs) = &self.pools.default_pool().store else { return Ok(()) };
        if ask.pool.slot != DEFAULT {
            return Ok(());
        }
        let Some(bytes) = self.reserve.claim() else { return Ok(()) };
        match self.pin(ask, bytes, true) {
            Ok(span) => {
                slabs.restore(ask.node, span);
                Ok(())
            }
            Err(PinFailure::NoRoom(_)) => Ok(()),
            Err(PinFailure::Failed(error)) => Err(error),
        }
    }
}
