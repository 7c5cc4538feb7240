//! Files, shared-memory names and memfds: open, size, reserve, link, unlink, seal.

use crate::steps::{Step, reach};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, FcntlArg, OFlag, SealFlag};
use nix::sys::memfd::MFdFlags;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::stat::{FileStat, Mode, SFlag};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

type Result<T> = std::result::Result<T, Errno>;

/// Read and write for the owner, nothing for others.
const MODE: Mode = Mode::S_IRUSR.union(Mode::S_IWUSR);

/// Which inode: what a name must still mean before it may be removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(crate) fn inode(self) -> u64 {
        self.inode
    }
}

/// What `fstat` says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileInfo {
    pub(crate) id: FileId,
    pub(crate) len: u64,
    /// Bytes backed by blocks.
    pub(crate) backed: u64,
    pub(crate) is_file: bool,
}

impl From<FileStat> for FileInfo {
    fn from(stat: FileStat) -> Self {
        FileInfo {
            id: FileId { device: stat.st_dev, inode: stat.st_ino },
            len: u64::try_from(stat.st_size).unwrap_or(0),
            backed: u64::try_from(stat.st_blocks).unwrap_or(0) * 512,
            is_file: SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFREG,
        }
    }
}

/// How a path is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OpenAs {
    ReadOnly,
    Existing,
    New,
}

/// Whether the last component of a path may be a symbolic link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Links {
    Follow,
    Refuse,
}

pub(crate) fn open(path: &Path, how: OpenAs, links: Links) -> Result<OwnedFd> {
    let mut flags = match how {
        OpenAs::ReadOnly => OFlag::O_RDONLY,
        OpenAs::Existing => OFlag::O_RDWR,
        OpenAs::New => OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL,
    };
    if links == Links::Refuse {
        flags |= OFlag::O_NOFOLLOW;
    }
    // Without O_NONBLOCK, opening a FIFO that someone put in the name's place would hang.
    flags |= OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
    reach(Step::Open)?;
    retry(|| nix::fcntl::open(path, flags, MODE))
}

/// A file without a name in `directory`, to be named by [`link`] once it is complete.
pub(crate) fn open_nameless(directory: &Path) -> Result<OwnedFd> {
    reach(Step::Open)?;
    let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
    retry(|| nix::fcntl::open(directory, flags, MODE))
}

/// Gives a nameless file its name; `EEXIST` if the name is taken.
pub(crate) fn link(fd: BorrowedFd<'_>, path: &Path) -> Result<()> {
    reach(Step::Link)?;
    let source = format!("/proc/self/fd/{}", fd.as_raw_fd());
    nix::unistd::linkat(AT_FDCWD, source.as_str(), AT_FDCWD, path, AtFlags::AT_SYMLINK_FOLLOW)
}

/// A memfd that can be sealed.
pub(crate) fn memfd(label: &str) -> Result<OwnedFd> {
    reach(Step::Open)?;
    nix::sys::memfd::memfd_create(label, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)
}

pub(crate) fn info(fd: BorrowedFd<'_>) -> Result<FileInfo> {
    reach(Step::Stat)?;
    Ok(nix::sys::stat::fstat(fd)?.into())
}

pub(crate) fn set_len(fd: BorrowedFd<'_>, len: u64) -> Result<()> {
    reach(Step::Size)?;
    truncate(fd, len)
}

/// Sets the length as part of undoing a failure: no step of its own.
pub(crate) fn truncate(fd: BorrowedFd<'_>, len: u64) -> Result<()> {
    let len = i64::try_from(len).map_err(|_| Errno::EFBIG)?;
    retry(|| nix::unistd::ftruncate(fd, len))
}

/// Sets the length of `path`, if it still names the file `id`, as part of undoing a failure.
pub(crate) fn truncate_if(path: &Path, id: FileId, len: u64) -> Result<()> {
    let fd = retry(|| nix::fcntl::open(path, OFlag::O_RDWR | OFlag::O_CLOEXEC, MODE))?;
    if FileInfo::from(nix::sys::stat::fstat(&fd)?).id == id {
        truncate(fd.as_fd(), len)
    } else {
        Ok(())
    }
}

/// Backs `len` bytes from `offset` on with blocks, so that touching them cannot fail later.
pub(crate) fn reserve(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<()> {
    reach(Step::Reserve)?;
    let offset = i64::try_from(offset).map_err(|_| Errno::EFBIG)?;
    let len = i64::try_from(len).map_err(|_| Errno::EFBIG)?;
    retry(|| nix::fcntl::posix_fallocate(fd, offset, len))
}

/// Opens what `fd` stands for once more, for reading only.
pub(crate) fn reopen_read_only(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    reach(Step::Open)?;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    retry(|| nix::fcntl::open(path.as_str(), OFlag::O_RDONLY | OFlag::O_CLOEXEC, MODE))
}

pub(crate) fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    reach(Step::Duplicate)?;
    fd.try_clone_to_owned().map_err(errno)
}

/// Removes `path` if it still names the file `id`. A name that is gone, or names something newer,
/// is left alone: that is success.
pub(crate) fn unlink_if(path: &Path, id: FileId) -> Result<()> {
    reach(Step::Unlink)?;
    remove_if(path, id)
}

/// [`unlink_if`] as part of undoing a failure: no step of its own.
pub(crate) fn remove_if(path: &Path, id: FileId) -> Result<()> {
    match nix::sys::stat::lstat(path) {
        Ok(stat) if FileInfo::from(stat).id == id => remove(path),
        Ok(_) | Err(Errno::ENOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Removes `path`; a name that is gone is success.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match nix::unistd::unlink(path) {
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

pub(crate) fn add_seals(fd: BorrowedFd<'_>, seals: SealFlag) -> Result<()> {
    reach(Step::Seal)?;
    nix::fcntl::fcntl(fd, FcntlArg::F_ADD_SEALS(seals)).map(drop)
}

/// The seals of a memfd; none for a file that cannot be sealed.
pub(crate) fn seals(fd: BorrowedFd<'_>) -> Result<SealFlag> {
    match nix::fcntl::fcntl(fd, FcntlArg::F_GET_SEALS) {
        Ok(bits) => Ok(SealFlag::from_bits_truncate(bits)),
        Err(Errno::EINVAL) => Ok(SealFlag::empty()),
        Err(error) => Err(error),
    }
}

/// The soft limit on this process's descriptors.
pub(crate) fn descriptor_limit() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft)
}

/// Bytes that an unprivileged process may still take on the file system of `fd`.
pub(crate) fn free_bytes(fd: BorrowedFd<'_>) -> Result<u64> {
    let stat = nix::sys::statvfs::fstatvfs(fd.as_fd())?;
    Ok(stat.blocks_available().saturating_mul(stat.fragment_size()))
}

fn retry<T>(mut call: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            result => return result,
        }
    }
}

pub(crate) fn errno(error: std::io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(0))
}
