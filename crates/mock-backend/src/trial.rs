//! The caching allocator on trial: operations of a [`workload`](crate::workload) are played to it
//! under the judge, to the naive [`model`](crate::model) beside it, and everything is compared after
//! each.
//!
//! ```
//! use mock_backend::trial::{Trial, TrialConf};
//! use mock_backend::workload::{Shape, Workload};
//!
//! let conf = TrialConf::pytorch("max_split_size_mb:24").capacity(256 << 20);
//! let mut trial = Trial::new(&conf);
//! for op in Workload::new(1, Shape::default()).take(200) {
//!     trial.play(&op).unwrap();
//! }
//! trial.finish().unwrap();
//! ```

mod pools;

use std::collections::VecDeque;
use std::fmt::{self, Debug};
use std::sync::Arc;

use alloc_core::backend::{BackendError, ErrorKind, Stream};
use alloc_core::stats::Gauge;
use alloc_core::{
    Addr, AllocError, BlockStatus, CachingAllocator, Config, DeviceId, DeviceStats, TraceAction,
    TraceEntry, TraceSink,
};
use parking_lot::Mutex;

use crate::model::{EventOrder, Model, ModelBlock, ModelConf, ModelStats};
use crate::workload::{Op, Picks};
use crate::{Call, Fault, Judged, MockBackend, MockError, MockStream, SpanKind, Work};
use pools::TrialPools;

/// How many operations pass between two comparisons of all blocks.
const SNAPSHOT_PERIOD: u64 = 16;

/// What a trial is about.
#[derive(Clone, PartialEq, Debug)]
pub struct TrialConf {
    config: Config,
    settings: String,
    devices: u16,
    streams_per_device: u16,
    capacity: u64,
    total: u64,
    against_model: bool,
    chance: Option<(u64, f64)>,
}

impl TrialConf {
    /// The allocator with PyTorch's rules and this settings string, against the model. One device
    /// that never runs out, three streams.
    ///
    /// # Panics
    /// If the settings are not understood by both.
    pub fn pytorch(settings: &str) -> Self {
        assert!(ModelConf::parse(settings).is_some(), "the model does not know {settings}");
        let mut config = Config::pytorch();
        config.event_order = alloc_core::config::EventOrder::Ascending;
        TrialConf::new(config, settings, true)
    }

    /// The allocator with its own rules and this settings string. There is no model of those: the
    /// judge and the allocator's own check decide alone.
    ///
    /// # Panics
    /// If the settings are not understood.
    pub fn ours(settings: &str) -> Self {
        TrialConf::new(Config::ours(), settings, false)
    }

    fn new(mut config: Config, settings: &str, against_model: bool) -> Self {
        if let Err(error) = config.apply(settings) {
            panic!("{error}");
        }
        TrialConf {
            config,
            settings: settings.to_owned(),
            devices: 1,
            streams_per_device: 3,
            capacity: u64::MAX,
            total: 4 << 30,
            against_model,
            chance: None,
        }
    }

    /// Number of devices, and of streams on each.
    pub fn devices(mut self, devices: u16, streams_per_device: u16) -> Self {
        (self.devices, self.streams_per_device) = (devices, streams_per_device);
        self
    }

    /// What can be had of each device, in bytes.
    pub fn capacity(mut self, bytes: u64) -> Self {
        self.capacity = bytes;
        self
    }

    /// Runs without the model, so that failures can be injected.
    pub fn without_model(mut self) -> Self {
        self.against_model = false;
        self
    }

    /// Lets work end by chance, as [`Builder::ends_by_chance`](crate::Builder::ends_by_chance). The
    /// model could not follow, so there is none.
    pub fn ends_by_chance(mut self, seed: u64, p: f64) -> Self {
        self.chance = Some((seed, p));
        self.without_model()
    }
}

/// What went wrong, and when.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// How many operations had been played before.
    pub operation: u64,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "operation {}: {}", self.operation, self.what)
    }
}

impl std::error::Error for Failure {}

#[derive(Default)]
struct Sink(Mutex<Vec<TraceEntry>>);

impl TraceSink for Sink {
    fn record(&self, entry: &TraceEntry) {
        self.0.lock().push(*entry);
    }
}

/// The model and what it is fed.
struct Reference {
    model: Model,
    /// Addresses that the simulated driver gave to the allocator and the model has not asked for.
    addresses: Arc<Mutex<VecDeque<(SpanKind, u64, Addr)>>>,
}

/// An allocator on trial; see the [module](self).
pub struct Trial {
    judged: Judged<CachingAllocator<MockBackend>>,
    streams: Vec<MockStream>,
    live: Picks<Addr>,
    pools: TrialPools,
    sink: Arc<Sink>,
    reference: Option<Reference>,
    operation: u64,
}

type Outcome = Result<(), String>;

