//! The two interfaces of the allocator, as a benchmark uses them.

use alloc_core::backend::Backend;
use alloc_core::{Addr, Allocation, CachingAllocator, StreamHandle};

use crate::engine::{EngineError, refusal};

/// Allocates and frees on one stream. Clones use the same stream.
pub(super) trait Client<B: Backend>: Clone + Send + Sync {
    /// What a program keeps of an allocation.
    type Block;

    /// A client of `stream`.
    fn new(allocator: &CachingAllocator<B>, stream: &B::Stream) -> Result<Self, EngineError>;

    fn allocate(&self, bytes: u64) -> Result<Self::Block, EngineError>;

    fn free(&self, block: Self::Block) -> Result<(), EngineError>;
}

/// By stream handle and [`Allocation`].
pub(super) struct ByHandle<B: Backend>(StreamHandle<B>);

/// By address.
pub(super) struct ByAddress<B: Backend> {
    allocator: CachingAllocator<B>,
    stream: B::Stream,
}

impl<B: Backend> Clone for ByHandle<B> {
    fn clone(&self) -> Self {
        ByHandle(self.0.clone())
    }
}

impl<B: Backend> Clone for ByAddress<B> {
    fn clone(&self) -> Self {
        ByAddress { allocator: self.allocator.clone(), stream: self.stream.clone() }
    }
}

impl<B: Backend> Client<B> for ByHandle<B> {
    type Block = Allocation;

    fn new(allocator: &CachingAllocator<B>, stream: &B::Stream) -> Result<Self, EngineError> {
        allocator.stream(stream).map(ByHandle).map_err(refusal)
    }

    #[inline(always)]
    fn allocate(&self, bytes: u64) -> Result<Allocation, EngineError> {
        self.0.allocate(bytes).map_err(refusal)
    }

    #[inline(always)]
    fn free(&self, block: Allocation) -> Result<(), EngineError> {
        self.0.free(block).map_err(|refused| refusal(refused.error))
    }
}

impl<B: Backend> Client<B> for ByAddress<B> {
    type Block = Addr;

    fn new(allocator: &CachingAllocator<B>, stream: &B::Stream) -> Result<Self, EngineError> {
        Ok(ByAddress { allocator: allocator.clone(), stream: stream.clone() })
    }

    #[inline(always)]
    fn allocate(&self, bytes: u64) -> Result<Addr, EngineError> {
        self.allocator.allocate_raw(bytes, &self.stream).map_err(refusal)
    }

    #[inline(always)]
    fn free(&self, block: Addr) -> Result<(), EngineError> {
        self.allocator.free_raw(block).map_err(refusal)
    }
}
