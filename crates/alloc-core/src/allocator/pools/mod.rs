//! Private pools: memory apart from the default pool, for whoever refers to it.
//!
//! A pool exists while somebody refers to it or it holds memory. Requests reach it through a
//! [scope](PoolScope), which claims requests of a thread, a stream or a capture, or through the
//! pool itself. Without references it serves nobody, but keeps its blocks; what is free of it goes
//! back with the next flush, and with its last segment the pool ends. Whoever names it before that
//! finds it as it is (`docs/adr/0014-pools.md`).

mod check;
mod checkpoint;
mod handle;
mod lend;
mod lifetime;
mod scope;
mod source;

pub(super) use check::check_pools;
pub use checkpoint::{Checkpoint, Restored, StaleBlock};
pub use handle::{MemPool, PoolPin, PoolRef};
pub use scope::{PoolScope, ScopeFilter, ThreadScope};
pub(super) use source::{OwnSource, Source, Token, is_same};
pub use source::{PageSource, SegmentSource, SourceError};

use super::{AllocResult, CachingAllocator, Shared};
use crate::backend::Backend;
use crate::error::AllocError;
use crate::heap::PoolShared;
use crate::sync::RwLock;
use crate::units::{DeviceId, PoolId};
use scope::Scopes;
use source::MakeSource;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// What a new pool is like.
#[non_exhaustive]
pub struct PoolOptions<B: Backend> {
    /// Blocks are whole segments.
    pub no_split: bool,
    /// What is free in the pool may serve requests of the default pool that would run out of memory
    /// otherwise.
    pub use_on_oom: bool,
    source: Option<MakeSource<B>>,
}

impl<B: Backend> PoolOptions<B> {
    /// The usual ones: blocks are split, the pool is for nobody else, and its memory comes from where
    /// that of the default pool comes from.
    pub const fn new() -> Self {
        PoolOptions { no_split: false, use_on_oom: false, source: None }
    }

    /// With blocks that are whole segments.
    #[must_use]
    pub fn no_split(self) -> Self {
        PoolOptions { no_split: true, ..self }
    }

    /// Open to requests of the default pool before they run out of memory.
    #[must_use]
    pub fn use_on_oom(self) -> Self {
        PoolOptions { use_on_oom: true, ..self }
    }
}

impl<B: Backend> Default for PoolOptions<B> {
    fn default() -> Self {
        PoolOptions::new()
    }
}

impl<B: Backend> Clone for PoolOptions<B> {
    fn clone(&self) -> Self {
        PoolOptions { source: self.source.clone(), ..*self }
    }
}

impl<B: Backend> fmt::Debug for PoolOptions<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolOptions")
            .field("no_split", &self.no_split)
            .field("use_on_oom", &self.use_on_oom)
            .field("own_source", &self.source.is_some())
            .finish()
    }
}

/// A pool of one device as the allocator holds it.
#[derive(Debug)]
pub(super) struct Pool {
    /// What the bookkeeping needs of it.
    pub(super) shared: Arc<PoolShared>,
    /// [`PoolRef`]s. Rises from 0 only under the lock of the registry, which is how a pool is
    /// revived.
    refs: AtomicUsize,
    /// Scopes and requests on their way: the pool cannot end meanwhile.
    holds: AtomicUsize,
    pins: AtomicUsize,
    use_on_oom: AtomicBool,
}

impl Pool {
    fn new<B: Backend>(id: PoolId, options: &PoolOptions<B>) -> Self {
        Pool {
            shared: Arc::new(PoolShared::new(id, options.no_split)),
            refs: AtomicUsize::new(0),
            holds: AtomicUsize::new(0),
            pins: AtomicUsize::new(0),
            use_on_oom: AtomicBool::new(options.use_on_oom),
        }
    }

    pub(super) fn id(&self) -> PoolId {
        self.shared.id
    }

