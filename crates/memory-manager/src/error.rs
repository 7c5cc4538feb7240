//! What a manager can say.

use crate::mode::DeviceAllocatorMode;
use alloc_core::backend::{BackendError, ErrorKind};
use alloc_core::host::HostError;
use alloc_core::ordered::OrderedError;
use alloc_core::{Addr, AllocError, DeviceId, StreamId};
use std::error::Error;
use std::fmt;

/// Which memory a call is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryKind {
    /// Pinned memory of the host.
    Pinned,
    /// Memory of a device.
    Device,
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryKind::Pinned => "pinned",
            MemoryKind::Device => "device",
        })
    }
}

type Source = Box<dyn Error + Send + Sync>;

/// Why a call failed. What was allocated is as before the call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManagerError {
    /// There is no memory: free some, or make the pool larger before its first use.
    #[error("no {bytes} bytes of {kind} memory: {source}")]
    OutOfMemory {
        /// Which memory.
        kind: MemoryKind,
        /// Bytes asked for.
        bytes: u64,
        /// What the allocator underneath says.
        source: Source,
    },
    /// A size of 0.
    #[error("{0} is 0; it must be at least 1 byte")]
    ZeroSize(&'static str),
    /// No machine could ever serve the request.
    #[error("{bytes} bytes were asked for, more than any machine has")]
    TooLarge {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The address is not one of memory that this manager has out: it was freed before, lies inside an
    /// allocation, or came from elsewhere.
    #[error(
        "{addr} is no address of {kind} memory of this manager: it was freed before, lies inside an allocation, or came from elsewhere"
    )]
    UnknownAddress {
        /// What was passed.
        addr: Addr,
        /// What it was taken for.
        kind: MemoryKind,
    },
    /// The stream is of another device than the memory.
    #[error("{stream} is of {device}, but the memory is of {expected}")]
    WrongStream {
        /// What was passed.
        stream: StreamId,
        /// The device that it is of.
        device: DeviceId,
        /// The device of the memory.
        expected: DeviceId,
    },
    /// The stream is being captured into a graph: memory of a stream-ordered pool cannot be had there,
    /// no copy queued, and no order made with work outside. Do it before the capture.
    #[error("{0} is being captured; allocate, copy and record uses before the capture")]
    Capturing(StreamId),
    /// A copy goes past the end of an allocation.
    #[error("cannot copy {bytes} bytes: from {addr} on, the {kind} memory has only {available}")]
    OutOfRange {
        /// Bytes that were to be copied.
        bytes: u64,
        /// Where the copy begins.
        addr: Addr,
        /// Bytes from there to the end of the allocation.
        available: u64,
        /// At which end of the copy.
        kind: MemoryKind,
    },
    /// The size of a pool can be set before its first use only.
    #[error("the {0} pool is in use already; set its size before the first allocation")]
    PoolInUse(MemoryKind),
    /// The manager has been shut down.
    #[error("the memory manager has been shut down")]
    ShutDown,
    /// The device or driver cannot do this at all.
    #[error("not supported here: {0}")]
    Unsupported(Source),
    /// The device, or the driver itself, is gone.
    #[error("the device is lost: {0}")]
    DeviceLost(Source),
    /// Anything else.
    #[error(transparent)]
    Other(Source),
}

impl ManagerError {
    /// From an error of the backend.
    pub fn from_backend<E: BackendError>(error: E) -> Self {
        match error.kind() {
            ErrorKind::Unsupported => ManagerError::Unsupported(Box::new(error)),
            ErrorKind::DeviceLost => ManagerError::DeviceLost(Box::new(error)),
            _ => ManagerError::Other(Box::new(error)),
        }
    }

    /// From an error of the host allocator, at a request of `bytes`.
    pub fn from_host<E: BackendError>(bytes: u64, error: HostError<E>) -> Self {
        let kind = MemoryKind::Pinned;
        match error {
            HostError::TooLarge { requested } => ManagerError::TooLarge { bytes: requested },
            HostError::UnknownAddress(addr) | HostError::ForeignAllocation(addr) => {
                ManagerError::UnknownAddress { addr, kind }
            }
            error if error.is_out_of_memory() => {
                ManagerError::OutOfMemory { kind, bytes, source: Box::new(error) }
            }
            HostError::Backend { op: _, source } => ManagerError::from_backend(source),
            error => ManagerError::Other(Box::new(error)),
        }
    }

    /// From an error of the caching allocator, at a request of `bytes`.
    pub(crate) fn from_caching<E: BackendError>(bytes: u64, error: AllocError<E>) -> Self {
        let kind = MemoryKind::Device;
        match error {
            AllocError::TooLarge { requested } => ManagerError::TooLarge { bytes: requested },
            AllocError::UnknownAddress { addr } | AllocError::ForeignAllocation { addr } => {
                ManagerError::UnknownAddress { addr, kind }
            }
            error if error.is_out_of_memory() => {
                ManagerError::OutOfMemory { kind, bytes, source: Box::new(error) }
            }
            AllocError::Backend { op: _, source } => ManagerError::from_backend(source),
            error => ManagerError::Other(Box::new(error)),
        }
    }

    /// From an error of the stream-ordered allocator, at a request of `bytes`.
    pub(crate) fn from_ordered<E: BackendError>(bytes: u64, error: OrderedError<E>) -> Self {
        let kind = MemoryKind::Device;
        match error {
            OrderedError::TooLarge { requested } => ManagerError::TooLarge { bytes: requested },
            OrderedError::UnknownAddress(addr) => ManagerError::UnknownAddress { addr, kind },
            OrderedError::Capturing(stream) => ManagerError::Capturing(stream),
            OrderedError::WrongDevice { stream, device, expected } => {
                ManagerError::WrongStream { stream, device, expected }
            }
            error if error.is_out_of_memory() => {
                ManagerError::OutOfMemory { kind, bytes, source: Box::new(error) }
            }
            OrderedError::Backend { op: _, source } => ManagerError::from_backend(source),
            error => ManagerError::Other(Box::new(error)),
        }
    }
}

/// Why a mode is not the one that was asked for.
pub(crate) fn why_not(mode: DeviceAllocatorMode) -> &'static str {
    match mode {
        DeviceAllocatorMode::CudaAsyncPool => "the device has no memory pools",
        DeviceAllocatorMode::AsyncStreamOrdered => "the device has no stream-ordered allocator",
        DeviceAllocatorMode::Caching => "the mode is always there",
    }
}
