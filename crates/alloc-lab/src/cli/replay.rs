//! `alloc-lab replay`.

use std::io::Write;

use alloc_core::backend::MemoryInfo;
use alloc_cuda::{CudaBackend, CudaError};

use super::args::ReplayArgs;
use super::{complain, print, write_file};
use crate::configuration::Configuration;
use crate::draw::timeline::{self, Panel, Sampler, Series, TimeAxis};
use crate::engine::{CoreEngine, DeviceEngine, Engine, EngineError, Metered};
use crate::error::Failure;
use crate::format::read_workload;
use crate::machine::{self, BackendName, DEVICE};
use crate::progress::Progress;
use crate::replay::{Options, Outcome, Plan, Prediction, Repeated, replay};
use crate::report::{ReplayRow, json, replay_table};
use crate::workload::Workload;

/// Replays every file with every configuration; whether all of them completed.
pub(super) fn run(args: &ReplayArgs, out: &mut dyn Write) -> Result<bool, Failure> {
    let machine = Machine::new(args)?;
    let configurations = args.setting.all();
    let mut panels = Vec::new();
    let mut completed = true;
    let mut workloads = Vec::new();
    for path in &args.files {
        workloads.extend(args.varying.of(read_workload(path)?)?);
    }
    for workload in workloads {
        let mut rows = Vec::new();
        let mut panel = new_panel(&workload);
        for configuration in &configurations {
            let outcome = machine.replay(&workload, configuration, &mut panel)?;
            let capacity = machine.capacity;
            if args.json {
                let row =
                    ReplayRow::new(&workload, configuration, args.backend, capacity, &outcome);
                print(out, &json(&row))?;
            }
            if let Some(stopped) = &outcome.stopped {
                complain(&stopped.failure(&workload, &configuration.label(), capacity));
                completed = false;
            }
            rows.push((configuration.clone(), outcome));
        }
        if !args.json {
            print(out, &replay_table(&workload, &rows))?;
        }
        panels.push(panel);
    }
    if let Some(path) = &args.timeline {
        write_file(path, &timeline::render(&panels))?;
    }
    Ok(completed)
}

/// What to replay on.
struct Machine {
    /// `None`: a simulated device.
    cuda: Option<CudaBackend>,
    capacity: u64,
    feed: bool,
}

impl Machine {
    fn new(args: &ReplayArgs) -> Result<Self, Failure> {
        match args.backend {
            BackendName::Mock => {
                let (capacity, feed) = (args.device.capacity(), !args.device.no_feed);
                Ok(Machine { cuda: None, capacity, feed })
            }
            BackendName::Cuda if args.device.is_described() => Err(Failure::Usage(
                "--capacity and --no-feed describe a simulated device; to limit a real one, use \
                 --conf per_process_memory_fraction:0.5"
                    .to_owned(),
            )),
            BackendName::Cuda => {
                let backend = machine::cuda()?;
                let capacity = backend.memory(DEVICE).map_err(driver)?.total;
                Ok(Machine { cuda: Some(backend), capacity, feed: true })
            }
        }
    }

    /// Replays `workload` with one configuration and adds its line to the panel.
    fn replay(
        &self,
        workload: &Workload,
        configuration: &Configuration,
        panel: &mut Panel,
    ) -> Result<Outcome, Failure> {
        let takes_recorded = configuration.takes_recorded_segments()?;
        let (capacity, feed) = (self.capacity, self.feed && takes_recorded);
        let options = Options { capacity, feed, timing: true };
        let simulated = |plan: &Plan| CoreEngine::new(configuration, plan);
        let Some(backend) = &self.cuda else {
            return watched(simulated, workload, configuration, options, panel);
        };
        let options = Options { feed: false, ..options };
        let real = |_: &Plan| on_gpu(backend, configuration, workload.streams.len());
        let mut outcome = watched(real, workload, configuration, options, panel)?;
        if outcome.stopped.is_none() {
            let quick = Options { timing: false, ..options };
            let alone = replay(simulated, workload, quick, |_| {})?;
            let mut prediction =
                Prediction { peak: alone.driver.reserved_peak, at_addresses: None };
            if takes_recorded {
                let taken = Workload { segments: outcome.taken.clone(), ..workload.clone() };
                let fed = Options { feed: true, ..quick };
                let again = replay(simulated, &taken, fed, |_| {})?;
                let peak = again.driver.reserved_peak;
                prediction.at_addresses = Some(Repeated { peak, feed: again.feed });
            }
            outcome.prediction = Some(prediction);
        }
        Ok(outcome)
    }
}

/// An engine on the first GPU, on new streams.
fn on_gpu(
    backend: &CudaBackend,
    configuration: &Configuration,
    streams: usize,
) -> Result<DeviceEngine<CudaBackend>, Failure> {
    let virtual_memory = backend.has_virtual_memory(DEVICE).map_err(driver)?;
    let metered = Metered::new(backend.clone());
    let allocator = machine::allocator(metered, configuration.config()?, virtual_memory)?;
    let streams = (0..streams).map(|_| backend.create_stream(DEVICE));
    let streams = streams.collect::<Result<Vec<_>, _>>().map_err(driver)?;
    DeviceEngine::new(allocator, DEVICE, &streams).map_err(|error| {
        let (EngineError::OutOfMemory(text) | EngineError::Refused(text)) = error;
        Failure::Refused(text)
    })
}

fn driver(error: CudaError) -> Failure {
    Failure::Refused(error.to_string())
}

/// Replays and shows how far it is.
fn watched<E: Engine>(
    make: impl FnMut(&Plan) -> Result<E, Failure>,
    workload: &Workload,
    configuration: &Configuration,
    options: Options,
    panel: &mut Panel,
) -> Result<Outcome, Failure> {
    let label = configuration.label();
    let what = format!("{} {label}", workload.name());
    let mut progress = Progress::new(workload.ops.len() as u64, what);
    let mut requested = Sampler::new(panel.axis.max());
    let mut reserved = Sampler::new(panel.axis.max());
    let axis = panel.axis;
    let outcome = replay(make, workload, options, |moment| {
        let x = match axis {
            TimeAxis::Time(_) => moment.time_us,
            TimeAxis::Operations(_) => moment.ops as u64,
        };
        requested.push(x, moment.requested);
        reserved.push(x, moment.reserved);
        progress.tick();
    })?;
    // What is asked for is the same for all, but a replay that stopped early saw less of it.
    if requested.peak() > panel.requested.peak() {
        panel.requested = requested;
    }
    panel.reserved.push(Series { label, samples: reserved });
    Ok(outcome)
}

fn new_panel(workload: &Workload) -> Panel {
    let axis = match workload.wall_us {
        0 => TimeAxis::Operations(workload.ops.len() as u64),
        wall => TimeAxis::Time(wall),
    };
    let requested = Sampler::new(axis.max());
    Panel { title: workload.name(), axis, requested, reserved: Vec::new() }
}
