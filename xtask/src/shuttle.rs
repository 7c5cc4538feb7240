//! `cargo xtask shuttle`.

use crate::process;
use crate::workspace::Workspace;
use anyhow::Result;

/// The tests: targets of this name, whichever the crate.
const TESTS: &str = "*shuttle";

/// Schedules of each test in `ci`.
const FEW: u32 = 30;

/// Play whole allocators under many orders of their threads with shuttle.
///
/// Where loom tries all interleavings of a few steps, shuttle tries many of long runs, with the
/// simulator's judge watching. A failure prints the schedule that leads to it. They are built apart, in
/// target/shuttle, as locks are others there.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many schedules of each test and configuration are played, twice: at random, and with few
    /// changes of threads
    #[arg(long, value_name = "NUMBER", default_value_t = 1000)]
    runs: u32,

    /// More arguments for the tests, such as the name of one
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    extra: Vec<String>,
}

/// Plays.
///
/// # Errors
/// If a test fails.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let mut command = workspace.cargo(["test", "--package", "alloc-core", "--test", TESTS]);
    command
        .args(["--target-dir", "target/shuttle", "--"])
        .args(&args.extra)
        .env("RUSTFLAGS", "--cfg shuttle")
        .env("SHUTTLE_RUNS", args.runs.to_string());
    process::run(&mut command)
}

/// The step of `ci`.
///
/// # Errors
/// See [`run`].
pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    run(workspace, &Args { runs: FEW, extra: Vec::new() })
}
