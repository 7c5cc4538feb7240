//! `alloc-lab replay`.

use std::io::Write;

use super::args::ReplayArgs;
use super::{complain, print, write_file};
use crate::configuration::Configuration;
use crate::draw::timeline::{self, Panel, Sampler, Series, TimeAxis};
use crate::engine::CoreEngine;
use crate::error::Failure;
use crate::format::read_workload;
use crate::progress::Progress;
use crate::replay::{Options, Outcome, replay};
use crate::report::{ReplayRow, json, replay_table};
use crate::workload::Workload;

/// Replays every file with every configuration; whether all of them completed.
pub(super) fn run(args: &ReplayArgs, out: &mut dyn Write) -> Result<bool, Failure> {
    let configurations = args.setting.all();
    let mut panels = Vec::new();
    let mut completed = true;
    for path in &args.files {
        let workload = read_workload(path)?;
        let mut rows = Vec::new();
        let mut panel = new_panel(&workload);
        for configuration in &configurations {
            let outcome = one(args, &workload, configuration, &mut panel)?;
            let capacity = args.device.capacity;
            if args.json {
                let row = ReplayRow::new(&workload, configuration, capacity, &outcome);
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

/// Replays `workload` with one configuration and adds its line to the panel.
fn one(
    args: &ReplayArgs,
    workload: &Workload,
    configuration: &Configuration,
    panel: &mut Panel,
) -> Result<Outcome, Failure> {
    let label = configuration.label();
    let what = format!("{} {label}", workload.name());
    let mut progress = Progress::new(workload.ops.len() as u64, what);
    let options = Options {
        capacity: args.device.capacity,
        feed: !args.device.no_feed && configuration.takes_recorded_segments()?,
        timing: true,
    };
    let mut requested = Sampler::new(panel.axis.max());
    let mut reserved = Sampler::new(panel.axis.max());
    let axis = panel.axis;
    let outcome = replay(
        |plan| CoreEngine::new(configuration, plan),
        workload,
        options,
        |moment| {
            let x = match axis {
                TimeAxis::Time(_) => moment.time_us,
                TimeAxis::Operations(_) => moment.ops as u64,
            };
            requested.push(x, moment.requested);
            reserved.push(x, moment.reserved);
            progress.tick();
        },
    )?;
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
