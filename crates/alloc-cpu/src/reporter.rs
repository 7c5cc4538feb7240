//! The profile of an allocator's memory: who is told what, and the total.

use alloc_api::report::{self, MemoryUsage, OutOfMemory};
use alloc_api::{AllocatorStats, Device, Level};
use alloc_core::Addr;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What an allocator has handed out.
///
/// The bytes that are out, and their peak, are always counted. Each allocation is noted, and this
/// thread's reporter told, only while the thread [has one](alloc_api::report::is_enabled) or
/// [`always`](Ledger::set_always) is on: otherwise that costs a look at a thread-local value. So
/// memory that was allocated before may be freed meanwhile; such frees are counted and not reported.
#[derive(Debug, Default)]
pub struct Ledger {
    always: AtomicBool,
    allocated: AtomicU64,
    peak: AtomicU64,
    noted: Mutex<Noted>,
}

#[derive(Debug, Default)]
struct Noted {
    sizes: HashMap<Addr, u64>,
    total: u64,
    unknown_frees: u64,
}

/// Figures of what was noted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    /// Bytes of allocations that were noted and not freed.
    pub bytes: u64,
    /// How many there are.
    pub count: u64,
    /// Frees of memory that was not noted when it was allocated.
    pub unknown_frees: u64,
}

impl Ledger {
    /// Notes every allocation from now on, also of threads without a reporter.
    pub fn set_always(&self, on: bool) {
        self.always.store(on, Ordering::Relaxed);
    }

    /// What is noted.
    pub fn totals(&self) -> Totals {
        let noted = self.noted.lock();
        let count = noted.sizes.len() as u64;
        Totals { bytes: noted.total, count, unknown_frees: noted.unknown_frees }
    }

    pub(crate) fn stats(&self, cached: u64) -> AllocatorStats {
        let (current, peak) =
            (self.allocated.load(Ordering::Relaxed), self.peak.load(Ordering::Relaxed));
        let allocated = Level { current, peak };
        // The peak of the cache is not followed.
        let reserved = Level { current: current + cached, peak: peak.max(current + cached) };
        AllocatorStats { allocated, reserved }
    }

    fn is_active(&self) -> bool {
        self.always.load(Ordering::Relaxed) || report::is_enabled()
    }

    pub(crate) fn allocated(&self, addr: Addr, bytes: u64) {
        let now = self.allocated.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
        if bytes == 0 || !self.is_active() {
            return;
        }
        let allocated = {
            let mut noted = self.noted.lock();
            noted.sizes.insert(addr, bytes);
            noted.total += bytes;
            noted.total
        };
        tell(addr, bytes as i64, allocated);
    }

    pub(crate) fn freed(&self, addr: Addr, bytes: u64) {
        self.allocated.fetch_sub(bytes, Ordering::Relaxed);
        if bytes == 0 || !self.is_active() {
            return;
        }
        let known = {
            let mut noted = self.noted.lock();
            match noted.sizes.remove(&addr) {
                Some(bytes) => {
                    noted.total -= bytes;
                    Some((bytes, noted.total))
                }
                None => {
                    noted.unknown_frees += 1;
                    None
                }
            }
        };
        if let Some((bytes, allocated)) = known {
            tell(addr, -(bytes as i64), allocated);
        }
    }

    pub(crate) fn out_of_memory(&self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        report::out_of_memory(|| {
            let allocated = self.noted.lock().total;
            OutOfMemory { bytes, allocated, reserved: 0, device: Device::CPU }
        });
    }
}

/// Tells this thread's reporter. Nothing is locked meanwhile.
fn tell(addr: Addr, delta: i64, allocated: u64) {
    let device = Device::CPU;
    report::usage(|| MemoryUsage { addr, delta, allocated, reserved: 0, device });
}
