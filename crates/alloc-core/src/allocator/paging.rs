//! Growth of policy `ours` on expandable segments: memory is moved before more is taken.
//!
//! New handles are created while what is reserved stays within a small margin of what was ever
//! needed. At that line a request is served from handles that lie idle: first where they are mapped
//! already side by side, at no cost; else by mapping them once more, in one run. Only what idle
//! handles cannot cover is created beyond the line. Runs under the growth lock of the device.

use super::allocate::HandedOut;
use super::grow::{Grown, Shortage};
use super::{AllocResult, Device, HeapCell, Shared};
use crate::backend::{Backend, BackendError, Completion, ErrorKind};
use crate::block::{BlockId, BlockIdx, BlockState};
use crate::directory::Owner;
use crate::error::{AddressSpaceLack, AllocError, BackendOp};
use crate::handles::{HandleId, HandleStore, Part, View};
use crate::heap::{HoleSpan, PageRun, Request, SegmentId};
use crate::pager::{BadRange, PagerError};
use crate::size_class::SizeClass;
use crate::stats::Gauge;
use crate::trace::TraceBuffer;
use crate::units::Addr;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

type Store<B> = dyn HandleStore<<B as Backend>::Error>;

/// A handle without a live byte, in a free block of some heap.
struct Idle<B: Backend> {
    cell: Arc<HeapCell<B>>,
    block: BlockIdx,
    /// Names the block as it was seen.
    id: BlockId,
    segment: SegmentId,
    view: View,
    /// Frees of its heap since it became idle.
    age: u32,
}

/// Where a request will lie.
struct Site {
    segment: SegmentId,
    base: Addr,
    /// The free block that the site begins with.
    left: Option<(BlockIdx, u64)>,
    /// Address space behind it in which nothing is mapped.
    at: Addr,
}

/// Positions in the list of idle handles, with the views that become their homes.
type Homes = Vec<(usize, PageRun)>;

