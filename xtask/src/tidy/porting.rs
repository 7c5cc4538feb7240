//! docs/porting.md against the backend traits: when the traits change, someone must read the text.
//!
//! The text carries the hash of the traits that it describes, in a line
//! `<!-- backend-traits: 0123456789abcdef -->`. Comments and layout do not count.

use super::Finding;
use super::source;
use super::tree::Tree;
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use std::fs;

const RULE: &str = "porting";
const DOCUMENT: &str = "docs/porting.md";
const TRAITS: &str = "crates/alloc-core/src/backend.rs";
const MARK: &str = "<!-- backend-traits: ";

pub(super) fn findings(tree: &Tree) -> Vec<Finding> {
    let (Some(document), Some(traits)) = (tree.file(DOCUMENT), tree.file(TRAITS)) else {
        return Vec::new();
    };
    let Some(noted) = noted(&document.text) else {
        let message = format!("no line `{MARK}… -->`; add one and run `cargo xtask tidy --bless`");
        return vec![Finding::new(DOCUMENT, 1, RULE, message)];
    };
    let actual = fingerprint(&traits.text);
    if noted == actual {
        return Vec::new();
    }
    let message = format!(
        "describes the traits of {TRAITS} as of {noted}, but they are {actual}; correct the text, then \
         run `cargo xtask tidy --bless`"
    );
    vec![Finding::new(DOCUMENT, document.line_of(MARK), RULE, message)]
}

/// Writes the hash of the traits as they are into the document.
///
/// # Errors
/// If a file is missing or the document has no mark.
pub(super) fn bless(workspace: &Workspace) -> Result<()> {
    let read = |path: &str| fs::read_to_string(workspace.root.join(path)).context(path.to_owned());
    let (document, traits) = (read(DOCUMENT)?, read(TRAITS)?);
    let Some(noted) = noted(&document) else {
        bail!("{DOCUMENT} has no line `{MARK}… -->`");
    };
    let mark = |hash: &str| format!("{MARK}{hash} -->");
    let blessed = document.replace(&mark(noted), &mark(&fingerprint(&traits)));
    fs::write(workspace.root.join(DOCUMENT), blessed).context(DOCUMENT)
}

/// The hash that the document carries.
fn noted(document: &str) -> Option<&str> {
    let mut lines = document.lines();
    lines.find_map(|line| line.strip_prefix(MARK)?.strip_suffix(" -->"))
}

/// FNV-1a, 64 bits, of the code without comments and whitespace.
fn fingerprint(code: &str) -> String {
    let code = source::without_comments(code);
    let bytes = code.split_whitespace().flat_map(str::bytes);
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &str = "/// Doc.\npub trait Backend {\n    fn a(&self);\n}\n";

    fn found(document: &str) -> Vec<Finding> {
        findings(&Tree::of(&[(DOCUMENT, document), (TRAITS, CODE)]))
    }

    #[test]
    fn the_fingerprint_is_fnv_of_the_code_alone() {
        assert_eq!(fingerprint(""), "cbf29ce484222325");
        assert_eq!(fingerprint(" a // b\n"), "af63dc4c8601ec8c");
        assert_eq!(
            fingerprint(CODE),
            fingerprint("pub trait Backend { fn a(&self); } // other words")
        );
        assert_ne!(fingerprint(CODE), fingerprint("pub trait Backend { fn b(&self); }"));
    }

    #[test]
    fn a_text_that_is_up_to_date_passes() {
        assert!(found(&format!("# Porting\n{MARK}{} -->\n", fingerprint(CODE))).is_empty());
    }

    #[test]
    fn a_text_that_is_behind_is_found() {
        let found = found(&format!("# Porting\n\n{MARK}0000000000000000 -->\n"));
        assert_eq!((found.len(), found[0].line), (1, 3));
        assert!(found[0].message.contains("--bless"));
    }

    #[test]
    fn a_text_without_a_mark_is_found() {
        assert_eq!(found("# Porting\n").len(), 1);
    }

    #[test]
    fn blessing_writes_the_hash() {
        let root = std::env::temp_dir().join(format!("xtask-bless-{}", std::process::id()));
        fs::create_dir_all(root.join("docs")).unwrap();
        fs::create_dir_all(root.join("crates/alloc-core/src")).unwrap();
        fs::write(root.join(TRAITS), CODE).unwrap();
        fs::write(root.join(DOCUMENT), format!("# Porting\n{MARK}none yet -->\nrest\n")).unwrap();
        let workspace = Workspace { root: root.clone(), target: "".into(), packages: Vec::new() };
        bless(&workspace).unwrap();
        let document = fs::read_to_string(root.join(DOCUMENT)).unwrap();
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(document, format!("# Porting\n{MARK}{} -->\nrest\n", fingerprint(CODE)));
        assert!(found(&document).is_empty());
    }
}
