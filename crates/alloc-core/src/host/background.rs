//! The thread that processes events while nobody asks.

use crate::sync::{Condvar, Mutex, thread};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[derive(Debug)]
struct Signal {
    stop: Mutex<bool>,
    wake: Condvar,
}

/// Starts at most one thread; [`stop`](Background::stop) joins it.
#[derive(Debug)]
pub(crate) struct Background {
    signal: Arc<Signal>,
    thread: Mutex<Option<thread::JoinHandle<()>>>,
    running: AtomicBool,
}

impl Background {
    pub(crate) fn new() -> Self {
        let signal = Signal { stop: Mutex::new(false), wake: Condvar::new() };
        Background {
            signal: Arc::new(signal),
            thread: Mutex::new(None),
            running: AtomicBool::new(false),
        }
    }

    /// Starts the thread unless it runs: `work` now, and again every `period`. Whether it runs now;
    /// it does not if the system refuses a thread.
    pub(crate) fn ensure(&self, period: Duration, work: impl FnMut() + Send + 'static) -> bool {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let signal = Arc::clone(&self.signal);
            let builder = thread::Builder::new().name("pinned-events".to_owned());
            *thread = builder.spawn(move || run(&signal, period, work)).ok();
            self.running.store(thread.is_some(), Ordering::Relaxed);
        }
        thread.is_some()
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running.load(Ordering::Relaxed)
    }

    /// Stops the thread and waits until it has ended. Called by the thread itself (through a
    /// backend that owns the allocator), it only stops it.
    pub(crate) fn stop(&self) {
        *self.signal.stop.lock() = true;
        self.signal.wake.notify_all();
        let Some(thread) = self.thread.lock().take() else { return };
        self.running.store(false, Ordering::Relaxed);
        if thread.thread().id() != thread::current().id() {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

fn run(signal: &Signal, period: Duration, mut work: impl FnMut()) {
    loop {
        work();
        let mut stop = signal.stop.lock();
        if !*stop {
            signal.wake.wait_for(&mut stop, period);
        }
        if *stop {
            return;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn works_until_stopped_and_not_after() {
        let count = Arc::new(AtomicU32::new(0));
        let background = Background::new();
        assert!(!background.is_running());
        for _ in 0..2 {
            let count = Arc::clone(&count);
            let work = move || {
                count.fetch_add(1, Ordering::Relaxed);
            };
            assert!(background.ensure(Duration::from_millis(1), work));
        }
        while count.load(Ordering::Relaxed) < 3 {
            std::thread::yield_now();
        }
        background.stop();
        let at_stop = count.load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(count.load(Ordering::Relaxed), at_stop);
        assert!(!background.is_running());
    }

    #[test]
    fn stop_does_not_wait_for_the_period() {
        let background = Background::new();
        background.ensure(Duration::from_secs(3600), || {});
        background.stop();
    }
}
