//! Stream-ordered memory: `alloc_core`'s traits for [`MockBackend`].
//!
//! An allocation and a free are items of their stream's work. What is freed is handed out again only
//! where the new stream is ordered after the free: because it is the same stream, because the program
//! ordered it so, because the free is done, or because the pool makes the stream wait. The judge sees
//! to the client's part: no use before the allocation, and no free that is not after every use.

use alloc_core::backend::{ErrorKind, Refused};
use alloc_core::ordered::{OrderedMemory, PoolOptions, PoolUsage, StreamOrdered, StreamWait};
use alloc_core::{Addr, DeviceId};

use crate::costs::growth_ns;
use crate::judge::unordered;
use crate::pools::{Stamp, Taken, Tier};
use crate::sim::{Failure, Sim, on_range, on_stream};
use crate::streams::{End, Streams};
use crate::{Call, CallInfo, MockBackend, MockError, MockEvent, MockStream, Rule};

const NO_MEMORY: Failure = (ErrorKind::OutOfMemory, "the pool can hold no more");
const NO_POOLS: Failure = (ErrorKind::Unsupported, "the device has no memory pools");
const CAPTURING: Failure = (ErrorKind::Unsupported, "memory nodes of graphs are not simulated");

/// A stream-ordered pool of a [`MockBackend`]. A private one that is dropped shows up as a leak.
#[derive(PartialEq, Eq, Debug)]
pub struct MockPool {
    backend: u32,
    device: DeviceId,
    index: usize,
}

/// Memory of a [`MockPool`]. If it is dropped it shows up as a leak.
#[derive(PartialEq, Eq, Debug)]
pub struct MockOrdered {
    backend: u32,
    pool: usize,
    base: Addr,
    bytes: u64,
}

