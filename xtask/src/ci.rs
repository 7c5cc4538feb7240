//! `cargo xtask ci`: the one entry for all checks.

use crate::workspace::Workspace;
use crate::{clippy, docs, fmt, loom, package, shuttle, test, tidy};
use anyhow::{Result, bail};
use clap::builder::PossibleValuesParser;
use std::time::{Duration, Instant};

/// Run every check that a change must pass.
///
/// The checks run in the order of `--list`, cheap ones first. All of them run even if one fails,
/// unless `--fail-fast` is given; a table at the end says how each went. Each is a verb of its own,
/// too.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Say what would run, and run nothing
    #[arg(long)]
    list: bool,

    /// Stop at the first check that fails
    #[arg(long)]
    fail_fast: bool,

    /// Leave a check out; may be repeated
    #[arg(long, value_name = "CHECK", value_parser = PossibleValuesParser::new(STEPS.map(|step| step.name)))]
    skip: Vec<String>,
}

/// One check.
#[derive(Clone, Copy)]
struct Step {
    name: &'static str,
    about: &'static str,
    run: fn(&Workspace) -> Result<()>,
}

/// All checks, in order.
const STEPS: [Step; 8] = [
    Step {
        name: "tidy",
        about: "house rules: crate graph, unsafe, manifests, text",
        run: tidy::check,
    },
    Step { name: "fmt", about: "formatting", run: fmt::check },
    Step { name: "clippy", about: "lints of all targets, warnings as errors", run: clippy::run },
    Step { name: "test", about: "cargo test --workspace", run: test::all },
    Step { name: "loom", about: "models of races between threads", run: loom::check },
    Step {
        name: "shuttle",
        about: "whole allocators under a few orders of their threads",
        run: shuttle::check,
    },
    Step { name: "docs", about: "documentation, warnings as errors", run: docs::check },
    Step {
        name: "package",
        about: "every crate packaged, and used from outside",
        run: package::run,
    },
];

/// How a step went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    Passed,
    Failed,
    Skipped,
}

/// A step that is over.
struct Row {
    name: &'static str,
    outcome: Outcome,
    took: Duration,
}

/// Runs the checks.
///
/// # Errors
/// If any of them failed.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    if args.list {
        for step in STEPS {
            println!("{:<8}  {}", step.name, step.about);
        }
        return Ok(());
    }
    let rows = run_steps(&STEPS, workspace, args);
    eprintln!("\n{}", table(&rows));
    conclude(&rows)
}

fn run_steps(steps: &[Step], workspace: &Workspace, args: &Args) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::with_capacity(steps.len());
    for step in steps {
        let stopped = args.fail_fast && rows.iter().any(|row| row.outcome == Outcome::Failed);
        let row = if stopped || args.skip.iter().any(|name| name == step.name) {
            Row { name: step.name, outcome: Outcome::Skipped, took: Duration::ZERO }
        } else {
            run_step(step, workspace)
        };
        rows.push(row);
    }
    rows
}

fn run_step(step: &Step, workspace: &Workspace) -> Row {
    eprintln!("\n=== {}: {}", step.name, step.about);
    let start = Instant::now();
    let result = (step.run)(workspace);
    let took = start.elapsed();
    let outcome = match result {
        Ok(()) => Outcome::Passed,
        Err(error) => {
            eprintln!("error: {error:#}");
            Outcome::Failed
        }
    };
    eprintln!("--- {}: {} in {:.1} s", step.name, outcome.word(), took.as_secs_f64());
    Row { name: step.name, outcome, took }
}

fn table(rows: &[Row]) -> String {
    let mut text = format!("{:<8}  {:<7}  {:>7}", "check", "result", "seconds");
    for row in rows {
        let seconds = row.took.as_secs_f64();
        text += &format!("\n{:<8}  {:<7}  {seconds:>7.1}", row.name, row.outcome.word());
    }
    text
}

fn conclude(rows: &[Row]) -> Result<()> {
    let failed: Vec<_> =
        rows.iter().filter(|row| row.outcome == Outcome::Failed).map(|row| row.name).collect();
    if !failed.is_empty() {
        bail!("failed: {}; repeat one alone with `cargo xtask {}`", failed.join(", "), failed[0]);
    }
    Ok(())
}

impl Outcome {
    fn word(self) -> &'static str {
        match self {
            Outcome::Passed => "ok",
            Outcome::Failed => "FAILED",
            Outcome::Skipped => "skipped",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    const FAKE: [Step; 3] = [
        Step { name: "good", about: "", run: |_| Ok(()) },
        Step { name: "bad", about: "", run: |_| bail!("as planned") },
        Step { name: "last", about: "", run: |_| Ok(()) },
    ];

    fn outcomes(args: Args) -> (Vec<Outcome>, Result<()>) {
        let workspace =
            Workspace { root: PathBuf::new(), target: PathBuf::new(), packages: Vec::new() };
        let rows = run_steps(&FAKE, &workspace, &args);
        (rows.iter().map(|row| row.outcome).collect(), conclude(&rows))
    }

    fn args(fail_fast: bool, skip: &[&str]) -> Args {
        Args { list: false, fail_fast, skip: skip.iter().map(ToString::to_string).collect() }
    }

    #[test]
    fn a_failure_is_reported_and_the_rest_still_runs() {
        let (rows, result) = outcomes(args(false, &[]));
        assert_eq!(rows, [Outcome::Passed, Outcome::Failed, Outcome::Passed]);
        assert!(result.unwrap_err().to_string().contains("failed: bad"));
    }

    #[test]
    fn fail_fast_skips_what_follows() {
        let (rows, result) = outcomes(args(true, &[]));
        assert_eq!(rows, [Outcome::Passed, Outcome::Failed, Outcome::Skipped]);
        assert!(result.is_err());
    }

    #[test]
    fn a_skipped_check_cannot_fail() {
        let (rows, result) = outcomes(args(false, &["bad"]));
        assert_eq!(rows, [Outcome::Passed, Outcome::Skipped, Outcome::Passed]);
        assert!(result.is_ok());
    }

    #[test]
    fn the_table_names_every_check() {
        let rows = FAKE.map(|step| Row {
            name: step.name,
            outcome: Outcome::Passed,
            took: Duration::from_millis(1250),
        });
        assert_eq!(table(&rows).lines().count(), 4);
        assert!(table(&rows).contains("bad       ok           1.2"));
    }
}
