//! The locks of loom and of shuttle behind parking_lot's interface. A poisoned lock ends the run.

#[cfg(loom)]
use loom as tool;
#[cfg(shuttle)]
use shuttle as tool;

#[cfg(loom)]
pub(crate) use once::OnceLock;
#[cfg(shuttle)]
pub(crate) use std::sync::{OnceLock, atomic};
#[cfg(loom)]
pub(crate) use tool::sync::atomic;
pub(crate) use tool::{thread, thread_local};

pub(crate) use Mutex as ShortLock;
pub(crate) use MutexGuard as ShortGuard;

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

const POISONED: &str = "a thread of the model panicked while it held this lock";

#[derive(Default)]
pub(crate) struct Mutex<T>(tool::sync::Mutex<T>);

pub(crate) struct MutexGuard<'a, T>(Option<tool::sync::MutexGuard<'a, T>>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Mutex(tool::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard(Some(self.0.lock().expect(POISONED)))
    }

    /// See [`crate::lock`]. Threads of loom never collide: where one tries, both outcomes would be played.
    pub(crate) fn lock_noting(&self, note: impl FnOnce(&mut T)) -> MutexGuard<'_, T> {
        if !cfg!(loom)
            && let Some(guard) = self.try_lock()
        {
            return guard;
        }
        let mut guard = self.lock();
        if !cfg!(loom) {
            note(&mut guard);
        }
        guard
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().expect(POISONED)
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
        self.0.as_ref().expect("taken only while waiting")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("taken only while waiting")
    }
}

/// A mutex that its holder may lock again.
pub(crate) struct ReentrantMutex<T> {
    /// Who holds it, and how many times.
    holder: Mutex<Option<(thread::ThreadId, u32)>>,
    let_go: Condvar,
    value: T,
}

pub(crate) struct ReentrantMutexGuard<'a, T>(&'a ReentrantMutex<T>);

impl<T> ReentrantMutex<T> {
    pub(crate) fn new(value: T) -> Self {
        ReentrantMutex { holder: Mutex::new(None), let_go: Condvar::new(), value }
    }

    pub(crate) fn lock(&self) -> ReentrantMutexGuard<'_, T> {
        let mut holder = self.holder.lock();
        while !Self::enter(&mut holder) {
            self.let_go.wait(&mut holder);
        }
        ReentrantMutexGuard(self)
    }

    pub(crate) fn try_lock(&self) -> Option<ReentrantMutexGuard<'_, T>> {
        Self::enter(&mut self.holder.lock()).then(|| ReentrantMutexGuard(self))
    }

    fn enter(holder: &mut Option<(thread::ThreadId, u32)>) -> bool {
        let me = thread::current().id();
        let (who, times) = holder.get_or_insert((me, 0));
        let enters = *who == me;
        *times += u32::from(enters);
        enters
    }
}

impl<T> Deref for ReentrantMutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0.value
    }
}

impl<T> Drop for ReentrantMutexGuard<'_, T> {
    fn drop(&mut self) {
        let mut holder = self.0.holder.lock();
        match &mut *holder {
            Some((_, times)) if *times > 1 => *times -= 1,
            held => {
                *held = None;
                self.0.let_go.notify_all();
            }
        }
    }
}

pub(crate) struct RwLock<T>(tool::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn new(value: T) -> Self {
        RwLock(tool::sync::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> tool::sync::RwLockReadGuard<'_, T> {
        self.0.read().expect(POISONED)
    }

    pub(crate) fn write(&self) -> tool::sync::RwLockWriteGuard<'_, T> {
        self.0.write().expect(POISONED)
    }
}

impl<T: Default> Default for RwLock<T> {
    fn default() -> Self {
        RwLock::new(T::default())
    }
}

impl<T> fmt::Debug for RwLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RwLock(..)")
    }
}

#[derive(Debug)]
pub(crate) struct Condvar(tool::sync::Condvar);

impl Condvar {
    pub(crate) fn new() -> Self {
        Condvar(tool::sync::Condvar::new())
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let inner = guard.0.take().expect("taken only while waiting");
        guard.0 = Some(self.0.wait(inner).expect(POISONED));
    }

    /// Waits for a notification. The timeout never fires: a model run has no clock, so the waker must
    /// come.
    pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _timeout: Duration) {
        self.wait(guard);
    }
}

#[cfg(loom)]
mod once {
    use super::Mutex;
    use super::atomic::{AtomicBool, Ordering};

    /// A cell that is filled once. What is in it is std's; that a reader sees it is loom's to say.
    pub(crate) struct OnceLock<T> {
        cell: std::sync::OnceLock<T>,
        is_filled: AtomicBool,
        filling: Mutex<()>,
    }

    impl<T> OnceLock<T> {
        pub(crate) fn new() -> Self {
            OnceLock {
                cell: std::sync::OnceLock::new(),
                is_filled: AtomicBool::new(false),
                filling: Mutex::new(()),
            }
        }

        pub(crate) fn get(&self) -> Option<&T> {
            if self.is_filled.load(Ordering::Acquire) { self.cell.get() } else { None }
        }

        pub(crate) fn set(&self, value: T) -> Result<(), T> {
            let _filling = self.filling.lock();
            self.cell.set(value)?;
            self.is_filled.store(true, Ordering::Release);
            Ok(())
        }

        pub(crate) fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
            if self.get().is_none() {
                let _filling = self.filling.lock();
                if self.cell.get().is_none() {
                    assert!(self.cell.set(make()).is_ok(), "filled under its lock only");
                    self.is_filled.store(true, Ordering::Release);
                }
            }
            self.cell.get().expect("filled just now")
        }
    }

    impl<T> std::fmt::Debug for OnceLock<T> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("OnceLock(..)")
        }
    }
}
