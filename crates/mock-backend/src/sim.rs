//! The simulator's state, all of it under one lock, and the rules that every call shares.

use std::collections::{BTreeMap, BTreeSet};

use alloc_core::backend::ErrorKind;
use alloc_core::host::PinRequest;
use alloc_core::{Addr, DeviceId};

use crate::addresses::AddressSpace;
use crate::call::Log;
use crate::captures::Captures;
use crate::clock::Clock;
use crate::costs::call_ns;
use crate::event::MockEvent;
use crate::faults::FaultPlan;
use crate::graphs::{Graphs, Sharing};
use crate::judge::{Book, end_of, unordered};
use crate::memory::{Device, Memory, Piece};
use crate::pools::Pools;
use crate::ranges::RangeMap;
use crate::share::Imports;
use crate::streams::{Ending, MockStream, Streams, Work, id_of};
use crate::{Call, CallInfo, Costs, LogEntry, MockError, Rng, Rule, Violation};

/// Why a call fails, before it is known which call it is.
pub(crate) type Failure = (ErrorKind, &'static str);

#[derive(Debug)]
pub(crate) struct Sim {
    pub(crate) operation: u64,
    pub(crate) unloaded: bool,
    pub(crate) strict: bool,
    pub(crate) memory: Memory,
    /// The NUMA nodes of the host and what is pinned there.
    pub(crate) host: Vec<Device>,
    /// What is pinned there, by address.
    pub(crate) pins: BTreeMap<Addr, PinRequest>,
    pub(crate) space: AddressSpace,
    pub(crate) streams: Streams,
    pub(crate) captures: Captures,
    pub(crate) graphs: Graphs,
    /// Event calls are subject to the modes of captures.
    pub(crate) obeys_captures: bool,
    pub(crate) book: Book,
    pub(crate) pools: Pools,
    pub(crate) faults: FaultPlan,
    pub(crate) costs: Costs,
    pub(crate) log: Log,
    pub(crate) violations: Vec<Violation>,
    /// Generator and probability of work ending by chance.
    pub(crate) chance: Option<(Rng, f64)>,
    /// What is open of other processes.
    pub(crate) imports: Imports,
}

/// A call that has begun: what will be logged of it.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) info: CallInfo,
    operation: u64,
    pub(crate) waited_for: BTreeSet<usize>,
}

impl Sim {
    /// What every driver call begins with: its number, its cost, work that ends by chance, faults.
    pub(crate) fn begin(&mut self, info: CallInfo) -> Result<Begun, MockError> {
        if self.unloaded {
            return Err(MockError::new(info.call, ErrorKind::DeviceLost, "the driver is gone"));
        }
        self.operation += 1;
        let ns = match info.call {
            // The driver works mapping by mapping, however long the run.
            Call::SetAccess => {
                let mappings = self.memory.mappings_in(info.addr, info.bytes);
                mappings.map(|bytes| call_ns(info.call, bytes)).sum()
            }
            _ => call_ns(info.call, info.bytes),
        };
        self.costs.count(info.call);
        self.spend(ns);
        self.streams.settle();
        if let Some((rng, p)) = &mut self.chance {
            self.streams.end_by_chance(|| rng.chance(*p));
        }
        let begun = Begun { info, operation: self.operation, waited_for: BTreeSet::new() };
        match self.faults.strike(info.call) {
            None => Ok(begun),
            Some(kind) => {
                self.log(begun, Some(kind));
                Err(MockError::injected(info.call, kind))
            }
        }
    }

    /// Lets driver time pass.
    pub(crate) fn spend(&mut self, ns: u64) {
        self.costs.stall_ns += ns;
        self.streams.now_ns += ns;
    }

    /// What every driver call ends with.
    pub(crate) fn finish<T>(
        &mut self,
        begun: Begun,
        result: Result<T, Failure>,
    ) -> Result<T, MockError> {
        let call = begun.info.call;
        self.log(begun, result.as_ref().err().map(|failure| failure.0));
        result.map_err(|(kind, why)| MockError::new(call, kind, why))
    }

    fn log(&mut self, begun: Begun, error: Option<ErrorKind>) {
        let waited_for = begun.waited_for.into_iter().map(id_of).collect();
        let Begun { info, operation, .. } = begun;
        self.log.push(LogEntry { operation, info, error, waited_for });
    }

    /// Notes a broken rule.
    ///
    /// # Panics
    /// In a strict backend, unless the thread is panicking already.
    pub(crate) fn violate(
        &mut self,
        rule: Rule,
        (stream, other): (Option<usize>, Option<usize>),
        (addr, bytes): (Addr, u64),
    ) {
        let violation = Violation {
            operation: self.operation,
            rule,
            stream: stream.map(id_of),
            other: other.map(id_of),
            addr,
            bytes,
        };
        let panics = self.strict && !std::thread::panicking();
        self.violations.push(violation.clone());
        assert!(!panics, "{violation}");
    }

