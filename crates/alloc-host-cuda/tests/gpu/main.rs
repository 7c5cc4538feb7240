//! Tests on a real GPU, and the same tests on the imitation of the driver.
//!
//! See [`Suite::run`] for the arguments.

mod buffers;
mod faults;
mod graphs;
mod rig;
mod threads;

use cuda_driver::fake::{Outcome, Suite, TestBody};
use rig::Rig;
use std::process::ExitCode;

type Test = cuda_driver::fake::Test<Rig>;

fn tests() -> Vec<Test> {
    [buffers::TESTS, graphs::TESTS, threads::TESTS, faults::TESTS].concat()
}

fn main() -> ExitCode {
    let suite = Suite {
        tests: tests(),
        on_gpu: Rig::on_gpu,
        test_on_gpu: |rig, test| test(rig),
        test_on_imitation: on_imitation,
    };
    suite.run(&std::env::args().skip(1).collect::<Vec<_>>())
}

/// Runs a test on a fresh imitation, to which everything must have been given back afterwards.
fn on_imitation(test: TestBody<Rig>) -> Outcome {
    let rig = Rig::on_imitation();
    let outcome = test(&rig);
    let imitation = rig.imitation().expect("it is one");
    assert!(imitation.is_shut_down() || imitation.outstanding() == 0, "not given back");
    outcome
}
