//! The files that tidy reads.

use super::source;
use crate::process;
use crate::workspace::Workspace;
use anyhow::{Context, Result};
use std::process::Command;

/// Every text file of the repository.
pub(super) struct Tree {
    pub(super) files: Vec<File>,
}

/// One text file.
pub(super) struct File {
    /// Path inside the repository, with `/`.
    pub(super) path: String,
    pub(super) text: String,
    /// For Rust: the text with comments and literals blanked, line for line. Otherwise empty.
    pub(super) code: String,
}

impl Tree {
    /// Reads tracked files and those that git does not ignore. Files that are not UTF-8 are left out.
    ///
    /// # Errors
    /// If git cannot list them or one cannot be read.
    pub(super) fn load(workspace: &Workspace) -> Result<Self> {
        // A clone may belong to another user than the one who runs the checks in it.
        let safe = format!("safe.directory={}", workspace.root.display());
        let list = process::output(Command::new("git").current_dir(&workspace.root).args([
            "-c",
            &safe,
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ]))
        .context("tidy needs git, to know which files belong to the repository")?;
        let mut files = Vec::new();
        for path in list.split_terminator('\0') {
            let full = workspace.root.join(path);
            // Deleted, but the deletion is not staged yet; or a link to a folder.
            if !full.is_file() {
                continue;
            }
            let bytes = std::fs::read(&full).with_context(|| path.to_owned())?;
            if let Ok(text) = String::from_utf8(bytes) {
                files.push(File::new(path, text));
            }
        }
        Ok(Tree { files })
    }

    /// The file at `path`.
    pub(super) fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    /// The Rust files.
    pub(super) fn rust(&self) -> impl Iterator<Item = &File> {
        self.files.iter().filter(|file| file.is_rust())
    }

    /// A tree of these paths and texts.
    #[cfg(test)]
    pub(super) fn of(files: &[(&str, &str)]) -> Self {
        Tree {
            files: files.iter().map(|(path, text)| File::new(path, (*text).to_owned())).collect(),
        }
    }
}

impl File {
    fn new(path: &str, text: String) -> Self {
        let code = if path.ends_with(".rs") {
            source::without_comments_and_literals(&text)
        } else {
            String::new()
        };
        File { path: path.to_owned(), text, code }
    }

    pub(super) fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// Path inside the crate in folder `folder`, if the file belongs to it.
    pub(super) fn path_in(&self, folder: &str) -> Option<&str> {
        self.path.strip_prefix(folder)?.strip_prefix('/')
    }

    /// The first line that has `needle`, or line 1.
    pub(super) fn line_of(&self, needle: &str) -> usize {
        self.text.lines().position(|line| line.contains(needle)).map_or(1, |index| index + 1)
    }
}
