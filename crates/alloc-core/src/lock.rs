//! The lock of a heap.
//!
//! A hit holds it for some tens of nanoseconds and takes it twice, so what an uncontended lock costs
//! is most of what a hit costs. Releasing a spinning lock is a plain store, where one that can park
//! needs a second atomic exchange (`docs/adr/0009-spinning-heap-lock.md`). Nothing blocks while
//! holding one: backend calls, callbacks and sinks run outside.

use spin::RelaxStrategy;
use std::cell::Cell;
use std::hint::spin_loop;

/// A lock that spins a little and then yields the processor.
pub(crate) type Lock<T> = spin::mutex::SpinMutex<T, Backoff>;

thread_local! {
    /// Polls of the thread in the current wait and those before it.
    static POLLS: Cell<u32> = const { Cell::new(0) };
}

/// Polls between two yields: about a microsecond, some twenty times what a hit holds the lock.
const POLLS_PER_YIELD: u32 = 64;

/// How a waiting thread passes the time.
#[derive(Debug)]
pub(crate) struct Backoff;

impl RelaxStrategy for Backoff {
    #[inline]
    fn relax() {
        let polls = POLLS.get().wrapping_add(1);
        POLLS.set(polls);
        if polls.is_multiple_of(POLLS_PER_YIELD) {
            // The holder may have been preempted; on a crowded machine it needs this core.
            std::thread::yield_now();
        } else {
            spin_loop();
        }
    }
}
