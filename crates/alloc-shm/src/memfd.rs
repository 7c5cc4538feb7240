//! Bytes that nobody can change any more: a memfd under seal.
#![allow(unsafe_code, reason = "lends bytes whose writers the kernel has locked out")]

use crate::error::{Error, Refusal, Result};
use crate::map::{Map, MapOptions, ReadWrite};
use crate::os::file;
use crate::os::region::{Protection, Region};
use nix::fcntl::SealFlag;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Neither shorter nor longer, by anyone: then no access within the length can be a `SIGBUS`.
const SIZE: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW);

/// Nothing may change any more, not even the seals.
const FROZEN: SealFlag = SIZE.union(SealFlag::F_SEAL_WRITE).union(SealFlag::F_SEAL_SEAL);

/// Only mappings that exist already may write.
const PUBLISHED: SealFlag = SIZE.union(SealFlag::F_SEAL_FUTURE_WRITE).union(SealFlag::F_SEAL_SEAL);

/// A memfd that this process still writes and nobody else has: to become a [`Frozen`].
///
/// ```
/// use alloc_shm::Draft;
///
/// let mut draft = Draft::new(1024)?;
/// draft.fill(7);
/// let frozen = draft.freeze()?;
/// assert!(frozen.iter().all(|&byte| byte == 7));
/// # Ok::<(), alloc_shm::Error>(())
/// ```
#[derive(Debug)]
pub struct Draft {
    map: Map<ReadWrite, OwnedFd>,
}

impl Draft {
    /// `len` bytes of zeroes, backed by blocks.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`], [`Error::NoDescriptor`], [`Error::Mapping`].
    pub fn new(len: u64) -> Result<Self> {
        Ok(Draft { map: MapOptions::memfd("frozen").len(len).keep_descriptor().map()? })
    }

    /// Seals the bytes for good.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] or [`Error::NoDescriptor`]; the bytes are lost then.
    pub fn freeze(self) -> Result<Frozen> {
        let object = self.map.object().to_owned();
        let failed = |op| move |errno| Error::os(op, "a draft", errno);
        let (region, fd) = self.map.into_region();
        let len = region.len();
        // The seal is refused while a writable mapping exists.
        drop(region);
        file::add_seals(fd.as_fd(), FROZEN).map_err(failed("seal"))?;
        // Kernels before 6.7 share a write-sealed memfd only through a read-only descriptor.
        let fd = file::reopen_read_only(fd.as_fd()).map_err(failed("reopen"))?;
        Frozen::map(fd, 0, len, object)
    }
}

impl Deref for Draft {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the memfd and its only mapping are this draft's alone until it is frozen, so
        // nobody else writes; `&self` keeps this process from writing.
        unsafe { self.map.as_slice() }
    }
}

impl DerefMut for Draft {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only reference.
        unsafe { self.map.as_mut_slice() }
    }
}

/// Bytes in a memfd that the kernel lets nobody write, shorten or lengthen.
///
/// Cheap to clone. Can be sent to other processes any number of times, one descriptor in each.
#[derive(Clone, Debug)]
pub struct Frozen(Arc<FrozenInner>);

#[derive(Debug)]
struct FrozenInner {
    region: Region,
    offset: u64,
    fd: OwnedFd,
}

impl Frozen {
    fn map(fd: OwnedFd, offset: u64, len: u64, object: String) -> Result<Self> {
        let region = Region::map(fd.as_fd(), Protection::SharedRead, offset, len)
            .map_err(|source| Error::Mapping { object, bytes: len, source })?;
        Ok(Frozen(Arc::new(FrozenInner { region, offset, fd })))
    }

    /// Maps a range of a received descriptor, after checking that it is what it must be.
    pub(crate) fn receive(fd: OwnedFd, offset: u64, len: u64) -> Result<Self> {
        require(fd.as_fd(), FROZEN, offset, len)?;
        Self::map(fd, offset, len, "a received frozen memfd".to_owned())
    }

    /// Where in the memfd the bytes begin.
    pub(crate) fn offset(&self) -> u64 {
        self.0.offset
    }
}

impl Deref for Frozen {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: every `Frozen` is made after the seals against writing and shortening were set or
        // checked; seals are never taken off.
        let bytes = unsafe { self.0.region.bytes(0, self.0.region.len()) };
        bytes.unwrap_or_default()
    }
}

