//! docs/invariants.md against the code: what is written there must be kept somewhere and tested
//! somewhere, and what code refers to must be written there.
//!
//! A heading `## I7: …` defines an invariant; the word `I7` anywhere in a crate's Rust cites it. So
//! do `E1` and its like, for expandable segments. A heading that ends in `(planned)` asks for no
//! citation yet.

use super::Finding;
use super::tree::{File, Tree};
use std::collections::{BTreeMap, BTreeSet};

const RULE: &str = "invariants";
const DOCUMENT: &str = "docs/invariants.md";

/// Where an invariant is cited.
#[derive(Default)]
struct Citations {
    in_code: bool,
    in_test: bool,
}

pub(super) fn findings(tree: &Tree) -> Vec<Finding> {
    let Some(document) = tree.file(DOCUMENT) else {
        return Vec::new();
    };
    let documented: BTreeSet<&str> = definitions(document).map(|(_, name, _)| name).collect();
    let mut cited: BTreeMap<&str, Citations> = BTreeMap::new();
    let mut found = Vec::new();
    for file in tree.rust().filter(|file| file.path.starts_with("crates/")) {
        for (line, is_test, name) in citations(file) {
            let entry = cited.entry(name).or_default();
            entry.in_test |= is_test;
            entry.in_code |= !is_test;
            if !documented.contains(name) {
                let message =
                    format!("{name} is not in {DOCUMENT}; describe it there or correct the name");
                found.push(Finding::new(&file.path, line, RULE, message));
            }
        }
    }
    for (line, name, is_planned) in definitions(document) {
        if is_planned {
            continue;
        }
        let citations = cited.remove(name).unwrap_or_default();
        for (is_cited, place) in
            [(citations.in_code, "the code that keeps it"), (citations.in_test, "a test")]
        {
            if !is_cited {
                let message = format!("{name} is not cited in {place}; write `{name}` there");
                found.push(Finding::new(DOCUMENT, line, RULE, message));
            }
        }
    }
    found
}

/// The line, name and plannedness of each invariant that the document defines.
fn definitions(document: &File) -> impl Iterator<Item = (usize, &str, bool)> {
    document.text.lines().enumerate().filter_map(|(index, line)| {
        let name = names(line.strip_prefix("## ")?).next()?;
        Some((index + 1, name, line.ends_with("(planned)")))
    })
}

/// The line of each citation in a file, whether it stands in a test, and the name.
fn citations(file: &File) -> Vec<(usize, bool, &str)> {
    let is_test_file = file.path.contains("/tests/") || file.path.ends_with("/tests.rs");
    let tests_start = if is_test_file { 0 } else { test_module_line(&file.text) };
    let lines = file.text.lines().enumerate();
    lines
        .flat_map(|(index, line)| {
            names(line).map(move |name| (index + 1, index >= tests_start, name))
        })
        .collect()
}

/// Index of the line where a file's inline test module starts; past the end if there is none.
fn test_module_line(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let opens = |pair: &[&str]| {
        pair[0] == "#[cfg(test)]" && pair[1].starts_with("mod ") && pair[1].ends_with('{')
    };
    lines.windows(2).position(opens).unwrap_or(lines.len())
}

/// Every word of a line that is `I` or `E` and a number.
fn names(line: &str) -> impl Iterator<Item = &str> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    line.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(move |word| word.strip_prefix(['I', 'E']).is_some_and(is_number))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &str = "//! Keeps I1.\n#[cfg(test)]\nmod tests {\n    // I1: shown here.\n}\n";

    fn messages(document: &str, code: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<_> =
            [(DOCUMENT, document)].into_iter().chain(code.iter().copied()).collect();
        findings(&Tree::of(&files)).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn cited_in_code_and_test_passes() {
        assert!(
            messages("# Invariants\n\n## I1: tiles\n", &[("crates/a/src/x.rs", CODE)]).is_empty()
        );
        let split = [("crates/a/src/x.rs", "// I1"), ("crates/a/tests/it/main.rs", "\"I1: x\"")];
        assert!(messages("## I1: tiles\n", &split).is_empty());
    }

    #[test]
    fn without_a_document_nothing_is_asked() {
        assert!(findings(&Tree::of(&[("crates/a/src/x.rs", "// I9")])).is_empty());
    }

    #[test]
    fn a_missing_citation_is_found() {
        let found = messages("## I1: tiles\n## I2: no overlap\n", &[("crates/a/src/x.rs", CODE)]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].starts_with("docs/invariants.md:2:")
                && found[0].contains("the code that keeps it")
        );
        assert!(found[1].contains("I2 is not cited in a test"));
    }

    #[test]
    fn a_citation_in_a_test_only_is_not_enough() {
        let found = messages("## I1: tiles\n", &[("crates/a/tests/it.rs", "// I1")]);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("the code that keeps it"));
    }

    #[test]
    fn planned_invariants_may_wait() {
        assert!(messages("## I8: pools stay (planned)\n", &[]).is_empty());
    }

    #[test]
    fn an_undocumented_number_is_found() {
        let found = messages(
            "## I1: tiles\n",
            &[("crates/a/src/x.rs", CODE), ("crates/a/src/y.rs", "\n// I77")],
        );
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("crates/a/src/y.rs:2: [invariants] I77"));
    }

    #[test]
    fn only_whole_words_are_names() {
        let line = "I7: I10, (E3) but not I/O, I8x, XI2, I_4, 1E5, 0xE3 or `Is`";
        assert_eq!(names(line).collect::<Vec<_>>(), ["I7", "I10", "E3"]);
    }
}
