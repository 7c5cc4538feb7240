//! The public face: requests come in, the engine and the background thread do the rest.

mod captures;
mod upkeep;

use super::allocation::{HostAllocation, HostContext, Place};
use super::backend::{CopyData, CopyRequest, HostBackend};
use super::background::Background;
use super::config::{HostConfError, HostConfig};
use super::engine::{Ask, Engine, PoolOf, REQUEST_BYTES_MAX, Result};
use super::error::{HostError, HostFreeError, HostOp};
use super::events::Scan;
use super::heap::Cut;
use super::home::{BlockRef, Freed};
use super::pools::DEFAULT;
use super::store::Store;
use crate::backend::Stream;
use crate::units::Addr;
use std::fmt;
use std::sync::Arc;

/// A caching allocator of pinned host memory.
///
/// Clones share one allocator. All methods may be called from any thread, also from within backend
/// calls: no backend call is ever made while a lock of the allocator is held.
///
/// When the last clone goes, the background thread is joined, events of freed memory are waited for
/// and all memory is given back, except segments that hold allocations which were never freed:
/// those are leaked, as somebody may still use them.
pub struct HostAllocator<B: HostBackend> {
    /// The one of `shared`, near at hand.
    engine: Arc<Engine<B>>,
    shared: Arc<Shared<B>>,
}

/// What ends with the last clone.
struct Shared<B: HostBackend> {
    engine: Arc<Engine<B>>,
    background: Background,
}

impl<B: HostBackend> Drop for Shared<B> {
    fn drop(&mut self) {
        self.background.stop();
        self.engine.tear_down();
    }
}

impl<B: HostBackend> Clone for HostAllocator<B> {
    fn clone(&self) -> Self {
        HostAllocator { engine: Arc::clone(&self.engine), shared: Arc::clone(&self.shared) }
    }
}

impl<B: HostBackend> fmt::Debug for HostAllocator<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostAllocator")
            .field("policy", &self.engine().config.policy)
            .field("pinned_bytes", &self.engine().pins.bytes())
            .finish_non_exhaustive()
    }
}

impl<B: HostBackend> HostAllocator<B> {
    /// Makes an allocator. Nothing is pinned and no thread is started before the first request.
    ///
    /// # Errors
    /// If a setting is out of range.
    pub fn new(backend: B, config: HostConfig) -> std::result::Result<Self, HostConfError> {
        config.validate()?;
        let engine = Arc::new(Engine::new(backend, config));
        let shared = Shared { engine: Arc::clone(&engine), background: Background::new() };
        Ok(HostAllocator { engine, shared: Arc::new(shared) })
    }

    #[inline(always)]
    pub(super) fn engine(&self) -> &Engine<B> {
        &self.engine
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.engine().backend
    }

    /// The settings in force.
    pub fn config(&self) -> HostConfig {
        self.engine().settings.lock().clone()
    }

    /// Changes settings while the allocator runs, by a string as [`HostConfig::apply`] takes it. The
    /// reserve is fixed from the first miss on; a background thread goes on once started.
    ///
    /// # Errors
    /// On a bad string; nothing is changed.
    pub fn apply(&self, text: &str) -> std::result::Result<(), HostConfError> {
        let engine = self.engine();
        let settings = {
            let mut settings = engine.settings.lock();
            settings.apply(text)?;
            settings.clone()
        };
        engine.options.set(&settings);
        engine.each_pool(|pool| {
            if let Store::Classes(classes) = &pool.store {
                classes.set_cached_max(settings.cached_block_bytes_max);
            }
        });
        Ok(())
    }

    /// Allocates `bytes` anywhere. A request of 0 bytes gets [`Addr::NULL`] and costs nothing.
    ///
    /// # Errors
    /// See [`HostError`]. With policy `pytorch` also if an event cannot be asked about.
    pub fn allocate(&self, bytes: u64) -> Result<HostAllocation, B> {
        self.allocate_on(bytes, Place::Anywhere)
    }

    /// Allocates `bytes` near a device, or on a NUMA node. Policy `pytorch` treats all places alike.
    ///
    /// # Errors
    /// As [`allocate`](HostAllocator::allocate).
    pub fn allocate_on(&self, bytes: u64, place: Place) -> Result<HostAllocation, B> {
        self.hit(bytes, place)
    }

