//! `cargo xtask gpu-test`: the tests that need a GPU, here or on a machine without cargo.

use crate::process;
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Exit code of the tests, and of this verb, for "there is no GPU here": what test harnesses use for
/// "skipped", and never that of a failure.
pub(crate) const NO_GPU: u8 = 77;

/// Run the tests that need a GPU, or build a folder that runs them on a machine without cargo.
///
/// Exits with 77 if there is no GPU here, with 1 if a test fails.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Build only: put programs, their data, a `run.sh` for the tests, `bench.sh` and
    /// `bench_host.sh` into DIR
    #[arg(long, value_name = "DIR", num_args = 0..=1, default_missing_value = "gpu-bundle")]
    bundle: Option<PathBuf>,

    /// Words that select tests, after `--`
    #[arg(last = true)]
    filters: Vec<String>,
}

/// There is no GPU here, so nothing was tested.
#[derive(Debug)]
pub(crate) struct NoGpu;

impl fmt::Display for NoGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "no CUDA device here, nothing was tested; `cargo xtask gpu-test --bundle DIR` builds a \
             folder that runs on a machine that has one",
        )
    }
}

impl std::error::Error for NoGpu {}

/// Something to build for the GPU.
struct Product {
    package: &'static str,
    /// What selects it on cargo's command line.
    selection: &'static [&'static str],
    /// Name of the target in cargo's messages.
    target: &'static str,
    /// Name in the bundle.
    file: &'static str,
    /// Profile that it is built with.
    profile: &'static str,
}

const PRODUCTS: &[Product] = &[
    Product {
        package: "alloc-cuda",
        selection: &["--test", "gpu", "--features", "cudarc"],
        target: "gpu",
        file: "alloc-cuda-gpu",
        profile: TEST_PROFILE,
    },
    Product {
        package: "alloc-host-cuda",
        selection: &["--test", "gpu"],
        target: "gpu",
        file: "alloc-host-cuda-gpu",
        profile: TEST_PROFILE,
    },
    Product {
        package: "alloc-host-cuda",
        selection: &["--bench", "pinned"],
        target: "pinned",
        file: "alloc-host-cuda-bench",
        profile: "dist",
    },
    Product {
        package: "memory-manager",
        selection: &["--test", "gpu"],
        target: "gpu",
        file: "memory-manager-gpu",
        profile: TEST_PROFILE,
    },
    Product {
        package: "memory-manager",
        selection: &["--bench", "copies"],
        target: "copies",
        file: "memory-manager-bench",
        profile: "dist",
    },
    Product {
        package: "alloc-torch",
        selection: &["--lib"],
        target: "alloc_torch",
        file: "liballoc_torch.so",
        profile: TEST_PROFILE,
    },
    Product {
        package: "alloc-lab",
        selection: &["--bin", "alloc-lab"],
        target: "alloc-lab",
        file: "alloc-lab",
        profile: "dist",
    },
];

/// A profile of its own, so that it does not take turns with the usual one in the target folder.
const TEST_PROFILE: &str = "gpu";

/// Files of the repository that lie beside the programs in a bundle.
const SCRIPTS: &[&str] = &[
    "crates/alloc-host-cuda/benches/build_peer_host.sh",
    "crates/alloc-host-cuda/benches/peer_host.cpp",
    "crates/alloc-torch/python/gpu_alloc.py",
    "crates/alloc-torch/python/torch_check.py",
];

/// The test programs of a bundle, in order: the products and scripts that take `--require-gpu`, exit
/// with [`NO_GPU`] and print a line `test NAME ... ok|FAILED|skipped` for each test.
const TESTS: &[&str] =
    &["alloc-cuda-gpu", "alloc-host-cuda-gpu", "memory-manager-gpu", "torch_check.py"];

/// The tests; they need bash and the usual tools, nothing else.
const RUN: &str = include_str!("gpu_test/run.sh");
/// Device memory beside its peers; needs Python, too.
const BENCH: &str = include_str!("gpu_test/bench.sh");
/// Pinned memory beside PyTorch's.
const BENCH_HOST: &str = include_str!("gpu_test/bench_host.sh");

