//! New ranges: which handles, old and new, to put side by side.

use super::shape::{Shape, Start};
use super::stock::{Piece, Stock};
use crate::backend::SEGMENT_ALIGN;
use crate::block::BlockIdx;
use crate::handles::{HandleId, Layout, Part};
use crate::heap::SegmentId;
use crate::size_class::SizeClass;
use crate::units::Addr;
use std::cmp::Reverse;

/// Address space in which nothing is mapped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Site {
    pub(super) segment: SegmentId,
    pub(super) base: Addr,
    pub(super) at: Addr,
    pub(super) bytes: u64,
    /// The free block that ends there, with its size.
    pub(super) left: Option<(BlockIdx, u64)>,
}

impl Site {
    pub(super) fn left_bytes(&self) -> u64 {
        self.left.map_or(0, |(_, bytes)| bytes)
    }
}

/// A range to be made.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) site: Site,
    pub(super) parts: Vec<Part>,
    /// Positions in the stock of what moves there.
    pub(super) pieces: Vec<usize>,
}

/// What a plan is made for.
pub(super) struct Task<'a> {
    pub(super) stock: &'a Stock,
    pub(super) layout: &'a Layout,
    pub(super) class: SizeClass,
    pub(super) wanted: u64,
    /// Sizes of handles are multiples of this.
    pub(super) unit: u64,
    /// What may be created before memory is moved.
    pub(super) headroom: u64,
    /// What is created at once at least, if anything.
    pub(super) step: u64,
    pub(super) handle_bytes_max: u64,
    /// The smallest part of a handle that moves without the rest.
    pub(super) part_bytes_min: u64,
    pub(super) views_max: usize,
    /// Nothing else is left: whatever helps may be used.
    pub(super) desperate: bool,
}

/// Of so many new handles and more the last ones are small.
const MANY: usize = 8;
/// How small.
const FINE_BYTES: u64 = 4 << 20;

/// Halves the last handle until it is small. Where a large request ends, and where one of nearly its
/// size will end in the same memory, half of a handle is left over on average.
fn refine_end(parts: &mut Vec<Part>) {
    while let Some(&Part::New(last)) = parts.last()
        && last > FINE_BYTES
    {
        let half = (last / 2).next_multiple_of(SEGMENT_ALIGN);
        parts.pop();
        parts.extend([Part::New(half), Part::New(last - half)]);
    }
}

/// New handles of `bytes` together, each at most `largest`.
pub(super) fn cut(bytes: u64, largest: u64) -> Vec<Part> {
    let mut parts = vec![Part::New(largest); (bytes / largest) as usize];
    if !bytes.is_multiple_of(largest) {
        parts.push(Part::New(bytes % largest));
    }
    if parts.len() >= MANY {
        refine_end(&mut parts);
    }
    parts
}

/// Free bytes at one end of a handle that is partly in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct End {
    pub(super) handle: HandleId,
    /// Where they start in the handle.
    pub(super) from: u64,
    pub(super) bytes: u64,
}

