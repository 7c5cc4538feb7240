//! Reporting of memory use to whoever observes the current thread.
//!
//! A reporter is installed for one thread and for as long as its [`Scope`] lives. Scopes nest: the
//! innermost one gets the reports. What a thread without a scope allocates or frees is reported to
//! nobody; to have another thread observed too, install [`current`] there.
//!
//! ```
//! use alloc_api::Device;
//! use alloc_api::report::{self, MemoryReporter, MemoryUsage};
//! use alloc_core::Addr;
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicI64, Ordering};
//!
//! #[derive(Default)]
//! struct Sum(AtomicI64);
//!
//! impl MemoryReporter for Sum {
//!     fn usage(&self, usage: &MemoryUsage) {
//!         self.0.fetch_add(usage.delta, Ordering::Relaxed);
//!     }
//! }
//!
//! let sum = Arc::new(Sum::default());
//! let scope = report::scope(sum.clone());
//! # let (addr, device) = (Addr::new(64), Device::CPU);
//! // An allocator calls this; users of one need not.
//! report::usage(|| MemoryUsage { addr, delta: 512, allocated: 512, reserved: 0, device });
//! drop(scope);
//! assert_eq!(sum.0.load(Ordering::Relaxed), 512);
//! ```

#[cfg(feature = "metrics")]
mod metrics;
#[cfg(feature = "tracing")]
mod tracing;

#[cfg(feature = "metrics")]
pub use metrics::MetricsReporter;
#[cfg(feature = "tracing")]
pub use tracing::TracingReporter;

use crate::device::Device;
use alloc_core::Addr;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

/// An allocation or a free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryUsage {
    /// Where the memory starts.
    pub addr: Addr,
    /// Bytes: positive if allocated, negative if freed.
    pub delta: i64,
    /// Bytes that callers hold after it, as far as the allocator counts them.
    pub allocated: u64,
    /// Bytes that the allocator holds after it; 0 if it caches nothing.
    pub reserved: u64,
    /// Where the memory is.
    pub device: Device,
}

/// A request that found no memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfMemory {
    /// Bytes asked for.
    pub bytes: u64,
    /// Bytes that callers held.
    pub allocated: u64,
    /// Bytes that the allocator held.
    pub reserved: u64,
    /// Where.
    pub device: Device,
}

/// Whoever observes memory use. Called on the observed thread, inside the call that allocates or
/// frees, and never from within itself: what a reporter allocates is not reported.
pub trait MemoryReporter: Send + Sync {
    /// Memory was allocated or freed.
    fn usage(&self, usage: &MemoryUsage);

    /// A request failed.
    fn out_of_memory(&self, _request: &OutOfMemory) {}

    /// Whether it listens now. Figures are not even gathered for one that does not.
    fn is_enabled(&self) -> bool {
        true
    }
}

type Shared = Arc<dyn MemoryReporter>;

thread_local! {
    /// The scopes of this thread, innermost last, each with a number.
    static SCOPES: RefCell<Vec<(u64, Shared)>> = const { RefCell::new(Vec::new()) };
    static NEXT: Cell<u64> = const { Cell::new(0) };
    /// Whether a reporter is running.
    static REPORTING: Cell<bool> = const { Cell::new(false) };
}

/// A reporter is installed on this thread for as long as this lives.
#[must_use = "the reporter is uninstalled when this is dropped"]
pub struct Scope {
    number: u64,
    /// It must be dropped on its thread.
    _stays: PhantomData<*const ()>,
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("number", &self.number).finish()
    }
}

/// Installs a reporter on this thread. On a thread that is ending, nobody is told of anything any more.
pub fn scope(reporter: Arc<dyn MemoryReporter>) -> Scope {
    let number = NEXT.get();
    NEXT.set(number + 1);
    let _ = SCOPES.try_with(|scopes| scopes.borrow_mut().push((number, reporter)));
    Scope { number, _stays: PhantomData }
}

/// Scopes may end in any order; only their own reporter goes.
impl Drop for Scope {
    fn drop(&mut self) {
        let ended = SCOPES.try_with(|scopes| {
            let mut scopes = scopes.borrow_mut();
            let at = scopes.iter().position(|(number, _)| *number == self.number);
            at.map(|at| scopes.remove(at))
        });
        // Dropped with nothing borrowed: the reporter may allocate or install another when it goes.
        drop(ended);
    }
}

/// The reporter of this thread, to install on another.
pub fn current() -> Option<Arc<dyn MemoryReporter>> {
    // No longer there while the thread's own values are dropped.
    let last = SCOPES.try_with(|scopes| scopes.try_borrow().ok()?.last().map(|(_, r)| r.clone()));
    last.ok().flatten()
}

/// Whether this thread has a reporter that listens, and none is running.
pub fn is_enabled() -> bool {
    listener().is_some()
}

fn listener() -> Option<Shared> {
    let busy = REPORTING.try_with(Cell::get).unwrap_or(true);
    if busy { None } else { current().filter(|reporter| reporter.is_enabled()) }
}

/// While it lives, reports of this thread go nowhere.
struct Running;

impl Running {
    fn begin() -> Running {
        REPORTING.set(true);
        Running
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        REPORTING.set(false);
    }
}

fn tell(report: impl FnOnce(&dyn MemoryReporter)) {
    let Some(reporter) = listener() else { return };
    let running = Running::begin();
    report(&*reporter);
    drop(running);
}

/// Tells this thread's reporter of an allocation or free. `gather` runs only if somebody listens.
pub fn usage(gather: impl FnOnce() -> MemoryUsage) {
    tell(|reporter| reporter.usage(&gather()));
}

/// Tells this thread's reporter of a request that failed. `gather` runs only if somebody listens.
pub fn out_of_memory(gather: impl FnOnce() -> OutOfMemory) {
    tell(|reporter| reporter.out_of_memory(&gather()));
}
