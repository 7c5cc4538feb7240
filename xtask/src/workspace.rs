//! What `cargo metadata` says about this workspace.

use crate::process;
use anyhow::{Context, Result};
use serde::Deserialize;
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The workspace, as far as the verbs need it.
#[derive(Deserialize)]
pub(crate) struct Workspace {
    /// Folder of the root manifest. Every command of every verb runs here.
    #[serde(rename = "workspace_root")]
    pub(crate) root: PathBuf,
    /// Where cargo builds.
    #[serde(rename = "target_directory")]
    pub(crate) target: PathBuf,
    /// The member crates.
    pub(crate) packages: Vec<Package>,
}

/// One member crate.
#[derive(Deserialize, Default, Clone)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) manifest_path: PathBuf,
    pub(crate) description: Option<String>,
    pub(crate) license: Option<String>,
    pub(crate) readme: Option<String>,
    #[serde(default)]
    pub(crate) keywords: Vec<String>,
    /// `Some([])` means `publish = false`.
    pub(crate) publish: Option<Vec<String>>,
    pub(crate) dependencies: Vec<Dependency>,
    pub(crate) targets: Vec<Target>,
}

/// One line of a crate's dependency tables.
#[derive(Deserialize, Default, Clone)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// The version asked for; `*` if none is given.
    pub(crate) req: String,
    pub(crate) kind: Option<DependencyKind>,
}

/// Which table a dependency stands in; the ordinary one is `None` in [`Dependency::kind`].
#[derive(Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DependencyKind {
    Dev,
    Build,
}

/// One thing that cargo builds from a crate.
#[derive(Deserialize, Default, Clone)]
pub(crate) struct Target {
    pub(crate) kind: Vec<String>,
    pub(crate) src_path: PathBuf,
}

impl Workspace {
    /// Reads the workspace that the current folder belongs to. Needs no network.
    ///
    /// # Errors
    /// If cargo fails or prints something unexpected.
    pub(crate) fn load() -> Result<Self> {
        let json = process::output(Command::new(cargo_program()).args([
            "metadata",
            "--no-deps",
            "--format-version",
            "1",
        ]))?;
        serde_json::from_str(&json).context("cargo metadata")
    }

    /// A `cargo` command that runs in the root folder.
    pub(crate) fn cargo<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = Command::new(cargo_program());
        command.current_dir(&self.root).args(args);
        command
    }

    /// `path` as it is written inside the repository: relative to the root, with `/`.
    pub(crate) fn relative(&self, path: &Path) -> String {
        let inside = path.strip_prefix(&self.root).unwrap_or(path);
        inside
            .components()
            .map(|part| part.as_os_str().to_string_lossy())
            .collect::<Vec<_>>()
            .join("/")
    }
}

impl Package {
    /// Whether the crate is meant for a registry.
    pub(crate) fn is_published(&self) -> bool {
        self.publish.as_ref().is_none_or(|registries| !registries.is_empty())
    }
}

impl Target {
    /// Whether this is a crate that others build or run, not a test, bench, example or build script.
    pub(crate) fn is_shipped(&self) -> bool {
        self.kind.iter().any(|kind| kind == "bin" || kind.ends_with("lib") || kind == "proc-macro")
    }
}

/// The cargo that runs us, so that a `+toolchain` on the command line reaches what we start.
fn cargo_program() -> String {
    env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}
