#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "the C interface")]
pub mod abi;
mod block;
mod buffers;
mod config;
mod copy;
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "copies, and slices of pinned memory")]
mod cuda;
mod engine;
mod error;
mod manager;
mod mode;
mod platform;
mod registered;
mod table;

pub use buffers::{CopyRefused, DeviceBuffer, InFlight, PinnedBuffer};
pub use config::ManagerConfig;
pub use copy::{CopyJob, Direction};
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
pub use error::{ManagerError, MemoryKind};
pub use manager::{ManagerStats, MemoryManager, Outstanding, ShutdownReport};
pub use mode::{DeviceAllocatorMode, ModeReport};
pub use platform::{HostMemory, Platform, StreamOf};
pub use registered::{ManagedDevice, ManagedPinned};
