//! Tests on a real GPU, and the same tests on the imitation of the driver.
//!
//! See [`Suite::run`] for the arguments.

mod bandwidth;
mod modes;
mod rig;
mod seed;
mod threads;

use cuda_driver::fake::{Outcome, Suite, TestBody};
use rig::Rig;
use std::process::ExitCode;

type Test = cuda_driver::fake::Test<Rig>;

fn tests() -> Vec<Test> {
    [seed::TESTS, modes::TESTS, threads::TESTS, bandwidth::TESTS].concat()
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
    let mut rig = Rig::on_imitation();
    let outcome = test(&rig);
    assert_eq!(rig.close(), 0, "not given back");
    outcome
}
