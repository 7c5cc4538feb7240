//! Who may depend on whom.

use super::Finding;
use super::policy::{self, CratePolicy, JUDGE, Outside, RESERVED};
use super::source;
use super::tree::Tree;
use crate::workspace::{Dependency, DependencyKind, Package, Workspace};

const RULE: &str = "crate-graph";

pub(super) fn findings(workspace: &Workspace, tree: &Tree) -> Vec<Finding> {
    let mut found = reserved_names(tree);
    for package in &workspace.packages {
        let manifest = workspace.relative(&package.manifest_path);
        let Some(row) = policy::of(&package.name) else {
            found.push(Finding::new(
                &manifest,
                1,
                RULE,
                format!(
                    "crate `{}` has no row in xtask/src/tidy/policy.rs; add one that says what it may \
                     depend on and where it may use unsafe",
                    package.name
                ),
            ));
            continue;
        };
        for dependency in &package.dependencies {
            if let Some(problem) = problem(workspace, package, row, dependency) {
                let line = tree
                    .file(&manifest)
                    .map_or(1, |file| line_of_dependency(&file.text, &dependency.name));
                found.push(Finding::new(&manifest, line, RULE, problem));
            }
        }
    }
    found
}

/// What is wrong with one dependency.
fn problem(
    workspace: &Workspace,
    package: &Package,
    row: &CratePolicy,
    dependency: &Dependency,
) -> Option<String> {
    let (from, to) = (&package.name, &dependency.name);
    if from == to {
        // Only cargo's way to give a crate's own tests another feature of it.
        return None;
    }
    let is_dev = dependency.kind == Some(DependencyKind::Dev);
    let Some(member) = workspace.packages.iter().find(|member| member.name == *to) else {
        return outside_problem(row, to, is_dev);
    };
    if is_dev
        && dependency.req != "*"
        && member.dependencies.iter().any(|d| d.name == *from && d.kind.is_none())
    {
        return Some(format!(
            "`{to}` depends on `{from}`, so as a dev-dependency it must be a path without a version: \
             neither could be published first otherwise"
        ));
    }
    let for_tests = to == JUDGE || policy::FOR_TESTS.contains(&(from.as_str(), to.as_str()));
    if row.uses.contains(&to.as_str()) || is_dev && for_tests {
        return None;
    }
    Some(if to == JUDGE {
        format!(
            "`{to}` is a dev-dependency everywhere but in alloc-lab; move it to [dev-dependencies]"
        )
    } else {
        format!(
            "`{from}` may not depend on `{to}`; core names no backend, backends do not name each other, \
             nothing names a front end (table in xtask/src/tidy/policy.rs)"
        )
    })
}

fn outside_problem(row: &CratePolicy, to: &str, is_dev: bool) -> Option<String> {
    let from = row.name;
    let reserved = RESERVED.iter().find(|reserved| reserved.name == to);
    if let Some(reserved) = reserved.filter(|reserved| !reserved.may_depend(from)) {
        let owner = reserved.owner;
        return Some(format!("only `{owner}` may depend on `{to}`; call it through that crate"));
    }
    match row.outside {
        Outside::Only(allowed) if !is_dev && !allowed.contains(&to) => Some(format!(
            "`{from}` may depend on {} only, not on `{to}`; do without it, or argue for it in \
             xtask/src/tidy/policy.rs",
            allowed.join(", ")
        )),
        _ => None,
    }
}

/// Code outside its owner that names a reserved crate, whichever way it got hold of it.
fn reserved_names(tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for reserved in RESERVED {
        let (name, owner) = (reserved.name, reserved.owner);
        for file in tree.rust().filter(|file| !reserved.is_home(&file.path)) {
            found.extend(source::lines_with(&file.code, name).map(|line| {
                let message =
                    format!("only `{owner}` may name `{name}`; add what is missing there");
                Finding::new(&file.path, line, RULE, message)
            }));
        }
    }
    found
}

