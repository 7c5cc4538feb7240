//! Blocks that other processes use.
//!
//! A share is a use whose end the other side tells: a block that is freed while it is shared drains
//! until the last [`ShareHold`] on it is dropped. Being live or draining, it keeps its place and the
//! memory behind it, under either policy, so that nothing else has to be pinned.

use super::pools::Token as SegmentToken;
use super::{AllocResult, Allocation, CachingAllocator, HeapBody, HeapCell, Shared};
use crate::backend::{Backend, Page, SharePages, Stream, Token};
use crate::block::{BlockId, BlockIdx, BlockState};
use crate::error::{AllocError, BackendOp};
use crate::heap::{SegmentId, SegmentKind};
use crate::share::{MemoryId, PieceKind, SharedBlock, SharedPiece};
use crate::units::Addr;
use std::fmt;
use std::sync::Arc;

/// A block ready to be sent to another process.
#[derive(Debug)]
pub struct Export<B: SharePages> {
    /// What it is: plain data.
    pub block: SharedBlock,
    /// What opens each of its pieces, in their order.
    pub tokens: Vec<Token<B::Descriptor>>,
    /// Keeps the block; to be dropped when the other process is done with it.
    pub hold: ShareHold<B>,
}

/// Keeps a block for another process: as long as this exists its memory serves nobody else, whether
/// the block is freed or not. Dropping it calls no backend, unless it was the last handle of the
/// whole allocator.
pub struct ShareHold<B: Backend> {
    shared: Arc<Shared<B>>,
    heap: u32,
    block: BlockId,
    addr: Addr,
}

impl<B: Backend> ShareHold<B> {
    /// Where the block lies.
    pub fn addr(&self) -> Addr {
        self.addr
    }
}

impl<B: Backend> fmt::Debug for ShareHold<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShareHold").field("addr", &self.addr).finish_non_exhaustive()
    }
}

impl<B: Backend> Drop for ShareHold<B> {
    fn drop(&mut self) {
        self.shared.end_share(self.heap, self.block);
    }
}

impl<B: SharePages> CachingAllocator<B> {
    /// Prepares a block for another process: describes it, exports the memory that it lies in, and
    /// holds it. May be done any number of times; all exports of one block name the same memory.
    ///
    /// The whole segment or page becomes reachable for the other process, with whatever else lies in
    /// it: it has to be trusted to look at its block only.
    ///
    /// # Errors
    /// [`AllocError::ForeignAllocation`]; [`AllocError::UnknownAddress`] if the block was freed by
    /// address, and for 0 bytes; [`AllocError::Backend`] if the memory cannot be exported.
    pub fn share(&self, allocation: &Allocation) -> AllocResult<Export<B>, B> {
        let (cell, id) = self
            .shared
            .cell_of(allocation)?
            .ok_or(AllocError::UnknownAddress { addr: allocation.addr })?;
        self.shared.share(cell, id, allocation.addr)
    }

    /// [`share`](Self::share) by address.
    ///
    /// # Errors
    /// As [`share`](Self::share).
    pub fn share_raw(&self, addr: Addr) -> AllocResult<Export<B>, B> {
        let found = self.shared.find_live(addr);
        let (cell, id) = found.ok_or(AllocError::UnknownAddress { addr })?;
        self.shared.share(cell, id, addr)
    }
}

/// Where a block lies: its segment, and in it.
struct Lie {
    segment: SegmentId,
    base: Addr,
    segment_bytes: u64,
    segment_serial: u64,
    kind: SegmentKind,
    bytes: u64,
}

/// Pieces with their tokens, and the address of the first.
struct Pieces<B: SharePages> {
    start: Addr,
    pieces: Vec<SharedPiece>,
    tokens: Vec<Token<B::Descriptor>>,
}

impl<B: SharePages> Shared<B> {
    fn share(
        self: &Arc<Self>,
        cell: &HeapCell<B>,
        id: BlockId,
        addr: Addr,
    ) -> AllocResult<Export<B>, B> {
        let device = self
            .backend
            .device_key(cell.stream.device())
            .map_err(|source| AllocError::Backend { op: BackendOp::DeviceKey, source })?;
        let hold = self.hold(cell, id, addr)?;
        // From here on the block stays where it is.
        let lie = lie(&cell.state.lock().body, id);
        let found = match lie.kind {
            SegmentKind::Whole => self.export_whole(cell, &lie)?,
            SegmentKind::Expandable { .. } => self.export_pages(cell, &lie, addr)?,
        };
        let Pieces { start, pieces, tokens } = found;
        let block = SharedBlock { device, offset: addr - start, bytes: lie.bytes, pieces };
        Ok(Export { block, tokens, hold })
    }

