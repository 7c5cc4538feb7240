//! Many buffers in one sealed memfd, so that ten thousand of them cost ten descriptors.

mod allocator;
mod block;
mod import;
mod pool;
mod space;

pub use allocator::ArenaAllocator;
pub use block::{Block, BlockAddr, SharedBlock};
pub(crate) use import::Import;
pub use pool::{ArenaPool, PoolConfig};
pub use space::ArenaStats;

use crate::error::{Error, Result};
use crate::map::MapOptions;
use crate::memfd;
use crate::os::region::Region;
use crate::wire::random;
use parking_lot::Mutex;
use space::{BLOCK_HEADER, Placed, Space};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An arena: one memfd, mapped writable here and nowhere else, cut into blocks.
///
/// Before any other process sees it, it is sealed: nobody can change its size, and whoever receives
/// it can map it for reading only. It is then sent once to each peer; after that a block is just
/// four numbers ([`BlockAddr`]). A peer sees the whole arena, not only the blocks it was sent.
///
/// Cheap to clone; the memory is given back when the last clone and the last block are gone, here
/// and in every peer.
///
/// ```
/// use alloc_shm::Arena;
///
/// let arena = Arena::new(1 << 20)?;
/// let mut block = arena.allocate(1000)?;
/// block.fill(1);
/// let shared = block.share(); // from now on nobody writes it
/// assert_eq!(shared.len(), 1000);
/// # Ok::<(), alloc_shm::Error>(())
/// ```
#[derive(Clone)]
pub struct Arena(Arc<ArenaInner>);

pub(crate) struct ArenaInner {
    region: Region,
    /// Read only; for peers.
    fd: OwnedFd,
    id: u64,
    /// Held for a few tree operations at a time, never across a system call.
    space: Mutex<Space>,
}

impl Arena {
    /// An arena of `bytes`, all backed by memory from now on.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`], [`Error::NoDescriptor`], [`Error::Mapping`] or [`Error::Os`].
    pub fn new(bytes: u64) -> Result<Self> {
        Self::labelled(bytes, "arena")
    }

    fn labelled(bytes: u64, label: &str) -> Result<Self> {
        let map = MapOptions::memfd(label).len(bytes).keep_descriptor().map()?;
        let (region, fd) = map.into_region();
        let fd = memfd::publish(fd.as_fd())?;
        let space = Mutex::new(Space::new(bytes));
        Ok(Arena(Arc::new(ArenaInner { region, fd, id: random(), space })))
    }

    /// A block of `bytes` on a cache line. Its content is whatever was there before.
    ///
    /// # Errors
    ///
    /// [`Error::ArenaFull`].
    pub fn allocate(&self, bytes: u64) -> Result<Block> {
        self.allocate_aligned(bytes, 1)
    }

    /// A block of `bytes` that begins on a multiple of `align` from the start of the arena, which
    /// itself begins on a page.
    ///
    /// # Errors
    ///
    /// [`Error::ArenaFull`].
    ///
    /// # Panics
    ///
    /// If `align` is not a power of two.
    pub fn allocate_aligned(&self, bytes: u64, align: u64) -> Result<Block> {
        assert!(align.is_power_of_two(), "alignment {align} is not a power of two");
        Ok(Block::new(self.clone(), self.place(bytes, align)?))
    }

    /// An allocator for collections that live in the arena.
    pub fn allocator(&self) -> ArenaAllocator {
        ArenaAllocator::new(self.clone())
    }

    /// Bytes of the arena.
    pub fn len(&self) -> u64 {
        self.0.region.len()
    }

    /// Whether the arena has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number by which peers know it.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// What is in use and what is free.
    pub fn stats(&self) -> ArenaStats {
        self.0.space.lock().stats()
    }

    fn place(&self, bytes: u64, align: u64) -> Result<Placed> {
        let mut space = self.0.space.lock();
        space.allocate(bytes, align).ok_or_else(|| {
            let stats = space.stats();
            Error::ArenaFull {
                wanted: bytes,
                largest: stats.largest_free,
                live: stats.live_bytes,
                blocks: stats.live_blocks,
            }
        })
    }

    pub(crate) fn inner(&self) -> &Arc<ArenaInner> {
        &self.0
    }
}

impl ArenaInner {
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    pub(crate) fn at(&self, offset: u64) -> Option<Placed> {
        self.space.lock().at(offset)
    }

    /// Takes a block back, after making its address stale for every receiver.
    pub(crate) fn free(&self, placed: Placed) {
        self.write_header(placed.offset, 0, 0);
        let was_live = self.space.lock().free(placed.offset, placed.generation);
        debug_assert!(was_live, "a block is freed by its only owner");
    }

    /// What receivers compare an address with: see [`import`].
    pub(crate) fn write_header(&self, offset: u64, generation: u64, len: u64) {
        let [generation_at, len_at] = header_words(offset);
        let word = |at| self.region.word(at).expect("a placed block has a header before it");
        word(len_at).store(len, Ordering::Relaxed);
        word(generation_at).store(generation, Ordering::Release);
    }
}

/// Where the generation and the length of a block are.
fn header_words(offset: u64) -> [u64; 2] {
    [offset - BLOCK_HEADER, offset - BLOCK_HEADER + 8]
}

impl AsFd for Arena {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("id", &format_args!("{:#x}", self.0.id))
            .field("len", &self.len())
            .field("stats", &self.stats())
            .finish()
    }
}

#[cfg(test)]
mod tests;
