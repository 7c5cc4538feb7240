//! What can go wrong with CPU memory.

use alloc_api::{AllocatorError, Device};

/// Why memory was not given. Nothing has changed then.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// The system has no such memory.
    #[error(
        "the system has no {bytes} bytes to give (error {errno}); free some, or raise the limit of the process"
    )]
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
        /// What the system said.
        errno: i32,
    },
    /// No address space holds so much. Sizes that were negative once look like this.
    #[error("{bytes} bytes were asked for, more than any memory has ({} at most)", i64::MAX)]
    TooLarge {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The memory cannot be had from that NUMA node.
    #[error(
        "memory of NUMA node {node} cannot be had (error {errno}); does the node exist, and may the process use it?"
    )]
    Numa {
        /// The node.
        node: u16,
        /// What the system said.
        errno: i32,
    },
    /// A setting is out of range.
    #[error("{what}: {why}")]
    BadConfig {
        /// Which setting.
        what: &'static str,
        /// What is allowed.
        why: &'static str,
    },
}

impl From<CpuError> for AllocatorError {
    fn from(error: CpuError) -> Self {
        match error {
            CpuError::OutOfMemory { bytes, .. } => {
                AllocatorError::OutOfMemory { bytes, device: Device::CPU, source: Box::new(error) }
            }
            CpuError::TooLarge { bytes } => {
                AllocatorError::TooLarge { bytes, max: i64::MAX as u64 }
            }
            CpuError::Numa { .. } | CpuError::BadConfig { .. } => {
                AllocatorError::Other(Box::new(error))
            }
        }
    }
}
