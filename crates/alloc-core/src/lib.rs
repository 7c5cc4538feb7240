//! Backend-generic caching memory allocators.
#![forbid(unsafe_code)]

pub mod backend;
pub mod host;
mod sync;
mod units;

pub use units::{Addr, Bytes, DeviceId, PoolId, StreamId, align_up};
