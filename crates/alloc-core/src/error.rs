//! Errors of the allocators, and the report that an out-of-memory carries.

use crate::backend::{BackendError, ErrorKind};
use crate::units::{Addr, Bytes, DeviceId, PoolId, StreamId};
use std::error::Error;
use std::fmt;

/// Why a call failed. The allocator is as before the call, except that memory which a failed
/// request made the allocator give back to the driver stays there.
#[derive(Debug)]
#[non_exhaustive]
pub enum AllocError<E> {
    /// No memory, after everything that could have avoided it was tried. Free something, lower the
    /// peak or raise the limit; asking again without that is pointless.
    OutOfMemory(Box<OomReport>),
    /// The request has 2^60 bytes or more. No device can ever serve it.
    TooLarge {
        /// Bytes asked for.
        requested: u64,
    },
    /// The address is not that of a block that is handed out: never was, is inside one, or was freed
    /// already.
    UnknownAddress {
        /// What was passed.
        addr: Addr,
    },
    /// The allocation belongs to another allocator.
    ForeignAllocation {
        /// Where it lies.
        addr: Addr,
    },
    /// The device does not exist.
    NoSuchDevice {
        /// What was passed.
        device: DeviceId,
        /// How many there are.
        count: u16,
    },
    /// A setting or argument is out of range.
    InvalidArgument {
        /// Which one.
        what: &'static str,
        /// What was wrong with it, and what is allowed.
        why: String,
    },
    /// Expandable segments were asked for, but the allocator was made without virtual memory. Use
    /// `with_virtual_memory`, or turn the setting off.
    NoVirtualMemory,
    /// The backend broke its contract; the segment or reservation was given back, unless it overlaps
    /// one that is in use.
    BadSegment {
        /// Its first address.
        base: Addr,
        /// Its length in bytes.
        bytes: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A checkpoint could not be taken or restored.
    Checkpoint {
        /// Of which pool.
        pool: PoolId,
        /// Why.
        why: CheckpointFlaw,
    },
    /// The source of a pool failed for another reason than lack of memory.
    PoolSource {
        /// Whose source.
        pool: PoolId,
        /// The call.
        op: BackendOp,
        /// What it said.
        source: Box<dyn BackendError>,
    },
    /// A backend call failed for another reason than lack of memory.
    Backend {
        /// The call.
        op: BackendOp,
        /// What it said.
        source: E,
    },
}

/// Why a checkpoint could not be taken or restored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum CheckpointFlaw {
    /// It is of another pool. A pool that ended and was made again under its id is another one.
    OtherPool {
        /// Of which.
        of: PoolId,
    },
    /// Work of other streams may still use a block, and events are held; or another process may. Try
    /// again without the hold, or when that process is done.
    Pending {
        /// Where.
        addr: Addr,
    },
    /// A block of the checkpoint has no memory any more.
    Gone {
        /// Where it was.
        addr: Addr,
    },
    /// Another thread allocated from the pool or freed to it meanwhile. Some streams may be restored
    /// and others not; restoring again puts that right.
    Interrupted,
}

impl fmt::Display for CheckpointFlaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CheckpointFlaw::OtherPool { of } => write!(f, "the checkpoint is of pool {of:?}"),
            CheckpointFlaw::Pending { addr } => {
                write!(
                    f,
                    "another process may still use the block at {addr}, or other streams may and \
                     events are held"
                )
            }
            CheckpointFlaw::Gone { addr } => {
                write!(f, "the block at {addr} has no memory any more")
            }
            CheckpointFlaw::Interrupted => {
                f.write_str("another thread used the pool meanwhile; restore again")
            }
        }
    }
}

/// The backend call that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the methods of the backend traits")]
pub enum BackendOp {
    Acquire,
    Release,
    Record,
    Query,
    Wait,
    Capture,
    Memory,
    Reserve,
    Unreserve,
    Create,
    Destroy,
    Map,
    SetAccess,
    Unmap,
    DeviceKey,
    ExportSegment,
    OpenSegment,
    CloseSegment,
    ExportPage,
    ImportPage,
    ExportEvent,
    AwaitEvent,
}

