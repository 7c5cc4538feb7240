//! Tests of the laboratory as a whole: on recordings of real PyTorch, on traces of real programs,
//! and through its command line.

mod bench;
mod cli;
mod engines;
mod golden;
mod traces;

use std::path::PathBuf;

/// The recordings.
fn golden_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// A recorded trace of the repository.
fn trace(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../../traces/{name}.csv.gz"))
}
