//! The end of the ladder: counting, reporting and telling observers.

use super::grow::Shortage;
use super::{HeapCell, Op, Shared};
use crate::backend::{Backend, Stream};
use crate::block::BlockState;
use crate::error::{AllocError, HeapReport, LadderStep, OomReport};
use crate::heap::{Heap, Request, SegmentKind};
use crate::trace::{TraceAction, TraceEntry};
use crate::units::Addr;

impl<B: Backend> Shared<B> {
    /// The error of a request for which every step failed. Observers run without any lock.
    pub(super) fn out_of_memory(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        shortage: Shortage,
        steps: Vec<LadderStep>,
        op: &mut Op<'_, B>,
    ) -> AllocError<B::Error> {
        let device = &self.devices[cell.device.index()];
        device.counters.lock().num_ooms += 1;
        let memory = (self.memory)(&self.backend, cell.device);
        let pool = cell.pool().id();
        let report = OomReport {
            device: cell.device,
            pool,
            stream: cell.stream.id(),
            requested: request.requested,
            rounded: request.rounded,
            segment: self.segment_bytes(cell, request),
            limit: device.limit(),
            reserved: device.reserved(),
            device_free: memory.map(|memory| memory.free),
            device_total: memory.map(|memory| memory.total),
            address_space: match shortage {
                Shortage::Memory => None,
                Shortage::Addresses(lack) => Some(lack),
            },
            steps,
            heaps: reports(device.heaps().iter().filter_map(|cell| report_of(cell))),
        };
        op.trace.push(|| TraceEntry {
            action: TraceAction::Oom,
            device: cell.device,
            addr: Addr::new(report.device_free.unwrap_or(0)),
            bytes: request.rounded,
            stream: cell.stream.id(),
            pool,
        });
        self.deliver(&mut op.trace);
        let observers = self.observers.lock().clone();
        for observer in observers {
            observer(&report);
        }
        AllocError::OutOfMemory(Box::new(report))
    }
}

/// One report for all heaps of a pool and stream. They come one after the other.
fn reports(heaps: impl Iterator<Item = HeapReport>) -> Vec<HeapReport> {
    let mut reports: Vec<HeapReport> = Vec::new();
    for heap in heaps {
        match reports.last_mut() {
            Some(last) if (last.pool, last.stream) == (heap.pool, heap.stream) => {
                last.reserved += heap.reserved;
                last.allocated += heap.allocated;
                last.pending += heap.pending;
                last.cached += heap.cached;
                last.largest_free = last.largest_free.max(heap.largest_free);
            }
            _ => reports.push(heap),
        }
    }
    reports
}

fn report_of<B: Backend>(cell: &HeapCell<B>) -> Option<HeapReport> {
    let state = cell.lock();
    let heap = &state.body.heap;
    if heap.segments.is_empty() {
        return None;
    }
    let mut report = HeapReport {
        pool: heap.pool.id,
        stream: heap.stream,
        reserved: reserved_bytes(heap),
        allocated: 0,
        pending: 0,
        cached: 0,
        largest_free: 0,
    };
    for (_, block) in heap.blocks.iter() {
        match block.state {
            BlockState::Live | BlockState::Held => report.allocated += block.bytes,
            BlockState::Draining { .. } => report.pending += block.bytes,
            BlockState::Free | BlockState::Waiting { .. } => {
                report.cached += block.bytes;
                report.largest_free = report.largest_free.max(block.bytes);
            }
            BlockState::Unmapped | BlockState::Vacant => {}
        }
    }
    Some(report)
}

/// Bytes behind the segments of a heap.
pub(super) fn reserved_bytes(heap: &Heap) -> u64 {
    let whole: u64 = heap
        .segments
        .iter()
        .filter(|(_, segment)| segment.kind == SegmentKind::Whole)
        .map(|(_, segment)| segment.bytes)
        .sum();
    let mapped: u64 = heap
        .blocks
        .iter()
        .filter(|(_, block)| block.expandable && block.state != BlockState::Unmapped)
        .map(|(_, block)| block.bytes)
        .sum();
    whole + mapped
}
