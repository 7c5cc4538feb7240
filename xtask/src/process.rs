//! Running other programs.

use anyhow::{Context, Result, bail};
use std::process::Command;

/// Runs `command` with this process's own input and output, after printing it.
///
/// # Errors
/// If it cannot be started or does not exit with 0.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = render(command);
    eprintln!("$ {line}");
    let status = command.status().with_context(|| format!("cannot start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed ({status})");
    }
    Ok(())
}

/// Runs `command` and returns what it printed.
///
/// # Errors
/// If it cannot be started, does not exit with 0 (its standard error is in the message), or prints
/// something that is not UTF-8.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let line = render(command);
    let output = command.output().with_context(|| format!("cannot start `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("output of `{line}`"))
}

/// The command as one would type it: program without its folder, then arguments.
fn render(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let program = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy();
    let args = command.get_args().map(|arg| arg.to_string_lossy());
    std::iter::once(program).chain(args).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn a_failing_program_is_an_error_that_names_it() {
        let mut command = Command::new("cargo");
        let error = run(command.arg("no-such-verb").stderr(Stdio::null())).unwrap_err().to_string();
        assert!(error.contains("cargo no-such-verb"), "{error}");
    }

    #[test]
    fn commands_print_as_typed() {
        let mut command = Command::new("some/where/cargo");
        assert_eq!(render(command.args(["doc", "--no-deps"])), "cargo doc --no-deps");
    }
}
