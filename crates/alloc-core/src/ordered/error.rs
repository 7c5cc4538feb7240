//! Errors of the stream-ordered allocator.

use crate::backend::BackendError;
use crate::units::{Addr, Bytes, DeviceId, StreamId};
use std::error::Error;
use std::fmt;

/// Why a call failed. Allocations are as before the call.
#[derive(Debug)]
#[non_exhaustive]
pub enum OrderedError<E> {
    /// The pool has no memory, and giving back what it did not use changed nothing; or the limit is
    /// reached. Free something, or raise the limit.
    OutOfMemory {
        /// The device.
        device: DeviceId,
        /// Bytes asked for.
        requested: u64,
        /// Bytes that callers hold.
        allocated: u64,
        /// Bytes that the pool holds, if it said.
        reserved: Option<u64>,
        /// The limit on `allocated`, if there is one.
        limit: Option<u64>,
    },
    /// The request has 2^60 bytes or more. No device can ever serve it.
    TooLarge {
        /// Bytes asked for.
        requested: u64,
    },
    /// No allocation starts at the address: it was freed, or came from elsewhere.
    UnknownAddress(Addr),
    /// The stream is of another device than the pool.
    WrongDevice {
        /// The stream.
        stream: StreamId,
        /// Its device.
        device: DeviceId,
        /// The pool's device.
        expected: DeviceId,
    },
    /// The stream is being captured into a graph, where memory of a pool cannot be had. Allocate before
    /// the capture.
    Capturing(StreamId),
    /// A backend call failed for another reason than lack of memory.
    Backend {
        /// The call.
        op: OrderedOp,
        /// What it said.
        source: E,
    },
}

/// The backend call that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the methods of the backend traits")]
pub enum OrderedOp {
    Pool,
    Allocate,
    Free,
    Record,
    Wait,
    Trim,
    Usage,
    Capture,
}

impl fmt::Display for OrderedOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OrderedOp::Pool => "set up a memory pool",
            OrderedOp::Allocate => "allocate from a memory pool",
            OrderedOp::Free => "free memory of a pool",
            OrderedOp::Record => "record an event",
            OrderedOp::Wait => "wait for an event",
            OrderedOp::Trim => "trim a memory pool",
            OrderedOp::Usage => "read the figures of a memory pool",
            OrderedOp::Capture => "ask whether a stream captures",
        })
    }
}

impl<E> OrderedError<E> {
    /// Whether freeing memory could have made the call succeed, or the request was simply too large.
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, OrderedError::OutOfMemory { .. } | OrderedError::TooLarge { .. })
    }
}

impl<E: fmt::Display> fmt::Display for OrderedError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OrderedError::OutOfMemory { device, requested, allocated, reserved, limit } => {
                write!(f, "out of memory on {device}: {} were asked for", Bytes(*requested))?;
                write!(f, ", {} are allocated", Bytes(*allocated))?;
                if let Some(reserved) = reserved {
                    write!(f, ", the pool holds {}", Bytes(*reserved))?;
                }
                match limit {
                    Some(limit) => write!(f, ", the limit is {}", Bytes(*limit)),
                    None => f.write_str(", no limit is set"),
                }
            }
            OrderedError::TooLarge { requested } => write!(
                f,
                "out of memory: {requested} bytes were asked for, more than any device has (2^60)"
            ),
            OrderedError::UnknownAddress(addr) => {
                write!(
                    f,
                    "{addr} is not the address of an allocation: it was freed before, lies inside one, or came from elsewhere"
                )
            }
            OrderedError::WrongDevice { stream, device, expected } => {
                write!(f, "{stream} is of {device}, the memory of {expected}")
            }
            OrderedError::Capturing(stream) => {
                write!(f, "{stream} is being captured; allocate before the capture")
            }
            OrderedError::Backend { op, source } => write!(f, "cannot {op}: {source}"),
        }
    }
}

impl<E: BackendError> Error for OrderedError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            OrderedError::Backend { source, .. } => Some(source),
            _ => None,
        }
    }
}
