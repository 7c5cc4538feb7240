//! The heaps of a device, and what they share.

use super::allocation::HeapName;
use super::paging;
use super::peaks::Peaks;
use super::pools::{OwnSource, Pool, Pools, Token};
use super::shards::{Collisions, Shards};
use crate::backend::{Backend, CaptureId};
use crate::block::BlockIdx;
use crate::config::{Config, PeakMode, Policy};
use crate::events::EventQueue;
use crate::heap::{Heap, Ledger, SegmentId};
use crate::padded::Padded;
use crate::stats::{Counters, Row, StatTable};
use crate::sync::{Mutex, ReentrantMutex, ReentrantMutexGuard, RwLock, ShortGuard, ShortLock};
use crate::trace::TraceBuffer;
use crate::units::{DeviceId, PoolId, StreamId};
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A heap as the allocator holds it: bookkeeping and backend tokens under one lock. Aligned so that
/// no two heaps share a cache line, nor a pair of lines that the processor fetches together.
#[repr(align(128))]
pub(crate) struct HeapCell<B: Backend> {
    /// Position in the allocator's table.
    pub(super) index: u32,
    /// The same with the number of the allocator: what allocations say.
    pub(super) name: HeapName,
    pub(super) device: DeviceId,
    pub(super) home: Arc<Device<B>>,
    /// Whether it belongs to a private pool. When that ends, the heap waits for another one.
    pub(super) private: bool,
    /// Its place among the heaps of its pool and stream; 0 is the one that requests come to.
    pub(super) shard: u32,
    pub(super) shards: Shards<B>,
    pub(super) stream: B::Stream,
    pub(super) stream_id: StreamId,
    /// Taken by itself to read or to hit; [`lock`](HeapCell::lock) shows all free memory. Apart from what
    /// is only read, which requests on their way to a shard do at any time.
    pub(super) state: Padded<ShortLock<HeapState<B>>>,
    /// An event on the stream, and the heap's clock when it was recorded: once it is reached, what
    /// was freed before is nobody's any more.
    pub(super) mark: Mutex<Option<(u32, B::Event)>>,
    /// The same for views of handles, with the epoch of their store.
    pub(super) view_mark: Mutex<Option<(u64, B::Event)>>,
}

/// What the lock of a heap guards.
pub(super) struct HeapState<B: Backend> {
    pub(super) body: HeapBody<B>,
    pub(super) stats: StatTable,
    pub(super) collisions: Collisions,
}

/// The bookkeeping of a heap together with the backend values that belong to it.
pub(super) struct HeapBody<B: Backend> {
    pub(super) name: HeapName,
    pub(super) heap: Heap,
    pub(super) pool: Arc<Pool>,
    pub(super) source: OwnSource<B>,
    /// Tokens of the segments obtained whole.
    pub(super) tokens: HashMap<SegmentId, Token<B>>,
    /// Uses of live blocks on streams other than the heap's own.
    pub(super) uses: HashMap<BlockIdx, SmallVec<[Use<B::Stream>; 2]>>,
    /// How many [`ShareHold`]s there are on a live or draining block, if any.
    pub(super) shares: HashMap<BlockIdx, u32>,
}

/// A use of a block on another stream than its heap's.
#[derive(Clone)]
pub(super) struct Use<S> {
    pub(super) stream: S,
    /// The capture that it is part of.
    pub(super) capture: Option<CaptureId>,
}

