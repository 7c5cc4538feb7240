//! Tests on a real GPU, and the same tests on the imitation of the driver.
//!
//! A plain run does both; without a GPU the first part says that it is skipped. Arguments:
//!
//! * `--require-gpu`: the real part only; without a GPU exits with 77.
//! * a word: only tests whose name contains it.
//! * `--list`: names only.
//!
//! `GPU_SOAK_STEPS` is the length of the random soak on the GPU (default 20000).

mod backend;
mod child;
mod data;
mod devices;
mod graphs;
mod ipc;
mod limits;
mod pools;
mod rig;
mod runner;
mod soak;
mod streams;
mod virtual_memory;

use rig::Rig;
use runner::{Options, Scenario, Tally};
use std::process::ExitCode;

/// Every test, in the order in which they run: what the others rely on comes first.
fn scenarios() -> Vec<Scenario> {
    let groups: [&[Scenario]; 10] = [
        backend::SCENARIOS,
        streams::SCENARIOS,
        data::SCENARIOS,
        virtual_memory::SCENARIOS,
        graphs::SCENARIOS,
        pools::SCENARIOS,
        devices::SCENARIOS,
        ipc::SCENARIOS,
        limits::SCENARIOS,
        soak::SCENARIOS,
    ];
    groups.concat().into_iter().chain(child::SCENARIOS.iter().copied()).collect()
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(name) = child::requested(&arguments) {
        return child::run(name);
    }
    let options = Options::parse(&arguments);
    let scenarios = scenarios();
    if options.list {
        scenarios.iter().for_each(|scenario| println!("{}: test", scenario.name));
        return ExitCode::SUCCESS;
    }
    let gpu = on_gpu(&scenarios, &options);
    let tallies = if options.require_gpu {
        let Some(tally) = gpu else { return ExitCode::from(runner::NO_GPU) };
        vec![tally]
    } else {
        let imitation = runner::run("the imitation of the driver", &scenarios, &options, |test| {
            rig::on_imitation(test)
        });
        gpu.into_iter().chain([imitation]).collect()
    };
    let failed: usize = tallies.iter().map(|tally| tally.failed).sum();
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs everything on the GPU, if there is one.
fn on_gpu(scenarios: &[Scenario], options: &Options) -> Option<Tally> {
    match Rig::on_gpu() {
        Ok(rig) => {
            println!("{}", rig.describe());
            Some(runner::run("CUDA", scenarios, options, |test| rig.run(test)))
        }
        Err(reason) => {
            println!("skipped: no CUDA device ({reason})");
            None
        }
    }
}