impl Task<'_> {
    /// The range to make where idle memory has to help: of those that continue the free block of
    /// `behind`, begin with a free tail at `apart`, or with nothing there, the one that costs least.
    pub(super) fn compose(&self, behind: &Site, apart: &Site) -> Plan {
        if let Some(plan) = self.lend(apart) {
            return plan;
        }
        let idle = self.idle_by_age();
        let (tails, mut heads) = self.ends();
        heads.sort_by_key(|head| head.bytes);
        let near_idle: Vec<_> =
            idle.iter().copied().filter(|handle| !self.is_in(behind, *handle)).collect();
        let with_left = Start {
            site: *behind,
            tail: None,
            bytes: behind.left_bytes(),
            idle: &near_idle,
            // None of them is in that block: the rest of its handle is mapped where the block ends.
            heads: &heads,
        };
        let apart = Site { left: None, ..*apart };
        let with_nothing = Start { site: apart, tail: None, bytes: 0, idle: &idle, heads: &heads };
        let tails = tails.into_iter().filter(|tail| tail.bytes < self.wanted);
        let with_tails =
            tails.map(|tail| Start { tail: Some(tail), bytes: tail.bytes, ..with_nothing });
        let starts = std::iter::once(with_left).chain(with_tails).chain([with_nothing]);
        let shapes = starts.map(|start| self.cheapest_from(start));
        let shape = shapes.min_by_key(|shape| shape.cost).expect("there is a start");
        self.lay_out(&shape)
    }

    /// Whether the free block of a site has bytes of a handle.
    fn is_in(&self, site: &Site, handle: HandleId) -> bool {
        let left = site.left.map(|(block, _)| block);
        self.pieces(handle).any(|piece| piece.heap == 0 && Some(piece.block) == left)
    }

    /// For a small request, when nothing else is left: any one piece that is large enough. Those of its
    /// own class it would have found.
    fn lend(&self, site: &Site) -> Option<Plan> {
        if self.class != SizeClass::Small || !self.desperate {
            return None;
        }
        let pieces = self.stock.pieces.iter().enumerate();
        let fits = pieces.filter(|(_, piece)| {
            let views = self.layout[piece.handle].views.len();
            piece.heap == 0 && piece.bytes >= self.wanted && views < self.views_max
        });
        let (piece, _) = fits.min_by_key(|(_, piece)| (piece.bytes, piece.at))?;
        let Piece { handle, from, bytes, .. } = self.stock.pieces[piece];
        let mut plan = Plan { site: *site, parts: Vec::new(), pieces: Vec::new() };
        plan.add_end(self, Some(End { handle, from, bytes }));
        Some(plan)
    }

    /// Handles without a byte in use, longest unused first.
    fn idle_by_age(&self) -> Vec<HandleId> {
        let mut idle = self.stock.idle(self.layout);
        // Small requests would leave most of a large handle idle where only they can use it.
        let fits = |handle: &HandleId| {
            self.class == SizeClass::Large
                || self.desperate
                || self.layout[*handle].bytes <= self.unit
        };
        idle.retain(fits);
        idle.sort_by_cached_key(|handle| {
            let first = self.stock.of(*handle).map(|at| self.stock.pieces[at].at).min();
            (Reverse(self.stock.age(*handle)), first)
        });
        idle
    }

    /// The free ends and beginnings of handles of the own heap that are partly in use.
    fn ends(&self) -> (Vec<End>, Vec<End>) {
        let (mut tails, mut heads) = (Vec::new(), Vec::new());
        if self.class == SizeClass::Small && !self.desperate {
            return (tails, heads);
        }
        for first in self.stock.firsts() {
            let piece = &self.stock.pieces[first];
            let (handle, id) = (&self.layout[piece.handle], piece.handle);
            let partly = piece.heap == 0
                && !self.stock.is_idle(id, self.layout)
                && handle.views.len() < self.views_max;
            if !partly {
                continue;
            }
            let (mut head, mut tail) = (0, handle.bytes);
            // What is free may be so in several views. The pieces are few and in no order.
            while let Some(piece) = self.pieces(id).find(|p| p.from == head) {
                head += piece.bytes;
            }
            while let Some(piece) = self.pieces(id).find(|p| p.from + p.bytes == tail) {
                tail = piece.from;
            }
            if head >= self.part_bytes_min {
                heads.push(End { handle: id, from: 0, bytes: head });
            }
            if handle.bytes - tail >= self.part_bytes_min {
                tails.push(End { handle: id, from: tail, bytes: handle.bytes - tail });
            }
        }
        (tails, heads)
    }

    fn pieces(&self, handle: HandleId) -> impl Iterator<Item = &Piece> {
        self.stock.of(handle).map(|at| &self.stock.pieces[at])
    }

    /// Lays a range out: a tail, idle handles, new ones and a head.
    fn lay_out(&self, shape: &Shape<'_>) -> Plan {
        let mut plan = Plan { site: shape.start.site, parts: Vec::new(), pieces: Vec::new() };
        plan.add_end(self, shape.start.tail);
        // The request ends in the last one, and leaves the rest of it.
        let mut idle = shape.idle.to_vec();
        idle.sort_by_key(|handle| Reverse(self.layout[*handle].bytes));
        for handle in idle {
            plan.add_idle(self, handle);
        }
        plan.parts.extend(cut(shape.create, self.handle_bytes_max));
        plan.add_end(self, shape.head);
        plan
    }
}

impl Plan {
    fn add_end(&mut self, task: &Task<'_>, end: Option<End>) {
        let Some(end) = end else { return };
        let bytes = task.layout[end.handle].bytes;
        let part = Part::Known { handle: end.handle, bytes, from: end.from, moves: end.bytes };
        self.parts.push(part);
        self.pieces.extend(task.stock.of(end.handle).filter(|at| {
            let piece = &task.stock.pieces[*at];
            piece.from >= end.from && piece.from < end.from + end.bytes
        }));
    }

    fn add_idle(&mut self, task: &Task<'_>, handle: HandleId) {
        let bytes = task.layout[handle].bytes;
        self.parts.push(Part::Known { handle, bytes, from: 0, moves: bytes });
        self.pieces.extend(task.stock.of(handle));
    }

    /// Bytes to be created.
    pub(super) fn created(&self) -> u64 {
        self.parts.iter().map(|part| if let Part::New(bytes) = part { *bytes } else { 0 }).sum()
    }

    /// The addresses that become free memory: where they start, and how many.
    pub(super) fn opened(&self) -> (Addr, u64) {
        let skipped = |part: Option<&Part>| match part {
            Some(Part::Known { from, bytes, moves, .. }) => (*from, bytes - from - moves),
            _ => (0, 0),
        };
        let all: u64 = self.parts.iter().map(Part::bytes).sum();
        let (before, after) = (skipped(self.parts.first()).0, skipped(self.parts.last()).1);
        (self.site.at + before, all - before - after)
    }
}
