//! The caching allocator: the public face, and what its parts share.
//!
//! Locks, outermost first: growth (one per device, re-entrant) → heap → exact statistics. The event
//! queue, counters, pager and settings have leaf locks. Backend calls, callbacks, observers and the
//! trace sink run with none of them held, except that growth and release hold the growth lock, which
//! no hit ever takes.

mod allocate;
mod captures;
mod check;
mod free;
mod grow;
mod ladder;
mod oom;
mod paging;
mod pools;
mod reclaim;
mod share;
mod snapshot;

pub use captures::{CaptureError, GraphMemory, GraphState};
pub use check::Violation;
pub use pools::{
    Checkpoint, MemPool, PageSource, PoolInfo, PoolOptions, PoolPin, PoolRef, PoolScope, Restored,
    ScopeFilter, SegmentSource, SourceError, StaleBlock, ThreadScope,
};
pub use share::{Export, ShareHold};
pub use snapshot::{BlockSnapshot, BlockStatus, SegmentSnapshot, Snapshot};

use crate::backend::{Backend, CaptureId, DeviceMemory, MemoryInfo, Stream, VirtualMemory};
use crate::block::{BlockId, BlockIdx, BlockState};
use crate::config::{Config, Policy, Rules, Settings};
use crate::directory::Directory;
use crate::error::{AllocError, BackendOp, FreeError, OomReport};
use crate::events::EventQueue;
use crate::handles::{HandleStore, HandleTable};
use crate::heap::{Heap, Ledger, SegmentId};
use crate::lock::Lock;
use crate::pager::{PageStore, Pager};
use crate::stats::{Counters, DeviceStats, StatTable};
use crate::table::AppendTable;
use crate::trace::{TraceBuffer, TraceSink};
use crate::units::{Addr, DeviceId, PoolId, StreamId};
use captures::Captures;
use parking_lot::{Mutex, ReentrantMutex, RwLock};
use pools::{OwnSource, Pool, Pools, Source, Token};
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// A block handed out by a [`CachingAllocator`]. Give it back with [`CachingAllocator::free`];
/// dropping it keeps the memory allocated until the allocator goes.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "the memory stays allocated until it is freed"]
pub struct Allocation {
    addr: Addr,
    bytes: u64,
    requested: u64,
    stream: StreamId,
    /// `None` for a request of 0 bytes.
    block: Option<BlockId>,
    heap: u32,
    allocator: u32,
}

impl Allocation {
    /// Where it starts; [`Addr::NULL`] for a request of 0 bytes.
    pub const fn addr(&self) -> Addr {
        self.addr
    }

    /// Bytes that were asked for.
    pub const fn requested(&self) -> u64 {
        self.requested
    }

    /// Bytes of the block, at least [`requested`](Self::requested).
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The stream that it was allocated for.
    pub const fn stream(&self) -> StreamId {
        self.stream
    }
}

/// A heap as the allocator holds it: bookkeeping and backend tokens under one lock. Aligned so that
/// no two heaps share a cache line, nor a pair of lines that the processor fetches together.
#[repr(align(128))]
pub(crate) struct HeapCell<B: Backend> {
    /// Position in the allocator's table.
    index: u32,
    device: DeviceId,
    home: Arc<Device<B>>,
    /// Whether it belongs to a private pool. When that ends, the heap waits for another one.
    private: bool,
    stream: B::Stream,
    stream_id: StreamId,
    state: Lock<HeapState<B>>,
    /// An event on the stream, and the heap's clock when it was recorded: once it is reached, what
    /// was freed before is nobody's any more.
    mark: Mutex<Option<(u32, B::Event)>>,
    /// The same for views of handles, with the epoch of their store.
    view_mark: Mutex<Option<(u64, B::Event)>>,
}

/// What the lock of a heap guards.
struct HeapState<B: Backend> {
    body: HeapBody<B>,
    /// Used unless the device keeps exact statistics.
    stats: StatTable,
}

/// The bookkeeping of a heap together with the backend values that belong to it.
struct HeapBody<B: Backend> {
    /// Position in the allocator's table.
    index: u32,
    heap: Heap,
    pool: Arc<Pool>,
    source: OwnSource<B>,
    /// Tokens of the segments obtained whole.
    tokens: HashMap<SegmentId, Token<B>>,
    /// Uses of live blocks on streams other than the heap's own.
    uses: HashMap<BlockIdx, SmallVec<[Use<B::Stream>; 2]>>,
    /// How many [`ShareHold`]s there are on a live or draining block, if any.
    shares: HashMap<BlockIdx, u32>,
}

