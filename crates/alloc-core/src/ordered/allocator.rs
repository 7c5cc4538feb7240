//! The stream-ordered allocator of one device.

use super::backend::{OrderedMemory, PoolOptions, PoolReuse, PoolUsage, StreamOrdered};
use super::error::{OrderedError, OrderedOp};
use super::shared::{Live, Outcome, Shared, State};
use crate::backend::Stream;
use crate::size_class::REQUEST_BYTES_MAX;
use crate::units::{Addr, DeviceId};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

/// Which pool memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolChoice {
    /// The device's default pool, which other parts of the program may use too.
    Default,
    /// A pool of its own, which holds at most so many bytes.
    Private {
        /// `None` is no bound.
        bytes_max: Option<u64>,
    },
}

/// What an allocator is made with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OrderedConfig {
    /// Which pool.
    pub pool: PoolChoice,
    /// How it behaves. The settings of a default pool are the device's: they hold for all its users.
    pub options: PoolOptions,
    /// Bytes that may be allocated at once through this allocator.
    pub limit: Option<u64>,
}

impl OrderedConfig {
    /// The default pool, which keeps all it gets, with reuse in every way; no limit (spec §9.1).
    pub const fn default_pool() -> Self {
        let options = PoolOptions { reuse: PoolReuse::ALL, release_threshold: u64::MAX };
        OrderedConfig { pool: PoolChoice::Default, options, limit: None }
    }

    /// As [`default_pool`](Self::default_pool), in a pool of its own.
    pub const fn private_pool(bytes_max: Option<u64>) -> Self {
        OrderedConfig { pool: PoolChoice::Private { bytes_max }, ..Self::default_pool() }
    }
}

/// Memory of one device by address, from a pool of the driver. Clones are the same allocator; any
/// thread may call.
///
/// When the last clone goes, a private pool is ended, unless memory of it is still allocated: that
/// is never freed under its user.
pub struct OrderedAllocator<B: StreamOrdered> {
    shared: Arc<Shared<B>>,
}

impl<B: StreamOrdered> Clone for OrderedAllocator<B> {
    fn clone(&self) -> Self {
        OrderedAllocator { shared: Arc::clone(&self.shared) }
    }
}

impl<B: StreamOrdered> fmt::Debug for OrderedAllocator<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OrderedAllocator")
            .field("device", &self.shared.device)
            .finish_non_exhaustive()
    }
}

impl<B: StreamOrdered> OrderedAllocator<B> {
    /// An allocator on the device of `unifier`, a stream that nothing else uses.
    ///
    /// # Errors
    /// [`OrderedError::Backend`], of kind
    /// [`Unsupported`](crate::backend::ErrorKind::Unsupported) where there are no pools.
    pub fn new(backend: B, unifier: B::Stream, config: OrderedConfig) -> Outcome<Self, B> {
        let device = unifier.device();
        let failed = |source| OrderedError::Backend { op: OrderedOp::Pool, source };
        let pool = match config.pool {
            PoolChoice::Default => backend.default_pool(device),
            PoolChoice::Private { bytes_max } => backend.create_pool(device, bytes_max),
        };
        let pool = pool.map_err(failed)?;
        let is_private = matches!(config.pool, PoolChoice::Private { .. });
        if let Err(error) = backend.set_pool_options(&pool, config.options) {
            // Nothing is in it yet. If it cannot be given back either, the first error counts.
            let _ = backend.destroy_pool(pool);
            return Err(failed(error));
        }
        let state = State {
            live: HashMap::new(),
            allocated: 0,
            limit: config.limit,
            streams: BTreeMap::from([(unifier.id(), unifier.clone())]),
            holds: 0,
            held: Vec::new(),
        };
        let state = Mutex::new(state);
        let pool = Some(pool);
        let shared = Shared { backend, device, pool, is_private, unifier, state };
        Ok(OrderedAllocator { shared: Arc::new(shared) })
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.shared.backend
    }

    /// The device.
    pub fn device(&self) -> DeviceId {
        self.shared.device
    }

    /// Allocates `bytes` for work that is queued on `stream` from now on. 0 bytes get the null address
    /// and no memory.
    ///
    /// # Errors
    /// [`OrderedError::OutOfMemory`], after the stream was waited for and the pool has given back what
    /// it does not use; [`OrderedError::TooLarge`]; [`OrderedError::WrongDevice`];
    /// [`OrderedError::Capturing`]; [`OrderedError::Backend`].
    pub fn allocate(&self, bytes: u64, stream: &B::Stream) -> Outcome<Addr, B> {
        self.shared.check_stream(stream)?;
        match bytes {
            0 => return Ok(Addr::NULL),
            REQUEST_BYTES_MAX.. => return Err(OrderedError::TooLarge { requested: bytes }),
            _ => {}
        }
        if self.shared.is_capturing(stream)? {
            return Err(OrderedError::Capturing(stream.id()));
        }
        self.shared.flush_held();
        self.shared.claim(bytes)?;
        let memory = self.shared.obtain(bytes, stream);
        let mut state = self.shared.state.lock();
        match memory {
            Ok(memory) => {
                let addr = memory.addr();
                state.streams.entry(stream.id()).or_insert_with(|| stream.clone());
                let uses = SmallVec::new();
                state.live.insert(addr, Live { memory, stream: stream.clone(), uses });
                Ok(addr)
            }
            Err(error) => {
                state.allocated -= bytes;
                Err(error)
            }
        }
    }

