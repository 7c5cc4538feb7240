//! `allocator_api2`'s trait: collections in this memory.

use super::Memory;
use crate::allocator::CpuAllocator;
use allocator_api2::alloc::{AllocError, Allocator, Layout};
use std::ptr::NonNull;

// SAFETY: memory stays valid until it is deallocated, whatever becomes of the allocator's clones, and
// any clone can deallocate it: how is determined by the layout and the settings, which clones share.
unsafe impl Allocator for CpuAllocator {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if layout.size() == 0 {
            let dangling = std::ptr::without_provenance_mut(layout.align());
            let dangling = NonNull::new(dangling).ok_or(AllocError)?;
            return Ok(NonNull::slice_from_raw_parts(dangling, 0));
        }
        let taken = self.take(layout.size() as u64, layout.align() as u64);
        let start = taken.map_err(|_| AllocError)?.into_start();
        Ok(NonNull::slice_from_raw_parts(start, layout.size()))
    }

    unsafe fn deallocate(&self, start: NonNull<u8>, layout: Layout) {
        if layout.size() == 0 {
            return;
        }
        let Ok(plan) = self.plan(layout.size() as u64, layout.align() as u64) else { return };
        // SAFETY: by the caller's promise it came from `allocate` of a clone with a layout of that
        // size and alignment, for which the plan is the same.
        let memory = unsafe { Memory::from_start(start, plan) };
        self.put_back(memory);
    }
}
