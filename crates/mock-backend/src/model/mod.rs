//! A naive reference of PyTorch's device caching allocator, the oracle of model tests.
//!
//! Written from the specification of the behaviour alone, as plainly as possible: one list of
//! blocks in order of address, scanned from end to end for every question. It covers ordinary and
//! expandable segments, private pools with their scopes and checkpoints, several devices, every statistic and the trace, with
//! the defects of the original that recordings show (the pool is not searched again after the
//! blocking flush). Not covered: captures, pools with sources of their own, free-memory callbacks,
//! `throw_on_cudamalloc_oom`.
//!
//! It keeps its own account of busy streams and of device memory and takes addresses from a closure,
//! so it can run beside an allocator on a [`MockBackend`](crate::MockBackend) or against a recording
//! of a GPU. Test `golden` compares it with recordings of PyTorch, entry by entry.
//!
//! ```
//! use alloc_core::{Addr, DeviceId, PoolId, StreamId};
//! use mock_backend::model::{Model, ModelConf};
//!
//! let mut next = 0;
//! let addresses = move |_kind, bytes| {
//!     next += 1 << 30;
//!     Addr::new(next)
//! };
//! let mut model = Model::new(ModelConf::default(), Box::new(addresses));
//! let device = model.add_device(u64::MAX, 80 << 30);
//! model.add_stream(StreamId::new(0), device);
//! let block = model.allocate(1000, StreamId::new(0)).expect("there is room");
//! assert_eq!(model.stats(device).get("allocated_bytes.all.current"), Some(1024));
//! model.free(block);
//! ```

mod conf;
mod device;
mod driver;
mod expandable;
mod pools;
mod release;
mod stats;

pub use conf::{EventOrder, ModelConf};
pub use pools::{ModelCheckpoint, ModelRestored};
pub use stats::{ModelStats, Stat};

use std::fmt;

use alloc_core::{Addr, DeviceId, PoolId, StreamId};

use crate::SpanKind;
use device::DeviceModel;
use driver::Driver;
use pools::ScopeModel;

/// Gives the address of the next segment or reservation, from its size in bytes. For reservations of
/// expandable segments, called when a range is reserved.
pub type ModelAddresses = Box<dyn FnMut(SpanKind, u64) -> Addr + Send>;

/// The largest request that is looked at; above it an allocation fails at once.
const REQUEST_BYTES_MAX: u64 = 1 << 60;

/// One action of the allocator, as PyTorch's own history has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModelTrace {
    /// What happened.
    pub action: ModelAction,
    /// The device.
    pub device: DeviceId,
    /// The block, the segment or the first page; [`Addr::NULL`] for out of memory.
    pub addr: Addr,
    /// Requested bytes of the block, bytes of the segment or pages, rounded bytes of the request
    /// that failed.
    pub bytes: u64,
    /// The stream of the block, segment or request.
    pub stream: StreamId,
}

/// Kinds of actions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ModelAction {
    /// A block was handed out.
    Alloc,
    /// The client freed a block.
    FreeRequested,
    /// A block went back into its pool.
    FreeCompleted,
    /// A segment was taken from the driver.
    SegmentAlloc,
    /// A segment was given back.
    SegmentFree,
    /// Pages were mapped.
    SegmentMap,
    /// Pages were unmapped.
    SegmentUnmap,
    /// A request failed.
    Oom,
}

impl ModelAction {
    /// PyTorch's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            ModelAction::Alloc => "alloc",
            ModelAction::FreeRequested => "free_requested",
            ModelAction::FreeCompleted => "free_completed",
            ModelAction::SegmentAlloc => "segment_alloc",
            ModelAction::SegmentFree => "segment_free",
            ModelAction::SegmentMap => "segment_map",
            ModelAction::SegmentUnmap => "segment_unmap",
            ModelAction::Oom => "oom",
        }
    }
}

/// A mapped block, as a snapshot would list it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModelBlock {
    /// Where it is.
    pub addr: Addr,
    /// Its size in bytes.
    pub bytes: u64,
    /// What was asked for, of a live or pending block; else 0.
    pub requested: u64,
    /// The stream it belongs to.
    pub stream: StreamId,
    /// The pool it belongs to.
    pub pool: PoolId,
    /// Whether the client has it.
    pub live: bool,
    /// Whether it was freed and waits for events.
    pub pending: bool,
}

