//! Giving memory back: on request, beyond the bounds, and when a private pool is released.

use super::backend::{HostBackend, NodeId};
use super::engine::{Engine, PoolOf, Result, StreamOf};
use super::error::{HostError, HostOp};
use super::events::Scan;
use super::heap::Idle;
use super::home::Span;
use super::pools::DEFAULT;
use super::slabs::SlabStore;
use super::stats::BUCKETS;
use super::store::Store;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

impl<B: HostBackend> Engine<B> {
    /// Gives memory that a pool's store has forgotten back to where it came from. If the system does
    /// not take it, the store gets it again as free memory.
    pub(crate) fn give_back(&self, pool: &PoolOf<B>, span: Span) -> Result<(), B> {
        if self.reserve.give_back(span.base) {
            return Ok(());
        }
        let Err((about, source)) = self.pins.unpin(&self.backend, span.base) else {
            return Ok(());
        };
        match &pool.store {
            Store::Classes(classes) => classes.restore(span),
            Store::Slabs(slabs) => slabs.restore(about.node, span),
        }
        self.counters.unpin_failures.fetch_add(1, Relaxed);
        Err(HostError::Backend { op: HostOp::Unpin, source })
    }

    /// Gives all free memory of the default pool and of released pools back to the system.
    ///
    /// # Errors
    /// The first failure; everything that can be given back is.
    pub(crate) fn empty_cache(&self) -> Result<(), B> {
        let mut outcome = self.flush_all();
        outcome = outcome.and(self.process_events(Scan::All).map(drop));
        outcome = outcome.and(self.empty_pool(self.pools.default_pool()));
        for pool in self.pools.private() {
            if pool.is_released() {
                outcome = outcome.and(self.empty_pool(&pool));
                self.forget_if_empty(&pool);
            }
        }
        self.streams.forget_unused();
        outcome
    }

    pub(crate) fn empty_pool(&self, pool: &PoolOf<B>) -> Result<(), B> {
        let mut outcome = Ok(());
        match &pool.store {
            Store::Classes(classes) => {
                for class in 0..BUCKETS as u32 {
                    for span in classes.drain(class) {
                        outcome = outcome.and(self.give_back(pool, span));
                    }
                }
            }
            Store::Slabs(slabs) => {
                for node in slabs.node_ids() {
                    slabs.collect(node);
                    for idle in slabs.idle_segments(node) {
                        outcome =
                            outcome.and(self.give_back_idle(pool, slabs, node, idle).map(drop));
                    }
                }
            }
        }
        outcome
    }

    /// Gives a segment back that was wholly free a moment ago, unless it is to be kept or is in use
    /// again. Whether it was given back.
    pub(crate) fn give_back_idle(
        &self,
        pool: &PoolOf<B>,
        slabs: &SlabStore<StreamOf<B>>,
        node: NodeId,
        idle: Idle,
    ) -> Result<bool, B> {
        let keep = self.pins.find(idle.span.base).is_none_or(|about| about.keep);
        if keep || !slabs.remove_idle(node, idle) {
            return Ok(false);
        }
        self.give_back(pool, idle.span).map(|()| true)
    }

    /// Gives free segments back, the largest first, until a node keeps no more free bytes than the
    /// bound allows, as far as whole segments are free. Failures are counted only.
    pub(crate) fn give_back_excess(
        &self,
        pool: &PoolOf<B>,
        slabs: &SlabStore<StreamOf<B>>,
        node: NodeId,
    ) {
        let mut excess = slabs.excess(node);
        if excess == 0 {
            return;
        }
        for idle in slabs.idle_segments(node).into_iter().rev() {
            if excess == 0 {
                break;
            }
            if let Ok(true) = self.give_back_idle(pool, slabs, node, idle) {
                excess = excess.saturating_sub(idle.span.bytes);
            }
        }
    }

    /// Gives segments of the default pool back that have been wholly free for `age`.
    ///
    /// # Errors
    /// The first failure; everything that can be given back is.
    pub(crate) fn trim_old(&self, age: Duration) -> Result<(), B> {
        let pool = self.pools.default_pool();
        let Store::Slabs(slabs) = &pool.store else { return Ok(()) };
        let now = self.backend.now();
        let mut outcome = Ok(());
        for node in slabs.node_ids() {
            slabs.collect(node);
            for idle in slabs.idle_segments(node) {
                let since = self.pins.idle_since(idle.span.base, idle.stamp, now);
                if now.saturating_sub(since) >= age {
                    outcome = outcome.and(self.give_back_idle(pool, slabs, node, idle).map(drop));
                }
            }
        }
        outcome
    }

    /// Looks for old cached segments if it is time. Failures are counted only.
    pub(crate) fn trim_now_and_then(&self) {
        let Some(age) = self.config.cached_age_max.filter(|_| self.is_ours()) else { return };
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let now = micros(self.backend.now());
        let due = self.counters.next_trim.load(Relaxed);
        // Several looks per `age`, so that a segment stays little longer than that.
        let next = now.saturating_add(micros(age / 4));
        let claim = self.counters.next_trim.compare_exchange(due, next, Relaxed, Relaxed);
        if now >= due && claim.is_ok() {
            let _ = self.trim_old(age);
        }
    }

    /// Policy `ours`: the free segments of a released private pool serve the default pool.
    pub(crate) fn reabsorb_if_released(&self, slot: u32) {
        self.pools.with(slot, |pool| {
            if !pool.is_released() {
                return;
            }
            if let (Store::Slabs(from), Store::Slabs(to)) =
                (&pool.store, &self.pools.default_pool().store)
            {
                for node in from.node_ids() {
                    from.collect(node);
                    for idle in from.idle_segments(node) {
                        if from.remove_idle(node, idle) {
                            self.pins.move_to(idle.span.base, DEFAULT);
                            to.restore(node, idle.span);
                        }
                    }
                }
            }
            self.forget_if_empty(pool);
        });
    }

    fn forget_if_empty(&self, pool: &PoolOf<B>) {
        if pool.slot != DEFAULT && pool.store.is_empty() {
            self.pools.forget(pool.slot);
        }
    }
}
