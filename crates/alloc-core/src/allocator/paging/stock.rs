//! What growth can move: the free memory of handles, piece by piece.

use crate::block::{BlockId, BlockIdx};
use crate::handles::{HandleId, Layout};
use crate::heap::{Heap, SegmentId};
use crate::lane::Lane;
use crate::size_class::SizeClass;
use crate::units::Addr;

/// Free bytes of one handle that lie in one free block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Position of its heap in the list that was looked at; 0 is the one that wants memory.
    pub(super) heap: usize,
    pub(super) block: BlockIdx,
    /// Names the block as it was seen.
    pub(super) id: BlockId,
    pub(super) segment: SegmentId,
    pub(super) at: Addr,
    pub(super) bytes: u64,
    pub(super) handle: HandleId,
    /// Where it starts in the handle.
    pub(super) from: u64,
    /// Frees of its heap since part of the block became free.
    pub(super) age: u32,
}

/// Pieces, and which handles they are of.
#[derive(Debug, Default)]
pub(super) struct Stock {
    pub(super) pieces: Vec<Piece>,
    /// For each handle its first piece and the sum of their bytes.
    handles: Vec<(u32, u64)>,
    /// For each piece the next one of its handle.
    next: Vec<u32>,
}

const NONE: u32 = u32::MAX;

/// The smallest free blocks to look at, by class.
pub(super) type Least = [u64; 2];

impl Stock {
    pub(super) fn new(layout: &Layout) -> Self {
        let handles = vec![(NONE, 0); layout.handles_end()];
        Stock { pieces: Vec::new(), handles, next: Vec::new() }
    }

    /// Adds the free memory of the heap that wants some.
    pub(super) fn add_own(&mut self, heap: &Heap, layout: &Layout, least: Least) {
        self.add(0, heap, layout, least);
    }

    /// Adds handles of another heap that had no byte in use when its clock was at `clock`, and none
    /// since.
    pub(super) fn add_whole(&mut self, index: usize, heap: &Heap, layout: &Layout, clock: u32) {
        let age = heap.clock.wrapping_sub(clock);
        let mut all = Stock::new(layout);
        all.add(index, heap, layout, [BLOCK_OF_PAGES; 2]);
        for piece in &all.pieces {
            if all.is_idle(piece.handle, layout) && all.age(piece.handle) >= age {
                self.push(*piece);
            }
        }
    }

    fn add(&mut self, index: usize, heap: &Heap, layout: &Layout, least: Least) {
        for lane in SizeClass::ALL.into_iter().flat_map(Lane::of) {
            let free = &heap.lanes[lane.index()].free;
            for (key, block) in free.iter_from(least[lane.class().index()]) {
                let b = &heap.blocks[block];
                if !b.expandable {
                    continue;
                }
                let base = heap.segments[b.segment].base;
                let end = b.end();
                for (view, handle) in layout.views(base, key.addr, end) {
                    let at = view.max(key.addr);
                    let to = (view + layout[handle].bytes).min(end);
                    self.push(Piece {
                        heap: index,
                        block,
                        id: heap.blocks.id(block),
                        segment: b.segment,
                        at,
                        bytes: to - at,
                        handle,
                        from: at - view,
                        age: heap.clock.wrapping_sub(b.freed_at),
                    });
                }
            }
        }
    }

    fn push(&mut self, piece: Piece) {
        let entry = &mut self.handles[piece.handle.index()];
        self.next.push(entry.0);
        *entry = (self.pieces.len() as u32, entry.1 + piece.bytes);
        self.pieces.push(piece);
    }

    /// Positions of the pieces of a handle.
    pub(super) fn of(&self, handle: HandleId) -> impl Iterator<Item = usize> {
        let some = |at: u32| (at != NONE).then_some(at as usize);
        std::iter::successors(some(self.handles[handle.index()].0), move |at| some(self.next[*at]))
    }

    /// Whether no byte of the handle is in use.
    pub(super) fn is_idle(&self, handle: HandleId, layout: &Layout) -> bool {
        self.handles[handle.index()].1 == layout[handle].bytes
    }

    /// Frees since the last of its pieces became free.
    pub(super) fn age(&self, handle: HandleId) -> u32 {
        self.of(handle).map(|at| self.pieces[at].age).min().unwrap_or(0)
    }

    /// The position of one piece of every handle.
    pub(super) fn firsts(&self) -> impl Iterator<Item = usize> {
        let is_first = |at: &usize| self.handles[self.pieces[*at].handle.index()].0 == *at as u32;
        (0..self.pieces.len()).filter(is_first)
    }

    /// The handles without a byte in use.
    pub(super) fn idle(&self, layout: &Layout) -> Vec<HandleId> {
        let handles = self.firsts().map(|at| self.pieces[at].handle);
        handles.filter(|handle| self.is_idle(*handle, layout)).collect()
    }
}

/// No handle is smaller.
pub(super) const BLOCK_OF_PAGES: u64 = crate::backend::SEGMENT_ALIGN;
