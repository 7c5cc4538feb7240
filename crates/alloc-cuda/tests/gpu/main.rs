//! Tests on a real GPU, and the same tests on the imitation of the driver.
//!
//! See [`Suite::run`] for the arguments.
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
mod soak;
mod streams;
mod virtual_memory;

use cuda_driver::fake::{Suite, Test};
use rig::Rig;
use std::process::ExitCode;

pub(crate) type Scenario = Test<Rig>;

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
    let on_gpu = || {
        let rig = Rig::on_gpu().map_err(|reason| reason.to_string())?;
        println!("{}", rig.describe());
        Ok(rig)
    };
    let suite = Suite {
        tests: scenarios(),
        on_gpu,
        test_on_gpu: Rig::run,
        test_on_imitation: rig::on_imitation,
    };
    suite.run(&arguments)
}
