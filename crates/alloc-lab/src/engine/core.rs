//! The allocator of this workspace on the simulated device.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use alloc_core::{
    Addr, Allocation, CachingAllocator, Config, DeviceId, StreamHandle, TraceEntry, TraceSink,
};
use mock_backend::{Call, Costs, Fed, MockBackend, MockStream, SpanKind};

use super::pools::{Pools, order_of};
use super::view::view;
use super::{DriverFigures, Engine, EngineError, Recorded, SegmentView, empty, refusal};
use crate::configuration::Configuration;
use crate::error::Failure;
use crate::format::golden::{Recording, TraceRow};
use crate::replay::Plan;
use crate::workload::RecordedSegment;

/// The only device.
const DEVICE: DeviceId = DeviceId::new(0);

/// A `CachingAllocator` over a `MockBackend`.
pub struct CoreEngine {
    allocator: CachingAllocator<MockBackend>,
    backend: MockBackend,
    streams: Vec<(MockStream, StreamHandle<MockBackend>)>,
    live: Vec<Option<Allocation>>,
    pools: Pools,
    /// What the driver had been made to do before the first operation.
    before: Costs,
    feed: Arc<Mutex<AddressFeed>>,
    /// Only a watched engine keeps one, and reports to the judge.
    account: Option<Account>,
    tape: Arc<Tape>,
    /// Full flushes so far, where they end all work; `None` in replays.
    flushes: Option<i64>,
}

/// Sums over the log of driver calls, exact within operations too.
#[derive(Default)]
struct Account {
    /// Segments obtained whole that nobody has asked for yet.
    taken: Vec<RecordedSegment>,
    segments: u64,
    creates: u64,
    maps: u64,
    held: u64,
    held_peak: u64,
}

/// Receives the allocator's trace.
#[derive(Default)]
struct Tape(Mutex<Vec<TraceRow>>);

/// Addresses for the simulated driver to hand out.
struct AddressFeed {
    segments: std::vec::IntoIter<RecordedSegment>,
    /// Segments handed out and not yet released: first address → end.
    taken: BTreeMap<u64, u64>,
    /// Base of the next reservation.
    reservation: Option<Addr>,
}

impl CoreEngine {
    /// An allocator with this configuration, on a device as planned.
    ///
    /// # Errors
    /// [`Failure::Usage`] if the settings string is wrong.
    pub fn new(configuration: &Configuration, plan: &Plan) -> Result<Self, Failure> {
        Self::build(configuration.config()?, plan).map_err(Failure::Usage)
    }

    /// The allocator that should behave like the recorded one, with all that it was fed.
    ///
    /// # Errors
    /// [`Failure::Input`] if the recording's settings string is wrong.
    pub fn for_recording(path: &Path, recording: &Recording) -> Result<Self, Failure> {
        let mut config = Config::pytorch();
        let applied = config.apply(&recording.conf);
        applied.map_err(|e| Failure::input(path, format!("conf: {e}")))?;
        let plan = Plan {
            capacity: recording.device_total,
            streams: recording.streams as usize,
            feed: recording.segments().collect(),
            watch: true,
        };
        let mut engine = Self::build(config, &plan).map_err(|e| Failure::input(path, e))?;
        let sink: Arc<dyn TraceSink> = Arc::clone(&engine.tape) as _;
        engine.allocator.set_trace_sink(Some(sink));
        engine.flushes = Some(0);
        Ok(engine)
    }

    fn build(config: Config, plan: &Plan) -> Result<Self, String> {
        let feed = Arc::new(Mutex::new(AddressFeed {
            segments: plan.feed.clone().into_iter(),
            taken: BTreeMap::new(),
            reservation: None,
        }));
        let (fed, released) = (Arc::clone(&feed), Arc::clone(&feed));
        let backend = MockBackend::builder()
            .device(plan.capacity)
            .log(if plan.watch { usize::MAX } else { 0 })
            .feed(Box::new(move |kind, bytes| Some(lock(&fed).next(kind, bytes))))
            .on(Call::Release, move |info| {
                lock(&released).taken.remove(&info.addr.get());
            })
            .build();
        let allocator = CachingAllocator::with_virtual_memory(backend.clone(), config);
        let allocator = allocator.map_err(|e| e.to_string())?;
        let mut streams = Vec::with_capacity(plan.streams);
        for i in 0..plan.streams {
            let stream =
                if i == 0 { backend.default_stream(DEVICE) } else { backend.stream(DEVICE) };
            let handle = allocator.stream(&stream).map_err(|e| e.to_string())?;
            streams.push((stream, handle));
        }
        let before = backend.costs();
        let account = plan.watch.then(Account::default);
        let (live, tape) = (Vec::new(), Arc::default());
        Ok(CoreEngine {
            allocator,
            backend,
            streams,
            live,
            pools: Pools::default(),
            before,
            feed,
            account,
            tape,
            flushes: None,
        })
    }

