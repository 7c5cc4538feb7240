//! The caching allocator of pinned host memory behind the object-safe trait.

use crate::allocator::{Allocator, CopyData, RawFree, StreamUse};
use crate::data_ptr::{DataPtr, Deleter};
use crate::device::Device;
use crate::error::AllocatorError;
use crate::report::{self, MemoryUsage, OutOfMemory};
use crate::stats::{AllocatorStats, Level};
use alloc_core::backend::Stream;
use alloc_core::host::{
    self, HostAllocation, HostAllocator, HostBackend, HostError, HostStat, Place, REQUEST_BYTES_MAX,
};
use alloc_core::{Addr, StreamId};
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

/// A [`HostAllocator`] over a backend that can copy. Its memory is on the CPU. Clones are the same.
pub struct PinnedHost<B: HostBackend> {
    inner: Arc<Inner<B>>,
}

struct Inner<B: HostBackend> {
    allocator: HostAllocator<B>,
    place: Place,
    /// The streams that can be named by their ids.
    streams: RwLock<BTreeMap<StreamId, B::Stream>>,
}

impl<B: HostBackend> Clone for PinnedHost<B> {
    fn clone(&self) -> Self {
        PinnedHost { inner: Arc::clone(&self.inner) }
    }
}

impl<B: HostBackend> fmt::Debug for PinnedHost<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedHost").field("place", &self.inner.place).finish_non_exhaustive()
    }
}

impl<B: HostBackend> PinnedHost<B> {
    /// Memory of `allocator` at a place.
    pub fn new(allocator: HostAllocator<B>, place: Place) -> Self {
        let inner = Inner { allocator, place, streams: RwLock::default() };
        PinnedHost { inner: Arc::new(inner) }
    }

    /// Lets a stream be named by its id.
    pub fn add_stream(&self, stream: &B::Stream) {
        self.inner.streams.write().insert(stream.id(), stream.clone());
    }

    /// The allocator underneath.
    pub fn allocator(&self) -> &HostAllocator<B> {
        &self.inner.allocator
    }

    fn owns(&self, context: &BlockOf<B>) -> bool {
        Arc::ptr_eq(&context.inner, &self.inner)
    }

    /// The allocation of a pointer, and how far into it the address is.
    fn end<'a>(&self, pointer: &'a DataPtr) -> Result<(&'a HostAllocation, u64), AllocatorError> {
        let foreign = AllocatorError::ForeignPointer(pointer.get());
        let context = pointer.cast_context::<Block<B>>().filter(|context| self.owns(context));
        let Some(context) = context else { return Err(foreign) };
        let offset = pointer.get().get().checked_sub(context.allocation.addr().get());
        Ok((&context.allocation, offset.ok_or(foreign)?))
    }
}

impl<B: HostBackend> Inner<B> {
    fn explain(bytes: u64, error: HostError<B::Error>) -> AllocatorError {
        match error {
            HostError::TooLarge { requested } => {
                AllocatorError::TooLarge { bytes: requested, max: REQUEST_BYTES_MAX }
            }
            HostError::UnknownAddress(addr) => AllocatorError::UnknownAddress(addr),
            HostError::ForeignAllocation(addr) => AllocatorError::ForeignPointer(addr),
            HostError::BadRange { bytes, available } => {
                AllocatorError::BadRange { bytes, available }
            }
            HostError::NoSuchPlace(Place::Device(device)) => AllocatorError::NoSuchDevice(device),
            error if error.is_out_of_memory() => {
                let device = Device::CPU;
                AllocatorError::OutOfMemory { bytes, device, source: Box::new(error) }
            }
            error => AllocatorError::Other(Box::new(error)),
        }
    }

    fn totals(&self) -> (u64, u64) {
        let stats = self.allocator.stats();
        (stats.active_bytes.current as u64, stats.allocated_bytes.current as u64)
    }

    fn report(&self, addr: Addr, delta: i64) {
        report::usage(|| {
            let (allocated, reserved) = self.totals();
            MemoryUsage { addr, delta, allocated, reserved, device: Device::CPU }
        });
    }
}

