//! The stream-ordered pools of simulated devices: what they hold, and who may have it next.

use std::collections::{BTreeMap, BTreeSet};

use alloc_core::ordered::{PoolOptions, PoolReuse, PoolUsage};
use alloc_core::{Addr, DeviceId};

use crate::clock::Clock;
use crate::streams::Streams;

/// Sizes of blocks are multiples of this, as the driver's are.
const BLOCK_QUANTUM: u64 = 512;

/// Pools grow by multiples of this.
pub(crate) const GROWTH_QUANTUM: u64 = 2 << 20;

/// A point in a stream's work: an allocation or a free.
#[derive(Clone, Debug)]
pub(crate) struct Stamp {
    pub(crate) stream: usize,
    pub(crate) item: u64,
    /// What it comes after, itself included.
    pub(crate) clock: Clock,
}

/// How memory that was freed on another stream may be had, in the order in which it is tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Tier {
    /// The stream comes after the free, or the host has seen it.
    Ordered,
    /// The free happens to be done.
    Opportunistic,
    /// The driver makes the stream wait.
    Internal,
}

/// Unused memory of a pool, and the frees that it comes from.
#[derive(Clone, Debug)]
struct Region {
    bytes: u64,
    frees: Vec<Stamp>,
}

#[derive(Debug)]
struct Block {
    requested: u64,
    bytes: u64,
    allocated: Stamp,
}

#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) device: DeviceId,
    is_default: bool,
    ended: bool,
    bytes_max: u64,
    pub(crate) options: PoolOptions,
    pub(crate) usage: PoolUsage,
    /// base → bytes
    segments: BTreeMap<u64, u64>,
    free: BTreeMap<u64, Region>,
    live: BTreeMap<u64, Block>,
}

/// All pools of a machine; the first ones are the devices' own.
#[derive(Debug)]
pub(crate) struct Pools {
    all: Vec<Pool>,
    devices: u16,
}

/// Memory that was taken from a pool, and what its new stream must be ordered after.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) addr: Addr,
    pub(crate) frees: Vec<Stamp>,
}

impl Pools {
    /// The default pools of `devices` devices.
    pub(crate) fn new(devices: u16) -> Self {
        let pool = |index| Pool::new(DeviceId::new(index), true, u64::MAX);
        Pools { all: (0..devices).map(pool).collect(), devices }
    }

    /// Whether a device has pools.
    pub(crate) fn has(&self, device: DeviceId) -> bool {
        device.index() < usize::from(self.devices)
    }

    pub(crate) fn create(&mut self, device: DeviceId, bytes_max: u64) -> usize {
        self.all.push(Pool::new(device, false, bytes_max));
        self.all.len() - 1
    }

    pub(crate) fn get(&mut self, index: usize) -> &mut Pool {
        &mut self.all[index]
    }

    pub(crate) fn indices(&self) -> std::ops::Range<usize> {
        0..self.all.len()
    }

    /// Allocations that were not freed: address, bytes.
    pub(crate) fn live(&self) -> Vec<(Addr, u64)> {
        let live = self.all.iter().flat_map(|pool| &pool.live);
        live.map(|(&addr, block)| (Addr::new(addr), block.requested)).collect()
    }

    /// Pools that were made and not ended.
    pub(crate) fn unended(&self) -> usize {
        self.all.iter().filter(|pool| !pool.is_default && !pool.ended).count()
    }

    /// Whether a segment is a pool's that still exists.
    pub(crate) fn holds(&self, base: Addr) -> bool {
        self.all.iter().any(|pool| pool.segments.contains_key(&base.get()))
    }

    /// The allocation that holds `addr`, as the point where it was made.
    pub(crate) fn allocation_of(&self, addr: Addr) -> Option<&Stamp> {
        self.all.iter().find_map(|pool| {
            let (start, block) = pool.live.range(..=addr.get()).next_back()?;
            (addr.get() - start < block.bytes).then_some(&block.allocated)
        })
    }
}

impl Pool {
    fn new(device: DeviceId, is_default: bool, bytes_max: u64) -> Self {
        Pool {
            device,
            is_default,
            ended: false,
            bytes_max,
            // As the driver starts: all reuse, and unused memory goes back at every synchronisation.
            options: PoolOptions { reuse: PoolReuse::ALL, release_threshold: 0 },
            usage: PoolUsage::default(),
            segments: BTreeMap::new(),
            free: BTreeMap::new(),
            live: BTreeMap::new(),
        }
    }

    /// Ends it, unless it is the device's own.
    pub(crate) fn end(&mut self) {
        self.ended |= !self.is_default;
    }

    /// Bytes to grow by for a request, if the pool may hold them.
    pub(crate) fn growth(&self, bytes: u64) -> Option<u64> {
        let growth = bytes.checked_next_multiple_of(GROWTH_QUANTUM)?;
        let reserved = self.usage.reserved.checked_add(growth)?;
        (reserved <= self.bytes_max).then_some(growth)
    }

