//! Pools that help out before a request of the default pool runs out of memory (spec §2.11).

use crate::allocator::allocate::HandedOut;
use crate::allocator::{HeapCell, Shared};
use crate::backend::Backend;
use crate::error::LadderStep;
use crate::heap::Request;
use crate::trace::TraceBuffer;
use std::sync::atomic::Ordering;

impl<B: Backend> Shared<B> {
    /// Serves a request of the default pool with a free block of a pool that is open to it, on the
    /// same stream. Such a pool is searched, never grown; the block stays its own and goes back to
    /// it. Pools are asked in the order of their ids.
    pub(in crate::allocator) fn lent_by_pools(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        steps: &mut Vec<LadderStep>,
        trace: &mut TraceBuffer,
    ) -> Option<HandedOut> {
        if cell.private {
            return None;
        }
        let device = &self.devices[cell.device.index()];
        let pools = device.pools.all();
        let mut open = pools.iter().filter(|pool| {
            let lends = pool.use_on_oom.load(Ordering::Relaxed);
            lends && !pool.is_unreferenced() && !pool.is_pinned()
        });
        let lent = open.clone().find_map(|pool| {
            let lender = device.heaps.read().by_owner.get(&(pool.id(), cell.stream_id, 0)).cloned();
            self.search(&*lender?, request, trace)
        });
        if open.next().is_some() && !steps.contains(&LadderStep::UseOnOom) {
            steps.push(LadderStep::UseOnOom);
        }
        lent
    }
}