impl fmt::Display for BackendOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BackendOp::Acquire => "acquire a segment",
            BackendOp::Release => "release a segment",
            BackendOp::Record => "record an event",
            BackendOp::Query => "query an event",
            BackendOp::Capture => "ask about a stream's capture",
            BackendOp::Wait => "wait for an event",
            BackendOp::Memory => "read the device's memory figures",
            BackendOp::Reserve => "reserve address space",
            BackendOp::Unreserve => "give address space back",
            BackendOp::Create => "create physical memory",
            BackendOp::Destroy => "destroy physical memory",
            BackendOp::Map => "map memory",
            BackendOp::SetAccess => "set access to mapped memory",
            BackendOp::Unmap => "unmap memory",
            BackendOp::DeviceKey => "identify a device",
            BackendOp::ExportSegment => "export a segment",
            BackendOp::OpenSegment => "open a segment of another process",
            BackendOp::CloseSegment => "close a segment of another process",
            BackendOp::ExportPage => "export physical memory",
            BackendOp::ImportPage => "import physical memory",
            BackendOp::ExportEvent => "export an event",
            BackendOp::AwaitEvent => "wait for an event of another process",
        })
    }
}

impl<E> AllocError<E> {
    /// Whether freeing memory could have made the call succeed, or the request was simply too large.
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, AllocError::OutOfMemory(_) | AllocError::TooLarge { .. })
    }
}

impl<E: BackendError> AllocError<E> {
    /// Whether the device or driver is gone, so that no later call can succeed either.
    pub fn is_device_lost(&self) -> bool {
        let kind = match self {
            AllocError::Backend { source, .. } => source.kind(),
            AllocError::PoolSource { source, .. } => source.kind(),
            _ => return false,
        };
        kind == ErrorKind::DeviceLost
    }
}

impl<E: fmt::Display> fmt::Display for AllocError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AllocError::OutOfMemory(report) => report.fmt(f),
            AllocError::TooLarge { requested } => write!(
                f,
                "out of memory: {requested} bytes were asked for, more than any device has (2^60)"
            ),
            AllocError::UnknownAddress { addr } => write!(
                f,
                "{addr} is not the address of a live block of this allocator: it was freed before, \
                 lies inside a block, or came from elsewhere"
            ),
            AllocError::ForeignAllocation { addr } => {
                write!(f, "the allocation at {addr} belongs to another allocator")
            }
            AllocError::NoSuchDevice { device, count } => {
                write!(f, "there is no {device}: the backend has {count}, counted from 0")
            }
            AllocError::InvalidArgument { what, why } => write!(f, "{what}: {why}"),
            AllocError::NoVirtualMemory => {
                f.write_str("expandable segments need an allocator made by `with_virtual_memory`")
            }
            AllocError::BadSegment { base, bytes, why } => {
                write!(f, "the backend returned a segment of {bytes} bytes at {base}: {why}")
            }
            AllocError::Checkpoint { pool, why } => {
                write!(f, "checkpoint of pool {pool:?}: {why}")
            }
            AllocError::PoolSource { pool, op, source } => {
                write!(f, "the source of pool {pool:?} cannot {op}: {source}")
            }
            AllocError::Backend { op, source } => write!(f, "cannot {op}: {source}"),
        }
    }
}

impl<E: Error + 'static> Error for AllocError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            AllocError::Backend { source, .. } => Some(source),
            AllocError::PoolSource { source, .. } => Some(&**source),
            _ => None,
        }
    }
}

/// A step of the ladder that a request climbs when its heap has no block for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LadderStep {
    /// Free-memory callbacks were asked to let go of memory.
    Callbacks,
    /// Old cached segments were collected because of `garbage_collection_threshold`.
    GarbageCollection,
    /// The driver was asked.
    Grow,
    /// Pools that serve others before they run out of memory were searched.
    UseOnOom,
    /// Cached oversize segments were given back.
    ReleaseOversize,
    /// All pending events were waited for, and nothing was given back because of a capture.
    Wait,
    /// All pending events were waited for and all cached memory was given back, but that of pools
    /// that somebody refers to.
    ReleaseCached,
    /// What was free in pools that somebody refers to was given back too.
    ReleasePools,
}

impl LadderStep {
    const fn describe(self) -> &'static str {
        match self {
            LadderStep::Callbacks => "free-memory callbacks",
            LadderStep::GarbageCollection => "garbage collection",
            LadderStep::Grow => "growth",
            LadderStep::UseOnOom => "search of pools that are used on out of memory",
            LadderStep::ReleaseOversize => "release of oversize segments",
            LadderStep::Wait => "wait for events",
            LadderStep::ReleasePools => "release of what is free in pools",
            LadderStep::ReleaseCached => "wait for events and release of everything cached",
        }
    }
}

