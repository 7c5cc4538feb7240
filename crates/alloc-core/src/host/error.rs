//! Errors of the host allocator, and the report that an out-of-memory carries.

use super::allocation::{HostAllocation, Place};
use super::backend::NodeId;
use crate::units::{Addr, Bytes, PoolId};
use std::error::Error;
use std::fmt;

/// Why a call failed. No allocation is affected by a failed call; cached memory may have been given
/// back to the system on the way.
#[derive(Debug)]
#[non_exhaustive]
pub enum HostError<E> {
    /// No memory, after everything that could have avoided it was tried. Free something or raise the
    /// limit that the report names.
    OutOfMemory(Box<HostOomReport<E>>),
    /// The request exceeds [`REQUEST_BYTES_MAX`](super::REQUEST_BYTES_MAX).
    TooLarge {
        /// Bytes asked for.
        requested: u64,
    },
    /// There is no such device or NUMA node.
    NoSuchPlace(Place),
    /// The address is not the first one of a live allocation.
    UnknownAddress(Addr),
    /// The allocation is another allocator's.
    ForeignAllocation(Addr),
    /// No pool of this id is in use.
    UnknownPool(PoolId),
    /// The pool records a capture already.
    PoolIsRecording(PoolId),
    /// The pool records no capture.
    PoolIsNotRecording(PoolId),
    /// The ranges to copy are not inside the allocations, or of two lengths.
    BadRange {
        /// Bytes that were to be copied.
        bytes: u64,
        /// Bytes that the shorter of the two allocations has from the given offset on.
        available: u64,
    },
    /// The backend broke its contract; the segment was given back.
    BadSegment {
        /// Its first address.
        base: Addr,
        /// Its length in bytes.
        bytes: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A backend call failed for another reason than lack of memory.
    Backend {
        /// The call.
        op: HostOp,
        /// What it said.
        source: E,
    },
}

/// The backend call that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the methods of the backend traits")]
pub enum HostOp {
    Pin,
    Unpin,
    Record,
    Query,
    Wait,
    Copy,
}

impl fmt::Display for HostOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            HostOp::Pin => "pin memory",
            HostOp::Unpin => "give pinned memory back",
            HostOp::Record => "record an event",
            HostOp::Query => "query an event",
            HostOp::Wait => "wait for an event",
            HostOp::Copy => "copy pinned memory",
        })
    }
}

impl<E> HostError<E> {
    /// Whether freeing memory could have made the call succeed, or the request was simply too large.
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, HostError::OutOfMemory(_) | HostError::TooLarge { .. })
    }
}

impl<E: fmt::Display> fmt::Display for HostError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostError::OutOfMemory(report) => report.fmt(f),
            HostError::TooLarge { requested } => {
                write!(f, "{requested} bytes of pinned memory were asked for, more than can be")
            }
            HostError::NoSuchPlace(Place::Device(device)) => write!(f, "there is no {device}"),
            HostError::NoSuchPlace(Place::Node(node)) => write!(f, "there is no {node}"),
            HostError::NoSuchPlace(Place::Anywhere) => f.write_str("there is no NUMA node"),
            HostError::UnknownAddress(addr) => {
                write!(f, "{addr} is not the first address of a live allocation")
            }
            HostError::ForeignAllocation(addr) => {
                write!(f, "the allocation at {addr} is another allocator's")
            }
            HostError::UnknownPool(PoolId(a, b)) => write!(f, "no pool ({a}, {b}) is in use"),
            HostError::PoolIsRecording(PoolId(a, b)) => {
                write!(f, "pool ({a}, {b}) records a capture already")
            }
            HostError::PoolIsNotRecording(PoolId(a, b)) => {
                write!(f, "pool ({a}, {b}) records no capture")
            }
            HostError::BadRange { bytes, available } => {
                write!(f, "cannot copy {bytes} bytes: an allocation has only {available} there")
            }
            HostError::BadSegment { base, bytes, why } => {
                write!(f, "the backend pinned {bytes} bytes at {base}: {why}")
            }
            HostError::Backend { op, source } => write!(f, "cannot {op}: {source}"),
        }
    }
}

impl<E: Error + 'static> Error for HostError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            HostError::Backend { source, .. } => Some(source),
            HostError::OutOfMemory(report) => {
                report.source.as_ref().map(|source| source as &(dyn Error + 'static))
            }
            _ => None,
        }
    }
}

/// A free that failed. The memory is still the caller's, and so are the uses noted for it.
#[derive(Debug)]
pub struct HostFreeError<E> {
    /// What was to be freed.
    pub allocation: HostAllocation,
    /// Why it was not.
    pub error: HostError<E>,
}

impl<E: fmt::Display> fmt::Display for HostFreeError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<E: Error + 'static> Error for HostFreeError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}

/// A step of the ladder that a request climbs when memory cannot be pinned for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum HostStep {
    /// Pinning with room for later requests.
    Grow,
    /// Pinning just enough.
    GrowExactly,
    /// Looking for events that are reached.
    ProcessEvents,
    /// Giving all cached memory back to the system, then pinning again.
    EmptyCache,
    /// Waiting for pending events, oldest first.
    WaitForEvents,
    /// Using free memory of the other NUMA nodes.
    OtherNodes,
}

impl HostStep {
    const fn describe(self) -> &'static str {
        match self {
            HostStep::Grow => "growth",
            HostStep::GrowExactly => "growth by just the request",
            HostStep::ProcessEvents => "finished events",
            HostStep::EmptyCache => "release of everything cached",
            HostStep::WaitForEvents => "wait for pending events",
            HostStep::OtherNodes => "memory of other NUMA nodes",
        }
    }
}

/// Everything known about a request that failed for lack of memory. Sizes in bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostOomReport<E> {
    /// What the system said last; `None` if the allocator's own limit was in the way.
    pub source: Option<E>,
    /// Asked for.
    pub requested: u64,
    /// What had to be pinned for it.
    pub rounded: u64,
    /// The node it was wanted on.
    pub node: NodeId,
    /// Pinned by this allocator.
    pub reserved: u64,
    /// Held by clients, or freed but waiting for events.
    pub active: u64,
    /// The part of `active` that waits.
    pub draining: u64,
    /// Free, in blocks that do not fit.
    pub cached: u64,
    /// The largest of those.
    pub largest_free: u64,
    /// The limit in force.
    pub limit: Option<u64>,
    /// What was tried, in order.
    pub steps: Vec<HostStep>,
}

impl<E: fmt::Display> fmt::Display for HostOomReport<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of pinned memory on {}: cannot pin {}", self.node, Bytes(self.rounded))?;
        write!(f, " for a request of {}", Bytes(self.requested))?;
        if let Some(limit) = self.limit {
            write!(f, "; {} allowed", Bytes(limit))?;
        }
        write!(f, "; {} pinned: {} active", Bytes(self.reserved), Bytes(self.active))?;
        write!(f, " ({} waiting for events)", Bytes(self.draining))?;
        write!(f, ", {} free", Bytes(self.cached))?;
        write!(f, " (largest block {})", Bytes(self.largest_free))?;
        let steps: Vec<_> = self.steps.iter().map(|step| step.describe()).collect();
        write!(f, "; tried {}", steps.join(", "))?;
        match &self.source {
            Some(source) => write!(f, "; {source}"),
            None => Ok(()),
        }
    }
}
