//! Growth of policy `ours` on expandable segments: memory is moved before more is taken.
//!
//! New handles are created while what is reserved stays within a small margin of what was ever
//! needed. At that line a request is served from memory that is free elsewhere: first where it is
//! mapped already side by side, at no cost (`window`); else by mapping idle handles once more, in one
//! run that may begin with the free tail of a partly used handle and end with the free head of
//! another (`shape` says which, `compose` lays it out). Only what these cannot cover is created beyond
//! the line. Runs under the growth lock of the device.

mod compose;
mod heal;
mod moves;
mod pace;
mod shape;
mod sites;
mod stock;
mod terms;
mod window;

use super::allocate::HandedOut;
use super::grow::{Grown, Shortage};
use super::pools::is_same;
use super::{AllocResult, Device, HeapCell, Paging, Shared};
use crate::backend::{Backend, Completion, SEGMENT_ALIGN};
use crate::error::AllocError;
use crate::handles::{HandleStore, Part};
use crate::heap::{LastUse, Request};
use crate::pager::PagerError;
use crate::size_class::{BLOCK_BYTES_MIN, SizeClass};
use crate::trace::TraceBuffer;
use crate::units::DeviceId;
use compose::{Plan, Site, Task, cut};
use std::sync::Arc;
use std::time::Duration;
use stock::{BLOCK_OF_PAGES, Piece, Stock};
use terms::Terms;

pub(super) use pace::Pace;

type Store<B> = dyn HandleStore<<B as Backend>::Error>;

/// Why a plan could not be carried out.
enum Setback {
    Shortage(Shortage),
    /// Another thread took memory that the plan counted on.
    Interrupted,
}

/// What is granted at once where there is no time to move memory, as a part of the peak.
const STEPS_OF_HURRY: u64 = 32;

/// Plans that other threads may spoil before growth gives up on moving and takes new memory.
const ATTEMPTS: usize = 4;

impl<B: Backend> Shared<B> {
    /// One attempt to serve a request; see the module. `waiting`: whether it may wait for other
    /// streams to finish with handles that they freed.
    pub(super) fn grow_by_handles(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        waiting: bool,
        trace: &mut TraceBuffer,
    ) -> AllocResult<Grown<HandedOut>, B> {
        let device = &self.devices[cell.device.index()];
        self.trim_views(store, cell);
        let mut terms = self.terms(store, cell, request, waiting);
        let mut interrupted = 0;
        loop {
            match self.try_by_handles(store, cell, request, &terms, trace)? {
                Ok(block) => return Ok(Ok(block)),
                Err(Setback::Interrupted) if interrupted < ATTEMPTS => interrupted += 1,
                Err(Setback::Interrupted) => return Ok(Err(Shortage::Memory)),
                // The device holds less than it was taken to: what is reserved now is all there is.
                Err(Setback::Shortage(Shortage::Memory)) if !terms.desperate && !terms.pinned => {
                    terms.line = terms.line.min(device.reserved());
                    terms.desperate = true;
                    terms.step = 0;
                }
                Err(Setback::Shortage(shortage)) => return Ok(Err(shortage)),
            }
        }
    }

    /// Keeps the number of views in bounds. Unmapping waits for nothing, so only views go that were
    /// left before an event which the heap's stream has reached.
    fn trim_views(&self, store: &Store<B>, cell: &HeapCell<B>) {
        let most = self.settings.lock().ours.views_max as usize;
        let mark = cell.view_mark.lock().take();
        let crowded = mark.is_some() || store.layout().is_crowded(most);
        if !crowded || cell.pool().is_pinned() {
            *cell.view_mark.lock() = mark;
            return;
        }
        // An event that cannot be had tells nothing; the next growth asks again.
        let epoch = store.layout().epoch();
        let record = || self.record(&cell.stream).ok().flatten().map(|event| (epoch, event));
        let Some(mark) = mark.or_else(record) else { return };
        match self.backend.query(&mark.1) {
            Ok(Completion::Reached) => {
                let state = cell.lock();
                let segments = state.body.heap.segments.iter();
                let bases: Vec<_> =
                    segments.filter(|(_, s)| s.is_expandable()).map(|(_, s)| s.base).collect();
                drop(state);
                store.trim(&bases, most, mark.0);
            }
            Ok(Completion::Pending) => *cell.view_mark.lock() = Some(mark),
            Err(_) => {}
        }
    }

