//! Memory against time: how much of a program's time may go into moving memory.
//!
//! Moving keeps what is reserved near what is needed, at the price of driver calls. A program that
//! spends its time on a device hardly notices; one that does nothing but allocate would wait for
//! moves most of the time. So time spent on moves is booked as debt, which time that passes pays off
//! at a fixed rate (`ours_stall_share`). In debt, growth takes new memory instead, up to a bound.

use crate::sync::Mutex;
use std::time::Duration;

/// Debt that is always allowed, in nanoseconds: more than a training run spends on mapping in all
/// (`docs/adr/`, number 19). A program starts without credit, and its first steps should not cost it
/// memory.
const GRACE_NS: f64 = 1e8;
/// Time that is not used up is kept for so long, in nanoseconds.
const MEMORY_NS: f64 = 2e9;

/// The account of one device.
#[derive(Debug, Default)]
pub(in crate::allocator) struct Pace {
    account: Mutex<Account>,
}

#[derive(Debug, Default)]
struct Account {
    /// When it was last settled.
    at: Duration,
    /// Nanoseconds of moves that no passed time has paid for; negative is credit.
    debt: f64,
    /// Bytes that may be reserved beyond the usual line, because there was no time to move memory.
    extra: u64,
}

impl Pace {
    /// Bytes that may be reserved beyond the usual line.
    pub(super) fn extra(&self) -> u64 {
        self.account.lock().extra
    }

    /// Forgets what was granted: the memory is about to be given back.
    pub(in crate::allocator) fn forget_extra(&self) {
        self.account.lock().extra = 0;
    }

    /// Whether there is time to move memory at the time `now`.
    pub(super) fn has_time(&self, now: Duration, share: f64) -> bool {
        let mut account = self.account.lock();
        let passed = now.saturating_sub(account.at).as_nanos() as f64;
        account.at = account.at.max(now);
        account.debt = (account.debt - passed * share).max(-MEMORY_NS * share);
        account.debt <= GRACE_NS
    }

    /// `step` bytes more may be reserved from now on, but not more than `most` in all. Returns whether
    /// that is so.
    pub(super) fn grant(&self, step: u64, most: u64) -> bool {
        let mut account = self.account.lock();
        let granted = account.extra + step <= most;
        if granted {
            account.extra += step;
        }
        granted
    }

    /// Books the time that a move took.
    pub(super) fn spend(&self, time: Duration) {
        self.account.lock().debt += time.as_nanos() as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: f64 = 0.01;
    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn moves_are_paid_for_by_time() {
        let pace = Pace::default();
        assert!(pace.has_time(Duration::ZERO, SHARE));
        pace.spend(101 * MS);
        assert!(!pace.has_time(MS, SHARE));
        // 1 % of 100 ms is the millisecond above the grace.
        assert!(pace.has_time(100 * MS, SHARE));
    }

    #[test]
    fn credit_is_bounded() {
        let pace = Pace::default();
        assert!(pace.has_time(3_600_000 * MS, SHARE));
        pace.spend(121 * MS);
        assert!(!pace.has_time(3_600_000 * MS, SHARE));
    }

    #[test]
    fn what_is_granted_is_bounded() {
        let pace = Pace::default();
        let granted = (0..20).filter(|_| pace.grant(10, 100)).count();
        assert_eq!((granted, pace.extra()), (10, 100));
        pace.forget_extra();
        assert!(pace.grant(10, 100));
        assert_eq!(pace.extra(), 10);
    }
}
