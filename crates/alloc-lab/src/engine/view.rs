//! Segments as drawings and comparisons see them.

use alloc_core::{BlockStatus, SegmentSnapshot, SizeClass};

use super::SegmentView;
use crate::format::golden::{Block, BlockState, Class};

/// A segment with the pages under it, which are among `mappings`: addresses, ascending, and sizes. Of a
/// page that other memory shares, only the part in the segment counts.
pub(super) fn view(segment: &SegmentSnapshot, mappings: &[(u64, u64)]) -> SegmentView {
    let (addr, bytes) = (segment.addr.get(), segment.bytes);
    let end = addr + bytes;
    let from = mappings.partition_point(|&(at, size)| at + size <= addr);
    let to = mappings.partition_point(|&(at, _)| at < end);
    let pages = if segment.expandable {
        let inside = |&(at, size): &(u64, u64)| (at + size).min(end) - at.max(addr);
        mappings[from..to].iter().map(inside).collect()
    } else {
        vec![bytes]
    };
    let class = match segment.class {
        SizeClass::Small => Class::Small,
        SizeClass::Large => Class::Large,
    };
    let blocks = segment.blocks.iter().map(|block| Block {
        addr: block.addr.get(),
        bytes: block.bytes,
        requested: block.requested,
        state: match block.status {
            BlockStatus::Allocated => BlockState::ActiveAllocated,
            BlockStatus::PendingFree => BlockState::ActivePendingFree,
            BlockStatus::Inactive => BlockState::Inactive,
        },
    });
    SegmentView {
        pool: (segment.pool.0, segment.pool.1),
        addr,
        bytes,
        stream: segment.stream.get() as u32,
        class,
        expandable: segment.expandable,
        blocks: blocks.collect(),
        pages,
    }
}
