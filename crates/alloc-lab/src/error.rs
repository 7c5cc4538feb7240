//! What can go wrong, and with which exit code the process ends.

use std::fmt;
use std::path::{Path, PathBuf};

/// Exit code when everything agreed and fitted.
pub const EXIT_OK: u8 = 0;
/// Exit code when a recording disagrees or cannot be executed, or a workload does not fit.
pub const EXIT_DISAGREES: u8 = 1;
/// Exit code for wrong usage and for input that is broken or cannot be read.
pub const EXIT_BAD_INPUT: u8 = 2;

/// Exit code where a GPU is needed and there is none: what test harnesses use for "skipped", and
/// never that of a failure.
pub const EXIT_NO_GPU: u8 = 77;

/// Why a command stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The command line asks for something that makes no sense.
    #[error("{0}")]
    Usage(String),
    /// A file cannot be read or is not what it should be.
    #[error("{}: {what}", Place(.file, *.line))]
    Input {
        /// The file.
        file: PathBuf,
        /// Line in the file, counted from 1, where there is one to name.
        line: Option<u64>,
        /// What is wrong with it.
        what: String,
    },
    /// The workload does not fit into the device, or the allocator refused an operation.
    #[error("{}: {what}", Place(.file, Some(*.line)))]
    Stopped {
        /// The workload's file.
        file: PathBuf,
        /// Line of the operation that failed, counted from 1.
        line: u64,
        /// What happened, with the allocator's report.
        what: String,
    },
    /// The allocator or the driver failed, and no line of a file is to blame.
    #[error("{0}")]
    Refused(String),
    /// There is no GPU here; the text is the driver's reason.
    #[error("--backend cuda needs a GPU: {0}")]
    NoGpu(String),
    /// Output could not be written.
    #[error("cannot write {what}: {error}")]
    Output {
        /// What was being written.
        what: String,
        /// The system's reason.
        error: std::io::Error,
    },
}

impl Failure {
    /// A file that cannot be used, without a line to blame.
    pub fn input(file: &Path, what: impl Into<String>) -> Self {
        Failure::Input { file: file.to_owned(), line: None, what: what.into() }
    }

    /// A file that is wrong at `line` (counted from 1).
    pub fn input_at(file: &Path, line: u64, what: impl Into<String>) -> Self {
        Failure::Input { file: file.to_owned(), line: Some(line), what: what.into() }
    }

    /// A failed write to the standard output.
    pub fn stdout(error: std::io::Error) -> Self {
        Failure::Output { what: "the standard output".to_owned(), error }
    }

    /// Whether the reader of our output just went away (`alloc-lab … | head`): no fault of anyone.
    pub fn is_broken_pipe(&self) -> bool {
        matches!(self, Failure::Output { error, .. }
            if error.kind() == std::io::ErrorKind::BrokenPipe)
    }

    /// The exit code of a process that stops for this reason.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Stopped { .. } | Failure::Refused(_) => EXIT_DISAGREES,
            Failure::NoGpu(_) => EXIT_NO_GPU,
            Failure::Usage(_) | Failure::Input { .. } | Failure::Output { .. } => EXIT_BAD_INPUT,
        }
    }
}

/// `file` or `file:line`, as compilers print it.
struct Place<'a>(&'a Path, Option<u64>);

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            Some(line) => write!(f, "{}:{line}", self.0.display()),
            None => write!(f, "{}", self.0.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_file_and_line() {
        let at = Failure::input_at(Path::new("a.csv"), 7, "no such op");
        assert_eq!(at.to_string(), "a.csv:7: no such op");
        assert_eq!(at.exit_code(), EXIT_BAD_INPUT);
        assert_eq!(Failure::input(Path::new("a.csv"), "is empty").to_string(), "a.csv: is empty");
        let stopped = Failure::Stopped { file: "b".into(), line: 3, what: "oom".to_owned() };
        assert_eq!(stopped.to_string(), "b:3: oom");
        assert_eq!(stopped.exit_code(), EXIT_DISAGREES);
    }

    #[test]
    fn only_a_broken_pipe_is_silent() {
        let pipe = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert!(Failure::stdout(pipe).is_broken_pipe());
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        assert!(!Failure::stdout(full).is_broken_pipe());
    }
}
