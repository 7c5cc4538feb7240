#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("alloc-host-cuda needs Linux: mmap, huge pages and NUMA nodes");

const _: () = assert!(usize::BITS == 64, "lengths are u64 and must fit into a usize");

mod allocator;
mod backend;
mod error;
#[expect(unsafe_code, reason = "maps, pins and lends memory")]
mod pinned;
mod source;
mod streams;
mod topology;

/// The driver's calls, whose types some methods here take and return.
pub use cuda_driver as driver;

pub use allocator::{NewError, PinOptions, PinnedAllocError, PinnedAllocator};
pub use backend::CudaHost;
pub use cuda_driver::HostFlags;
pub use error::PinError;
pub use pinned::{CopyRefused, InFlight, PinTimes, PinnedBuffer, PinnedMemory, Touch};
pub use source::{OfBackend, StreamSource};
pub use streams::{HostEvent, HostStream, StreamError, Streams};
