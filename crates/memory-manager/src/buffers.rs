//! Memory with an owner, and copies that keep it.

use crate::block::Block;
use crate::copy::{CopyJob, Direction};
use crate::error::{ManagerError, MemoryKind};
use crate::manager::MemoryManager;
use crate::platform::{Platform, StreamOf};
use alloc_core::backend::{Backend, Completion};
use alloc_core::{Addr, DeviceId};
use std::fmt;

/// Pinned memory, freed when it is dropped.
pub struct PinnedBuffer<P: Platform> {
    manager: MemoryManager<P>,
    block: Box<Block<P>>,
}

/// Device memory, freed when it is dropped: after the work of its stream, and of the streams that
/// were recorded.
pub struct DeviceBuffer<P: Platform> {
    manager: MemoryManager<P>,
    block: Box<Block<P>>,
}

impl<P: Platform> DeviceBuffer<P> {
    pub(crate) fn new(manager: MemoryManager<P>, block: Block<P>) -> Self {
        DeviceBuffer { manager, block: Box::new(block) }
    }

    /// Where it starts.
    pub fn addr(&self) -> Addr {
        self.block.addr()
    }

    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        self.block.bytes()
    }

    /// Its device.
    pub fn device(&self) -> DeviceId {
        self.block.device().unwrap_or(self.manager.device())
    }

    /// Declares that work of `stream`, queued from now on, uses it.
    ///
    /// # Errors
    /// [`ManagerError::WrongStream`]; or whatever the driver reports.
    pub fn record_use(&self, stream: &StreamOf<P>) -> Result<(), ManagerError> {
        self.block.record_use(stream, self.manager.inner.platform.backend())
    }
}

impl<P: Platform> PinnedBuffer<P> {
    pub(crate) fn new(manager: MemoryManager<P>, block: Block<P>) -> Self {
        PinnedBuffer { manager, block: Box::new(block) }
    }

    /// Where it starts.
    pub fn addr(&self) -> Addr {
        self.block.addr()
    }

    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        self.block.bytes()
    }

    /// Queues a copy of all of it to device memory, `offset` bytes from its start. The buffer comes
    /// back when the copy is done.
    ///
    /// # Errors
    /// Hands the buffer back: [`ManagerError::OutOfRange`], [`ManagerError::WrongStream`],
    /// [`ManagerError::ShutDown`], or whatever the driver reports.
    pub fn copy_to_device(
        self,
        to: &DeviceBuffer<P>,
        offset: u64,
        stream: &StreamOf<P>,
    ) -> Result<InFlight<P>, CopyRefused<P>> {
        self.copy(Direction::ToDevice, to, offset, stream)
    }

    /// Queues a copy from device memory, `offset` bytes from its start, that fills the buffer. It comes
    /// back when the copy is done.
    ///
    /// # Errors
    /// As [`copy_to_device`](Self::copy_to_device).
    pub fn copy_from_device(
        self,
        from: &DeviceBuffer<P>,
        offset: u64,
        stream: &StreamOf<P>,
    ) -> Result<InFlight<P>, CopyRefused<P>> {
        self.copy(Direction::ToHost, from, offset, stream)
    }

    fn copy(
        self,
        direction: Direction,
        device: &DeviceBuffer<P>,
        offset: u64,
        stream: &StreamOf<P>,
    ) -> Result<InFlight<P>, CopyRefused<P>> {
        match self.queue(direction, device, offset, stream) {
            Ok(event) => Ok(InFlight { buffer: self, event }),
            Err(error) => Err(CopyRefused { buffer: self, error }),
        }
    }

    fn queue(
        &self,
        direction: Direction,
        device: &DeviceBuffer<P>,
        offset: u64,
        stream: &StreamOf<P>,
    ) -> Result<EventOf<P>, ManagerError> {
        let inner = &self.manager.inner;
        let _open = inner.enter()?;
        let (bytes, kind) = (self.bytes(), MemoryKind::Device);
        let available = device.bytes().saturating_sub(offset);
        if bytes > available {
            let addr = device.addr() + offset.min(device.bytes());
            return Err(ManagerError::OutOfRange { bytes, addr, available, kind });
        }
        let job = CopyJob { direction, device: device.addr() + offset, host: self.addr(), bytes };
        inner.queue((&device.block, &self.block), &job, stream)?;
        let backend = inner.platform.backend();
        backend.record(stream).map_err(|error| {
            // The copy runs, and the buffer must not come back before it is done.
            let _ = inner.platform.synchronise(stream);
            ManagerError::from_backend(error)
        })
    }
}

/// The events of a platform.
type EventOf<P> = <<P as Platform>::Backend as Backend>::Event;

/// A buffer that a queued copy reads or writes. Dropping it frees the memory when the copy is done.
#[must_use = "dropping it gives the buffer up"]
pub struct InFlight<P: Platform> {
    buffer: PinnedBuffer<P>,
    event: EventOf<P>,
}

impl<P: Platform> InFlight<P> {
    fn backend(&self) -> &P::Backend {
        self.buffer.manager.inner.platform.backend()
    }

    /// Whether the copy is done.
    ///
    /// # Errors
    /// The failure of the copy, or of work before it on the stream.
    pub fn is_done(&self) -> Result<bool, ManagerError> {
        let answer = self.backend().query(&self.event).map_err(ManagerError::from_backend)?;
        Ok(answer == Completion::Reached)
    }

    /// Waits for the copy, and hands the buffer back.
    ///
    /// # Errors
    /// The failure of the copy, or of work before it on the stream. The memory is freed then.
    pub fn wait(self) -> Result<PinnedBuffer<P>, ManagerError> {
        self.backend().wait(&self.event).map_err(ManagerError::from_backend)?;
        Ok(self.buffer)
    }
}

/// A copy that was not queued.
pub struct CopyRefused<P: Platform> {
    /// What was to be copied, or copied to.
    pub buffer: PinnedBuffer<P>,
    /// Why it was not.
    pub error: ManagerError,
}

impl<P: Platform> fmt::Display for CopyRefused<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<P: Platform> std::error::Error for CopyRefused<P> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.error)
    }
}

macro_rules! debug {
    ($($type:ident: $self:ident => $addr:expr, $bytes:expr;)*) => {
        $(
            impl<P: Platform> fmt::Debug for $type<P> {
                fn fmt(&$self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.debug_struct(stringify!($type))
                        .field("addr", &$addr)
                        .field("bytes", &$bytes)
                        .finish_non_exhaustive()
                }
            }
        )*
    };
}

debug! {
    PinnedBuffer: self => self.addr(), self.bytes();
    DeviceBuffer: self => self.addr(), self.bytes();
    InFlight: self => self.buffer.addr(), self.buffer.bytes();
    CopyRefused: self => self.buffer.addr(), self.buffer.bytes();
}
