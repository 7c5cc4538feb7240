//! `cargo xtask clippy`.

use crate::process;
use crate::workspace::Workspace;
use anyhow::Result;

/// Lints every target of every crate.
///
/// # Errors
/// On any warning; clippy prints it.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let args = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    process::run(&mut workspace.cargo(args))
}