/// Why a plan could not be carried out.
enum Setback {
    Shortage(Shortage),
    /// Another thread took memory that the plan counted on.
    Interrupted,
}

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
        self.trim_views(store, cell)?;
        let mut line = self.reserve_line(device, request);
        for attempt in 0.. {
            let outcome = self.try_by_handles(store, cell, request, line, waiting, trace)?;
            match outcome {
                Ok(block) => return Ok(Ok(block)),
                Err(Setback::Interrupted) if attempt < ATTEMPTS => {}
                Err(Setback::Interrupted) => return Ok(Err(Shortage::Memory)),
                // The device holds less than it was taken to: what is reserved now is all there is.
                Err(Setback::Shortage(Shortage::Memory)) if line > device.reserved() => {
                    line = device.reserved();
                }
                Err(Setback::Shortage(shortage)) => return Ok(Err(shortage)),
            }
        }
        unreachable!("the loop returns")
    }

    /// Keeps the number of views in bounds. Unmapping waits for nothing, so only views go that were
    /// left before an event which the heap's stream has reached.
    fn trim_views(&self, store: &Store<B>, cell: &HeapCell<B>) -> AllocResult<(), B> {
        let most = self.settings.lock().ours.views_max as usize;
        let mark = cell.view_mark.lock().take();
        let mark = match mark {
            Some(mark) => mark,
            None if store.is_crowded(most) => {
                let epoch = store.epoch();
                let event = self.backend.record(&cell.stream);
                let event = event
                    .map_err(|source| AllocError::Backend { op: BackendOp::Record, source })?;
                (epoch, event)
            }
            None => return Ok(()),
        };
        match self.backend.query(&mark.1) {
            Ok(Completion::Reached) => {
                let state = cell.state.lock();
                let segments = state.body.heap.segments.iter();
                let bases: Vec<_> =
                    segments.filter(|(_, s)| s.is_expandable()).map(|(_, s)| s.base).collect();
                drop(state);
                store.trim(&bases, most, mark.0);
            }
            Ok(Completion::Pending) => *cell.view_mark.lock() = Some(mark),
            Err(source) => return Err(AllocError::Backend { op: BackendOp::Query, source }),
        }
        Ok(())
    }

    /// What may be reserved before memory is moved instead: a margin above the most that was ever in
    /// use at a miss, this one included.
    fn reserve_line(&self, device: &Device<B>, request: &Request) -> u64 {
        let active = |cell: &Arc<HeapCell<B>>| {
            let state = cell.state.lock();
            state.stats.get(Gauge::ActiveBytes).all.current as u64
        };
        let in_use: u64 = match &device.exact {
            Some(exact) => exact.lock().get(Gauge::ActiveBytes).all.current as u64,
            None => device.heaps().iter().map(active).sum(),
        };
        let needed = in_use + request.rounded;
        let peak = device.needed_peak.fetch_max(needed, Ordering::Relaxed).max(needed);
        let knobs = self.settings.lock().ours;
        let margin = (peak as f64 * knobs.margin) as u64;
        peak + margin.max(knobs.margin_bytes_min)
    }

    fn try_by_handles(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        line: u64,
        waiting: bool,
        trace: &mut TraceBuffer,
    ) -> AllocResult<Result<HandedOut, Setback>, B> {
        let device = &self.devices[cell.device.index()];
        let unit = store.granularity(cell.device).max(crate::backend::SEGMENT_ALIGN);
        let site = match self.site(store, cell, request, unit)? {
            Ok(site) => site,
            Err(shortage) => return Ok(Err(Setback::Shortage(shortage))),
        };
        let left = site.left.map_or(0, |(_, bytes)| bytes);
        if left >= request.rounded {
            // Another thread has freed it since the search.
            return Ok(self.search(cell, request, trace).ok_or(Setback::Interrupted));
        }
        let need = (request.rounded - left).next_multiple_of(unit);
        let headroom = line.saturating_sub(device.reserved()) / unit * unit;
        let largest = self.handle_bytes_max(request, unit);
        if need <= headroom {
            let parts = cut(need, largest);
            return self.extend(store, cell, request, &site, &parts, Vec::new(), trace);
        }
        let idle = self.idle_handles(store, cell, waiting)?;
        if let Some(window) = self.window(store, cell, request, &idle) {
            return self.reopen(store, cell, request, &window, &idle, trace);
        }
        let (chosen, covered) = choose(&idle, cell, &site, request.class, unit, need - headroom);
        let create = need.saturating_sub(covered);
        if device.limit().is_some_and(|limit| device.reserved() + create > limit) {
            return Ok(Err(Setback::Shortage(Shortage::Memory)));
        }
        let mut parts: Vec<_> = chosen
            .iter()
            .map(|at| Part::Handle(idle[*at].view.handle, idle[*at].view.bytes))
            .collect();
        parts.extend(cut(create, largest));
        let chosen: BTreeSet<_> = chosen.into_iter().collect();
        let taken = idle.into_iter().enumerate().filter(|(at, _)| chosen.contains(at));
        let taken = taken.map(|(_, idle)| idle).collect();
        self.extend(store, cell, request, &site, &parts, taken, trace)
    }

    /// The largest handle to create for a request.
    fn handle_bytes_max(&self, request: &Request, unit: u64) -> u64 {
        let largest = match request.class {
            SizeClass::Small => unit,
            SizeClass::Large => self.settings.lock().ours.handle_bytes_max,
        };
        largest.next_multiple_of(unit).max(unit)
    }

    /// Where the request needs the least new backing: behind a free block next to address space in
    /// which nothing is mapped. Reserves more if there is none.
    fn site(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        unit: u64,
    ) -> AllocResult<Grown<Site>, B> {
        let holes = cell.state.lock().body.heap.holes(request.class);
        let sites = holes.iter().flat_map(|hole| gaps(store, hole));
        let room = |(site, bytes): &(Site, u64)| {
            let left = site.left.map_or(0, |(_, bytes)| bytes);
            let need = (request.rounded - left.min(request.rounded)).next_multiple_of(unit);
            // Handles are taken whole, so the last one may reach further than what is needed.
            need + self.settings.lock().ours.handle_bytes_max <= *bytes
        };
        let best = sites.filter(room).map(|(site, _)| site).min_by_key(|site| {
            (std::cmp::Reverse(site.left.map_or(0, |(_, bytes)| bytes)), site.at)
        });
        match best {
            Some(site) => Ok(Ok(site)),
            None => self.reserve_site(store, cell, request, unit),
        }
    }

    fn reserve_site(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        unit: u64,
    ) -> AllocResult<Grown<Site>, B> {
        let total = self.devices[cell.device.index()].total;
        let settings = self.settings.lock().clone();
        let least = (request.rounded + settings.ours.handle_bytes_max).next_multiple_of(unit);
        let usual = settings.reserve_bytes(total, unit, None);
        let bytes = usual.max(least);
        if request.rounded > total {
            return Ok(Err(Shortage::Memory));
        }
        let flaw = |base, actual| self.flaw(base, actual, bytes);
        let base = match store.reserve(cell.device, bytes, &flaw) {
            Ok(Ok(base)) => base,
            Ok(Err(BadRange { base, bytes, why })) => {
                return Err(AllocError::BadSegment { base, bytes, why });
            }
            Err(error) if error.source.kind() == ErrorKind::OutOfMemory => {
                return Ok(Err(Shortage::Addresses(AddressSpaceLack::Exhausted { bytes })));
            }
            Err(error) => return Err(backend_error(error)),
        };
        let mut state = cell.state.lock();
        let heap = &mut state.body.heap;
        let segment = heap.segments.next_id();
        heap.adopt_reservation(segment, base, bytes, request.class, unit);
        Ok(Ok(Site { segment, base, left: None, at: base }))
    }

    /// Every handle without a live byte whose memory may be used by `cell`'s stream now: those of its
    /// own heap at once, since its work is ordered after whatever used them; those of others when
    /// their streams are known to be done with them.
    fn idle_handles(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        waiting: bool,
    ) -> AllocResult<Vec<Idle<B>>, B> {
        let mut found = Vec::new();
        for other in self.devices[cell.device.index()].heaps() {
            let foreign = other.index != cell.index;
            let before = found.len();
            self.idle_of(store, &other, &mut found);
            if foreign && found.len() > before {
                let age_min = self.quiet_since(&other, waiting)?;
                let mut at = 0;
                found.retain(|idle| {
                    at += 1;
                    at <= before || age_min.is_some_and(|age| idle.age >= age)
                });
            }
        }
        Ok(found)
    }

    fn idle_of(&self, store: &Store<B>, cell: &Arc<HeapCell<B>>, found: &mut Vec<Idle<B>>) {
        let state = cell.state.lock();
        let heap = &state.body.heap;
        for class in SizeClass::ALL {
            for (key, block) in heap.classes[class.index()].free.iter_from(SEGMENT_MIN) {
                let b = &heap.blocks[block];
                if !b.expandable {
                    continue;
                }
                let base = heap.segments[b.segment].base;
                let whole = store.views(base, key.addr, b.end()).into_iter();
                for view in whole.filter(|v| v.home == v.at && v.at + v.bytes <= b.end()) {
                    found.push(Idle {
                        cell: Arc::clone(cell),
                        block,
                        id: heap.blocks.id(block),
                        segment: b.segment,
                        view,
                        age: heap.clock.wrapping_sub(b.freed_at),
                    });
                }
            }
        }
    }

    /// How many frees ago the stream of a heap was last known to have finished everything: what was
    /// freed at least that long ago is nobody's any more. Asks without waiting, unless told to wait.
    fn quiet_since(&self, cell: &HeapCell<B>, waiting: bool) -> AllocResult<Option<u32>, B> {
        let clock = cell.state.lock().body.heap.clock;
        if waiting {
            self.synchronize(&cell.stream)?;
            return Ok(Some(0));
        }
        let mut mark = cell.mark.lock().take();
        if mark.is_none() {
            let event = self.backend.record(&cell.stream);
            let event =
                event.map_err(|source| AllocError::Backend { op: BackendOp::Record, source })?;
            mark = Some((clock, event));
        }
        let Some((at, event)) = mark else { return Ok(None) };
        match self.backend.query(&event) {
            Ok(Completion::Reached) => Ok(Some(clock.wrapping_sub(at))),
            Ok(Completion::Pending) => {
                *cell.mark.lock() = Some((at, event));
                Ok(None)
            }
            Err(source) => Err(AllocError::Backend { op: BackendOp::Query, source }),
        }
    }

    /// Address space where free memory and dormant views of idle handles lie side by side, with room
    /// for the request: the stretch that changes the fewest homes, as positions in `idle` with the
    /// views that become homes.
    fn window(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        idle: &[Idle<B>],
    ) -> Option<Homes> {
        let by_handle: BTreeMap<HandleId, usize> =
            idle.iter().enumerate().map(|(at, idle)| (idle.view.handle, at)).collect();
        let holes = cell.state.lock().body.heap.holes(request.class);
        let mut best: Option<(usize, u64, Homes)> = None;
        for hole in &holes {
            for stretch in stretches(store, hole, &by_handle, idle) {
                let Some((bytes, homes)) = stretch.tightest(request.rounded) else { continue };
                let score = (homes.len(), bytes);
                if best.as_ref().is_none_or(|(count, size, _)| score < (*count, *size)) {
                    best = Some((score.0, score.1, homes));
                }
            }
        }
        best.map(|(_, _, homes)| homes)
    }

    /// Moves the homes of a window there and serves the request in it. No driver call is made.
    fn reopen(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        window: &[(usize, PageRun)],
        idle: &[Idle<B>],
        trace: &mut TraceBuffer,
    ) -> AllocResult<Result<HandedOut, Setback>, B> {
        let movers: Vec<&Idle<B>> = window.iter().map(|(at, _)| &idle[*at]).collect();
        if !self.vacate(&movers, trace) {
            return Ok(Err(Setback::Interrupted));
        }
        for (_, run) in window {
            let base = cell.state.lock().body.heap.segments[run.segment].base;
            store.settle(base, run.addr);
        }
        let served = self.edit(cell, trace, |body, ledger| {
            let mut last = None;
            for (_, run) in window {
                let owner = Owner { heap: cell.index, segment: run.segment };
                self.directory.register(run.addr, run.bytes, owner);
                last = Some(body.heap.open_free(run, ledger));
            }
            let block = last?;
            if body.heap.blocks[block].bytes < request.rounded {
                return None;
            }
            body.heap.remove_free(block);
            Some(body.hand_out(block, request, ledger))
        });
        self.note_moves(cell, window.len());
        Ok(served.ok_or(Setback::Interrupted))
    }

    fn note_moves(&self, cell: &HeapCell<B>, handles: usize) {
        let device = &self.devices[cell.device.index()];
        device.moved.fetch_add(handles as u64, Ordering::Relaxed);
    }

    /// Backs a site with new and moved handles and serves the request there. On failure the moved
    /// ones are back where they were.
    #[expect(clippy::too_many_arguments, reason = "one plan, carried out once")]
    fn extend(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        site: &Site,
        parts: &[Part],
        taken: Vec<Idle<B>>,
        trace: &mut TraceBuffer,
    ) -> AllocResult<Result<HandedOut, Setback>, B> {
        let Some(held) = self.hold_left(cell, site) else {
            return Ok(Err(Setback::Interrupted));
        };
        let movers: Vec<&Idle<B>> = taken.iter().collect();
        if !self.vacate(&movers, trace) {
            self.let_go(cell, held);
            return Ok(Err(Setback::Interrupted));
        }
        if let Err(error) = store.back(site.base, site.at, parts) {
            self.return_home(&movers, trace);
            self.let_go(cell, held);
            return match error.source.kind() {
                ErrorKind::OutOfMemory => Ok(Err(Setback::Shortage(Shortage::Memory))),
                _ => Err(backend_error(error)),
            };
        }
        let created: u64 =
            parts.iter().map(|part| if let Part::New(bytes) = part { *bytes } else { 0 }).sum();
        if created > 0 {
            self.account_growth(&self.devices[cell.device.index()], created);
        }
        self.note_moves(cell, taken.len());
        let bytes = parts.iter().map(Part::bytes).sum();
        let run = PageRun { segment: site.segment, addr: site.at, bytes, page_bytes: bytes };
        let block = self.edit(cell, trace, |body, ledger| {
            let owner = Owner { heap: cell.index, segment: run.segment };
            self.directory.register(run.addr, run.bytes, owner);
            let block = body.heap.open(&run, held, ledger);
            body.hand_out(block, request, ledger)
        });
        Ok(Ok(block))
    }

    /// Takes the free block that a site begins with. `None` if it is not there any more.
    fn hold_left(&self, cell: &HeapCell<B>, site: &Site) -> Option<Option<BlockIdx>> {
        let Some((block, bytes)) = site.left else { return Some(None) };
        let mut state = cell.state.lock();
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
            cell.state.lock().body.heap.abandon_growth(held);
        }
    }

    /// Turns the homes of `idle` into holes, so that nobody else uses them. Returns whether all of
    /// them still were idle; if not, everything is as before.
    fn vacate(&self, idle: &[&Idle<B>], trace: &mut TraceBuffer) -> bool {
        // From the highest address down: what is left of a block below a hole keeps its name.
        let mut order: Vec<&Idle<B>> = idle.to_vec();
        order.sort_by_key(|idle| std::cmp::Reverse(idle.view.at));
        for (done, idle) in order.iter().enumerate() {
            let closed = self.edit(&idle.cell, trace, |body, ledger| {
                let heap = &mut body.heap;
                let Some(block) = heap.blocks.resolve(idle.id) else { return false };
                let current = &heap.blocks[block];
                let run = home_run(idle);
                let inside = current.state == BlockState::Free
                    && current.addr <= run.addr
                    && run.addr + run.bytes <= current.end();
                if inside {
                    self.directory.unregister(run.addr, run.bytes);
                    heap.close(block, &run, ledger);
                }
                inside
            });
            if !closed {
                self.return_home(&order[..done], trace);
                return false;
            }
        }
        true
    }

    /// Undoes [`vacate`](Self::vacate).
    fn return_home(&self, idle: &[&Idle<B>], trace: &mut TraceBuffer) {
        for idle in idle {
            let run = home_run(idle);
            self.edit(&idle.cell, trace, |body, ledger| {
                let owner = Owner { heap: idle.cell.index, segment: run.segment };
                self.directory.register(run.addr, run.bytes, owner);
                body.heap.open_free(&run, ledger);
            });
        }
    }
}

