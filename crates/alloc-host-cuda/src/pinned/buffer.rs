//! Pinned memory with an owner, and copies that keep it until they are done.

use super::pointer;
use crate::allocator::{PinnedAllocError, PinnedAllocator};
use crate::error::PinError;
use crate::source::StreamSource;
use alloc_core::Addr;
use alloc_core::backend::Completion;
use alloc_core::host::{HostAllocation, HostBackend, HostError, HostOp};
use cuda_driver::{CaptureStatus, DeviceMemory, DriverError, Stream, code};
use std::fmt;
use std::ops::{Deref, DerefMut};

/// Pinned bytes. New ones are zero, or what the last user of the memory left there. Dropping the
/// buffer gives the memory back, to be reused once the streams that were recorded for it are done.
pub struct PinnedBuffer<S: StreamSource> {
    allocator: PinnedAllocator<S>,
    /// `None` only while being dropped or handed on.
    allocation: Option<HostAllocation>,
}

impl<S: StreamSource> PinnedBuffer<S> {
    pub(crate) fn new(allocator: PinnedAllocator<S>, allocation: HostAllocation) -> Self {
        PinnedBuffer { allocator, allocation: Some(allocation) }
    }

    /// Where it starts; [`Addr::NULL`] if it is empty.
    pub fn addr(&self) -> Addr {
        self.allocation.as_ref().map_or(Addr::NULL, HostAllocation::addr)
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.allocation.as_ref().map_or(0, |allocation| allocation.requested() as usize)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The allocator it is from.
    pub fn allocator(&self) -> &PinnedAllocator<S> {
        &self.allocator
    }

    /// Names a stream whose work, queued so far or until the buffer is dropped, uses it. The copies
    /// of this type do so by themselves.
    ///
    /// # Errors
    /// None that can happen to a buffer; the signature is the allocator's.
    pub fn record_use(&self, stream: &S::Stream) -> Result<(), PinnedAllocError<S>> {
        match &self.allocation {
            Some(allocation) => self.allocator.host().record_use(allocation, stream),
            None => Ok(()),
        }
    }

    fn give_back(&mut self) -> Result<(), PinnedAllocError<S>> {
        match self.allocation.take() {
            Some(allocation) => {
                self.allocator.host().free(allocation).map_err(|refused| refused.error)
            }
            None => Ok(()),
        }
    }
}

impl<S: StreamSource> Deref for PinnedBuffer<S> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let Some(start) = pointer(self.addr().get()) else { return &[] };
        // SAFETY: `len` bytes from there on are this buffer's own until it is dropped, pinned and so
        // mapped, and never uninitialised: pages of the system start as zeros. The device writes to
        // them only in copies, which take the buffer.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.len()) }
    }
}

impl<S: StreamSource> DerefMut for PinnedBuffer<S> {
    fn deref_mut(&mut self) -> &mut [u8] {
        let Some(start) = pointer(self.addr().get()) else { return &mut [] };
        // SAFETY: as above, and the buffer is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), self.len()) }
    }
}

impl<S: StreamSource> Drop for PinnedBuffer<S> {
    fn drop(&mut self) {
        // Fails if an event cannot be recorded; then the memory stays allocated, which is safe.
        let _ = self.give_back();
    }
}

impl<S: StreamSource> fmt::Debug for PinnedBuffer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer")
            .field("addr", &self.addr())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

/// Which way a copy goes.
#[derive(Clone, Copy)]
enum Direction {
    ToDevice,
    ToHost,
}

/// Copies that are queued. They take the buffer, so that nobody touches it meanwhile, and record
/// their use of it, so that dropping what they return is safe at any time. A stream that is being
/// captured is refused: record the use, and queue the copy on the driver's stream.
impl<S: StreamSource<Stream: AsRef<Stream>>> PinnedBuffer<S> {
    /// Queues a copy of the whole buffer to device memory, `offset` bytes from its start.
    ///
    /// # Errors
    /// Hands the buffer back if it does not fit there, or if the driver refuses.
    pub fn copy_to_device(
        self,
        to: &DeviceMemory,
        offset: u64,
        stream: &S::Stream,
    ) -> Result<InFlight<S>, CopyRefused<S>> {
        match self.place_in(to, offset) {
            // SAFETY: device memory, to its end at most; whoever frees it waits for the device.
            Ok(addr) => unsafe { self.copy_to_address(addr, stream) },
            Err(error) => Err(CopyRefused { buffer: self, error }),
        }
    }

    /// Queues a copy from device memory, `offset` bytes from its start, that fills the buffer.
    ///
    /// # Errors
    /// Hands the buffer back if there are not so many bytes, or if the driver refuses.
    pub fn copy_from_device(
        self,
        from: &DeviceMemory,
        offset: u64,
        stream: &S::Stream,
    ) -> Result<InFlight<S>, CopyRefused<S>> {
        match self.place_in(from, offset) {
            Ok(addr) => self.copy_from_address(addr, stream),
            Err(error) => Err(CopyRefused { buffer: self, error }),
        }
    }

    fn place_in(&self, memory: &DeviceMemory, offset: u64) -> Result<u64, PinnedAllocError<S>> {
        let bytes = self.len() as u64;
        let available = memory.bytes().saturating_sub(offset);
        if bytes > available {
            return Err(HostError::BadRange { bytes, available });
        }
        Ok(memory.addr() + offset)
    }