    fn try_by_handles(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        terms: &Terms,
        trace: &mut TraceBuffer,
    ) -> AllocResult<Result<HandedOut, Setback>, B> {
        let device = &self.devices[cell.device.index()];
        let reserved = device.reserved();
        let line = terms.line.min(device.limit().unwrap_or(u64::MAX));
        let headroom = line.saturating_sub(reserved) / terms.unit * terms.unit;
        let room = request.rounded + self.slack(store, terms);
        let (behind, _) = match self.sites(store, cell, request, terms, room)? {
            Ok(sites) => sites,
            Err(shortage) => return Ok(Err(Setback::Shortage(shortage))),
        };
        let need = (request.rounded - behind.left_bytes()).next_multiple_of(terms.unit);
        if need <= headroom {
            let ahead = request.rounded.saturating_mul(u64::from(terms.knobs.ahead));
            let ahead = ahead.max(terms.step).min(headroom).min(behind.bytes);
            let ahead = if terms.pinned { need } else { ahead };
            let create = (ahead / terms.unit * terms.unit).max(need);
            let create = self.within_limit(device, create, need);
            let parts = cut(create, terms.handle_bytes_max);
            return self.create(store, cell, request, behind, parts, trace);
        }
        if terms.pinned {
            return Ok(Err(Setback::Shortage(Shortage::Memory)));
        }
        if request.class == SizeClass::Small
            && !cell.is_short()
            && let Some(block) = self.search_siblings(cell, request, trace)
        {
            return Ok(Ok(block));
        }
        let now = self.now();
        if let Some(now) = now
            && let Some(create) = self.hurried(cell, terms, now, need)
        {
            let create = self.within_limit(device, create.min(behind.bytes), need);
            let parts = cut(create, terms.handle_bytes_max.max(terms.knobs.handle_bytes_calm));
            return self.create(store, cell, request, behind, parts, trace);
        }
        let result = self.move_memory(store, cell, request, terms, (headroom, room), trace);
        if let (Some(begin), Some(end)) = (now, self.now()) {
            device.pace.spend(end.saturating_sub(begin));
        }
        result
    }

    /// What to create where memory would be moved but there is no time for it: at least `need`. `None`
    /// if there is time, or if nothing else is left than moving: at the limit of the device, too.
    fn hurried(&self, cell: &HeapCell<B>, terms: &Terms, now: Duration, need: u64) -> Option<u64> {
        let device = &self.devices[cell.device.index()];
        let step = (terms.peak / STEPS_OF_HURRY).max(terms.knobs.margin_bytes_min).max(need);
        let step = step.next_multiple_of(terms.unit);
        let most = (terms.peak as f64 * terms.knobs.hurry_max) as u64;
        let allowed = !terms.desperate && self.within_limit(device, need, 0) == need;
        // Who spends its time here need not have spent it on moves yet.
        let haste = cell.state.lock().body.heap.rules.is_wide();
        let granted = allowed
            && (haste && device.pace.grant(step, most / 2)
                || !device.pace.has_time(now, terms.knobs.stall_share)
                    && device.pace.grant(step, most));
        granted.then_some(step)
    }

    /// Time since the clock's beginning, if there is a clock.
    pub(super) fn now(&self) -> Option<Duration> {
        let clock = self.clock.read().clone();
        clock.map(|clock| clock())
    }

    /// Serves the request from a range that continues `site` with new handles.
    fn create(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        site: Site,
        parts: Vec<Part>,
        trace: &mut TraceBuffer,
    ) -> AllocResult<Result<HandedOut, Setback>, B> {
        let plan = Plan { site, parts, pieces: Vec::new() };
        let nothing = self.own_stock(store, cell, [u64::MAX; 2]);
        self.extend(store, cell, request, &plan, &nothing, trace)
    }

