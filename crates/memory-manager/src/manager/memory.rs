//! Allocations, frees and copies.

use super::{Inner, MemoryManager};
use crate::block::{Block, not_capturing};
use crate::buffers::{DeviceBuffer, PinnedBuffer};
use crate::copy::{CopyJob, Direction};
use crate::error::ManagerError;
use crate::platform::{Platform, StreamOf};
use crate::table::Table;
use alloc_core::Addr;
use alloc_core::backend::Stream;
use std::sync::Arc;

/// # Pinned memory
impl<P: Platform> MemoryManager<P> {
    /// Allocates pinned memory near the manager's device.
    ///
    /// # Errors
    /// [`ManagerError::ZeroSize`], [`ManagerError::TooLarge`], [`ManagerError::OutOfMemory`],
    /// [`ManagerError::ShutDown`].
    pub fn allocate_pinned(&self, bytes: u64) -> Result<Addr, ManagerError> {
        let _open = self.inner.enter()?;
        let block = self.inner.take_pinned(bytes, None)?;
        Ok(enter(&self.inner.pinned, block))
    }

    /// Allocates pinned memory for work on `stream`, near its device.
    ///
    /// # Errors
    /// As [`allocate_pinned`](Self::allocate_pinned).
    pub fn allocate_pinned_on(
        &self,
        bytes: u64,
        stream: &StreamOf<P>,
    ) -> Result<Addr, ManagerError> {
        let _open = self.inner.enter()?;
        let block = self.inner.take_pinned(bytes, Some(stream))?;
        Ok(enter(&self.inner.pinned, block))
    }

    /// Frees pinned memory. Copies that are queued still have it. Null is nothing.
    ///
    /// # Errors
    /// [`ManagerError::UnknownAddress`], [`ManagerError::ShutDown`].
    pub fn free_pinned(&self, addr: Addr) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        self.inner.free(&self.inner.pinned, addr, None)
    }

    /// Frees pinned memory once the work queued so far on `stream` is done, too.
    ///
    /// # Errors
    /// As [`free_pinned`](Self::free_pinned).
    pub fn free_pinned_on(&self, addr: Addr, stream: &StreamOf<P>) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        self.inner.free(&self.inner.pinned, addr, Some(stream))
    }

    /// Pinned memory with an owner.
    ///
    /// # Errors
    /// As [`allocate_pinned`](Self::allocate_pinned).
    pub fn pinned_buffer(&self, bytes: u64) -> Result<PinnedBuffer<P>, ManagerError> {
        let _open = self.inner.enter()?;
        let block = self.inner.take_pinned(bytes, None)?;
        Ok(PinnedBuffer::new(self.clone(), block))
    }
}

/// # Device memory
impl<P: Platform> MemoryManager<P> {
    /// Allocates memory of the manager's device, for its default stream.
    ///
    /// # Errors
    /// [`ManagerError::ZeroSize`], [`ManagerError::TooLarge`], [`ManagerError::OutOfMemory`],
    /// [`ManagerError::ShutDown`], or whatever the driver reports.
    pub fn allocate_device(&self, bytes: u64) -> Result<Addr, ManagerError> {
        let _open = self.inner.enter()?;
        let block = self.inner.take_device(bytes, None)?;
        Ok(enter(&self.inner.device, block))
    }

    /// Allocates memory of the stream's device for work that is queued on it from now on.
    ///
    /// # Errors
    /// As [`allocate_device`](Self::allocate_device).
    pub fn allocate_device_on(
        &self,
        bytes: u64,
        stream: &StreamOf<P>,
    ) -> Result<Addr, ManagerError> {
        let _open = self.inner.enter()?;
        let block = self.inner.take_device(bytes, Some(stream))?;
        Ok(enter(&self.inner.device, block))
    }

    /// Frees device memory once the work queued so far on its own stream, and on the streams that were
    /// recorded, is done. Null is nothing.
    ///
    /// # Errors
    /// [`ManagerError::UnknownAddress`], [`ManagerError::ShutDown`]; or whatever the driver reports,
    /// and it is still allocated.
    pub fn free_device(&self, addr: Addr) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        self.inner.free(&self.inner.device, addr, None)
    }

    /// Frees device memory once the work queued so far on `stream` is done, too.
    ///
    /// # Errors
    /// As [`free_device`](Self::free_device); [`ManagerError::WrongStream`].
    pub fn free_device_on(&self, addr: Addr, stream: &StreamOf<P>) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        self.inner.free(&self.inner.device, addr, Some(stream))
    }

    /// Device memory with an owner, for work on `stream`.
    ///
    /// # Errors
    /// As [`allocate_device`](Self::allocate_device).
    pub fn device_buffer(
        &self,
        bytes: u64,
        stream: &StreamOf<P>,
    ) -> Result<DeviceBuffer<P>, ManagerError> {
        let _open = self.inner.enter()?;
        let block = self.inner.take_device(bytes, Some(stream))?;
        Ok(DeviceBuffer::new(self.clone(), block))
    }

    /// Declares that work of `stream`, queued from now on, uses device memory. That work comes after
    /// the allocation, and a free comes after that work.
    ///
    /// # Errors
    /// [`ManagerError::UnknownAddress`], [`ManagerError::WrongStream`], [`ManagerError::ShutDown`];
    /// [`ManagerError::Capturing`] unless the stream comes after the allocation already.
    pub fn record_use(&self, addr: Addr, stream: &StreamOf<P>) -> Result<(), ManagerError> {
        let _open = self.inner.enter()?;
        let block = self.inner.device.at(addr)?;
        block.record_use(stream, self.inner.platform.backend())
    }
}

