//! `cargo xtask soak`.

use crate::process;
use crate::workspace::Workspace;
use anyhow::{Result, ensure};
use std::time::{Duration, Instant};

/// The tests that draw their operations, by the beginning of their names.
const DRAWN: &str = "machine";

/// Play random operations against the models and the simulator, for as long as you like.
///
/// The tests of alloc-core that draw their operations (`machine…`) run again and again, each time
/// with another seed. Every operation is compared with a model, or judged by the simulator. A failure
/// prints the seed and the shrunk operations, and how to play them again; then the soak ends with
/// exit code 1.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Start no further round after so many minutes; the first is always played
    #[arg(long, value_name = "NUMBER", default_value_t = 10)]
    minutes: u64,

    /// Cases of each test in a round, of some hundred operations each
    #[arg(long, value_name = "NUMBER", default_value_t = 1000)]
    cases: u32,

    /// Seed of the first round; the others count up from there
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    seed: u64,

    /// Only tests whose names contain this
    #[arg(value_name = "NAME", default_value = DRAWN)]
    name: String,
}

/// Plays rounds.
///
/// # Errors
/// If a test fails.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    ensure!(args.cases > 0, "--cases must be at least 1");
    let start = Instant::now();
    let mut seed = args.seed;
    loop {
        play(workspace, args, seed)?;
        let minutes = start.elapsed().as_secs_f64() / 60.0;
        eprintln!("soak: seed {seed} is clean; {minutes:.1} of {} minutes", args.minutes);
        if start.elapsed() >= Duration::from_secs(60 * args.minutes) {
            return Ok(());
        }
        seed = seed.wrapping_add(1);
    }
}

fn play(workspace: &Workspace, args: &Args, seed: u64) -> Result<()> {
    let mut command = workspace.cargo(["test", "--release", "--package", "alloc-core"]);
    command
        .args(["--test", "it", "--", &args.name])
        .env("ALLOC_CORE_SEED", seed.to_string())
        .env("ALLOC_CORE_CASES", args.cases.to_string());
    process::run(&mut command)
}
