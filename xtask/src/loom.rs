//! `cargo xtask loom`.

use crate::process;
use crate::workspace::Workspace;
use anyhow::Result;

/// The models: test targets of this name, whichever the crate.
const MODELS: &str = "*loom";

/// Explore interleavings of small races with loom.
///
/// Each model runs a few threads over a piece of the allocator and tries their interleavings, up to
/// a number of preemptions. They are built apart, in target/loom, as locks and atomics are others
/// there. One more preemption takes many times as long, and finds rarer bugs.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How often a thread may be preempted in one run of a model
    #[arg(long, value_name = "NUMBER", default_value_t = 2)]
    preemptions: u8,

    /// More arguments for the tests, such as the name of a model
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    extra: Vec<String>,
}

/// Runs the models.
///
/// # Errors
/// If one fails.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let mut command = workspace.cargo(["test", "--package", "alloc-core", "--test", MODELS]);
    command
        .args(["--target-dir", "target/loom", "--"])
        .args(&args.extra)
        .env("RUSTFLAGS", "--cfg loom")
        .env("LOOM_MAX_PREEMPTIONS", args.preemptions.to_string());
    process::run(&mut command)
}

/// The step of `ci`.
///
/// # Errors
/// See [`run`].
pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    run(workspace, &Args { preemptions: 2, extra: Vec::new() })
}
