//! Tests on a real GPU, and the same tests on the imitation of the driver.
//!
//! A plain run does both; without a GPU the first part says that it is skipped. Arguments:
//!
//! * `--require-gpu`: the real part only; without a GPU exits with 77.
//! * a word: only tests whose name contains it.
//! * `--list`: names only.

mod bandwidth;
mod modes;
mod rig;
mod seed;
mod threads;

use rig::Rig;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

/// Exit code for "there is no GPU here".
const NO_GPU: u8 = 77;

/// What became of a test that did not fail.
enum Outcome {
    Done,
    /// Could not be run here, and why.
    Skipped(&'static str),
}

type Test = (&'static str, fn(&Rig) -> Outcome);

fn tests() -> Vec<Test> {
    [seed::TESTS, modes::TESTS, threads::TESTS, bandwidth::TESTS].concat()
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |option: &str| arguments.iter().any(|argument| argument == option);
    let words: Vec<&String> = arguments.iter().filter(|word| !word.starts_with('-')).collect();
    let is_wanted = |name: &str| words.is_empty() || words.iter().any(|word| name.contains(*word));
    let tests: Vec<Test> = tests().into_iter().filter(|(name, _)| is_wanted(name)).collect();
    if has("--list") {
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let mut failed = 0;
    match Rig::on_gpu() {
        Ok(rig) => failed += run("CUDA", &tests, |test| test(&rig)),
        Err(reason) => {
            println!("skipped: no CUDA device ({reason})");
            if has("--require-gpu") {
                return ExitCode::from(NO_GPU);
            }
        }
    }
    if !has("--require-gpu") {
        failed += run("the imitation of the driver", &tests, on_imitation);
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a test on a fresh imitation, to which everything must have been given back afterwards.
fn on_imitation(test: fn(&Rig) -> Outcome) -> Outcome {
    let mut rig = Rig::on_imitation();
    let outcome = test(&rig);
    assert_eq!(rig.close(), 0, "not given back");
    outcome
}

/// Runs tests one after the other; how many failed.
fn run(place: &str, tests: &[Test], on: impl Fn(fn(&Rig) -> Outcome) -> Outcome) -> usize {
    println!("\nrunning {} tests on {place}", tests.len());
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (name, test) in tests {
        println!("begin {name}");
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| on(*test)));
        let took = start.elapsed().as_millis();
        match outcome {
            Ok(Outcome::Done) => {
                passed += 1;
                println!("test {name} ... ok ({took} ms)");
            }
            Ok(Outcome::Skipped(why)) => {
                skipped += 1;
                println!("test {name} ... skipped: {why}");
            }
            Err(_) => {
                failed += 1;
                println!("test {name} ... FAILED ({took} ms)");
            }
        }
    }
    let result = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "test result: {result}. {passed} passed; {failed} failed; {skipped} skipped; on {place}"
    );
    failed
}