    /// As [`violate`](Sim::violate), for a call; the failure to return from it.
    pub(crate) fn refuse(&mut self, rule: Rule, info: &CallInfo, why: &'static str) -> Failure {
        let stream = info.stream.map(|id| id.get() as usize);
        self.violate(rule, (stream, None), (info.addr, info.bytes));
        (ErrorKind::Other, why)
    }

    /// The host waits for the first `items` items of a stream, and knows it then.
    pub(crate) fn host_waits(&mut self, stream: usize, items: u64) -> BTreeSet<usize> {
        let before_ns = self.streams.now_ns;
        let forced = self.streams.end_through(stream, items, Ending::Waited);
        self.costs.waited_ns += self.streams.now_ns - before_ns;
        forced
    }

    /// The host waits for everything queued on these streams.
    pub(crate) fn host_waits_for_all(&mut self, streams: &[usize]) -> BTreeSet<usize> {
        let mut forced = BTreeSet::new();
        for &stream in streams {
            let clock = self.streams.all[stream].lane.now(stream);
            forced.extend(self.host_waits(stream, self.streams.all[stream].lane.queued));
            self.streams.observe(&clock);
        }
        forced
    }

    /// Queues work, or adds it to the capture that the stream takes part in.
    pub(crate) fn launch(&mut self, stream: &MockStream, mut work: Work) {
        self.operation += 1;
        work.ranges.retain(|range| range.1 > 0);
        let uses = work.ranges.iter().map(|&(addr, bytes)| self.pieces_used(stream, addr, bytes));
        let uses: Vec<Vec<Piece>> = uses.collect();
        if let Some(id) = self.captures.of(stream.index) {
            return self.capture(id, stream.index, work, uses);
        }
        let item = self.streams.queue_work(stream.index, work.end);
        let state = &mut self.streams.all[stream.index];
        for (addr, bytes) in work.ranges {
            state.touched_addrs.set(addr.get(), end_of(addr, bytes), item);
        }
        for (from, to) in uses.into_iter().flatten() {
            state.lane.touched.set(from, to, item);
        }
        self.streams.settle();
    }

    /// The physical runs that work on the range touches, judged.
    fn pieces_used(&mut self, stream: &MockStream, addr: Addr, bytes: u64) -> Vec<Piece> {
        let place = ((Some(stream.index), None), (addr, bytes));
        if self.imports.is_unready(addr, stream.index) {
            self.violate(Rule::UnreadyUse, place.0, place.1);
        }
        if self.book.holding(addr, bytes).is_none() {
            self.violate(Rule::UnallocatedUse, place.0, place.1);
        }
        self.judge_use_of_pool(stream, addr, bytes);
        match self.memory.translate(addr, bytes, stream.device) {
            Ok(pieces) => pieces,
            Err(rule) => {
                self.violate(rule, place.0, place.1);
                Vec::new()
            }
        }
    }

    /// Judges an allocation that was handed out, to captured work or to somebody who shares memory
    /// with some.
    pub(crate) fn allocated(
        &mut self,
        addr: Addr,
        bytes: u64,
        stream: &MockStream,
        pool: Option<Sharing>,
    ) {
        self.operation += 1;
        let range = (addr, bytes);
        let on = Some(stream.index);
        let pieces = match self.memory.translate(addr, bytes, stream.device) {
            Ok(pieces) => pieces,
            Err(rule) => {
                self.violate(rule, (on, None), range);
                Vec::new()
            }
        };
        let same_addr = self.book.within(addr, bytes).is_some();
        if same_addr || self.book.overlapping(&pieces).is_some() {
            self.violate(Rule::Overlap, (on, None), range);
        }
        for other in self.endangered(stream.index, &pieces) {
            self.violate(Rule::EarlyReuse, (on, Some(other)), range);
        }
        let capture = self.captures.of(stream.index).and_then(|id| self.captures.get(id));
        let sharing = capture.map(|capture| capture.recorded.sharing).or(pool);
        let hits = |own: &RangeMap<()>, _: &RangeMap<()>| {
            pieces.iter().any(|&(from, to)| own.overlapping(from, to).next().is_some())
        };
        if self.belongs_to_a_graph(sharing, hits) {
            self.violate(Rule::GraphAliased, (on, None), range);
        }
        self.book.insert(addr, bytes, pieces, sharing);
    }

    /// Streams whose work on `pieces` the next work of `stream` would overtake.
    fn endangered(&self, stream: usize, pieces: &[Piece]) -> BTreeSet<usize> {
        let Streams { all, host, .. } = &self.streams;
        let eager = all.iter().map(|state| &state.lane).enumerate();
        let own = (stream, &all[stream].lane);
        let capture = self.captures.of(stream).and_then(|id| self.captures.get(id));
        // Captured work does not run now, and the client orders the replays of graphs that share
        // their memory.
        let replays = capture.is_none();
        let mut found =
            BTreeSet::from_iter(unordered(eager, own, |s| host.get(s), pieces, replays));
        if let Some(capture) = capture {
            let lanes = || capture.lanes.iter().map(|(&s, own)| (s, &own.lane));
            for own in lanes().filter(|(s, _)| *s == stream) {
                found.extend(unordered(lanes(), own, |_| 0, pieces, false));
            }
        }
        found
    }

