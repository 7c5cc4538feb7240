//! Maps of files, shared memory, descriptors and memfds.
//!
//! [`MapOptions`] says what to map; its types admit only combinations that mean something.
//! [`Flags`] does the same from PyTorch's `MapAllocator` bits, with errors in place of types.

mod flags;
mod options;
pub(crate) mod plan;

pub use flags::{FlagMap, FlagTarget, Flags};
pub use options::{Descriptor, File, HasName, MapOptions, MayExist, Memfd, Named, Unique};
pub use plan::Create;

use crate::error::{Error, Result};
use crate::os::file::{self, FileId};
use crate::os::region::Region;
use plan::{Mapped, OwnedName};
use std::fmt;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// What a map lets this process do: [`ReadOnly`], [`ReadWrite`] or [`CopyOnWrite`].
pub trait Access: sealed::Access {}

/// An access that includes writing.
pub trait Writable: Access {}

/// Others' writes are seen; there are none of one's own.
#[derive(Debug)]
pub enum ReadOnly {}

/// Writes are shared with everyone who maps the same object.
#[derive(Debug)]
pub enum ReadWrite {}

/// Writes stay in this process; the file behind never changes.
#[derive(Debug)]
pub enum CopyOnWrite {}

impl Access for ReadOnly {}
impl Access for ReadWrite {}
impl Access for CopyOnWrite {}
impl Writable for ReadWrite {}
impl Writable for CopyOnWrite {}

mod sealed {
    use crate::os::region::Protection;

    pub trait Access {
        #[doc(hidden)]
        const PROTECTION: Protection;
    }

    impl Access for super::ReadOnly {
        const PROTECTION: Protection = Protection::SharedRead;
    }
    impl Access for super::ReadWrite {
        const PROTECTION: Protection = Protection::SharedWrite;
    }
    impl Access for super::CopyOnWrite {
        const PROTECTION: Protection = Protection::CopyOnWrite;
    }
}

/// A mapped range, with (`D = OwnedFd`) or without (`D = ()`) the descriptor behind it.
///
/// Dropping it unmaps the range, closes the descriptor, and removes the name if this map created a
/// name of shared memory. Files stay. None of that can panic, and a name that has meanwhile come to
/// mean something else is left alone.
///
/// Other processes may write the same bytes at any time, so there is no safe way to borrow them:
/// [`read_at`](Map::read_at) and [`write_at`](Map::write_at) copy, and a copy that meets a writer
/// is torn but harmless. Bytes that nobody can write any more are a [`Frozen`](crate::Frozen).
pub struct Map<A: Access, D = ()> {
    // In the order of release.
    region: Region,
    descriptor: D,
    name: Option<OwnedName>,
    object: String,
    id: FileId,
    offset: u64,
    access: PhantomData<fn() -> A>,
}

impl<A: Access, D> Map<A, D> {
    fn new(mapped: Mapped, descriptor: D) -> Self {
        let Mapped { region, name, object, id, offset, .. } = mapped;
        Map { region, descriptor, name, object, id, offset, access: PhantomData }
    }

    /// Bytes mapped.
    pub fn len(&self) -> u64 {
        self.region.len()
    }

    /// Whether no byte is mapped.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where in the object the map begins, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// What is mapped, for messages.
    pub fn object(&self) -> &str {
        &self.object
    }

    /// The first byte. Valid for [`len`](Map::len) bytes while the map lives.
    pub fn as_ptr(&self) -> *const u8 {
        self.region.base()
    }

    /// Copies bytes from `offset` on into `to`.
    ///
    /// # Errors
    ///
    /// [`Error::Range`] if they are not all in the map; then nothing is copied.
    pub fn read_at(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.region.read_at(offset, to)
    }

    /// All bytes, copied.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len() as usize];
        let all = self.region.read_at(0, &mut bytes);
        debug_assert!(all.is_ok(), "a region holds its own length");
        bytes
    }

    /// The bytes themselves.
    ///
    /// # Safety
    ///
    /// While the slice lives, nobody writes these bytes (through this map, another map of the same
    /// object in this or another process, or the file), and nobody shortens the object.
    #[allow(unsafe_code, reason = "the caller takes over what the kernel cannot promise")]
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: the caller keeps writers away; the range is the whole region.
        let bytes = unsafe { self.region.bytes(0, self.len()) };
        bytes.unwrap_or_default()
    }
}

impl<A: Writable, D> Map<A, D> {
    /// Copies `from` into the map at `offset`.
    ///
    /// # Errors
    ///
    /// [`Error::Range`] if it does not fit; then nothing is copied.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.region.write_at(offset, from)
    }

    /// The bytes themselves, for writing.
    ///
    /// # Safety
    ///
    /// While the slice lives, nobody else reads or writes these bytes, and nobody shortens the
    /// object.
    #[allow(unsafe_code, reason = "the caller takes over what the kernel cannot promise")]
    pub unsafe fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the caller keeps everyone else away; the range is the whole, writable region.
        let bytes = unsafe { self.region.bytes_mut(0, self.region.len()) };
        bytes.unwrap_or_default()
    }
}

impl<A: Access, D> Map<A, D> {
    /// The path of the name that this map created and will remove.
    pub fn owned_name(&self) -> Option<&Path> {
        self.name.as_ref().map(OwnedName::path)
    }

    /// Leaves the created name behind for others to remove, when this map is dropped.
    pub fn leave_name(&mut self) {
        if let Some(name) = self.name.take() {
            name.leave();
        }
    }
}

impl<A: Access> Map<A, OwnedFd> {
    /// A second descriptor of the same object, to give away.
    ///
    /// # Errors
    ///
    /// [`Error::NoDescriptor`] at the limit.
    pub fn duplicate(&self) -> Result<OwnedFd> {
        file::duplicate(self.as_fd()).map_err(|errno| Error::os("duplicate", &self.object, errno))
    }

    /// Closes the descriptor and keeps the bytes.
    pub fn close_descriptor(self) -> Map<A> {
        let Map { region, name, object, id, offset, access, .. } = self;
        Map { region, descriptor: (), name, object, id, offset, access }
    }

    pub(crate) fn into_region(self) -> (Region, OwnedFd) {
        (self.region, self.descriptor)
    }
}

impl<A: Access> AsFd for Map<A, OwnedFd> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl<A: Access, D: fmt::Debug> fmt::Debug for Map<A, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Map")
            .field("object", &self.object)
            .field("len", &self.len())
            .field("descriptor", &self.descriptor)
            .field("name", &self.name)
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