/// Free blocks smaller than this hold no handle.
const SEGMENT_MIN: u64 = crate::backend::SEGMENT_ALIGN;

fn home_run<B: Backend>(idle: &Idle<B>) -> PageRun {
    let View { at, bytes, .. } = idle.view;
    PageRun { segment: idle.segment, addr: at, bytes, page_bytes: bytes }
}

fn backend_error<E>(error: PagerError<E>) -> AllocError<E> {
    AllocError::Backend { op: error.op, source: error.source }
}

/// New handles of `bytes` together, each at most `largest`.
fn cut(bytes: u64, largest: u64) -> Vec<Part> {
    let mut parts = vec![Part::New(largest); (bytes / largest) as usize];
    if !bytes.is_multiple_of(largest) {
        parts.push(Part::New(bytes % largest));
    }
    parts
}

/// Which idle handles to move to a site that lacks `wanted` bytes, longest unused first, and how many
/// bytes they have. The free block that the site begins with is not taken apart.
fn choose<B: Backend>(
    idle: &[Idle<B>],
    cell: &HeapCell<B>,
    site: &Site,
    class: SizeClass,
    unit: u64,
    wanted: u64,
) -> (Vec<usize>, u64) {
    let left = site.left.map(|(block, _)| block);
    let usable = |idle: &Idle<B>| {
        let in_left = idle.cell.index == cell.index && Some(idle.block) == left;
        // Small requests would leave most of a large handle idle where only they can use it.
        !in_left && (class == SizeClass::Large || idle.view.bytes <= unit)
    };
    let mut order: Vec<usize> = (0..idle.len()).filter(|at| usable(&idle[*at])).collect();
    order.sort_by_key(|at| (std::cmp::Reverse(idle[*at].age), idle[*at].view.at));
    let (mut chosen, mut covered) = (Vec::new(), 0);
    for at in order {
        if covered >= wanted {
            break;
        }
        covered += idle[at].view.bytes;
        chosen.push(at);
    }
    (chosen, covered)
}