impl Trial {
    /// Sets machine, allocator and model up.
    ///
    /// # Panics
    /// If the allocator cannot be made.
    pub fn new(conf: &TrialConf) -> Self {
        let mut builder = MockBackend::builder().log(1 << 16);
        for _ in 0..conf.devices {
            builder = builder.device_with(conf.capacity, conf.total);
        }
        if let Some((seed, p)) = conf.chance {
            builder = builder.ends_by_chance(seed, p);
        }
        let backend = builder.build();
        let allocator = CachingAllocator::with_virtual_memory(backend.clone(), conf.config.clone());
        let allocator = allocator.unwrap_or_else(|error| panic!("no allocator: {error}"));
        let sink = Arc::new(Sink::default());
        allocator.set_trace_sink(Some(sink.clone()));
        let devices = || (0..conf.devices).map(DeviceId::new);
        let mut streams: Vec<_> = devices().map(|device| backend.default_stream(device)).collect();
        for _ in 1..conf.streams_per_device {
            streams.extend(devices().map(|device| backend.stream(device)));
        }
        Trial {
            reference: conf.against_model.then(|| Reference::new(conf, &streams)),
            judged: Judged::new(backend, allocator),
            streams,
            live: Picks::default(),
            pools: TrialPools::default(),
            sink,
            operation: 0,
        }
    }

    /// The simulated machine.
    pub fn backend(&self) -> &MockBackend {
        &self.judged.backend
    }

    /// The allocator on trial.
    pub fn allocator(&self) -> &CachingAllocator<MockBackend> {
        &self.judged.subject
    }

    /// Number of allocations that are live.
    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// Plays one operation and compares.
    ///
    /// # Errors
    /// The first difference from the model, broken invariant or broken rule.
    pub fn play(&mut self, op: &Op) -> Result<(), Failure> {
        let result = self.act(op).and_then(|()| self.compare());
        let operation = self.operation;
        self.operation += 1;
        result.map_err(|what| Failure { operation, what: format!("{what} ({op:?})") })
    }

    /// Ends it: lets all work finish, frees everything, empties the cache, drops the allocator, and
    /// looks whether anything is left. Failures are no longer injected.
    ///
    /// # Errors
    /// As [`play`](Trial::play); leaks.
    pub fn finish(mut self) -> Result<(), Failure> {
        self.backend().set_faults([] as [Fault; 0]);
        while let Some(end) = self.pools.next_end() {
            self.play(&end)?;
        }
        for op in [Op::Sync, Op::FreeAll, Op::EmptyCache] {
            self.play(&op)?;
        }
        let Trial { judged: Judged { backend, subject }, operation, .. } = self;
        for device in 0..backend.shared.device_count {
            let stats = subject.stats(DeviceId::new(device));
            let key = "reserved_bytes.all.current";
            let reserved = stats.ok().and_then(|stats| stats.get(key));
            if reserved != Some(0) {
                let what = format!("{reserved:?} bytes reserved in the end");
                return Err(Failure { operation, what });
            }
        }
        drop(subject);
        let leaks = backend.leaks();
        let violations = backend.violations();
        if leaks.is_empty() && violations.is_empty() {
            return Ok(());
        }
        Err(Failure { operation, what: format!("left behind: {leaks:?}, {violations:?}") })
    }

    fn act(&mut self, op: &Op) -> Outcome {
        match *op {
            Op::Allocate { bytes, stream } => self.allocate(bytes, stream),
            Op::Free { pick } => match self.live.take(pick) {
                Some(addr) => self.free(addr),
                None => Ok(()),
            },
            Op::FreeAll => self.live.take_all().into_iter().try_for_each(|addr| self.free(addr)),
            Op::Use { pick, stream } => self.use_on(pick, stream, true),
            Op::Record { pick, stream } => self.use_on(pick, stream, false),
            Op::Busy { stream } => {
                let stream = self.stream(stream);
                self.judged.backend.launch(&stream, Work::new());
                self.model(|model| model.busy(stream.id()));
                Ok(())
            }
            Op::Pass { stream } => {
                let stream = self.stream(stream);
                self.judged.backend.pass(&stream);
                self.model(|model| model.pass(stream.id()));
                Ok(())
            }
            Op::Sync => {
                self.judged.backend.sync();
                self.model(Model::sync);
                Ok(())
            }
            Op::EmptyCache => {
                let result = self.judged.subject.empty_cache();
                self.unless_injected(result)?;
                self.feed();
                self.model(Model::empty_cache);
                Ok(())
            }
            Op::ResetPeak => self.each_device(
                |allocator, device| allocator.reset_peak_stats(device),
                Model::reset_peak,
            ),
            Op::ResetAccumulated => self.each_device(
                |allocator, device| allocator.reset_accumulated_stats(device),
                Model::reset_accumulated,
            ),
            Op::SetLimit { bytes } => self.each_device(
                |allocator, device| allocator.set_memory_limit(device, bytes),
                |model, device| model.set_limit(device, bytes),
            ),
            Op::Expandable { on } => {
                let result = self.judged.subject.set_expandable_segments(on);
                self.model(|model| model.set_expandable(on));
                result.map_err(|error| error.to_string())
            }
            Op::NewPool { .. }
            | Op::DropPool { .. }
            | Op::EmptyPool { .. }
            | Op::Enter { .. }
            | Op::Leave { .. }
            | Op::Checkpoint { .. }
            | Op::Restore { .. }
            | Op::Forget { .. } => self.act_on_pools(op),
        }
    }

