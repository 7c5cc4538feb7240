//! The command line.

mod args;
mod bench;
mod fit;
mod pages;
mod replay;
mod segments;
mod verify;

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;

use crate::error::{EXIT_DISAGREES, EXIT_OK, Failure};
use args::{Cli, Command};

/// Runs the program with these arguments, the first one being its name, and returns the exit code
/// that [`crate::error`] documents.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Nothing can be done if even that cannot be written.
            let _ = error.print();
            return ExitCode::from(error.exit_code() as u8);
        }
    };
    let mut out = std::io::stdout().lock();
    let good = match cli.command {
        Command::Replay(args) => replay::run(&args, &mut out),
        Command::Verify(args) => verify::run(&args, &mut out),
        Command::Fit(args) => fit::run(&args, &mut out),
        Command::Pages(args) => pages::run(&args, &mut out),
        Command::Segments(args) => segments::run(&args, &mut out),
        Command::Bench(args) => bench::run(&args, &mut out),
    };
    match good {
        Ok(true) => ExitCode::from(EXIT_OK),
        Ok(false) => ExitCode::from(EXIT_DISAGREES),
        Err(failure) if failure.is_broken_pipe() => ExitCode::from(EXIT_OK),
        Err(failure) => {
            complain(&failure);
            ExitCode::from(failure.exit_code())
        }
    }
}

/// Says on the standard error what went wrong.
fn complain(failure: &Failure) {
    eprintln!("alloc-lab: {failure}");
}

/// Prints `text` and a line break.
fn print(out: &mut dyn Write, text: &str) -> Result<(), Failure> {
    writeln!(out, "{text}").map_err(Failure::stdout)
}

/// Writes a whole file.
fn write_file(path: &Path, content: &str) -> Result<(), Failure> {
    std::fs::write(path, content)
        .map_err(|error| Failure::Output { what: path.display().to_string(), error })
}
