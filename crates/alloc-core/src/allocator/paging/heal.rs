//! Handles in pieces: what a part was moved for is over when the part is free again. It then returns
//! to the view that the rest is in, where smaller requests find it between their like and the handle
//! becomes whole.

use super::stock::Stock;
use super::window::Return;
use super::{Store, Supply};
use crate::allocator::pools::{OwnSource, is_same};
use crate::allocator::{HeapCell, Shared};
use crate::backend::Backend;
use crate::handles::{HandleId, Layout, Place};
use crate::heap::Heap;
use crate::size_class::BLOCK_BYTES_MIN;
use crate::trace::TraceBuffer;
use crate::units::DeviceId;

impl<B: Backend> Shared<B> {
    /// Brings the free pieces of handles of `cell` together, at no cost. Returns whether any moved.
    pub(super) fn reunite(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        supply: &Supply<B>,
        trace: &mut TraceBuffer,
    ) -> bool {
        let returns = {
            let state = cell.lock();
            returns(&state.body.heap, &store.layout(), &supply.stock)
        };
        !returns.is_empty() && self.bring(store, cell, &returns, supply, trace)
    }

    /// Makes idle handles of one source whole, so that they can be given back.
    pub(in crate::allocator) fn reunite_all(
        &self,
        store: &Store<B>,
        device: DeviceId,
        source: &OwnSource<B>,
        trace: &mut TraceBuffer,
    ) {
        for cell in self.devices[device.index()].heaps() {
            let (pool, other) = cell.owner();
            if pool.is_pinned() || !is_same(source, &other) {
                continue;
            }
            let supply = self.own_stock(store, &cell, [BLOCK_BYTES_MIN; 2]);
            self.reunite(store, &cell, &supply, trace);
        }
    }
}

/// The moves that bring the free pieces of one heap together, handle by handle.
pub(super) fn returns(heap: &Heap, layout: &Layout, stock: &Stock) -> Vec<Return> {
    let mut found = Vec::new();
    for first in stock.firsts() {
        let piece = &stock.pieces[first];
        if piece.heap != 0 || layout[piece.handle].homes.len() < 2 {
            continue;
        }
        if let Some(main) = main_view(layout, stock, piece.handle) {
            found.extend(returns_to(heap, stock, piece.handle, main));
        }
    }
    found
}

/// The view that a handle belongs in: the one with its bytes in use, if that is one; without any in
/// use, one that was made for all of it.
fn main_view(layout: &Layout, stock: &Stock, handle: HandleId) -> Option<Place> {
    if stock.is_idle(handle, layout) {
        let mut homes = layout[handle].homes.iter().map(|home| home.view);
        let views = &layout[handle].views;
        let is_whole = |at: &Place| views.iter().any(|view| view.place == *at && !view.partial);
        return homes.clone().find(is_whole).or_else(|| homes.next());
    }
    let free_in = |view: Place, from: u64, bytes: u64| -> u64 {
        let pieces = stock.of(handle).map(|at| &stock.pieces[at]);
        let inside = pieces.filter(|p| p.from >= from && p.from < from + bytes);
        inside.filter(|p| p.at == view.at + p.from).map(|p| p.bytes).sum()
    };
    let mut used = layout[handle]
        .homes
        .iter()
        .filter(|home| free_in(home.view, home.from, home.bytes) < home.bytes)
        .map(|home| home.view);
    let main = used.next()?;
    used.all(|view| view == main).then_some(main)
}

fn returns_to(heap: &Heap, stock: &Stock, handle: HandleId, main: Place) -> Vec<Return> {
    let segment = heap.segments.iter().find(|(_, segment)| segment.base == main.base);
    let Some((segment, _)) = segment else { return Vec::new() };
    let to = |piece: usize| main.at + stock.pieces[piece].from;
    let away = stock.of(handle).filter(|piece| stock.pieces[*piece].at != to(*piece));
    away.map(|piece| Return { piece, segment, at: to(piece) }).collect()
}
