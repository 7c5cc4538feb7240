//! What a client holds.

use crate::block::BlockId;
use crate::units::{Addr, StreamId};

/// A block handed out by a [`CachingAllocator`](super::CachingAllocator). Give it back with [`free`](super::CachingAllocator::free);
/// dropping it keeps the memory allocated until the allocator goes.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "the memory stays allocated until it is freed"]
pub struct Allocation {
    pub(super) addr: Addr,
    pub(super) bytes: u64,
    pub(super) requested: u64,
    pub(super) stream: StreamId,
    /// `None` for a request of 0 bytes.
    pub(super) block: Option<BlockId>,
    pub(super) home: HeapName,
}

/// Names a heap among those of all allocators of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct HeapName(u64);

impl HeapName {
    /// The heap at the place `heap` in the table of an allocator.
    #[inline]
    pub(super) const fn new(allocator: u32, heap: u32) -> Self {
        HeapName((allocator as u64) << 32 | heap as u64)
    }

    pub(super) const fn allocator(self) -> u32 {
        (self.0 >> 32) as u32
    }

    pub(super) const fn heap(self) -> u32 {
        self.0 as u32
    }
}

impl Allocation {
    /// Where it starts; [`Addr::NULL`] for a request of 0 bytes.
    pub const fn addr(&self) -> Addr {
        self.addr
    }

    /// Bytes that were asked for.
    pub const fn requested(&self) -> u64 {
        self.requested
    }

    /// Bytes of the block, at least [`requested`](Self::requested).
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The stream that it was allocated for.
    pub const fn stream(&self) -> StreamId {
        self.stream
    }
}
