//! Scopes: which requests go to which pool.

use super::{Hold, Pool, PoolRef};
use crate::allocator::thread::ThreadTag;
use crate::allocator::{AllocResult, HeapCell, Shared};
use crate::backend::{Backend, CaptureId, CaptureStatus, Stream};
use crate::sync::RwLock;
use crate::units::{DeviceId, StreamId};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Which requests a scope claims, of those on its pool's device.
pub enum ScopeFilter<S> {
    /// Those of the thread that opens the scope, on any stream.
    CurrentThread,
    /// Those on one stream, from any thread.
    Stream(StreamId),
    /// All.
    All,
    /// Those on streams that take part in this capture. See
    /// [`GraphMemory`](crate::GraphMemory), which opens such scopes.
    Capture(CaptureId),
    /// Those for whose stream this is true. Called on the requesting thread, with no lock held, for
    /// every request that no inner scope claims; it must not allocate from the same device.
    When(Arc<dyn Fn(&S) -> bool + Send + Sync>),
}

impl<S> Clone for ScopeFilter<S> {
    fn clone(&self) -> Self {
        match self {
            ScopeFilter::CurrentThread => ScopeFilter::CurrentThread,
            ScopeFilter::Stream(id) => ScopeFilter::Stream(*id),
            ScopeFilter::All => ScopeFilter::All,
            ScopeFilter::Capture(id) => ScopeFilter::Capture(*id),
            ScopeFilter::When(claims) => ScopeFilter::When(Arc::clone(claims)),
        }
    }
}

impl<S> fmt::Debug for ScopeFilter<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ScopeFilter::CurrentThread => f.write_str("CurrentThread"),
            ScopeFilter::Stream(id) => f.debug_tuple("Stream").field(id).finish(),
            ScopeFilter::All => f.write_str("All"),
            ScopeFilter::Capture(id) => f.debug_tuple("Capture").field(id).finish(),
            ScopeFilter::When(_) => f.write_str("When(..)"),
        }
    }
}

/// A scope in force.
struct Scope<S> {
    filter: ScopeFilter<S>,
    /// Who opened it.
    thread: ThreadTag,
    pool: Hold,
}

impl<S> fmt::Debug for Scope<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").field("filter", &self.filter).field("pool", &self.pool).finish()
    }
}

impl<S: Stream> Scope<S> {
    fn claims(&self, thread: ThreadTag, stream: &S, status: CaptureStatus) -> bool {
        match &self.filter {
            ScopeFilter::CurrentThread => self.thread == thread,
            ScopeFilter::Stream(id) => stream.id() == *id,
            ScopeFilter::All => true,
            ScopeFilter::Capture(id) => status == CaptureStatus::Active(*id),
            ScopeFilter::When(claims) => claims(stream),
        }
    }

    /// The bits of [`Scopes::mask`] of which a claimed request has one at least.
    fn mask(&self) -> u64 {
        match &self.filter {
            ScopeFilter::CurrentThread => bit(self.thread.number()),
            ScopeFilter::Stream(id) => bit(id.get()),
            ScopeFilter::All | ScopeFilter::Capture(_) | ScopeFilter::When(_) => u64::MAX,
        }
    }
}

/// One of 64 bits; close numbers have different ones.
const fn bit(number: u64) -> u64 {
    1 << (number % 64)
}

type ScopeList<S> = Arc<Vec<Arc<Scope<S>>>>;

/// The scopes in force on one device.
pub(in crate::allocator) struct Scopes<B: Backend> {
    /// A request that has none of these bits, by thread or by stream, is claimed by no scope; without
    /// scopes there are no bits. Read on every request, written when scopes come and go.
    mask: AtomicU64,
    /// Outermost first. Replaced, never changed, so that filters run without the lock.
    list: RwLock<ScopeList<B::Stream>>,
}

impl<B: Backend> Scopes<B> {
    pub(super) fn new() -> Self {
        Scopes { mask: AtomicU64::new(0), list: RwLock::default() }
    }

    /// Whether no scope is in force.
    #[inline]
    pub(in crate::allocator) fn is_empty(&self) -> bool {
        self.mask.load(Ordering::Relaxed) == 0
    }

    /// The scopes, if one of them may claim a request on `stream` from this thread.
    fn candidates(&self, thread: ThreadTag, stream: &B::Stream) -> Option<ScopeList<B::Stream>> {
        let bits = bit(thread.number()) | bit(stream.id().get());
        (self.mask.load(Ordering::Relaxed) & bits != 0).then(|| Arc::clone(&self.list.read()))
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Arc<Scope<B::Stream>>>)) {
        let mut list = self.list.write();
        change(Arc::make_mut(&mut list));
        let mask = list.iter().fold(0, |mask, scope| mask | scope.mask());
        self.mask.store(mask, Ordering::Relaxed);
    }

    /// The pools that scopes lead to. For checks.
    pub(super) fn pools(&self) -> Vec<Arc<Pool>> {
        self.list.read().iter().map(|scope| Arc::clone(&scope.pool.0)).collect()
    }

    /// Whether the mask is what the scopes make it. For checks.
    pub(super) fn is_consistent(&self) -> bool {
        let list = self.list.read();
        let mask = list.iter().fold(0, |mask, scope| mask | scope.mask());
        self.mask.load(Ordering::Relaxed) == mask
    }
}

