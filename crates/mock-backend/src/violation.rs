//! What the judge found.

use std::fmt;

use alloc_core::{Addr, StreamId};

/// A rule that an allocator, a harness or a client broke.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Rule {
    /// An allocation was handed out over memory of a live one, at the same address or through
    /// another mapping of the same page.
    Overlap,
    /// An allocation was handed out where no live segment or mapped range holds all of it.
    OutsideMemory,
    /// An allocation was handed out, or work was queued, in a mapped range that its device has no
    /// access to.
    NoAccess,
    /// An allocation was handed out on a stream whose next work is not ordered after earlier work
    /// of another stream on the same memory, and the host has not seen that work finish.
    EarlyReuse,
    /// Work was queued on a range that is not inside one live allocation.
    UnallocatedUse,
    /// An allocation was freed that is not live.
    UnknownFree,
    /// A segment was released under work of another device that the host has not seen finish.
    ReleaseUnderWork,
    /// A page was unmapped under work that the host has not seen finish.
    UnmapUnderWork,
    /// A segment was released, or a page unmapped, in which an allocation is live.
    ReleaseOfAllocated,
    /// A page was mapped over another one.
    MapOverMapping,
    /// A range that is misaligned, outside its reservation, or not mapped throughout.
    BadRange,
    /// A range was unmapped that is not exactly one mapping.
    PartialUnmap,
    /// A reservation was given back with pages mapped in it.
    UnreserveMapped,
    /// A page was destroyed while mapped.
    DestroyMapped,
    /// A stream, event, segment, reservation or page of another backend.
    ForeignHandle,
    /// A size that the contract forbids, or a stream of another device.
    BadRequest,
    /// A fed address is misaligned, null, or overlaps a live range.
    FedBadAddress,
    /// A fed address was recorded for another size.
    FedWrongSize,
    /// The feed has no more addresses.
    FeedExhausted,
    /// An event was recorded on a capturing stream, or one recorded there was queried or waited
    /// for by the host.
    CapturedEvent,
    /// Memory of a pool was used by work that does not come after its allocation on the stream that
    /// it was allocated for, and whose allocation the host has not seen done.
    UseBeforeAllocation,
    /// Memory of a pool was freed on a stream that does not come after work of another stream on it.
    FreeUnderWork,
    /// A call that the driver forbids while a capture is going on; the capture is now invalid.
    CallDuringCapture,
    /// An allocation was handed out over memory that another process has borrowed.
    SharedReuse,
    /// Memory that another process has borrowed was given back to the driver.
    ReleaseOfShared,
    /// A piece of memory was imported while this process had it open already.
    DoubleImport,
    /// Work was queued on borrowed memory, on a stream that does not wait for its producer.
    UnreadyUse,
    /// Borrowed memory was returned under work that the host has not seen finish.
    EarlyReturn,
    /// An allocation was handed out over memory that belongs to a graph, or to a capture that goes
    /// on, to somebody who does not share it.
    GraphAliased,
    /// A segment was released, or a page unmapped, that belongs to a graph which still exists, or to
    /// a capture that goes on.
    ReturnedUnderGraph,
    /// A graph was replayed whose memory is gone, or is other memory than when it was captured.
    ReplayWithoutMemory,
    /// A graph was replayed while other work on the same memory may still run.
    ReplayRace,
}

/// One broken rule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// Number of the operation that broke it; the same numbers as in the log.
    pub operation: u64,
    /// The rule.
    pub rule: Rule,
    /// The stream it happened on, if it is about one.
    pub stream: Option<StreamId>,
    /// The other stream, if two are involved: the one whose work is endangered.
    pub other: Option<StreamId>,
    /// First address of the range; [`Addr::NULL`] if there is none.
    pub addr: Addr,
    /// Its length in bytes.
    pub bytes: u64,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "operation {}: {:?}", self.operation, self.rule)?;
        if let Some(stream) = self.stream {
            write!(f, " on {stream}")?;
        }
        if let Some(other) = self.other {
            write!(f, " against {other}")?;
        }
        write!(f, " at {}, {} bytes", self.addr, self.bytes)
    }
}

/// What was never given back.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Leaks {
    /// Segments that were not released: address, bytes.
    pub segments: Vec<(Addr, u64)>,
    /// Reservations that were not given back: address, bytes.
    pub reservations: Vec<(Addr, u64)>,
    /// Mappings that were not undone: address, bytes.
    pub mappings: Vec<(Addr, u64)>,
    /// Sizes of pages that were not destroyed.
    pub pages: Vec<u64>,
    /// Memory of pools that was not freed: address, bytes.
    pub ordered: Vec<(Addr, u64)>,
    /// Number of pools that were made and not ended.
    pub pools: usize,
    /// Number of events that still exist.
    pub events: usize,
    /// Number of captures that were not ended.
    pub captures: usize,
    /// Allocations that the judge was told of and never freed: address, bytes.
    pub allocations: Vec<(Addr, u64)>,
}

impl Leaks {
    /// Whether everything came back.
    pub fn is_empty(&self) -> bool {
        *self == Leaks::default()
    }
}
