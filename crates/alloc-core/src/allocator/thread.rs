//! Which thread this is.

use std::sync::atomic::{AtomicU64, Ordering};

/// Names a thread for the life of the process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ThreadTag(u64);

static NEXT: AtomicU64 = AtomicU64::new(0);

crate::sync::thread_local! {
    static CURRENT: ThreadTag = ThreadTag(NEXT.fetch_add(1, Ordering::Relaxed));
}

impl ThreadTag {
    /// The thread that asks.
    #[inline]
    pub(super) fn current() -> Self {
        CURRENT.with(|tag| *tag)
    }

    /// Threads are counted as they first ask.
    pub(super) const fn number(self) -> u64 {
        self.0
    }
}
