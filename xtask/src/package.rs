//! `cargo xtask package`: what a user outside this workspace would get.

use crate::process;
use crate::workspace::{Package, Workspace};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A crate outside the workspace: a user's own backend. docs/porting.md explains it.
pub(crate) const OUTSIDE_EXAMPLE: &str = "examples-outside/own-backend";

/// The crates of ours that the example depends on, and no other.
const OUTSIDE_USES: [&str; 2] = ["alloc-core", "mock-backend"];

/// Packages everything that is published, then checks the packages and runs the example on them.
///
/// # Errors
/// If a package lacks something, or the example fails.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let published: Vec<_> = workspace.packages.iter().filter(|p| p.is_published()).collect();
    make_packages(workspace, &published)?;
    let outside = Outside::new(workspace, &published)?;
    eprintln!("Checking the packages, in {}", outside.folder.display());
    outside.check_packages(&published)?;
    eprintln!("Using them, in {}", outside.example_folder().display());
    outside.use_example()
}

fn make_packages(workspace: &Workspace, published: &[&Package]) -> Result<()> {
    let mut command = workspace.cargo(["package", "--quiet", "--no-verify", "--allow-dirty"]);
    // Together, so that they find each other although no registry has them.
    for package in published {
        command.args(["--package", &package.name]);
    }
    process::run(&mut command)
}

/// A folder with the packages and the example, laid out like the repository.
struct Outside<'a> {
    workspace: &'a Workspace,
    folder: PathBuf,
}

impl<'a> Outside<'a> {
    /// Fills the folder anew.
    fn new(workspace: &'a Workspace, published: &[&Package]) -> Result<Self> {
        let folder = workspace.target.join("outside");
        if folder.exists() {
            fs::remove_dir_all(&folder)
                .with_context(|| format!("clearing {}", folder.display()))?;
        }
        let outside = Outside { workspace, folder };
        for package in published {
            outside.unpack(package)?;
        }
        outside.copy_example()?;
        Ok(outside)
    }

    /// Where a crate is unpacked: where the example's relative paths lead.
    fn crate_folder(&self, name: &str) -> PathBuf {
        self.folder.join("crates").join(name)
    }

    fn unpack(&self, package: &Package) -> Result<()> {
        let archive = format!("{}-{}.crate", package.name, package.version);
        let archive = self.workspace.target.join("package").join(archive);
        let folder = self.crate_folder(&package.name);
        fs::create_dir_all(&folder)?;
        // The dates in the archive are of 2006 whatever is in it, so cargo would take what it built
        // last for newer: leave them out (-m).
        let mut tar = Command::new("tar");
        tar.args(["-x", "-z", "-m", "--strip-components=1", "-f"]);
        process::output(tar.args([&archive, Path::new("-C"), &folder]))?;
        Ok(())
    }

    fn example_folder(&self) -> PathBuf {
        self.folder.join(OUTSIDE_EXAMPLE)
    }

    fn copy_example(&self) -> Result<()> {
        copy_folder(&self.workspace.root.join(OUTSIDE_EXAMPLE), &self.example_folder())?;
        self.copy_lock(&self.example_folder())
    }

    /// With the workspace's own lock file the same versions are built, most of them already.
    fn copy_lock(&self, to: &Path) -> Result<()> {
        fs::copy(self.workspace.root.join("Cargo.lock"), to.join("Cargo.lock"))?;
        Ok(())
    }

    /// Checks that every package has all it needs to be built.
    fn check_packages(&self, published: &[&Package]) -> Result<()> {
        let used = |package: &&&Package| {
            let mut dependencies = published.iter().flat_map(|other| &other.dependencies);
            dependencies
                .any(|dependency| dependency.kind.is_none() && dependency.name == package.name)
        };
        let used = published.iter().filter(used).map(|package| package.name.as_str());
        let members = "[workspace]\nresolver = \"3\"\nmembers = [\"crates/*\"]\n";
        fs::write(self.folder.join("Cargo.toml"), format!("{members}\n{}", self.patch(used)))?;
        self.copy_lock(&self.folder)?;
        process::run(&mut self.cargo(&self.folder, ["check", "--quiet", "--workspace"]))
    }

    /// Lints, tests and runs the example.
    fn use_example(&self) -> Result<()> {
        let folder = self.example_folder();
        fs::create_dir_all(folder.join(".cargo"))?;
        fs::write(folder.join(".cargo/config.toml"), self.patch(OUTSIDE_USES))?;
        for args in [
            &["clippy", "--quiet", "--all-targets", "--", "-D", "warnings"][..],
            &["test", "--quiet"],
            &["run", "--quiet"],
        ] {
            process::run(&mut self.cargo(&folder, args.iter().copied()))?;
        }
        Ok(())
    }

    /// A table that makes it look as if a registry had the unpacked `crates`.
    fn patch<'c>(&self, crates: impl IntoIterator<Item = &'c str>) -> String {
        let mut table = "[patch.crates-io]\n".to_owned();
        for name in crates {
            table += &format!("{name} = {{ path = {:?} }}\n", self.crate_folder(name));
        }
        table
    }

    /// A cargo command that runs in `folder`.
    fn cargo<'c>(&self, folder: &Path, args: impl IntoIterator<Item = &'c str>) -> Command {
        let mut command = self.workspace.cargo(args);
        command.current_dir(folder);
        // The profile and the folder of the workspace, so that its build of the dependencies serves.
        command.env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");
        command.env("CARGO_TARGET_DIR", &self.workspace.target);
        command
    }
}

/// Copies a folder without what building left in it.
fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_name() == "target" {
            continue;
        }
        if entry.file_type()?.is_dir() {
            copy_folder(&source, &target)?;
        } else {
            fs::copy(&source, &target)?;
        }
    }
    Ok(())
}