/// What the heaps of one device share.
pub(super) struct Device<B: Backend> {
    pub(super) total: u64,
    /// Bytes that may be reserved at most; `u64::MAX` is no limit.
    pub(super) limit: AtomicU64,
    /// Bytes obtained from the backend. Changes under the growth lock only.
    pub(super) reserved: AtomicU64,
    /// Most of them since the last reset of peaks; exact in both modes of [`PeakMode`].
    pub(super) reserved_peak: AtomicU64,
    /// Most bytes that were in use when memory was wanted; policy `ours` grows along it.
    pub(super) needed_peak: AtomicU64,
    /// Whether there is time to move memory.
    pub(super) pace: paging::Pace,
    pub(super) counters: Mutex<Counters>,
    /// The peaks of sums over heaps, where those must be exact.
    pub(super) peaks: Option<Peaks>,
    pub(super) heaps: RwLock<Heaps<B>>,
    pub(super) pools: Pools<B>,
    /// Held by whoever obtains memory from the backend or gives it back. Re-entrant, because a
    /// backend may call the allocator.
    growth: ReentrantMutex<()>,
    /// Whether the holder of the growth lock is mapping or unmapping pages. A backend that calls the
    /// allocator from there gets no pages mapped or unmapped.
    pub(super) paging: AtomicBool,
    pub(super) events: EventQueue<B>,
}

