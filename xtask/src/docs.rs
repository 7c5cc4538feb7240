//! `cargo xtask docs`.

use crate::process;
use crate::workspace::Workspace;
use anyhow::Result;

/// Build the documentation of every crate, with warnings as errors.
#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// Open it in a browser
    #[arg(long)]
    open: bool,
}

/// Builds the documentation.
///
/// # Errors
/// On any warning, such as a broken link or a public item without documentation.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    let mut command = workspace.cargo(["doc", "--workspace", "--no-deps"]);
    command.env("RUSTDOCFLAGS", "-D warnings");
    if args.open {
        command.arg("--open");
    }
    process::run(&mut command)
}

/// The step of `ci`.
///
/// # Errors
/// See [`run`].
pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    run(workspace, &Args::default())
}