/// A use of a block on another stream than its heap's.
#[derive(Clone)]
struct Use<S> {
    stream: S,
    /// The capture that it is part of.
    capture: Option<CaptureId>,
}

/// What the heaps of one device share.
struct Device<B: Backend> {
    total: u64,
    /// Bytes that may be reserved at most; `u64::MAX` is no limit.
    limit: AtomicU64,
    /// Bytes obtained from the backend. Changes under the growth lock only.
    reserved: AtomicU64,
    /// Most of them since the last reset of peaks; exact in both modes of [`PeakMode`].
    reserved_peak: AtomicU64,
    /// Most bytes that were in use when memory was wanted; policy `ours` grows along it.
    needed_peak: AtomicU64,
    /// Whether there is time to move memory.
    pace: paging::Pace,
    counters: Mutex<Counters>,
    /// One table for all heaps, where the peak of their sum must be exact.
    exact: Option<Lock<StatTable>>,
    heaps: RwLock<Heaps<B>>,
    pools: Pools<B>,
    /// Held by whoever obtains memory from the backend or gives it back. Re-entrant, because a
    /// backend may call the allocator.
    growth: ReentrantMutex<()>,
    /// Whether the holder of the growth lock is mapping or unmapping pages. A backend that calls the
    /// allocator from there gets no pages mapped or unmapped.
    paging: AtomicBool,
    events: EventQueue<B>,
}

impl<B: Backend> HeapCell<B> {
    /// See [`Shared::edit`].
    #[inline]
    fn edit<R>(
        &self,
        trace: Option<&mut TraceBuffer>,
        change: impl FnOnce(&mut HeapBody<B>, &mut Ledger<'_>) -> R,
    ) -> R {
        let mut state = self.state.lock();
        let HeapState { body, stats } = &mut *state;
        let mut exact = self.home.exact.as_ref().map(Lock::lock);
        let stats = exact.as_deref_mut().unwrap_or(stats);
        change(body, &mut Ledger { stats, trace })
    }

    fn pool(&self) -> Arc<Pool> {
        Arc::clone(&self.state.lock().body.pool)
    }

    /// The pool, and where its memory comes from.
    fn owner(&self) -> (Arc<Pool>, OwnSource<B>) {
        let state = self.state.lock();
        (Arc::clone(&state.body.pool), state.body.source.clone())
    }
}

/// The heaps of one device.
struct Heaps<B: Backend> {
    /// In the order in which flushes walk them: the default pool first, streams by id.
    by_owner: BTreeMap<(PoolId, StreamId), Arc<HeapCell<B>>>,
    /// Heaps whose private pools have ended, by stream. They are empty, but their statistics count.
    vacant: BTreeMap<StreamId, Vec<Arc<HeapCell<B>>>>,
}

impl<B: Backend> Heaps<B> {
    const fn new() -> Self {
        Heaps { by_owner: BTreeMap::new(), vacant: BTreeMap::new() }
    }

    /// The heaps of one pool, by stream id.
    fn of_pool(&self, pool: PoolId) -> impl Iterator<Item = &Arc<HeapCell<B>>> {
        let range = (pool, StreamId::new(0))..=(pool, StreamId::new(u64::MAX));
        self.by_owner.range(range).map(|(_, cell)| cell)
    }

    /// Takes the heaps from a pool that has ended.
    fn vacate(&mut self, pool: PoolId) {
        let streams: Vec<_> = self.of_pool(pool).map(|cell| cell.stream_id).collect();
        for stream in streams {
            if let Some(cell) = self.by_owner.remove(&(pool, stream)) {
                cell.state.lock().body.source = None;
                self.vacant.entry(stream).or_default().push(cell);
            }
        }
    }
}

impl<B: Backend> Device<B> {
    fn limit(&self) -> Option<u64> {
        let limit = self.limit.load(Ordering::Relaxed);
        (limit != u64::MAX).then_some(limit)
    }

    fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// The right to map and unmap pages, under the growth lock; `None` from within a call of the
    /// backend that does so already.
    fn begin_paging(&self) -> Option<PagingTurn<'_>> {
        (!self.paging.swap(true, Ordering::Relaxed)).then(|| PagingTurn(&self.paging))
    }

    /// The heaps, in flush order.
    fn heaps(&self) -> Vec<Arc<HeapCell<B>>> {
        self.heaps.read().by_owner.values().cloned().collect()
    }

