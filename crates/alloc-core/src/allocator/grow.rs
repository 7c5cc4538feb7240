//! Obtaining memory from the backend for one request. Runs under the growth lock of the device.

use super::allocate::HandedOut;
use super::pools::Token;
use super::{AllocResult, Device, HeapCell, Paging, Shared};
use crate::backend::{Backend, BackendError, ErrorKind, SEGMENT_ALIGN};
use crate::block::{BlockIdx, BlockState};
use crate::directory::{ADDRESS_END, Owner};
use crate::error::{AddressSpaceLack, AllocError, BackendOp};
use crate::heap::{PageRun, Request};
use crate::pager::{BadRange, Flaw, Pager, PagerError};
use crate::size_class::{SMALL_SEGMENT_BYTES, SizeClass};
use crate::trace::TraceBuffer;
use crate::units::Addr;
use std::sync::atomic::Ordering;

/// Whether a backend call succeeded, or merely lacked memory.
fn unless_out_of_memory<T, E: BackendError>(
    op: BackendOp,
    result: Result<T, E>,
) -> Result<Option<T>, AllocError<E>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::OutOfMemory => Ok(None),
        Err(source) => Err(AllocError::Backend { op, source }),
    }
}

fn unless_pager_out_of_memory<T, E: BackendError>(
    result: Result<T, PagerError<E>>,
) -> Result<Option<T>, AllocError<E>> {
    let op = result.as_ref().err().map(|error| error.op);
    match op {
        Some(op) => unless_out_of_memory(op, result.map_err(|error| error.source)),
        None => Ok(result.ok()),
    }
}

impl<B: Backend> Shared<B> {
    /// One attempt to serve a request with new memory, or with memory of other places. `waiting`:
    /// whether other streams may be waited for.
    pub(super) fn grow(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        waiting: bool,
        trace: &mut TraceBuffer,
    ) -> AllocResult<Grown<HandedOut>, B> {
        let source = cell.owner().1;
        let paging = self.paging_of(&source);
        if let Some(Paging::Handles(store)) = paging
            && request.expandable
            && let Some(_paging) = self.devices[cell.device.index()].begin_paging()
        {
            return self.grow_by_handles(&**store, cell, request, waiting, trace);
        }
        let device = &self.devices[cell.device.index()];
        let bytes = self.segment_bytes(cell, request);
        let within = |limit| device.reserved().checked_add(bytes).is_some_and(|sum| sum <= limit);
        if !device.limit().is_none_or(within) {
            return Ok(Err(Shortage::Memory));
        }
        if let Some(paging) = paging.filter(|_| request.expandable)
            && let Some(_paging) = device.begin_paging()
        {
            return self.grow_expandable(paging.pager(), cell, request, trace);
        }
        self.grow_whole(cell, request, bytes, trace)
    }

    /// What a miss takes from the driver for this request.
    pub(super) fn segment_bytes(&self, cell: &HeapCell<B>, request: &Request) -> u64 {
        cell.lock().body.heap.rules.segment_bytes(request.rounded)
    }

    fn grow_whole(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        bytes: u64,
        trace: &mut TraceBuffer,
    ) -> AllocResult<Grown<HandedOut>, B> {
        let Some(segment) = self.acquire_segment(cell, bytes)? else {
            return Ok(Err(Shortage::Memory));
        };
        let segment = self.vetted(cell, segment, bytes)?;
        self.account_growth(&self.devices[cell.device.index()], bytes);
        let block = self.edit(cell, trace, |body, ledger| {
            let id = body.heap.segments.next_id();
            let base = segment.base();
            self.directory.register(base, bytes, Owner { heap: cell.index, segment: id });
            body.tokens.insert(id, segment);
            let block = body.heap.adopt_whole(id, base, bytes, request.class, ledger);
            body.hand_out(block, request, ledger)
        });
        Ok(Ok(block))
    }

    pub(super) fn account_growth(&self, device: &Device<B>, bytes: u64) {
        let reserved = device.reserved.fetch_add(bytes, Ordering::Relaxed) + bytes;
        device.reserved_peak.fetch_max(reserved, Ordering::Relaxed);
        device.counters.lock().num_device_alloc += 1;
    }