    fn stream(&self, index: usize) -> MockStream {
        self.streams[index % self.streams.len()]
    }

    fn model(&mut self, act: impl FnOnce(&mut Model)) {
        if let Some(reference) = &mut self.reference {
            act(&mut reference.model);
        }
    }

    fn each_device(
        &mut self,
        on_allocator: impl Fn(
            &CachingAllocator<MockBackend>,
            DeviceId,
        ) -> Result<(), AllocError<MockError>>,
        on_model: impl Fn(&mut Model, DeviceId),
    ) -> Outcome {
        for device in (0..self.judged.backend.shared.device_count).map(DeviceId::new) {
            on_allocator(&self.judged.subject, device).map_err(|error| error.to_string())?;
            self.model(|model| on_model(model, device));
        }
        Ok(())
    }

    fn allocate(&mut self, bytes: u64, stream: usize) -> Outcome {
        let stream = self.stream(stream);
        let result = self.judged.allocate(bytes, &stream);
        self.feed();
        let addr = match result {
            Ok(addr) => Some(addr),
            Err(error) if error.is_out_of_memory() => None,
            Err(error) => return self.unless_injected(Err(error)),
        };
        if let Some(addr) = addr.filter(|addr| !addr.is_null()) {
            self.live.push(addr);
        }
        let Some(Reference { model, .. }) = &mut self.reference else {
            return Ok(());
        };
        same("address", &addr, &model.allocate(bytes, stream.id()))
    }

    fn free(&mut self, addr: Addr) -> Outcome {
        match self.judged.free(addr) {
            Ok(()) => {
                self.model(|model| model.free(addr));
                Ok(())
            }
            Err(error) => {
                self.live.push(addr);
                self.unless_injected(Err(error))
            }
        }
    }

    fn use_on(&mut self, pick: u32, stream: usize, work: bool) -> Outcome {
        let Some(&addr) = self.live.get(pick) else {
            return Ok(());
        };
        let stream = self.stream(stream);
        // Another device's pages need not be accessible: then the use is recorded, nothing more.
        let work = work && self.backend().judge().is_accessible(addr, stream.device());
        let result = match work {
            true => self.judged.use_on(addr, &stream),
            false => self.judged.record_stream(addr, &stream),
        };
        self.unless_injected(result)?;
        self.model(|model| {
            model.record_stream(addr, stream.id());
            if work {
                model.busy(stream.id());
            }
        });
        Ok(())
    }

    /// An error is right only if a failure was injected.
    fn unless_injected(&self, result: Result<(), AllocError<MockError>>) -> Outcome {
        match result {
            Err(AllocError::Backend { source, .. })
                if source.is_injected() || source.kind() == ErrorKind::DeviceLost =>
            {
                Ok(())
            }
            Err(error) => Err(error.to_string()),
            Ok(()) => Ok(()),
        }
    }

    /// Hands the addresses of the latest driver calls to the model.
    fn feed(&mut self) {
        let log = self.judged.backend.take_log();
        let Some(Reference { addresses, .. }) = &self.reference else {
            return;
        };
        let mut addresses = addresses.lock();
        for entry in log.iter().filter(|entry| entry.error.is_none()) {
            let kind = match entry.info.call {
                Call::Acquire => SpanKind::Segment,
                Call::Reserve => SpanKind::Reservation,
                _ => continue,
            };
            addresses.push_back((kind, entry.info.bytes, entry.info.addr));
        }
    }

    fn compare(&mut self) -> Outcome {
        self.judged.subject.check().map_err(|violation| violation.to_string())?;
        if let Some(violation) = self.judged.backend.violations().first() {
            return Err(violation.to_string());
        }
        let trace = std::mem::take(&mut *self.sink.0.lock());
        let Some(reference) = &mut self.reference else {
            return Ok(());
        };
        let with_blocks = self.operation.is_multiple_of(SNAPSHOT_PERIOD);
        let result = reference.compare(&self.judged.subject, &trace, with_blocks);
        if with_blocks {
            self.sink.0.lock().clear();
        }
        result
    }
}