    fn hold(
        self: &Arc<Self>,
        cell: &HeapCell<B>,
        id: BlockId,
        addr: Addr,
    ) -> AllocResult<ShareHold<B>, B> {
        let mut state = cell.state.lock();
        let body = &mut state.body;
        let block = body.live(id, addr).ok_or(AllocError::UnknownAddress { addr })?;
        body.heap.blocks[block].used = true;
        *body.shares.entry(block).or_default() += 1;
        Ok(ShareHold { shared: Arc::clone(self), heap: cell.index, block: id, addr })
    }

    fn export_whole(&self, cell: &HeapCell<B>, lie: &Lie) -> AllocResult<Pieces<B>, B> {
        // Whoever gives segments back does so under this lock, so that the token can be out of the
        // table, and the table unlocked, while the backend works.
        let _growth = self.devices[cell.device.index()].lock_growth();
        let segment = cell.state.lock().body.tokens.remove(&lie.segment);
        let segment = segment.expect("I10: a segment obtained whole has its token");
        let token = match &segment {
            SegmentToken::Backend(segment) => Some(self.backend.export_segment(segment)),
            SegmentToken::Source(_) => None,
        };
        cell.state.lock().body.tokens.insert(lie.segment, segment);
        let token = token.ok_or_else(|| AllocError::InvalidArgument {
            what: "share",
            why: format!("the segment at {} is of a pool's own source", lie.base),
        })?;
        let token =
            token.map_err(|source| AllocError::Backend { op: BackendOp::ExportSegment, source })?;
        let id = MemoryId::segment(self.id, cell.index, lie.segment_serial);
        let piece = SharedPiece { id, bytes: lie.segment_bytes, kind: PieceKind::Segment };
        Ok(Pieces { start: lie.base, pieces: vec![piece], tokens: vec![token] })
    }

    fn export_pages(&self, cell: &HeapCell<B>, lie: &Lie, addr: Addr) -> AllocResult<Pieces<B>, B> {
        let device = &self.devices[cell.device.index()];
        let _growth = device.lock_growth();
        let source = cell.owner().1;
        let paging = self.paging_of(&source).expect("expandable segments have a pager");
        let _paging = device.begin_paging().ok_or_else(|| AllocError::InvalidArgument {
            what: "share",
            why: "called by the backend while it maps memory".to_owned(),
        })?;
        let mut found = Pieces { start: addr, pieces: Vec::new(), tokens: Vec::new() };
        let mut result = Ok(());
        paging.pager().visit(lie.base, addr, lie.bytes, &mut |mapped| {
            if result.is_err() {
                return;
            }
            let page: &B::Page = mapped.page.downcast_ref().expect("the pager's are the backend's");
            match self.backend.export_page(page) {
                Ok(token) => {
                    if found.pieces.is_empty() {
                        found.start = mapped.at;
                    }
                    let id = MemoryId::page(mapped.serial);
                    let bytes = page.bytes();
                    found.pieces.push(SharedPiece { id, bytes, kind: PieceKind::Page });
                    found.tokens.push(token);
                }
                Err(source) => {
                    result = Err(AllocError::Backend { op: BackendOp::ExportPage, source });
                }
            }
        });
        result.map(|()| found)
    }
}

/// Where a held block lies.
fn lie<B: Backend>(body: &HeapBody<B>, id: BlockId) -> Lie {
    let index = body.heap.blocks.resolve(id).expect("I10: a held block exists");
    let block = &body.heap.blocks[index];
    let segment = &body.heap.segments[block.segment];
    Lie {
        segment: block.segment,
        base: segment.base,
        segment_bytes: segment.bytes,
        segment_serial: segment.serial,
        kind: segment.kind,
        bytes: block.bytes,
    }
}

impl<B: Backend> Shared<B> {
    /// A hold is gone. The block, if it was freed, is free with the last one.
    fn end_share(&self, heap: u32, id: BlockId) {
        let mut op = self.begin();
        let cell = self.heaps.get(heap).expect("I10: a hold names its heap");
        self.edit(cell, &mut op.trace, |body, ledger| {
            let block = body.heap.blocks.resolve(id).expect("I10: a held block exists");
            body.remove_share(block);
            match body.heap.blocks[block].state {
                BlockState::Draining { .. } => {
                    body.heap.event_reached(block, ledger);
                }
                _ => {
                    let used = body.uses.contains_key(&block) || body.shares_of(block) > 0;
                    body.heap.blocks[block].used = used;
                }
            }
        });
    }
}

impl<B: Backend> HeapBody<B> {
    /// Holds on a block.
    pub(super) fn shares_of(&self, block: BlockIdx) -> u32 {
        self.shares.get(&block).copied().unwrap_or(0)
    }

    fn remove_share(&mut self, block: BlockIdx) {
        let Some(count) = self.shares.get_mut(&block) else { return };
        *count -= 1;
        if *count == 0 {
            self.shares.remove(&block);
        }
    }
}
