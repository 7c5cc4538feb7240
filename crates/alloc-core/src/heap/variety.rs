//! Whether large requests ask for ever new sizes, and so often that the time matters.
//!
//! Of the large class only the latest freed block waits for a request of its size (`recent`): every
//! other request searches, cuts and merges. Where sizes hardly ever come again it is that work which
//! takes the time. Rounded to few sizes they do come again, at the price of up to an eighth of their
//! memory: fair for a program that spends its time here, and for no other. A heap can tell the one but
//! knows no time. So after each window of requests it sends one on the way of those that find nothing,
//! where there may be a clock (`allocator/allocate.rs`).

use super::{Heap, Request};
use crate::size_class::SizeClass;
use std::time::Duration;

/// Requests are varied if fewer than one of so many asks for a size like the one before it.
const REPEATS_PART: u32 = 4;
/// Frees of a heap a second from which on their time matters: eight microseconds for each and the
/// request before it, less than it takes to have a kernel use the memory.
const FREES_PER_SECOND: u64 = 125_000;
/// A shorter time within a window may be that of one miss, and tells nothing.
const TIME_MIN: Duration = Duration::from_millis(10);

/// What is known of the large requests of a heap that did not find a block of their size.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Variety {
    /// Of this window.
    searched: u32,
    /// Of this window, those of the same size as the one before among sizes like theirs.
    repeated: u32,
    /// When the window began: the time, and the heap's clock.
    since: Option<(Duration, u32)>,
}

impl Variety {
    /// A large request was served from the free index.
    #[inline]
    pub(super) const fn note(&mut self, repeated: bool) {
        self.searched = self.searched.saturating_add(1);
        self.repeated = self.repeated.saturating_add(repeated as u32);
    }

    /// Whether a window of `requests` has ended; 0 never does.
    #[inline]
    const fn is_due(&self, requests: u32) -> bool {
        (requests != 0) & (self.searched >= requests)
    }

    const fn is_varied(&self) -> bool {
        (self.repeated as u64) * (REPEATS_PART as u64) < self.searched as u64
    }

    /// For how long the window has lasted at the time `now`, and whether frees come fast in it, with the
    /// heap's clock at `clock`.
    fn speed(&self, now: Duration, clock: u32) -> Option<(Duration, bool)> {
        let (time, frees) = self.since?;
        let passed = now.saturating_sub(time);
        let frees = u128::from(clock.wrapping_sub(frees));
        let fast = frees * 1_000_000_000 >= passed.as_nanos() * u128::from(FREES_PER_SECOND);
        Some((passed, fast))
    }
}

impl Heap {
    /// Whether a request is sent to where the time is known.
    #[inline]
    pub(super) const fn asks_for_the_time(&self, class: SizeClass) -> bool {
        matches!(class, SizeClass::Large) && self.variety.is_due(self.rules.variety)
    }

    /// Decides about the sizes of large requests, at the end of a window or when one found nothing. `now`
    /// is the time, if there is a clock. Returns whether a window ended, so that the request should look
    /// again.
    pub(crate) fn choose_sizes(&mut self, now: Option<Duration>, may_widen: bool) -> bool {
        let variety = self.variety;
        let (due, wide) = (variety.is_due(self.rules.variety), self.rules.is_wide());
        if !(due || wide) {
            return false;
        }
        let speed = now.and_then(|now| variety.speed(now, self.clock));
        let fast = speed.is_some_and(|(passed, fast)| fast || !due && passed < TIME_MIN);
        self.rules.widen(may_widen && fast && (wide || variety.is_varied()));
        if due {
            let since = now.map(|now| (now, self.clock));
            self.variety = Variety { since, ..Variety::default() };
        }
        due
    }

    /// The request without what it was rounded up by to save time. Others will not be, either.
    pub(crate) fn exact(&mut self, request: &Request) -> Request {
        if !self.rules.is_wide() {
            return *request;
        }
        self.rules.widen(false);
        self.rules.request(request.requested)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn variety(searched: u32, repeated: u32) -> Variety {
        Variety { searched, repeated, since: Some((1000 * MS, u32::MAX)) }
    }

    #[test]
    fn a_window_is_varied_where_sizes_hardly_ever_come_again() {
        assert!(variety(512, 127).is_varied() && !variety(512, 128).is_varied());
        assert!(variety(1, 0).is_varied() && !variety(1, 1).is_varied());
    }

    #[test]
    fn a_window_is_full_or_never_is() {
        let due = |searched, requests| variety(searched, 0).is_due(requests);
        assert_eq!(
            [0, 511, 512, 513, u32::MAX].map(|n| due(n, 512)),
            [false, false, true, true, true]
        );
        assert_eq!([0, 1].map(|n| due(n, 1)), [false, true]);
        assert_eq!([0, 1, u32::MAX].map(|n| due(n, 0)), [false; 3]);
    }

    #[test]
    fn speed_is_told_by_frees_and_time() {
        let speed = |clock, ms| variety(512, 0).speed(ms * MS, clock).unwrap();
        // The clock of frees wraps around.
        assert_eq!(speed(124_999, 2000), (1000 * MS, true));
        assert_eq!(speed(124_998, 2000), (1000 * MS, false));
        assert_eq!(speed(1_249, 1010), (10 * MS, true));
        assert_eq!(speed(1_248, 1010), (10 * MS, false));
        assert_eq!(speed(0, 500), (Duration::ZERO, true), "a clock that runs backwards");
        assert_eq!(Variety::default().speed(MS, 1 << 30), None, "nobody knows when it began");
    }
}
