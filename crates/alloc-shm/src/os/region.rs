//! Mapped bytes. All pointer arithmetic on mappings is here.
#![allow(unsafe_code, reason = "maps memory and copies through raw pointers into it")]

use crate::error::Error;
use crate::os::file::errno;
use crate::steps::{Step, reach};
use memmap2::{Advice, MmapOptions, MmapRaw};
use nix::errno::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// How bytes are mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Protection {
    /// Shared, read only.
    SharedRead,
    /// Shared, for reading and writing.
    SharedWrite,
    /// Writes stay in this process and never reach the file.
    CopyOnWrite,
}

/// A mapping of a range of a file, or nothing at all for a range of 0 bytes. Unmapped on drop.
#[derive(Debug)]
pub(crate) struct Region {
    map: Option<MmapRaw>,
    len: u64,
    writable: bool,
}

impl Region {
    /// Maps `len` bytes from `offset` on. Any offset will do: pages are aligned underneath.
    pub(crate) fn map(
        fd: BorrowedFd<'_>,
        protection: Protection,
        offset: u64,
        len: u64,
    ) -> Result<Self, Errno> {
        reach(Step::Map)?;
        let writable = protection != Protection::SharedRead;
        if len == 0 {
            return Ok(Region { map: None, len, writable });
        }
        let mut options = MmapOptions::new();
        options.offset(offset).len(usize::try_from(len).map_err(|_| Errno::ENOMEM)?);
        let file = fd.as_raw_fd();
        let map = match protection {
            Protection::SharedRead => options.map_raw_read_only(file),
            Protection::SharedWrite => options.map_raw(file),
            Protection::CopyOnWrite => {
                // SAFETY: the requirement is that nobody alters the bytes behind a reference. No
                // reference is made of this map here: it becomes a raw map at once.
                unsafe { options.map_copy(file) }.map(MmapRaw::from)
            }
        };
        map.map(|map| Region { map: Some(map), len, writable }).map_err(errno)
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The first byte; a well-aligned dangling pointer for an empty region.
    pub(crate) fn base(&self) -> *mut u8 {
        match &self.map {
            Some(map) => map.as_mut_ptr(),
            None => std::ptr::NonNull::<u64>::dangling().as_ptr().cast(),
        }
    }

    /// Tells the kernel that the bytes will be read from front to back.
    pub(crate) fn advise_sequential(&self) -> Result<(), Errno> {
        reach(Step::Advise)?;
        match &self.map {
            Some(map) => map.advise(Advice::Sequential).map_err(errno),
            None => Ok(()),
        }
    }

    /// A pointer to `len` bytes at `offset`, or the error that they are not all here.
    pub(crate) fn range(&self, offset: u64, len: u64) -> Result<*mut u8, Error> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => {
                // SAFETY: `offset` is at most the region's length, which is mapped in one piece
                // (or is 0, and then so is `offset`).
                Ok(unsafe { self.base().add(offset as usize) })
            }
            _ => Err(Error::Range { offset, len, size: self.len }),
        }
    }

    /// The word at `offset`, which other processes may load and store too. `None` if it is not
    /// whole and aligned within a writable region.
    pub(crate) fn word(&self, offset: u64) -> Option<&AtomicU64> {
        let at = self.range(offset, 8).ok().filter(|_| self.writable)?.cast::<u64>();
        if !at.is_aligned() {
            return None;
        }
        // SAFETY: `at` is aligned, points to 8 mapped and writable bytes, and they stay mapped as
        // long as the region that the result borrows. Every access in this crate is atomic.
        Some(unsafe { AtomicU64::from_ptr(at) })
    }

    /// Loads the word at `offset` (also of a read-only region).
    pub(crate) fn load(&self, offset: u64) -> Option<u64> {
        let at = self.range(offset, 8).ok()?.cast::<u64>();
        if !at.is_aligned() {
            return None;
        }
        // SAFETY: aligned, mapped, readable, and alive while the region is; only loaded.
        let word = unsafe { AtomicU64::from_ptr(at) };
        Some(word.load(Ordering::Acquire))
    }

    /// Copies bytes out. Another process may be writing them: then they are torn, not undefined.
    pub(crate) fn read_at(&self, offset: u64, to: &mut [u8]) -> Result<(), Error> {
        let from = self.range(offset, to.len() as u64)?;
        let head = from.align_offset(8).min(to.len());
        let words = (to.len() - head) / 8;
        for (i, byte) in to.iter_mut().enumerate().take(head) {
            *byte = load_byte(from, i);
        }
        for (w, eight) in to[head..head + words * 8].chunks_exact_mut(8).enumerate() {
            eight.copy_from_slice(&load_word(from, head + w * 8).to_ne_bytes());
        }
        for (i, byte) in to.iter_mut().enumerate().skip(head + words * 8) {
            *byte = load_byte(from, i);
        }
        Ok(())
    }

    /// Copies bytes in. Another process may be reading them: then it sees them torn.
    ///
    /// The region must be writable, which the public types guarantee.
    pub(crate) fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), Error> {
        assert!(self.writable, "write to a read-only region");
        let to = self.range(offset, from.len() as u64)?;
        let head = to.align_offset(8).min(from.len());
        let words = (from.len() - head) / 8;
        for (i, &byte) in from.iter().enumerate().take(head) {
            store_byte(to, i, byte);
        }
        for (w, eight) in from[head..head + words * 8].chunks_exact(8).enumerate() {
            let mut word = [0; 8];
            word.copy_from_slice(eight);
            store_word(to, head + w * 8, u64::from_ne_bytes(word));
        }
        for (i, &byte) in from.iter().enumerate().skip(head + words * 8) {
            store_byte(to, i, byte);
        }
        Ok(())
    }

    /// The bytes at `offset`.
    ///
    /// # Safety
    ///
    /// Nobody, in this or another process, writes them while the reference lives.
    pub(crate) unsafe fn bytes(&self, offset: u64, len: u64) -> Result<&[u8], Error> {
        let start = self.range(offset, len)?;
        // SAFETY: mapped for `len` bytes while the region is borrowed; initialised, as file pages
        // always are; the caller keeps writers away.
        Ok(unsafe { std::slice::from_raw_parts(start, len as usize) })
    }

    /// The bytes at `offset`, for writing.
    ///
    /// # Safety
    ///
    /// Nobody else, in this or another process, reads or writes them while the reference lives, and
    /// the region is writable.
    #[expect(clippy::mut_from_ref, reason = "the caller vouches for exclusive use of the range")]
    pub(crate) unsafe fn bytes_mut(&self, offset: u64, len: u64) -> Result<&mut [u8], Error> {
        let start = self.range(offset, len)?;
        // SAFETY: mapped writable for `len` bytes while the region is borrowed, initialised, and
        // the caller has them to itself.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, len as usize) })
    }
}