    /// Whether nobody refers to it, so that a flush may take what is free.
    pub(super) fn is_unreferenced(&self) -> bool {
        self.refs.load(Ordering::Acquire) == 0
    }

    /// Whether its memory has to stay where it is. See [`PoolRef::pin`].
    pub(super) fn is_pinned(&self) -> bool {
        self.pins.load(Ordering::Acquire) > 0
    }

    fn is_idle(&self) -> bool {
        self.is_unreferenced() && self.holds.load(Ordering::Acquire) == 0
    }
}

/// Keeps a pool from ending.
#[derive(Debug)]
struct Hold(Arc<Pool>);

impl Hold {
    /// Only for a pool that cannot end now anyway.
    fn new(pool: &Arc<Pool>) -> Self {
        pool.holds.fetch_add(1, Ordering::AcqRel);
        Hold(Arc::clone(pool))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.holds.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A private pool that exists, and where its memory comes from.
struct Registered<B: Backend> {
    pool: Arc<Pool>,
    source: OwnSource<B>,
}

/// The pools of one device, and which requests go to them.
pub(super) struct Pools<B: Backend> {
    default: Arc<Pool>,
    /// The private ones.
    private: RwLock<BTreeMap<PoolId, Registered<B>>>,
    pub(super) scopes: Scopes<B>,
    /// See [`CachingAllocator::set_flush_order`].
    flush_order: RwLock<Vec<PoolId>>,
}

impl<B: Backend> Pools<B> {
    pub(super) fn new() -> Self {
        Pools {
            default: Arc::new(Pool::new(PoolId::DEFAULT, &PoolOptions::<B>::new())),
            private: RwLock::new(BTreeMap::new()),
            scopes: Scopes::new(),
            flush_order: RwLock::new(Vec::new()),
        }
    }

    /// Whether there is a private pool of this id.
    pub(super) fn exists(&self, id: PoolId) -> bool {
        self.private.read().contains_key(&id)
    }

    /// Whether there is a private pool of this id, and it is pinned.
    pub(super) fn is_pinned(&self, id: PoolId) -> bool {
        self.private.read().get(&id).is_some_and(|known| known.pool.is_pinned())
    }

    pub(super) fn default_pool(&self) -> &Arc<Pool> {
        &self.default
    }

    /// The private pools, by id.
    fn all(&self) -> Vec<Arc<Pool>> {
        self.private.read().values().map(|entry| Arc::clone(&entry.pool)).collect()
    }

    /// Where the memory of a pool comes from.
    pub(super) fn source_of(&self, pool: &Pool) -> OwnSource<B> {
        self.private.read().get(&pool.id()).and_then(|entry| entry.source.clone())
    }

    /// The sources of pools that have their own.
    pub(super) fn sources(&self) -> Vec<Arc<Source<B>>> {
        self.private.read().values().filter_map(|entry| entry.source.clone()).collect()
    }

    /// Leaves the sources alone from now on, whatever they are mapped under.
    pub(super) fn forget(&self) {
        std::mem::forget(std::mem::take(&mut *self.private.write()));
    }

    /// The private pools, in the order in which a flush visits them.
    pub(super) fn in_flush_order(&self) -> Vec<Arc<Pool>> {
        let mut pools = self.all();
        let order = self.flush_order.read();
        let place = |pool: &Arc<Pool>| order.iter().position(|id| *id == pool.id());
        // The sort is stable: pools without a place follow by id.
        pools.sort_by_key(|pool| place(pool).unwrap_or(usize::MAX));
        pools
    }
}

/// What is known of a private pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolInfo {
    /// Its id.
    pub id: PoolId,
    /// Those who refer to it: handles, and scopes in force.
    pub references: usize,
    /// Whether its memory has to stay; see [`PoolRef::pin`].
    pub pinned: bool,
    /// Whether its blocks are whole segments.
    pub no_split: bool,
    /// Whether it serves requests of the default pool that would run out of memory.
    pub use_on_oom: bool,
}

impl<B: Backend> CachingAllocator<B> {
    /// Makes a pool for a user, with an id `{0, n}` that no pool of this allocator had before.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`].
    pub fn create_pool(
        &self,
        device: DeviceId,
        options: PoolOptions<B>,
    ) -> AllocResult<MemPool<B>, B> {
        let next = || PoolId(0, self.shared.next_user_pool.fetch_add(1, Ordering::Relaxed));
        self.shared.create_pool(device, options, next).map(MemPool::new)
    }

