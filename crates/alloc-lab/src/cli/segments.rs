//! `alloc-lab segments`.

use std::io::Write;

use super::args::{At, SegmentsArgs};
use super::{print, write_file};
use crate::draw::segments::Map;
use crate::engine::{CoreEngine, Engine, EngineError};
use crate::error::Failure;
use crate::format::read_workload;
use crate::replay::{Plan, run_to};
use crate::workload::Workload;

/// Replays up to the moment asked for and draws what is where.
pub(super) fn run(args: &SegmentsArgs, out: &mut dyn Write) -> Result<bool, Failure> {
    let workload = read_workload(&args.file)?;
    let ops = operations(args.at, &workload)?;
    let configuration = args.setting.one();
    let (label, capacity) = (configuration.label(), args.device.capacity());
    let feed = !args.device.no_feed && configuration.takes_recorded_segments()?;
    let feed = if feed { workload.segments.clone() } else { Vec::new() };
    let plan = Plan { capacity, streams: workload.streams.len(), feed, watch: false };
    let mut engine = CoreEngine::new(&configuration, &plan)?;
    if let Err(stopped) = run_to(&mut engine, &workload, ops) {
        return Err(stopped.failure(&workload, &label, capacity));
    }
    let segments = engine.segments().map_err(|error| {
        let (EngineError::OutOfMemory(text) | EngineError::Refused(text)) = error;
        Failure::input(&args.file, format!("{label} cannot list its segments: {text}"))
    })?;
    let title = format!("{}, {label}, after {ops} operations", workload.name());
    let map = Map { title, segments, streams: workload.streams };
    match &args.svg {
        Some(path) => write_file(path, &map.to_svg())?,
        None => print(out, map.to_text().trim_end())?,
    }
    Ok(true)
}

fn operations(at: At, workload: &Workload) -> Result<usize, Failure> {
    let all = workload.ops.len();
    match at {
        At::Operation(n) if n > all => {
            let what = format!("--at {n}: {} has only {all} operations", workload.file());
            Err(Failure::Usage(what))
        }
        At::Operation(n) => Ok(n),
        At::Peak => Ok(workload.ops_to_peak()),
        At::End => Ok(all),
    }
}
