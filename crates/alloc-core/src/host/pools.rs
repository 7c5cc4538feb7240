//! Private pools: memory for the life of a captured graph.

use super::home::BlockRef;
use super::store::Store;
use crate::sync::{Mutex, RwLock};
use crate::units::{PoolId, StreamId};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The slot of the default pool.
pub(crate) const DEFAULT: u32 = 0;

/// A freed block that captured work on a stream may still touch.
#[derive(Clone, Debug)]
pub(crate) struct Held<S> {
    pub(crate) stream: S,
    pub(crate) block: BlockRef,
    pub(crate) bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Pool<S> {
    /// Never used for another pool again.
    pub(crate) slot: u32,
    pub(crate) id: PoolId,
    pub(crate) store: Store<S>,
    graphs: Mutex<Graphs<S>>,
}

#[derive(Debug)]
struct Graphs<S> {
    /// Captures that use the pool and were not released. The default pool counts as used for ever.
    uses: u32,
    held: Vec<Held<S>>,
}

impl<S> Pool<S> {
    fn new(slot: u32, id: PoolId, store: Store<S>) -> Self {
        Pool { slot, id, store, graphs: Mutex::new(Graphs { uses: 1, held: Vec::new() }) }
    }

    pub(crate) fn is_released(&self) -> bool {
        self.graphs.lock().uses == 0
    }

    /// Keeps a freed block until the pool is released. Hands it back if it is released already.
    pub(crate) fn hold(&self, held: Held<S>) -> Result<(), Held<S>> {
        let mut graphs = self.graphs.lock();
        if graphs.uses == 0 {
            return Err(held);
        }
        graphs.held.push(held);
        Ok(())
    }

    /// Visits the held blocks under the lock.
    pub(crate) fn each_held(&self, mut visit: impl FnMut(BlockRef)) {
        self.graphs.lock().held.iter().for_each(|held| visit(held.block));
    }
}

/// Says whether a stream belongs to a capture.
pub(crate) type Filter = Arc<dyn Fn(StreamId) -> bool + Send + Sync>;

struct Capture<S> {
    pool: Arc<Pool<S>>,
    filter: Filter,
}

impl<S> Clone for Capture<S> {
    fn clone(&self) -> Self {
        Capture { pool: Arc::clone(&self.pool), filter: Arc::clone(&self.filter) }
    }
}

pub(crate) struct PoolTable<S> {
    default: Pool<S>,
    private: RwLock<Private<S>>,
    /// Captures underway, in the order in which they began.
    captures: RwLock<Vec<Capture<S>>>,
    any_capture: AtomicBool,
}

#[derive(Debug)]
struct Private<S> {
    /// All private pools that have memory or a graph.
    by_slot: BTreeMap<u32, Arc<Pool<S>>>,
    /// The slots of those that have a graph.
    in_use: BTreeMap<PoolId, u32>,
    next_slot: u32,
}

impl<S> fmt::Debug for PoolTable<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolTable").field("captures", &self.captures.read().len()).finish()
    }
}

/// Why a pool was not begun, ended or released.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PoolError {
    Unknown,
    IsRecording,
    IsNotRecording,
}

impl<S> PoolTable<S> {
    pub(crate) fn new(store: Store<S>) -> Self {
        let private =
            Private { by_slot: BTreeMap::new(), in_use: BTreeMap::new(), next_slot: DEFAULT + 1 };
        PoolTable {
            default: Pool::new(DEFAULT, PoolId::DEFAULT, store),
            private: RwLock::new(private),
            captures: RwLock::new(Vec::new()),
            any_capture: AtomicBool::new(false),
        }
    }

    pub(crate) fn default_pool(&self) -> &Pool<S> {
        &self.default
    }

    /// Calls `f` with the pool of a slot, if it still exists. No lock is held meanwhile.
    #[inline]
    pub(crate) fn with<R>(&self, slot: u32, f: impl FnOnce(&Pool<S>) -> R) -> Option<R> {
        if slot == DEFAULT { Some(f(&self.default)) } else { self.with_private(slot, f) }
    }

