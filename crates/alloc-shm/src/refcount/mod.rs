//! Reference-counted maps: shared memory by name whose last holder removes the name.

mod header;

use crate::error::{Error, Result};
use crate::map::{Create, Flags};
use crate::name::{Name, NameKind, ShmDir};
use crate::os::file::{self, FileId, Links, OpenAs};
use crate::os::region::{Protection, Region};
use crate::process::ProcessId;
use crate::space::reserve_failed;
use header::{HEADER_BYTES, Header};
use nix::errno::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

/// Named shared memory that lives as long as any process holds it.
///
/// Needs no descriptor. Clones within a process are one hold. The last holder to leave removes the
/// name; a holder that is killed counts no more, as soon as anyone (another holder that leaves, or
/// the [sweeper](crate::sweep)) looks. An object is complete before it has a name, so nobody ever
/// attaches to half of one, and the name of a newer object is never removed by mistake.
///
/// All holders must be in one pid namespace, and trust each other: each can write everything,
/// the header included.
///
/// ```
/// use alloc_shm::{SharedMap, ShmDir};
///
/// let dir = ShmDir::system();
/// let map = SharedMap::create_unique(&dir, 4096)?;
/// map.write_at(0, b"hello")?;
///
/// let other = SharedMap::attach(&dir, map.name())?; // usually in another process
/// drop(map);
/// let mut bytes = [0; 5];
/// other.read_at(0, &mut bytes)?;
/// assert_eq!(&bytes, b"hello");
/// # Ok::<(), alloc_shm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SharedMap(Arc<Held>);

impl SharedMap {
    /// Creates `len` bytes of zeroes under a name that nobody else has.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`], [`Error::NoDescriptor`], [`Error::Mapping`] or [`Error::Os`], with
    /// nothing left behind.
    pub fn create_unique(dir: &ShmDir, len: u64) -> Result<Self> {
        loop {
            match Self::create(dir, &dir.unique(NameKind::Counted)?, len) {
                Err(Error::Exists { .. }) => {}
                result => return result,
            }
        }
    }

    /// Creates `len` bytes of zeroes under this name. A leftover of that name which no living
    /// process holds is removed first.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`] if it is held, [`Error::Name`] if it is the name of a plain map; otherwise
    /// as [`create_unique`](SharedMap::create_unique).
    pub fn create(dir: &ShmDir, name: &Name, len: u64) -> Result<Self> {
        check_kind(name)?;
        let object = dir.path_of(name).display().to_string();
        let total = HEADER_BYTES
            .checked_add(len)
            .filter(|&total| i64::try_from(total).is_ok())
            .ok_or(Error::Range { offset: HEADER_BYTES, len, size: i64::MAX as u64 })?;
        let fd =
            file::open_nameless(dir.path()).map_err(|errno| Error::os("create", &object, errno))?;
        size(&fd, total, dir, &object)?;
        let new = Object::map(&fd, dir, name, total)?;
        Header::create(&new.region, total)?;
        match file::link(fd.as_fd(), &new.path) {
            Err(Errno::EEXIST) if reap(dir, name)? => file::link(fd.as_fd(), &new.path),
            result => result,
        }
        .map_err(|errno| Error::os("name", &object, errno))?;
        Ok(new.held())
    }

    /// Holds an existing map.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], [`Error::Gone`] if its last holder has just left, [`Error::Header`] if
    /// it is no such map, [`Error::Namespace`], [`Error::Holders`], [`Error::NoDescriptor`] (one is
    /// needed for a moment) or [`Error::Mapping`].
    pub fn attach(dir: &ShmDir, name: &Name) -> Result<Self> {
        let fd = open(dir, name)?;
        let total = length(&fd, dir, name)?;
        let object = Object::map(&fd, dir, name, total)?;
        Header::check(&object.region, total, &object.text())?.join(&object.text())?;
        Ok(object.held())
    }

    /// [`attach`](SharedMap::attach), if the map has exactly `len` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Header`] if it has not.
    pub fn attach_sized(dir: &ShmDir, name: &Name, len: u64) -> Result<Self> {
        let map = Self::attach(dir, name)?;
        if map.len() != len {
            let why = "its length is not the one expected";
            return Err(Error::Header { object: map.0.object.text(), why });
        }
        Ok(map)
    }

    /// Creates or attaches as PyTorch's flags say: `EXCLUSIVE` creates, `NOCREATE` attaches, and
    /// neither does whichever works.
    ///
    /// # Errors
    ///
    /// [`Error::Flags`] without `SHAREDMEM`, or with `FROMFD`, `KEEPFD` or `UNLINK`; otherwise as
    /// [`create`](SharedMap::create) or [`attach_sized`](SharedMap::attach_sized).
    pub fn with_flags(dir: &ShmDir, name: &Name, flags: Flags, len: u64) -> Result<Self> {
        match flags.counted()? {
            Create::Exclusive => Self::create(dir, name, len),
            Create::Never => Self::attach_sized(dir, name, len),
            Create::IfMissing => match Self::attach_sized(dir, name, len) {
                Err(Error::NotFound { .. } | Error::Gone { .. }) => Self::create(dir, name, len),
                result => result,
            },
        }
    }

    /// Bytes of data.
    pub fn len(&self) -> u64 {
        self.0.object.region.len() - HEADER_BYTES
    }

