//! `alloc-lab fit`.

use std::io::Write;

use alloc_core::Bytes;

use super::args::FitArgs;
use super::print;
use crate::engine::CoreEngine;
use crate::error::Failure;
use crate::fit::fit;
use crate::format::read_workload;
use crate::progress::Progress;
use crate::report::{FitRow, fit_table, json};

/// Runs that a search takes at most, for the bar: 2^15 steps of 2 MiB are 64 GiB.
const USUAL_RUNS: u64 = 16;

/// Searches the smallest device for every file.
pub(super) fn run(args: &FitArgs, out: &mut dyn Write) -> Result<bool, Failure> {
    let configuration = args.setting.one();
    let mut rows = Vec::new();
    let mut workloads = Vec::new();
    for path in &args.files {
        workloads.extend(args.varying.of(read_workload(path)?)?);
    }
    for workload in workloads {
        let progress = Progress::new(USUAL_RUNS, workload.name());
        let fit = fit(
            |plan| CoreEngine::new(&configuration, plan),
            &workload,
            &configuration.label(),
            |runs, capacity| {
                let what = format!("{} on {}", workload.name(), Bytes(capacity));
                progress.set(runs.into(), what);
            },
        )?;
        drop(progress);
        let row = FitRow::new(workload.file(), &configuration, &fit);
        if args.json {
            print(out, &json(&row))?;
        }
        rows.push(row);
    }
    if !args.json {
        print(out, &fit_table(&rows))?;
    }
    Ok(true)
}