    /// The heaps of one pool, by stream id.
    fn heaps_of(&self, pool: PoolId) -> Vec<Arc<HeapCell<B>>> {
        self.heaps.read().of_pool(pool).cloned().collect()
    }

    /// Every heap that statistics are kept in.
    fn counting_heaps(&self) -> Vec<Arc<HeapCell<B>>> {
        let heaps = self.heaps.read();
        let vacant = heaps.vacant.values().flatten();
        heaps.by_owner.values().chain(vacant).cloned().collect()
    }
}

/// See [`Device::begin_paging`].
struct PagingTurn<'a>(&'a AtomicBool);

impl Drop for PagingTurn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

type Callback = Arc<dyn Fn(DeviceId) -> bool + Send + Sync>;
type Clock = Arc<dyn Fn() -> Duration + Send + Sync>;
type Observer = Arc<dyn Fn(&OomReport) + Send + Sync>;

/// What backs expandable segments.
enum Paging<B: Backend> {
    /// Pages of one size, created when mapped and destroyed when unmapped: policy `pytorch`.
    Pages(Box<dyn Pager<B::Error>>),
    /// Handles that change their place: policy `ours`.
    Handles(Box<dyn HandleStore<B::Error>>),
}

impl<B: Backend> Paging<B> {
    fn pager(&self) -> &dyn Pager<B::Error> {
        match self {
            Paging::Pages(pager) => &**pager,
            Paging::Handles(store) => &**store,
        }
    }
}

type AllocResult<T, B> = Result<T, AllocError<<B as Backend>::Error>>;

struct Shared<B: Backend> {
    /// Tells allocations of several allocators apart.
    id: u32,
    backend: Arc<B>,
    policy: Policy,
    /// As of construction; what the statistic `max_split_size` shows.
    max_split_at_start: Option<u64>,
    settings: Mutex<Settings>,
    devices: Vec<Arc<Device<B>>>,
    heaps: AppendTable<Arc<HeapCell<B>>>,
    directory: Directory,
    paging: Option<Paging<B>>,
    /// Asks the backend for its memory figures; not every backend that this type serves has them.
    memory: fn(&B, DeviceId) -> Option<DeviceMemory>,
    /// Looked at by growth only.
    clock: RwLock<Option<Clock>>,
    tracing: AtomicBool,
    sink: RwLock<Option<Arc<dyn TraceSink>>>,
    captures: Captures<B>,
    /// Numbers of the next pools; see [`PoolId`].
    next_user_pool: AtomicU64,
    next_capture_pool: AtomicU64,
    callbacks: Mutex<BTreeMap<String, Callback>>,
    observers: Mutex<Vec<Observer>>,
}

/// A caching allocator for device memory, generic over the backend.
///
/// Cheap to clone; clones are the same allocator. All methods may be called from any thread.
/// Requests that a cached block can serve touch nothing that another stream's requests touch (with
/// [`PeakMode::PerHeap`](crate::config::PeakMode::PerHeap)) and call the backend only while events
/// are pending.
///
/// When the last clone goes, pending events are waited for and everything is given back to the
/// backend, whatever is still allocated. A [`ShareHold`] counts as a clone.
pub struct CachingAllocator<B: Backend> {
    shared: Arc<Shared<B>>,
}

impl<B: Backend> Clone for CachingAllocator<B> {
    fn clone(&self) -> Self {
        CachingAllocator { shared: Arc::clone(&self.shared) }
    }
}

impl<B: Backend> std::fmt::Debug for CachingAllocator<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CachingAllocator")
            .field("policy", &self.shared.policy)
            .field("devices", &self.shared.devices.len())
            .finish_non_exhaustive()
    }
}

static NEXT_ID: AtomicU32 = AtomicU32::new(0);

impl<B: Backend + MemoryInfo> CachingAllocator<B> {
    /// An allocator for all devices of `backend`, of segments obtained whole.
    ///
    /// # Errors
    /// [`AllocError::NoVirtualMemory`] if the configuration asks for expandable segments;
    /// [`AllocError::Backend`] if the backend cannot tell its memory sizes.
    pub fn new(backend: B, config: Config) -> AllocResult<Self, B> {
        Self::build(Arc::new(backend), config, None)
    }

    /// An allocator that can also use expandable segments.
    ///
    /// # Errors
    /// [`AllocError::Backend`] if the backend cannot tell its memory sizes.
    pub fn with_virtual_memory(backend: B, config: Config) -> AllocResult<Self, B>
    where
        B: VirtualMemory,
    {
        let backend = Arc::new(backend);
        let paging = match config.policy {
            Policy::Pytorch => Paging::Pages(Box::new(PageStore::new(Arc::clone(&backend)))),
            Policy::Ours => Paging::Handles(Box::new(HandleTable::new(Arc::clone(&backend)))),
        };
        Self::build(backend, config, Some(paging))
    }

