//! What a replay needs of an allocator on a device, so that replaying, verifying and searching are
//! written once and tested without either.

mod core;
mod device;
#[cfg(test)]
pub(crate) mod fake;
mod meter;
mod pools;
mod view;

use alloc_core::AllocError;
use alloc_core::backend::BackendError;

use crate::format::golden::{Block, Class, TraceRow};
use crate::workload::RecordedSegment;
pub use core::CoreEngine;
pub use device::DeviceEngine;
pub use meter::Metered;

/// Why an operation failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EngineError {
    /// The allocation does not fit; the text is the allocator's report.
    OutOfMemory(String),
    /// Anything else: a bug in the allocator, or the simulator caught it cheating.
    Refused(String),
}

/// What the allocator's error means to an engine.
#[cold]
pub(crate) fn refusal<E: BackendError>(error: AllocError<E>) -> EngineError {
    let text = error.to_string();
    if error.is_out_of_memory() {
        EngineError::OutOfMemory(text)
    } else {
        EngineError::Refused(text)
    }
}

fn empty(slot: usize) -> EngineError {
    EngineError::Refused(format!("nothing is live in slot {slot}"))
}

/// What the driver was made to do over a run.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct DriverFigures {
    /// Calls of any kind.
    pub calls: u64,
    /// Time that the host spent in them, in nanoseconds: measured on a real device, by the cost
    /// model on a simulated one.
    pub stall_ns: u64,
    /// Segments and address ranges obtained. With [`CoreEngine`], this and the following need a
    /// [watched](crate::replay::Plan::watch) engine.
    pub segments: u64,
    /// Physical handles created.
    pub handles_created: u64,
    /// How often a handle was mapped again, after the first time.
    pub pages_remapped: u64,
    /// Most physical bytes held at one time, within operations too.
    pub reserved_peak: u64,
}

/// A segment with its blocks and the pages under it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentView {
    /// Pool.
    pub pool: (u64, u64),
    /// First address.
    pub addr: u64,
    /// Bytes.
    pub bytes: u64,
    /// Index of its stream.
    pub stream: u32,
    /// Class.
    pub class: Class,
    /// Whether it can grow.
    pub expandable: bool,
    /// Blocks in order of address, without gap.
    pub blocks: Vec<Block>,
    /// Sizes of the physical pages under it, in order of address, without gap. One page for a
    /// segment obtained whole.
    pub pages: Vec<u64>,
}

/// An allocator on a device, driven by slot and stream numbers.
pub trait Engine {
    /// Allocates `bytes` on `stream` and keeps the allocation in the empty `slot`. Returns its
    /// address; 0 for 0 bytes.
    ///
    /// # Errors
    /// [`EngineError`]; the slot stays empty.
    fn allocate(&mut self, slot: usize, bytes: u64, stream: usize) -> Result<u64, EngineError>;

    /// Frees what is in `slot`.
    ///
    /// # Errors
    /// [`EngineError::Refused`], also if the slot is empty.
    fn free(&mut self, slot: usize) -> Result<(), EngineError>;

    /// Physical bytes held now.
    fn reserved(&self) -> u64;

    /// Statistics by PyTorch's names, written to `out` in the order of `keys`; `None` for a name
    /// that the allocator does not know.
    fn stats(&mut self, keys: &[impl AsRef<str>], out: &mut Vec<Option<i64>>);

    /// The driver's account of the run.
    fn driver(&self) -> DriverFigures;

    /// What the judge of the simulated device has against the allocator; needs a watched engine.
    fn objection(&self) -> Option<String>;

    /// Moves the segments obtained whole since the last call to `out`, in order; needs a watched
    /// engine.
    fn take_segments(&mut self, out: &mut Vec<RecordedSegment>);

    /// All segments in order of address.
    ///
    /// # Errors
    /// [`EngineError::Refused`].
    fn segments(&mut self) -> Result<Vec<SegmentView>, EngineError>;
}

