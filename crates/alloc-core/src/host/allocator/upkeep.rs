//! What keeps an allocator in order between requests: events, giving back, figures, the checker.

use super::HostAllocator;
use crate::host::allocation::Place;
use crate::host::backend::HostBackend;
use crate::host::check::HostViolation;
use crate::host::engine::{Ask, Engine, REQUEST_BYTES_MAX, Result};
use crate::host::events::Scan;
use crate::host::stats::{self, HostStats};
use std::time::Duration;

impl<B: HostBackend> HostAllocator<B> {
    /// Makes freed memory available whose events are reached. Policy `ours` also gives back what has
    /// been free for too long.
    ///
    /// # Errors
    /// The first failed record or query; the rest is done nevertheless, and no block is lost.
    pub fn process_events(&self) -> Result<(), B> {
        let engine = self.engine();
        let flushed = engine.flush_all();
        let processed = engine.process_events(Scan::All).map(drop);
        engine.trim_now_and_then();
        engine.streams.forget_unused();
        flushed.and(processed)
    }

    /// Policy `pytorch`: the same for the size class of `bytes` only, until one block is free. Policy
    /// `ours` has no classes and looks at all.
    ///
    /// # Errors
    /// As [`process_events`](HostAllocator::process_events).
    pub fn process_events_for(&self, bytes: u64) -> Result<(), B> {
        let engine = self.engine();
        if engine.is_ours() || bytes == 0 || bytes > REQUEST_BYTES_MAX {
            return self.process_events();
        }
        let pool = engine.pools.default_pool();
        engine.process_class(Ask { pool, node: engine.node(Place::Anywhere)?, bytes })
    }

    /// Gives all free memory back to the system, except that of private pools in use. Freed memory
    /// whose events are not reached stays.
    ///
    /// # Errors
    /// The first failure; everything that can be given back is, and the rest stays cached.
    pub fn empty_cache(&self) -> Result<(), B> {
        self.engine().empty_cache()
    }

    /// Policy `ours`: gives segments back that have been wholly free for `age`, as far as earlier
    /// calls or the processing of events saw it.
    ///
    /// # Errors
    /// As [`empty_cache`](HostAllocator::empty_cache).
    pub fn trim(&self, age: Duration) -> Result<(), B> {
        self.engine().trim_old(age)
    }

    /// Statistics of now. Does not look at events.
    pub fn stats(&self) -> HostStats {
        self.engine().stats()
    }

    /// Sets every peak to its current value, and forgets the longest and shortest times.
    pub fn reset_peak_stats(&self) {
        self.engine().pins.reset_peak();
        self.engine()
            .each_pool(|pool| pool.store.each_ledger(|ledger| ledger.figures().reset_peak()));
    }

    /// Sets all sums of increases and decreases, and of times and their counts, to 0.
    pub fn reset_accumulated_stats(&self) {
        self.engine().pins.reset_accumulated();
        self.engine().each_pool(|pool| {
            pool.store.each_ledger(|ledger| ledger.figures().reset_accumulated())
        });
    }

    /// Recomputes everything from the blocks and compares. Only meaningful while no other thread
    /// uses the allocator. Takes time proportional to the number of blocks.
    ///
    /// # Errors
    /// The first violated invariant.
    pub fn check(&self) -> std::result::Result<(), HostViolation> {
        self.engine().check()
    }
}

impl<B: HostBackend> Engine<B> {
    /// Frees the first block of the class of a request whose events are reached.
    pub(super) fn process_class(&self, ask: Ask<'_, B>) -> Result<(), B> {
        self.flush_all()?;
        let class = stats::bucket_of(self.options.class_bytes(ask.bytes)) as u32;
        self.process_events(Scan::Class(class)).map(drop)
    }

    /// What the background thread does each time. Failures are counted; blocks stay where they are.
    pub(super) fn tick(&self) {
        self.look_at_events();
        self.trim_now_and_then();
    }
}