/// # Copies
impl<P: Platform> MemoryManager<P> {
    /// Queues a copy from pinned to device memory. Both may be freed at once: their memory is kept
    /// until the copy is done. What is copied must not be written before.
    ///
    /// # Errors
    /// [`ManagerError::ZeroSize`]; [`ManagerError::UnknownAddress`] or [`ManagerError::OutOfRange`]
    /// unless each range lies inside an allocation of this manager; [`ManagerError::WrongStream`];
    /// [`ManagerError::Capturing`]; [`ManagerError::ShutDown`]; or whatever the driver reports.
    pub fn copy_to_device_async(
        &self,
        to: Addr,
        from: Addr,
        bytes: u64,
        stream: &StreamOf<P>,
    ) -> Result<(), ManagerError> {
        self.copy(Direction::ToDevice, (to, from), bytes, stream)
    }

    /// Queues a copy from device to pinned memory. Both may be freed at once: their memory is kept
    /// until the copy is done. What is written must not be read before.
    ///
    /// # Errors
    /// As [`copy_to_device_async`](Self::copy_to_device_async).
    pub fn copy_to_host_async(
        &self,
        to: Addr,
        from: Addr,
        bytes: u64,
        stream: &StreamOf<P>,
    ) -> Result<(), ManagerError> {
        self.copy(Direction::ToHost, (from, to), bytes, stream)
    }

    fn copy(
        &self,
        direction: Direction,
        (device, host): (Addr, Addr),
        bytes: u64,
        stream: &StreamOf<P>,
    ) -> Result<(), ManagerError> {
        let inner = &self.inner;
        let _open = inner.enter()?;
        if bytes == 0 {
            return Err(ManagerError::ZeroSize("the length of the copy"));
        }
        let on_device = inner.device.holding(device, bytes)?;
        let on_host = inner.pinned.holding(host, bytes)?;
        inner.queue((&on_device, &on_host), &CopyJob { direction, device, host, bytes }, stream)
    }
}

/// Enters a new allocation in a table; its address.
fn enter<P: Platform>(table: &Table<P>, block: Block<P>) -> Addr {
    let addr = block.addr();
    table.insert(Arc::new(block));
    addr
}

impl<P: Platform> Inner<P> {
    fn take_pinned(
        &self,
        bytes: u64,
        stream: Option<&StreamOf<P>>,
    ) -> Result<Block<P>, ManagerError> {
        if bytes == 0 {
            return Err(ManagerError::ZeroSize("the size of the request"));
        }
        let device = stream.map_or(self.engines.config().device, Stream::device);
        self.engines.allocate_pinned(&self.platform, bytes, device)
    }

    fn take_device(
        &self,
        bytes: u64,
        stream: Option<&StreamOf<P>>,
    ) -> Result<Block<P>, ManagerError> {
        if bytes == 0 {
            return Err(ManagerError::ZeroSize("the size of the request"));
        }
        match stream {
            Some(stream) => self.engines.allocate_device(&self.platform, bytes, stream),
            None => {
                let stream = self.platform.default_stream(self.engines.config().device)?;
                self.engines.allocate_device(&self.platform, bytes, &stream)
            }
        }
    }

    fn free(
        &self,
        table: &Table<P>,
        addr: Addr,
        stream: Option<&StreamOf<P>>,
    ) -> Result<(), ManagerError> {
        if addr.is_null() {
            return Ok(());
        }
        // While it is held here the address is nobody else's: what is taken out is this block, or
        // another thread has freed it.
        let block = table.at(addr)?;
        if let Some(stream) = stream {
            block.record_use(stream, self.platform.backend())?;
        }
        let taken = table.remove(addr)?;
        drop(block);
        match Arc::try_unwrap(taken) {
            Ok(mut block) => {
                let freed = block.release();
                if freed.is_err() {
                    table.insert(Arc::new(block));
                }
                freed
            }
            // A copy is being queued, or another thread tries the same; the last holder frees it.
            Err(shared) => {
                drop(shared);
                Ok(())
            }
        }
    }

    /// Queues a copy between two allocations, which keeps both until it is done.
    pub(crate) fn queue(
        &self,
        (device, host): (&Block<P>, &Block<P>),
        job: &CopyJob,
        stream: &StreamOf<P>,
    ) -> Result<(), ManagerError> {
        device.check_stream(stream)?;
        // A graph would need both ends for as long as it lives.
        not_capturing(stream, self.platform.backend())?;
        // Recorded first: a copy that fails half way has still been queued in part.
        device.record_use(stream, self.platform.backend())?;
        host.record_use(stream, self.platform.backend())?;
        self.platform.queue_copy(job, stream)
    }
}
