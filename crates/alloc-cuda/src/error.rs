//! What can go wrong, and what it means to the allocator.

use alloc_core::DeviceId;
use alloc_core::backend::{BackendError, ErrorKind};
use cuda_driver::{DriverError, LoadError, code};
use std::fmt;

/// A failed call of the backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver, or it does not start.
    Load(LoadError),
    /// A driver call failed.
    Driver(DriverError),
    /// The device does not exist.
    NoSuchDevice {
        /// What was passed.
        device: DeviceId,
        /// How many there are.
        count: u16,
    },
    /// The stream to adopt was not made in the device's primary context: it is of another device, or
    /// of a context made by `cuCtxCreate`, or of a green context.
    WrongContext {
        /// The device it was said to be of.
        device: DeviceId,
    },
    /// A stream that was adopted cannot be handed on: only its owner knows how long it lives.
    ForeignStream,
    /// The device has no virtual memory, which expandable segments need.
    NoVirtualMemory {
        /// The device.
        device: DeviceId,
    },
    /// Memory of the device cannot be shared with other processes like this: its driver, container or
    /// virtual machine does not allow it.
    NotShareable {
        /// The device.
        device: DeviceId,
    },
    /// What another process sent is of a kind that is not known here.
    UnknownToken {
        /// Its kind.
        kind: u32,
    },
    /// What another process sent lacks something, or is too long.
    BadToken,
    /// The devices cannot reach each other's memory.
    NoPeerAccess {
        /// The one whose kernels should reach.
        device: DeviceId,
        /// The one whose memory should be reached.
        peer: DeviceId,
    },
}

impl From<DriverError> for CudaError {
    fn from(error: DriverError) -> Self {
        CudaError::Driver(error)
    }
}

impl From<LoadError> for CudaError {
    fn from(error: LoadError) -> Self {
        CudaError::Load(error)
    }
}

impl BackendError for CudaError {
    fn kind(&self) -> ErrorKind {
        match self {
            CudaError::Driver(error) => kind_of(error),
            CudaError::NoVirtualMemory { .. }
            | CudaError::NotShareable { .. }
            | CudaError::UnknownToken { .. }
            | CudaError::NoPeerAccess { .. } => ErrorKind::Unsupported,
            CudaError::Load(_) => ErrorKind::DeviceLost,
            CudaError::NoSuchDevice { .. }
            | CudaError::WrongContext { .. }
            | CudaError::BadToken
            | CudaError::ForeignStream => ErrorKind::Other,
        }
    }
}

/// The kind of a result code.
fn kind_of(error: &DriverError) -> ErrorKind {
    match error.code {
        code::OUT_OF_MEMORY => ErrorKind::OutOfMemory,
        code::NOT_SUPPORTED => ErrorKind::Unsupported,
        _ if error.is_teardown() || error.is_sticky() => ErrorKind::DeviceLost,
        _ => ErrorKind::Other,
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CudaError::Load(error) => error.fmt(f),
            CudaError::Driver(error) => error.fmt(f),
            CudaError::NoSuchDevice { device, count } => {
                write!(f, "there is no {device}: {count} are visible, counted from 0")
            }
            CudaError::WrongContext { device } => {
                write!(f, "the stream was not made in the primary context of {device}")
            }
            CudaError::ForeignStream => {
                f.write_str("an adopted stream cannot be handed on; ask its owner")
            }
            CudaError::NoVirtualMemory { device } => {
                write!(
                    f,
                    "{device} has no virtual memory management, which expandable segments need"
                )
            }
            CudaError::NotShareable { device } => {
                write!(f, "memory of {device} cannot be shared with other processes here")
            }
            CudaError::UnknownToken { kind } => {
                write!(f, "another process sent memory or an event of the unknown kind {kind}")
            }
            CudaError::BadToken => {
                f.write_str("what another process sent lacks something, or is too long")
            }
            CudaError::NoPeerAccess { device, peer } => {
                write!(f, "{device} cannot reach the memory of {peer}")
            }
        }
    }
}

impl std::error::Error for CudaError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            CudaError::Load(error) => Some(error),
            CudaError::Driver(error) => Some(error),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_the_allocator_reacts_to_has_its_kind() {
        let kind =
            |code| CudaError::Driver(DriverError { call: "cuEventQuery", code, name: "" }).kind();
        assert_eq!(kind(code::OUT_OF_MEMORY), ErrorKind::OutOfMemory);
        assert_eq!(kind(code::NOT_SUPPORTED), ErrorKind::Unsupported);
        for lost in [
            code::DEINITIALIZED,
            code::CONTEXT_IS_DESTROYED,
            code::INVALID_CONTEXT,
            code::ILLEGAL_ADDRESS,
            code::LAUNCH_FAILED,
            code::ECC_UNCORRECTABLE,
        ] {
            assert_eq!(kind(lost), ErrorKind::DeviceLost);
        }
        assert_eq!(kind(code::INVALID_VALUE), ErrorKind::Other);
        assert_eq!(kind(code::UNKNOWN), ErrorKind::Other);
    }
}
