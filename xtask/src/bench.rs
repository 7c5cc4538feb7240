//! `cargo xtask bench`: how long the allocator takes, alone or beside its peers.

use crate::gpu_test::{self, NO_GPU, NoGpu};
use crate::process;
use crate::workspace::Workspace;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Measure the host time of the allocator and print a table.
///
/// Without --peers it runs on the simulated device: requests that the allocator serves from its cache
/// are measured, driver calls are not. With --peers it needs a GPU, nvcc and PyTorch with its headers,
/// and measures ours and the peers alternately. Exits with 77 if there is no GPU then.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Compare with PyTorch, cudaMallocAsync, CUB and RMM on a GPU
    #[arg(long)]
    peers: bool,

    /// Folder with the unpacked wheels of RMM, so that it takes part
    #[arg(long, value_name = "DIR", requires = "peers")]
    rmm: Option<PathBuf>,

    /// How often each measurement is made; medians are printed
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,
}

/// Builds what is needed, and measures.
///
/// # Errors
/// [`NoGpu`]; or if something does not build or a measurement fails.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    if args.peers { beside_peers(workspace, args) } else { alone(workspace, args) }
}

fn alone(workspace: &Workspace, args: &Args) -> Result<()> {
    let mut command = workspace.cargo(["run", "--release", "--quiet", "--package", "alloc-lab"]);
    command.args(["--", "bench", "all", "--rounds", &args.rounds.to_string()]);
    let folder = workspace.root.join("traces");
    let mut traces = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.to_string_lossy().ends_with(".csv.gz") {
            traces.push(workspace.relative(&path));
        }
    }
    traces.sort();
    process::run(command.args(traces))
}

fn beside_peers(workspace: &Workspace, args: &Args) -> Result<()> {
    // The folder for machines without cargo, so that what is measured here is what is measured there.
    let folder = workspace.target.join("gpu-bundle");
    gpu_test::bundle(workspace, &folder)?;
    let script = folder.join("bench.sh");
    let mut command = Command::new(&script);
    command.args(["--rounds", &args.rounds.to_string(), "--out"]);
    command.arg(workspace.target.join("bench-results"));
    if let Some(rmm) = &args.rmm {
        command.env("RMM_ROOT", rmm.canonicalize().with_context(|| rmm.display().to_string())?);
    }
    let status = command.status().with_context(|| script.display().to_string())?;
    if status.code() == Some(i32::from(NO_GPU)) {
        return Err(NoGpu.into());
    }
    ensure!(status.success(), "{} failed ({status})", script.display());
    Ok(())
}
