//! Which process is meant: a pid alone is not enough, since pids are used again.

use crate::error::{Error, Result};
use nix::errno::Errno;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pids are below 2^22 on Linux; the start time takes the other 42 bits (1300 years of ticks).
const PID_BITS: u32 = 22;

/// One process for good: its pid and the clock tick it started at.
///
/// Meaningful within one pid namespace and one boot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId(u64);

impl ProcessId {
    /// The process that calls this, also right after a fork.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] where `/proc` is not mounted.
    pub fn current() -> Result<Self> {
        static CACHE: AtomicU64 = AtomicU64::new(0);
        let cached = ProcessId(CACHE.load(Ordering::Relaxed));
        let pid = std::process::id();
        if cached.0 != 0 && cached.pid() == pid {
            return Ok(cached);
        }
        let me = Self::of(pid)?.ok_or(Error::Os {
            op: "find",
            object: format!("/proc/{pid}/stat"),
            source: Errno::ENOENT,
        })?;
        CACHE.store(me.0, Ordering::Relaxed);
        Ok(me)
    }

    /// The process that has this pid now; `None` if there is none, or it is dead already.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if `/proc` cannot be read.
    pub fn of(pid: u32) -> Result<Option<Self>> {
        let path = format!("/proc/{pid}/stat");
        match std::fs::read(&path) {
            Ok(stat) => Ok(parse_stat(&stat)
                .and_then(|stat| stat.alive.then(|| Self::new(pid, stat.start)).flatten())),
            Err(error) => match Errno::from_raw(error.raw_os_error().unwrap_or(0)) {
                Errno::ENOENT | Errno::ESRCH if proc_is_mounted() => Ok(None),
                errno => Err(Error::Os { op: "read", object: path, source: errno }),
            },
        }
    }

    /// Whether this very process still runs. A process that is dead but not yet waited for does
    /// not run: its descriptors and mappings are gone.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if `/proc` cannot be read: then nobody may be declared dead.
    pub fn is_alive(self) -> Result<bool> {
        Ok(Self::of(self.pid())? == Some(self))
    }

    /// The pid.
    pub fn pid(self) -> u32 {
        (self.0 & ((1 << PID_BITS) - 1)) as u32
    }

    /// Clock ticks between boot and the start of the process.
    pub fn start_ticks(self) -> u64 {
        self.0 >> PID_BITS
    }

    /// Packs both; `None` if either is out of range.
    pub(crate) fn new(pid: u32, start_ticks: u64) -> Option<Self> {
        let fits = pid != 0 && pid < 1 << PID_BITS && start_ticks < 1 << (64 - PID_BITS);
        fits.then_some(ProcessId((start_ticks << PID_BITS) | u64::from(pid)))
    }

    /// The packed form: never 0.
    pub(crate) fn to_word(self) -> u64 {
        self.0
    }

    /// The process of a packed form; `None` for 0.
    pub(crate) fn from_word(word: u64) -> Option<Self> {
        (word != 0).then_some(ProcessId(word))
    }
}

impl fmt::Debug for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.pid(), self.start_ticks())
    }
}

/// The pid namespace of this process: the inode number that the kernel gives it.
///
/// # Errors
///
/// [`Error::Os`] where `/proc` is not mounted.
pub(crate) fn pid_namespace() -> Result<u32> {
    let path = "/proc/self/ns/pid";
    let failed = |errno| Error::Os { op: "read", object: path.to_owned(), source: errno };
    let link = std::fs::read_link(path)
        .map_err(|error| failed(Errno::from_raw(error.raw_os_error().unwrap_or(0))))?;
    let text = link.to_string_lossy();
    let number = text.trim_start_matches("pid:[").trim_end_matches(']');
    number.parse().map_err(|_| failed(Errno::EINVAL))
}

fn proc_is_mounted() -> bool {
    std::path::Path::new("/proc/self/stat").exists()
}

struct Stat {
    alive: bool,
    start: u64,
}

/// Reads state, thread count and start time: fields 3, 20 and 22 of `/proc/<pid>/stat`. The second
/// field, the command, may itself hold blanks and parentheses, so fields count from its last `)`.
fn parse_stat(stat: &[u8]) -> Option<Stat> {
    let text = std::str::from_utf8(&stat[stat.iter().rposition(|&b| b == b')')? + 1..]).ok()?;
    let mut fields = text.split_ascii_whitespace();
    let state = fields.next()?;
    let threads: u64 = fields.nth(16)?.parse().ok()?;
    let start = fields.nth(1)?.parse().ok()?;
    // A leader that exited before its other threads shows as a zombie, but the process runs on.
    let dead = matches!(state, "Z" | "X") && threads <= 1;
    Some(Stat { alive: !dead, start })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(state: &str, threads: u32) -> Vec<u8> {
        format!("7 (a) b) {state} 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 {threads} 0 991 5 6").into()
    }

    #[test]
    fn stat_fields_count_from_the_last_parenthesis() {
        let parsed = parse_stat(&stat("S", 3)).unwrap();
        assert!(parsed.alive);
        assert_eq!(parsed.start, 991);
    }

    #[test]
    fn a_zombie_is_dead_unless_threads_remain() {
        assert!(!parse_stat(&stat("Z", 1)).unwrap().alive);
        assert!(parse_stat(&stat("Z", 2)).unwrap().alive);
        assert!(parse_stat(b"7 (cut off) S 1").is_none());
    }

    #[test]
    fn this_process_lives_and_an_earlier_one_of_its_pid_does_not() {
        let me = ProcessId::current().unwrap();
        assert_eq!(me.pid(), std::process::id());
        assert!(me.is_alive().unwrap());
        let earlier = ProcessId::new(me.pid(), me.start_ticks() - 1).unwrap();
        assert!(!earlier.is_alive().unwrap());
    }

    #[test]
    fn an_unreaped_child_counts_as_dead() {
        let mut child = std::process::Command::new("sleep").arg("30").spawn().unwrap();
        let id = ProcessId::of(child.id()).unwrap().unwrap();
        assert!(id.is_alive().unwrap());
        child.kill().unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while id.is_alive().unwrap() {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!id.is_alive().unwrap());
    }

    #[test]
    fn packing_keeps_both_numbers_and_refuses_what_does_not_fit() {
        let id = ProcessId::new((1 << 22) - 1, (1 << 42) - 1).unwrap();
        assert_eq!((id.pid(), id.start_ticks()), ((1 << 22) - 1, (1 << 42) - 1));
        assert!(ProcessId::new(1 << 22, 0).is_none());
        assert!(ProcessId::new(0, 1).is_none());
        assert!(ProcessId::new(1, 1 << 42).is_none());
    }
}