/// The line of a manifest where a dependency is declared.
fn line_of_dependency(manifest: &str, name: &str) -> usize {
    let declares = |line: &str| {
        let line = line.trim_start();
        let key = line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '.', '=']));
        key || line.ends_with(&format!("dependencies.{name}]"))
    };
    manifest.lines().position(declares).map_or(1, |index| index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Name, table and version of a dependency.
    type Edge = (&'static str, Option<DependencyKind>, &'static str);
    /// A crate and its dependencies.
    type Crate<'a> = (&'a str, &'a [Edge]);

    const DEV: Option<DependencyKind> = Some(DependencyKind::Dev);
    const CORE: Crate<'_> = ("alloc-core", &[]);
    const MOCK: Crate<'_> = ("mock-backend", &[("alloc-core", None, "^0.1")]);

    fn workspace(crates: &[Crate<'_>]) -> Workspace {
        let dependency = |&(name, kind, req): &Edge| Dependency {
            name: name.to_owned(),
            req: req.to_owned(),
            kind,
        };
        let packages = crates.iter().map(|(name, dependencies)| Package {
            name: (*name).to_owned(),
            manifest_path: format!("crates/{name}/Cargo.toml").into(),
            dependencies: dependencies.iter().map(dependency).collect(),
            ..Package::default()
        });
        Workspace { root: "".into(), target: "".into(), packages: packages.collect() }
    }

    fn check(crates: &[Crate<'_>], expected: &[&str]) {
        let found = findings(&workspace(crates), &Tree::of(&[]));
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (finding, part) in found.iter().zip(expected) {
            assert!(finding.message.contains(part), "{finding}");
        }
    }

    #[test]
    fn allowed_edges_pass() {
        let lab =
            ("alloc-lab", &[("alloc-core", None, "^0.1"), ("mock-backend", None, "^0.1")][..]);
        let shm = ("alloc-shm", &[("alloc-core", None, "^0.1"), ("mock-backend", DEV, "^0.1")][..]);
        check(&[CORE, MOCK, lab, shm], &[]);
    }

    #[test]
    fn tests_may_ask_for_features_of_their_own_crate() {
        check(&[("alloc-shm", &[("alloc-shm", DEV, "*")])], &[]);
    }

    #[test]
    fn backends_may_not_name_each_other() {
        let shm = ("alloc-shm", &[("alloc-cpu", None, "^0.1")][..]);
        check(&[CORE, ("alloc-cpu", &[]), shm], &["`alloc-shm` may not depend on `alloc-cpu`"]);
    }

    #[test]
    fn core_depends_on_no_member_and_few_others() {
        let core = ("alloc-core", &[("mock-backend", DEV, "*"), ("smallvec", None, "^1")][..]);
        check(&[core, MOCK], &[]);
        let core = ("alloc-core", &[("cuda-driver", None, "^0.1"), ("serde", None, "^1")][..]);
        check(
            &[core, ("cuda-driver", &[])],
            &["`alloc-core` may not depend on `cuda-driver`", "not on `serde`"],
        );
        check(&[("alloc-core", &[("proptest", DEV, "^1")])], &[]);
    }

    #[test]
    fn the_judge_is_for_tests() {
        let shm = ("alloc-shm", &[("mock-backend", None, "^0.1")][..]);
        check(&[CORE, MOCK, shm], &["move it to [dev-dependencies]"]);
    }

    #[test]
    fn a_circle_through_a_dev_dependency_has_no_version() {
        let core = ("alloc-core", &[("mock-backend", DEV, "^0.1")][..]);
        check(&[core, MOCK], &["a path without a version"]);
    }

    #[test]
    fn an_unknown_crate_must_be_added_to_the_table() {
        check(
            &[("alloc-quantum", &[])],
            &["`alloc-quantum` has no row in xtask/src/tidy/policy.rs"],
        );
    }

    #[test]
    fn cudarc_belongs_to_the_driver_crate() {
        check(&[("cuda-driver", &[("cudarc", None, "^0.1")])], &[]);
        check(
            &[("alloc-host-cuda", &[("cudarc", DEV, "^0.1")])],
            &["only `cuda-driver` may depend on `cudarc`"],
        );
        let tree = Tree::of(&[
            ("crates/cuda-driver/src/sys.rs", "pub use cudarc::driver::sys::*;"),
            ("crates/alloc-cuda/src/lib.rs", "// cudarc\nuse cuda_driver::cudarc::driver::sys;"),
            ("crates/alloc-cuda/src/interop.rs", "use cudarc::driver::CudaSlice;"),
        ]);
        let found = findings(&workspace(&[]), &tree);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].file.as_str(), found[0].line), ("crates/alloc-cuda/src/lib.rs", 2));
    }

    #[test]
    fn a_finding_points_at_the_dependency() {
        let manifest =
            "[dependencies]\nalloc-core.workspace = true\nalloc = \"1\"\n[dev-dependencies.x]\n";
        assert_eq!(line_of_dependency(manifest, "alloc"), 3);
        assert_eq!(line_of_dependency(manifest, "alloc-core"), 2);
        assert_eq!(line_of_dependency(manifest, "x"), 4);
    }
}
