//! Developer tasks, run as `cargo xtask <verb>`; one module per verb.
#![forbid(unsafe_code)]

mod bench;
mod ci;
mod clippy;
mod docs;
mod fmt;
mod gpu_test;
mod loom;
mod package;
mod process;
mod shuttle;
mod soak;
mod test;
mod tidy;
mod workspace;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::process::ExitCode;
use workspace::Workspace;

/// Developer tasks of this workspace.
///
/// `cargo xtask ci` runs every check that a change must pass, in the order of `cargo xtask ci
/// --list`. Each check is also a verb of its own, so that one can be repeated alone while mending
/// what it found.
#[derive(Parser)]
#[command(name = "xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Ci(ci::Args),
    Tidy(tidy::Args),
    Fmt(fmt::Args),
    /// Lint every target of every crate, warnings as errors
    Clippy,
    Test(test::Args),
    Loom(loom::Args),
    Shuttle(shuttle::Args),
    Soak(soak::Args),
    Docs(docs::Args),
    /// Package every published crate, then use the packages from outside the workspace
    ///
    /// The packages are unpacked below target/outside, where nothing else of the repository is at
    /// hand. There every one of them is checked, and the example in examples-outside/own-backend is
    /// linted, tested and run on them.
    Package,
    GpuTest(gpu_test::Args),
    Bench(bench::Args),
}

fn main() -> ExitCode {
    match dispatch(Cli::parse().verb) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            if error.is::<gpu_test::NoGpu>() {
                ExitCode::from(gpu_test::NO_GPU)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

fn dispatch(verb: Verb) -> Result<()> {
    let workspace = Workspace::load()?;
    match verb {
        Verb::Ci(args) => ci::run(&workspace, &args),
        Verb::Tidy(args) => tidy::run(&workspace, &args),
        Verb::Fmt(args) => fmt::run(&workspace, &args),
        Verb::Clippy => clippy::run(&workspace),
        Verb::Test(args) => test::run(&workspace, &args),
        Verb::Loom(args) => loom::run(&workspace, &args),
        Verb::Shuttle(args) => shuttle::run(&workspace, &args),
        Verb::Soak(args) => soak::run(&workspace, &args),
        Verb::Docs(args) => docs::run(&workspace, &args),
        Verb::Package => package::run(&workspace),
        Verb::GpuTest(args) => gpu_test::run(&workspace, &args),
        Verb::Bench(args) => bench::run(&workspace, &args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
