//! Runs tests one after another and counts.

use crate::rig::Rig;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Exit code for "there is no GPU here".
pub(crate) const NO_GPU: u8 = 77;

/// What became of a test that did not fail.
pub(crate) enum Outcome {
    Done,
    /// Could not be run here, and why.
    Skipped(&'static str),
}

pub(crate) type Test = fn(&Rig) -> Outcome;

#[derive(Clone, Copy)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) test: Test,
}

#[derive(Default)]
pub(crate) struct Options {
    pub(crate) require_gpu: bool,
    pub(crate) list: bool,
    filters: Vec<String>,
}

impl Options {
    /// Other options are cargo's for its own harness, and mean nothing here.
    pub(crate) fn parse(arguments: &[String]) -> Self {
        let has = |option: &str| arguments.iter().any(|argument| argument == option);
        let filters = arguments.iter().filter(|argument| !argument.starts_with('-'));
        Options {
            require_gpu: has("--require-gpu"),
            list: has("--list"),
            filters: filters.cloned().collect(),
        }
    }

    fn selects(&self, name: &str) -> bool {
        self.filters.is_empty() || self.filters.iter().any(|filter| name.contains(filter.as_str()))
    }
}

#[derive(Default)]
pub(crate) struct Tally {
    passed: usize,
    pub(crate) failed: usize,
    skipped: usize,
}

/// Runs the selected tests on `place` through `on`.
pub(crate) fn run(
    place: &str,
    scenarios: &[Scenario],
    options: &Options,
    on: impl Fn(Test) -> Outcome,
) -> Tally {
    let selected: Vec<_> = scenarios.iter().filter(|test| options.selects(test.name)).collect();
    println!("\nrunning {} tests on {place}", selected.len());
    let mut tally = Tally::default();
    for scenario in selected {
        if options.require_gpu {
            // On a machine that cannot be looked at, tells which test hangs.
            println!("begin {}", scenario.name);
        }
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| on(scenario.test)));
        let took = start.elapsed().as_millis();
        let verdict = match outcome {
            Ok(Outcome::Done) => {
                tally.passed += 1;
                format!("ok ({took} ms)")
            }
            Ok(Outcome::Skipped(why)) => {
                tally.skipped += 1;
                format!("skipped: {why}")
            }
            Err(_) => {
                tally.failed += 1;
                format!("FAILED ({took} ms)")
            }
        };
        println!("test {} ... {verdict}", scenario.name);
    }
    let result = if tally.failed == 0 { "ok" } else { "FAILED" };
    println!(
        "test result: {result}. {} passed; {} failed; {} skipped; on {place}",
        tally.passed, tally.failed, tally.skipped
    );
    tally
}
