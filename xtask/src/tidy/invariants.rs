//! docs/invariants.md against the code: what is written there must be kept somewhere and tested
//! somewhere, and what code refers to must be written there.
//!
//! A heading `## I7: …` defines an invariant; the word `I7` anywhere in a crate's Rust cites it. A
//! heading that ends in `(planned)` asks for no citation yet.

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
    let documented: BTreeSet<u32> = definitions(document).map(|(_, number, _)| number).collect();
    let mut cited: BTreeMap<u32, Citations> = BTreeMap::new();
    let mut found = Vec::new();
    for file in tree.rust().filter(|file| file.path.starts_with("crates/")) {
        for (line, is_test, number) in citations(file) {
            let entry = cited.entry(number).or_default();
            entry.in_test |= is_test;
            entry.in_code |= !is_test;
            if !documented.contains(&number) {
                let message = format!(
                    "I{number} is not in {DOCUMENT}; describe it there or correct the number"
                );
                found.push(Finding::new(&file.path, line, RULE, message));
            }
        }
    }
    for (line, number, is_planned) in definitions(document) {
        if is_planned {
            continue;
        }
        let citations = cited.remove(&number).unwrap_or_default();
        for (is_cited, place) in
            [(citations.in_code, "the code that keeps it"), (citations.in_test, "a test")]
        {
            if !is_cited {
                let message = format!("I{number} is not cited in {place}; write `I{number}` there");
                found.push(Finding::new(DOCUMENT, line, RULE, message));
            }
        }
    }
    found
}

/// The line, number and plannedness of each invariant that the document defines.
fn definitions(document: &File) -> impl Iterator<Item = (usize, u32, bool)> {
    document.text.lines().enumerate().filter_map(|(index, line)| {
        let number = numbers(line.strip_prefix("## ")?).next()?;
        Some((index + 1, number, line.ends_with("(planned)")))
    })
}

/// The line of each citation in a file, whether it stands in a test, and the number.
fn citations(file: &File) -> Vec<(usize, bool, u32)> {
    let is_test_file = file.path.contains("/tests/") || file.path.ends_with("/tests.rs");
    let tests_start = if is_test_file { 0 } else { test_module_line(&file.text) };
    let lines = file.text.lines().enumerate();
    lines
        .flat_map(|(index, line)| numbers(line).map(move |n| (index + 1, index >= tests_start, n)))
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

/// The `n` of every word `I<n>` in a line.
fn numbers(line: &str) -> impl Iterator<Item = u32> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter_map(|word| word.strip_prefix('I')?.parse().ok())
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
    fn only_whole_words_are_numbers() {
        assert_eq!(
            numbers("I7: I10, (I3) but not I/O, I8x, XI2, I_4 or `Is`").collect::<Vec<_>>(),
            [7, 10, 3]
        );
    }
}
