//! `cargo xtask tidy`: house rules that no compiler checks.
//!
//! One module a rule; what the rules allow is data in [`policy`].

mod graph;
mod invariants;
mod manifest;
mod policy;
mod porting;
mod source;
mod text;
mod tree;
mod unsafe_code;

use crate::workspace::Workspace;
use anyhow::{Result, bail};
use std::fmt;
use tree::Tree;

/// Check the house rules that no compiler checks.
///
/// The crate graph, where `unsafe` may stand, package metadata, invariants that docs, code and tests
/// all name, docs/porting.md against the backend traits, and what no file may contain (paths of one
/// machine, registry addresses, code left open, trailing whitespace, too many lines). Looks at
/// tracked files and at new ones that git does not ignore. What is allowed stands in
/// xtask/src/tidy/policy.rs.
#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// Note in docs/porting.md that it describes the backend traits as they are now; read it first
    #[arg(long)]
    bless: bool,
}

/// Something that breaks a rule.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    /// Path inside the repository.
    file: String,
    /// Counted from 1.
    line: usize,
    rule: &'static str,
    /// What is wrong, and what to do.
    message: String,
}

impl Finding {
    fn new(file: &str, line: usize, rule: &'static str, message: impl Into<String>) -> Self {
        Finding { file: file.to_owned(), line, rule, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: [{}] {}", self.file, self.line, self.rule, self.message)
    }
}

/// Applies every rule.
///
/// # Errors
/// If there is any finding, or the files cannot be listed.
pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<()> {
    if args.bless {
        porting::bless(workspace)?;
    }
    let tree = Tree::load(workspace)?;
    let findings = findings(workspace, &tree);
    for finding in &findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!("tidy: {} finding(s)", findings.len());
    }
    println!("tidy: {} files, nothing to report", tree.files.len());
    Ok(())
}

/// The step of `ci`: only checks.
///
/// # Errors
/// See [`run`].
pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    run(workspace, &Args::default())
}

/// What every rule finds, ordered by place.
fn findings(workspace: &Workspace, tree: &Tree) -> Vec<Finding> {
    let mut all = graph::findings(workspace, tree);
    all.extend(manifest::findings(workspace, tree));
    all.extend(unsafe_code::findings(workspace, tree));
    all.extend(invariants::findings(tree));
    all.extend(porting::findings(tree));
    all.extend(text::findings(tree));
    all.sort_by(|a, b| (&a.file, a.line).cmp(&(&b.file, b.line)));
    all
}
