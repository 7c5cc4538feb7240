//! Options whose types admit only what has a meaning.

use crate::error::Result;
use crate::map::plan::{Create, Plan, Source};
use crate::map::{Access, CopyOnWrite, Map, ReadOnly, ReadWrite};
use crate::name::{Name, ShmDir};
use std::fmt;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// A file with a path.
#[derive(Debug)]
pub enum File {}
/// A name of shared memory.
#[derive(Debug)]
pub enum Named {}
/// A name of shared memory that nobody has had before.
#[derive(Debug)]
pub enum Unique {}
/// A descriptor that came from elsewhere.
#[derive(Debug)]
pub enum Descriptor {}
/// Memory without a name.
#[derive(Debug)]
pub enum Memfd {}

/// What to map. `S` is where the bytes come from, `A` what may be done with them, and `D` whether
/// the descriptor is kept.
///
/// The steps are always taken in this order: open, size, reserve blocks, map, close, unlink,
/// advise. If one fails, the earlier ones are undone.
///
/// | | file | name | descriptor | memfd |
/// |--|--|--|--|--|
/// | may be created | [`create`](Self::create), by default if missing | the same | no | always |
/// | shorter than asked for | grows, unless it may not be created | the same | an error | – |
/// | ... with [`may_grow`](Self::may_grow) | grows | grows | grows | – |
/// | read only, copy on write | never grows | never grows | never grows | – |
/// | longer than asked for | the range is mapped, the rest stays | the same | the same | – |
/// | no length given | all from the offset on | the same | the same | empty |
/// | removed with the map | no | if this map created it | – | – |
///
/// Lengths and offsets are in bytes and need no alignment. A range of no bytes is an empty map:
/// the object is opened, created and sized as usual, and nothing is mapped.
///
/// Where blocks of a writable map are missing they are reserved before mapping, so that a full
/// file system is [`Error::NoSpace`](crate::Error::NoSpace) here and not a signal later.
///
/// ```
/// use alloc_shm::{MapOptions, ShmDir};
///
/// let map = MapOptions::unique(&ShmDir::system())
///     .len(4096)
///     .keep_descriptor()
///     .unlink_at_once()
///     .map()?;
/// map.write_at(10, b"seen by everyone who gets the descriptor")?;
/// # Ok::<(), alloc_shm::Error>(())
/// ```
///
/// Combinations without a meaning do not compile:
///
/// ```compile_fail
/// # use alloc_shm::MapOptions;
/// # fn f(fd: std::os::fd::OwnedFd) {
/// MapOptions::descriptor(fd).unlink_at_once(); // a descriptor has no name
/// # }
/// ```
/// ```compile_fail
/// # use alloc_shm::MapOptions;
/// MapOptions::file_read_only("data").may_grow(); // what is only read never grows
/// ```
#[must_use = "nothing is mapped before `map`"]
pub struct MapOptions<S, A: Access, D = ()> {
    plan: Plan,
    types: PhantomData<(S, A, D)>,
}

impl<S, A: Access> MapOptions<S, A> {
    fn new(source: Source, create: Create) -> Self {
        let plan = Plan {
            source,
            protection: A::PROTECTION,
            create,
            len: None,
            offset: 0,
            may_grow: false,
            reserve: true,
            keep: false,
            unlink: false,
            sequential: false,
        };
        MapOptions { plan, types: PhantomData }
    }
}

impl MapOptions<File, ReadWrite> {
    /// A file, shared for reading and writing, created if missing.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self::new(Source::File(path.into()), Create::IfMissing)
    }

    /// Leaves holes in the file unreserved: touching one on a full file system is a signal.
    pub fn sparse(mut self) -> Self {
        self.plan.reserve = false;
        self
    }
}

impl MapOptions<File, ReadOnly> {
    /// An existing file, shared for reading.
    pub fn file_read_only(path: impl Into<PathBuf>) -> Self {
        Self::new(Source::File(path.into()), Create::Never)
    }
}

impl MapOptions<File, CopyOnWrite> {
    /// An existing file of which this process gets its own copy, page by page as it writes.
    pub fn file_private(path: impl Into<PathBuf>) -> Self {
        Self::new(Source::File(path.into()), Create::Never)
    }
}

impl MapOptions<Named, ReadWrite> {
    /// Shared memory of that name, for reading and writing, created if missing.
    pub fn shared_memory(dir: &ShmDir, name: &Name) -> Self {
        Self::new(Source::Named(dir.path_of(name)), Create::IfMissing)
    }
}

impl MapOptions<Unique, ReadWrite> {
    /// New shared memory under a name that nobody else has.
    pub fn unique(dir: &ShmDir) -> Self {
        Self::new(Source::Unique(dir.clone()), Create::Exclusive)
    }
}