    /// Serves the request from memory that is free elsewhere, and from new memory as far as that does
    /// not suffice. `headroom` is what may be created first, `room` the address space that it takes.
    fn move_memory(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        terms: &Terms,
        (headroom, room): (u64, u64),
        trace: &mut TraceBuffer,
    ) -> AllocResult<Result<HandedOut, Setback>, B> {
        let device = &self.devices[cell.device.index()];
        // From here to the driver calls of `extend` nobody else can change what handles there are: the
        // backend is not called, and so cannot call back.
        let quiet = self.quiet_heaps(cell, terms.waiting)?;
        let Some((behind, apart)) = self.find_sites(store, cell, request, terms, room) else {
            return Ok(Err(Setback::Interrupted));
        };
        let mut supply = self.supply(store, cell, terms, &quiet);
        if self.reunite(store, cell, &supply, trace) {
            let served = self.edit(cell, trace, |body, ledger| body.serve(request, ledger));
            if let Some(block) = served {
                return Ok(Ok(block));
            }
            supply = self.supply(store, cell, terms, &quiet);
        }
        let window = {
            let state = cell.lock();
            let (heap, layout) = (&state.body.heap, store.layout());
            window::find(heap, &layout, &supply.stock, terms.lane, request.rounded)
        };
        if let Some(window) = window {
            return self.reopen(store, cell, request, &window, &supply, trace);
        }
        let plan = {
            let layout = store.layout();
            let task = Task {
                stock: &supply.stock,
                layout: &layout,
                class: request.class,
                wanted: request.rounded,
                unit: terms.unit,
                headroom,
                step: terms.step,
                handle_bytes_max: terms.handle_bytes_max,
                part_bytes_min: terms.part_bytes_min(),
                // Views are dropped again at leisure.
                views_max: if terms.desperate {
                    usize::MAX
                } else {
                    terms.knobs.views_max as usize
                },
                desperate: terms.desperate,
            };
            task.compose(&behind, &apart)
        };
        if request.class == SizeClass::Small
            && plan.created() > headroom
            && let Some(block) = self.search_siblings(cell, request, trace)
        {
            return Ok(Ok(block));
        }
        if device.limit().is_some_and(|limit| device.reserved() + plan.created() > limit) {
            return Ok(Err(Setback::Shortage(Shortage::Memory)));
        }
        self.extend(store, cell, request, &plan, &supply, trace)
    }

    /// `bytes`, or as much less as the limit of the device asks for, but not less than `least`.
    fn within_limit(&self, device: &Device<B>, bytes: u64, least: u64) -> u64 {
        let left = device.limit().map_or(u64::MAX, |limit| limit.saturating_sub(device.reserved()));
        let left = left / SEGMENT_ALIGN * SEGMENT_ALIGN;
        bytes.min(left).max(least)
    }

    fn own_stock(&self, store: &Store<B>, cell: &HeapCell<B>, least: stock::Least) -> Supply<B> {
        let state = cell.lock();
        let layout = store.layout();
        let mut stock = Stock::new(&layout);
        stock.add_own(&state.body.heap, &layout, least);
        let own = self.heaps.get(cell.index).expect("I10: every heap is in the table");
        Supply { cells: vec![Arc::clone(own)], stock }
    }

    /// The other heaps of a device with memory to give: what was free in them at their clock is
    /// nobody's. Asks their streams without waiting, unless told to wait; those of its own stream need
    /// not be asked.
    fn quiet_heaps(&self, cell: &HeapCell<B>, waiting: bool) -> AllocResult<Vec<Quiet<B>>, B> {
        let source = cell.owner().1;
        let mut quiet = Vec::new();
        for other in self.devices[cell.device.index()].heaps() {
            let (pool, theirs) = other.owner();
            let away = other.index == cell.index || pool.is_pinned() || !is_same(&source, &theirs);
            if away || !has_idle_pages(&other) {
                continue;
            }
            let clock = if cell.is_sibling(&other) {
                Some(other.state.lock().body.heap.clock)
            } else {
                self.quiet_since(&other, waiting)?
            };
            quiet.extend(clock.map(|clock| (other, clock)));
        }
        Ok(quiet)
    }