// The copies above and these four are the only plain accesses to shared bytes. Callers have checked
// that the whole range is mapped, and that words are aligned.

fn load_byte(base: *mut u8, at: usize) -> u8 {
    // SAFETY: within the checked range.
    let byte = unsafe { base.add(at) };
    // SAFETY: mapped and readable for as long as the region that is borrowed by the caller.
    unsafe { AtomicU8::from_ptr(byte) }.load(Ordering::Relaxed)
}

fn load_word(base: *mut u8, at: usize) -> u64 {
    // SAFETY: within the checked range.
    let word = unsafe { base.add(at) };
    // SAFETY: aligned by the caller, mapped and readable while the region is borrowed.
    unsafe { AtomicU64::from_ptr(word.cast()) }.load(Ordering::Relaxed)
}

fn store_byte(base: *mut u8, at: usize, byte: u8) {
    // SAFETY: within the checked range.
    let to = unsafe { base.add(at) };
    // SAFETY: mapped and writable for as long as the region that is borrowed by the caller.
    unsafe { AtomicU8::from_ptr(to) }.store(byte, Ordering::Relaxed);
}

fn store_word(base: *mut u8, at: usize, word: u64) {
    // SAFETY: within the checked range.
    let to = unsafe { base.add(at) };
    // SAFETY: aligned by the caller, mapped and writable while the region is borrowed.
    unsafe { AtomicU64::from_ptr(to.cast()) }.store(word, Ordering::Relaxed);
}