    /// Takes what is in `slot`, for a free.
    fn take(&mut self, slot: usize) -> Result<Allocation, EngineError> {
        self.live.get_mut(slot).and_then(Option::take).ok_or_else(|| empty(slot))
    }

    /// Brings the account up to date.
    fn settle(&mut self) {
        if let Some(account) = &mut self.account {
            account.settle(&self.backend);
        }
    }

    /// In the device model of recordings a full flush waits for the whole device, whether or not
    /// any event was pending.
    fn flush_ends_all_work(&mut self) {
        let Some(before) = self.flushes else { return };
        let stats = self.allocator.stats(DEVICE);
        let now = stats.map_or(before, |stats| stats.counters.num_sync_all_streams);
        // A reset of the counters lowers it.
        if now > before {
            self.backend.sync();
        }
        self.flushes = Some(now);
    }
}

impl Engine for CoreEngine {
    fn allocate(&mut self, slot: usize, bytes: u64, stream: usize) -> Result<u64, EngineError> {
        let (stream, handle) = &self.streams[stream];
        let result = handle.allocate(bytes);
        if let (Some(_), Ok(allocation)) = (&self.account, &result) {
            self.backend.judge().allocated(allocation.addr(), allocation.bytes(), stream);
        }
        if self.flushes.is_some() {
            self.flush_ends_all_work();
        }
        self.settle();
        let allocation = result.map_err(refusal)?;
        let addr = allocation.addr().get();
        if self.live.len() <= slot {
            self.live.resize_with(slot + 1, || None);
        }
        self.live[slot] = Some(allocation);
        Ok(addr)
    }

    fn free(&mut self, slot: usize) -> Result<(), EngineError> {
        let allocation = self.take(slot)?;
        if self.account.is_some() {
            self.backend.judge().freed(allocation.addr());
        }
        let result = self.allocator.free(allocation).map_err(|refused| refusal(refused.error));
        self.settle();
        result
    }

    fn reserved(&self) -> u64 {
        self.backend.used(DEVICE)
    }

    fn stats(&mut self, keys: &[impl AsRef<str>], out: &mut Vec<Option<i64>>) {
        out.clear();
        let stats = self.allocator.stats(DEVICE).ok();
        out.extend(keys.iter().map(|key| stats.as_ref().and_then(|s| s.get(key.as_ref()))));
    }

    fn driver(&self) -> DriverFigures {
        let costs = self.backend.costs();
        let mut figures = DriverFigures {
            calls: costs.total_calls() - self.before.total_calls(),
            stall_ns: costs.stall_ns - self.before.stall_ns,
            ..DriverFigures::default()
        };
        if let Some(account) = &self.account {
            figures.segments = account.segments;
            figures.handles_created = account.creates;
            figures.pages_remapped = account.maps.saturating_sub(account.creates);
            figures.reserved_peak = account.held_peak;
        }
        figures
    }

    fn objection(&self) -> Option<String> {
        let violations = self.backend.violations();
        let first = violations.first()?;
        Some(format!("{} violations, the first: {first}", violations.len()))
    }

    fn take_segments(&mut self, out: &mut Vec<RecordedSegment>) {
        if let Some(account) = &mut self.account {
            out.append(&mut account.taken);
        }
    }

    fn segments(&mut self) -> Result<Vec<SegmentView>, EngineError> {
        let snapshot = self.allocator.snapshot(DEVICE).map_err(refusal)?;
        let mut mappings: Vec<(u64, u64)> = self
            .backend
            .leaks()
            .mappings
            .into_iter()
            .map(|(addr, bytes)| (addr.get(), bytes))
            .collect();
        mappings.sort_unstable();
        Ok(snapshot.segments.iter().map(|segment| view(segment, &mappings)).collect())
    }
}

impl Recorded for CoreEngine {
    fn record_stream(&mut self, slot: usize, stream: usize) -> Result<(), EngineError> {
        let allocation = self.live.get(slot).and_then(Option::as_ref).ok_or_else(|| empty(slot))?;
        self.allocator.record_stream(allocation, &self.streams[stream].0).map_err(refusal)
    }

    fn busy(&mut self, stream: usize) {
        self.backend.busy(&self.streams[stream].0);
    }

    fn sync(&mut self) {
        self.backend.sync();
    }

    fn empty_cache(&mut self) -> Result<(), EngineError> {
        let result = self.allocator.empty_cache().map_err(refusal);
        self.flush_ends_all_work();
        self.settle();
        result
    }

    fn set_limit(&mut self, bytes: u64) -> Result<(), EngineError> {
        self.allocator.set_memory_limit(DEVICE, Some(bytes)).map_err(refusal)
    }

