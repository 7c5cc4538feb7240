//! A tiny allocator for tests of what is around it: every allocation is a segment of its own, kept
//! when freed and reused for the same size; emptied when the device is full.

use std::collections::{BTreeMap, VecDeque};

use alloc_core::TraceAction;

use super::{DriverFigures, Engine, EngineError, Recorded, SegmentView};
use crate::format::golden::{Block, BlockState, Class, TraceRow};
use crate::workload::RecordedSegment;

const UNIT: u64 = 2 << 20;

#[derive(Default)]
pub(crate) struct Fake {
    capacity: u64,
    feed: VecDeque<u64>,
    next: u64,
    live: Vec<Option<Live>>,
    cached: BTreeMap<u64, Vec<u64>>,
    trace: Vec<TraceRow>,
    taken: Vec<RecordedSegment>,
    driver: DriverFigures,
    reserved: u64,
    active: i64,
    allocated: u64,
    allocated_peak: u64,
    ooms: i64,
    pub(crate) objection: Option<String>,
}

#[derive(Clone, Copy)]
struct Live {
    addr: u64,
    bytes: u64,
    requested: u64,
    stream: u32,
}

impl Fake {
    /// An allocator on a device of `capacity` bytes that takes its first segments at `feed`.
    pub(crate) fn new(capacity: u64, feed: impl IntoIterator<Item = u64>) -> Self {
        Fake { capacity, feed: feed.into_iter().collect(), next: 1 << 40, ..Fake::default() }
    }

    fn log(&mut self, action: TraceAction, addr: u64, bytes: u64, stream: u32) {
        self.trace.push(TraceRow { action, addr, bytes, stream });
    }

    fn grow(&mut self, bytes: u64, stream: u32) -> Option<u64> {
        if self.reserved + bytes > self.capacity {
            return None;
        }
        let addr = self.feed.pop_front().unwrap_or_else(|| {
            self.next += bytes;
            self.next - bytes
        });
        self.reserved += bytes;
        self.driver.calls += 1;
        self.driver.segments += 1;
        self.driver.stall_ns += 1000;
        self.driver.reserved_peak = self.driver.reserved_peak.max(self.reserved);
        self.taken.push(RecordedSegment { addr, bytes });
        self.log(TraceAction::SegmentAlloc, addr, bytes, stream);
        Some(addr)
    }

    fn flush(&mut self) {
        for (bytes, addrs) in std::mem::take(&mut self.cached) {
            for addr in addrs {
                self.reserved -= bytes;
                self.driver.calls += 1;
                self.log(TraceAction::SegmentFree, addr, bytes, 0);
            }
        }
    }
}

impl Engine for Fake {
    fn allocate(&mut self, slot: usize, bytes: u64, stream: usize) -> Result<u64, EngineError> {
        let stream = stream as u32;
        if self.live.len() <= slot {
            self.live.resize(slot + 1, None);
        }
        if bytes == 0 {
            self.live[slot] = Some(Live { addr: 0, bytes: 0, requested: 0, stream });
            return Ok(0);
        }
        let size = bytes.next_multiple_of(UNIT);
        let cached = self.cached.get_mut(&size).and_then(Vec::pop);
        let addr = cached.or_else(|| self.grow(size, stream)).or_else(|| {
            self.flush();
            self.grow(size, stream)
        });
        let Some(addr) = addr else {
            self.ooms += 1;
            self.log(TraceAction::Oom, 0, size, stream);
            return Err(EngineError::OutOfMemory(format!("{} bytes held", self.reserved)));
        };
        self.live[slot] = Some(Live { addr, bytes: size, requested: bytes, stream });
        self.active += 1;
        self.allocated += size;
        self.allocated_peak = self.allocated_peak.max(self.allocated);
        self.log(TraceAction::Alloc, addr, bytes, stream);
        Ok(addr)
    }

    fn free(&mut self, slot: usize) -> Result<(), EngineError> {
        let live = self.live.get_mut(slot).and_then(Option::take);
        let live = live.ok_or_else(|| EngineError::Refused(format!("slot {slot} is empty")))?;
        if live.bytes > 0 {
            self.active -= 1;
            self.allocated -= live.bytes;
            self.cached.entry(live.bytes).or_default().push(live.addr);
            self.log(TraceAction::FreeRequested, live.addr, live.requested, live.stream);
            self.log(TraceAction::FreeCompleted, live.addr, live.requested, live.stream);
        }
        Ok(())
    }

