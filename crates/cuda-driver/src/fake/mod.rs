//! An imitation of the driver in host memory, for tests on machines without a GPU.
//!
//! It keeps what the crates above rely on: current contexts and capture modes per thread, captures
//! that fork, join and break, streams that run in order and wait for events, host functions on threads of their own, the legacy and
//! per-thread default streams, memory with a capacity, virtual memory with access rights, and
//! errors by script. It does not imitate time or speed, and a kernel is a Rust function.
//!
//! The state is one for the process, as it is with the driver; a [`Session`] has it alone.

mod call;
mod captures;
mod exports;
mod memory;
mod pools;
mod state;
mod suite;

pub use suite::{NO_GPU, Outcome, Suite, Test, TestBody};

use crate::loader::{Driver, LoadError};
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// What a kernel of the imitation does: `arguments` are those of the launch, as 64-bit numbers. An
/// error is a result code, and the context is lost with it.
#[derive(Clone, Copy, Debug)]
pub struct FakeKernel {
    /// How many parameters it has.
    pub parameters: usize,
    /// Its work.
    pub run: fn(memory: &mut KernelMemory<'_>, arguments: &[u64]) -> Result<(), u32>,
}

/// Device memory as a kernel of the imitation sees it.
pub struct KernelMemory<'a> {
    memory: &'a mut memory::Memory,
}

impl std::fmt::Debug for KernelMemory<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelMemory").finish_non_exhaustive()
    }
}

impl KernelMemory<'_> {
    /// Hands every contiguous piece of a range to `visit`, with its offset in the range.
    ///
    /// # Errors
    /// A result code if not all of it is accessible.
    pub fn visit(
        &mut self,
        addr: u64,
        bytes: u64,
        visit: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), u32> {
        self.memory.visit(addr, bytes, visit)
    }
}

/// Sole use of the imitation, from a fresh state on. Give back everything before it ends.
#[derive(Debug)]
pub struct Session {
    _alone: MutexGuard<'static, ()>,
}

impl Session {
    /// Starts with one device for each number of bytes.
    pub fn new(device_bytes: &[u64]) -> Session {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        state::reset(device_bytes);
        Session { _alone: alone }
    }

    /// The driver.
    ///
    /// # Panics
    /// If the imitation lacks a function, which its own test rules out.
    pub fn driver(&self) -> &'static Driver {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        DRIVER.get_or_init(|| match start(&exports::lookup) {
            Ok(driver) => driver,
            Err(error) => panic!("the imitation does not start: {error}"),
        })
    }

    /// Makes a call fail with a result code, once, after `successes` calls of it.
    pub fn fail(&self, call: &str, successes: u32, code: u32) {
        self.with(|state| state.faults.push((call.to_owned(), successes, code)));
    }

    /// Takes back what [`fail`](Self::fail) asked for and has not happened.
    pub fn clear_faults(&self) {
        self.with(|state| state.faults.clear());
    }

    /// Lets modules have a kernel of that name, whatever their text.
    pub fn define_kernel(&self, name: &str, kernel: FakeKernel) {
        self.with(|state| state.kernels.insert(name.to_owned(), kernel));
    }

    /// From now on every call says that the driver is shutting down, as at the end of a process.
    pub fn shut_down(&self) {
        self.with(|state| state.shut_down = true);
    }

    /// Whether the driver was shut down, and with it all that had not been given back.
    pub fn is_shut_down(&self) -> bool {
        self.with(|state| state.shut_down)
    }

    /// Makes `cuMemAlloc` return addresses that are no multiple of 2 MiB.
    pub fn use_odd_addresses(&self) {
        self.with(|state| state.memory.odd_addresses = true);
    }

    /// Makes devices say that they have no memory pools.
    pub fn remove_memory_pools(&self) {
        self.with(|state| state.pools.are_missing = true);
    }

    /// What has not been given back: memory, ranges, mappings, events, contexts.
    pub fn outstanding(&self) -> usize {
        self.with(|state| {
            let contexts: u32 = state.contexts.iter().map(|context| context.retained).sum();
            let memory = state.memory.outstanding() + state.pinned.len() + state.pools.created();
            memory + state.events.len() + contexts as usize
        })
    }

    /// Whether kernels of a device reach the byte at `addr`.
    pub fn reaches(&self, device: usize, addr: u64) -> bool {
        self.with(|state| {
            state.memory.running = Some((device, state.peers_of(device)));
            let reached = state.memory.visit(addr, 1, |_, _| {}).is_ok();
            state.memory.running = None;
            reached
        })
    }

    /// The device whose context is current on this thread.
    pub fn current_device(&self) -> Option<usize> {
        let handle = call::current_context()?;
        self.with(|state| state.device_of_context(handle).ok())
    }

    fn with<R>(&self, f: impl FnOnce(&mut state::State) -> R) -> R {
        f(state::lock().get_or_insert_default())
    }
}

/// Starts a driver from the imitation's functions, less what `lookup` hides.
///
/// # Errors
/// As [`Driver::load`].
fn start(lookup: &dyn Fn(&'static CStr) -> Option<NonNull<c_void>>) -> Result<Driver, LoadError> {
    // SAFETY: the compiler has checked the imitation's functions against the table's types.
    unsafe { Driver::start(lookup) }
}

#[cfg(test)]
mod tests;
