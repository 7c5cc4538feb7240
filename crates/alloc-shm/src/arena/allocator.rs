//! Collections that live in an arena, through `allocator-api2`.
#![allow(unsafe_code, reason = "implements the unsafe trait `Allocator`")]

use crate::arena::{Arena, SharedBlock};
use crate::error::{Error, Result};
use allocator_api2::alloc::{AllocError, Allocator, Layout};
use allocator_api2::vec::Vec;
use std::ptr::NonNull;

/// Allocates from one arena.
///
/// ```
/// use allocator_api2::vec::Vec;
/// use alloc_shm::{Arena, SharedBlock};
///
/// let arena = Arena::new(1 << 20)?;
/// let mut batch = Vec::new_in(arena.allocator());
/// batch.extend_from_slice(b"collated in place, ");
/// batch.extend_from_slice(b"then shared without a copy");
/// let shared = SharedBlock::from_vec(batch)?;
/// assert_eq!(shared.len(), 45);
/// # Ok::<(), alloc_shm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ArenaAllocator {
    arena: Arena,
}

impl ArenaAllocator {
    pub(crate) fn new(arena: Arena) -> Self {
        ArenaAllocator { arena }
    }
}

impl SharedBlock {
    /// Shares the bytes of a vector that lives in an arena, in place.
    ///
    /// # Errors
    ///
    /// [`Error::ArenaFull`] if the vector never allocated and no empty block fits either.
    pub fn from_vec(bytes: Vec<u8, ArenaAllocator>) -> Result<Self> {
        if bytes.capacity() == 0 {
            return Ok(bytes.allocator().arena.allocate(0)?.share());
        }
        let (start, len, _, ArenaAllocator { arena }) = bytes.into_raw_parts_with_alloc();
        // The vector's bytes came from `allocate` of its own allocator, so a block begins there.
        match arena.inner().at(offset_of(&arena, start)) {
            Some(placed) => Ok(SharedBlock::of_placed(arena, placed, len as u64)),
            None => Err(Error::Range { offset: 0, len: len as u64, size: arena.len() }),
        }
    }
}

fn offset_of(arena: &Arena, at: *const u8) -> u64 {
    (at.addr() - arena.inner().region().base().addr()) as u64
}

// SAFETY: a block is a range that the space gives to nobody else until `deallocate`, aligned as
// asked; it stays mapped at its address as long as any clone of the arena lives, and every clone of
// the allocator holds one.
unsafe impl Allocator for ArenaAllocator {
    fn allocate(&self, layout: Layout) -> std::result::Result<NonNull<[u8]>, AllocError> {
        if layout.size() == 0 {
            let dangling = std::ptr::without_provenance_mut::<u8>(layout.align());
            return Ok(NonNull::slice_from_raw_parts(NonNull::new(dangling).ok_or(AllocError)?, 0));
        }
        // The arena begins on a page: no alignment above that can be promised.
        if layout.align() > 4096 {
            return Err(AllocError);
        }
        let size = layout.size() as u64;
        let placed = self.arena.place(size, layout.align() as u64).map_err(|_| AllocError)?;
        let start = self.arena.inner().region().range(placed.offset, size);
        let start = NonNull::new(start.map_err(|_| AllocError)?).ok_or(AllocError)?;
        Ok(NonNull::slice_from_raw_parts(start, layout.size()))
    }

    unsafe fn deallocate(&self, at: NonNull<u8>, layout: Layout) {
        if layout.size() == 0 {
            return;
        }
        let arena = self.arena.inner();
        if let Some(placed) = arena.at(offset_of(&self.arena, at.as_ptr())) {
            arena.free(placed);
        }
    }
}