/// The stretches of a hole in which nothing is mapped, with their sizes; the first one may continue a
/// free block.
fn gaps<E>(store: &dyn HandleStore<E>, hole: &HoleSpan) -> Vec<(Site, u64)> {
    let end = hole.addr + hole.bytes;
    let mut found = Vec::new();
    let mut cursor = hole.addr;
    let mut push = |from: Addr, to: Addr| {
        if from < to {
            let left = hole.below.filter(|_| from == hole.addr);
            found
                .push((Site { segment: hole.segment, base: hole.base, left, at: from }, to - from));
        }
    };
    for view in store.views(hole.base, hole.addr, end) {
        push(cursor, view.at);
        cursor = view.at + view.bytes;
    }
    push(cursor, end);
    found
}

/// Free memory and dormant views of idle handles, side by side around one hole.
struct Stretch {
    below: u64,
    /// Positions in the list of idle handles, with the views.
    views: Homes,
    above: u64,
}

impl Stretch {
    /// The part of the stretch with the fewest views that has `wanted` bytes.
    fn tightest(&self, wanted: u64) -> Option<(u64, Homes)> {
        let mut best: Option<(usize, u64, std::ops::Range<usize>)> = None;
        for first in 0..self.views.len() {
            let mut bytes = if first == 0 { self.below } else { 0 };
            for last in first..self.views.len() {
                bytes += self.views[last].1.bytes;
                let whole = bytes + if last + 1 == self.views.len() { self.above } else { 0 };
                if whole < wanted {
                    continue;
                }
                let count = last + 1 - first;
                if best.as_ref().is_none_or(|(c, b, _)| (count, whole) < (*c, *b)) {
                    best = Some((count, whole, first..last + 1));
                }
                break;
            }
        }
        best.map(|(_, bytes, range)| (bytes, self.views[range].to_vec()))
    }
}

