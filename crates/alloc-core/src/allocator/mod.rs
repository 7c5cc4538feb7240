//! The caching allocator: what its parts share. The calls of a client are in `face`.
//!
//! Locks, outermost first: growth (one per device, re-entrant) → pools → heaps of a device → exact
//! peaks → heap. The event queue, counters, pager and settings have leaf locks. Who holds the lock of
//! exact peaks may hold several heaps; anybody else holds one. Backend calls, callbacks, observers and the
//! trace sink run with none of them held, except that growth and release hold the growth lock, which
//! no hit ever takes.

mod allocate;
mod allocation;
mod captures;
mod check;
mod device;
mod face;
mod free;
mod grow;
mod ladder;
mod oom;
mod paging;
mod peaks;
mod pools;
mod reclaim;
mod shards;
mod share;
mod snapshot;
mod thread;

pub use allocation::Allocation;
pub use captures::{CaptureError, GraphMemory, GraphState};
pub use check::Violation;
pub use face::{CachingAllocator, Located, StreamHandle};
pub use pools::{
    Checkpoint, MemPool, PageSource, PoolInfo, PoolOptions, PoolPin, PoolRef, PoolScope, Restored,
    ScopeFilter, SegmentSource, SourceError, StaleBlock, ThreadScope,
};
pub use share::{Export, ShareHold};
pub use snapshot::{BlockSnapshot, BlockStatus, SegmentSnapshot, Snapshot};

use crate::backend::{Backend, DeviceMemory, Stream};
use crate::block::BlockId;
use crate::config::{Policy, Rules, Settings};
use crate::directory::Directory;
use crate::error::{AllocError, OomReport};
use crate::handles::HandleStore;
use crate::heap::{Heap, Ledger, SegmentId};
use crate::padded::Padded;
use crate::pager::Pager;
use crate::stats::StatTable;
use crate::stream_index::StreamIndex;
use crate::sync::{Mutex, RwLock, ShortLock};
use crate::table::AppendTable;
use crate::trace::{TraceBuffer, TraceSink};
use crate::units::{Addr, DeviceId, PoolId};
use allocation::HeapName;
use captures::Captures;
use device::{Device, HeapBody, HeapCell, HeapState, Heaps, Use};
use pools::{OwnSource, Pool, Source};
use shards::{Collisions, Shards};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

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
    /// The heaps of the default pools, which stay as long as the allocator.
    by_stream: StreamIndex<Arc<HeapCell<B>>>,
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

    /// The default-pool heap of a stream, made on first use. Takes no lock but then.
    #[inline]
    fn heap_of(&self, stream: &B::Stream) -> AllocResult<&Arc<HeapCell<B>>, B> {
        match self.by_stream.get(stream.device(), stream.id()) {
            Some(cell) => Ok(cell),
            None => self.first_heap_of(stream),
        }
    }

    #[cold]
    fn first_heap_of(&self, stream: &B::Stream) -> AllocResult<&Arc<HeapCell<B>>, B> {
        let device = self.device(stream.device())?;
        let cell = self.heap_in(device.pools.default_pool(), stream);
        let cell = self.heaps.get(cell.index).expect("I10: every heap is in the table");
        self.by_stream.insert(stream.device(), stream.id(), Arc::clone(cell));
        Ok(cell)
    }

    /// The heap of a pool on a stream of its device, made on first use. The pool must not end
    /// meanwhile.
    fn heap_in(&self, pool: &Arc<Pool>, stream: &B::Stream) -> Arc<HeapCell<B>> {
        self.heap_at(pool, stream, 0)
    }

    /// The heap of a pool on a stream that has the place `shard` among those, made on first use.
    fn heap_at(&self, pool: &Arc<Pool>, stream: &B::Stream, shard: u32) -> Arc<HeapCell<B>> {
        let device = &self.devices[stream.device().index()];
        let key = (pool.id(), stream.id(), shard);
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
                    let make = |index| Arc::new(self.new_heap(index, stream, shard, pool, source));
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
        shard: u32,
        pool: &Arc<Pool>,
        source: OwnSource<B>,
    ) -> HeapCell<B> {
        let device = stream.device();
        let home = Arc::clone(&self.devices[device.index()]);
        let stats = match home.peaks {
            Some(_) => StatTable::part(),
            None => StatTable::default(),
        };
        let rules = self.rules_for(device, &source, &self.settings.lock());
        let private = pool.id() != PoolId::DEFAULT;
        let name = HeapName::new(self.id, index);
        let shards = Shards::new();
        let rules = if shard > 0 { rules.of_shard() } else { rules };
        if !private && shard == 0 {
            shards.renew(&rules);
        }
        HeapCell {
            index,
            name,
            device,
            private,
            shard,
            shards,
            stream: stream.clone(),
            stream_id: stream.id(),
            home,
            mark: Mutex::new(None),
            view_mark: Mutex::new(None),
            state: Padded(ShortLock::new(HeapState {
                body: HeapBody {
                    name,
                    heap: Heap::new(device, stream.id(), Arc::clone(&pool.shared), rules),
                    pool: Arc::clone(pool),
                    source,
                    tokens: HashMap::new(),
                    uses: HashMap::new(),
                    shares: HashMap::new(),
                },
                stats,
                collisions: Collisions::default(),
            })),
        }
    }

    /// Gives an empty heap whose pool has ended to another pool.
    fn move_in(&self, cell: &HeapCell<B>, pool: &Arc<Pool>, source: OwnSource<B>) {
        let rules = self.rules_for(cell.device, &source, &self.settings.lock());
        let mut state = cell.lock();
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
            cell.renew(rules);
        }
    }

    /// Runs `change` under the lock of a heap, with the table that its statistics go to.
    fn edit<R>(
        &self,
        cell: &HeapCell<B>,
        trace: &mut TraceBuffer,
        change: impl FnOnce(&mut HeapBody<B>, &mut Ledger<'_>) -> R,
    ) -> R {
        cell.edit(trace, change)
    }

    /// The heap and block id of the block handed out at exactly `addr`.
    fn find_live(&self, addr: Addr) -> Option<(&Arc<HeapCell<B>>, BlockId)> {
        let (cell, segment) = self.owner_of(addr)?;
        let mut state = cell.state.lock();
        let index = state.body.heap.live_at(segment, addr)?;
        Some((cell, state.body.heap.blocks.id(index)))
    }

    /// The heap and segment that `addr` belongs to.
    #[inline]
    fn owner_of(&self, addr: Addr) -> Option<(&Arc<HeapCell<B>>, SegmentId)> {
        let owner = self.directory.owner(addr)?;
        let cell = self.heaps.get(owner.heap).expect("I11: the directory names heaps that exist");
        Some((cell, owner.segment))
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
