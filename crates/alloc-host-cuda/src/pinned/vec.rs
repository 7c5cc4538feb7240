//! Pinned memory for collections: `allocator_api2::vec::Vec<T, PinnedAllocator<S>>`.

use super::pointer;
use crate::allocator::PinnedAllocator;
use crate::source::StreamSource;
use alloc_core::Addr;
use alloc_core::host::Place;
use allocator_api2::alloc::{AllocError, Allocator, Layout};
use std::ptr::NonNull;

impl<S: StreamSource> PinnedAllocator<S> {
    /// The address of a block for `layout`, freed again if it is not aligned as wanted.
    fn place_for(&self, layout: Layout) -> Option<NonNull<u8>> {
        let addr = self.host().allocate_raw(layout.size() as u64, Place::Anywhere).ok()?;
        if addr.is_aligned(layout.align() as u64) {
            return pointer(addr.get());
        }
        // Its own block, just allocated: freeing it again cannot fail.
        let _ = self.host().free_raw(addr);
        None
    }
}

// SAFETY: blocks stay valid until they are deallocated or the last clone is gone, clones share one
// allocator, and moving a clone moves no memory. No block is handed out twice while it is live: the
// core's own business, with tests to show it.
unsafe impl<S: StreamSource> Allocator for PinnedAllocator<S> {
    /// Alignments above that of blocks (512 bytes) are refused unless they come about by chance.
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if layout.size() == 0 {
            let dangling = NonNull::new(std::ptr::without_provenance_mut(layout.align()));
            return Ok(NonNull::slice_from_raw_parts(dangling.ok_or(AllocError)?, 0));
        }
        let place = self.place_for(layout).ok_or(AllocError)?;
        Ok(NonNull::slice_from_raw_parts(place, layout.size()))
    }

    unsafe fn deallocate(&self, place: NonNull<u8>, layout: Layout) {
        if layout.size() > 0 {
            let addr = Addr::new(place.as_ptr().expose_provenance() as u64);
            // If an event cannot be recorded the memory stays allocated, which is safe.
            let _ = self.host().free_raw(addr);
        }
    }
}
