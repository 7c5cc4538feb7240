//! One way to make every kind of map: open, size, reserve, map, close, unlink, advise.
//!
//! A plan is plain data that the options or the flags have checked. Carrying it out either yields
//! the map or undoes what was done: the descriptor is closed, a grown object has its old length
//! again, and a created name is removed.

use crate::error::{Error, Result};
use crate::name::{NameKind, ShmDir};
use crate::os::file::{self, FileId, FileInfo, Links, OpenAs};
use crate::os::region::{Protection, Region};
use crate::space::reserve_failed;
use crate::steps::{Step, reach};
use nix::errno::Errno;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Where the bytes come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// A file; it stays when the map goes.
    File(PathBuf),
    /// A name of shared memory; whoever creates it removes it.
    Named(PathBuf),
    /// A fresh unique name.
    Unique(ShmDir),
    /// A descriptor from elsewhere.
    Descriptor(OwnedFd),
    /// A new memfd with this label.
    Memfd(String),
}

/// Whether the name may, must or must not be new.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Create {
    /// Open it, or create it if there is none.
    IfMissing,
    /// Create it; fail if it exists.
    Exclusive,
    /// Open it; fail if there is none.
    Never,
}

/// What to map and how.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) source: Source,
    pub(crate) protection: Protection,
    pub(crate) create: Create,
    /// Bytes to map; `None` for all there are from the offset on.
    pub(crate) len: Option<u64>,
    pub(crate) offset: u64,
    /// An object that exists already may be made longer.
    pub(crate) may_grow: bool,
    /// Blocks are reserved where any are missing.
    pub(crate) reserve: bool,
    pub(crate) keep: bool,
    pub(crate) unlink: bool,
    pub(crate) sequential: bool,
}

/// A plan carried out.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) region: Region,
    pub(crate) fd: Option<OwnedFd>,
    pub(crate) name: Option<OwnedName>,
    pub(crate) object: String,
    pub(crate) id: FileId,
    pub(crate) offset: u64,
}

/// A name this process created: removed on drop, unless it means another file by then.
#[derive(Debug)]
pub(crate) struct OwnedName {
    path: PathBuf,
    id: FileId,
    /// A forked child inherits this value, but not the name.
    pid: u32,
}

impl OwnedName {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for OwnedName {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            // Nobody is left to tell. The sweeper removes what stays.
            let _ = file::unlink_if(&self.path, self.id);
        }
    }
}

impl Plan {
    pub(crate) fn carry_out(self) -> Result<Mapped> {
        let (opened, rest) = Opened::open(self)?;
        opened.finish(&rest)
    }

    fn is_writable(&self) -> bool {
        self.protection == Protection::SharedWrite
    }

    /// The plan without its source, which the opening has used up.
    fn rest(&self) -> Rest {
        Rest {
            protection: self.protection,
            len: self.len,
            offset: self.offset,
            may_resize: self.is_writable() && (self.may_grow || self.create != Create::Never),
            reserve: self.reserve && self.is_writable(),
            keep: self.keep,
            unlink: self.unlink,
            sequential: self.sequential,
        }
    }
}

/// What is left to do once the object is open.
struct Rest {
    protection: Protection,
    len: Option<u64>,
    offset: u64,
    may_resize: bool,
    reserve: bool,
    keep: bool,
    unlink: bool,
    sequential: bool,
}

/// An open object. Unless `finish` succeeds, dropping it undoes the opening and the sizing.
struct Opened {
    fd: Option<OwnedFd>,
    path: Option<PathBuf>,
    /// This opening created the path.
    created: bool,
    /// The created path goes when the map goes.
    owns_name: bool,
    grown_from: Option<u64>,
    /// Known once the object's length is.
    id: Option<FileId>,
    object: String,
}

impl Opened {
    fn open(plan: Plan) -> Result<(Self, Rest)> {
        let rest = plan.rest();
        let write = plan.is_writable();
        let opened = match plan.source {
            Source::File(path) => Self::by_path(path, plan.create, write, Links::Follow)?,
            Source::Named(path) => {
                let mut opened = Self::by_path(path, plan.create, write, Links::Refuse)?;
                opened.owns_name = opened.created;
                opened
            }
            Source::Unique(dir) => Self::by_unique_name(&dir)?,
            Source::Descriptor(fd) => {
                let object = format!("descriptor {}", fd.as_raw_fd());
                Self::nameless(fd, object)
            }
            Source::Memfd(label) => {
                let object = format!("memfd {label:?}");
                let fd =
                    file::memfd(&label).map_err(|errno| Error::os("create", &object, errno))?;
                Self::nameless(fd, object)
            }
        };
        Ok((opened, rest))
    }

    fn nameless(fd: OwnedFd, object: String) -> Self {
        Opened {
            fd: Some(fd),
            path: None,
            created: false,
            owns_name: false,
            grown_from: None,
            id: None,
            object,
        }
    }

    fn named(fd: OwnedFd, path: PathBuf, created: bool) -> Self {
        let mut opened = Self::nameless(fd, path.display().to_string());
        opened.path = Some(path);
        opened.created = created;
        opened
    }

