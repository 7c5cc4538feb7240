//! Old layouts: address space where free memory, and views of memory that is free elsewhere, lie side
//! by side. It serves a request without a driver call.

use super::stock::{Piece, Stock};
use crate::block::BlockIdx;
use crate::handles::{HandleId, Layout};
use crate::heap::{Heap, SegmentId};
use crate::lane::Lane;
use crate::units::Addr;

/// A piece and where it moves to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Return {
    /// Position in the stock.
    pub(super) piece: usize,
    pub(super) segment: SegmentId,
    pub(super) at: Addr,
}

enum Item {
    Free(BlockIdx),
    Away(Return),
}

/// Items that touch.
#[derive(Default)]
struct Stretch {
    items: Vec<(Item, u64)>,
    bytes: u64,
    end: Addr,
}

/// Order of preference: few bytes of handles that are idle, so that those stay whole; few moves; a
/// tight fit.
type Score = (u64, usize, u64);

struct Search<'a> {
    stock: &'a Stock,
    layout: &'a Layout,
    wanted: u64,
    stretch: Stretch,
    best: Option<(Score, Vec<Return>)>,
}

/// The pieces whose return gives a heap a free block of `wanted` bytes.
pub(super) fn find(
    heap: &Heap,
    layout: &Layout,
    stock: &Stock,
    lane: Lane,
    wanted: u64,
) -> Option<Vec<Return>> {
    let mut search = Search { stock, layout, wanted, stretch: Stretch::default(), best: None };
    for hole in heap.lanes[lane.index()].unmapped.values() {
        search.walk(heap, layout, *hole);
    }
    search.flush();
    search.best.map(|(_, returns)| returns)
}

impl Search<'_> {
    /// Adds one hole and the free blocks around it.
    fn walk(&mut self, heap: &Heap, layout: &Layout, hole: BlockIdx) {
        let block = &heap.blocks[hole];
        let base = heap.segments[block.segment].base;
        let [below, above] = heap.free_around(hole);
        if let Some(below) = below.filter(|_| self.stretch.end != block.addr) {
            let free = &heap.blocks[below];
            self.add(Item::Free(below), free.addr, free.bytes);
        }
        for (view, handle) in layout.views(base, block.addr, block.end()) {
            let mut from = 0;
            // The pieces of a handle are few and in no order.
            while let Some((at, piece)) = self.next_piece(handle, from) {
                let to = view + piece.from;
                if piece.at != to && to >= block.addr && to + piece.bytes <= block.end() {
                    let back = Return { piece: at, segment: block.segment, at: to };
                    self.add(Item::Away(back), to, piece.bytes);
                }
                from = piece.from + piece.bytes;
            }
        }
        if let Some(above) = above {
            let free = &heap.blocks[above];
            self.add(Item::Free(above), free.addr, free.bytes);
        }
    }

    fn next_piece(&self, handle: HandleId, from: u64) -> Option<(usize, Piece)> {
        let pieces = self.stock.of(handle).map(|at| (at, self.stock.pieces[at]));
        // All bytes of a handle belong to one heap: from another one it comes whole.
        let whole = self.layout[handle].bytes;
        let pieces = pieces.filter(|(_, piece)| piece.heap == 0 || piece.bytes == whole);
        pieces.filter(|(_, piece)| piece.from >= from).min_by_key(|(_, piece)| piece.from)
    }

    fn add(&mut self, item: Item, at: Addr, bytes: u64) {
        if self.stretch.end != at {
            self.flush();
        }
        self.stretch.items.push((item, bytes));
        self.stretch.bytes += bytes;
        self.stretch.end = at + bytes;
    }

    /// Ends the stretch and looks at the windows in it that are large enough.
    fn flush(&mut self) {
        let stretch = std::mem::take(&mut self.stretch);
        if stretch.bytes < self.wanted {
            self.stretch.items = stretch.items;
            self.stretch.items.clear();
            return;
        }
        let items = &stretch.items;
        let (mut first, mut bytes) = (0, 0);
        for last in 0..items.len() {
            let clash = (first..last).rev().find(|at| self.clashes(&items[*at].0, &items[last].0));
            if let Some(clash) = clash {
                bytes -= items[first..=clash].iter().map(|item| item.1).sum::<u64>();
                first = clash + 1;
            }
            bytes += items[last].1;
            while bytes - items[first].1 >= self.wanted {
                bytes -= items[first].1;
                first += 1;
            }
            if bytes >= self.wanted {
                self.offer(&items[first..=last], bytes);
            }
        }
    }

    /// Whether two items of one stretch exclude each other: no byte can be in two places, and what
    /// moves away from a free block is missing there.
    fn clashes(&self, one: &Item, other: &Item) -> bool {
        let is_in = |back: &Return, block: BlockIdx| {
            let piece = &self.stock.pieces[back.piece];
            piece.heap == 0 && piece.block == block
        };
        match (one, other) {
            (Item::Free(_), Item::Free(_)) => false,
            (Item::Away(one), Item::Away(other)) => one.piece == other.piece,
            (Item::Away(back), Item::Free(block)) | (Item::Free(block), Item::Away(back)) => {
                is_in(back, *block)
            }
        }
    }

    fn offer(&mut self, items: &[(Item, u64)], bytes: u64) {
        let returns = || {
            items.iter().filter_map(|(item, bytes)| match item {
                Item::Away(back) => Some((back, *bytes)),
                Item::Free(_) => None,
            })
        };
        let is_idle =
            |back: &Return| self.stock.is_idle(self.stock.pieces[back.piece].handle, self.layout);
        let idle = returns().filter(|(back, _)| is_idle(back)).map(|(_, bytes)| bytes).sum();
        let score = (idle, returns().count(), bytes);
        if self.best.as_ref().is_none_or(|(best, _)| score < *best) {
            self.best = Some((score, returns().map(|(back, _)| *back).collect()));
        }
    }
}