    fn reserved(&self) -> u64 {
        self.reserved
    }

    fn stats(&mut self, keys: &[impl AsRef<str>], out: &mut Vec<Option<i64>>) {
        out.clear();
        out.extend(keys.iter().map(|key| match key.as_ref() {
            "active.all.current" => Some(self.active),
            "allocated_bytes.all.current" => Some(self.allocated as i64),
            "allocated_bytes.all.peak" => Some(self.allocated_peak as i64),
            "reserved_bytes.all.current" => Some(self.reserved as i64),
            "num_ooms" => Some(self.ooms),
            _ => None,
        }));
    }

    fn driver(&self) -> DriverFigures {
        self.driver
    }

    fn objection(&self) -> Option<String> {
        self.objection.clone()
    }

    fn take_segments(&mut self, out: &mut Vec<RecordedSegment>) {
        out.append(&mut self.taken);
    }

    fn segments(&mut self) -> Result<Vec<SegmentView>, EngineError> {
        let view = |addr, bytes, requested, stream, state| SegmentView {
            pool: (0, 0),
            addr,
            bytes,
            stream,
            class: Class::Large,
            expandable: false,
            blocks: vec![Block { addr, bytes, requested, state }],
            pages: vec![bytes],
        };
        let live = self.live.iter().flatten().filter(|live| live.bytes > 0);
        let mut all: Vec<SegmentView> = live
            .map(|l| view(l.addr, l.bytes, l.requested, l.stream, BlockState::ActiveAllocated))
            .collect();
        for (&bytes, addrs) in &self.cached {
            all.extend(addrs.iter().map(|&a| view(a, bytes, 0, 0, BlockState::Inactive)));
        }
        all.sort_by_key(|segment| segment.addr);
        let active = self.allocated;
        self.log(TraceAction::Snapshot, 0, active, 0);
        Ok(all)
    }
}

impl Recorded for Fake {
    fn record_stream(&mut self, _slot: usize, _stream: usize) -> Result<(), EngineError> {
        Ok(())
    }

    fn busy(&mut self, _stream: usize) {}

    fn sync(&mut self) {}

    fn empty_cache(&mut self) -> Result<(), EngineError> {
        self.flush();
        Ok(())
    }

    fn set_limit(&mut self, bytes: u64) -> Result<(), EngineError> {
        self.capacity = bytes;
        Ok(())
    }

    fn reset_peak(&mut self) -> Result<(), EngineError> {
        self.allocated_peak = self.allocated;
        Ok(())
    }

    fn reset_accumulated(&mut self) -> Result<(), EngineError> {
        Ok(())
    }

    fn set_expandable(&mut self, _on: bool) -> Result<(), EngineError> {
        Ok(())
    }

    fn new_pool(&mut self, n: u32, _id: (u64, u64), _no_split: bool) -> Result<(), EngineError> {
        Err(EngineError::Refused(format!("pool {n} in an allocator without pools")))
    }

    fn delete_pool(&mut self, n: u32) -> Result<(), EngineError> {
        self.new_pool(n, (0, 0), false)
    }

    fn enter(&mut self, n: u32) -> Result<(), EngineError> {
        self.new_pool(n, (0, 0), false)
    }

    fn leave(&mut self) {}

    fn begin_capture(
        &mut self,
        graph: u32,
        _id: (u64, u64),
        _shared: Option<u32>,
        _stream: usize,
    ) -> Result<(), EngineError> {
        Err(EngineError::Refused(format!("capture of graph {graph}")))
    }

    fn end_capture(&mut self, graph: u32) -> Result<(), EngineError> {
        self.begin_capture(graph, (0, 0), None, 0)
    }

    fn delete_graph(&mut self, graph: u32) -> Result<(), EngineError> {
        self.begin_capture(graph, (0, 0), None, 0)
    }

    fn feed_releases(&mut self, _addrs: &[u64]) -> Result<(), EngineError> {
        Ok(())
    }

    fn take_trace(&mut self, out: &mut Vec<TraceRow>) {
        out.append(&mut self.trace);
    }

    fn feed_reservation(&mut self, _base: u64) {}
}
