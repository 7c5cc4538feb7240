//! How a simulated machine is put together.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use alloc_core::backend::SEGMENT_ALIGN;
use alloc_core::{Addr, DeviceId};

use crate::addresses::AddressSpace;
use crate::backend::Hook;
use crate::call::Log;
use crate::captures::Captures;
use crate::faults::FaultPlan;
use crate::graphs::Graphs;
use crate::judge::Book;
use crate::memory::{Device, Memory};
use crate::pools::Pools;
use crate::share::{Imports, Neighbours, Payloads};
use crate::sim::Sim;
use crate::streams::Streams;
use crate::{Call, CallInfo, Costs, Exchange, Fault, Feed, MockBackend, Placement, Rng};

/// Total memory of a device that nobody described: that of an 80 GiB card.
const USUAL_DEVICE_BYTES: u64 = 80 << 30;

/// What can be pinned on a host that nobody described.
const USUAL_HOST_BYTES: u64 = 1 << 40;

/// Builds a [`MockBackend`]; see [`MockBackend::builder`].
pub struct Builder {
    devices: Vec<Device>,
    host: Vec<Device>,
    granularity: u64,
    placement: Placement,
    first_address: Addr,
    address_space: u64,
    pub(crate) feed: Option<Feed>,
    chance: Option<(Rng, f64)>,
    faults: Vec<Fault>,
    log: usize,
    strict: bool,
    pools: bool,
    obeys_captures: bool,
    pub(crate) hooks: Vec<(Call, Hook)>,
    exchange: Exchange,
    payloads: Option<Payloads>,
}

impl Builder {
    pub(crate) fn new() -> Self {
        Builder {
            devices: Vec::new(),
            host: Vec::new(),
            granularity: SEGMENT_ALIGN,
            placement: Placement::Reuse { gap: 0 },
            first_address: Addr::new(1 << 40),
            address_space: 1 << 46,
            feed: None,
            chance: None,
            faults: Vec::new(),
            log: 0,
            strict: false,
            pools: true,
            obeys_captures: false,
            hooks: Vec::new(),
            exchange: Exchange::new(),
            payloads: None,
        }
    }

    /// Adds a device with `bytes` of memory, all of it available. Without any, there is one of
    /// 80 GiB.
    pub fn device(self, bytes: u64) -> Self {
        self.device_with(bytes, bytes)
    }

    /// Adds a device that says it has `total` bytes, of which `capacity` can be had; a capacity of
    /// [`u64::MAX`] never runs out.
    pub fn device_with(mut self, capacity: u64, total: u64) -> Self {
        let key = self.devices.len() as u8;
        self.devices.push(Device { capacity, total, used: 0, key });
        self
    }

    /// What names the device added last in all processes of the machine; without this, its number.
    ///
    /// # Panics
    /// Without a device.
    pub fn device_key(mut self, key: u8) -> Self {
        self.devices.last_mut().expect("a device to name").key = key;
        self
    }

    /// Makes the backend a process of a machine: what it exports, the others can import, and the
    /// judges see to it that nobody takes memory from under another. Default: a machine of its own.
    pub fn exchange(mut self, exchange: &Exchange) -> Self {
        self.exchange = exchange.clone();
        self
    }

    /// Gives everything that is exported a file of its size, as its bytes; see
    /// [`MockBackend::payload`]. Default: none, and exported memory has no bytes.
    pub fn payloads(mut self, make: impl Fn(u64) -> File + Send + Sync + 'static) -> Self {
        self.payloads = Some(Box::new(make));
        self
    }

    /// Adds a NUMA node of the host on which `bytes` can be pinned. Without any, there is one of
    /// 1 TiB.
    pub fn host_node(mut self, bytes: u64) -> Self {
        self.host.push(Device { capacity: bytes, total: bytes, used: 0, key: 0 });
        self
    }

    /// What page sizes must be multiples of, in bytes; a multiple of 2 MiB, which is the default.
    pub fn granularity(mut self, bytes: u64) -> Self {
        self.granularity = bytes;
        self
    }

