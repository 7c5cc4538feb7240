//! The calls of a client.

use super::captures::Captures;
use super::device::{Device, HeapCell, limit_of_fraction};
use super::pools::PoolRef;
use super::{AllocResult, Allocation, Paging, Shared};
use crate::backend::{Backend, MemoryInfo, Stream, VirtualMemory};
use crate::config::{Config, Policy, Settings};
use crate::directory::Directory;
use crate::error::{AllocError, BackendOp, FreeError, OomReport};
use crate::handles::HandleTable;
use crate::pager::PageStore;
use crate::stats::{Counters, DeviceStats};
use crate::stream_index::StreamIndex;
use crate::sync::{Mutex, RwLock};
use crate::table::AppendTable;
use crate::trace::TraceSink;
use crate::units::{Addr, DeviceId, PoolId, StreamId};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// A caching allocator for device memory, generic over the backend.
///
/// Cheap to clone; clones are the same allocator. All methods may be called from any thread.
/// Requests that a cached block can serve touch nothing that another stream's requests touch (with
/// [`PeakMode::PerHeap`](crate::config::PeakMode::PerHeap)) and call the backend only while events
/// are pending.
///
/// When the last clone goes, pending events are waited for and everything is given back to the
/// backend, whatever is still allocated. A [`ShareHold`](super::ShareHold) counts as a clone.
pub struct CachingAllocator<B: Backend> {
    pub(super) shared: Arc<Shared<B>>,
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
                by_stream: StreamIndex::new(),
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
        let cell = Arc::clone(self.shared.heap_of(stream)?);
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
        self.shared.allocate(cell, bytes)
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
        self.shared.reset_peaks(device);
        Ok(())
    }

    /// Sets every accumulated value and counter to 0.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`].
    pub fn reset_accumulated_stats(&self, device: DeviceId) -> AllocResult<(), B> {
        *self.shared.device(device)?.counters.lock() = Counters::default();
        self.shared.reset_accumulated(device);
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
    /// result. It also tells programs whose time is spent here (`ours_variety`). Called on misses, and
    /// once in so many large requests that look for a block; with no heap lock held.
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
    pub(super) shared: Arc<Shared<B>>,
    pub(super) cell: Arc<HeapCell<B>>,
    /// Keeps the pool of the heap, if it is a private one.
    pub(super) pool: Option<PoolRef<B>>,
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
        // No need to look the heap up.
        if self.shared.free_at_once(&self.cell, &allocation) {
            return Ok(());
        }
        self.free_elsewhere(allocation)
    }

    #[inline(never)]
    fn free_elsewhere(
        &self,
        allocation: Allocation,
    ) -> Result<(), FreeError<Allocation, B::Error>> {
        self.shared.free(&allocation).map_err(|error| FreeError { allocation, error })
    }
}
