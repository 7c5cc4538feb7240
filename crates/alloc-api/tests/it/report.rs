//! Who is told of what.

use alloc_api::Device;
use alloc_api::report::{self, MemoryReporter, MemoryUsage, OutOfMemory};
use alloc_core::Addr;
use parking_lot::Mutex;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Default)]
pub(crate) struct Log {
    pub(crate) usages: Mutex<Vec<MemoryUsage>>,
    pub(crate) failures: Mutex<Vec<OutOfMemory>>,
    deaf: AtomicBool,
}

impl Log {
    pub(crate) fn deltas(&self) -> Vec<i64> {
        let usages = std::mem::take(&mut *self.usages.lock());
        usages.into_iter().map(|usage| usage.delta).collect()
    }
}

impl MemoryReporter for Log {
    fn usage(&self, usage: &MemoryUsage) {
        self.usages.lock().push(*usage);
    }
    fn out_of_memory(&self, request: &OutOfMemory) {
        self.failures.lock().push(*request);
    }
    fn is_enabled(&self) -> bool {
        !self.deaf.load(Ordering::Relaxed)
    }
}

fn tell(delta: i64) {
    let device = Device::CPU;
    report::usage(|| MemoryUsage { addr: Addr::new(64), delta, allocated: 0, reserved: 0, device });
}

#[test]
fn nobody_is_told_without_a_scope_and_nothing_is_gathered() {
    assert!(!report::is_enabled());
    report::usage(|| unreachable!("nobody listens"));
    report::out_of_memory(|| unreachable!("nobody listens"));
    let deaf = Arc::new(Log::default());
    deaf.deaf.store(true, Ordering::Relaxed);
    let _scope = report::scope(deaf);
    assert!(!report::is_enabled());
    report::usage(|| unreachable!("it does not listen"));
}

#[test]
fn the_innermost_scope_is_told() {
    let (outer, inner) = (Arc::new(Log::default()), Arc::new(Log::default()));
    let first = report::scope(outer.clone());
    tell(1);
    {
        let _second = report::scope(inner.clone());
        tell(2);
    }
    tell(3);
    drop(first);
    tell(4);
    assert_eq!((outer.deltas(), inner.deltas()), (vec![1, 3], vec![2]));
}

#[test]
fn scopes_may_end_in_any_order() {
    let (outer, inner) = (Arc::new(Log::default()), Arc::new(Log::default()));
    let first = report::scope(outer.clone());
    let second = report::scope(inner.clone());
    drop(first);
    tell(1);
    drop(second);
    tell(2);
    assert_eq!((outer.deltas(), inner.deltas()), (vec![], vec![1]));
    assert_eq!(Arc::strong_count(&outer), 1);
}

#[test]
fn other_threads_are_observed_only_if_asked() {
    let log = Arc::new(Log::default());
    let _scope = report::scope(log.clone());
    std::thread::spawn(|| tell(-1)).join().unwrap();
    let reporter = report::current().unwrap();
    let observed = std::thread::spawn(move || {
        let _scope = report::scope(reporter);
        tell(2);
    });
    observed.join().unwrap();
    assert_eq!(log.deltas(), [2]);
}

struct Allocates(Arc<Log>);

impl MemoryReporter for Allocates {
    fn usage(&self, usage: &MemoryUsage) {
        assert!(!report::is_enabled());
        tell(100); // what it allocates itself
        self.0.usage(usage);
    }
}

#[test]
fn a_reporter_is_not_told_of_itself() {
    let log = Arc::new(Log::default());
    let _scope = report::scope(Arc::new(Allocates(log.clone())));
    tell(1);
    tell(2);
    assert_eq!(log.deltas(), [1, 2]);
}

struct Panics(AtomicBool);

impl MemoryReporter for Panics {
    fn usage(&self, _: &MemoryUsage) {
        if self.0.swap(false, Ordering::Relaxed) {
            panic!("the reporter fails");
        }
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_reporter_that_panicked_is_told_again() {
    let reporter = Arc::new(Panics(AtomicBool::new(true)));
    let _scope = report::scope(reporter.clone());
    assert!(catch_unwind(AssertUnwindSafe(|| tell(1))).is_err());
    tell(2);
    assert!(reporter.0.load(Ordering::Relaxed), "the second report arrived");
}

struct OnDrop;

impl Drop for OnDrop {
    fn drop(&mut self) {
        tell(5);
        drop(report::scope(Arc::new(Log::default())));
    }
}

impl MemoryReporter for OnDrop {
    fn usage(&self, _: &MemoryUsage) {}
}

#[test]
fn a_reporter_may_report_and_install_another_when_it_goes() {
    let log = Arc::new(Log::default());
    let _outer = report::scope(log.clone());
    drop(report::scope(Arc::new(OnDrop)));
    assert_eq!(log.deltas(), [5]);
}

thread_local! {
    static LATE: OnDrop = const { OnDrop };
}

#[test]
fn memory_that_goes_with_its_thread_breaks_nothing() {
    let thread = std::thread::spawn(|| {
        LATE.with(|_| ());
        drop(report::scope(Arc::new(Log::default())));
    });
    thread.join().unwrap();
}
