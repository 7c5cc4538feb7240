#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("alloc-cpu needs Linux: huge pages and NUMA nodes");

const _: () = assert!(usize::BITS == 64, "sizes are u64 and must fit into a usize");

#[expect(unsafe_code, reason = "memory of the system, and bytes in it")]
mod aligned;
mod allocator;
mod config;
mod error;
mod reporter;

pub use allocator::CpuAllocator;
pub use config::{CpuConfig, Fill, Guards};
pub use error::CpuError;
pub use reporter::{Ledger, Totals};