impl Debug for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trial")
            .field("operation", &self.operation)
            .field("live", &self.live.len())
            .finish_non_exhaustive()
    }
}

fn same<T: PartialEq + Debug>(what: &str, allocator: &T, model: &T) -> Outcome {
    if allocator == model {
        return Ok(());
    }
    Err(format!("{what}: the allocator has {allocator:?}, the model {model:?}"))
}

impl Reference {
    fn new(conf: &TrialConf, streams: &[MockStream]) -> Self {
        let addresses = Arc::new(Mutex::new(VecDeque::new()));
        let source = Arc::clone(&addresses);
        // A wrong size or a missing address shows as an address of its own in the comparison.
        let next = move |kind, bytes| match source.lock().pop_front() {
            Some((fed, size, addr)) if fed == kind && size == bytes => addr,
            _ => Addr::new(u64::MAX << 40),
        };
        let mut model_conf = ModelConf::parse(&conf.settings).unwrap_or_default();
        model_conf.event_order = EventOrder::Ascending;
        let mut model = Model::new(model_conf, Box::new(next));
        for _ in 0..conf.devices {
            model.add_device(conf.capacity, conf.total);
        }
        for stream in streams {
            model.add_stream(stream.id(), stream.device());
        }
        Reference { model, addresses }
    }

    fn compare(
        &mut self,
        allocator: &CachingAllocator<MockBackend>,
        trace: &[TraceEntry],
        with_blocks: bool,
    ) -> Outcome {
        let left = self.addresses.lock().pop_front();
        same("driver addresses the model did not ask for", &left, &None)?;
        let expected = self.model.take_trace();
        let trace = trace.iter().map(|entry| {
            let addr = if entry.action == TraceAction::Oom { Addr::NULL } else { entry.addr };
            (entry.action.name(), entry.device, addr, entry.bytes, entry.stream)
        });
        let expected = expected.iter().map(|entry| {
            (entry.action.name(), entry.device, entry.addr, entry.bytes, entry.stream)
        });
        same("trace", &trace.collect::<Vec<_>>(), &expected.collect())?;
        for device in (0..allocator.backend().shared.device_count).map(DeviceId::new) {
            let stats = allocator.stats(device).map_err(|error| error.to_string())?;
            let expected = self.model.stats(device);
            if numbers_of(&stats) != expected.numbers() {
                let keys = ModelStats::keys();
                let mut pairs = keys.iter().map(|key| (key, stats.get(key), expected.get(key)));
                pairs.try_for_each(|(key, ours, model)| same(key, &ours, &model))?;
            }
            let pools = allocator.pools(device).map_err(|error| error.to_string())?;
            let pools = pools.iter().map(|pool| (pool.id, pool.references)).collect();
            same("pools", &pools, &self.model.pools(device))?;
            for key in COUNTERS {
                same(key, &stats.get(key), &expected.get(key))?;
            }
            if with_blocks {
                same("blocks", &blocks_of(allocator, device)?, &self.model.blocks(device))?;
            }
        }
        Ok(())
    }
}

const COUNTERS: [&str; 6] = [
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
];

/// The values of [`ModelStats::numbers`], in its order, without going through names: this runs after
/// every operation.
fn numbers_of(stats: &DeviceStats) -> Vec<i64> {
    const GAUGES: [Gauge; 9] = [
        Gauge::Allocation,
        Gauge::Segment,
        Gauge::Active,
        Gauge::InactiveSplit,
        Gauge::AllocatedBytes,
        Gauge::ReservedBytes,
        Gauge::ActiveBytes,
        Gauge::InactiveSplitBytes,
        Gauge::RequestedBytes,
    ];
    let gauges = GAUGES.into_iter().map(|gauge| stats.gauge(gauge));
    let singles = [stats.oversize_allocations(), stats.oversize_segments()].map(|stat| *stat);
    let all = gauges.flat_map(|by_class| [by_class.all, by_class.small, by_class.large]);
    all.chain(singles).flat_map(|s| [s.current, s.peak, s.allocated, s.freed]).collect()
}

fn blocks_of(
    allocator: &CachingAllocator<MockBackend>,
    device: DeviceId,
) -> Result<Vec<ModelBlock>, String> {
    let snapshot = allocator.snapshot(device).map_err(|error| error.to_string())?;
    let segments = snapshot.segments.iter();
    let blocks = segments.flat_map(|segment| segment.blocks.iter().map(move |b| (segment, b)));
    Ok(blocks
        .map(|(segment, block)| ModelBlock {
            addr: block.addr,
            bytes: block.bytes,
            requested: block.requested,
            stream: segment.stream,
            pool: segment.pool,
            live: block.status == BlockStatus::Allocated,
            pending: block.status == BlockStatus::PendingFree,
        })
        .collect())
}
