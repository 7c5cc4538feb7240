//! Locks, condition variables and threads: from parking_lot, std and [`crate::lock`], or from loom or
//! shuttle when the crate is built with `--cfg loom` or `--cfg shuttle`. Code whose interleavings are
//! explored takes them from here only.
//!
//! loom also explores what weak memory allows, so atomics and cells that are filled once are its own
//! there; shuttle only changes the order of threads, for which locks are enough.

#[cfg(any(loom, shuttle))]
mod model;

#[cfg(not(any(loom, shuttle)))]
pub(crate) use self::real::*;
#[cfg(any(loom, shuttle))]
pub(crate) use model::*;

#[cfg(not(any(loom, shuttle)))]
mod real {
    /// A lock that is held for some tens of nanoseconds at most.
    pub(crate) use crate::lock::{Guard as ShortGuard, Lock as ShortLock};
    pub(crate) use parking_lot::{
        Condvar, Mutex, MutexGuard, ReentrantMutex, ReentrantMutexGuard, RwLock,
    };
    pub(crate) use std::sync::{OnceLock, atomic};
    pub(crate) use std::{thread, thread_local};
}
