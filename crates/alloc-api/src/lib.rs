#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod allocator;
mod caching;
mod data_ptr;
mod device;
mod error;
mod pinned;
mod registry;
pub mod report;
mod stats;

pub use allocator::{Allocator, CopyData, RawFree, StreamUse};
pub use caching::{CachingDevice, CopyFn};
pub use data_ptr::{DataPtr, Deleter, Dropping, LocalDataPtr, NotSimple, Owner};
pub use device::{Device, DeviceType, ParseDeviceError};
pub use error::AllocatorError;
pub use pinned::PinnedHost;
pub use registry::{Registry, get_allocator, registry, set_allocator};
pub use stats::{AllocatorStats, Level};
