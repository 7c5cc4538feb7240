//! `cargo xtask test`.

use crate::process;
use crate::workspace::Workspace;
use anyhow::Result;

/// Run `cargo test --workspace`.
///
/// Whatever follows goes to cargo as it is: `cargo xtask test --release -- case_a1`.
#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// More arguments for `cargo test`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    extra: Vec<String>,
}

/// Runs the tests.
///
/// # Errors
/// If one fails.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    process::run(workspace.cargo(["test", "--workspace"]).args(&args.extra))
}

/// The step of `ci`: everything, as the README says it.
///
/// # Errors
/// See [`run`].
pub(crate) fn all(workspace: &Workspace) -> Result<()> {
    run(workspace, &Args::default())
}
