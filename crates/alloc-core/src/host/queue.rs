//! Events of freed blocks, in the order in which they were recorded.

use crate::sync::Mutex;
use std::collections::VecDeque;
use std::ops::Deref;

/// A queue that several threads work off at once: one takes an entry out, asks the driver about it
/// with no lock held, and puts it back at the end if its time has not come, so that the next one
/// asks about another. An entry is in the queue or in one thread's hands, never in both and never in
/// neither.
#[derive(Debug)]
pub(crate) struct EventQueue<T> {
    state: Mutex<State<T>>,
}

#[derive(Debug)]
struct State<T> {
    entries: VecDeque<Queued<T>>,
    next: u64,
}

/// An entry in somebody's hands.
#[derive(Debug)]
#[must_use = "an entry that is not put back is lost"]
pub(crate) struct Queued<T> {
    /// The younger, the larger.
    number: u64,
    entry: T,
}

impl<T> Queued<T> {
    /// The entry, whose time has come.
    pub(crate) fn into_inner(self) -> T {
        self.entry
    }
}

impl<T> Deref for Queued<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.entry
    }
}

impl<T> EventQueue<T> {
    pub(crate) fn new() -> Self {
        EventQueue { state: Mutex::new(State { entries: VecDeque::new(), next: 0 }) }
    }

    /// Adds an entry as the youngest.
    pub(crate) fn push(&self, entry: T) {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        state.entries.push_back(Queued { number, entry });
    }

    /// Takes out the entry that was not looked at for the longest time.
    pub(crate) fn pop(&self) -> Option<Queued<T>> {
        self.state.lock().entries.pop_front()
    }

    /// Puts an entry back, behind all others.
    pub(crate) fn put_back(&self, queued: Queued<T>) {
        self.state.lock().entries.push_back(queued);
    }

    /// Puts the oldest entries to the front again.
    pub(crate) fn sort(&self) {
        let mut state = self.state.lock();
        state.entries.make_contiguous().sort_unstable_by_key(|queued| queued.number);
    }

    pub(crate) fn len(&self) -> usize {
        self.state.lock().entries.len()
    }

    /// Visits all entries under the lock.
    pub(crate) fn each(&self, mut visit: impl FnMut(&T)) {
        self.state.lock().entries.iter().for_each(|queued| visit(&queued.entry));
    }
}
