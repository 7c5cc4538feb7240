//! `alloc-lab segments`.

use std::io::Write;

use super::args::{At, SegmentsArgs};
use super::{print, write_file};
use crate::draw::segments::Map;
use crate::engine::{CoreEngine, Engine, EngineError};
use crate::error::Failure;
use crate::format::golden::Recording;
use crate::format::{is_recording, read_workload};
use crate::replay::{Plan, run_to};
use crate::verify::verify_to;

/// Replays up to the moment asked for and draws what is where.
pub(super) fn run(args: &SegmentsArgs, out: &mut dyn Write) -> Result<bool, Failure> {
    let map = if is_recording(&args.file)? { of_recording(args)? } else { of_trace(args)? };
    match &args.svg {
        Some(path) => write_file(path, &map.to_svg())?,
        None => print(out, map.to_text().trim_end())?,
    }
    Ok(true)
}

fn of_trace(args: &SegmentsArgs) -> Result<Map, Failure> {
    let workload = read_workload(&args.file)?;
    let ops = operations(args, workload.ops.len(), || workload.ops_to_peak())?;
    let configuration = args.setting.one();
    let (label, capacity) = (configuration.label(), args.device.capacity());
    let feed = !args.device.no_feed && configuration.takes_recorded_segments()?;
    let feed = if feed { workload.segments.clone() } else { Vec::new() };
    let plan = Plan { capacity, streams: workload.streams.len(), feed, watch: false };
    let mut engine = CoreEngine::new(&configuration, &plan)?;
    if let Err(stopped) = run_to(&mut engine, &workload, ops) {
        return Err(stopped.failure(&workload, &label, capacity));
    }
    let title = format!("{}, {label}, after {ops} operations", workload.name());
    map(args, engine, title, workload.streams)
}

/// A recording says itself which allocator it is of, and on which device.
fn of_recording(args: &SegmentsArgs) -> Result<Map, Failure> {
    if args.setting.is_given() || args.device.is_described() {
        return Err(Failure::Usage(format!(
            "{} is a recording of PyTorch, which is replayed with its own settings on its own device: \
             leave --policy, --conf, --capacity and --no-feed out",
            args.file.display()
        )));
    }
    let recording = Recording::open(&args.file)?;
    let ops = operations(args, recording.ops.len(), || recording.ops_to_peak())?;
    let mut engine = CoreEngine::for_recording(&args.file, &recording)?;
    let comparison = verify_to(&mut engine, &recording, ops, || {});
    if let Some(first) = comparison.first {
        let what = format!("the picture would not be what was recorded: {first}");
        return Err(Failure::input(&args.file, what));
    }
    let conf = match recording.conf.as_str() {
        "" => String::new(),
        conf => format!(" {conf}"),
    };
    let title = format!("{}, pytorch{conf}, after {ops} operations", recording.name);
    map(args, engine, title, (0..recording.streams).collect())
}

fn map(
    args: &SegmentsArgs,
    mut engine: CoreEngine,
    title: String,
    streams: Vec<u32>,
) -> Result<Map, Failure> {
    let segments = engine.segments().map_err(|error| {
        let (EngineError::OutOfMemory(text) | EngineError::Refused(text)) = error;
        Failure::input(&args.file, format!("the segments cannot be listed: {text}"))
    })?;
    Ok(Map { title, segments, streams })
}

fn operations(
    args: &SegmentsArgs,
    all: usize,
    to_peak: impl Fn() -> usize,
) -> Result<usize, Failure> {
    match args.at {
        At::Operation(n) if n > all => {
            let file = args.file.display();
            Err(Failure::Usage(format!("--at {n}: {file} has only {all} operations")))
        }
        At::Operation(n) => Ok(n),
        At::Peak => Ok(to_peak()),
        At::End => Ok(all),
    }
}
