//! The state of an allocator, and how a request is served from what it has.

use super::allocation::{HostAllocation, HostContext, Place};
use super::backend::{HostBackend, NodeId};
use super::classes::ClassStore;
use super::config::{HostConfig, HostPolicy};
use super::error::HostError;
use super::events::Pending;
use super::heap::Cut;
use super::home::BlockRef;
use super::options::Options;
use super::pace::EventPace;
use super::pins::PinTable;
use super::pools::{Pool, PoolTable};
use super::queue::EventQueue;
use super::reserve::Reserve;
use super::slabs::SlabStore;
use super::stats::HostStats;
use super::store::{Served, Store};
use super::streams::{StreamRef, StreamTable};
use crate::sync::Mutex;
use crate::units::DeviceId;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Largest request: more than any machine has, and far from where arithmetic could overflow.
pub const REQUEST_BYTES_MAX: u64 = 1 << 47;

pub(crate) type StreamOf<B> = StreamRef<<B as HostBackend>::Stream>;
pub(crate) type PoolOf<B> = Pool<StreamOf<B>>;
pub(crate) type Result<T, B> = std::result::Result<T, HostError<<B as HostBackend>::Error>>;

/// Everything of an allocator but its background thread, which shares it.
///
/// Every lock in here is private to the module that owns it and is released before that module
/// returns, so no backend call is made under one.
pub(crate) struct Engine<B: HostBackend> {
    pub(crate) backend: B,
    /// Identifies this allocator among all of the process.
    pub(crate) owner: u32,
    /// As given when the allocator was made.
    pub(crate) config: HostConfig,
    /// With the changes since then; `options` is its form for hot paths.
    pub(crate) settings: Mutex<HostConfig>,
    pub(crate) options: Options,
    pub(crate) pools: PoolTable<StreamOf<B>>,
    pub(crate) streams: StreamTable<B::Stream>,
    pub(crate) queue: EventQueue<Pending<B>>,
    pub(crate) pace: EventPace,
    pub(crate) pins: PinTable<B>,
    pub(crate) reserve: Reserve,
    pub(crate) counters: Counters,
    /// The node of requests that name no place: that of device 0 if there is one.
    pub(crate) any_node: NodeId,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) deferred_failures: AtomicU64,
    pub(crate) unpin_failures: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) ooms: AtomicU64,
    /// Blocks in open batches of streams.
    pub(crate) parked: AtomicU64,
    /// Microseconds of [`HostBackend::now`] before which no one looks for old cached segments.
    pub(crate) next_trim: AtomicU64,
}

/// A request on its way.
#[derive(Debug)]
pub(crate) struct Ask<'a, B: HostBackend> {
    pub(crate) pool: &'a PoolOf<B>,
    pub(crate) node: NodeId,
    /// Bytes asked for, not 0.
    pub(crate) bytes: u64,
}

// Not derived, as that would ask for `B: Clone`.
impl<B: HostBackend> Clone for Ask<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: HostBackend> Copy for Ask<'_, B> {}

impl<B: HostBackend> Engine<B> {
    pub(crate) fn new(backend: B, config: HostConfig) -> Self {
        static OWNERS: AtomicU32 = AtomicU32::new(0);
        let any_node = match config.policy {
            HostPolicy::Ours => backend.node_of(DeviceId::new(0)),
            HostPolicy::Pytorch => None,
        };
        let exists = |node: &NodeId| node.index() < backend.node_count() as usize;
        Engine {
            any_node: any_node.filter(exists).unwrap_or(NodeId::new(0)),
            owner: OWNERS.fetch_add(1, Relaxed),
            options: Options::new(&config),
            pools: PoolTable::new(new_store(&config, &backend, config.shards)),
            streams: StreamTable::new(),
            queue: EventQueue::new(),
            pace: EventPace::new(config.event_interval_min),
            pins: PinTable::new(),
            reserve: Reserve::new(config.reserve_bytes),
            counters: Counters::default(),
            settings: Mutex::new(config.clone()),
            backend,
            config,
        }
    }

    pub(crate) fn is_ours(&self) -> bool {
        self.config.policy == HostPolicy::Ours
    }

    /// A store for a private pool: few threads use it, and not for long.
    pub(crate) fn private_store(&self) -> Store<StreamOf<B>> {
        let settings = self.settings.lock().clone();
        new_store(&settings, &self.backend, 1)
    }

    /// The node where memory for `place` should be. Policy `pytorch` knows one node only.
    #[inline]
    pub(crate) fn node(&self, place: Place) -> Result<NodeId, B> {
        match place {
            Place::Anywhere => Ok(self.any_node),
            _ => self.node_named(place),
        }
    }

    fn node_named(&self, place: Place) -> Result<NodeId, B> {
        let node = match place {
            Place::Anywhere => Some(self.any_node),
            Place::Device(device) => self.backend.node_of(device),
            Place::Node(node) => Some(node),
        };
        let node = node.filter(|node| node.index() < self.backend.node_count() as usize);
        let node = node.ok_or(HostError::NoSuchPlace(place))?;
        Ok(if self.is_ours() { node } else { self.any_node })
    }

    /// A block that is free already, or nothing.
    pub(crate) fn take(&self, ask: Ask<'_, B>, cut: Cut) -> Option<Served> {
        match &ask.pool.store {
            Store::Classes(classes) => classes.take(self.options.class_bytes(ask.bytes), ask.bytes),
            Store::Slabs(slabs) if self.options.is_cached(ask.bytes) => {
                slabs.take(ask.node, ask.bytes, cut)
            }
            Store::Slabs(_) => None,
        }
    }

    /// What the client gets.
    #[inline(always)]
    pub(crate) fn wrap(&self, ask: Ask<'_, B>, (home, taken): Served) -> HostAllocation {
        let block = BlockRef { pool: ask.pool.slot, home, id: taken.id };
        HostAllocation {
            addr: taken.addr,
            requested: ask.bytes,
            bytes: taken.bytes,
            context: HostContext { owner: self.owner, block },
        }
    }

    pub(crate) fn each_pool(&self, mut visit: impl FnMut(&PoolOf<B>)) {
        visit(self.pools.default_pool());
        self.pools.private().iter().for_each(|pool| visit(pool));
    }

    pub(crate) fn stats(&self) -> HostStats {
        let mut stats = HostStats::new(&self.pins.ledger());
        self.each_pool(|pool| pool.store.each_ledger(|ledger| stats.add(ledger)));
        stats.bound_peaks();
        stats.deferred_failures = self.counters.deferred_failures.load(Relaxed);
        stats.unpin_failures = self.counters.unpin_failures.load(Relaxed);
        stats.num_misses = self.counters.misses.load(Relaxed);
        stats.num_ooms = self.counters.ooms.load(Relaxed);
        stats
    }
}

fn new_store<B: HostBackend>(config: &HostConfig, backend: &B, shards: u16) -> Store<StreamOf<B>> {
    match config.policy {
        HostPolicy::Pytorch => Store::Classes(ClassStore::new(config.cached_block_bytes_max)),
        HostPolicy::Ours => {
            Store::Slabs(SlabStore::new(config, backend.node_count().max(1), shards))
        }
    }
}
