//! Events of freed blocks, in the order in which they were recorded.

use crate::sync::Mutex;
use std::collections::VecDeque;

/// A queue that several threads work off at once: one takes an entry out, asks the driver about it
/// with no lock held, and puts it back if its time has not come. An entry is in the queue or in one
/// thread's hands, never in both and never in neither.
#[derive(Debug)]
pub(crate) struct EventQueue<T> {
    entries: Mutex<VecDeque<T>>,
}

impl<T> EventQueue<T> {
    pub(crate) fn new() -> Self {
        EventQueue { entries: Mutex::new(VecDeque::new()) }
    }

    /// Adds an entry as the youngest.
    pub(crate) fn push(&self, entry: T) {
        self.entries.lock().push_back(entry);
    }

    /// Takes the oldest entry out.
    pub(crate) fn pop(&self) -> Option<T> {
        self.entries.lock().pop_front()
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.lock().len()
    }

    /// Visits all entries under the lock.
    pub(crate) fn each(&self, visit: impl FnMut(&T)) {
        self.entries.lock().iter().for_each(visit);
    }
}