    fn build(backend: Arc<B>, config: Config, paging: Option<Paging<B>>) -> AllocResult<Self, B> {
        let expandable = config.settings.expandable_segments;
        if expandable == Some(true) && paging.is_none() {
            return Err(AllocError::NoVirtualMemory);
        }
        let mut devices = Vec::new();
        for index in 0..backend.device_count() {
            let memory = backend
                .memory(DeviceId::new(index))
                .map_err(|source| AllocError::Backend { op: BackendOp::Memory, source })?;
            devices.push(Arc::new(Device::new(memory.total, &config)));
        }
        Ok(CachingAllocator {
            shared: Arc::new(Shared {
                id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
                backend,
                policy: config.policy,
                max_split_at_start: config.settings.max_split_bytes,
                settings: Mutex::new(config.settings),
                devices,
                heaps: AppendTable::new(),
                directory: Directory::new(),
                paging,
                memory: |backend, device| backend.memory(device).ok(),
                clock: RwLock::new(None),
                tracing: AtomicBool::new(false),
                sink: RwLock::new(None),
                captures: Captures::new(),
                next_user_pool: AtomicU64::new(1),
                next_capture_pool: AtomicU64::new(1),
                callbacks: Mutex::new(BTreeMap::new()),
                observers: Mutex::new(Vec::new()),
            }),
        })
    }
}

/// The limit that a fraction of `total` bytes means; 1 is none (spec §2.13). PyTorch cuts off, which
/// can lose a byte of a limit that was turned into a fraction before; the nearest byte is that limit.
fn limit_of_fraction(policy: Policy, fraction: f64, total: u64) -> u64 {
    let bytes = fraction * total as f64;
    match policy {
        _ if fraction >= 1.0 => u64::MAX,
        Policy::Pytorch => bytes as u64,
        Policy::Ours => bytes.round() as u64,
    }
}

impl<B: Backend> Device<B> {
    fn new(total: u64, config: &Config) -> Self {
        let exact = match config.peaks {
            crate::config::PeakMode::Exact => Some(Lock::new(StatTable::default())),
            crate::config::PeakMode::PerHeap => None,
        };
        let limit = limit_of_fraction(config.policy, config.settings.memory_fraction, total);
        Device {
            total,
            limit: AtomicU64::new(limit),
            reserved: AtomicU64::new(0),
            reserved_peak: AtomicU64::new(0),
            needed_peak: AtomicU64::new(0),
            pace: paging::Pace::default(),
            counters: Mutex::new(Counters::default()),
            exact,
            heaps: RwLock::new(Heaps::new()),
            pools: Pools::new(),
            growth: ReentrantMutex::new(()),
            paging: AtomicBool::new(false),
            events: EventQueue::new(config.event_order),
        }
    }
}

impl<B: Backend> CachingAllocator<B> {
    /// The backend.
    pub fn backend(&self) -> &B {
        &self.shared.backend
    }

    /// Which rules decide.
    pub fn policy(&self) -> Policy {
        self.shared.policy
    }

    /// A handle that keeps the heap of `stream` at hand.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`] if the stream's device is not the backend's.
    pub fn stream(&self, stream: &B::Stream) -> AllocResult<StreamHandle<B>, B> {
        let cell = self.shared.heap_of(stream)?;
        Ok(StreamHandle { shared: Arc::clone(&self.shared), cell, pool: None })
    }

    /// Allocates `bytes` for use on `stream`. 0 bytes get the null address and no memory.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] after everything that could have avoided it was tried,
    /// [`AllocError::TooLarge`] from 2^60 bytes on, [`AllocError::NoSuchDevice`], or
    /// [`AllocError::Backend`] if a backend call failed for another reason.
    pub fn allocate(&self, bytes: u64, stream: &B::Stream) -> AllocResult<Allocation, B> {
        let cell = self.shared.heap_of(stream)?;
        self.shared.allocate(&cell, bytes)
    }

    /// Gives a block back. Work queued so far on its own stream may still use it; work on other
    /// streams only if they were named by [`record_stream`](Self::record_stream).
    ///
    /// # Errors
    /// Hands the allocation back, still valid: [`AllocError::ForeignAllocation`], or
    /// [`AllocError::Backend`] if an event cannot be recorded. [`AllocError::UnknownAddress`] if it was
    /// freed by address before.
    pub fn free(&self, allocation: Allocation) -> Result<(), FreeError<Allocation, B::Error>> {
        self.shared.free(&allocation).map_err(|error| FreeError { allocation, error })
    }

