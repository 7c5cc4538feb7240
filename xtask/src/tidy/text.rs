//! What no file may contain.

use super::Finding;
use super::policy::{LINES_MAX, LONG_FILES, covers};
use super::source;
use super::tree::{File, Tree};

/// First parts of absolute paths that exist on one machine only.
const MACHINE_FOLDERS: [&str; 4] = ["home", "root", "tmp", "work"];

/// Hosts that serve packages. Written in parts, since this file is checked too.
const REGISTRY_HOSTS: [&str; 5] = [
    concat!("index.", "crates.io"),
    concat!("static.", "crates.io"),
    concat!("crates.io", "-index"),
    concat!("pypi", ".org"),
    concat!("files.", "pythonhosted.org"),
];

/// The one registry that a lock file may name.
const LOCK_SOURCE: &str =
    concat!("source = \"registry+https://github.com/rust-lang/", "crates.io", "-index\"");

pub(super) fn findings(tree: &Tree) -> Vec<Finding> {
    tree.files.iter().flat_map(in_file).collect()
}

fn in_file(file: &File) -> Vec<Finding> {
    let mut found = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        let mut report =
            |rule, message: String| found.push(Finding::new(&file.path, index + 1, rule, message));
        if let Some(folder) = machine_folder(line) {
            report(
                "machine-path",
                format!("a path under /{folder} exists on one machine only; make it relative"),
            );
        }
        if let Some(host) = registry(&file.path, line) {
            report(
                "registry",
                format!("names the package registry {host}; leave that to each user's settings"),
            );
        }
        if line.ends_with([' ', '\t']) {
            report("whitespace", "whitespace at the end of the line; remove it".to_owned());
        }
    }
    found.extend(left_open(file));
    let lines = file.text.lines().count();
    if lines > LINES_MAX && !LONG_FILES.iter().any(|(path, _)| covers(path, &file.path)) {
        let message = format!(
            "{lines} lines, over {LINES_MAX}; split it by what it does, or list it in \
             xtask/src/tidy/policy.rs with a reason"
        );
        found.push(Finding::new(&file.path, LINES_MAX + 1, "length", message));
    }
    found
}

/// The folder, if a line has an absolute path to something in one of [`MACHINE_FOLDERS`].
fn machine_folder(line: &str) -> Option<&'static str> {
    line.match_indices('/').find_map(|(at, _)| {
        // After a name it is a separator inside a relative path.
        let is_inside =
            line[..at].ends_with(|c: char| c.is_alphanumeric() || "_.-~}>*)]".contains(c));
        let (first, _) = line[at + 1..].split_once('/')?;
        MACHINE_FOLDERS.into_iter().find(|folder| *folder == first && !is_inside)
    })
}

/// The registry that a line names, if it may not.
fn registry<'a>(path: &str, line: &'a str) -> Option<&'a str> {
    let is_lock = path == "Cargo.lock" || path.ends_with("/Cargo.lock");
    if is_lock {
        return (line.starts_with("source = \"registry") && line != LOCK_SOURCE).then_some(line);
    }
    let host = REGISTRY_HOSTS.into_iter().find(|host| line.contains(host))?;
    line.find(host).map(|at| &line[at..at + host.len()])
}

/// Code that was to be written or tested later.
fn left_open(file: &File) -> Vec<Finding> {
    const MARKS: [(&str, &str); 4] = [
        ("todo!", "finish it"),
        ("unimplemented!", "implement it, or return an error that says so"),
        ("#[ignore", "make it run, or move it to a verb of its own"),
        (", ignore)]", "make it run, or move it to a verb of its own"),
    ];
    let in_code = |(mark, remedy): (&'static str, &'static str)| {
        source::lines_with(&file.code, mark).map(move |line| {
            Finding::new(&file.path, line, "left-open", format!("`{mark}` in the code; {remedy}"))
        })
    };
    MARKS.into_iter().flat_map(in_code).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str, text: &str, expected: &[(usize, &str)]) {
        let found = findings(&Tree::of(&[(path, text)]));
        let places: Vec<_> = found.iter().map(|finding| (finding.line, finding.rule)).collect();
        assert_eq!(places, expected, "{found:#?}");
    }

    #[test]
    fn machine_paths_are_found() {
        for folder in MACHINE_FOLDERS {
            for before in ["", "see `", "file://", "(", "in "] {
                check("a.md", &format!("one\n{before}/{folder}/x\n"), &[(2, "machine-path")]);
            }
            for before in ["src", "$X}", "a/src", "/shop"] {
                check("a.md", &format!("{before}/{folder}/x\n"), &[]);
            }
            check("a.md", &format!("/{folder}-around/x and /{folder}\n"), &[]);
        }
    }

    #[test]
    fn registries_are_found() {
        for host in REGISTRY_HOSTS {
            check("a.toml", &format!("x\nurl = \"https://{host}/y\"\n"), &[(2, "registry")]);
        }
        check("a.md", "https://crates.io/crates/clap and docs.rs\n", &[]);
    }

    #[test]
    fn a_lock_file_names_the_public_registry_only() {
        check("Cargo.lock", &format!("{LOCK_SOURCE}\n"), &[]);
        check(
            "Cargo.lock",
            "\nsource = \"registry+https://mirror.example/index\"\n",
            &[(2, "registry")],
        );
    }

    #[test]
    fn code_left_open_is_found() {
        check("a.rs", "fn f() {\n    todo!()\n}\n", &[(2, "left-open")]);
        check("a.rs", "fn f() { unimplemented!(\"x\") }\n", &[(1, "left-open")]);
        check("a.rs", "#[test]\n#[ignore = \"slow\"]\nfn f() {}\n", &[(2, "left-open")]);
        check("a.rs", "#[cfg_attr(miri, ignore)]\nfn f() {}\n", &[(1, "left-open")]);
        check("a.rs", "// todo!() and #[ignore]\nconst X: &str = \"todo!\";\n", &[]);
    }

    #[test]
    fn trailing_whitespace_is_found() {
        check("a.md", "a\nb \n\tc\t\nd\n", &[(2, "whitespace"), (3, "whitespace")]);
        check("a.md", "a\r\n", &[]);
        check("a.md", "a \r\n", &[(1, "whitespace")]);
    }

    #[test]
    fn long_files_are_found() {
        check("a.rs", &"x\n".repeat(LINES_MAX), &[]);
        check("a.rs", &"x\n".repeat(LINES_MAX + 1), &[(LINES_MAX + 1, "length")]);
        check("Cargo.lock", &"x\n".repeat(LINES_MAX + 1), &[]);
    }
}