    /// How addresses are chosen. Default: lowest free place, neighbours touching.
    pub fn placement(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// The address space: `bytes` of it, from `first` on (rounded to 2 MiB). Default: 64 TiB.
    pub fn address_space(mut self, first: Addr, bytes: u64) -> Self {
        self.first_address = first;
        self.address_space = bytes;
        self
    }

    /// Lets a feed decide addresses; see [`Feed`].
    pub fn feed(mut self, feed: Feed) -> Self {
        self.feed = Some(feed);
        self
    }

    /// Lets queued work without a duration end by chance: at every driver call, the first
    /// unfinished work of each stream ends with probability `p`.
    pub fn ends_by_chance(mut self, seed: u64, p: f64) -> Self {
        self.chance = Some((Rng::new(seed), p));
        self
    }

    /// Injects failures.
    pub fn faults(mut self, faults: impl IntoIterator<Item = Fault>) -> Self {
        self.faults.extend(faults);
        self
    }

    /// Keeps the latest `entries` driver calls for [`MockBackend::take_log`]. Default: none.
    pub fn log(mut self, entries: usize) -> Self {
        self.log = entries;
        self
    }

    /// Panics at the first violation instead of collecting them.
    pub fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    /// A machine whose devices have no stream-ordered pools.
    pub fn without_pools(mut self) -> Self {
        self.pools = false;
        self
    }

    /// Queries of events and waits for them are subject to the [`CaptureMode`](crate::CaptureMode)s
    /// of captures, as they are on CUDA unless the thread is put into relaxed mode for the call.
    /// Default: they are not, as the contract of [`Capture`](alloc_core::backend::Capture) demands.
    pub fn obeys_capture_modes(mut self) -> Self {
        self.obeys_captures = true;
        self
    }

    /// Runs `hook` at the start of every call of this kind, with no lock of the simulator held; see
    /// [`MockBackend::set_hook`].
    pub fn on(mut self, call: Call, hook: impl Fn(&CallInfo) + Send + Sync + 'static) -> Self {
        self.hooks.push((call, Arc::new(hook)));
        self
    }

    /// Builds the machine. The default stream of each device exists from the start, so stream ids
    /// 0, 1, … are those of devices 0, 1, ….
    ///
    /// # Panics
    /// If the granularity is 0 or no multiple of 2 MiB, or there are more than `u16::MAX` devices.
    pub fn build(mut self) -> MockBackend {
        assert!(
            self.granularity > 0 && self.granularity.is_multiple_of(SEGMENT_ALIGN),
            "granularity must be a multiple of 2 MiB"
        );
        if self.devices.is_empty() {
            self = self.device(USUAL_DEVICE_BYTES);
        }
        if self.host.is_empty() {
            self = self.host_node(USUAL_HOST_BYTES);
        }
        let device_count = u16::try_from(self.devices.len()).expect("at most u16::MAX devices");
        let mut streams = Streams::default();
        for device in 0..device_count {
            streams.add(DeviceId::new(device));
        }
        let sim = Sim {
            operation: 0,
            unloaded: false,
            strict: self.strict,
            memory: Memory::new(std::mem::take(&mut self.devices)),
            host: std::mem::take(&mut self.host),
            pins: BTreeMap::new(),
            space: AddressSpace::new(self.placement, self.first_address, self.address_space),
            streams,
            captures: Captures::above(0),
            graphs: Graphs::default(),
            obeys_captures: self.obeys_captures,
            book: Book::default(),
            pools: Pools::new(if self.pools { device_count } else { 0 }),
            faults: FaultPlan::new(std::mem::take(&mut self.faults)),
            costs: Costs::default(),
            log: Log::new(self.log),
            violations: Vec::new(),
            chance: self.chance.take(),
            imports: Imports::default(),
        };
        let neighbours = Neighbours { exchange: self.exchange, payloads: self.payloads };
        MockBackend::assemble(
            sim,
            device_count,
            self.granularity,
            self.feed,
            self.hooks,
            neighbours,
        )
    }
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder").field("devices", &self.devices).finish_non_exhaustive()
    }
}
