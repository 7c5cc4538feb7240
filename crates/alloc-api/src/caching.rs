//! The caching allocator of device memory behind the object-safe trait.

use crate::allocator::{Allocator, CopyData, RawFree, StreamUse};
use crate::data_ptr::{DataPtr, Deleter};
use crate::device::{Device, DeviceType};
use crate::error::AllocatorError;
use crate::report::{self, MemoryUsage, OutOfMemory};
use crate::stats::{AllocatorStats, Level};
use alloc_core::backend::{Backend, Stream};
use alloc_core::size_class::REQUEST_BYTES_MAX;
use alloc_core::stats::{Gauge, Stat};
use alloc_core::{Addr, AllocError, Allocation, CachingAllocator, StreamId};
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

/// Copies `bytes` within the memory of a device, as work on a stream: to, from, bytes, stream.
pub type CopyFn<B> = Box<
    dyn Fn(Addr, Addr, u64, &<B as Backend>::Stream) -> Result<(), Box<dyn Error + Send + Sync>>
        + Send
        + Sync,
>;

/// A [`CachingAllocator`], for one of its devices. Requests that name no stream are for the stream
/// that it was made with. Clones are the same.
pub struct CachingDevice<B: Backend> {
    inner: Arc<Inner<B>>,
}

struct Inner<B: Backend> {
    allocator: CachingAllocator<B>,
    device: Device,
    stream: B::Stream,
    /// The streams that can be named by their ids.
    streams: RwLock<BTreeMap<StreamId, B::Stream>>,
    copy: Option<CopyFn<B>>,
}

impl<B: Backend> Clone for CachingDevice<B> {
    fn clone(&self) -> Self {
        CachingDevice { inner: Arc::clone(&self.inner) }
    }
}

impl<B: Backend> fmt::Debug for CachingDevice<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachingDevice").field("device", &self.inner.device).finish_non_exhaustive()
    }
}

impl<B: Backend> CachingDevice<B> {
    /// The device of `stream`, which is a `kind`, and that stream unless another is named.
    pub fn new(allocator: CachingAllocator<B>, kind: DeviceType, stream: B::Stream) -> Self {
        Self::build(allocator, kind, stream, None)
    }

    /// As [`new`](Self::new), with a way to copy. Copies are work of that stream; it must come after the
    /// work of other streams on what is copied.
    pub fn with_copies(
        allocator: CachingAllocator<B>,
        kind: DeviceType,
        stream: B::Stream,
        copy: CopyFn<B>,
    ) -> Self {
        Self::build(allocator, kind, stream, Some(copy))
    }

    fn build(
        allocator: CachingAllocator<B>,
        kind: DeviceType,
        stream: B::Stream,
        copy: Option<CopyFn<B>>,
    ) -> Self {
        let device = Device::new(kind, stream.device());
        let streams = RwLock::new(BTreeMap::from([(stream.id(), stream.clone())]));
        CachingDevice { inner: Arc::new(Inner { allocator, device, stream, streams, copy }) }
    }

    /// Lets a stream be named by its id.
    pub fn add_stream(&self, stream: &B::Stream) {
        self.inner.streams.write().insert(stream.id(), stream.clone());
    }

    /// The allocator underneath.
    pub fn allocator(&self) -> &CachingAllocator<B> {
        &self.inner.allocator
    }

    fn stream(&self, id: StreamId) -> Result<B::Stream, AllocatorError> {
        self.inner.streams.read().get(&id).cloned().ok_or(AllocatorError::UnknownStream(id))
    }

    fn allocate_for(&self, bytes: u64, stream: &B::Stream) -> Result<DataPtr, AllocatorError> {
        let inner = &self.inner;
        if bytes == 0 {
            return Ok(DataPtr::null(inner.device));
        }
        let allocation = inner.allocator.allocate(bytes, stream).map_err(|error| {
            if error.is_out_of_memory() {
                inner.report_failure(bytes);
            }
            inner.explain(bytes, error)
        })?;
        let addr = allocation.addr();
        inner.report(addr, bytes as i64);
        let context = BlockOf { inner: Arc::clone(inner), allocation };
        Ok(DataPtr::with_context::<Block<B>>(addr, context, inner.device))
    }

    /// The context of a pointer of this allocator.
    fn context<'a>(&self, pointer: &'a DataPtr) -> Option<&'a BlockOf<B>> {
        let context = pointer.cast_context::<Block<B>>()?;
        Arc::ptr_eq(&context.inner, &self.inner).then_some(context)
    }

    /// Bytes from the pointer's address to the end of its allocation.
    fn available(&self, pointer: &DataPtr) -> Result<u64, AllocatorError> {
        let foreign = AllocatorError::ForeignPointer(pointer.get());
        let Some(context) = self.context(pointer) else { return Err(foreign) };
        let end = context.allocation.addr() + context.allocation.requested();
        let inside = (context.allocation.addr()..=end).contains(&pointer.get());
        if inside { Ok(end - pointer.get()) } else { Err(foreign) }
    }
}

impl<B: Backend> Inner<B> {
    fn explain(&self, bytes: u64, error: AllocError<B::Error>) -> AllocatorError {
        let device = self.device;
        match error {
            AllocError::TooLarge { requested } => {
                AllocatorError::TooLarge { bytes: requested, max: REQUEST_BYTES_MAX - 1 }
            }
            AllocError::UnknownAddress { addr } => AllocatorError::UnknownAddress(addr),
            AllocError::NoSuchDevice { device, .. } => AllocatorError::NoSuchDevice(device),
            error if error.is_out_of_memory() => {
                AllocatorError::OutOfMemory { bytes, device, source: Box::new(error) }
            }
            error => AllocatorError::Other(Box::new(error)),
        }
    }

