//! Memory of the system: owned ranges, and the bytes in them.
//!
//! Nothing outside this module turns an address into a pointer.

mod collections;
mod fill;
mod pages;

use crate::config::{CpuConfig, Plan, Source};
use crate::error::CpuError;
use alloc_core::Addr;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

/// A range of memory with one owner, given back when it is dropped. Not initialised unless filled.
pub(crate) struct Memory {
    /// The first byte that the user sees.
    start: NonNull<u8>,
    plan: Plan,
}

// SAFETY: it owns its memory, which any thread may use and give back; what is shared is only read.
unsafe impl Send for Memory {}
// SAFETY: as above: through a shared reference bytes are read only.
unsafe impl Sync for Memory {}

impl Memory {
    /// Takes memory from the system, by a plan, and fills it.
    pub(crate) fn new(plan: Plan, config: &CpuConfig) -> Result<Memory, CpuError> {
        let base = match plan.source {
            Source::Heap => heap(&plan)?,
            Source::Pages { huge, node } => pages::map(&plan, huge, node)?,
        };
        let mut memory = Memory { start: user_start(base, &plan), plan };
        memory.fill(config);
        Ok(memory)
    }

    /// Fills it as new memory is.
    pub(crate) fn fill(&mut self, config: &CpuConfig) {
        fill::fill(self.bytes_mut(), config.fill);
    }

    /// Where the user's bytes start.
    pub(crate) fn addr(&self) -> Addr {
        Addr::new(self.start.as_ptr().expose_provenance() as u64)
    }

    /// How it was taken.
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// How many bytes were asked for.
    pub(crate) fn len(&self) -> u64 {
        self.plan.bytes
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[MaybeUninit<u8>] {
        // SAFETY: the range is owned, and lives as long as `self`; any bytes are valid for the type.
        unsafe { std::slice::from_raw_parts(self.start.cast().as_ptr(), self.plan.bytes as usize) }
    }

    /// Its bytes, to change.
    pub(crate) fn bytes_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        let bytes = self.plan.bytes as usize;
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast().as_ptr(), bytes) }
    }

    /// Gives up ownership for the address.
    fn into_start(self) -> NonNull<u8> {
        let start = self.start;
        std::mem::forget(self);
        start
    }

    /// Takes ownership again.
    ///
    /// # Safety
    /// `start` must come from [`into_start`](Self::into_start) of memory with this plan, once.
    unsafe fn from_start(start: NonNull<u8>, plan: Plan) -> Memory {
        Memory { start, plan }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let base = self.start.as_ptr().wrapping_sub(self.plan.before as usize);
        match self.plan.source {
            // SAFETY: it came from `posix_memalign`, and nobody has it any more.
            Source::Heap => unsafe { libc::free(base.cast()) },
            Source::Pages { .. } => pages::unmap(base, self.plan.total as usize),
        }
    }
}

/// Where the user's bytes start in memory that starts at `base`.
fn user_start(base: NonNull<u8>, plan: &Plan) -> NonNull<u8> {
    // SAFETY: the guard lies inside the memory, before the user's bytes.
    unsafe { base.add(plan.before as usize) }
}

fn heap(plan: &Plan) -> Result<NonNull<u8>, CpuError> {
    let mut place = std::ptr::null_mut();
    // SAFETY: the place for the result is valid; the alignment is a power of two from 8 on.
    let errno =
        unsafe { libc::posix_memalign(&mut place, plan.align as usize, plan.total as usize) };
    match NonNull::new(place.cast()) {
        Some(base) if errno == 0 => Ok(base),
        _ => Err(CpuError::OutOfMemory { bytes: plan.bytes, errno }),
    }
}

/// The system's page size.
pub(crate) fn page_bytes() -> u64 {
    // SAFETY: asks for a constant.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(4096)
}
