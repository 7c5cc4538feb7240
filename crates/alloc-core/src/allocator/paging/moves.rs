//! Carrying plans out: memory leaves the blocks that it is free in and becomes free elsewhere.

use super::compose::{Plan, Site};
use super::stock::Piece;
use super::window::Return;
use super::{Setback, Store, Supply, backend_error};
use crate::allocator::allocate::HandedOut;
use crate::allocator::grow::Shortage;
use crate::allocator::{AllocResult, HeapCell, Shared};
use crate::backend::{Backend, BackendError, ErrorKind, SEGMENT_ALIGN};
use crate::block::{BlockIdx, BlockState};
use crate::directory::Owner;
use crate::handles::{Part, Place};
use crate::heap::{Heap, LastUse, PageRun, Request};
use crate::trace::TraceBuffer;
use crate::units::Addr;

impl<B: Backend> Shared<B> {
    /// Brings pieces back to where they are mapped already and serves the request there. No driver
    /// call is made.
    pub(super) fn reopen(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        window: &[Return],
        supply: &Supply<B>,
        trace: &mut TraceBuffer,
    ) -> AllocResult<Result<HandedOut, Setback>, B> {
        if !self.bring(store, cell, window, supply, trace) {
            return Ok(Err(Setback::Interrupted));
        }
        let served = self.edit(cell, trace, |body, ledger| body.serve(request, ledger));
        Ok(served.ok_or(Setback::Interrupted))
    }

    /// Brings pieces to other views of theirs. Returns whether all of them still were free; if not,
    /// everything is as before.
    pub(super) fn bring(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        window: &[Return],
        supply: &Supply<B>,
        trace: &mut TraceBuffer,
    ) -> bool {
        let pieces: Vec<usize> = window.iter().map(|back| back.piece).collect();
        if !self.vacate(supply, &pieces, trace) {
            return false;
        }
        self.bring_home(store, cell, window, supply);
        self.edit(cell, trace, |body, ledger| {
            for back in window {
                let piece = &supply.stock.pieces[back.piece];
                let run = run_at(back.segment, back.at, piece.bytes);
                self.directory.register(run.addr, run.bytes, owner(cell, &run));
                body.heap.open_free(&run, supply.last_use(cell, piece), ledger);
            }
        });
        self.note_moves(cell, window.len());
        true
    }

    fn bring_home(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        window: &[Return],
        supply: &Supply<B>,
    ) {
        let state = cell.lock();
        let mut layout = store.layout();
        for back in window {
            let piece = &supply.stock.pieces[back.piece];
            let base = state.body.heap.segments[back.segment].base;
            let view = Place { base, at: Addr::new(back.at.get() - piece.from) };
            layout.rehome(piece.handle, piece.from, piece.bytes, view);
        }
    }

    fn note_moves(&self, cell: &HeapCell<B>, pieces: usize) {
        let device = &self.devices[cell.device.index()];
        device.counters.lock().num_moves += pieces as i64;
    }

    /// Makes a range as planned and serves the request there. On failure everything is back where it
    /// was.
    pub(super) fn extend(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        plan: &Plan,
        supply: &Supply<B>,
        trace: &mut TraceBuffer,
    ) -> AllocResult<Result<HandedOut, Setback>, B> {
        let site = &plan.site;
        let span = plan.parts.iter().map(Part::bytes).sum();
        if !store.layout().claim(site.base, site.at, span) {
            return Ok(Err(Setback::Interrupted));
        }
        let held = self.hold_left(cell, site);
        let ready = held.filter(|_| self.vacate(supply, &plan.pieces, trace));
        let backed = ready.map(|_| store.back(site.base, site.at, &plan.parts));
        store.layout().release_claim(site.base, site.at, span);
        let (Some(held), Some(backed)) = (held, backed) else {
            self.let_go(cell, held.flatten());
            return Ok(Err(Setback::Interrupted));
        };
        if let Err(error) = backed {
            self.return_all(supply, &plan.pieces, trace);
            self.let_go(cell, held);
            return match error.source.kind() {
                ErrorKind::OutOfMemory => Ok(Err(Setback::Shortage(Shortage::Memory))),
                _ => Err(backend_error(error)),
            };
        }
        if plan.created() > 0 {
            self.account_growth(&self.devices[cell.device.index()], plan.created());
        }
        self.note_moves(cell, plan.pieces.len());
        // What is left of the run may be free: it was in use as lately as any of it.
        let pieces = plan.pieces.iter().map(|at| &supply.stock.pieces[*at]);
        let used = pieces.map(|piece| supply.last_use(cell, piece)).min().unwrap_or(LastUse::Done);
        let (addr, bytes) = plan.opened();
        let run = run_at(site.segment, addr, bytes);
        let block = self.edit(cell, trace, |body, ledger| {
            self.directory.register(run.addr, run.bytes, owner(cell, &run));
            let block = body.heap.open(&run, used, held, ledger);
            body.hand_out(block, request, ledger)
        });
        Ok(Ok(block))
    }

