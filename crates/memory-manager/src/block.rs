//! One allocation: the memory, whoever holds it, and its release.

use crate::error::{ManagerError, MemoryKind};
use crate::platform::{HostMemory, Platform, StreamOf};
use alloc_api::Device;
use alloc_api::report::{self, MemoryUsage};
use alloc_core::backend::{Backend, Capture, CaptureStatus, Stream};
use alloc_core::host::HostAllocation;
use alloc_core::ordered::{OrderedAllocator, StreamWait};
use alloc_core::{Addr, Allocation, CachingAllocator, DeviceId, StreamId};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that users have, by kind of memory.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pinned: AtomicU64,
    device: AtomicU64,
}

impl Totals {
    pub(crate) fn of(&self, kind: MemoryKind) -> u64 {
        self.counter(kind).load(Ordering::Relaxed)
    }

    fn counter(&self, kind: MemoryKind) -> &AtomicU64 {
        match kind {
            MemoryKind::Pinned => &self.pinned,
            MemoryKind::Device => &self.device,
        }
    }
}

/// The pinned memory of a platform.
pub(crate) type PinnedOf<P> = Arc<dyn HostMemory<StreamOf<P>>>;

/// Where the memory came from, and what it is called there.
enum Memory<P: Platform> {
    Pinned(PinnedOf<P>, HostAllocation),
    Caching(CachingAllocator<P::Backend>, Allocation),
    Ordered(OrderedAllocator<P::Backend>, Addr),
}

/// An allocation. Freed when the last holder drops it: the one that may give it back, and calls that
/// are working on it.
pub(crate) struct Block<P: Platform> {
    /// `None` only once freed.
    memory: Option<Memory<P>>,
    addr: Addr,
    bytes: u64,
    /// The stream that device memory was allocated for.
    stream: Option<StreamOf<P>>,
    /// Streams whose work comes after the allocation.
    ordered: Mutex<Vec<StreamId>>,
    totals: Arc<Totals>,
}

impl<P: Platform> Block<P> {
    pub(crate) fn pinned(
        host: PinnedOf<P>,
        allocation: HostAllocation,
        totals: &Arc<Totals>,
    ) -> Self {
        let (addr, bytes) = (allocation.addr(), allocation.requested());
        Self::new(Memory::Pinned(host, allocation), (addr, bytes), None, totals)
    }

    pub(crate) fn caching(
        allocator: CachingAllocator<P::Backend>,
        allocation: Allocation,
        stream: &StreamOf<P>,
        totals: &Arc<Totals>,
    ) -> Self {
        let range = (allocation.addr(), allocation.requested());
        Self::new(Memory::Caching(allocator, allocation), range, Some(stream.clone()), totals)
    }

    pub(crate) fn ordered(
        allocator: OrderedAllocator<P::Backend>,
        range: (Addr, u64),
        stream: &StreamOf<P>,
        totals: &Arc<Totals>,
    ) -> Self {
        Self::new(Memory::Ordered(allocator, range.0), range, Some(stream.clone()), totals)
    }

    fn new(
        memory: Memory<P>,
        (addr, bytes): (Addr, u64),
        stream: Option<StreamOf<P>>,
        totals: &Arc<Totals>,
    ) -> Self {
        let (memory, totals) = (Some(memory), Arc::clone(totals));
        let block = Block { memory, addr, bytes, stream, ordered: Mutex::default(), totals };
        let before = block.total().fetch_add(bytes, Ordering::Relaxed);
        block.report(bytes as i64, before + bytes);
        block
    }

    fn total(&self) -> &AtomicU64 {
        self.totals.counter(self.kind())
    }

    fn kind(&self) -> MemoryKind {
        if self.stream.is_some() { MemoryKind::Device } else { MemoryKind::Pinned }
    }