/// Memory of one pool on one stream at the moment of an out-of-memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeapReport {
    /// Its pool.
    pub pool: PoolId,
    /// Its stream.
    pub stream: StreamId,
    /// Bytes obtained from the driver.
    pub reserved: u64,
    /// Bytes of blocks that the client holds.
    pub allocated: u64,
    /// Bytes freed by the client whose events are not reached.
    pub pending: u64,
    /// Bytes of free blocks.
    pub cached: u64,
    /// The largest of them.
    pub largest_free: u64,
}

/// What expandable segments lacked although there may be memory. Either way the setting
/// `expandable_segments_reserve` is the one to look at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AddressSpaceLack {
    /// The process has no room for another reservation of this many bytes. Fewer streams, or smaller
    /// reservations, would fit.
    Exhausted {
        /// Bytes of the reservation.
        bytes: u64,
    },
    /// Reservations are set to be smaller than the request, though the device is not.
    ReserveTooSmall {
        /// Bytes of a reservation.
        bytes: u64,
    },
}

impl fmt::Display for AddressSpaceLack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AddressSpaceLack::Exhausted { bytes } => {
                write!(f, "{} of address space could not be reserved", Bytes(*bytes))?;
            }
            AddressSpaceLack::ReserveTooSmall { bytes } => {
                write!(f, "segments have only {} of address space", Bytes(*bytes))?;
            }
        }
        f.write_str(" (setting `expandable_segments_reserve`)")
    }
}

/// Everything known about a failed request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OomReport {
    /// The device.
    pub device: DeviceId,
    /// The pool that the request went to.
    pub pool: PoolId,
    /// Its stream.
    pub stream: StreamId,
    /// Bytes asked for.
    pub requested: u64,
    /// Bytes of the block that was looked for.
    pub rounded: u64,
    /// Bytes that the driver was asked for.
    pub segment: u64,
    /// The limit in force, in bytes.
    pub limit: Option<u64>,
    /// Bytes obtained from the driver, in all heaps.
    pub reserved: u64,
    /// Bytes that the driver says are free on the device, if it could be asked.
    pub device_free: Option<u64>,
    /// Bytes of the whole device, if known.
    pub device_total: Option<u64>,
    /// Why an expandable segment could not have the addresses it needed, if that was the reason.
    pub address_space: Option<AddressSpaceLack>,
    /// What was tried, in order.
    pub steps: Vec<LadderStep>,
    /// Every pool and stream of the device that holds memory, by both.
    pub heaps: Vec<HeapReport>,
}

impl OomReport {
    fn sum(&self, part: impl Fn(&HeapReport) -> u64) -> u64 {
        self.heaps.iter().map(part).sum()
    }

    /// Bytes of blocks that clients hold, in all heaps.
    pub fn allocated(&self) -> u64 {
        self.sum(|heap| heap.allocated)
    }

    /// Bytes of free blocks, in all heaps.
    pub fn cached(&self) -> u64 {
        self.sum(|heap| heap.cached)
    }

    /// Bytes that wait for events, in all heaps.
    pub fn pending(&self) -> u64 {
        self.sum(|heap| heap.pending)
    }
}

impl fmt::Display for OomReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of memory on {}: tried to allocate {}", self.device, Bytes(self.segment))?;
        write!(f, " for a request of {} on {}", Bytes(self.requested), self.stream)?;
        if let (Some(total), Some(free)) = (self.device_total, self.device_free) {
            write!(f, "; the device has {}, {} free", Bytes(total), Bytes(free))?;
        }
        if let Some(limit) = self.limit {
            write!(f, "; {} allowed", Bytes(limit))?;
        }
        write!(f, "; {} reserved: {} allocated", Bytes(self.reserved), Bytes(self.allocated()))?;
        write!(f, ", {} waiting for events", Bytes(self.pending()))?;
        write!(f, ", {} free", Bytes(self.cached()))?;
        let largest = self.heaps.iter().map(|heap| heap.largest_free).max().unwrap_or(0);
        write!(f, " (largest block {})", Bytes(largest))?;
        if let Some(lack) = &self.address_space {
            write!(f, "; {lack}")?;
        }
        let steps: Vec<_> = self.steps.iter().map(|step| step.describe()).collect();
        if !steps.is_empty() {
            write!(f, "; tried {}", steps.join(", "))?;
        }
        Ok(())
    }
}

/// A free that failed. The block is still the caller's.
#[derive(Debug)]
pub struct FreeError<A, E> {
    /// What was to be freed.
    pub allocation: A,
    /// Why it was not.
    pub error: AllocError<E>,
}

impl<A, E: fmt::Display> fmt::Display for FreeError<A, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<A: fmt::Debug, E: Error + 'static> Error for FreeError<A, E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}