impl<B: Backend> HeapCell<B> {
    /// Takes the lock to look at free memory: all of it is in the free index.
    pub(super) fn lock(&self) -> ShortGuard<'_, HeapState<B>> {
        let mut state = self.state.lock();
        state.body.heap.settle();
        state
    }

    /// See [`Shared::edit`](super::Shared::edit).
    pub(super) fn edit<R>(
        &self,
        trace: &mut TraceBuffer,
        change: impl FnOnce(&mut HeapBody<B>, &mut Ledger<'_>) -> R,
    ) -> R {
        self.change(self.lock(), Some(trace), change)
    }

    /// [`edit`](Self::edit) by a hit, which leaves blocks that wait to be asked for again alone.
    #[inline]
    pub(super) fn hit<R>(
        &self,
        trace: Option<&mut TraceBuffer>,
        change: impl FnOnce(&mut HeapBody<B>, &mut Ledger<'_>) -> R,
    ) -> R {
        let state = self.state.lock_noting(|state| self.note_collision(state));
        self.change(state, trace, change)
    }

    #[inline]
    fn change<R>(
        &self,
        mut state: ShortGuard<'_, HeapState<B>>,
        trace: Option<&mut TraceBuffer>,
        change: impl FnOnce(&mut HeapBody<B>, &mut Ledger<'_>) -> R,
    ) -> R {
        let HeapState { body, stats, .. } = &mut *state;
        let result = change(body, &mut Ledger { stats, trace });
        if stats.has_risen() {
            self.find_room(state);
        }
        result
    }

    /// Figures rose above their ceilings.
    #[cold]
    #[inline(never)]
    fn find_room(&self, mut state: ShortGuard<'_, HeapState<B>>) {
        let risen = state.stats.take_risen();
        drop(state);
        self.home.find_room(self, risen);
    }

    pub(super) fn pool(&self) -> Arc<Pool> {
        Arc::clone(&self.state.lock().body.pool)
    }

    /// The pool, and where its memory comes from.
    pub(super) fn owner(&self) -> (Arc<Pool>, OwnSource<B>) {
        let state = self.state.lock();
        (Arc::clone(&state.body.pool), state.body.source.clone())
    }
}

/// The heaps of one device.
pub(super) struct Heaps<B: Backend> {
    /// In the order in which flushes walk them: the default pool first, streams by id, then shards.
    pub(super) by_owner: BTreeMap<(PoolId, StreamId, u32), Arc<HeapCell<B>>>,
    /// Heaps whose private pools have ended, by stream. They are empty, but their statistics count.
    pub(super) vacant: BTreeMap<StreamId, Vec<Arc<HeapCell<B>>>>,
}

impl<B: Backend> Heaps<B> {
    pub(super) const fn new() -> Self {
        Heaps { by_owner: BTreeMap::new(), vacant: BTreeMap::new() }
    }

    /// The heaps of one pool, by stream id.
    pub(super) fn of_pool(&self, pool: PoolId) -> impl Iterator<Item = &Arc<HeapCell<B>>> {
        self.within(pool, StreamId::new(0)..=StreamId::new(u64::MAX))
    }

    /// The heaps of one pool on some streams.
    pub(super) fn within(
        &self,
        pool: PoolId,
        streams: RangeInclusive<StreamId>,
    ) -> impl Iterator<Item = &Arc<HeapCell<B>>> {
        let range = (pool, *streams.start(), 0)..=(pool, *streams.end(), u32::MAX);
        self.by_owner.range(range).map(|(_, cell)| cell)
    }

    /// Every heap that statistics are kept in.
    pub(super) fn counting(&self) -> impl Iterator<Item = &Arc<HeapCell<B>>> {
        self.by_owner.values().chain(self.vacant.values().flatten())
    }

    /// Takes the heaps from a pool that has ended.
    pub(super) fn vacate(&mut self, pool: PoolId) {
        let streams: Vec<_> = self.of_pool(pool).map(|cell| cell.stream_id).collect();
        for stream in streams {
            if let Some(cell) = self.by_owner.remove(&(pool, stream, 0)) {
                cell.state.lock().body.source = None;
                self.vacant.entry(stream).or_default().push(cell);
            }
        }
    }
}

impl<B: Backend> Device<B> {
    pub(super) fn limit(&self) -> Option<u64> {
        let limit = self.limit.load(Ordering::Relaxed);
        (limit != u64::MAX).then_some(limit)
    }

    pub(super) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Takes the growth lock. Whoever has it may be waiting for an event that this thread has in hand,
    /// if it comes from a backend that was asked about that event; it is told not to.
    pub(super) fn lock_growth(&self) -> ReentrantMutexGuard<'_, ()> {
        if let Some(guard) = self.growth.try_lock() {
            return guard;
        }
        if self.events.is_empty() {
            return self.growth.lock();
        }
        self.events.set_waiting(true);
        let guard = self.growth.lock();
        self.events.set_waiting(false);
        guard
    }

    /// The right to map and unmap pages, under the growth lock; `None` from within a call of the
    /// backend that does so already.
    pub(super) fn begin_paging(&self) -> Option<PagingTurn<'_>> {
        (!self.paging.swap(true, Ordering::Relaxed)).then(|| PagingTurn(&self.paging))
    }

    /// The heaps, in flush order.
    pub(super) fn heaps(&self) -> Vec<Arc<HeapCell<B>>> {
        self.heaps.read().by_owner.values().cloned().collect()
    }

    /// The heaps of one pool, by stream id.
    pub(super) fn heaps_of(&self, pool: PoolId) -> Vec<Arc<HeapCell<B>>> {
        self.heaps.read().of_pool(pool).cloned().collect()
    }

    /// Every heap that statistics are kept in.
    pub(super) fn counting_heaps(&self) -> Vec<Arc<HeapCell<B>>> {
        self.heaps.read().counting().cloned().collect()
    }
}

/// See [`Device::begin_paging`].
pub(super) struct PagingTurn<'a>(&'a AtomicBool);

impl Drop for PagingTurn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// The limit that a fraction of `total` bytes means; 1 is none (spec §2.13). PyTorch cuts off, which
/// can lose a byte of a limit that was turned into a fraction before; the nearest byte is that limit.
pub(super) fn limit_of_fraction(policy: Policy, fraction: f64, total: u64) -> u64 {
    let bytes = fraction * total as f64;
    match policy {
        _ if fraction >= 1.0 => u64::MAX,
        Policy::Pytorch => bytes as u64,
        Policy::Ours => bytes.round() as u64,
    }
}

impl<B: Backend> Device<B> {
    pub(super) fn new(total: u64, config: &Config) -> Self {
        let peaks = match config.peaks {
            PeakMode::Exact => Some(Mutex::new([0; Row::COUNT])),
            PeakMode::PerHeap => None,
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
            peaks,
            heaps: RwLock::new(Heaps::new()),
            pools: Pools::new(),
            growth: ReentrantMutex::new(()),
            paging: AtomicBool::new(false),
            events: EventQueue::new(config.event_order),
        }
    }
}
