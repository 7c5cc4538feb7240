//! The lock of a heap.
//!
//! A hit holds it for some tens of nanoseconds and takes it twice, so what an uncontended lock costs
//! is most of what a hit costs. Releasing a spinning lock is a plain store, where one that can park
//! needs a second atomic exchange (`docs/adr/0009-spinning-heap-lock.md`). Nothing blocks while
//! holding one: backend calls, callbacks and sinks run outside.
//!
//! It is unfair on purpose. When it changes hands between two processors, some dozen cache lines of
//! the heap follow it, which takes longer than many hits. So who finds it held stays away for a
//! while, and the holder's next operations find lock and heap in their own cache.

use spin::mutex::{SpinMutex, SpinMutexGuard};
use std::fmt;
use std::hint::spin_loop;
use std::thread;

/// A lock that spins with growing pauses and then yields the processor.
pub(crate) struct Lock<T>(SpinMutex<T>);

/// What holds a [`Lock`].
pub(crate) type Guard<'a, T> = SpinMutexGuard<'a, T>;

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Lock(SpinMutex::new(value))
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        self.lock_noting(|_| {})
    }

    /// [`lock`](Self::lock) that lets `note` know, under the lock, when it had to wait.
    #[inline]
    pub(crate) fn lock_noting(&self, note: impl FnOnce(&mut T)) -> Guard<'_, T> {
        if let Some(guard) = self.0.try_lock() {
            return guard;
        }
        let mut backoff = Backoff::new();
        loop {
            backoff = self.wait(backoff);
            if let Some(mut guard) = self.0.try_lock() {
                note(&mut guard);
                return guard;
            }
        }
    }

    #[inline]
    pub(crate) fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.0.try_lock()
    }

    /// Waits until nobody holds it, as far as one can see. Only then is it tried: a failed exchange takes
    /// the line away from the holder.
    #[cold]
    #[inline(never)]
    fn wait(&self, mut backoff: Backoff) -> Backoff {
        loop {
            backoff.pass();
            if !self.0.is_locked() {
                return backoff;
            }
        }
    }
}

impl<T> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lock(..)")
    }
}

/// Pauses of the processor before the first look: about a microsecond, some twenty times what a hit
/// holds the lock.
const FIRST_PAUSES: u32 = 32;

/// Pauses between two looks at most: some fifty microseconds, as long as hundreds of hits. What
/// other lengths give is in `docs/adr/0009-spinning-heap-lock.md`.
const PAUSES_MAX: u32 = 1024;

/// Looks after which a thread has waited long enough (a few milliseconds) and no longer stays away.
const PATIENCE: u32 = 100;

/// Pauses between two looks of such a thread.
const IMPATIENT_PAUSES: u32 = 1;

/// How a waiting thread passes the time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Backoff {
    looks: u32,
}

impl Backoff {
    const fn new() -> Self {
        Backoff { looks: 0 }
    }

    /// Pauses before the next look, and whether the processor is given away besides.
    fn next(&mut self) -> (u32, bool) {
        let doublings = self.looks.min(PAUSES_MAX.ilog2());
        let pauses = (FIRST_PAUSES << doublings).min(PAUSES_MAX);
        self.looks = self.looks.saturating_add(1);
        // From the longest pause on, the holder may have been preempted; on a crowded machine it
        // needs this core.
        if self.looks > PATIENCE {
            (IMPATIENT_PAUSES, self.looks.is_multiple_of(PATIENCE))
        } else {
            (pauses, pauses == PAUSES_MAX)
        }
    }

    fn pass(&mut self) {
        let (pauses, gives_way) = self.next();
        for _ in 0..pauses {
            spin_loop();
        }
        if gives_way {
            thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_end() {
        let mut backoff = Backoff::new();
        let steps: Vec<_> = (0..PATIENCE).map(|_| backoff.next()).collect();
        assert_eq!(steps[0], (FIRST_PAUSES, false));
        assert!(steps.windows(2).all(|two| two[1].0 == (2 * two[0].0).min(PAUSES_MAX)));
        assert_eq!(steps.last(), Some(&(PAUSES_MAX, true)));
        assert_eq!(backoff.next(), (IMPATIENT_PAUSES, false), "it has waited long enough");
        assert!((0..PATIENCE).any(|_| backoff.next().1), "it still gives way at times");
        let mut old = Backoff { looks: u32::MAX };
        assert_eq!(old.next().0, IMPATIENT_PAUSES);
        assert_eq!(old, Backoff { looks: u32::MAX });
    }

    /// A thread that never pauses takes the lock again and again; the others get it all the same.
    #[test]
    fn who_waits_comes_to_its_turn() {
        const TURNS: u64 = 300;
        let lock = Lock::new((0u64, 0u64));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..TURNS).for_each(|_| lock.lock().0 += 1));
            }
            scope.spawn(|| {
                loop {
                    let mut state = lock.lock();
                    state.1 += 1;
                    if state.0 == 3 * TURNS {
                        return;
                    }
                }
            });
        });
        assert_eq!(lock.lock().0, 3 * TURNS);
        assert!(lock.try_lock().is_some());
        let held = lock.lock();
        assert!(lock.try_lock().is_none());
        drop(held);
    }
}
