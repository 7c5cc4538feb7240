//! Locks, condition variables and threads: from parking_lot, std and [`crate::lock`], or from loom
//! when the crate is built with `--cfg loom`. Code whose interleavings are model-checked takes them
//! from here only.

/// A lock that is held for some tens of nanoseconds at most.
#[cfg(not(loom))]
pub(crate) use crate::lock::{Guard as ShortGuard, Lock as ShortLock};
#[cfg(not(loom))]
pub(crate) use parking_lot::{Condvar, Mutex, RwLock};
#[cfg(not(loom))]
pub(crate) use std::thread;

#[cfg(loom)]
pub(crate) use self::model::{
    Condvar, Mutex, Mutex as ShortLock, MutexGuard as ShortGuard, RwLock,
};
#[cfg(loom)]
pub(crate) use loom::thread;

/// loom's locks behind parking_lot's interface. A poisoned lock ends the model run.
#[cfg(loom)]
mod model {
    use std::fmt;
    use std::ops::{Deref, DerefMut};
    use std::time::Duration;

    const POISONED: &str = "a thread of the model panicked while it held this lock";

    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    pub(crate) struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Mutex(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().expect(POISONED)))
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok().map(|guard| MutexGuard(Some(guard)))
        }
    }

    impl<T> fmt::Debug for Mutex<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Mutex(..)")
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.0.as_ref().expect("taken only inside wait_for")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().expect("taken only inside wait_for")
        }
    }

    pub(crate) struct RwLock<T>(loom::sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub(crate) fn new(value: T) -> Self {
            RwLock(loom::sync::RwLock::new(value))
        }

        pub(crate) fn read(&self) -> loom::sync::RwLockReadGuard<'_, T> {
            self.0.read().expect(POISONED)
        }

        pub(crate) fn write(&self) -> loom::sync::RwLockWriteGuard<'_, T> {
            self.0.write().expect(POISONED)
        }
    }

    impl<T> fmt::Debug for RwLock<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("RwLock(..)")
        }
    }

    #[derive(Debug)]
    pub(crate) struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Condvar(loom::sync::Condvar::new())
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }

        /// Waits for a notification. The timeout never fires: a model run has no clock, so the
        /// waker must come.
        pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _timeout: Duration) {
            let inner = guard.0.take().expect("taken only inside wait_for");
            guard.0 = Some(self.0.wait(inner).expect(POISONED));
        }
    }
}