/// An engine that can also follow recordings: device model and feed as their format demands.
///
/// The device model: a stream is busy from [`busy`](Recorded::busy) until [`sync`](Recorded::sync),
/// a blocking flush, or the release of a whole segment; an event recorded on a busy stream is
/// pending until then, any other is reached at once.
pub trait Recorded: Engine {
    /// Tells that `slot` is used on `stream`.
    ///
    /// # Errors
    /// [`EngineError::Refused`], also if the slot is empty.
    fn record_stream(&mut self, slot: usize, stream: usize) -> Result<(), EngineError>;

    /// Queues endless work on `stream`.
    fn busy(&mut self, stream: usize);

    /// Waits for the whole device: finishes all work.
    fn sync(&mut self);

    /// Empties the cache.
    ///
    /// # Errors
    /// [`EngineError::Refused`].
    fn empty_cache(&mut self) -> Result<(), EngineError>;

    /// Sets the memory limit to `bytes`.
    ///
    /// # Errors
    /// [`EngineError::Refused`].
    fn set_limit(&mut self, bytes: u64) -> Result<(), EngineError>;

    /// Resets peak statistics.
    ///
    /// # Errors
    /// [`EngineError::Refused`].
    fn reset_peak(&mut self) -> Result<(), EngineError>;

    /// Resets accumulated statistics.
    ///
    /// # Errors
    /// [`EngineError::Refused`].
    fn reset_accumulated(&mut self) -> Result<(), EngineError>;

    /// Switches expandable segments.
    ///
    /// # Errors
    /// [`EngineError::Refused`].
    fn set_expandable(&mut self, on: bool) -> Result<(), EngineError>;

    /// Creates user pool number `n`, whose id must turn out to be `id`.
    ///
    /// # Errors
    /// [`EngineError::Refused`].
    fn new_pool(&mut self, n: u32, id: (u64, u64), no_split: bool) -> Result<(), EngineError>;

    /// The owner of user pool `n` lets it go: gives its reference back, then empties the cache of the
    /// pool.
    ///
    /// # Errors
    /// [`EngineError::Refused`].
    fn delete_pool(&mut self, n: u32) -> Result<(), EngineError>;

    /// Opens a scope that sends this thread's requests to user pool `n`, inside those that are open.
    ///
    /// # Errors
    /// [`EngineError::Refused`].
    fn enter(&mut self, n: u32) -> Result<(), EngineError>;

    /// Closes the innermost such scope.
    fn leave(&mut self);

    /// Graph number `graph` begins to capture `stream` into the pool of graph `shared`, or into a new
    /// one, whose id must turn out to be `id`.
    ///
    /// # Errors
    /// [`EngineError::Refused`].
    fn begin_capture(
        &mut self,
        graph: u32,
        id: (u64, u64),
        shared: Option<u32>,
        stream: usize,
    ) -> Result<(), EngineError>;

    /// The capture of a graph ends; the graph keeps referring to its pool.
    ///
    /// # Errors
    /// [`EngineError::Refused`].
    fn end_capture(&mut self, graph: u32) -> Result<(), EngineError>;

    /// A graph gives its reference back.
    ///
    /// # Errors
    /// [`EngineError::Refused`].
    fn delete_graph(&mut self, graph: u32) -> Result<(), EngineError>;

    /// Tells at which addresses the recorded allocator gave memory back in the flush that comes next,
    /// so that pools which nobody refers to are visited in its order.
    ///
    /// # Errors
    /// [`EngineError::Refused`].
    fn feed_releases(&mut self, addrs: &[u64]) -> Result<(), EngineError>;

    /// Moves the trace entries since the last call to `out`, oldest first.
    fn take_trace(&mut self, out: &mut Vec<TraceRow>);

    /// Sets the base of the next address range that is reserved.
    fn feed_reservation(&mut self, base: u64);
}