impl AsFd for Frozen {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

/// Lets only the mappings that exist write from now on, and nobody change the size. Answers with a
/// descriptor that may be sent.
pub(crate) fn publish(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    file::add_seals(fd, PUBLISHED).map_err(|errno| Error::os("seal", "an arena", errno))?;
    file::reopen_read_only(fd).map_err(|errno| Error::os("reopen", "an arena", errno))
}

/// Refuses a descriptor that is not published as [`publish`] does it, or is shorter than `len`.
pub(crate) fn require_published(fd: BorrowedFd<'_>, len: u64) -> Result<()> {
    require(fd, PUBLISHED, 0, len)
}

/// Refuses a descriptor that is not frozen, or is shorter than `len`.
pub(crate) fn require_frozen(fd: BorrowedFd<'_>, len: u64) -> Result<()> {
    require(fd, FROZEN, 0, len)
}

fn require(fd: BorrowedFd<'_>, seals: SealFlag, offset: u64, len: u64) -> Result<()> {
    let failed = |op| move |errno| Error::os(op, "a received descriptor", errno);
    if !file::seals(fd).map_err(failed("read the seals of"))?.contains(seals) {
        return Err(Refusal::Unsealed.into());
    }
    require_len(fd, offset, len)
}

/// Refuses an object that does not have all of the range, or not the blocks behind it.
pub(crate) fn require_len(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<()> {
    let info = file::info(fd).map_err(|errno| Error::os("stat", "a received descriptor", errno))?;
    let claimed = offset.checked_add(len).ok_or(Refusal::Field("offset and length overflow"))?;
    let actual = if info.is_file { info.len.min(info.backed) } else { 0 };
    if claimed > actual {
        return Err(Refusal::Unbacked { actual, claimed }.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::errno::Errno;

    #[test]
    fn a_frozen_memfd_can_be_neither_written_nor_resized_nor_unsealed() {
        let mut draft = Draft::new(5000).unwrap();
        draft[4999] = 9;
        let frozen = draft.freeze().unwrap();
        assert_eq!((frozen.len(), frozen[4999]), (5000, 9));

        let fd = nix::fcntl::open(
            format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&frozen.as_fd())).as_str(),
            nix::fcntl::OFlag::O_RDWR,
            nix::sys::stat::Mode::empty(),
        )
        .unwrap();
        assert_eq!(nix::unistd::write(&fd, b"x"), Err(Errno::EPERM));
        assert_eq!(nix::unistd::ftruncate(&fd, 0), Err(Errno::EPERM));
        assert_eq!(file::add_seals(fd.as_fd(), SealFlag::F_SEAL_FUTURE_WRITE), Err(Errno::EPERM));
        assert!(MapOptions::descriptor(fd).map().is_err(), "no writable mapping");
        assert_eq!(frozen[4999], 9);
    }

    #[test]
    fn an_empty_draft_freezes() {
        let frozen = Draft::new(0).unwrap().freeze().unwrap();
        assert!(frozen.is_empty());
    }

    #[test]
    fn descriptors_without_seals_or_blocks_are_refused() {
        let plain = MapOptions::memfd("plain").len(4096).keep_descriptor().map().unwrap();
        let refused = Frozen::receive(plain.duplicate().unwrap(), 0, 4096);
        assert!(matches!(refused, Err(Error::Refused(Refusal::Unsealed))), "{refused:?}");

        let frozen = Draft::new(4096).unwrap().freeze().unwrap();
        let copy = frozen.as_fd().try_clone_to_owned().unwrap();
        let refused = Frozen::receive(copy, 4096, 1);
        let expected = Refusal::Unbacked { actual: 4096, claimed: 4097 };
        assert!(matches!(refused, Err(Error::Refused(r)) if r == expected), "{refused:?}");

        let holes = file::memfd("holes").unwrap();
        file::set_len(holes.as_fd(), 8192).unwrap();
        file::add_seals(holes.as_fd(), FROZEN).unwrap();
        let refused = Frozen::receive(holes, 0, 8192);
        let expected = Refusal::Unbacked { actual: 0, claimed: 8192 };
        assert!(matches!(refused, Err(Error::Refused(r)) if r == expected), "{refused:?}");
    }
}