    /// Declares that work queued on `stream` so far or until the free uses the block. Its memory is
    /// not reused before that work is done. The block's own stream is ignored.
    ///
    /// # Errors
    /// [`AllocError::ForeignAllocation`]; [`AllocError::UnknownAddress`] if it was freed by address;
    /// [`AllocError::NoSuchDevice`] if the stream's device is not the backend's.
    pub fn record_stream(&self, allocation: &Allocation, stream: &B::Stream) -> AllocResult<(), B> {
        self.shared.device(stream.device())?;
        self.shared.record_stream(allocation, stream)
    }

    /// [`allocate`](Self::allocate) for callers that keep addresses only.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_raw(&self, bytes: u64, stream: &B::Stream) -> AllocResult<Addr, B> {
        self.allocate(bytes, stream).map(|allocation| allocation.addr)
    }

    /// [`free`](Self::free) by address. [`Addr::NULL`] is nothing.
    ///
    /// # Errors
    /// [`AllocError::UnknownAddress`] unless a block that is handed out starts at `addr`;
    /// [`AllocError::Backend`] if an event cannot be recorded.
    pub fn free_raw(&self, addr: Addr) -> AllocResult<(), B> {
        if addr.is_null() {
            return Ok(());
        }
        self.shared.free_raw(addr)
    }

    /// [`record_stream`](Self::record_stream) by address. [`Addr::NULL`] is nothing.
    ///
    /// # Errors
    /// [`AllocError::UnknownAddress`] unless a block that is handed out starts at `addr`;
    /// [`AllocError::NoSuchDevice`] if the stream's device is not the backend's.
    pub fn record_stream_raw(&self, addr: Addr, stream: &B::Stream) -> AllocResult<(), B> {
        self.shared.device(stream.device())?;
        if addr.is_null() {
            return Ok(());
        }
        self.shared.record_stream_raw(addr, stream)
    }

    /// Waits for all pending events and gives all cached memory of every device back. Does nothing
    /// while a graph is being captured: giving memory back would spoil the capture.
    ///
    /// # Errors
    /// [`AllocError::Backend`] at the first call that fails; what was given back before stays so.
    pub fn empty_cache(&self) -> AllocResult<(), B> {
        for index in 0..self.shared.devices.len() {
            let mut op = self.shared.begin();
            self.shared.empty_cache(DeviceId::new(index as u16), &mut op.trace)?;
        }
        Ok(())
    }

    /// The statistics of one device.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`].
    pub fn stats(&self, device: DeviceId) -> AllocResult<DeviceStats, B> {
        let shared = self.shared.device(device)?;
        let mut table = self.shared.stat_table(device);
        table.set_reserved_peak(shared.reserved_peak.load(Ordering::Relaxed));
        Ok(DeviceStats {
            table,
            counters: *shared.counters.lock(),
            max_split_size: self.shared.max_split_at_start.map_or(-1, |bytes| bytes as i64),
        })
    }

    /// Sets every peak to its current value.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`].
    pub fn reset_peak_stats(&self, device: DeviceId) -> AllocResult<(), B> {
        let shared = self.shared.device(device)?;
        shared.reserved_peak.store(shared.reserved(), Ordering::Relaxed);
        self.shared.each_stat_table(device, StatTable::reset_peak);
        Ok(())
    }

    /// Sets every accumulated value and counter to 0.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`].
    pub fn reset_accumulated_stats(&self, device: DeviceId) -> AllocResult<(), B> {
        *self.shared.device(device)?.counters.lock() = Counters::default();
        self.shared.each_stat_table(device, StatTable::reset_accumulated);
        Ok(())
    }

    /// Limits the bytes reserved on `device`; `None` lifts the limit. Memory above a lowered limit
    /// stays; the device just cannot grow.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`].
    pub fn set_memory_limit(&self, device: DeviceId, bytes: Option<u64>) -> AllocResult<(), B> {
        let device = self.shared.device(device)?;
        device.limit.store(bytes.unwrap_or(u64::MAX), Ordering::Relaxed);
        self.shared.renew_rules();
        Ok(())
    }

    /// Limits `device` to a fraction of its memory; 1 lifts the limit.
    ///
    /// # Errors
    /// [`AllocError::InvalidArgument`] unless the fraction is from 0 to 1;
    /// [`AllocError::NoSuchDevice`].
    pub fn set_memory_fraction(&self, device: DeviceId, fraction: f64) -> AllocResult<(), B> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(AllocError::InvalidArgument {
                what: "memory fraction",
                why: format!("{fraction} is not from 0 to 1"),
            });
        }
        let total = self.shared.device(device)?.total;
        let limit = limit_of_fraction(self.policy(), fraction, total);
        self.set_memory_limit(device, (limit != u64::MAX).then_some(limit))
    }

    /// The fraction of its memory that `device` is limited to; 1 without a limit.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`].
    pub fn memory_fraction(&self, device: DeviceId) -> AllocResult<f64, B> {
        let device = self.shared.device(device)?;
        Ok(device.limit().map_or(1.0, |limit| limit as f64 / device.total as f64))
    }

    /// A copy of the settings in force.
    pub fn settings(&self) -> Settings {
        self.shared.settings.lock().clone()
    }

    /// Replaces the settings. Blocks and cached memory stay as they are; `memory_fraction` is only
    /// read at construction, as upstream.
    ///
    /// # Errors
    /// [`AllocError::NoVirtualMemory`] if expandable segments are asked for and cannot be had.
    pub fn set_settings(&self, settings: Settings) -> AllocResult<(), B> {
        if settings.expandable_segments == Some(true) && self.shared.paging.is_none() {
            return Err(AllocError::NoVirtualMemory);
        }
        *self.shared.settings.lock() = settings;
        self.shared.renew_rules();
        Ok(())
    }

    /// Whether requests use and grow expandable segments now.
    pub fn expandable_segments(&self) -> bool {
        self.shared.expands(&self.shared.settings.lock())
    }

    /// Turns expandable segments on or off for later requests (spec §4.9).
    ///
    /// # Errors
    /// [`AllocError::NoVirtualMemory`].
    pub fn set_expandable_segments(&self, on: bool) -> AllocResult<(), B> {
        self.set_settings(Settings { expandable_segments: Some(on), ..self.settings() })
    }

    /// Sends every action from now on to `sink`, or to nobody.
    pub fn set_trace_sink(&self, sink: Option<Arc<dyn TraceSink>>) {
        let mut current = self.shared.sink.write();
        self.shared.tracing.store(sink.is_some(), Ordering::Relaxed);
        *current = sink;
    }

    /// Gives growth of policy `ours` a clock: time since any moment, never running backwards. With one,
    /// moving memory takes at most about the share `ours_stall_share` of the time that passes; beyond,
    /// new memory is taken instead, up to `ours_hurry_max` more than is needed. Without one, as after
    /// construction, memory is moved however long it takes, so that the same calls give the same
    /// result. Called on misses only, with no heap lock held.
    ///
    /// ```
    /// # use alloc_core::{CachingAllocator, backend::Backend};
    /// # fn example<B: Backend>(allocator: &CachingAllocator<B>) {
    /// let begin = std::time::Instant::now();
    /// allocator.set_clock(move || begin.elapsed());
    /// # }
    /// ```
    pub fn set_clock(&self, clock: impl Fn() -> Duration + Send + Sync + 'static) {
        *self.shared.clock.write() = Some(Arc::new(clock));
    }

    /// Registers a callback that is asked to free memory when a request finds no cached block;
    /// callbacks run in order of their names. It returns whether the search should be repeated. It
    /// may call the allocator; callbacks do not run again inside a callback. Replaces one of the
    /// same name.
    pub fn add_free_memory_callback(
        &self,
        name: impl Into<String>,
        callback: impl Fn(DeviceId) -> bool + Send + Sync + 'static,
    ) {
        self.shared.callbacks.lock().insert(name.into(), Arc::new(callback));
    }

    /// Removes a callback. Returns whether there was one.
    pub fn remove_free_memory_callback(&self, name: &str) -> bool {
        self.shared.callbacks.lock().remove(name).is_some()
    }

    /// Registers an observer that is told of every out-of-memory before the caller is.
    pub fn add_oom_observer(&self, observer: impl Fn(&OomReport) + Send + Sync + 'static) {
        self.shared.observers.lock().push(Arc::new(observer));
    }

    /// The block that is handed out at `addr`, or `None`.
    pub fn locate(&self, addr: Addr) -> Option<Located> {
        self.shared.locate(addr)
    }
}

