//! A read-only picture of what a device holds (spec §8.3).

use super::{AllocResult, CachingAllocator, HeapCell, Shared};
use crate::backend::Backend;
use crate::block::{Block, BlockState};
use crate::heap::SegmentInfo;
use crate::size_class::SizeClass;
use crate::stats::Gauge;
use crate::trace::{TraceAction, TraceEntry};
use crate::units::{Addr, DeviceId, PoolId, StreamId};
use std::sync::Arc;

/// What a block in a snapshot is doing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockStatus {
    /// Handed out.
    Allocated,
    /// Freed by the client, waiting for events or for other processes.
    PendingFree,
    /// Free.
    Inactive,
}

impl BlockStatus {
    /// PyTorch's word for it.
    pub const fn name(self) -> &'static str {
        match self {
            BlockStatus::Allocated => "active_allocated",
            BlockStatus::PendingFree => "active_pending_free",
            BlockStatus::Inactive => "inactive",
        }
    }
}

/// A block of a [`SegmentSnapshot`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockSnapshot {
    /// First address.
    pub addr: Addr,
    /// Length in bytes.
    pub bytes: u64,
    /// Bytes asked for; 0 for an inactive block.
    pub requested: u64,
    /// What it is doing.
    pub status: BlockStatus,
}

/// A contiguous range of backed memory: a segment obtained whole, or one mapped range of an
/// expandable segment. Its blocks tile it exactly.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SegmentSnapshot {
    /// First address.
    pub addr: Addr,
    /// Length in bytes.
    pub bytes: u64,
    /// The stream that owns it.
    pub stream: StreamId,
    /// The pool that owns it.
    pub pool: PoolId,
    /// Its size class.
    pub class: SizeClass,
    /// Whether it is part of an expandable segment.
    pub expandable: bool,
    /// Its blocks, by address.
    pub blocks: Vec<BlockSnapshot>,
}

impl SegmentSnapshot {
    /// Bytes of blocks that are handed out.
    pub fn allocated(&self) -> u64 {
        self.sum(|block| block.status == BlockStatus::Allocated)
    }

    /// Bytes of blocks that are handed out or wait for events.
    pub fn active(&self) -> u64 {
        self.sum(|block| block.status != BlockStatus::Inactive)
    }

    fn sum(&self, counts: impl Fn(&BlockSnapshot) -> bool) -> u64 {
        self.blocks.iter().filter(|block| counts(block)).map(|block| block.bytes).sum()
    }
}

/// All backed memory of one device, by address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    /// The device.
    pub device: DeviceId,
    /// Its segments.
    pub segments: Vec<SegmentSnapshot>,
}

impl<B: Backend> CachingAllocator<B> {
    /// What `device` holds now. Leaves a `snapshot` entry in the trace. Other threads' operations on
    /// other heaps may fall between the looks at two heaps.
    ///
    /// # Errors
    /// [`AllocError::NoSuchDevice`](crate::AllocError::NoSuchDevice).
    pub fn snapshot(&self, device: DeviceId) -> AllocResult<Snapshot, B> {
        let cells = self.shared.device(device)?.heaps();
        Ok(self.shared.snapshot(device, &cells))
    }
}

impl<B: Backend> Shared<B> {
    /// What some heaps of a device hold.
    pub(super) fn snapshot(&self, device: DeviceId, cells: &[Arc<HeapCell<B>>]) -> Snapshot {
        let mut op = self.begin();
        let mut segments: Vec<_> = cells.iter().flat_map(|cell| segments_of(cell)).collect();
        segments.sort_by_key(|segment| segment.addr);
        let active = self.stat_table(device).get(Gauge::ActiveBytes).all.current;
        op.trace.push(|| TraceEntry {
            action: TraceAction::Snapshot,
            device: DeviceId::new(0),
            addr: Addr::NULL,
            bytes: active as u64,
            stream: StreamId::new(0),
            pool: PoolId::DEFAULT,
        });
        Snapshot { device, segments }
    }
}

fn segments_of<B: Backend>(cell: &HeapCell<B>) -> Vec<SegmentSnapshot> {
    let state = cell.state.lock();
    let heap = &state.body.heap;
    let mut ranges: Vec<SegmentSnapshot> = Vec::new();
    for (_, segment) in heap.segments.iter() {
        let mut open = false;
        let mut cursor = Some(segment.head);
        while let Some(block) = cursor.map(|id| &heap.blocks[id]) {
            cursor = block.next;
            let Some(picture) = block_snapshot(block) else {
                open = false;
                continue;
            };
            if !open {
                ranges.push(range_snapshot(segment, block, cell.stream_id, heap.pool.id));
                open = true;
            }
            if let Some(range) = ranges.last_mut() {
                range.bytes += picture.bytes;
                add_block(&mut range.blocks, picture);
            }
        }
    }
    ranges
}

/// A freed block that waits to be asked for again shows as part of the free memory around it.
fn add_block(blocks: &mut Vec<BlockSnapshot>, picture: BlockSnapshot) {
    match blocks.last_mut() {
        Some(last)
            if (last.status, picture.status) == (BlockStatus::Inactive, BlockStatus::Inactive) =>
        {
            last.bytes += picture.bytes;
        }
        _ => blocks.push(picture),
    }
}

fn range_snapshot(
    segment: &SegmentInfo,
    first: &Block,
    stream: StreamId,
    pool: PoolId,
) -> SegmentSnapshot {
    SegmentSnapshot {
        addr: first.addr,
        bytes: 0,
        stream,
        pool,
        class: segment.lane.class(),
        expandable: segment.is_expandable(),
        blocks: Vec::new(),
    }
}

/// `None` for a hole.
fn block_snapshot(block: &Block) -> Option<BlockSnapshot> {
    let (status, requested) = match block.state {
        BlockState::Live | BlockState::Held => (BlockStatus::Allocated, block.requested),
        BlockState::Draining { .. } => (BlockStatus::PendingFree, block.requested),
        BlockState::Free | BlockState::Waiting { .. } => (BlockStatus::Inactive, 0),
        BlockState::Unmapped | BlockState::Vacant => return None,
    };
    Some(BlockSnapshot { addr: block.addr, bytes: block.bytes, requested, status })
}