    /// Adds a segment that nobody has used.
    pub(crate) fn add_segment(&mut self, base: Addr, bytes: u64) {
        self.segments.insert(base.get(), bytes);
        self.free.insert(base.get(), Region { bytes, frees: Vec::new() });
        self.usage.reserved += bytes;
        self.usage.reserved_peak = self.usage.reserved_peak.max(self.usage.reserved);
    }

    /// Takes memory for `stream` from the smallest run of regions that it may have in this way, the
    /// lowest among equals.
    pub(crate) fn take(
        &mut self,
        bytes: u64,
        stream: usize,
        tier: Tier,
        streams: &Streams,
    ) -> Option<Taken> {
        let bytes = bytes.checked_next_multiple_of(BLOCK_QUANTUM)?;
        let reuse = self.options.reuse;
        let may = |free: &Stamp| may_have(reuse, free, stream, tier, streams);
        let runs = self.runs(|region| region.frees.iter().all(may));
        let fit = runs.into_iter().filter(|run| run.1 >= bytes).min_by_key(|run| (run.1, run.0))?;
        Some(Taken { addr: Addr::new(fit.0), frees: self.cut(fit.0, bytes) })
    }

    /// Runs of neighbouring regions of one segment that all `may` be had: start and bytes.
    fn runs(&self, may: impl Fn(&Region) -> bool) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (&start, region) in self.free.iter().filter(|(_, region)| may(region)) {
            match runs.last_mut() {
                Some(last) if last.0 + last.1 == start && !self.segments.contains_key(&start) => {
                    last.1 += region.bytes;
                }
                _ => runs.push((start, region.bytes)),
            }
        }
        runs
    }

    /// Cuts `bytes` from the regions that start at `start`; the frees that they come from.
    fn cut(&mut self, start: u64, bytes: u64) -> Vec<Stamp> {
        let (mut at, end, mut frees) = (start, start + bytes, Vec::new());
        while at < end {
            let Some(region) = self.free.remove(&at) else { break };
            let after = at + region.bytes;
            if after > end {
                let rest = Region { bytes: after - end, frees: region.frees.clone() };
                self.free.insert(end, rest);
            }
            frees.extend(region.frees);
            at = after;
        }
        frees
    }

    /// Enters an allocation.
    pub(crate) fn allocated(&mut self, addr: Addr, requested: u64, allocated: Stamp) {
        let bytes = requested.next_multiple_of(BLOCK_QUANTUM);
        self.live.insert(addr.get(), Block { requested, bytes, allocated });
        self.usage.used += bytes;
        self.usage.used_peak = self.usage.used_peak.max(self.usage.used);
    }

    /// Whether an allocation starts at `addr`.
    pub(crate) fn is_live(&self, addr: Addr) -> bool {
        self.live.contains_key(&addr.get())
    }

    /// Ends an allocation at a point of a stream.
    pub(crate) fn freed(&mut self, addr: Addr, free: Stamp) {
        let Some(block) = self.live.remove(&addr.get()) else { return };
        self.usage.used -= block.bytes;
        self.free.insert(addr.get(), Region { bytes: block.bytes, frees: vec![free] });
    }

    /// Takes segments out of which nothing is used, until at most `keep` bytes are held: base and
    /// bytes, the highest first. `seen` tells whether a free is known to be done.
    pub(crate) fn release(&mut self, keep: u64, seen: impl Fn(&Stamp) -> bool) -> Vec<(Addr, u64)> {
        let runs = self.runs(|region| region.frees.iter().all(&seen));
        let unused: BTreeSet<(u64, u64)> = runs.into_iter().collect();
        let mut released = Vec::new();
        for (base, bytes) in self.segments.clone().into_iter().rev() {
            if self.usage.reserved <= keep {
                break;
            }
            if unused.contains(&(base, bytes)) {
                self.cut(base, bytes);
                self.segments.remove(&base);
                self.usage.reserved -= bytes;
                released.push((Addr::new(base), bytes));
            }
        }
        released
    }

    /// What it may keep: nothing once it has ended.
    pub(crate) fn threshold(&self) -> u64 {
        if self.ended { 0 } else { self.options.release_threshold }
    }

    /// Whether it has ended and is waiting for its memory.
    pub(crate) fn is_ended(&self) -> bool {
        self.ended
    }
}

/// Whether `stream` may have memory that was freed there.
fn may_have(reuse: PoolReuse, free: &Stamp, stream: usize, tier: Tier, streams: &Streams) -> bool {
    let seen = streams.host.get(free.stream) >= free.item;
    let ordered = || streams.all[stream].lane.clock.get(free.stream) >= free.item;
    if free.stream == stream || seen || (reuse.follow_events && ordered()) {
        return true;
    }
    match tier {
        Tier::Ordered => false,
        Tier::Opportunistic => reuse.opportunistic && streams.reached(free.stream, free.item),
        Tier::Internal => reuse.internal_dependencies,
    }
}