/// What is known of a block that is handed out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Located {
    /// Its device.
    pub device: DeviceId,
    /// Its pool.
    pub pool: PoolId,
    /// The stream that it was allocated for.
    pub stream: StreamId,
    /// Bytes of the block.
    pub bytes: u64,
    /// Bytes asked for.
    pub requested: u64,
    /// First address of its segment.
    pub segment: Addr,
}

/// Allocates for one stream without looking its heap up.
pub struct StreamHandle<B: Backend> {
    shared: Arc<Shared<B>>,
    cell: Arc<HeapCell<B>>,
    /// Keeps the pool of the heap, if it is a private one.
    pool: Option<PoolRef<B>>,
}

impl<B: Backend> Clone for StreamHandle<B> {
    fn clone(&self) -> Self {
        let (shared, cell) = (Arc::clone(&self.shared), Arc::clone(&self.cell));
        StreamHandle { shared, cell, pool: self.pool.clone() }
    }
}

impl<B: Backend> std::fmt::Debug for StreamHandle<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamHandle").field("stream", &self.cell.stream.id()).finish()
    }
}

impl<B: Backend> StreamHandle<B> {
    /// The stream.
    pub fn stream(&self) -> &B::Stream {
        &self.cell.stream
    }

    /// As [`CachingAllocator::allocate`] on this stream.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn allocate(&self, bytes: u64) -> AllocResult<Allocation, B> {
        self.shared.allocate(&self.cell, bytes)
    }

    /// As [`CachingAllocator::free`]; the block may be of any stream.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn free(&self, allocation: Allocation) -> Result<(), FreeError<Allocation, B::Error>> {
        let result = match allocation.block {
            // No need to look the heap up.
            Some(block) if allocation.heap == self.cell.index => {
                self.shared.free_here(&self.cell, block, &allocation)
            }
            _ => self.shared.free(&allocation),
        };
        result.map_err(|error| FreeError { allocation, error })
    }
}