    /// Allocates `bytes` for work on `stream`: from the private pool of the capture that the stream
    /// belongs to, if any. What is not used so may still be used in captured work, but is then kept
    /// from reuse until the pool is released, as soon as the use is recorded.
    ///
    /// # Errors
    /// As [`allocate`](HostAllocator::allocate).
    pub fn allocate_for(
        &self,
        bytes: u64,
        place: Place,
        stream: &B::Stream,
    ) -> Result<HostAllocation, B> {
        match self.engine().pools.capturing(stream.id()) {
            Some(pool) => self.serve(bytes, place, &pool),
            None => self.allocate_on(bytes, place),
        }
    }

    /// Serves a request of any kind.
    #[inline(never)]
    pub(super) fn serve(
        &self,
        bytes: u64,
        place: Place,
        pool: &PoolOf<B>,
    ) -> Result<HostAllocation, B> {
        let engine = self.engine();
        if bytes == 0 || bytes > REQUEST_BYTES_MAX {
            return self.refuse(bytes);
        }
        let ask = Ask { pool, node: engine.node(place)?, bytes };
        if let Store::Slabs(slabs) = &pool.store
            && engine.options.is_cached(bytes)
            && let Some(served) = slabs.take_at_hand(ask.node, bytes, Cut::Sparingly)
        {
            return Ok(engine.wrap(ask, served));
        }
        self.serve_from_afar(ask)
    }

    /// Serves what the heap at hand does not.
    #[inline(never)]
    pub(super) fn serve_from_afar(&self, ask: Ask<'_, B>) -> Result<HostAllocation, B> {
        let engine = self.engine();
        if !engine.is_ours() {
            self.process_inline(ask.pool)?;
        }
        match engine.take(ask, Cut::Sparingly) {
            Some(served) => Ok(engine.wrap(ask, served)),
            None => self.serve_miss(ask),
        }
    }

    /// Answers requests of no bytes, or of impossibly many.
    #[cold]
    fn refuse(&self, bytes: u64) -> Result<HostAllocation, B> {
        if bytes > 0 {
            return Err(HostError::TooLarge { requested: bytes });
        }
        let context = HostContext::null(self.engine().owner);
        Ok(HostAllocation { addr: Addr::NULL, requested: 0, bytes: 0, context })
    }

    #[cold]
    fn serve_miss(&self, ask: Ask<'_, B>) -> Result<HostAllocation, B> {
        let engine = self.engine();
        self.start_background(ask.pool);
        engine.pin_reserve(ask)?;
        if !engine.is_ours() && self.shared.background.is_running() {
            engine.process_class(ask)?;
        }
        let served = match engine.take(ask, Cut::Sparingly) {
            Some(served) => served,
            None => engine.serve_miss(ask)?,
        };
        Ok(engine.wrap(ask, served))
    }

    /// Policy `pytorch`: every request looks at the events first, unless a thread does.
    fn process_inline(&self, pool: &PoolOf<B>) -> Result<(), B> {
        if pool.slot == DEFAULT && self.shared.background.is_running() {
            return Ok(());
        }
        self.engine().flush_all()?;
        self.engine().process_events(Scan::All).map(drop)
    }

    fn start_background(&self, pool: &PoolOf<B>) {
        let engine = self.engine();
        if pool.slot != DEFAULT || !engine.options.background() {
            return;
        }
        let worker = Arc::clone(&self.engine);
        self.shared.background.ensure(engine.config.background_period, move || worker.tick());
    }

    /// Gives memory back. It is reused once every stream that was recorded for it has finished what
    /// was queued on it.
    ///
    /// # Errors
    /// The allocation comes back, with its uses, if it belongs to another allocator, or (policy
    /// `pytorch` without `free_catch_all`) if an event cannot be recorded.
    pub fn free(
        &self,
        allocation: HostAllocation,
    ) -> std::result::Result<(), HostFreeError<B::Error>> {
        self.free_hit(allocation)
    }

    /// The rest of a free that was not over at once. [`Freed::Used`]: nothing is done yet.
    #[inline(never)]
    pub(super) fn finish_free(
        &self,
        allocation: HostAllocation,
        freed: Freed,
    ) -> std::result::Result<(), HostFreeError<B::Error>> {
        let (engine, addr) = (self.engine(), allocation.addr);
        let HostContext { owner, block } = allocation.context;
        let result = match freed {
            _ if addr.is_null() => Ok(true),
            _ if owner != engine.owner => Err(HostError::ForeignAllocation(addr)),
            Freed::Done(after) => {
                engine.settle(block.pool, block.home, after);
                Ok(true)
            }
            Freed::Used => engine.free(block),
            Freed::Unknown => Ok(false),
        };
        match result {
            Ok(true) => Ok(()),
            // The same memory was freed through its address before.
            Ok(false) => Err(HostFreeError { allocation, error: HostError::UnknownAddress(addr) }),
            Err(error) => Err(HostFreeError { allocation, error }),
        }
    }

