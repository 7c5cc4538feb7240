//! The allocator of this workspace on any device, with an account of what the driver does.

use alloc_core::backend::{MemoryInfo, VirtualMemory};
use alloc_core::{Allocation, CachingAllocator, DeviceId, StreamHandle};

use super::view::view;
use super::{DriverFigures, Engine, EngineError, Metered, SegmentView, empty, refusal};
use crate::workload::RecordedSegment;

/// A `CachingAllocator` over a [`Metered`] backend, on one of its devices. Nobody judges it, and it
/// hands out whatever addresses the driver chooses.
pub struct DeviceEngine<B: VirtualMemory> {
    device: DeviceId,
    allocator: CachingAllocator<Metered<B>>,
    streams: Vec<StreamHandle<Metered<B>>>,
    live: Vec<Option<Allocation>>,
}

impl<B: VirtualMemory + MemoryInfo> DeviceEngine<B> {
    /// An engine on `streams` of `device`, which is one of the allocator's.
    ///
    /// # Errors
    /// [`EngineError::Refused`] if a stream is of a device that does not exist.
    pub fn new(
        allocator: CachingAllocator<Metered<B>>,
        device: DeviceId,
        streams: &[B::Stream],
    ) -> Result<Self, EngineError> {
        let handle = |stream| allocator.stream(stream).map_err(refusal);
        let streams = streams.iter().map(handle).collect::<Result<_, _>>()?;
        Ok(DeviceEngine { device, allocator, streams, live: Vec::new() })
    }
}

impl<B: VirtualMemory + MemoryInfo> Engine for DeviceEngine<B> {
    fn allocate(&mut self, slot: usize, bytes: u64, stream: usize) -> Result<u64, EngineError> {
        let allocation = self.streams[stream].allocate(bytes).map_err(refusal)?;
        let addr = allocation.addr().get();
        if self.live.len() <= slot {
            self.live.resize_with(slot + 1, || None);
        }
        self.live[slot] = Some(allocation);
        Ok(addr)
    }

    fn free(&mut self, slot: usize) -> Result<(), EngineError> {
        let allocation = self.live.get_mut(slot).and_then(Option::take);
        let allocation = allocation.ok_or_else(|| empty(slot))?;
        self.allocator.free(allocation).map_err(|refused| refusal(refused.error))
    }

    fn reserved(&self) -> u64 {
        self.allocator.backend().held()
    }

    fn stats(&mut self, keys: &[impl AsRef<str>], out: &mut Vec<Option<i64>>) {
        out.clear();
        let stats = self.allocator.stats(self.device).ok();
        out.extend(keys.iter().map(|key| stats.as_ref().and_then(|s| s.get(key.as_ref()))));
    }

    fn driver(&self) -> DriverFigures {
        self.allocator.backend().figures()
    }

    fn objection(&self) -> Option<String> {
        None
    }

    fn take_segments(&mut self, out: &mut Vec<RecordedSegment>) {
        self.allocator.backend().take_segments(out);
    }

    fn segments(&mut self) -> Result<Vec<SegmentView>, EngineError> {
        let snapshot = self.allocator.snapshot(self.device).map_err(refusal)?;
        let mappings = self.allocator.backend().mappings();
        Ok(snapshot.segments.iter().map(|segment| view(segment, &mappings)).collect())
    }
}

impl<B: VirtualMemory> std::fmt::Debug for DeviceEngine<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceEngine").field("allocator", &self.allocator).finish_non_exhaustive()
    }
}
