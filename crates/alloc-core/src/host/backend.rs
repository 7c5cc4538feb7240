//! What the host allocator needs from a platform.
//!
//! Separate from [`Backend`](crate::backend::Backend): pinned memory belongs to no device, and a
//! crate that only pins memory should not have to pretend that it can allocate on one. The rules
//! are the same: no method is called with an allocator lock held, any thread may call, and an error
//! means that nothing was done.

use crate::backend::{BackendError, Completion, Refused, Stream};
use crate::units::{Addr, DeviceId};
use std::fmt;
use std::time::Duration;

/// Index of a NUMA node of the host, counted from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(u16);

impl NodeId {
    /// The node with this index.
    pub const fn new(index: u16) -> Self {
        NodeId(index)
    }

    /// The index, for tables.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NUMA node {}", self.0)
    }
}

/// How memory becomes pinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PinMethod {
    /// The driver allocates and pins in one call (cuMemHostAlloc).
    Allocate,
    /// Ordinary memory is touched by this many threads, then registered (cuMemHostRegister). Many
    /// times faster for large segments: the driver pins one page after the other.
    Register {
        /// Threads that touch the pages; at least 1.
        threads: u16,
    },
}

/// A request for pinned memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PinRequest {
    /// Bytes wanted; never 0.
    pub bytes: u64,
    /// The node whose memory it should be, or `None` if it does not matter.
    pub node: Option<NodeId>,
    /// How to pin.
    pub method: PinMethod,
    /// No single registration may be longer than this (drivers fail on very long ones). A longer
    /// request is still one contiguous range, registered in pieces.
    pub piece_bytes_max: u64,
}

/// Alignment of pinned segments: a request of a multiple of this many bytes starts at a multiple of
/// it.
pub const PIN_ALIGN: u64 = 4096;

/// A contiguous range of pinned memory. Owned; dropping it without
/// [`unpin`](HostBackend::unpin) leaks the memory and leaves it pinned.
pub trait PinnedSegment: Send + Sync + 'static {
    /// First address; see [`PIN_ALIGN`].
    fn base(&self) -> Addr;

    /// Length in bytes, at least what was asked for.
    fn bytes(&self) -> u64;
}

/// A source of pinned host memory, and of events on the streams that use it. The streams may belong
/// to several devices.
pub trait HostBackend: Send + Sync + 'static {
    /// Its streams.
    type Stream: Stream;
    /// Its events: a point in a stream's work. Dropping one recycles it and must not fail.
    type Event: Send + 'static;
    /// Its pinned segments.
    type Pinned: PinnedSegment;
    /// Its errors.
    type Error: BackendError;

    /// Number of NUMA nodes, at least 1. Constant.
    fn node_count(&self) -> u16;

    /// The node nearest to `device`, or `None` if there is no such device. Constant.
    fn node_of(&self, device: DeviceId) -> Option<NodeId>;

    /// Pins memory.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::backend::ErrorKind::OutOfMemory) if there is no room or a
    /// limit on locked memory is hit; the allocator then climbs its ladder.
    fn pin(&self, request: &PinRequest) -> Result<Self::Pinned, Self::Error>;

    /// Gives pinned memory back to the system.
    ///
    /// # Errors
    /// Hands the segment back. After the driver is gone:
    /// [`ErrorKind::DeviceLost`](crate::backend::ErrorKind::DeviceLost).
    fn unpin(&self, segment: Self::Pinned) -> Result<(), Refused<Self::Pinned, Self::Error>>;

    /// Records an event after all work queued on `stream` so far.
    ///
    /// # Errors
    /// Any; the stream is unchanged.
    fn record(&self, stream: &Self::Stream) -> Result<Self::Event, Self::Error>;

    /// Asks, without waiting, whether an event is reached. "Not yet" is not an error.
    ///
    /// # Errors
    /// Any.
    fn query(&self, event: &Self::Event) -> Result<Completion, Self::Error>;

    /// Blocks the calling thread until the event is reached.
    ///
    /// # Errors
    /// Any.
    fn wait(&self, event: &Self::Event) -> Result<(), Self::Error>;

    /// Time since some fixed moment: for timing statistics and for the age of cached memory. Never
    /// runs backwards. Not called on a hit.
    fn now(&self) -> Duration;
}

/// Backends that can copy between ranges of their own pinned memory.
pub trait CopyData: HostBackend {
    /// Copies `bytes` from `from` to `to`. The ranges do not overlap. Called without locks, on
    /// behalf of a caller who owns both ranges.
    ///
    /// # Errors
    /// If either range is not wholly inside pinned memory of this backend; nothing is copied.
    fn copy(&self, to: Addr, from: Addr, bytes: u64) -> Result<(), Self::Error>;
}