    /// Opens so that it is known whether the name is new: only then may a failure remove it.
    fn by_path(path: PathBuf, create: Create, write: bool, links: Links) -> Result<Self> {
        let existing = if write { OpenAs::Existing } else { OpenAs::ReadOnly };
        let failed = |errno| Err(Error::os("open", &path.display(), errno));
        // Others may create and remove the name between two attempts, but not for ever.
        for _ in 0..100 {
            if create != Create::Never {
                match file::open(&path, OpenAs::New, links) {
                    Ok(fd) => return Ok(Self::named(fd, path, true)),
                    Err(Errno::EEXIST) if create == Create::IfMissing => {}
                    Err(errno) => return failed(errno),
                }
            }
            match file::open(&path, existing, links) {
                Ok(fd) => return Ok(Self::named(fd, path, false)),
                Err(Errno::ENOENT) if create == Create::IfMissing => {}
                Err(errno) => return failed(errno),
            }
        }
        failed(Errno::EAGAIN)
    }

    fn by_unique_name(dir: &ShmDir) -> Result<Self> {
        loop {
            let path = dir.path_of(&dir.unique(NameKind::Plain)?);
            match file::open(&path, OpenAs::New, Links::Refuse) {
                Ok(fd) => {
                    let mut opened = Self::named(fd, path, true);
                    opened.owns_name = true;
                    return Ok(opened);
                }
                // A leftover of an earlier boot, on a directory that outlives it.
                Err(Errno::EEXIST) => {}
                Err(errno) => return Err(Error::os("open", &path.display(), errno)),
            }
        }
    }

    /// Size, reserve, map, close, unlink, advise.
    fn finish(mut self, rest: &Rest) -> Result<Mapped> {
        let info = self.stat()?;
        self.id = Some(info.id);
        let (len, needed) = extent(rest, info.len)?;
        let grows = needed > info.len;
        if grows {
            self.grow(rest, info.len, needed)?;
        }
        if rest.reserve && (grows || info.backed < info.len) {
            self.reserve(rest.offset, len)?;
        }
        let region = Region::map(self.fd().as_fd(), rest.protection, rest.offset, len)
            .map_err(|source| Error::Mapping { object: self.object.clone(), bytes: len, source })?;
        if !rest.keep {
            reach(Step::Close).map_err(|errno| self.failed("close", errno))?;
            // The number is free again whatever `close` says, and no write is pending here.
            self.fd = None;
        }
        if rest.unlink {
            self.unlink(info.id)?;
        }
        if rest.sequential {
            // Only advice: nothing that worked without it is undone for it.
            let _ = region.advise_sequential();
        }
        Ok(self.into_mapped(region, info.id, rest.offset))
    }

    fn stat(&self) -> Result<FileInfo> {
        let info = file::info(self.fd().as_fd()).map_err(|errno| self.failed("stat", errno))?;
        if info.is_file {
            Ok(info)
        } else {
            Err(self.failed("map what is no file:", Errno::ENODEV))
        }
    }

    fn grow(&mut self, rest: &Rest, actual: u64, needed: u64) -> Result<()> {
        if !rest.may_resize {
            return Err(Error::TooShort { object: self.object.clone(), actual, needed });
        }
        file::set_len(self.fd().as_fd(), needed).map_err(|errno| self.failed("resize", errno))?;
        self.grown_from = Some(actual);
        Ok(())
    }

    fn reserve(&self, offset: u64, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let fd = self.fd().as_fd();
        file::reserve(fd, offset, len)
            .map_err(|errno| reserve_failed(&self.object, len, fd, self.path.as_deref(), errno))
    }

    fn unlink(&mut self, id: FileId) -> Result<()> {
        if let Some(path) = &self.path {
            file::unlink_if(path, id).map_err(|errno| self.failed("unlink", errno))?;
        }
        self.owns_name = false;
        self.created = false;
        Ok(())
    }

    fn into_mapped(mut self, region: Region, id: FileId, offset: u64) -> Mapped {
        // From here on nothing is undone.
        self.grown_from = None;
        self.created = false;
        let path = self.path.take().filter(|_| self.owns_name);
        let name = path.map(|path| OwnedName { path, id, pid: std::process::id() });
        let object = std::mem::take(&mut self.object);
        Mapped { region, fd: self.fd.take(), name, object, id, offset }
    }

    fn fd(&self) -> &OwnedFd {
        // Only closing it takes it away, and nothing asks for it after that.
        self.fd.as_ref().expect("open until closed")
    }

    fn failed(&self, op: &'static str, errno: Errno) -> Error {
        Error::os(op, &self.object, errno)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // The failure that led here is what the caller hears about, not one of the clean-up.
        let _ = self.undo();
    }
}

impl Opened {
    fn undo(&mut self) -> std::result::Result<(), Errno> {
        if !self.created && self.grown_from.is_none() {
            return Ok(());
        }
        let id = match (self.id, &self.fd) {
            (Some(id), _) => id,
            (None, Some(fd)) => FileInfo::from(nix::sys::stat::fstat(fd)?).id,
            (None, None) => return Ok(()),
        };
        if let (true, Some(path)) = (self.created, &self.path) {
            return file::remove_if(path, id);
        }
        match (self.grown_from, &self.fd, &self.path) {
            (Some(len), Some(fd), _) => file::truncate(fd.as_fd(), len),
            (Some(len), None, Some(path)) => file::truncate_if(path, id, len),
            _ => Ok(()),
        }
    }
}

/// The bytes to map, and the length the object needs for that.
fn extent(rest: &Rest, actual: u64) -> Result<(u64, u64)> {
    let offset = rest.offset;
    match rest.len {
        Some(len) => match offset.checked_add(len).filter(|&end| i64::try_from(end).is_ok()) {
            Some(needed) => Ok((len, needed)),
            None => Err(Error::Range { offset, len, size: i64::MAX as u64 }),
        },
        None => match actual.checked_sub(offset) {
            Some(len) => Ok((len, actual)),
            None => Err(Error::Range { offset, len: 0, size: actual }),
        },
    }
}