    /// Makes a pool for a graph capture, with an id `{n, 0}` that no pool of this allocator had
    /// before.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`].
    pub fn create_capture_pool(&self, device: DeviceId) -> AllocResult<PoolRef<B>, B> {
        let next = || PoolId(self.shared.next_capture_pool.fetch_add(1, Ordering::Relaxed), 0);
        self.shared.create_pool(device, PoolOptions::new(), next)
    }

    /// Refers to the pool `id`: for fronts whose callers choose the ids. A pool that nobody refers to
    /// any more but that still holds memory is revived as it is, options included. If there is none,
    /// one is made with `options`.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`]; [`AllocError::InvalidArgument`] for the default pool, which
    /// belongs to everybody.
    pub fn open_pool(
        &self,
        device: DeviceId,
        id: PoolId,
        options: PoolOptions<B>,
    ) -> AllocResult<PoolRef<B>, B> {
        if id == PoolId::DEFAULT {
            return Err(AllocError::InvalidArgument {
                what: "pool id",
                why: "{0, 0} is the default pool; a private pool has another id".to_owned(),
            });
        }
        let mut pools = self.shared.device(device)?.pools.private.write();
        let entry = pools.entry(id).or_insert_with(|| self.shared.new_pool(id, &options));
        Ok(PoolRef::new(&self.shared, device, &entry.pool))
    }

    /// The private pools of `device`, by id; those that nobody refers to but that hold memory are
    /// among them.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`].
    pub fn pools(&self, device: DeviceId) -> AllocResult<Vec<PoolInfo>, B> {
        let pools = self.shared.device(device)?.pools.private.read();
        Ok(pools.values().map(|entry| info_of(&entry.pool)).collect())
    }

    /// In which order flushes of `device` visit the pools that nobody refers to: first those listed
    /// here, in this order, then the others by id. It shows in the order of what goes back to the
    /// backend and nowhere else; a recording of an allocator with another order can be met by it.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`].
    pub fn set_flush_order(&self, device: DeviceId, order: Vec<PoolId>) -> AllocResult<(), B> {
        *self.shared.device(device)?.pools.flush_order.write() = order;
        Ok(())
    }
}

fn info_of(pool: &Pool) -> PoolInfo {
    PoolInfo {
        id: pool.id(),
        references: pool.refs.load(Ordering::Acquire),
        pinned: pool.is_pinned(),
        no_split: pool.shared.no_split,
        use_on_oom: pool.use_on_oom.load(Ordering::Relaxed),
    }
}

impl<B: Backend> Shared<B> {
    fn create_pool(
        self: &Arc<Self>,
        device: DeviceId,
        options: PoolOptions<B>,
        next: impl Fn() -> PoolId,
    ) -> AllocResult<PoolRef<B>, B> {
        let mut pools = self.device(device)?.pools.private.write();
        // Fronts may have named pools themselves.
        let mut id = next();
        while pools.contains_key(&id) {
            id = next();
        }
        let entry = pools.entry(id).or_insert_with(|| self.new_pool(id, &options));
        Ok(PoolRef::new(self, device, &entry.pool))
    }

    fn new_pool(&self, id: PoolId, options: &PoolOptions<B>) -> Registered<B> {
        let make = options.source.as_ref();
        let source = make.map(|make| Arc::new(make(&self.backend, self.policy)));
        Registered { pool: Arc::new(Pool::new(id, options)), source }
    }
}