    /// Declares that work of `stream`, queued so far or until the free, uses the memory. Its own
    /// stream needs no mention.
    ///
    /// # Errors
    /// [`OrderedError::UnknownAddress`], [`OrderedError::WrongDevice`].
    pub fn record_use(&self, addr: Addr, stream: &B::Stream) -> Outcome<(), B> {
        if addr.is_null() {
            return Ok(());
        }
        self.shared.check_stream(stream)?;
        let mut state = self.shared.state.lock();
        let live = state.live.get_mut(&addr).ok_or(OrderedError::UnknownAddress(addr))?;
        let is_known = live.stream.id() == stream.id()
            || live.uses.iter().any(|known| known.id() == stream.id());
        if !is_known {
            live.uses.push(stream.clone());
            state.streams.entry(stream.id()).or_insert_with(|| stream.clone());
        }
        Ok(())
    }

    /// Frees memory once the work queued so far on all streams that use it is done. Null is nothing.
    ///
    /// While one of the streams is being captured the free is noted only, and carried out by a later
    /// call: it would become part of the graph.
    ///
    /// # Errors
    /// [`OrderedError::UnknownAddress`]; [`OrderedError::Backend`], and it is still allocated.
    pub fn free(&self, addr: Addr) -> Outcome<(), B> {
        if addr.is_null() {
            return Ok(());
        }
        self.shared.flush_held();
        let live = {
            let mut state = self.shared.state.lock();
            let live = state.live.remove(&addr).ok_or(OrderedError::UnknownAddress(addr))?;
            state.allocated -= live.memory.bytes();
            if state.holds > 0 {
                state.held.push(live);
                return Ok(());
            }
            live
        };
        self.shared.free_or_hold(live).map_err(|(live, error)| {
            self.shared.state.lock().put_back(live);
            error
        })
    }

    /// Until the value is dropped, frees are noted and not carried out.
    pub fn hold_frees(&self) -> FreeHold<B> {
        self.shared.state.lock().holds += 1;
        FreeHold { allocator: self.clone() }
    }

    /// Waits for all streams that memory was used on, and gives back what the pool does not use.
    ///
    /// # Errors
    /// [`OrderedError::Backend`].
    pub fn empty_cache(&self) -> Outcome<(), B> {
        self.shared.flush_held();
        let streams: Vec<_> = self.shared.state.lock().streams.values().cloned().collect();
        streams.iter().try_for_each(|stream| self.shared.synchronise(stream))?;
        self.trim(0)
    }

    /// Gives back what the pool does not use until it holds `keep_bytes` at most. Waits for nothing,
    /// so memory whose free the host has not seen stays.
    ///
    /// # Errors
    /// [`OrderedError::Backend`].
    pub fn trim(&self, keep_bytes: u64) -> Outcome<(), B> {
        let Shared { backend, .. } = &*self.shared;
        let trimmed = backend.trim_pool(self.shared.pool(), keep_bytes);
        trimmed.map_err(|source| OrderedError::Backend { op: OrderedOp::Trim, source })
    }

    /// What the pool holds, by its own count. A default pool counts for all its users.
    ///
    /// # Errors
    /// [`OrderedError::Backend`].
    pub fn stats(&self) -> Outcome<PoolUsage, B> {
        let usage = self.shared.backend.pool_usage(self.shared.pool());
        usage.map_err(|source| OrderedError::Backend { op: OrderedOp::Usage, source })
    }

    /// Lets the peaks start over from now.
    ///
    /// # Errors
    /// [`OrderedError::Backend`].
    pub fn reset_peaks(&self) -> Outcome<(), B> {
        let reset = self.shared.backend.reset_pool_peaks(self.shared.pool());
        reset.map_err(|source| OrderedError::Backend { op: OrderedOp::Usage, source })
    }

    /// How the pool behaves.
    ///
    /// # Errors
    /// [`OrderedError::Backend`].
    pub fn options(&self) -> Outcome<PoolOptions, B> {
        let options = self.shared.backend.pool_options(self.shared.pool());
        options.map_err(|source| OrderedError::Backend { op: OrderedOp::Pool, source })
    }

    /// Changes how the pool behaves.
    ///
    /// # Errors
    /// [`OrderedError::Backend`].
    pub fn set_options(&self, options: PoolOptions) -> Outcome<(), B> {
        let set = self.shared.backend.set_pool_options(self.shared.pool(), options);
        set.map_err(|source| OrderedError::Backend { op: OrderedOp::Pool, source })
    }

    /// Bytes of requests that are allocated through this allocator.
    pub fn allocated(&self) -> u64 {
        self.shared.state.lock().allocated
    }

    /// Changes how many bytes may be allocated at once.
    pub fn set_limit(&self, limit: Option<u64>) {
        self.shared.state.lock().limit = limit;
    }
}

/// Frees are held up while it lives; see [`OrderedAllocator::hold_frees`].
#[must_use = "frees are carried out when this is dropped"]
pub struct FreeHold<B: StreamOrdered> {
    allocator: OrderedAllocator<B>,
}

impl<B: StreamOrdered> fmt::Debug for FreeHold<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FreeHold").finish_non_exhaustive()
    }
}

impl<B: StreamOrdered> Drop for FreeHold<B> {
    fn drop(&mut self) {
        let shared = &self.allocator.shared;
        shared.state.lock().holds -= 1;
        shared.flush_held();
    }
}
