//! What happens when a heap has no block for a request: one step after the other, cheapest first
//! (spec §2.5).

use super::allocate::HandedOut;
use super::grow::{Grown, Shortage};
use super::{AllocResult, HeapCell, Op, Shared};
use crate::backend::Backend;
use crate::config::Policy;
use crate::error::LadderStep;
use crate::heap::Request;
use crate::trace::TraceBuffer;
use crate::units::{DeviceId, StreamId};
use smallvec::SmallVec;
use std::cell::Cell;

crate::sync::thread_local! {
    /// A callback that allocates must not start the callbacks again.
    #[allow(clippy::missing_const_for_thread_local, reason = "the macro of loom takes no const block")]
    static IN_CALLBACK: Cell<bool> = Cell::new(false);
}

impl<B: Backend> Shared<B> {
    /// Serves a request that missed, or fails with out of memory.
    pub(super) fn climb(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        op: &mut Op<'_, B>,
    ) -> AllocResult<HandedOut, B> {
        let mut steps = Vec::new();
        if self.run_callbacks(cell.device) {
            steps.push(LadderStep::Callbacks);
            let found = self.search(cell, request, &mut op.trace);
            if let Some(block) =
                found.or_else(|| self.search_siblings(cell, request, &mut op.trace))
            {
                return Ok(block);
            }
        }
        let served = {
            let device = &self.devices[cell.device.index()];
            let _growth = device.lock_growth();
            // Whoever held the lock since the search may have left a block that fits.
            let found = self.edit(cell, &mut op.trace, |body, ledger| {
                let block = body.heap.serve_again(request, ledger)?;
                Some(body.handed_out(block))
            });
            match found {
                Some(block) => Ok(block),
                None => self.climb_locked(cell, request, &mut op.trace, &mut steps)?,
            }
        };
        if let Err(Shortage::Addresses(_)) = served
            && let Some((first, request)) = self.without_shard(cell, request)
        {
            return self.climb(&first, &request, op);
        }
        served.map_err(|shortage| self.out_of_memory(cell, request, shortage, steps, op))
    }

    /// The steps that change what the device has reserved.
    fn climb_locked(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        trace: &mut TraceBuffer,
        steps: &mut Vec<LadderStep>,
    ) -> AllocResult<Grown<HandedOut>, B> {
        if self.captures_under_way() {
            return self.climb_beside_captures(cell, request, trace, steps);
        }
        if self.collect_garbage(cell, request, trace)? {
            steps.push(LadderStep::GarbageCollection);
        }
        if self.fails_fast(cell, request) {
            return Ok(Err(Shortage::Memory));
        }
        steps.push(LadderStep::Grow);
        if let Ok(block) = self.grow(cell, request, false, trace)? {
            return Ok(Ok(block));
        }
        // Memory is short, whatever time is.
        let exact = &cell.state.lock().body.heap.exact(request);
        if exact.rounded < request.rounded
            && let Ok(block) = self.grow(cell, exact, false, trace)?
        {
            return Ok(Ok(block));
        }
        let request = exact;
        if let Some(block) = self.lent_by_pools(cell, request, steps, trace) {
            return Ok(Ok(block));
        }
        if self.release_oversize(cell, request, trace)? {
            steps.push(LadderStep::ReleaseOversize);
            if let Ok(block) = self.grow(cell, request, false, trace)? {
                return Ok(Ok(block));
            }
        }
        steps.push(LadderStep::ReleaseCached);
        self.devices[cell.device.index()].counters.lock().num_alloc_retries += 1;
        // PyTorch waits for everything and goes on to give everything back without looking at what
        // just became free; a request can then fail although a block for it is cached.
        if self.policy == Policy::Pytorch {
            self.wait_for_events(cell.device, trace)?;
        } else {
            if let Some(block) = self.wait_until_served(cell, request, trace)? {
                return Ok(Ok(block));
            }
            if let Ok(block) = self.grow(cell, request, true, trace)? {
                return Ok(Ok(block));
            }
            if let Some(block) = self.lent_by_pools(cell, request, steps, trace) {
                return Ok(Ok(block));
            }
        }
        self.release_cached(cell.device, trace)?;
        let grown = self.grow(cell, request, true, trace)?;
        // PyTorch leaves pools in use alone.
        if grown.is_ok() || self.policy == Policy::Pytorch {
            return Ok(grown);
        }
        if !self.release_referenced(cell.device, trace)? {
            return Ok(grown);
        }
        steps.push(LadderStep::ReleasePools);
        self.grow(cell, request, true, trace)
    }

    /// The steps that disturb no capture: giving memory back would (I9).
    fn climb_beside_captures(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        trace: &mut TraceBuffer,
        steps: &mut Vec<LadderStep>,
    ) -> AllocResult<Grown<HandedOut>, B> {
        steps.push(LadderStep::Grow);
        let shortage = match self.grow(cell, request, false, trace)? {
            Ok(block) => return Ok(Ok(block)),
            Err(shortage) => shortage,
        };
        if let Some(block) = self.lent_by_pools(cell, request, steps, trace) {
            return Ok(Ok(block));
        }
        if !self.may_process_events(self.capture_status(&cell.stream)?) {
            return Ok(Err(shortage));
        }
        steps.push(LadderStep::Wait);
        match self.wait_until_served(cell, request, trace)? {
            Some(block) => Ok(Ok(block)),
            None => self.grow(cell, request, true, trace),
        }
    }

    /// Waits for events, the oldest first, until the request can be served or none is left.
    fn wait_until_served(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        trace: &mut TraceBuffer,
    ) -> AllocResult<Option<HandedOut>, B> {
        let device = &self.devices[cell.device.index()];
        device.counters.lock().num_sync_all_streams += 1;
        // Queues whose head is in this thread's own hand, further up the stack.
        let mut held = SmallVec::<[StreamId; 2]>::new();
        loop {
            let found = self.search(cell, request, trace);
            if let Some(block) = found.or_else(|| self.search_siblings(cell, request, trace)) {
                return Ok(Some(block));
            }
            let Some(stream) = device.events.oldest(&held) else { return Ok(None) };
            match device.events.wait_for_head(stream) {
                Some(head) => self.wait_for(head, trace)?,
                None => held.push(stream),
            }
        }
    }

    /// Serves the request from the heap's free blocks, if one fits.
    pub(super) fn search(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        trace: &mut TraceBuffer,
    ) -> Option<HandedOut> {
        self.edit(cell, trace, |body, ledger| body.serve(request, ledger))
    }

    /// Asks every callback for memory. Returns whether one says that it is worth searching again.
    fn run_callbacks(&self, device: DeviceId) -> bool {
        let callbacks: Vec<_> = self.callbacks.lock().values().cloned().collect();
        if callbacks.is_empty() || IN_CALLBACK.with(|inside| inside.replace(true)) {
            return false;
        }
        let _reset = ResetOnDrop;
        callbacks.iter().filter(|callback| callback(device)).count() > 0
    }
}

/// Leaves the callback state also when a callback panics.
struct ResetOnDrop;

impl Drop for ResetOnDrop {
    fn drop(&mut self) {
        IN_CALLBACK.with(|inside| inside.set(false));
    }
}