    /// Checks a new segment against the contract. One that must not be used goes back, unless giving
    /// it back could take a live one along.
    fn vetted(
        &self,
        cell: &HeapCell<B>,
        segment: Token<B>,
        bytes: u64,
    ) -> AllocResult<Token<B>, B> {
        let (base, actual) = (segment.base(), segment.bytes());
        let Some(Flaw { why, returnable }) = self.flaw(base, actual, bytes) else {
            return Ok(segment);
        };
        if returnable {
            // Whether this works or not, the caller learns what is wrong with the backend.
            let _ = self.give_segment(cell, segment);
        }
        Err(AllocError::BadSegment { base, bytes: actual, why })
    }

    /// Why a range that was to have `wanted` bytes cannot be a segment of this allocator, if so.
    pub(super) fn flaw(&self, base: Addr, bytes: u64, wanted: u64) -> Option<Flaw> {
        let why = self
            .flaw_of_range(base, bytes)
            .or_else(|| (bytes != wanted).then_some("its length is not what was asked for"))?;
        Some(Flaw { why, returnable: why != OVERLAP })
    }

    /// Why a range cannot be a segment of this allocator, if so.
    fn flaw_of_range(&self, base: Addr, bytes: u64) -> Option<&'static str> {
        if base.checked_add(bytes).is_none_or(|end| end.get() > ADDRESS_END) {
            return Some("it ends beyond 2^57");
        }
        if base.is_null() || bytes == 0 {
            return Some("it is empty or starts at 0");
        }
        if !base.is_aligned(SEGMENT_ALIGN) {
            return Some("its base is not a multiple of 2 MiB");
        }
        self.directory.is_owned(base, bytes).then_some(OVERLAP)
    }

    fn grow_expandable(
        &self,
        pager: &dyn Pager<B::Error>,
        cell: &HeapCell<B>,
        request: &Request,
        trace: &mut TraceBuffer,
    ) -> AllocResult<Grown<HandedOut>, B> {
        loop {
            let start = match self.growable(pager, cell, request)? {
                Ok(start) => start,
                Err(shortage) => return Ok(Err(shortage)),
            };
            match self.fill(pager, cell, request, start, trace)? {
                Filled::Enough(block) => return Ok(Ok(block)),
                Filled::OutOfMemory => return Ok(Err(Shortage::Memory)),
                // Another thread took a free block that was part of the plan.
                Filled::Interrupted => {}
            }
        }
    }

    /// Where an expandable segment can grow to hold the request; reserves one if none can. A free
    /// block that growth starts from is `Held`.
    fn growable(
        &self,
        pager: &dyn Pager<B::Error>,
        cell: &HeapCell<B>,
        request: &Request,
    ) -> AllocResult<Grown<BlockIdx>, B> {
        let found = {
            let mut state = cell.lock();
            let heap = &mut state.body.heap;
            let found = heap.find_growable(request.class.into(), request.rounded);
            if let Some(id) = found.filter(|id| heap.blocks[*id].state == BlockState::Free) {
                heap.remove_free(id);
            }
            found
        };
        if let Some(found) = found {
            return Ok(Ok(found));
        }
        let page_bytes = self.page_bytes(request.class, pager.granularity(cell.device));
        let total = self.devices[cell.device.index()].total;
        let bytes = self.settings.lock().reserve_bytes(total, page_bytes, None);
        if bytes < request.rounded {
            let lack = AddressSpaceLack::ReserveTooSmall { bytes };
            // What the whole device could not hold is no matter of addresses.
            let fits = request.rounded <= total;
            return Ok(Err(if fits { Shortage::Addresses(lack) } else { Shortage::Memory }));
        }
        let flaw = |base, actual| self.flaw(base, actual, bytes);
        let reserved = pager.reserve(cell.device, bytes, &flaw);
        let base = match unless_pager_out_of_memory(reserved)? {
            None => {
                let lack = AddressSpaceLack::Exhausted { bytes };
                return Ok(Err(Shortage::Addresses(lack)));
            }
            Some(Ok(base)) => base,
            Some(Err(BadRange { base, bytes, why })) => {
                return Err(AllocError::BadSegment { base, bytes, why });
            }
        };
        let mut state = cell.lock();
        let heap = &mut state.body.heap;
        let id = heap.segments.next_id();
        Ok(Ok(heap.adopt_reservation(id, base, bytes, request.class.into(), page_bytes)))
    }

    /// The page of a new expandable segment (spec §4.1), as a multiple of what the backend can map.
    fn page_bytes(&self, class: SizeClass, granularity: u64) -> u64 {
        let bytes = match class {
            SizeClass::Small => SMALL_SEGMENT_BYTES,
            SizeClass::Large => self.settings.lock().large_segment_bytes,
        };
        bytes.next_multiple_of(granularity.next_multiple_of(SEGMENT_ALIGN))
    }

    /// Maps pages behind `start` until the request fits, then hands it out (spec §4.6). What a
    /// failure leaves mapped stays as free cached memory.
    fn fill(
        &self,
        pager: &dyn Pager<B::Error>,
        cell: &HeapCell<B>,
        request: &Request,
        start: BlockIdx,
        trace: &mut TraceBuffer,
    ) -> AllocResult<Filled, B> {
        let mut held = {
            let heap = &cell.lock().body.heap;
            (heap.blocks[start].state == BlockState::Held).then_some(start)
        };
        loop {
            let plan = match self.next_run(cell, request, start, held) {
                NextRun::Enough(id) => {
                    let block =
                        self.edit(cell, trace, |body, ledger| body.hand_out(id, request, ledger));
                    return Ok(Filled::Enough(block));
                }
                NextRun::Map(hole, run) => Some((hole, run)),
                NextRun::Blocked => None,
            };
            let mapped = match &plan {
                Some((_, run)) => self.map_run(pager, cell, run),
                None => Ok(None),
            };
            if let (Some((hole, run)), Ok(Some(()))) = (&plan, &mapped) {
                self.account_growth(&self.devices[cell.device.index()], run.bytes);
                held = Some(self.edit(cell, trace, |body, ledger| {
                    let owner = Owner { heap: cell.index, segment: run.segment };
                    self.directory.register(run.addr, run.bytes, owner);
                    body.heap.commit_map(*hole, run, held, ledger)
                }));
                continue;
            }
            if let Some(held) = held {
                cell.lock().body.heap.abandon_growth(held);
            }
            mapped?;
            return Ok(if plan.is_some() { Filled::OutOfMemory } else { Filled::Interrupted });
        }
    }

    fn next_run(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        start: BlockIdx,
        held: Option<BlockIdx>,
    ) -> NextRun {
        let state = cell.lock();
        let heap = &state.body.heap;
        let have = held.map_or(0, |id| heap.blocks[id].bytes);
        if let Some(id) = held.filter(|_| have >= request.rounded) {
            return NextRun::Enough(id);
        }
        let hole = match held {
            Some(id) => heap.blocks[id].next,
            None => Some(start),
        };
        match hole.filter(|id| heap.blocks[*id].state == BlockState::Unmapped) {
            Some(hole) => NextRun::Map(hole, heap.plan_map(hole, request.rounded - have)),
            None => NextRun::Blocked,
        }
    }

    fn map_run(
        &self,
        pager: &dyn Pager<B::Error>,
        cell: &HeapCell<B>,
        run: &PageRun,
    ) -> AllocResult<Option<()>, B> {
        let base = cell.lock().body.heap.segments[run.segment].base;
        unless_pager_out_of_memory(pager.map(base, run.addr, run.bytes, run.page_bytes))
    }

    /// Whether a request of this heap may be refused memory beyond the limit at once.
    pub(super) fn fails_fast(&self, cell: &HeapCell<B>, request: &Request) -> bool {
        let device = &self.devices[cell.device.index()];
        let bytes = self.segment_bytes(cell, request);
        let beyond = device.limit().is_some_and(|limit| device.reserved() + bytes > limit);
        beyond && self.settings.lock().throw_on_oom
    }
}

/// What growth lacked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shortage {
    /// Neither the limit nor the backend allows more memory now.
    Memory,
    /// An expandable segment lacked address space.
    Addresses(AddressSpaceLack),
}

/// What growth got.
pub(super) type Grown<T> = Result<T, Shortage>;

const OVERLAP: &str = "it overlaps a segment that is in use, so it was not given back";

enum NextRun {
    Enough(BlockIdx),
    Map(BlockIdx, PageRun),
    Blocked,
}

enum Filled {
    Enough(HandedOut),
    OutOfMemory,
    Interrupted,
}