    /// As [`copy_to_device`](Self::copy_to_device), to any address.
    ///
    /// # Safety
    /// As many bytes from `to` on must be device memory, or host memory that no reference points
    /// into until the copy is done.
    ///
    /// # Errors
    /// Hands the buffer back if the driver refuses.
    pub unsafe fn copy_to_address(
        self,
        to: u64,
        stream: &S::Stream,
    ) -> Result<InFlight<S>, CopyRefused<S>> {
        self.queue(Direction::ToDevice, to, stream)
    }

    /// As [`copy_from_device`](Self::copy_from_device), from any address. What is not readable there
    /// the driver refuses.
    ///
    /// # Errors
    /// Hands the buffer back if the driver refuses.
    pub fn copy_from_address(
        self,
        from: u64,
        stream: &S::Stream,
    ) -> Result<InFlight<S>, CopyRefused<S>> {
        self.queue(Direction::ToHost, from, stream)
    }

    fn queue(
        self,
        direction: Direction,
        device: u64,
        stream: &S::Stream,
    ) -> Result<InFlight<S>, CopyRefused<S>> {
        let refused =
            |error| HostError::Backend { op: HostOp::Copy, source: PinError::Driver(error) };
        // A graph would need the buffer for as long as it lives, and nothing can be waited for.
        let status = stream.as_ref().capture_status().and_then(|status| match status {
            CaptureStatus::None => Ok(()),
            _ => Err(DriverError::new("cuMemcpyAsync", code::STREAM_CAPTURE_UNSUPPORTED)),
        });
        if let Err(error) = status {
            return Err(CopyRefused { buffer: self, error: refused(error) });
        }
        // Recorded first, as a copy that fails half way has still been queued in part.
        let queued = self
            .record_use(stream)
            .and_then(|()| self.queue_pieces(direction, device, stream.as_ref()).map_err(refused));
        let event = queued.and_then(|()| {
            let recorded = self.allocator.host().backend().record(stream);
            recorded.map_err(|source| HostError::Backend { op: HostOp::Record, source })
        });
        match event {
            Ok(event) => Ok(InFlight { buffer: self, event }),
            Err(error) => {
                // Part of the copy may be running, so the buffer must not be touched before it ends.
                let _ = stream.as_ref().synchronize();
                Err(CopyRefused { buffer: self, error })
            }
        }
    }

    fn queue_pieces(
        &self,
        direction: Direction,
        device: u64,
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let start = self.addr().get();
        for (addr, bytes) in self.allocator.host().backend().cut(start, self.len() as u64) {
            let (Some(host), device) = (pointer(addr), device + (addr - start)) else { continue };
            match direction {
                // SAFETY: the source is this buffer's, which the copy in flight keeps, and whose
                // memory is not reused before the stream has passed; callers vouch for the target.
                Direction::ToDevice => unsafe {
                    stream.copy_to_device(device, host.as_ptr(), bytes)
                },
                // SAFETY: the target is this buffer's; as above, and nobody reads it meanwhile.
                Direction::ToHost => unsafe { stream.copy_to_host(host.as_ptr(), device, bytes) },
            }?;
        }
        Ok(())
    }
}

/// A copy that was not queued, or not in full. The buffer is the caller's again, and no copy touches
/// it any more.
pub struct CopyRefused<S: StreamSource> {
    /// What was to be copied, or copied to.
    pub buffer: PinnedBuffer<S>,
    /// Why it was not.
    pub error: PinnedAllocError<S>,
}

impl<S: StreamSource> fmt::Debug for CopyRefused<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyRefused")
            .field("buffer", &self.buffer)
            .field("error", &self.error)
            .finish()
    }
}

impl<S: StreamSource> fmt::Display for CopyRefused<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<S: StreamSource> std::error::Error for CopyRefused<S> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.error)
    }
}

/// A buffer that a queued copy reads or writes. Dropping it gives the memory back when the copy is
/// done.
#[must_use = "dropping it gives the buffer up"]
pub struct InFlight<S: StreamSource> {
    buffer: PinnedBuffer<S>,
    event: S::Event,
}

impl<S: StreamSource> InFlight<S> {
    /// Whether the copy is done.
    ///
    /// # Errors
    /// The failure of the copy, or of work before it on the stream.
    pub fn is_done(&self) -> Result<bool, PinError<S::Error>> {
        let host = self.buffer.allocator.host();
        Ok(host.backend().query(&self.event)? == Completion::Reached)
    }

    /// Waits for the copy, and hands the buffer back.
    ///
    /// # Errors
    /// The failure of the copy, or of work before it on the stream. The memory is given back then.
    pub fn wait(self) -> Result<PinnedBuffer<S>, PinError<S::Error>> {
        self.buffer.allocator.host().backend().wait(&self.event)?;
        Ok(self.buffer)
    }

    /// How many bytes are copied.
    pub fn bytes(&self) -> u64 {
        self.buffer.len() as u64
    }
}

impl<S: StreamSource> fmt::Debug for InFlight<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("buffer", &self.buffer).finish_non_exhaustive()
    }
}
