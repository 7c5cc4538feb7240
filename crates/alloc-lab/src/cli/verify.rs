//! `alloc-lab verify`.

use std::io::Write;
use std::path::{Path, PathBuf};

use super::args::VerifyArgs;
use super::print;
use crate::engine::CoreEngine;
use crate::error::Failure;
use crate::format::golden::Recording;
use crate::progress::Progress;
use crate::report::{VerifyRow, json, verify_table};
use crate::verify::verify;

/// Compares every file; whether all of them agree to the last entry.
pub(super) fn run(args: &VerifyArgs, out: &mut dyn Write) -> Result<bool, Failure> {
    let mut rows = Vec::new();
    for path in expand(&args.files)? {
        let recording = Recording::open(&path)?;
        let mut engine = CoreEngine::for_recording(&path, &recording)?;
        let mut progress = Progress::new(recording.ops.len() as u64, recording.name.clone());
        let verdict = verify(&mut engine, &recording, || progress.tick());
        drop(progress);
        let row = VerifyRow::new(path.display().to_string(), &verdict);
        if args.json {
            print(out, &json(&row))?;
        }
        rows.push(row);
    }
    if !args.json {
        print(out, &verify_table(&rows))?;
    }
    Ok(rows.iter().all(|row| row.exact))
}

/// The files themselves, and the recordings in the directories, in order of their names.
fn expand(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            let found = recordings_in(path)?;
            if found.is_empty() {
                return Err(Failure::input(path, "no recordings (*.json, *.json.gz) in there"));
            }
            files.extend(found);
        } else {
            files.push(path.clone());
        }
    }
    Ok(files)
}

fn recordings_in(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let fail = |e: std::io::Error| Failure::input(directory, format!("cannot list: {e}"));
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let name = path.to_string_lossy();
        if name.ends_with(".json") || name.ends_with(".json.gz") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