    /// Records an event on every stream with memory to give, so that it can be told from then on what
    /// is quiet: while a graph is captured none can be had. Under the growth lock.
    pub(super) fn mark_idle_heaps(&self, device: DeviceId) {
        if self.captures_under_way() || !matches!(self.paging, Some(Paging::Handles(_))) {
            return;
        }
        for cell in self.devices[device.index()].heaps() {
            if cell.pool().is_pinned() || !has_idle_pages(&cell) || cell.mark.lock().is_some() {
                continue;
            }
            let clock = cell.lock().body.heap.clock;
            if let Ok(Some(event)) = self.record(&cell.stream) {
                *cell.mark.lock() = Some((clock, event));
            }
        }
    }

    fn quiet_since(&self, cell: &HeapCell<B>, waiting: bool) -> AllocResult<Option<u32>, B> {
        let clock = cell.lock().body.heap.clock;
        // Any stream but the caller's may begin to capture, or join a capture, at any moment then (I9).
        let only_marks = self.captures_under_way();
        if waiting && !only_marks {
            return Ok(self.synchronize(&cell.stream)?.then_some(clock));
        }
        // An event that cannot be had tells nothing; the next growth asks again.
        let mark = cell.mark.lock().take();
        let record = || self.record(&cell.stream).ok().flatten().map(|event| (clock, event));
        let mark = if only_marks { mark } else { mark.or_else(record) };
        let Some((clock, event)) = mark else { return Ok(None) };
        Ok(match self.backend.query(&event) {
            Ok(Completion::Reached) => {
                if only_marks {
                    *cell.mark.lock() = Some((clock, event));
                }
                Some(clock)
            }
            Ok(Completion::Pending) => {
                *cell.mark.lock() = Some((clock, event));
                None
            }
            Err(_) => None,
        })
    }

    /// All memory that may be used by `cell`'s stream now: what is free in its own heap at once, since
    /// its work is ordered after whatever used it; idle handles of others when their streams are known
    /// to be done with them.
    fn supply(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        terms: &Terms,
        quiet: &[Quiet<B>],
    ) -> Supply<B> {
        let small = if terms.desperate { BLOCK_BYTES_MIN } else { BLOCK_OF_PAGES };
        let mut supply = self.own_stock(store, cell, [small, BLOCK_BYTES_MIN]);
        for (other, clock) in quiet {
            let state = other.lock();
            let heap = &state.body.heap;
            supply.stock.add_whole(supply.cells.len(), heap, &store.layout(), *clock);
            drop(state);
            supply.cells.push(Arc::clone(other));
        }
        supply
    }
}

/// A heap, and its clock at a time since when its stream is known to have finished everything.
type Quiet<B> = (Arc<HeapCell<B>>, u32);

/// What can be moved, and the heaps that it is in.
struct Supply<B: Backend> {
    cells: Vec<Arc<HeapCell<B>>>,
    stock: Stock,
}

impl<B: Backend> Supply<B> {
    /// When the stream of `cell`, which gets a piece, last used it.
    fn last_use(&self, cell: &HeapCell<B>, piece: &Piece) -> LastUse {
        match piece.heap {
            0 => LastUse::Ago(piece.age),
            other if cell.is_sibling(&self.cells[other]) => LastUse::Now,
            _ => LastUse::Done,
        }
    }
}

fn has_idle_pages<B: Backend>(cell: &HeapCell<B>) -> bool {
    let state = cell.lock();
    let lanes = &state.body.heap.lanes;
    lanes.iter().any(|lane| lane.free.best_fit(BLOCK_OF_PAGES).is_some())
}

fn backend_error<E>(error: PagerError<E>) -> AllocError<E> {
    AllocError::Backend { op: error.op, source: error.source }
}