/// What a pointer owns.
struct BlockOf<B: HostBackend> {
    inner: Arc<Inner<B>>,
    allocation: HostAllocation,
}

/// Frees it.
struct Block<B>(PhantomData<fn(B)>);

impl<B: HostBackend> Deleter for Block<B> {
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

impl<B: host::CopyData> Allocator for PinnedHost<B> {
    fn device(&self) -> Device {
        Device::CPU
    }

    fn allocate(&self, bytes: u64) -> Result<DataPtr, AllocatorError> {
        if bytes == 0 {
            return Ok(DataPtr::null(Device::CPU));
        }
        let inner = &self.inner;
        let allocation = inner.allocator.allocate_on(bytes, inner.place).map_err(|error| {
            if error.is_out_of_memory() {
                report::out_of_memory(|| {
                    let (allocated, reserved) = inner.totals();
                    OutOfMemory { bytes, allocated, reserved, device: Device::CPU }
                });
            }
            Inner::<B>::explain(bytes, error)
        })?;
        let addr = allocation.addr();
        inner.report(addr, bytes as i64);
        let context = BlockOf { inner: Arc::clone(inner), allocation };
        Ok(DataPtr::with_context::<Block<B>>(addr, context, Device::CPU))
    }

    fn empty_cache(&self) -> Result<(), AllocatorError> {
        self.inner.allocator.empty_cache().map_err(|error| Inner::<B>::explain(0, error))
    }

    fn stats(&self) -> Result<AllocatorStats, AllocatorError> {
        let stats = self.inner.allocator.stats();
        let level = |stat: HostStat| Level { current: stat.current as u64, peak: stat.peak as u64 };
        Ok(AllocatorStats {
            allocated: level(stats.active_bytes),
            reserved: level(stats.allocated_bytes),
        })
    }

    fn raw(&self) -> Option<&dyn RawFree> {
        Some(self)
    }

    fn copies(&self) -> Option<&dyn CopyData> {
        Some(self)
    }

    fn streams(&self) -> Option<&dyn StreamUse> {
        Some(self)
    }
}

impl<B: host::CopyData> RawFree for PinnedHost<B> {
    /// Such a free is not reported: its size is not known without a search.
    fn free_raw(&self, addr: Addr) -> Result<(), AllocatorError> {
        self.inner.allocator.free_raw(addr).map_err(|error| Inner::<B>::explain(0, error))
    }
}

impl<B: host::CopyData> CopyData for PinnedHost<B> {
    fn copy(&self, to: &mut DataPtr, from: &DataPtr, bytes: u64) -> Result<(), AllocatorError> {
        let from = self.end(from)?;
        let (_, offset) = self.end(to)?;
        let foreign = AllocatorError::ForeignPointer(to.get());
        let to = to.cast_context_mut::<Block<B>>().ok_or(foreign)?;
        let copied = self.inner.allocator.copy_data((&mut to.allocation, offset), from, bytes);
        copied.map_err(|error| Inner::<B>::explain(0, error))
    }
}

impl<B: host::CopyData> StreamUse for PinnedHost<B> {
    /// Pinned memory belongs to no stream; the stream is only checked.
    fn allocate_on(&self, bytes: u64, stream: StreamId) -> Result<DataPtr, AllocatorError> {
        if !self.inner.streams.read().contains_key(&stream) {
            return Err(AllocatorError::UnknownStream(stream));
        }
        self.allocate(bytes)
    }

    fn record_use(&self, pointer: &DataPtr, stream: StreamId) -> Result<bool, AllocatorError> {
        let known = self.inner.streams.read().get(&stream).cloned();
        let stream = known.ok_or(AllocatorError::UnknownStream(stream))?;
        let Ok((allocation, _)) = self.end(pointer) else { return Ok(false) };
        let recorded = self.inner.allocator.record_use(allocation, &stream);
        recorded.map(|()| true).map_err(|error| Inner::<B>::explain(0, error))
    }
}