impl<B: Backend> Shared<B> {
    /// The heap that a request of the heap `cell` goes to because of a scope, if of one. Only the
    /// default pool's requests are up to scopes: who allocates from a pool means that pool.
    pub(in crate::allocator) fn route(
        &self,
        cell: &HeapCell<B>,
    ) -> AllocResult<Option<Routed<'_, B>>, B> {
        if cell.private {
            return Ok(None);
        }
        let status = self.capture_status(&cell.stream)?;
        let thread = ThreadTag::current();
        let scopes = &self.devices[cell.device.index()].pools.scopes;
        let Some(list) = scopes.candidates(thread, &cell.stream) else { return Ok(None) };
        let in_hand = InHand { shared: self, device: cell.device, list };
        // The innermost of those that claim it.
        let mut innermost = in_hand.list.iter().rev();
        let scope = innermost.find(|scope| scope.claims(thread, &cell.stream, status));
        let routed = scope.map(|scope| self.heap_in(&scope.pool.0, &cell.stream));
        Ok(routed.map(|cell| Routed { cell, _scopes: in_hand }))
    }
}

/// Where a claimed request goes. Its pool does not end meanwhile.
pub(in crate::allocator) struct Routed<'a, B: Backend> {
    pub(in crate::allocator) cell: Arc<HeapCell<B>>,
    _scopes: InHand<'a, B>,
}

/// The scopes that a request has in hand. They may end meanwhile, and the references to their pools
/// go: who lets go of the pools last ends them.
struct InHand<'a, B: Backend> {
    shared: &'a Shared<B>,
    device: DeviceId,
    list: ScopeList<B::Stream>,
}

impl<B: Backend> Drop for InHand<'_, B> {
    fn drop(&mut self) {
        let scopes = Arc::into_inner(std::mem::take(&mut self.list)).unwrap_or_default();
        for scope in scopes.into_iter().filter_map(Arc::into_inner) {
            let pool = scope.pool.0.id();
            drop(scope);
            self.shared.end_pool(self.device, pool);
        }
    }
}

/// While it lives, requests that its filter claims go to its pool, unless a scope that was opened
/// later claims them. It refers to the pool.
///
/// Scopes may end in any order, on any thread. For the common case of the current thread there is
/// [`ThreadScope`].
#[must_use = "the scope ends when it is dropped"]
pub struct PoolScope<B: Backend> {
    pool: PoolRef<B>,
    scope: Option<Arc<Scope<B::Stream>>>,
}

impl<B: Backend> PoolScope<B> {
    /// The pool that requests go to.
    pub fn pool(&self) -> &PoolRef<B> {
        &self.pool
    }
}

impl<B: Backend> fmt::Debug for PoolScope<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolScope").field("scope", &self.scope).finish()
    }
}

impl<B: Backend> Drop for PoolScope<B> {
    fn drop(&mut self) {
        let Some(scope) = self.scope.take() else { return };
        let scopes = &self.pool.shared.devices[self.pool.device.index()].pools.scopes;
        scopes.change(|list| list.retain(|other| !Arc::ptr_eq(other, &scope)));
        // The scope lets go of the pool before the reference that may be the last one does.
        drop(scope);
    }
}

/// A [`PoolScope`] for the thread that opened it. It cannot leave that thread:
///
/// ```compile_fail
/// use alloc_core::backend::Backend;
/// use alloc_core::PoolRef;
///
/// fn leave_elsewhere<B: Backend>(pool: &PoolRef<B>) {
///     let scope = pool.enter();
///     std::thread::scope(|threads| {
///         threads.spawn(move || drop(scope));
///     });
/// }
/// ```
#[derive(Debug)]
#[must_use = "the scope ends when it is dropped"]
pub struct ThreadScope<B: Backend> {
    scope: PoolScope<B>,
    /// Not `Send`.
    _here: PhantomData<*const ()>,
}

impl<B: Backend> ThreadScope<B> {
    /// The pool that requests go to.
    pub fn pool(&self) -> &PoolRef<B> {
        self.scope.pool()
    }
}

impl<B: Backend> PoolRef<B> {
    /// Sends the requests that `filter` claims to this pool while the scope lives.
    pub fn scope(&self, filter: ScopeFilter<B::Stream>) -> PoolScope<B> {
        let pool: &Arc<Pool> = &self.pool;
        let thread = ThreadTag::current();
        let scope = Arc::new(Scope { filter, thread, pool: Hold::new(pool) });
        let scopes = &self.shared.devices[self.device.index()].pools.scopes;
        scopes.change(|list| list.push(Arc::clone(&scope)));
        PoolScope { pool: self.clone(), scope: Some(scope) }
    }

    /// Sends the requests of the current thread to this pool while the scope lives.
    pub fn enter(&self) -> ThreadScope<B> {
        ThreadScope { scope: self.scope(ScopeFilter::CurrentThread), _here: PhantomData }
    }
}