/// The reference allocator; see the [module](self).
pub struct Model {
    driver: Driver,
    devices: Vec<DeviceModel>,
    /// Outermost first.
    scopes: Vec<ScopeModel>,
    pools_made: u64,
    scopes_made: u64,
}

impl Model {
    /// An allocator without devices.
    pub fn new(conf: ModelConf, addresses: ModelAddresses) -> Self {
        Model {
            driver: Driver::new(conf, addresses),
            devices: Vec::new(),
            scopes: Vec::new(),
            pools_made: 0,
            scopes_made: 0,
        }
    }

    /// Adds the next device: `capacity` bytes can be had from its driver, and it says it has `total`
    /// (which sizes the reservations of expandable segments).
    pub fn add_device(&mut self, capacity: u64, total: u64) -> DeviceId {
        let id = self.driver.add_device(capacity, total);
        self.devices.push(DeviceModel::new(id, self.driver.conf.max_split));
        id
    }

    /// Adds a stream. The first one of each device is its default stream.
    pub fn add_stream(&mut self, stream: StreamId, device: DeviceId) {
        self.driver.add_stream(stream, device);
    }

    /// Allocates on `stream`; `None` means out of memory. 0 bytes are [`Addr::NULL`].
    ///
    /// # Panics
    /// If the stream is unknown.
    pub fn allocate(&mut self, bytes: u64, stream: StreamId) -> Option<Addr> {
        if bytes == 0 {
            return Some(Addr::NULL);
        }
        if bytes >= REQUEST_BYTES_MAX {
            return None;
        }
        let device = self.driver.device_of(stream);
        let pool = self.route(device, stream);
        self.devices[device.index()].allocate(&mut self.driver, bytes, stream, pool)
    }

    /// Frees a block; nothing happens for [`Addr::NULL`].
    ///
    /// # Panics
    /// If there is no live block at `addr`.
    pub fn free(&mut self, addr: Addr) {
        if !addr.is_null() {
            let device = self.holder(addr);
            self.devices[device].free(&mut self.driver, addr);
        }
    }

    /// The block is used on `stream`; nothing happens for [`Addr::NULL`].
    ///
    /// # Panics
    /// If there is no live block at `addr`, or the stream is unknown.
    pub fn record_stream(&mut self, addr: Addr, stream: StreamId) {
        if !addr.is_null() {
            self.driver.device_of(stream);
            let device = self.holder(addr);
            self.devices[device].record_stream(addr, stream);
        }
    }

    fn holder(&self, addr: Addr) -> usize {
        let found = self.devices.iter().position(|device| device.is_live(addr));
        found.expect("no live block at this address")
    }

    /// Work is queued on `stream`.
    pub fn busy(&mut self, stream: StreamId) {
        self.driver.queue_work(stream);
    }

    /// Everything queued on `stream` finishes.
    pub fn pass(&mut self, stream: StreamId) {
        self.driver.finish(stream);
    }

    /// Everything queued anywhere finishes.
    pub fn sync(&mut self) {
        self.driver.finish_all();
    }

    /// Gives every cached segment and page of every device back.
    pub fn empty_cache(&mut self) {
        for device in &mut self.devices {
            device.release_cached(&mut self.driver);
        }
    }

    /// Limits what may be taken from the driver of `device`, in bytes.
    pub fn set_limit(&mut self, device: DeviceId, limit: Option<u64>) {
        self.devices[device.index()].limit = limit;
    }

    /// Switches expandable segments.
    pub fn set_expandable(&mut self, on: bool) {
        self.driver.conf.expandable = on;
    }

    /// The statistics of `device`.
    pub fn stats(&self, device: DeviceId) -> &ModelStats {
        &self.devices[device.index()].stats
    }

    /// Sets every peak to its current value.
    pub fn reset_peak(&mut self, device: DeviceId) {
        self.devices[device.index()].stats.reset_peak();
    }

    /// Sets the accumulated values and the counters to 0.
    pub fn reset_accumulated(&mut self, device: DeviceId) {
        self.devices[device.index()].stats.reset_accumulated();
    }

    /// Takes the actions of all devices since the last call, oldest first.
    pub fn take_trace(&mut self) -> Vec<ModelTrace> {
        std::mem::take(&mut self.driver.trace)
    }

    /// All mapped blocks of `device`, by address.
    pub fn blocks(&self, device: DeviceId) -> Vec<ModelBlock> {
        self.devices[device.index()].mapped_blocks()
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("devices", &self.devices.len()).finish_non_exhaustive()
    }
}