    /// Whether there are no bytes of data.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The name to attach by.
    pub fn name(&self) -> &Name {
        &self.0.object.name
    }

    /// The process that created the map; it may be gone.
    pub fn owner(&self) -> Option<ProcessId> {
        self.header().owner()
    }

    /// Holds of all processes, as last counted: a process that was killed since still counts.
    pub fn holds(&self) -> u64 {
        self.header().count()
    }

    /// Copies bytes from `offset` on into `to`; torn if another process writes them meanwhile.
    ///
    /// # Errors
    ///
    /// [`Error::Range`] if they are not all in the map; then nothing is copied.
    pub fn read_at(&self, offset: u64, to: &mut [u8]) -> Result<()> {
        self.within(offset, to.len() as u64)?;
        self.0.object.region.read_at(HEADER_BYTES + offset, to)
    }

    /// Copies `from` into the map at `offset`.
    ///
    /// # Errors
    ///
    /// [`Error::Range`] if it does not fit; then nothing is copied.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<()> {
        self.within(offset, from.len() as u64)?;
        self.0.object.region.write_at(HEADER_BYTES + offset, from)
    }

    /// The first byte of data, on a page boundary. Valid for [`len`](SharedMap::len) bytes while
    /// the map is held.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.object.region.base().wrapping_add(HEADER_BYTES as usize)
    }

    fn header(&self) -> Header<'_> {
        Header::of_checked(&self.0.object.region)
    }

    /// The range must be checked without its header, or an offset near the end could wrap.
    fn within(&self, offset: u64, len: u64) -> Result<()> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => Ok(()),
            _ => Err(Error::Range { offset, len, size: self.len() }),
        }
    }
}

/// A mapped object with a checked header, held or not.
#[derive(Debug)]
struct Object {
    region: Region,
    name: Name,
    path: PathBuf,
    id: FileId,
}

impl Object {
    /// Maps the first `len` bytes.
    fn map(fd: &OwnedFd, dir: &ShmDir, name: &Name, len: u64) -> Result<Self> {
        let path = dir.path_of(name);
        let object = path.display();
        let id = file::info(fd.as_fd()).map_err(|errno| Error::os("stat", &object, errno))?.id;
        let region = Region::map(fd.as_fd(), Protection::SharedWrite, 0, len)
            .map_err(|source| Error::Mapping { object: object.to_string(), bytes: len, source })?;
        Ok(Object { region, name: name.clone(), path, id })
    }

    /// This process's hold, which the header shows already.
    fn held(self) -> SharedMap {
        SharedMap(Arc::new(Held { object: self, pid: std::process::id() }))
    }

    fn remove_name(&self) -> Result<()> {
        file::unlink_if(&self.path, self.id)
            .map_err(|errno| Error::os("remove", &self.path.display(), errno))
    }

    fn text(&self) -> String {
        self.path.display().to_string()
    }
}

/// One hold, given back on drop.
#[derive(Debug)]
struct Held {
    object: Object,
    /// A forked child inherits this value, but not the hold.
    pid: u32,
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            let object = &self.object;
            // Nobody is left to tell. What stays behind is for the sweeper.
            let _ = Header::of_checked(&object.region).leave(|| object.remove_name());
        }
    }
}

/// Removes the map of this name if no living process holds it; answers whether it did.
///
/// # Errors
///
/// [`Error::Header`] if it is no reference-counted map, and those of opening it.
pub(crate) fn reap(dir: &ShmDir, name: &Name) -> Result<bool> {
    let fd = match open(dir, name) {
        Err(Error::NotFound { .. }) => return Ok(true),
        result => result?,
    };
    let len = length(&fd, dir, name)?;
    let object = Object::map(&fd, dir, name, len.min(HEADER_BYTES))?;
    let header = Header::check(&object.region, len, &object.text())?;
    header.reap(|| object.remove_name())
}

fn open(dir: &ShmDir, name: &Name) -> Result<OwnedFd> {
    check_kind(name)?;
    let path = dir.path_of(name);
    file::open(&path, OpenAs::Existing, Links::Refuse)
        .map_err(|errno| Error::os("open", &path.display(), errno))
}

/// The object's length, if all of it is backed: a page that is not could be a signal later.
fn length(fd: &OwnedFd, dir: &ShmDir, name: &Name) -> Result<u64> {
    let path = dir.path_of(name);
    let info = file::info(fd.as_fd()).map_err(|errno| Error::os("stat", &path.display(), errno))?;
    if !info.is_file || info.backed < info.len {
        let why = "it is not backed by blocks";
        return Err(Error::Header { object: path.display().to_string(), why });
    }
    Ok(info.len)
}

/// Sets the length of a new object and reserves its blocks.
fn size(fd: &OwnedFd, total: u64, dir: &ShmDir, object: &str) -> Result<()> {
    let fd = fd.as_fd();
    file::set_len(fd, total).map_err(|errno| Error::os("resize", object, errno))?;
    let path = dir.path().join("new");
    file::reserve(fd, 0, total)
        .map_err(|errno| reserve_failed(object, total, fd, Some(&path), errno))
}

fn check_kind(name: &Name) -> Result<()> {
    if name.kind() == NameKind::Counted {
        return Ok(());
    }
    Err(Error::Name { name: name.to_string(), why: "it is the name of a plain map" })
}

#[cfg(test)]
mod tests;
