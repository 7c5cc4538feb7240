//! Pinned host memory: a caching allocator over any [`HostBackend`].
//!
//! Pinning is slow (tens of milliseconds a GiB) and device copies need pinned memory, so freed
//! memory is kept. What makes it more than a free list: work on device streams may still use memory
//! that the program has freed. A use is noted by [`record_use`](HostAllocator::record_use); memory
//! with uses is reused only after an event on each stream.
//!
//! Two policies: [`HostPolicy::Pytorch`] keeps blocks of powers of two as PyTorch does, with its
//! defects repaired (`docs/adr/0008-host-allocator-defects.md`); [`HostPolicy::Ours`] cuts blocks of
//! any size from large segments and merges them again.
//!
//! ```
//! use alloc_core::DeviceId;
//! use alloc_core::host::{HostAllocator, HostConfig, Place};
//! use mock_backend::{MockBackend, Work};
//!
//! let backend = MockBackend::new();
//! let stream = backend.stream(DeviceId::new(0));
//! let host = HostAllocator::new(backend.clone(), HostConfig::ours())?;
//!
//! let block = host.allocate_on(3_000_000, Place::Device(DeviceId::new(0)))?;
//! host.record_use(&block, &stream)?; // a copy that reads it is about to be queued
//! backend.launch(&stream, Work::new().touching(block.addr(), block.requested()).endless());
//! let addr = block.addr();
//! host.free(block)?;
//!
//! let other = host.allocate(3_000_000)?;
//! assert_ne!(other.addr(), addr, "the copy still runs");
//! host.free(other)?;
//! backend.pass(&stream);
//! host.empty_cache()?;
//! assert_eq!(host.stats().allocated_bytes.current, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! ```text
//! HostAllocator ── Background ──┐
//!     │                         ▼
//!     └───────────────► Engine: ladder, release, events, trim
//!                          │        │        │
//!             PoolTable ───┘   EventQueue    PinTable ── HostBackend
//!                 │            StreamTable
//!               Store: ClassStore (64 buckets) or SlabStore (heaps by NUMA node)
//! ```

mod allocation;
mod allocator;
mod backend;
mod background;
mod block;
mod check;
mod classes;
mod config;
mod engine;
mod error;
mod events;
mod free_index;
mod heap;
mod hit;
mod home;
mod ladder;
mod ledger;
mod options;
mod pace;
mod pins;
mod pools;
mod queue;
mod recent;
mod release;
mod reserve;
mod shard_hint;
mod slabs;
mod stats;
mod store;
mod streams;
mod teardown;
mod trim;
mod verify;

pub use allocation::{HostAllocation, HostContext, Place};
pub use allocator::HostAllocator;
pub use backend::{
    CopyData, CopyRequest, HostBackend, NodeId, PIN_ALIGN, PinMethod, PinRequest, PinnedSegment,
};
pub use check::HostViolation;
pub use config::{HostConfError, HostConfig, HostPolicy};
pub use engine::REQUEST_BYTES_MAX;
pub use error::{HostError, HostFreeError, HostOomReport, HostOp, HostStep};
pub use stats::{BUCKETS, BucketStats, DurationStat, HostStat, HostStats};
