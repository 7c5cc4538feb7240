//! Package metadata.

use super::Finding;
use super::tree::Tree;
use crate::workspace::{Package, Workspace};

const RULE: &str = "manifest";

pub(super) fn findings(workspace: &Workspace, tree: &Tree) -> Vec<Finding> {
    let mut found = Vec::new();
    for package in &workspace.packages {
        let manifest = workspace.relative(&package.manifest_path);
        let text = tree.file(&manifest).map_or("", |file| &file.text);
        let readme = manifest.replace("Cargo.toml", "README.md");
        let missing = missing(package, text, tree.file(&readme).is_some());
        found.extend(missing.into_iter().map(|what| Finding::new(&manifest, 1, RULE, what)));
    }
    found
}

/// What a crate lacks, each with what to write.
fn missing(package: &Package, manifest: &str, has_readme: bool) -> Vec<&'static str> {
    let is_empty = |text: &Option<String>| text.as_deref().unwrap_or_default().is_empty();
    let rules = [
        (is_empty(&package.description), "no description; say in one line what the crate is"),
        (is_empty(&package.license), "no licence; write `license.workspace = true`"),
        (package.keywords.is_empty(), "no keywords; give up to five"),
        (is_empty(&package.readme), "no readme; write `readme = \"README.md\"`"),
        (!has_readme, "no README.md beside it; write what, a ten-line example, limits"),
        (!inherits_lints(manifest), "own lints; write `workspace = true` under `[lints]`"),
    ];
    rules.into_iter().filter(|(is_missing, _)| *is_missing).map(|(_, message)| message).collect()
}

fn inherits_lints(manifest: &str) -> bool {
    let mut lines = manifest.lines().map(str::trim).skip_while(|line| *line != "[lints]");
    lines.next().is_some()
        && lines.take_while(|line| !line.starts_with('[')).any(|line| line == "workspace = true")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINTS: &str = "[package]\nname = \"x\"\n[lints]\nworkspace = true\n";

    fn complete() -> Package {
        Package {
            description: Some("A crate".to_owned()),
            license: Some("MIT".to_owned()),
            readme: Some("README.md".to_owned()),
            keywords: vec!["memory".to_owned()],
            ..Package::default()
        }
    }

    #[test]
    fn a_complete_crate_passes() {
        assert!(missing(&complete(), LINTS, true).is_empty());
    }

    #[test]
    fn each_missing_part_is_found() {
        let check = |package: Package, manifest, has_readme, part: &str| {
            let found = missing(&package, manifest, has_readme);
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].contains(part), "{found:?}");
        };
        check(Package { description: None, ..complete() }, LINTS, true, "description");
        check(Package { license: Some(String::new()), ..complete() }, LINTS, true, "licence");
        check(Package { keywords: Vec::new(), ..complete() }, LINTS, true, "keywords");
        check(Package { readme: None, ..complete() }, LINTS, true, "no readme");
        check(complete(), LINTS, false, "README.md beside it");
        check(complete(), "[package]\nworkspace = true\n", true, "[lints]");
        check(complete(), "[lints]\n[features]\nworkspace = true\n", true, "[lints]");
    }

    #[test]
    fn findings_name_the_manifest() {
        let package = Package { manifest_path: "crates/x/Cargo.toml".into(), ..complete() };
        let workspace = Workspace { root: "".into(), target: "".into(), packages: vec![package] };
        let tree = Tree::of(&[("crates/x/Cargo.toml", LINTS)]);
        let found = findings(&workspace, &tree);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].file, "crates/x/Cargo.toml");
    }
}
