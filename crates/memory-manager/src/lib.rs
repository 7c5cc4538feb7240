#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod block;
mod buffers;
mod config;
mod copy;
mod engine;
mod error;
mod manager;
mod mode;
mod platform;
mod table;

pub use buffers::{CopyRefused, DeviceBuffer, InFlight, PinnedBuffer};
pub use config::ManagerConfig;
pub use copy::{CopyJob, Direction};
pub use error::{ManagerError, MemoryKind};
pub use manager::{ManagerStats, MemoryManager, Outstanding, ShutdownReport};
pub use mode::{DeviceAllocatorMode, ModeReport};
pub use platform::{HostMemory, Platform, StreamOf};
