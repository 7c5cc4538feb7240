#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod allocator;
pub mod backend;
mod block;
pub mod config;
mod directory;
mod error;
mod events;
mod free_index;
mod handles;
mod heap;
pub mod host;
mod lane;
#[cfg(not(any(loom, shuttle)))]
mod lock;
pub mod ordered;
mod padded;
mod pager;
pub mod share;
pub mod size_class;
pub mod stats;
mod stream_index;
mod sync;
mod table;
pub mod trace;
mod units;
pub mod watch;

pub use allocator::{
    Allocation, BlockSnapshot, BlockStatus, CachingAllocator, CaptureError, Checkpoint, Export,
    GraphMemory, GraphState, Located, MemPool, PageSource, PoolInfo, PoolOptions, PoolPin, PoolRef,
    PoolScope, Restored, ScopeFilter, SegmentSnapshot, SegmentSource, ShareHold, Snapshot,
    SourceError, StaleBlock, StreamHandle, ThreadScope, Violation,
};
pub use config::{ConfError, Config, Policy, Settings};
pub use error::{
    AddressSpaceLack, AllocError, BackendOp, CheckpointFlaw, FreeError, HeapReport, LadderStep,
    OomReport,
};
pub use size_class::SizeClass;
pub use stats::DeviceStats;
pub use trace::{TraceAction, TraceEntry, TraceSink};
pub use units::{Addr, Bytes, DeviceId, PoolId, StreamId, align_up};