/// Scripts that are made for a bundle, and their templates.
const TEMPLATES: [(&str, &str); 3] =
    [("run.sh", RUN), ("bench.sh", BENCH), ("bench_host.sh", BENCH_HOST)];

/// Folders of the repository that programs read at run time.
const DATA: &[&str] = &["traces", "peers"];

/// Builds everything into a folder, and runs it unless asked for the folder.
///
/// # Errors
/// [`NoGpu`]; or if anything does not build or a test fails.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    if let Some(folder) = &args.bundle {
        let folder = workspace.root.join(folder);
        bundle(workspace, &folder)?;
        println!("{}", folder.display());
        return Ok(());
    }
    // The same folder as elsewhere, so that what is tested here is what is tested there.
    let folder = workspace.target.join("gpu-bundle");
    bundle(workspace, &folder)?;
    let script = folder.join("run.sh");
    let status = Command::new(&script)
        .args(&args.filters)
        .status()
        .with_context(|| script.display().to_string())?;
    if status.code() == Some(i32::from(NO_GPU)) {
        return Err(NoGpu.into());
    }
    ensure!(status.success(), "a GPU test failed ({status})");
    Ok(())
}

/// Builds everything into `folder`, which is new, empty or an older bundle.
pub(crate) fn bundle(workspace: &Workspace, folder: &Path) -> Result<()> {
    if folder.exists() {
        // Only what an earlier run made is thrown away.
        ensure!(
            folder.join("run.sh").is_file() || fs::read_dir(folder)?.next().is_none(),
            "{} is there and is no bundle; name another folder",
            folder.display()
        );
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder)?;
    for product in PRODUCTS {
        copy(&build(workspace, product)?, &folder.join(product.file))?;
    }
    for script in SCRIPTS.iter().map(|script| workspace.root.join(script)) {
        copy(&script, &folder.join(script.file_name().unwrap_or_default()))?;
    }
    for name in DATA {
        copy_folder(&workspace.root.join(name), &folder.join(name))?;
    }
    for (name, template) in TEMPLATES {
        let script = folder.join(name);
        fs::write(&script, script_of(template))?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("copying {}", from.display()))?;
    Ok(())
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// Builds one product, optimised and stripped, and returns where it is.
fn build(workspace: &Workspace, product: &Product) -> Result<PathBuf> {
    let mut command = workspace.cargo([
        "--config",
        "profile.gpu.inherits=\"release\"",
        "--config",
        "profile.gpu.strip=\"symbols\"",
        "--config",
        "profile.gpu.debug=false",
        "build",
        "--profile",
        product.profile,
        "--message-format",
        "json-render-diagnostics",
        "--package",
        product.package,
    ]);
    let json = process::output(command.args(product.selection).stderr(Stdio::inherit()))?;
    for line in json.lines() {
        let message: Message = serde_json::from_str(line).context("a message of cargo build")?;
        if let Some(path) = message.artifact(product.target) {
            return Ok(path);
        }
    }
    bail!("cargo built no `{}` of {}", product.target, product.package)
}

/// A message of `cargo build`, as far as it matters.
#[derive(Deserialize)]
struct Message {
    reason: String,
    target: Option<BuiltTarget>,
    executable: Option<PathBuf>,
    #[serde(default)]
    filenames: Vec<PathBuf>,
}

#[derive(Deserialize)]
struct BuiltTarget {
    name: String,
}

impl Message {
    /// The program or shared library of `target`, if this is about it.
    fn artifact(self, target: &str) -> Option<PathBuf> {
        let is_it = self.target.is_some_and(|built| built.name == target);
        if self.reason != "compiler-artifact" || !is_it {
            return None;
        }
        let library = |path: &PathBuf| path.extension().is_some_and(|end| end == "so");
        self.executable.or_else(|| self.filenames.into_iter().find(library))
    }
}

/// A script from its template.
fn script_of(template: &str) -> String {
    template
        .replace("@FIND_DRIVER@", include_str!("gpu_test/find_driver.sh").trim_end())
        .replace("@TESTS@", &TESTS.join(" "))
        .replace("@NO_GPU@", &NO_GPU.to_string())
}

#[cfg(test)]
mod tests;