fn stretches<B: Backend>(
    store: &Store<B>,
    hole: &HoleSpan,
    by_handle: &BTreeMap<HandleId, usize>,
    idle: &[Idle<B>],
) -> Vec<Stretch> {
    let end = hole.addr + hole.bytes;
    let mut done: Vec<Stretch> = Vec::new();
    let mut open: Option<Stretch> = None;
    let mut cursor = hole.addr;
    for view in store.views(hole.base, hole.addr, end) {
        let usable = by_handle.get(&view.handle).copied();
        // A home in the free block beside the hole would leave it as the view is opened.
        let beside = |at: usize| {
            let block = idle[at].block;
            hole.below.is_some_and(|(b, _)| b == block)
                || hole.above.is_some_and(|(b, _)| b == block)
        };
        let usable = usable.filter(|at| view.good && !beside(*at));
        let twice =
            |stretch: &Stretch, at: usize| stretch.views.iter().any(|(other, _)| *other == at);
        let touches = view.at == cursor;
        cursor = view.at + view.bytes;
        let breaks = !touches
            || match (&open, usable) {
                (Some(stretch), Some(at)) => twice(stretch, at),
                _ => true,
            };
        if breaks {
            done.extend(open.take());
        }
        let Some(at) = usable else { continue };
        let run = PageRun {
            segment: hole.segment,
            addr: view.at,
            bytes: view.bytes,
            page_bytes: view.bytes,
        };
        let below = hole.below.filter(|_| view.at == hole.addr).map_or(0, |(_, bytes)| bytes);
        let stretch = open.get_or_insert_with(|| Stretch { below, views: Vec::new(), above: 0 });
        stretch.views.push((at, run));
    }
    if let Some(mut stretch) = open {
        if cursor == end {
            stretch.above = hole.above.map_or(0, |(_, bytes)| bytes);
        }
        done.push(stretch);
    }
    done
}