    /// Takes the free block that a site begins with. `None` if it is not there any more.
    fn hold_left(&self, cell: &HeapCell<B>, site: &Site) -> Option<Option<BlockIdx>> {
        let Some((block, bytes)) = site.left else { return Some(None) };
        let mut state = cell.lock();
        let heap = &mut state.body.heap;
        let current = &heap.blocks[block];
        let same =
            current.state == BlockState::Free && current.bytes == bytes && current.end() == site.at;
        same.then(|| {
            heap.remove_free(block);
            Some(block)
        })
    }

    fn let_go(&self, cell: &HeapCell<B>, held: Option<BlockIdx>) {
        if let Some(held) = held {
            cell.lock().body.heap.abandon_growth(held);
        }
    }

    /// Turns pieces into holes, so that nobody else uses them. Returns whether all of them still were
    /// free; if not, everything is as before.
    fn vacate(&self, supply: &Supply<B>, pieces: &[usize], trace: &mut TraceBuffer) -> bool {
        // From the highest address down: what is left of a block below a hole keeps its name.
        let mut order = pieces.to_vec();
        order.sort_unstable_by_key(|at| std::cmp::Reverse(supply.stock.pieces[*at].at));
        for (done, at) in order.iter().enumerate() {
            let piece = &supply.stock.pieces[*at];
            let closed = self.edit(&supply.cells[piece.heap], trace, |body, ledger| {
                let heap = &mut body.heap;
                let Some(block) = heap.blocks.resolve(piece.id) else { return false };
                let current = &heap.blocks[block];
                let inside = current.state == BlockState::Free
                    && current.addr <= piece.at
                    && piece.at + piece.bytes <= current.end();
                if inside {
                    let run = home_run(piece);
                    let hole = heap.close(block, &run, ledger);
                    self.unregister_closed(heap, hole, &run);
                }
                inside
            });
            if !closed {
                self.return_all(supply, &order[..done], trace);
                return false;
            }
        }
        true
    }

    /// Forgets the pages of a closed run that have no backed byte left.
    fn unregister_closed(&self, heap: &Heap, hole: BlockIdx, run: &PageRun) {
        let hole = &heap.blocks[hole];
        let down = |addr: Addr| addr.get() / SEGMENT_ALIGN * SEGMENT_ALIGN;
        let up = |addr: Addr| addr.get().next_multiple_of(SEGMENT_ALIGN);
        let first = down(run.addr).max(up(hole.addr));
        let end = up(run.addr + run.bytes).min(down(hole.end()));
        if first < end {
            self.directory.unregister(Addr::new(first), end - first);
        }
    }

    /// Undoes [`vacate`](Self::vacate).
    fn return_all(&self, supply: &Supply<B>, pieces: &[usize], trace: &mut TraceBuffer) {
        for at in pieces {
            let piece = &supply.stock.pieces[*at];
            let run = home_run(piece);
            let cell = &supply.cells[piece.heap];
            self.edit(cell, trace, |body, ledger| {
                self.directory.register(run.addr, run.bytes, owner(cell, &run));
                body.heap.open_free(&run, LastUse::Ago(piece.age), ledger);
            });
        }
    }
}

fn owner<B: Backend>(cell: &HeapCell<B>, run: &PageRun) -> Owner {
    Owner { heap: cell.index, segment: run.segment }
}

const fn run_at(segment: crate::heap::SegmentId, addr: Addr, bytes: u64) -> PageRun {
    PageRun { segment, addr, bytes, page_bytes: bytes }
}

const fn home_run(piece: &Piece) -> PageRun {
    run_at(piece.segment, piece.at, piece.bytes)
}