impl OrderedMemory for MockOrdered {
    fn addr(&self) -> Addr {
        self.base
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl StreamWait for MockBackend {
    fn wait_event(&self, stream: &MockStream, event: &MockEvent) -> Result<(), MockError> {
        MockBackend::wait_event(self, stream, event)
    }
}

impl MockBackend {
    /// A call about a pool.
    fn on_pool<T>(
        &self,
        call: Call,
        pool: &MockPool,
        bytes: u64,
        act: impl FnOnce(&mut Sim) -> Result<T, Failure>,
    ) -> Result<T, MockError> {
        let info = on_range(call, pool.device, Addr::NULL, bytes);
        self.call(info, |sim, _| {
            self.check_owner(sim, pool.backend, &info)?;
            act(sim)
        })
    }
}

impl StreamOrdered for MockBackend {
    type Pool = MockPool;
    type Ordered = MockOrdered;

    fn has_pools(&self, device: DeviceId) -> Result<bool, MockError> {
        Ok(self.sim().pools.has(device))
    }

    fn default_pool(&self, device: DeviceId) -> Result<MockPool, MockError> {
        let info = on_range(Call::CreatePool, device, Addr::NULL, 0);
        self.call(info, |sim, _| {
            sim.pools.has(device).then_some(()).ok_or(NO_POOLS)?;
            Ok(MockPool { backend: self.shared.id, device, index: device.index() })
        })
    }

    fn create_pool(&self, device: DeviceId, bytes_max: Option<u64>) -> Result<MockPool, MockError> {
        let info = on_range(Call::CreatePool, device, Addr::NULL, bytes_max.unwrap_or(0));
        self.call(info, |sim, _| {
            sim.pools.has(device).then_some(()).ok_or(NO_POOLS)?;
            let index = sim.pools.create(device, bytes_max.unwrap_or(u64::MAX));
            Ok(MockPool { backend: self.shared.id, device, index })
        })
    }

    fn destroy_pool(&self, pool: MockPool) -> Result<(), Refused<MockPool, MockError>> {
        let info = on_range(Call::DestroyPool, pool.device, Addr::NULL, 0);
        let (owner, index) = (pool.backend, pool.index);
        self.consuming(info, pool, |sim, _| {
            self.check_owner(sim, owner, &info)?;
            sim.pools.get(index).end();
            sim.reap(index);
            Ok(())
        })
    }

    fn allocate_ordered(
        &self,
        pool: &MockPool,
        bytes: u64,
        stream: &MockStream,
    ) -> Result<MockOrdered, MockError> {
        let info = CallInfo { bytes, ..on_stream(Call::AllocateOrdered, stream) };
        let base = self.call(info, |sim, begun| {
            self.check_owner(sim, pool.backend, &info)?;
            self.check_owner(sim, stream.backend, &info)?;
            if bytes == 0 || stream.device != pool.device {
                return Err(sim.refuse(Rule::BadRequest, &info, "no such size or stream"));
            }
            if sim.captures.of(stream.index).is_some() {
                return Err(CAPTURING);
            }
            begun.info.addr = sim.allocate_ordered(pool.index, bytes, stream.index)?;
            Ok(begun.info.addr)
        })?;
        Ok(MockOrdered { backend: self.shared.id, pool: pool.index, base, bytes })
    }

    fn free_ordered(
        &self,
        memory: MockOrdered,
        stream: &MockStream,
    ) -> Result<(), Refused<MockOrdered, MockError>> {
        let MockOrdered { backend, pool, base, bytes } = memory;
        let info = CallInfo { addr: base, bytes, ..on_stream(Call::FreeOrdered, stream) };
        self.consuming(info, memory, |sim, _| {
            self.check_owner(sim, backend, &info)?;
            self.check_owner(sim, stream.backend, &info)?;
            if !sim.pools.get(pool).is_live(base) || sim.pools.get(pool).device != stream.device {
                return Err(sim.refuse(Rule::BadRequest, &info, "not allocated, or elsewhere"));
            }
            if sim.captures.of(stream.index).is_some() {
                return Err(CAPTURING);
            }
            sim.free_ordered(pool, (base, bytes), stream.index);
            Ok(())
        })
    }

    fn set_pool_options(&self, pool: &MockPool, options: PoolOptions) -> Result<(), MockError> {
        self.on_pool(Call::PoolOptions, pool, 0, |sim| {
            sim.pools.get(pool.index).options = options;
            Ok(())
        })
    }

    fn pool_options(&self, pool: &MockPool) -> Result<PoolOptions, MockError> {
        self.on_pool(Call::PoolOptions, pool, 0, |sim| Ok(sim.pools.get(pool.index).options))
    }

    fn pool_usage(&self, pool: &MockPool) -> Result<PoolUsage, MockError> {
        self.on_pool(Call::PoolUsage, pool, 0, |sim| Ok(sim.pools.get(pool.index).usage))
    }

    fn reset_pool_peaks(&self, pool: &MockPool) -> Result<(), MockError> {
        self.on_pool(Call::PoolUsage, pool, 0, |sim| {
            let usage = &mut sim.pools.get(pool.index).usage;
            (usage.reserved_peak, usage.used_peak) = (usage.reserved, usage.used);
            Ok(())
        })
    }

    fn trim_pool(&self, pool: &MockPool, keep_bytes: u64) -> Result<(), MockError> {
        self.on_pool(Call::TrimPool, pool, keep_bytes, |sim| {
            sim.release_unused(pool.index, keep_bytes, host_has_seen);
            Ok(())
        })
    }
}

impl Sim {
    fn allocate_ordered(
        &mut self,
        pool: usize,
        bytes: u64,
        stream: usize,
    ) -> Result<Addr, Failure> {
        let taken = self
            .take(pool, bytes, stream, Tier::Ordered)
            .or_else(|| self.take(pool, bytes, stream, Tier::Opportunistic))
            .or_else(|| {
                self.grow(pool, bytes)?;
                self.take(pool, bytes, stream, Tier::Ordered)
            })
            .or_else(|| self.take(pool, bytes, stream, Tier::Internal))
            .ok_or(NO_MEMORY)?;
        let allocated = self.stamp(stream);
        self.pools.get(pool).allocated(taken.addr, bytes, allocated);
        Ok(taken.addr)
    }

    /// Takes unused memory, and orders the stream after what it comes from as the tier says.
    fn take(&mut self, pool: usize, bytes: u64, stream: usize, tier: Tier) -> Option<Taken> {
        let taken = self.pools.get(pool).take(bytes, stream, tier, &self.streams)?;
        for free in &taken.frees {
            match tier {
                Tier::Ordered => {}
                // It is done, so whatever comes now comes after it.
                Tier::Opportunistic => self.streams.all[stream].lane.clock.join(&free.clock),
                Tier::Internal => {
                    self.streams.queue_after(stream, (free.stream, free.item), &free.clock);
                }
            }
        }
        Some(taken)
    }

    fn grow(&mut self, pool: usize, bytes: u64) -> Option<()> {
        let device = self.pools.get(pool).device;
        let growth = self.pools.get(pool).growth(bytes)?;
        if !self.memory.take(device, growth) {
            return None;
        }
        let Some(base) = self.space.choose(growth) else {
            self.memory.put_back(device, growth);
            return None;
        };
        self.memory.add_segment(base, growth);
        self.pools.get(pool).add_segment(base, growth);
        self.spend(growth_ns(growth));
        Some(())
    }

    fn free_ordered(&mut self, pool: usize, (base, bytes): (Addr, u64), stream: usize) {
        let pieces = self.memory.pieces(base, bytes).unwrap_or_default();
        let lanes = self.streams.all.iter().map(|state| &state.lane).enumerate();
        let own = (stream, &self.streams.all[stream].lane);
        let under_work = unordered(lanes, own, |s| self.streams.host.get(s), &pieces, true);
        for other in under_work {
            self.violate(Rule::FreeUnderWork, (Some(stream), Some(other)), (base, bytes));
        }
        if let Some(live) = self.book.within(base, bytes) {
            self.violate(Rule::ReleaseOfAllocated, (Some(stream), None), live);
        }
        let freed = self.stamp(stream);
        self.pools.get(pool).freed(base, freed);
        self.reap(pool);
    }

    /// Queues an item that takes no time.
    fn stamp(&mut self, stream: usize) -> Stamp {
        let item = self.streams.queue_work(stream, End::After(0));
        let clock = self.streams.all[stream].lane.now(stream);
        self.streams.settle();
        Stamp { stream, item, clock }
    }

    /// Judges work on memory of a pool.
    pub(crate) fn judge_use_of_pool(&mut self, stream: &MockStream, addr: Addr, bytes: u64) {
        let Some(allocated) = self.pools.allocation_of(addr) else { return };
        let (owner, item) = (allocated.stream, allocated.item);
        let known = self.streams.all[stream.index].lane.clock.get(owner);
        if owner != stream.index && known.max(self.streams.host.get(owner)) < item {
            let places = (Some(stream.index), Some(owner));
            self.violate(Rule::UseBeforeAllocation, places, (addr, bytes));
        }
    }

    /// What pools do when the host has waited for something.
    pub(crate) fn after_sync(&mut self) {
        for pool in self.pools.indices() {
            let keep = self.pools.get(pool).threshold();
            self.release_unused(pool, keep, host_has_seen);
            self.reap(pool);
        }
    }

    /// Gives the memory of a pool back that has ended, as far as its frees are done.
    fn reap(&mut self, pool: usize) {
        if self.pools.get(pool).is_ended() {
            self.release_unused(pool, 0, |streams, free| streams.reached(free.stream, free.item));
        }
    }

    fn release_unused(&mut self, pool: usize, keep: u64, seen: fn(&Streams, &Stamp) -> bool) {
        let Sim { pools, streams, .. } = self;
        let pool = pools.get(pool);
        let device = pool.device;
        let released = pool.release(keep, |free| seen(streams, free));
        for (base, bytes) in released {
            if let Some(piece) = self.memory.remove_segment(base) {
                self.streams.forget_physical(piece);
            }
            self.streams.forget_addresses(base, bytes);
            self.memory.put_back(device, bytes);
            self.space.give_back(base);
        }
    }

    /// Live segments other than those of pools that go on.
    pub(crate) fn live_segments(&self) -> Vec<(Addr, u64)> {
        let all = self.memory.live_segments();
        all.into_iter().filter(|(base, _)| !self.pools.holds(*base)).collect()
    }
}

fn host_has_seen(streams: &Streams, free: &Stamp) -> bool {
    streams.host.get(free.stream) >= free.item
}