/// One call of a client. Hands the trace over when it ends, every lock being given back by then.
struct Op<'a, B: Backend> {
    shared: &'a Shared<B>,
    trace: TraceBuffer,
}

impl<B: Backend> Drop for Op<'_, B> {
    fn drop(&mut self) {
        self.shared.deliver(&mut self.trace);
    }
}

impl<B: Backend> Shared<B> {
    fn begin(&self) -> Op<'_, B> {
        Op { shared: self, trace: TraceBuffer::new(self.tracing.load(Ordering::Relaxed)) }
    }

    #[inline]
    fn deliver(&self, trace: &mut TraceBuffer) {
        if !trace.is_empty() {
            self.deliver_entries(trace);
        }
    }

    #[cold]
    fn deliver_entries(&self, trace: &mut TraceBuffer) {
        let sink = self.sink.read().clone();
        if let Some(sink) = sink {
            trace.deliver(&*sink);
        }
    }

    fn device(&self, device: DeviceId) -> AllocResult<&Device<B>, B> {
        let found = self.devices.get(device.index()).map(|device| &**device);
        found.ok_or(AllocError::NoSuchDevice { device, count: self.devices.len() as u16 })
    }

    /// The default-pool heap of a stream, made on first use.
    fn heap_of(&self, stream: &B::Stream) -> AllocResult<Arc<HeapCell<B>>, B> {
        let device = self.device(stream.device())?;
        Ok(self.heap_in(device.pools.default_pool(), stream))
    }

    /// The heap of a pool on a stream of its device, made on first use. The pool must not end
    /// meanwhile.
    fn heap_in(&self, pool: &Arc<Pool>, stream: &B::Stream) -> Arc<HeapCell<B>> {
        let device = &self.devices[stream.device().index()];
        let key = (pool.id(), stream.id());
        if let Some(cell) = device.heaps.read().by_owner.get(&key) {
            return Arc::clone(cell);
        }
        device.events.note_stream(stream.id());
        let source = device.pools.source_of(pool);
        let mut heaps = device.heaps.write();
        let Heaps { by_owner, vacant } = &mut *heaps;
        let cell = by_owner.entry(key).or_insert_with(|| {
            let private = pool.id() != PoolId::DEFAULT;
            let vacant = vacant.get_mut(&stream.id()).filter(|_| private).and_then(Vec::pop);
            match vacant {
                Some(cell) => {
                    self.move_in(&cell, pool, source);
                    cell
                }
                None => {
                    let make = |index| Arc::new(self.new_heap(index, stream, pool, source));
                    Arc::clone(self.heaps.push(make))
                }
            }
        });
        Arc::clone(cell)
    }

    fn new_heap(
        &self,
        index: u32,
        stream: &B::Stream,
        pool: &Arc<Pool>,
        source: OwnSource<B>,
    ) -> HeapCell<B> {
        let device = stream.device();
        let home = Arc::clone(&self.devices[device.index()]);
        let rules = self.rules_for(device, &source, &self.settings.lock());
        HeapCell {
            index,
            device,
            private: pool.id() != PoolId::DEFAULT,
            stream: stream.clone(),
            stream_id: stream.id(),
            home,
            mark: Mutex::new(None),
            view_mark: Mutex::new(None),
            state: Lock::new(HeapState {
                body: HeapBody {
                    index,
                    heap: Heap::new(device, stream.id(), Arc::clone(&pool.shared), rules),
                    pool: Arc::clone(pool),
                    source,
                    tokens: HashMap::new(),
                    uses: HashMap::new(),
                    shares: HashMap::new(),
                },
                stats: StatTable::default(),
            }),
        }
    }

    /// Gives an empty heap whose pool has ended to another pool.
    fn move_in(&self, cell: &HeapCell<B>, pool: &Arc<Pool>, source: OwnSource<B>) {
        let rules = self.rules_for(cell.device, &source, &self.settings.lock());
        let mut state = cell.state.lock();
        state.body.pool = Arc::clone(pool);
        state.body.source = source;
        state.body.heap.pool = Arc::clone(&pool.shared);
        state.body.heap.rules = rules;
    }

    /// The rules for a heap of memory from `source`.
    fn rules_for(&self, device: DeviceId, source: &OwnSource<B>, settings: &Settings) -> Rules {
        let limited = self.devices[device.index()].limit().is_some();
        let expandable = match source.as_deref() {
            None => self.expands(settings),
            Some(source) => matches!(source, Source::Pages(_)),
        };
        Rules::new(self.policy, settings, limited, expandable)
    }

    /// Whether requests use and grow expandable segments, but in pools with a source of their own.
    fn expands(&self, settings: &Settings) -> bool {
        let wanted = settings.expandable_segments.unwrap_or(self.policy == Policy::Ours);
        wanted && self.paging.is_some()
    }

    /// Gives every heap the rules that follow from settings and limits.
    fn renew_rules(&self) {
        let settings = self.settings.lock().clone();
        for cell in self.heaps.iter() {
            let rules = self.rules_for(cell.device, &cell.owner().1, &settings);
            cell.state.lock().body.heap.rules = rules;
        }
    }

    /// Runs `change` under the lock of a heap, with the table that its statistics go to.
    fn edit<R>(
        &self,
        cell: &HeapCell<B>,
        trace: &mut TraceBuffer,
        change: impl FnOnce(&mut HeapBody<B>, &mut Ledger<'_>) -> R,
    ) -> R {
        cell.edit(Some(trace), change)
    }

    fn stat_table(&self, device: DeviceId) -> StatTable {
        let mut sum = StatTable::default();
        self.each_stat_table(device, |table| sum.add(table));
        sum
    }

    fn each_stat_table(&self, device: DeviceId, mut f: impl FnMut(&mut StatTable)) {
        let device = &self.devices[device.index()];
        if let Some(exact) = &device.exact {
            return f(&mut exact.lock());
        }
        for cell in device.counting_heaps() {
            f(&mut cell.state.lock().stats);
        }
    }

    /// The heap and block id of the block handed out at exactly `addr`.
    fn find_live(&self, addr: Addr) -> Option<(&Arc<HeapCell<B>>, BlockId)> {
        let owner = self.directory.owner(addr)?;
        let cell = self.heaps.get(owner.heap)?;
        let state = cell.state.lock();
        // The segment may have been given back since the directory was read.
        let segment = state.body.heap.segments.get(owner.segment)?;
        if addr < segment.base || addr - segment.base >= segment.bytes {
            return None;
        }
        let index = segment.live_at(addr)?;
        let blocks = &state.body.heap.blocks;
        let block = &blocks[index];
        let live = block.state == BlockState::Live && block.addr == addr;
        live.then(|| (cell, blocks.id(index)))
    }

    fn locate(&self, addr: Addr) -> Option<Located> {
        let (cell, id) = self.find_live(addr)?;
        let state = cell.state.lock();
        let heap = &state.body.heap;
        let block = &heap.blocks[heap.blocks.resolve(id)?];
        Some(Located {
            device: cell.device,
            pool: heap.pool.id,
            stream: heap.stream,
            bytes: block.bytes,
            requested: block.requested,
            segment: heap.segments[block.segment].base,
        })
    }
}
