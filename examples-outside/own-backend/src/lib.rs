//! A backend of one's own: memory of this process, up to a budget. `docs/porting.md` explains it.
#![forbid(unsafe_code)]

use alloc_core::backend::*;
use alloc_core::{Addr, DeviceId, StreamId};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Memory of this process as a device of `budget` bytes.
pub struct HostBackend {
    budget: u64,
    used: AtomicU64,
}

impl HostBackend {
    pub fn new(budget: u64) -> Self {
        HostBackend { budget, used: AtomicU64::new(0) }
    }
}

/// A queue of work. Equal numbers are the same stream.
#[derive(Clone, Debug)]
pub struct HostStream(pub u64);

impl Stream for HostStream {
    fn id(&self) -> StreamId {
        StreamId::new(self.0)
    }
    fn device(&self) -> DeviceId {
        DeviceId::new(0)
    }
}

/// A piece of memory. Owns more than `bytes`, since its base must be aligned.
pub struct HostSegment {
    memory: Vec<u8>,
    bytes: u64,
}

impl Segment for HostSegment {
    fn base(&self) -> Addr {
        Addr::new((self.memory.as_ptr().addr() as u64).next_multiple_of(SEGMENT_ALIGN))
    }
    fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The only thing that goes wrong here.
#[derive(Debug)]
pub struct NoRoom;

impl std::fmt::Display for NoRoom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the budget or the machine's memory is used up")
    }
}
impl std::error::Error for NoRoom {}
impl BackendError for NoRoom {
    fn kind(&self) -> ErrorKind {
        ErrorKind::OutOfMemory
    }
}

impl Backend for HostBackend {
    type Stream = HostStream;
    type Event = (); // The work is done when the call that does it returns.
    type Segment = HostSegment;
    type Error = NoRoom;
    fn device_count(&self) -> u16 {
        1
    }
    fn acquire(&self, _: DeviceId, bytes: u64, _: &HostStream) -> Result<HostSegment, NoRoom> {
        let with_slack = bytes.checked_add(SEGMENT_ALIGN).and_then(|sum| sum.try_into().ok());
        let mut memory = Vec::new();
        memory.try_reserve_exact(with_slack.ok_or(NoRoom)?).map_err(|_| NoRoom)?;
        let add = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.budget);
        self.used.fetch_update(Relaxed, Relaxed, add).map_err(|_| NoRoom)?;
        Ok(HostSegment { memory, bytes })
    }
    fn release(&self, segment: HostSegment) -> Result<(), Refused<HostSegment, NoRoom>> {
        self.used.fetch_sub(segment.bytes, Relaxed);
        Ok(())
    }
    fn record(&self, _: &HostStream) -> Result<(), NoRoom> {
        Ok(())
    }
    fn query(&self, _: &()) -> Result<Completion, NoRoom> {
        Ok(Completion::Reached)
    }
    fn wait(&self, _: &()) -> Result<(), NoRoom> {
        Ok(())
    }
}

impl MemoryInfo for HostBackend {
    fn memory(&self, _: DeviceId) -> Result<DeviceMemory, NoRoom> {
        Ok(DeviceMemory { free: self.budget - self.used.load(Relaxed), total: self.budget })
    }
}
