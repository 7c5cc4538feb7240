//! How often events are recorded for few blocks each, and when that is worth memory.
//!
//! A program that frees large blocks faster than there are others to use meanwhile has an event for
//! every block or two. More blocks would share an event, if there were more. Pinning one more costs as
//! much as so many events, once; so it is done when the events have cost that much. Events that come
//! seldom cost nothing worth saving, however many they become.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Bytes that are pinned in the time that an event costs: recorded, asked about, and a request that
/// finds nothing free meanwhile, two microseconds together.
const EVENT_BYTES: u64 = 64 << 10;

/// An event for so many blocks is cheap enough.
pub(crate) const SHARED_ENOUGH: usize = 8;

/// Most bytes that events pay for in advance.
const CREDIT_BYTES_MAX: u64 = 128 << 20;

/// A clock that every event for few blocks pushes ahead, by the time in which one such event is
/// nobody's concern. How far it is ahead of the time of day says what events have cost of late.
#[derive(Debug)]
pub(crate) struct EventPace {
    /// Nanoseconds of [`HostBackend::now`](super::backend::HostBackend::now).
    clock: AtomicU64,
    /// 0: events are never of concern.
    interval: u64,
}

impl EventPace {
    pub(crate) fn new(interval: Duration) -> Self {
        EventPace { clock: AtomicU64::new(0), interval: nanos(interval) }
    }

    /// Whether it matters that an event was recorded for so many blocks.
    pub(crate) fn concerns(&self, blocks: usize) -> bool {
        blocks < SHARED_ENOUGH && self.interval > 0
    }

    /// Notes an event that [matters](EventPace::concerns).
    pub(crate) fn note(&self, now: Duration) {
        let now = nanos(now);
        let most = now.saturating_add(self.price(CREDIT_BYTES_MAX));
        let push = |clock: u64| Some(clock.max(now).saturating_add(self.interval).min(most));
        // Never fails, as the function always answers.
        let _ = self.clock.fetch_update(Relaxed, Relaxed, push);
    }

    /// Whether events have cost more of late than pinning `bytes` does.
    pub(crate) fn outweighs(&self, bytes: u64, now: Duration) -> bool {
        self.left(self.clock.load(Relaxed), bytes, now).is_some()
    }

    /// The same, and if so, the time counts as spent on it.
    pub(crate) fn spend(&self, bytes: u64, now: Duration) -> bool {
        self.clock.fetch_update(Relaxed, Relaxed, |clock| self.left(clock, bytes, now)).is_ok()
    }

    /// The clock after `bytes` are paid for, if it is far enough ahead.
    fn left(&self, clock: u64, bytes: u64, now: Duration) -> Option<u64> {
        let price = self.price(bytes);
        (clock.saturating_sub(nanos(now)) > price).then(|| clock - price)
    }

    /// Nanoseconds that the clock must be ahead for so many bytes.
    fn price(&self, bytes: u64) -> u64 {
        bytes.div_ceil(EVENT_BYTES).saturating_mul(self.interval)
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_micros(20);

    #[test]
    fn events_pay_for_memory_once() {
        let pace = EventPace::new(INTERVAL);
        let noon = Duration::from_secs(43_200);
        for _ in 0..17 {
            assert!(!pace.outweighs(1 << 20, noon));
            pace.note(noon);
        }
        assert!(pace.outweighs(1 << 20, noon), "more than sixteen events for a MiB");
        assert!(!pace.spend(2 << 20, noon));
        assert!(pace.spend(1 << 20, noon));
        assert!(!pace.spend(1 << 20, noon));
    }

    #[test]
    fn what_events_cost_is_forgotten_as_time_goes_by() {
        let pace = EventPace::new(INTERVAL);
        (1..=100).for_each(|n| pace.note(n * INTERVAL));
        assert!(!pace.outweighs(1 << 20, 100 * INTERVAL), "not too often");
        (0..100).for_each(|_| pace.note(100 * INTERVAL));
        assert!(pace.outweighs(1 << 20, 101 * INTERVAL));
        assert!(!pace.outweighs(1 << 20, 200 * INTERVAL), "long ago");
        (0..10_000).for_each(|_| pace.note(200 * INTERVAL));
        assert!(!pace.outweighs(CREDIT_BYTES_MAX, 200 * INTERVAL), "no more than so much");
    }

    #[test]
    fn events_for_many_blocks_and_events_that_never_matter_are_no_concern() {
        assert!(EventPace::new(INTERVAL).concerns(7) && !EventPace::new(INTERVAL).concerns(8));
        let never = EventPace::new(Duration::ZERO);
        assert!(!never.concerns(1) && !never.outweighs(1, Duration::ZERO));
    }
}
