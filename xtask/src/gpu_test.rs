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
    /// Build only: put programs, their data and a `run.sh` into DIR
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
    /// Whether it is a test program that takes `--require-gpu` and ends with a `test result:` line.
    is_test: bool,
}

const PRODUCTS: &[Product] = &[Product {
    package: "alloc-cuda",
    selection: &["--test", "gpu", "--features", "cudarc"],
    target: "gpu",
    file: "alloc-cuda-gpu",
    is_test: true,
}];

/// Folders of the repository that programs read at run time.
const DATA: &[&str] = &["traces"];

/// Builds, and runs unless asked for a bundle.
///
/// # Errors
/// [`NoGpu`]; or if anything does not build or a test fails.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    match &args.bundle {
        Some(folder) => bundle(workspace, &workspace.root.join(folder)),
        None => test(workspace, &args.filters),
    }
}

fn test(workspace: &Workspace, filters: &[String]) -> Result<()> {
    for product in PRODUCTS.iter().filter(|product| product.is_test) {
        let program = build(workspace, product)?;
        let mut command = Command::new(&program);
        command.arg("--require-gpu").args(filters);
        let status = command.status().with_context(|| program.display().to_string())?;
        if status.code() == Some(i32::from(NO_GPU)) {
            return Err(NoGpu.into());
        }
        ensure!(status.success(), "{} failed ({status})", product.file);
    }
    Ok(())
}

fn bundle(workspace: &Workspace, folder: &Path) -> Result<()> {
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
        let built = build(workspace, product)?;
        let copy = folder.join(product.file);
        fs::copy(&built, &copy).with_context(|| format!("copying {}", built.display()))?;
    }
    for name in DATA {
        copy_folder(&workspace.root.join(name), &folder.join(name))?;
    }
    let script = folder.join("run.sh");
    fs::write(&script, run_script())?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    println!("{}", folder.display());
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
        // A profile of its own, so that it does not take turns with the usual one in the target
        // folder.
        "--config",
        "profile.gpu.inherits=\"release\"",
        "--config",
        "profile.gpu.strip=\"symbols\"",
        "--config",
        "profile.gpu.debug=false",
        "build",
        "--profile",
        "gpu",
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

/// The script of a bundle. It needs bash and the usual tools, nothing else.
fn run_script() -> String {
    let tests: Vec<_> = PRODUCTS.iter().filter(|p| p.is_test).map(|p| p.file).collect();
    include_str!("gpu_test/run.sh")
        .replace("@TESTS@", &tests.join(" "))
        .replace("@NO_GPU@", &NO_GPU.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_artifact_of_a_target_is_found_among_the_messages() {
        let lines = [
            r#"{"reason":"compiler-artifact","target":{"name":"cudarc"},"filenames":["libx.rlib"],"executable":null}"#,
            r#"{"reason":"build-script-executed","package_id":"x"}"#,
            r#"{"reason":"compiler-artifact","target":{"name":"gpu"},"filenames":["t/gpu-1"],"executable":"t/gpu-1"}"#,
            r#"{"reason":"compiler-artifact","target":{"name":"plugin"},"filenames":["t/l.rlib","t/l.so"],"executable":null}"#,
            r#"{"reason":"build-finished","success":true}"#,
        ];
        let find = |target: &str| {
            let parse = |line| serde_json::from_str::<Message>(line).expect("valid");
            lines.into_iter().map(parse).find_map(|message| message.artifact(target))
        };
        assert_eq!(find("gpu"), Some("t/gpu-1".into()));
        assert_eq!(find("plugin"), Some("t/l.so".into()));
        assert_eq!(find("cudarc"), None);
    }

    /// Runs the script in a folder of pretended test programs, and returns its last line and code.
    fn run_with(program: &str) -> (String, Option<i32>) {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("run.sh"), run_script()).expect("writes");
        for product in PRODUCTS.iter().filter(|product| product.is_test) {
            let path = folder.path().join(product.file);
            fs::write(&path, format!("#!/bin/sh\n{program}\n")).expect("writes");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("sets");
        }
        let mut command = Command::new("bash");
        let output = command.arg(folder.path().join("run.sh")).output().expect("bash");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (text.lines().last().unwrap_or_default().to_owned(), output.status.code())
    }

    #[test]
    fn the_script_adds_up_and_tells_failure_from_absence() {
        let fine = "echo 'test a ... ok (1 ms)'; echo 'test b ... skipped: no peer'";
        let (line, code) = run_with(fine);
        assert_eq!((line.as_str(), code), ("total: 1 passed, 0 failed, 1 skipped", Some(0)));
        let (line, code) = run_with(&format!("{fine}; echo 'test c ... FAILED (2 ms)'; exit 1"));
        assert_eq!((line.as_str(), code), ("total: 1 passed, 1 failed, 1 skipped", Some(1)));
        let (line, code) = run_with(&format!("{fine}; kill -SEGV $$"));
        assert_eq!((line.as_str(), code), ("total: 1 passed, 1 failed, 1 skipped", Some(1)));
        let (line, code) = run_with("exit 77");
        assert_eq!(line, "no GPU here: nothing was tested");
        assert_eq!(code, Some(i32::from(NO_GPU)));
    }
}