    /// Allocates for callers that keep addresses only. Give it back with
    /// [`free_raw`](HostAllocator::free_raw).
    ///
    /// # Errors
    /// As [`allocate`](HostAllocator::allocate).
    pub fn allocate_raw(&self, bytes: u64, place: Place) -> Result<Addr, B> {
        self.allocate_on(bytes, place).map(|allocation| allocation.addr)
    }

    /// Gives memory back by its first address. [`Addr::NULL`] is fine.
    ///
    /// # Errors
    /// If no live allocation starts at `addr` (a second free of the same memory is caught so), or as
    /// [`free`](HostAllocator::free); the memory stays allocated then.
    pub fn free_raw(&self, addr: Addr) -> Result<(), B> {
        if addr.is_null() {
            return Ok(());
        }
        let engine = self.engine();
        let found = engine.locate(addr).filter(|&(_, start)| start == addr);
        let (block, _) = found.ok_or(HostError::UnknownAddress(addr))?;
        match engine.free(block)? {
            true => Ok(()),
            false => Err(HostError::UnknownAddress(addr)),
        }
    }

    /// Records that work queued on `stream` may use `allocation`.
    ///
    /// # Errors
    /// If the allocation is another allocator's.
    pub fn record_use(&self, allocation: &HostAllocation, stream: &B::Stream) -> Result<(), B> {
        if allocation.addr.is_null() {
            return Ok(());
        }
        let HostContext { owner, block } = allocation.context;
        if owner != self.engine().owner {
            return Err(HostError::ForeignAllocation(allocation.addr));
        }
        match self.engine().note_use(block, stream) {
            true => Ok(()),
            false => Err(HostError::UnknownAddress(allocation.addr)),
        }
    }

    /// Records that work queued on `stream` may use the allocation of `context` or, without one that
    /// is live, the allocation at `addr`. The use is remembered now; an event is recorded when the
    /// memory is freed, once per stream. Returns whether such an allocation was found.
    ///
    /// Policy `pytorch` finds addresses only where an allocation starts; policy `ours` finds those
    /// inside one too.
    pub fn record_event(
        &self,
        addr: Addr,
        context: Option<HostContext>,
        stream: &B::Stream,
    ) -> bool {
        let engine = self.engine();
        let mine = context.filter(|context| context.owner == engine.owner);
        if mine.is_some_and(|context| engine.note_use(context.block, stream)) {
            return true;
        }
        engine.locate(addr).is_some_and(|(block, _)| engine.note_use(block, stream))
    }

    /// Whether `addr` lies in memory that this allocator has pinned, allocated or not.
    pub fn is_pinned(&self, addr: Addr) -> bool {
        self.engine().pins.find(addr).is_some()
    }
}

impl<B: CopyData> HostAllocator<B> {
    /// Copies `bytes` from `from` (at an offset in bytes) to `to` (at an offset in bytes).
    ///
    /// # Errors
    /// If the ranges are not inside what was asked for, or the backend fails.
    pub fn copy_data(
        &self,
        to: (&mut HostAllocation, u64),
        from: (&HostAllocation, u64),
        bytes: u64,
    ) -> Result<(), B> {
        let (to, to_offset) = to;
        let (from, from_offset) = from;
        for allocation in [&*to, from] {
            if allocation.context.owner != self.engine().owner {
                return Err(HostError::ForeignAllocation(allocation.addr));
            }
        }
        let available =
            |allocation: &HostAllocation, offset| allocation.requested.saturating_sub(offset);
        let available = available(to, to_offset).min(available(from, from_offset));
        if bytes > available {
            return Err(HostError::BadRange { bytes, available });
        }
        if bytes == 0 {
            return Ok(());
        }
        let request = CopyRequest { to: to.addr + to_offset, from: from.addr + from_offset, bytes };
        self.backend()
            .copy(&request)
            .map_err(|source| HostError::Backend { op: HostOp::Copy, source })
    }
}

impl<B: HostBackend> Engine<B> {
    /// The live allocation that `addr` belongs to, and its first address.
    fn locate(&self, addr: Addr) -> Option<(BlockRef, Addr)> {
        let about = self.pins.find(addr)?;
        let find = |pool: &PoolOf<B>| {
            let (home, id, start) = pool.store.find(about.node, addr)?;
            Some((BlockRef { pool: pool.slot, home, id }, start))
        };
        // A private pool may hold pieces of the default pool's reserve.
        self.pools
            .with(about.pool, find)
            .flatten()
            .or_else(|| self.pools.private().iter().find_map(|pool| find(pool)))
    }
}
