//! `cargo xtask fmt`.

use crate::package::OUTSIDE_EXAMPLE;
use crate::process;
use crate::workspace::Workspace;
use anyhow::Result;

/// Check that all code is formatted, or format it.
///
/// Covers the workspace and the example outside it.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Format instead of only checking
    #[arg(long)]
    write: bool,
}

/// Formats or checks.
///
/// # Errors
/// If something is not formatted; rustfmt prints the difference.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let outside = format!("{OUTSIDE_EXAMPLE}/Cargo.toml");
    for scope in [vec!["--all"], vec!["--manifest-path", &outside]] {
        let mut command = workspace.cargo(["fmt"]);
        command.args(scope);
        if !args.write {
            command.arg("--check");
        }
        process::run(&mut command)?;
    }
    Ok(())
}

/// The step of `ci`: only checks.
///
/// # Errors
/// See [`run`].
pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    run(workspace, &Args { write: false })
}
