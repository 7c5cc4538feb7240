//! What an allocator of the registry can say.

use crate::device::{Device, DeviceType};
use alloc_core::{Addr, DeviceId, StreamId};
use std::error::Error;

/// Why a call failed. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocatorError {
    /// There is no memory; free some and try again.
    #[error("out of memory: {bytes} bytes were asked for on {device}: {source}")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
        /// Where.
        device: Device,
        /// What the allocator underneath says.
        source: Box<dyn Error + Send + Sync>,
    },
    /// No device could ever serve the request.
    #[error("{bytes} bytes were asked for, more than {max}, the most that can be")]
    TooLarge {
        /// Bytes asked for.
        bytes: u64,
        /// The most that may be.
        max: u64,
    },
    /// No block that is handed out starts at the address.
    #[error(
        "{0} is not the address of memory of this allocator: it was freed, or came from elsewhere"
    )]
    UnknownAddress(Addr),
    /// The pointer is of another allocator, or borrowed.
    #[error("the memory at {0} is of another allocator, or borrowed")]
    ForeignPointer(Addr),
    /// The allocator has never heard of the stream; tell it first.
    #[error("{0} is not known to this allocator")]
    UnknownStream(StreamId),
    /// There is no such device.
    #[error("there is no {0}")]
    NoSuchDevice(DeviceId),
    /// A copy does not fit into one of its ends.
    #[error("cannot copy {bytes} bytes: only {available} are there")]
    BadRange {
        /// Bytes to be copied.
        bytes: u64,
        /// Bytes that the shorter end has.
        available: u64,
    },
    /// The address of an allocation cannot stand for it, so there is no interface by address.
    #[error("allocations cannot be freed by address here: {why}")]
    NotSimple {
        /// Why not.
        why: String,
    },
    /// The allocator cannot do this at all.
    #[error("this allocator cannot {0}")]
    Unsupported(&'static str),
    /// No allocator is registered for the kind of device.
    #[error("no allocator is registered for {0} memory; call `set_allocator` first")]
    NoAllocator(DeviceType),
    /// No allocator of host memory is registered for the kind of device.
    #[error("no allocator of pinned memory is registered for {0}; call `set_host_allocator` first")]
    NoHostAllocator(DeviceType),
    /// Anything else.
    #[error(transparent)]
    Other(Box<dyn Error + Send + Sync>),
}
