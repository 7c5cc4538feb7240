//! Which mount a file lies on, and how much it has left: for errors that help.

use crate::error::Error;
use crate::os::file;
use nix::errno::Errno;
use std::os::fd::BorrowedFd;
use std::path::Path;

/// The error for a reservation that failed: full mounts become [`Error::NoSpace`].
///
/// `path` is `None` for a memfd, which only the machine's memory limits.
pub(crate) fn reserve_failed(
    object: &str,
    wanted: u64,
    fd: BorrowedFd<'_>,
    path: Option<&Path>,
    errno: Errno,
) -> Error {
    if !matches!(errno, Errno::ENOSPC | Errno::ENOMEM | Errno::EDQUOT) {
        return Error::os("reserve blocks of", object, errno);
    }
    let object = object.to_owned();
    let (free, mount) = match path {
        Some(path) => (file::free_bytes(fd).unwrap_or(0), mount_of(path)),
        None => (memory_available(), "the machine's memory".to_owned()),
    };
    Error::NoSpace { object, wanted, free, mount }
}

/// The mount point that `path` lies under, or its directory where mounts cannot be read.
fn mount_of(path: &Path) -> String {
    let directory = path.parent().unwrap_or(path);
    let directory = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
    // A thread may have a mount namespace of its own.
    let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap_or_default();
    longest_mount(&mounts, &directory).unwrap_or_else(|| directory.display().to_string())
}

/// Of the mount points that contain `directory` the longest, and of equal ones the last mounted.
fn longest_mount(mountinfo: &str, directory: &Path) -> Option<String> {
    mountinfo
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(unescape)
        .filter(|mount| directory.starts_with(mount))
        .max_by_key(String::len)
}

/// Undoes the kernel's `\040` for blanks, `\134` for backslashes and so on.
fn unescape(field: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = field.as_bytes();
    while let [first, tail @ ..] = rest {
        let code = tail.get(..3).and_then(|code| std::str::from_utf8(code).ok());
        match code.and_then(|code| u8::from_str_radix(code, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// `MemAvailable`, in bytes; 0 where `/proc` does not tell.
fn memory_available() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 1 254:0 / / rw - ext4 /dev/vda rw
24 22 0:20 / /dev rw - devtmpfs none rw
25 24 0:21 / /dev/shm rw - tmpfs tmpfs rw
26 22 0:22 / /mnt/a\\040b rw - tmpfs tmpfs rw
";

    #[test]
    fn the_longest_mount_wins_and_components_are_whole() {
        let mount = |path: &str| longest_mount(MOUNTS, Path::new(path)).unwrap();
        assert_eq!(mount("/dev/shm"), "/dev/shm");
        assert_eq!(mount("/dev/shmx"), "/dev");
        assert_eq!(mount("/home"), "/");
        assert_eq!(mount("/mnt/a b/c"), "/mnt/a b");
    }

    #[test]
    fn escapes_are_undone_and_stray_backslashes_kept() {
        assert_eq!(unescape("a\\134b\\"), "a\\b\\");
        assert_eq!(unescape("\\9990"), "\\9990");
    }

    #[test]
    fn available_memory_is_known() {
        assert!(memory_available() > 0);
    }
}