    fn totals(&self) -> (u64, u64) {
        let Ok(stats) = self.allocator.stats(self.device.index) else { return (0, 0) };
        let now = |gauge| stats.gauge(gauge).all.current as u64;
        (now(Gauge::AllocatedBytes), now(Gauge::ReservedBytes))
    }

    fn report(&self, addr: Addr, delta: i64) {
        report::usage(|| {
            let (allocated, reserved) = self.totals();
            MemoryUsage { addr, delta, allocated, reserved, device: self.device }
        });
    }

    fn report_failure(&self, bytes: u64) {
        report::out_of_memory(|| {
            let (allocated, reserved) = self.totals();
            OutOfMemory { bytes, allocated, reserved, device: self.device }
        });
    }

    fn bytes_at(&self, addr: Addr) -> Option<i64> {
        self.allocator.locate(addr).map(|block| block.requested as i64)
    }
}

/// What a pointer owns.
struct BlockOf<B: Backend> {
    inner: Arc<Inner<B>>,
    allocation: Allocation,
}

/// Frees it.
struct Block<B>(PhantomData<fn(B)>);

impl<B: Backend> Deleter for Block<B> {
    type Context = BlockOf<B>;

    fn release(BlockOf { inner, allocation }: BlockOf<B>) {
        let (addr, bytes) = (allocation.addr(), allocation.requested() as i64);
        // Fails if an event cannot be recorded; then the memory stays allocated, which is safe.
        if inner.allocator.free(allocation).is_ok() {
            inner.report(addr, -bytes);
        }
    }

    fn raw_addr(context: &BlockOf<B>) -> Option<Addr> {
        Some(context.allocation.addr())
    }

    fn disown(context: BlockOf<B>) {
        // An allocation that is dropped stays allocated.
        drop(context);
    }
}

impl<B: Backend> Allocator for CachingDevice<B> {
    fn device(&self) -> Device {
        self.inner.device
    }

    fn allocate(&self, bytes: u64) -> Result<DataPtr, AllocatorError> {
        self.allocate_for(bytes, &self.inner.stream)
    }

    fn empty_cache(&self) -> Result<(), AllocatorError> {
        self.inner.allocator.empty_cache().map_err(|error| self.inner.explain(0, error))
    }

    fn stats(&self) -> Result<AllocatorStats, AllocatorError> {
        let inner = &self.inner;
        let stats = inner.allocator.stats(inner.device.index);
        let stats = stats.map_err(|error| inner.explain(0, error))?;
        let level = |gauge| level(stats.gauge(gauge).all);
        Ok(AllocatorStats {
            allocated: level(Gauge::AllocatedBytes),
            reserved: level(Gauge::ReservedBytes),
        })
    }

    fn raw(&self) -> Option<&dyn RawFree> {
        Some(self)
    }

    fn copies(&self) -> Option<&dyn CopyData> {
        self.inner.copy.is_some().then_some(self)
    }

    fn streams(&self) -> Option<&dyn StreamUse> {
        Some(self)
    }
}

fn level(stat: Stat) -> Level {
    Level { current: stat.current as u64, peak: stat.peak as u64 }
}

impl<B: Backend> RawFree for CachingDevice<B> {
    fn free_raw(&self, addr: Addr) -> Result<(), AllocatorError> {
        let inner = &self.inner;
        let bytes = if report::is_enabled() { inner.bytes_at(addr) } else { None };
        inner.allocator.free_raw(addr).map_err(|error| inner.explain(0, error))?;
        if let Some(bytes) = bytes {
            inner.report(addr, -bytes);
        }
        Ok(())
    }
}

impl<B: Backend> CopyData for CachingDevice<B> {
    fn copy(&self, to: &mut DataPtr, from: &DataPtr, bytes: u64) -> Result<(), AllocatorError> {
        let available = self.available(to)?.min(self.available(from)?);
        if bytes > available {
            return Err(AllocatorError::BadRange { bytes, available });
        }
        let Some(copy) = &self.inner.copy else { return Err(AllocatorError::Unsupported("copy")) };
        // Both may belong to other streams than the one that copies.
        for end in [&*to, from] {
            self.record(end, &self.inner.stream)?;
        }
        copy(to.get(), from.get(), bytes, &self.inner.stream).map_err(AllocatorError::Other)
    }
}

impl<B: Backend> CachingDevice<B> {
    fn record(&self, pointer: &DataPtr, stream: &B::Stream) -> Result<bool, AllocatorError> {
        let Some(context) = self.context(pointer) else { return Ok(false) };
        let recorded = self.inner.allocator.record_stream(&context.allocation, stream);
        recorded.map(|()| true).map_err(|error| self.inner.explain(0, error))
    }
}

impl<B: Backend> StreamUse for CachingDevice<B> {
    fn allocate_on(&self, bytes: u64, stream: StreamId) -> Result<DataPtr, AllocatorError> {
        self.allocate_for(bytes, &self.stream(stream)?)
    }

    fn record_use(&self, pointer: &DataPtr, stream: StreamId) -> Result<bool, AllocatorError> {
        self.record(pointer, &self.stream(stream)?)
    }
}
