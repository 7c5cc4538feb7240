//! Checkpoints: which blocks of a pool were live, and getting back there.

use super::{Pool, PoolPin, PoolRef};
use crate::allocator::allocate::HandedOut;
use crate::allocator::{AllocResult, Allocation, HeapBody, HeapCell, Use};
use crate::backend::{Backend, Stream};
use crate::block::{BlockIdx, BlockState};
use crate::error::{AllocError, CheckpointFlaw};
use crate::heap::{Ledger, LiveMark, Obstacle, Restoration};
use crate::trace::TraceBuffer;
use crate::units::{Addr, PoolId, StreamId};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Which blocks of a pool were live at some time. While it exists, the pool is
/// [pinned](PoolRef::pin), so that they can be live there again.
#[derive(Debug)]
pub struct Checkpoint {
    pool: Arc<Pool>,
    _pin: PoolPin,
    /// By position of the heap.
    marks: HashMap<u32, Vec<LiveMark>>,
}

impl Checkpoint {
    /// The pool's id.
    pub fn pool(&self) -> PoolId {
        self.pool.id()
    }

    /// Addresses and sizes in bytes of the blocks that were live, by address.
    pub fn blocks(&self) -> Vec<(Addr, u64)> {
        let marks = self.marks.values().flatten();
        let mut blocks: Vec<_> = marks.map(|mark| (mark.addr, mark.bytes)).collect();
        blocks.sort_unstable();
        blocks
    }
}

/// A block that was live before a restore and is not any more. Whoever has it must not use it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StaleBlock {
    /// Its first address.
    pub addr: Addr,
    /// Its length in bytes.
    pub bytes: u64,
    /// Bytes that were asked for.
    pub requested: u64,
    /// The stream that it was allocated for.
    pub stream: StreamId,
}

/// What a restore did.
#[derive(Debug, Default)]
#[must_use = "the revived blocks stay allocated until they are freed"]
pub struct Restored {
    /// Blocks that are live again and have no owner yet, by stream and address. What their memory
    /// contains is what was last written there.
    pub revived: Vec<Allocation>,
    /// Blocks that are not live any more. Their [`Allocation`]s name nothing now, also where a revived
    /// block has the same address.
    pub stale: Vec<StaleBlock>,
    /// Addresses of the blocks that were and are live, with the same size and request. They stay with
    /// their owners.
    pub kept: Vec<Addr>,
}

impl<B: Backend> PoolRef<B> {
    /// Remembers which blocks of this pool are live. Waits for those of them that are pending on
    /// events.
    ///
    /// # Errors
    /// [`AllocError::Checkpoint`] if blocks are pending while a graph is being captured;
    /// [`AllocError::Backend`] if waiting fails.
    pub fn checkpoint(&self) -> AllocResult<Checkpoint, B> {
        let PoolRef { shared, device, pool } = self;
        let mut op = shared.begin();
        let home = &shared.devices[device.index()];
        let _growth = home.lock_growth();
        let pin = self.pin();
        self.settle_events(&mut op.trace)?;
        let mut marks = HashMap::new();
        for cell in home.heaps_of(pool.id()) {
            let state = cell.lock();
            let mut blocks = state.body.heap.blocks.iter().map(|(_, block)| block);
            let pending = |state| matches!(state, BlockState::Draining { .. });
            if let Some(block) = blocks.find(|block| pending(block.state)) {
                return Err(self.flaw(CheckpointFlaw::Pending { addr: block.addr }));
            }
            marks.insert(cell.index, state.body.heap.live_marks());
        }
        Ok(Checkpoint { pool: Arc::clone(pool), _pin: pin, marks })
    }

    /// Makes the blocks of `checkpoint` the live ones of this pool: exactly those, with the same
    /// addresses and sizes. Blocks that are live now and were not then are freed; those that were and
    /// are not are handed out again. May be repeated. Memory that the pool got since stays.
    ///
    /// Waits for work of other streams that the freed blocks were used on. No other thread may
    /// allocate from this pool or free to it meanwhile.
    ///
    /// # Errors
    /// Nothing is changed, unless noted. [`AllocError::Checkpoint`] if the checkpoint is of another
    /// pool; if blocks are pending or used on other streams while a graph is being captured; if a
    /// block that would be freed is shared with another process; if another thread
    /// interfered, in which case some streams may be restored and others not. [`AllocError::Backend`]
    /// if waiting fails.
    pub fn restore(&self, checkpoint: &Checkpoint) -> AllocResult<Restored, B> {
        let PoolRef { shared, device, pool } = self;
        if !Arc::ptr_eq(&checkpoint.pool, pool) {
            let of = checkpoint.pool.id();
            return Err(self.flaw(CheckpointFlaw::OtherPool { of }));
        }
        let mut op = shared.begin();
        let home = &shared.devices[device.index()];
        let _growth = home.lock_growth();
        self.settle_events(&mut op.trace)?;
        let nothing = Vec::new();
        let marks = |cell: &HeapCell<B>| checkpoint.marks.get(&cell.index).unwrap_or(&nothing);
        let cells = home.heaps_of(pool.id());
        let mut waited = Uses::new();
        for cell in &cells {
            let uses = cell.lock().body.stale_uses(marks(cell));
            waited.extend(uses.map_err(|obstacle| self.flaw_of(obstacle))?);
        }
        self.wait_for_uses(&waited)?;
        let mut restored = Restored::default();
        for cell in &cells {
            let done = shared.edit(cell, &mut op.trace, |body, ledger| {
                body.restore(marks(cell), &waited, &mut restored, ledger)
            });
            let handed_out = done.ok_or_else(|| self.flaw(CheckpointFlaw::Interrupted))?;
            let revived = handed_out
                .into_iter()
                .map(|(requested, block)| shared.allocation(cell, requested, block));
            restored.revived.extend(revived);
        }
        Ok(restored)
    }

