//! `alloc-lab bench`.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use super::args::{BenchArgs, BenchMode, ChurnArgs};
use super::print;
use crate::bench::{Churn, Measurement, Program, Subject, overview};
use crate::configuration::Configuration;
use crate::error::Failure;
use crate::format::read_workload;
use crate::progress::Progress;
use crate::report::{bench_table, json};

/// Makes all measurements.
pub(super) fn run(args: &BenchArgs, out: &mut dyn Write) -> Result<bool, Failure> {
    let subject = Subject {
        configuration: Configuration::new(args.policy, args.conf.clone()),
        api: args.api,
        backend: args.backend,
    };
    let measurements = measurements(&args.mode)?;
    let progress = Progress::new(measurements.len() as u64, "measuring");
    let mut medians = Vec::new();
    for (i, measurement) in measurements.iter().enumerate() {
        let mut rows = subject.rounds(measurement, args.rounds)?;
        if args.json {
            for row in &rows {
                print(out, &json(row))?;
            }
        }
        medians.push(rows.swap_remove(rows.len() / 2));
        progress.set(i as u64 + 1, "measuring");
    }
    drop(progress);
    if !args.json {
        print(out, &bench_table(&subject, &medians))?;
    }
    Ok(true)
}

fn measurements(mode: &BenchMode) -> Result<Vec<Measurement>, Failure> {
    let one = match *mode {
        BenchMode::Pingpong { bytes, pairs } => Measurement::Pingpong { bytes, pairs },
        BenchMode::Churn { churn, seed } => Measurement::Churn(churn.with_seed(seed)),
        BenchMode::Threads { threads, churn } => Measurement::Threads(threads, churn.with_seed(0)),
        BenchMode::Shared { threads, churn } => Measurement::Shared(threads, churn.with_seed(0)),
        BenchMode::Live { blocks, steps } => Measurement::Live { blocks, steps },
        BenchMode::Replay { ref file } => Measurement::Replay(program(file)?),
        BenchMode::Whole { ref file } => Measurement::Whole(program(file)?),
        BenchMode::All { ref files } => {
            let mut all = overview();
            for file in files {
                let program = program(file)?;
                all.push(Measurement::Replay(Arc::clone(&program)));
                all.push(Measurement::Whole(program));
            }
            return Ok(all);
        }
    };
    Ok(vec![one])
}

fn program(file: &Path) -> Result<Arc<Program>, Failure> {
    let program = Program::new(&read_workload(file)?);
    if program.is_empty() {
        return Err(Failure::input(file, "has no operations to measure"));
    }
    Ok(Arc::new(program))
}

impl ChurnArgs {
    fn with_seed(self, seed: u64) -> Churn {
        let ChurnArgs { slots, steps, max_log } = self;
        Churn { slots, steps, max_log, seed }
    }
}
