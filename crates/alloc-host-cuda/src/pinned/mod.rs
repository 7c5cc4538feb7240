//! Pinned memory: how it is made, lent and copied. All of this crate's `unsafe` is in here.

mod buffer;
mod map;
mod memory;
mod touch;
mod vec;

pub use buffer::{CopyRefused, InFlight, PinnedBuffer};
pub(crate) use memory::{How, copy};
pub use memory::{PinTimes, PinnedMemory};
pub use touch::Touch;
pub(crate) use touch::TouchPool;

use crate::allocator::PinnedAllocator;
use crate::backend::CudaHost;
use crate::source::StreamSource;
use alloc_core::host::HostAllocator;
use std::ptr::NonNull;

impl<S: StreamSource> PinnedAllocator<S> {
    /// The allocator of the core.
    ///
    /// # Safety
    /// Memory that a buffer or a collection owns must not be freed through it, nor copied into.
    pub unsafe fn core(&self) -> &HostAllocator<CudaHost<S>> {
        self.host()
    }
}

/// The one place where an address becomes a pointer. Addresses of pinned memory come from pointers
/// whose provenance was exposed.
fn pointer(addr: u64) -> Option<NonNull<u8>> {
    NonNull::new(std::ptr::with_exposed_provenance_mut(addr as usize))
}