    /// Addresses of the live blocks of this pool, in order.
    pub fn live_blocks(&self) -> Vec<Addr> {
        let cells = self.shared.devices[self.device.index()].heaps_of(self.id());
        let live = |cell: &Arc<HeapCell<B>>| cell.lock().body.heap.live_marks();
        let mut addrs: Vec<_> = cells.iter().flat_map(live).map(|mark| mark.addr).collect();
        addrs.sort_unstable();
        addrs
    }

    /// Waits until no block of this pool is pending, unless a graph is being captured.
    fn settle_events(&self, trace: &mut TraceBuffer) -> AllocResult<(), B> {
        if !self.shared.captures_under_way() {
            self.shared.wait_for_events_of(self.device, self.id(), trace)?;
        }
        Ok(())
    }

    /// Waits for the streams that stale blocks were used on.
    fn wait_for_uses(&self, waited: &Uses<B::Stream>) -> AllocResult<(), B> {
        if let Some((addr, _)) = waited.first()
            && self.shared.captures_under_way()
        {
            return Err(self.flaw(CheckpointFlaw::Pending { addr: *addr }));
        }
        let streams: BTreeMap<_, _> = waited.iter().map(|(addr, s)| (s.id(), (*addr, s))).collect();
        for (addr, stream) in streams.into_values() {
            if !self.shared.synchronize(stream)? {
                return Err(self.flaw(CheckpointFlaw::Pending { addr }));
            }
        }
        Ok(())
    }

    fn flaw_of(&self, obstacle: Obstacle) -> AllocError<B::Error> {
        self.flaw(match obstacle {
            Obstacle::Pending(addr) => CheckpointFlaw::Pending { addr },
            Obstacle::Gone(addr) => CheckpointFlaw::Gone { addr },
        })
    }

    fn flaw(&self, why: CheckpointFlaw) -> AllocError<B::Error> {
        AllocError::Checkpoint { pool: self.id(), why }
    }
}

/// Stale blocks and the streams that they were used on.
type Uses<S> = Vec<(Addr, S)>;

impl<B: Backend> HeapBody<B> {
    /// The uses of the blocks that a restore would free.
    fn stale_uses(&self, marks: &[LiveMark]) -> Result<Uses<B::Stream>, Obstacle> {
        let plan = self.heap.plan_restore(marks)?;
        if let Some(block) = plan.stale.iter().find(|block| self.shares_of(**block) > 0) {
            return Err(Obstacle::Pending(self.heap.blocks[*block].addr));
        }
        let of = |block: &BlockIdx| {
            let addr = self.heap.blocks[*block].addr;
            let uses = self.uses.get(block).into_iter().flatten();
            uses.map(move |used| (addr, used.stream.clone()))
        };
        Ok(plan.stale.iter().flat_map(of).collect())
    }

    /// Carries a restore out: requests and blocks of what is live again. `None`, and nothing changed, if
    /// that is not possible, or another stream uses a stale block and was not waited for.
    fn restore(
        &mut self,
        marks: &[LiveMark],
        waited: &Uses<B::Stream>,
        restored: &mut Restored,
        ledger: &mut Ledger<'_>,
    ) -> Option<Vec<(u64, HandedOut)>> {
        let Restoration { stale, revived, kept } = self.heap.plan_restore(marks).ok()?;
        let known = |used: &Use<B::Stream>| {
            waited.iter().any(|(_, stream)| stream.id() == used.stream.id())
        };
        let mut uses = stale.iter().filter_map(|block| self.uses.get(block)).flatten();
        if !uses.all(known) || stale.iter().any(|block| self.shares_of(*block) > 0) {
            return None;
        }
        let stream = self.heap.stream;
        for block in stale {
            self.uses.remove(&block);
            let gone = &mut self.heap.blocks[block];
            gone.used = false;
            let (addr, bytes, requested) = (gone.addr, gone.bytes, gone.requested);
            restored.stale.push(StaleBlock { addr, bytes, requested, stream });
            self.heap.free(block, ledger);
        }
        restored.kept.extend(kept);
        let blocks = self.heap.revive(&revived, ledger);
        let named = blocks.into_iter().zip(revived);
        Some(named.map(|(block, mark)| (mark.requested, self.handed_out(block))).collect())
    }
}