    /// Judges a free by the client; the size of what was freed.
    pub(crate) fn freed(&mut self, addr: Addr) -> Option<u64> {
        self.operation += 1;
        let bytes = self.book.remove(addr);
        if bytes.is_none() {
            self.violate(Rule::UnknownFree, (None, None), (addr, 0));
        }
        bytes
    }

    /// Puts an allocation back that was freed a moment ago.
    pub(crate) fn still_live(&mut self, addr: Addr, bytes: u64) {
        let pieces = self.memory.pieces(addr, bytes).unwrap_or_default();
        self.book.restore(addr, bytes, pieces);
    }

    /// Judges that the memory at these addresses goes away.
    pub(crate) fn vanishes(&mut self, under_work: Rule, addr: Addr, bytes: u64) {
        for stream in self.streams.unseen_on(addr, bytes) {
            self.violate(under_work, (Some(stream), None), (addr, bytes));
        }
        if let Some(live) = self.book.within(addr, bytes) {
            self.violate(Rule::ReleaseOfAllocated, (None, None), live);
        }
        let end = end_of(addr, bytes);
        let hits = |_: &RangeMap<()>, own: &RangeMap<()>| {
            own.overlapping(addr.get(), end).next().is_some()
        };
        if self.belongs_to_a_graph(None, hits) {
            self.violate(Rule::ReturnedUnderGraph, (None, None), (addr, bytes));
        }
        self.streams.forget_addresses(addr, bytes);
    }

    /// Gives a segment back: waits for its device, then judges.
    pub(crate) fn release(&mut self, base: Addr, bytes: u64, device: DeviceId) -> BTreeSet<usize> {
        let waited = self.host_waits_for_all(&self.streams.of_device(device));
        self.vanishes(Rule::ReleaseUnderWork, base, bytes);
        if let Some(piece) = self.memory.remove_segment(base) {
            self.streams.forget_physical(piece);
        }
        self.memory.put_back(device, bytes);
        self.space.give_back(base);
        waited
    }

    /// Orders what follows on `stream` after `event`, inside a capture or out of any.
    pub(crate) fn order_after(&mut self, stream: usize, event: &MockEvent) -> Result<(), Failure> {
        const CROSSED: Failure = (ErrorKind::Other, "the event belongs to another capture or none");
        let own = self.captures.of(stream);
        match event.capture {
            None if own.is_none() => {
                self.streams.queue_after(stream, (event.stream, event.items), &event.clock);
                Ok(())
            }
            Some(id) if own.is_none_or(|own| own == id) => {
                let capture = self.captures.get_mut(id).ok_or(CROSSED)?;
                let own = capture.lanes.entry(stream).or_default();
                own.lane.queued += 1;
                own.lane.clock.join(&event.clock);
                own.tips.extend(&event.tips);
                Ok(())
            }
            _ => {
                if let Some(own) = own {
                    self.captures.strike(own);
                    self.violate(Rule::CallDuringCapture, (Some(stream), None), (Addr::NULL, 0));
                }
                Err(CROSSED)
            }
        }
    }

    /// Whether the host may ask about an event now.
    pub(crate) fn may_ask(&mut self, event: &MockEvent, info: &CallInfo) -> Result<(), Failure> {
        if let Some(id) = event.capture {
            self.captures.strike(id);
            return Err(self.refuse(Rule::CapturedEvent, info, "the event was captured"));
        }
        if self.obeys_captures && self.captures.strike_unsafe_call() {
            return Err(self.refuse(Rule::CallDuringCapture, info, "a capture forbids it"));
        }
        Ok(())
    }

    /// What an event recorded on `stream` now would mark.
    pub(crate) fn position(&self, stream: usize) -> Position {
        let capture = self.captures.of(stream);
        let own = capture.and_then(|id| self.captures.get(id)?.lanes.get(&stream));
        let (lane, tips) = match own {
            Some(own) => (&own.lane, own.tips.clone()),
            None => (&self.streams.all[stream].lane, BTreeSet::new()),
        };
        Position { items: lane.queued, clock: lane.now(stream), capture, tips }
    }
}

/// A point in the work of a stream.
pub(crate) struct Position {
    /// Items before it on its stream.
    pub(crate) items: u64,
    /// Everything that it comes after.
    pub(crate) clock: Clock,
    /// The capture it is part of.
    pub(crate) capture: Option<u64>,
    /// The nodes of that capture that it comes right after.
    pub(crate) tips: BTreeSet<u64>,
}

/// Shorthand for calls about a stream.
pub(crate) fn on_stream(call: Call, stream: &MockStream) -> CallInfo {
    CallInfo {
        call,
        device: stream.device,
        stream: Some(id_of(stream.index)),
        addr: Addr::NULL,
        bytes: 0,
    }
}

/// Shorthand for calls about a range of a device.
pub(crate) fn on_range(call: Call, device: DeviceId, addr: Addr, bytes: u64) -> CallInfo {
    CallInfo { call, device, stream: None, addr, bytes }
}