impl MapOptions<Named, ReadOnly> {
    /// Existing shared memory of that name, for reading.
    pub fn shared_memory_read_only(dir: &ShmDir, name: &Name) -> Self {
        Self::new(Source::Named(dir.path_of(name)), Create::Never)
    }
}

impl MapOptions<Descriptor, ReadWrite> {
    /// What the descriptor stands for, shared for reading and writing. The descriptor's file offset
    /// is neither used nor changed.
    pub fn descriptor(fd: OwnedFd) -> Self {
        Self::new(Source::Descriptor(fd), Create::Never)
    }
}

impl MapOptions<Descriptor, ReadOnly> {
    /// What the descriptor stands for, shared for reading.
    pub fn descriptor_read_only(fd: OwnedFd) -> Self {
        Self::new(Source::Descriptor(fd), Create::Never)
    }
}

impl MapOptions<Descriptor, CopyOnWrite> {
    /// A copy, page by page as it is written, of what the descriptor stands for.
    pub fn descriptor_private(fd: OwnedFd) -> Self {
        Self::new(Source::Descriptor(fd), Create::Never)
    }
}

impl MapOptions<Memfd, ReadWrite> {
    /// New memory without a name. The label shows in `/proc/<pid>/maps` and need not be unique.
    pub fn memfd(label: impl Into<String>) -> Self {
        Self::new(Source::Memfd(label.into()), Create::Exclusive)
    }
}

/// A source with a name.
pub trait HasName {}
impl HasName for File {}
impl HasName for Named {}
impl HasName for Unique {}

/// A source that may exist already.
pub trait MayExist {}
impl MayExist for File {}
impl MayExist for Named {}
impl MayExist for Descriptor {}

impl<S: HasName, D> MapOptions<S, ReadWrite, D> {
    /// Removes the name right after mapping. The bytes live on as long as anyone maps them or has a
    /// descriptor.
    pub fn unlink_at_once(mut self) -> Self {
        self.plan.unlink = true;
        self
    }
}

impl<S: HasName + MayExist, D> MapOptions<S, ReadWrite, D> {
    /// Whether the name may, must or must not be new.
    pub fn create(mut self, create: Create) -> Self {
        self.plan.create = create;
        self
    }
}

impl<S: MayExist, D> MapOptions<S, ReadWrite, D> {
    /// Lets an object that exists already be made longer, for everyone who has it.
    pub fn may_grow(mut self) -> Self {
        self.plan.may_grow = true;
        self
    }
}

impl<S, A: Access> MapOptions<S, A> {
    /// Keeps the descriptor in the map, so that it can be sent to other processes.
    pub fn keep_descriptor(mut self) -> MapOptions<S, A, OwnedFd> {
        self.plan.keep = true;
        MapOptions { plan: self.plan, types: PhantomData }
    }

    /// Maps, and closes the descriptor.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`](crate::Error::NoSpace), [`Error::TooShort`](crate::Error::TooShort),
    /// [`Error::Exists`](crate::Error::Exists), [`Error::NotFound`](crate::Error::NotFound),
    /// [`Error::Range`](crate::Error::Range), [`Error::NoDescriptor`](crate::Error::NoDescriptor),
    /// [`Error::Mapping`](crate::Error::Mapping) or [`Error::Os`](crate::Error::Os), each with
    /// everything undone.
    pub fn map(self) -> Result<Map<A>> {
        Ok(Map::new(self.plan.carry_out()?, ()))
    }
}

impl<S, A: Access> MapOptions<S, A, OwnedFd> {
    /// Maps, and keeps the descriptor.
    ///
    /// # Errors
    ///
    /// As for the map without a descriptor.
    pub fn map(self) -> Result<Map<A, OwnedFd>> {
        let mut mapped = self.plan.carry_out()?;
        // The plan keeps it, since `keep_descriptor` is the only way to this type.
        let fd = mapped.fd.take().expect("kept");
        Ok(Map::new(mapped, fd))
    }
}

impl<S, A: Access, D> MapOptions<S, A, D> {
    /// Bytes to map. Without this, all that the object has from the offset on.
    pub fn len(mut self, bytes: u64) -> Self {
        self.plan.len = Some(bytes);
        self
    }

    /// Where in the object the map begins, in bytes.
    pub fn offset(mut self, bytes: u64) -> Self {
        self.plan.offset = bytes;
        self
    }

    /// Tells the kernel that the bytes will be read from front to back.
    pub fn sequential(mut self) -> Self {
        self.plan.sequential = true;
        self
    }
}

impl<S, A: Access, D> fmt::Debug for MapOptions<S, A, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MapOptions").field(&self.plan).finish()
    }
}
