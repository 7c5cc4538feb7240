//! The judge's book: which allocations are live, and what work may still touch memory.

use std::collections::BTreeMap;

use alloc_core::Addr;

use crate::graphs::Sharing;
use crate::memory::Piece;
use crate::ranges::RangeMap;
use crate::streams::{Lane, Streams};

/// The end of a range that may be nonsense.
pub(crate) fn end_of(addr: Addr, bytes: u64) -> u64 {
    addr.get().saturating_add(bytes)
}

#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) bytes: u64,
    /// Never that of another allocation.
    pub(crate) serial: u64,
    /// Whose graphs' memory it may be, if it was made for captured work.
    pub(crate) sharing: Option<Sharing>,
    pieces: Vec<Piece>,
}

/// Live allocations, by address and by physical memory.
#[derive(Debug, Default)]
pub(crate) struct Book {
    by_addr: BTreeMap<u64, Live>,
    /// physical range → address of the allocation
    by_physical: RangeMap<u64>,
    /// Serial and sharing of the latest allocation freed at an address, should its free have failed.
    freed: BTreeMap<u64, (u64, Option<Sharing>)>,
    next_serial: u64,
}

impl Book {
    /// The address of a live allocation over the same memory.
    pub(crate) fn overlapping(&self, pieces: &[Piece]) -> Option<Addr> {
        let hit =
            pieces.iter().find_map(|&(from, to)| self.by_physical.overlapping(from, to).next());
        hit.map(|(_, _, addr)| Addr::new(addr))
    }

    pub(crate) fn insert(
        &mut self,
        addr: Addr,
        bytes: u64,
        pieces: Vec<Piece>,
        sharing: Option<Sharing>,
    ) {
        self.next_serial += 1;
        self.enter(addr, Live { bytes, serial: self.next_serial, sharing, pieces });
    }

    /// Puts back what was removed a moment ago.
    pub(crate) fn restore(&mut self, addr: Addr, bytes: u64, pieces: Vec<Piece>) {
        match self.freed.remove(&addr.get()) {
            Some((serial, sharing)) => self.enter(addr, Live { bytes, serial, sharing, pieces }),
            None => self.insert(addr, bytes, pieces, None),
        }
    }

    fn enter(&mut self, addr: Addr, live: Live) {
        for &(from, to) in &live.pieces {
            self.by_physical.set(from, to, addr.get());
        }
        self.by_addr.insert(addr.get(), live);
    }

    /// Ends an allocation; its size, or `None` if there is none at `addr`.
    pub(crate) fn remove(&mut self, addr: Addr) -> Option<u64> {
        let live = self.by_addr.remove(&addr.get())?;
        for &(from, to) in &live.pieces {
            self.by_physical.remove(from, to);
        }
        self.freed.insert(addr.get(), (live.serial, live.sharing));
        Some(live.bytes)
    }

    /// The size of the live allocation at `addr`.
    pub(crate) fn bytes_at(&self, addr: Addr) -> Option<u64> {
        self.by_addr.get(&addr.get()).map(|live| live.bytes)
    }

    /// The live allocation that holds all of the range.
    pub(crate) fn holding(&self, addr: Addr, bytes: u64) -> Option<&Live> {
        let (start, live) = self.by_addr.range(..=addr.get()).next_back()?;
        ((addr.get() - start).saturating_add(bytes) <= live.bytes).then_some(live)
    }

    /// The first live allocation that shares an address with the range.
    pub(crate) fn within(&self, addr: Addr, bytes: u64) -> Option<(Addr, u64)> {
        let (&start, live) = self.by_addr.range(..end_of(addr, bytes)).next_back()?;
        (start.saturating_add(live.bytes) > addr.get()).then_some((Addr::new(start), live.bytes))
    }

    /// Live allocations as (address, bytes), ascending.
    pub(crate) fn live(&self) -> Vec<(Addr, u64)> {
        self.by_addr.iter().map(|(&addr, live)| (Addr::new(addr), live.bytes)).collect()
    }
}

/// Streams whose latest work on `pieces` is neither before the next item of `lane` nor known to be
/// finished. `lanes` are all lines of order in which `lane` takes part; `replays` says whether
/// replays of graphs count as work.
pub(crate) fn unordered<'a>(
    lanes: impl Iterator<Item = (usize, &'a Lane)>,
    own: (usize, &Lane),
    known: impl Fn(usize) -> u64,
    pieces: &[Piece],
    replays: bool,
) -> Vec<usize> {
    lanes
        .filter(|&(stream, lane)| {
            let before = known(stream).max(own.1.clock.get(stream));
            let later = |touched: &RangeMap<u64>, &(from, to): &Piece| {
                touched.overlapping(from, to).any(|(_, _, item)| item > before)
            };
            let touches = |piece: &Piece| {
                later(&lane.touched, piece) || replays && later(&lane.replayed, piece)
            };
            stream != own.0 && pieces.iter().any(touches)
        })
        .map(|(stream, _)| stream)
        .collect()
}

impl Streams {
    /// Streams with work on these addresses that the host has not seen finish.
    pub(crate) fn unseen_on(&self, addr: Addr, bytes: u64) -> Vec<usize> {
        let (from, to) = (addr.get(), end_of(addr, bytes));
        let unseen = |stream: &usize| {
            let seen = self.host.get(*stream);
            self.all[*stream].touched_addrs.overlapping(from, to).any(|(_, _, item)| item > seen)
        };
        (0..self.all.len()).filter(unseen).collect()
    }

    /// Nothing touches these addresses any more: what is behind them changes.
    pub(crate) fn forget_addresses(&mut self, addr: Addr, bytes: u64) {
        for stream in &mut self.all {
            stream.touched_addrs.remove(addr.get(), end_of(addr, bytes));
        }
    }

    /// This physical memory is gone for good.
    pub(crate) fn forget_physical(&mut self, (from, to): Piece) {
        for stream in &mut self.all {
            stream.lane.touched.remove(from, to);
            stream.lane.replayed.remove(from, to);
        }
    }
}