    fn reset_peak(&mut self) -> Result<(), EngineError> {
        self.allocator.reset_peak_stats(DEVICE).map_err(refusal)
    }

    fn reset_accumulated(&mut self) -> Result<(), EngineError> {
        let result = self.allocator.reset_accumulated_stats(DEVICE).map_err(refusal);
        self.flush_ends_all_work();
        result
    }

    fn set_expandable(&mut self, on: bool) -> Result<(), EngineError> {
        self.allocator.set_expandable_segments(on).map_err(refusal)
    }

    fn new_pool(&mut self, n: u32, id: (u64, u64), no_split: bool) -> Result<(), EngineError> {
        self.pools.new_pool(&self.allocator, n, id, no_split)
    }

    fn delete_pool(&mut self, n: u32) -> Result<(), EngineError> {
        let result = self.pools.delete_pool(n);
        self.settle();
        result
    }

    fn enter(&mut self, n: u32) -> Result<(), EngineError> {
        self.pools.enter(n)
    }

    fn leave(&mut self) {
        self.pools.leave();
    }

    fn begin_capture(
        &mut self,
        graph: u32,
        id: (u64, u64),
        shared: Option<u32>,
        stream: usize,
    ) -> Result<(), EngineError> {
        let stream = &self.streams[stream].0;
        self.pools.begin_capture(&self.allocator, graph, id, shared, stream)
    }

    fn end_capture(&mut self, graph: u32) -> Result<(), EngineError> {
        self.pools.end_capture(graph)
    }

    fn delete_graph(&mut self, graph: u32) -> Result<(), EngineError> {
        self.pools.delete_graph(graph)
    }

    fn feed_releases(&mut self, addrs: &[u64]) -> Result<(), EngineError> {
        let snapshot = self.allocator.snapshot(DEVICE).map_err(refusal)?;
        // Nobody asked for it: it leaves no mark.
        lock(&self.tape.0).pop();
        self.allocator.set_flush_order(DEVICE, order_of(addrs, &snapshot)).map_err(refusal)
    }

    fn take_trace(&mut self, out: &mut Vec<TraceRow>) {
        out.append(&mut lock(&self.tape.0));
    }

    fn feed_reservation(&mut self, base: u64) {
        lock(&self.feed).reservation = Some(Addr::new(base));
    }
}

impl std::fmt::Debug for CoreEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CoreEngine").field("allocator", &self.allocator).finish_non_exhaustive()
    }
}

impl Account {
    fn settle(&mut self, backend: &MockBackend) {
        for entry in backend.take_log() {
            if entry.error.is_some() {
                continue;
            }
            let bytes = entry.info.bytes;
            match entry.info.call {
                Call::Acquire => {
                    self.segments += 1;
                    self.taken.push(RecordedSegment { addr: entry.info.addr.get(), bytes });
                    self.hold(bytes);
                }
                Call::Reserve => self.segments += 1,
                Call::Create => {
                    self.creates += 1;
                    self.hold(bytes);
                }
                Call::Map => self.maps += 1,
                Call::Release | Call::Destroy => self.held -= bytes,
                _ => {}
            }
        }
    }

    fn hold(&mut self, bytes: u64) {
        self.held += bytes;
        self.held_peak = self.held_peak.max(self.held);
    }
}

impl TraceSink for Tape {
    fn record(&self, entry: &TraceEntry) {
        lock(&self.0).push(TraceRow {
            action: entry.action,
            addr: entry.addr.get(),
            bytes: entry.bytes,
            stream: entry.stream.get() as u32,
        });
    }
}

impl AddressFeed {
    /// Where the simulated driver puts the next span.
    fn next(&mut self, kind: SpanKind, bytes: u64) -> Fed {
        let addr = match kind {
            SpanKind::Segment => self.next_segment(bytes),
            SpanKind::Reservation => self.reservation.take(),
        };
        addr.map_or(Fed::Choose, Fed::At)
    }

    /// Once the allocator asks for a segment of another size than was recorded, or still holds what
    /// the recorded one had given back by then, the rest of the recording means nothing.
    fn next_segment(&mut self, bytes: u64) -> Option<Addr> {
        let next = self.segments.next().filter(|next| {
            let end = next.addr + next.bytes;
            let below = self.taken.range(..end).next_back();
            next.bytes == bytes && below.is_none_or(|(_, &taken_to)| taken_to <= next.addr)
        });
        match next {
            Some(segment) => {
                self.taken.insert(segment.addr, segment.addr + bytes);
                Some(Addr::new(segment.addr))
            }
            None => {
                self.segments = Vec::new().into_iter();
                None
            }
        }
    }
}

/// A panic while the lock is held leaves nothing half done here.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