    #[cold]
    fn with_private<R>(&self, slot: u32, f: impl FnOnce(&Pool<S>) -> R) -> Option<R> {
        let pool = self.private.read().by_slot.get(&slot).cloned()?;
        Some(f(&pool))
    }

    /// The private pools, oldest first.
    pub(crate) fn private(&self) -> Vec<Arc<Pool<S>>> {
        self.private.read().by_slot.values().cloned().collect()
    }

    /// The private pool that serves a stream now: that of the first capture whose filter accepts it.
    pub(crate) fn capturing(&self, stream: StreamId) -> Option<Arc<Pool<S>>> {
        if !self.any_capture.load(Ordering::Relaxed) {
            return None;
        }
        // The filters are foreign code, so they run on a copy, after the lock is released.
        let captures = self.captures.read().clone();
        captures.into_iter().find(|capture| (capture.filter)(stream)).map(|capture| capture.pool)
    }

    /// Begins a capture into a pool. Its store is made by `store` if no graph uses that id yet.
    pub(crate) fn begin(
        &self,
        id: PoolId,
        filter: Filter,
        store: impl FnOnce() -> Store<S>,
    ) -> Result<(), PoolError> {
        let mut captures = self.captures.write();
        if captures.iter().any(|capture| capture.pool.id == id) {
            return Err(PoolError::IsRecording);
        }
        let pool = self.private.write().pool_for(id, store);
        captures.push(Capture { pool, filter });
        self.any_capture.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Ends the capture into a pool.
    pub(crate) fn end(&self, id: PoolId) -> Result<(), PoolError> {
        let mut captures = self.captures.write();
        let found = captures.iter().position(|capture| capture.pool.id == id);
        let at = found.ok_or(PoolError::IsNotRecording)?;
        captures.remove(at);
        self.any_capture.store(!captures.is_empty(), Ordering::Relaxed);
        Ok(())
    }

    /// Ends one graph's use of a pool. After the last one the pool and its held blocks come back.
    #[expect(clippy::type_complexity, reason = "named at its only caller")]
    pub(crate) fn release(
        &self,
        id: PoolId,
    ) -> Result<Option<(Arc<Pool<S>>, Vec<Held<S>>)>, PoolError> {
        let captures = self.captures.read();
        let mut private = self.private.write();
        let slot = *private.in_use.get(&id).ok_or(PoolError::Unknown)?;
        let pool = Arc::clone(&private.by_slot[&slot]);
        let mut graphs = pool.graphs.lock();
        if graphs.uses > 1 {
            graphs.uses -= 1;
            return Ok(None);
        }
        if captures.iter().any(|capture| capture.pool.id == id) {
            return Err(PoolError::IsRecording);
        }
        graphs.uses = 0;
        private.in_use.remove(&id);
        let held = std::mem::take(&mut graphs.held);
        drop(graphs);
        Ok(Some((pool, held)))
    }

    /// Forgets a released pool that has no memory left.
    pub(crate) fn forget(&self, slot: u32) {
        let pool = self.private.write().by_slot.remove(&slot);
        // Dropped without the lock, as it may hold the last reference to a stream.
        drop(pool);
    }
}

impl<S> Private<S> {
    fn pool_for(&mut self, id: PoolId, store: impl FnOnce() -> Store<S>) -> Arc<Pool<S>> {
        if let Some(slot) = self.in_use.get(&id) {
            let pool = Arc::clone(&self.by_slot[slot]);
            pool.graphs.lock().uses += 1;
            return pool;
        }
        let slot = self.next_slot;
        self.next_slot += 1;
        let pool = Arc::new(Pool::new(slot, id, store()));
        self.by_slot.insert(slot, Arc::clone(&pool));
        self.in_use.insert(id, slot);
        pool
    }
}