    pub(crate) fn addr(&self) -> Addr {
        self.addr
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device of device memory.
    pub(crate) fn device(&self) -> Option<DeviceId> {
        self.stream.as_ref().map(Stream::device)
    }

    /// Whether a stream can use it at all.
    pub(crate) fn check_stream(&self, stream: &StreamOf<P>) -> Result<(), ManagerError> {
        let (id, device) = (stream.id(), stream.device());
        match self.device() {
            Some(expected) if expected != device => {
                Err(ManagerError::WrongStream { stream: id, device, expected })
            }
            _ => Ok(()),
        }
    }

    /// Declares that work of `stream` uses it, and orders that work after the allocation.
    pub(crate) fn record_use(
        &self,
        stream: &StreamOf<P>,
        backend: &P::Backend,
    ) -> Result<(), ManagerError> {
        self.check_stream(stream)?;
        self.order(stream, backend)?;
        match &self.memory {
            Some(Memory::Pinned(host, allocation)) => host.record_use(allocation, stream),
            Some(Memory::Caching(allocator, allocation)) => allocator
                .record_stream(allocation, stream)
                .map_err(|error| ManagerError::from_caching(0, error)),
            Some(Memory::Ordered(allocator, addr)) => allocator
                .record_use(*addr, stream)
                .map_err(|error| ManagerError::from_ordered(0, error)),
            None => Ok(()),
        }
    }

    /// Once for each stream: what is queued on it from now on comes after the allocation, and so after
    /// all that used the memory before.
    fn order(&self, stream: &StreamOf<P>, backend: &P::Backend) -> Result<(), ManagerError> {
        let Some(own) = self.stream.as_ref().filter(|own| own.id() != stream.id()) else {
            return Ok(());
        };
        if self.ordered.lock().contains(&stream.id()) {
            return Ok(());
        }
        not_capturing(stream, backend)?;
        let event = backend.record(own).map_err(ManagerError::from_backend)?;
        backend.wait_event(stream, &event).map_err(ManagerError::from_backend)?;
        let mut ordered = self.ordered.lock();
        if !ordered.contains(&stream.id()) {
            ordered.push(stream.id());
        }
        Ok(())
    }

    /// Frees it, once. On failure it is still allocated.
    pub(crate) fn release(&mut self) -> Result<(), ManagerError> {
        let refused = match self.memory.take() {
            None => return Ok(()),
            Some(Memory::Pinned(host, allocation)) => host
                .free(allocation)
                .map_err(|(allocation, error)| (Memory::Pinned(host, allocation), error)),
            Some(Memory::Caching(allocator, allocation)) => {
                allocator.free(allocation).map_err(|refused| {
                    let error = ManagerError::from_caching(0, refused.error);
                    (Memory::Caching(allocator, refused.allocation), error)
                })
            }
            Some(Memory::Ordered(allocator, addr)) => allocator.free(addr).map_err(|error| {
                (Memory::Ordered(allocator, addr), ManagerError::from_ordered(0, error))
            }),
        };
        match refused {
            Ok(()) => {
                let before = self.total().fetch_sub(self.bytes, Ordering::Relaxed);
                self.report(-(self.bytes as i64), before - self.bytes);
                Ok(())
            }
            Err((memory, error)) => {
                self.memory = Some(memory);
                Err(error)
            }
        }
    }

    /// Tells this thread's reporter. What is reserved is not gathered: that would take every lock.
    fn report(&self, delta: i64, allocated: u64) {
        let device = match self.device() {
            Some(index) => Device::new(P::KIND, index),
            None => Device::CPU,
        };
        report::usage(|| MemoryUsage { addr: self.addr, delta, allocated, reserved: 0, device });
    }
}

/// Refuses what would break the capture that a stream takes part in.
pub(crate) fn not_capturing<B: Capture>(
    stream: &B::Stream,
    backend: &B,
) -> Result<(), ManagerError> {
    match backend.capture_status(stream).map_err(ManagerError::from_backend)? {
        CaptureStatus::None => Ok(()),
        _ => Err(ManagerError::Capturing(stream.id())),
    }
}

impl<P: Platform> Drop for Block<P> {
    fn drop(&mut self) {
        // Fails if an event cannot be recorded; then the memory stays allocated, which is safe. The
        // allocator is kept too, which would free it otherwise.
        if self.release().is_err() {
            std::mem::forget(self.memory.take());
        }
    }
}
