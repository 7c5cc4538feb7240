//! What is noted and reported.

use alloc_api::report::{self, MemoryReporter, MemoryUsage, OutOfMemory};
use alloc_api::{Allocator, Device};
use alloc_cpu::{CpuAllocator, Totals};
use parking_lot::Mutex;
use std::sync::Arc;

#[derive(Default)]
struct Log {
    usages: Mutex<Vec<(i64, u64)>>,
    failures: Mutex<Vec<OutOfMemory>>,
}

impl MemoryReporter for Log {
    fn usage(&self, usage: &MemoryUsage) {
        assert_eq!((usage.device, usage.reserved), (Device::CPU, 0));
        self.usages.lock().push((usage.delta, usage.allocated));
    }
    fn out_of_memory(&self, request: &OutOfMemory) {
        self.failures.lock().push(*request);
    }
}

#[test]
fn a_profiled_thread_sees_each_call_and_the_total_of_what_was_noted() {
    let cpu = CpuAllocator::default();
    let before = cpu.allocate(100).unwrap();
    let log = Arc::new(Log::default());
    let scope = report::scope(log.clone());
    let first = cpu.allocate(10).unwrap();
    let second = cpu.allocate(20).unwrap();
    drop(before); // allocated before anybody looked
    drop(first);
    drop(scope);
    drop(second); // and freed after
    assert_eq!(*log.usages.lock(), [(10, 10), (20, 30), (-10, 20)]);
    assert_eq!(cpu.ledger().totals(), Totals { bytes: 20, count: 1, unknown_frees: 1 });
    assert_eq!(cpu.stats().unwrap().allocated.current, 0, "the statistics know all");
}

#[test]
fn without_a_profile_nothing_is_noted_unless_always() {
    let cpu = CpuAllocator::default();
    let quiet = cpu.allocate(10).unwrap();
    assert_eq!(cpu.ledger().totals(), Totals::default());
    cpu.ledger().set_always(true);
    let noted = cpu.allocate(20).unwrap();
    assert_eq!(cpu.ledger().totals(), Totals { bytes: 20, count: 1, unknown_frees: 0 });
    drop((quiet, noted));
    assert_eq!(cpu.ledger().totals(), Totals { bytes: 0, count: 0, unknown_frees: 1 });
}

#[test]
fn a_free_on_a_thread_without_a_profile_is_not_reported() {
    let cpu = CpuAllocator::default();
    let log = Arc::new(Log::default());
    let _scope = report::scope(log.clone());
    let pointer = cpu.allocate(10).unwrap();
    std::thread::spawn(move || drop(pointer)).join().unwrap();
    assert_eq!(*log.usages.lock(), [(10, 10)]);
}

#[test]
fn lack_of_memory_is_reported_with_the_size_and_the_total() {
    let cpu = CpuAllocator::default();
    let log = Arc::new(Log::default());
    let _scope = report::scope(log.clone());
    let _kept = cpu.allocate(64).unwrap();
    assert!(cpu.allocate(1 << 61).is_err());
    let failure = OutOfMemory { bytes: 1 << 61, allocated: 64, reserved: 0, device: Device::CPU };
    assert_eq!(*log.failures.lock(), [failure]);
}

/// Allocates from the same allocator in each report.
struct Nested(CpuAllocator, Mutex<u32>);

impl MemoryReporter for Nested {
    fn usage(&self, _: &MemoryUsage) {
        *self.1.lock() += 1;
        drop(self.0.allocate(64));
    }
}

#[test]
fn a_reporter_may_use_the_allocator_that_reports() {
    let cpu = CpuAllocator::default();
    let nested = Arc::new(Nested(cpu.clone(), Mutex::new(0)));
    let _scope = report::scope(nested.clone());
    drop(cpu.allocate(64).unwrap());
    assert_eq!(*nested.1.lock(), 2, "one report each of the outer allocation and its free");
}
