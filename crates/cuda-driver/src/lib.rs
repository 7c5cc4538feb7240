#![doc = include_str!("../README.md")]

mod capture;
mod context;
mod device;
mod error;
mod event;
#[cfg(feature = "fake")]
pub mod fake;
mod host;
mod ipc;
mod loader;
mod memory;
mod mempool;
mod module;
mod stream;
mod symbols;
mod vmm;

pub use capture::{CaptureMode, CaptureTips, ExecutableGraph, Graph, RelaxedCaptures};
pub use context::{Context, Current};
pub use device::{Attribute, Device};
pub use error::{DriverError, Refused, code};
pub use event::Event;
pub use host::HostFlags;
pub use ipc::{IpcHandle, OpenedMemory};
pub use loader::{Driver, LoadError, Version};
pub use memory::{DeviceMemory, MemoryInfo};
pub use mempool::{MemoryPool, PoolCounter, PoolMemory, PoolReuseRule};
pub use module::{Argument, Kernel, Module, Shape};
pub use stream::{CaptureStatus, Stream};
pub use vmm::{AddressRange, PhysicalKind, PhysicalMemory};
