//! Where `unsafe` may stand. That each use of it is explained is clippy's business
//! (`undocumented_unsafe_blocks`).

use super::Finding;
use super::policy::{self, CratePolicy};
use super::source;
use super::tree::{File, Tree};
use crate::workspace::Workspace;

const RULE: &str = "unsafe";
const FORBID: &str = "#![forbid(unsafe_code)]";

pub(super) fn findings(workspace: &Workspace, tree: &Tree) -> Vec<Finding> {
    let mut found: Vec<_> = tree.rust().flat_map(|file| stray_unsafe(workspace, file)).collect();
    for package in &workspace.packages {
        let forbids = policy::of(&package.name).is_some_and(|row| row.unsafe_in.is_empty());
        if !forbids {
            continue;
        }
        for target in package.targets.iter().filter(|target| target.is_shipped()) {
            let root = workspace.relative(&target.src_path);
            if tree.file(&root).is_some_and(|file| !file.code.contains(FORBID)) {
                let message =
                    format!("`{}` is a crate without unsafe; add `{FORBID}`", package.name);
                found.push(Finding::new(&root, 1, RULE, message));
            }
        }
    }
    found
}

/// Every `unsafe` of a file where it may not stand.
fn stray_unsafe(workspace: &Workspace, file: &File) -> Vec<Finding> {
    let owner = workspace.packages.iter().find_map(|package| {
        let folder = workspace.relative(package.manifest_path.parent()?);
        Some((package, file.path_in(&folder)?.to_owned()))
    });
    let listed = |row: &CratePolicy, path: &str| {
        row.unsafe_in.iter().any(|entry| policy::covers(entry, path))
    };
    if let Some((package, path)) = &owner
        && policy::of(&package.name).is_some_and(|row| listed(row, path))
    {
        return Vec::new();
    }
    source::lines_with(&file.code, "unsafe")
        .map(|line| {
            let message = "`unsafe` outside the modules listed for it in xtask/src/tidy/policy.rs; \
                           move it into one of them or do without";
            Finding::new(&file.path, line, RULE, message)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::{Package, Target};

    fn found(files: &[(&str, &str)]) -> Vec<(String, usize)> {
        let package = |name: &str| Package {
            name: name.to_owned(),
            manifest_path: format!("crates/{name}/Cargo.toml").into(),
            targets: vec![Target {
                kind: vec!["lib".to_owned()],
                src_path: format!("crates/{name}/src/lib.rs").into(),
            }],
            ..Package::default()
        };
        let packages = ["alloc-core", "alloc-shm"].map(package).into();
        let workspace = Workspace { root: "".into(), target: "".into(), packages };
        let found = findings(&workspace, &Tree::of(files));
        found.into_iter().map(|finding| (finding.file, finding.line)).collect()
    }

    #[test]
    fn listed_modules_may_use_it() {
        assert_eq!(found(&[("crates/alloc-shm/src/os/linux.rs", "unsafe { map() }")]), []);
    }

    #[test]
    fn others_may_not() {
        let stray = "fn f() {\n    // unsafe\n    unsafe { g() }\n}";
        for path in [
            "crates/alloc-shm/src/name.rs",
            "crates/alloc-core/tests/it.rs",
            "examples-outside/x/src/main.rs",
            "crates/alloc-shm/src/osmosis.rs",
        ] {
            assert_eq!(found(&[(path, stray)]), [(path.to_owned(), 3)]);
        }
    }

    #[test]
    fn safe_crates_must_forbid_it() {
        let lib = "crates/alloc-core/src/lib.rs";
        assert_eq!(found(&[(lib, "//! Core.\n#![forbid(unsafe_code)]\n")]), []);
        assert_eq!(
            found(&[(lib, "//! Core.\n// #![forbid(unsafe_code)]\n")]),
            [(lib.to_owned(), 1)]
        );
    }

    #[test]
    fn a_crate_with_listed_modules_need_not_forbid_it() {
        assert_eq!(found(&[("crates/alloc-shm/src/lib.rs", "//! Shared memory.\n")]), []);
    }
}
