//! PyTorch's flags, for callers that bring them as bits.

use crate::error::{Error, Result};
use crate::map::plan::{Create, Plan, Source};
use crate::map::{CopyOnWrite, Map, ReadWrite};
use crate::name::{Name, ShmDir};
use crate::os::region::Protection;
use std::fmt;
use std::ops::BitOr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// Bits with the values and meanings of PyTorch's `MapAllocator`.
///
/// Which combinations are refused, beside those with unknown bits: [`Flags::SHARED`] with
/// [`Flags::SHAREDMEM`]; [`Flags::EXCLUSIVE`] or [`Flags::UNLINK`] with neither; `EXCLUSIVE` with
/// [`Flags::NOCREATE`]; [`Flags::FROMFD`] with `EXCLUSIVE` or `UNLINK`. `NOCREATE` without a shared
/// mode changes nothing, as there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Flags(u32);

impl Flags {
    /// A private, copy-on-write map of an existing file.
    pub const NONE: Flags = Flags(0);
    /// A file, shared.
    pub const SHARED: Flags = Flags(1);
    /// Shared memory by name, shared.
    pub const SHAREDMEM: Flags = Flags(2);
    /// The name must be new.
    pub const EXCLUSIVE: Flags = Flags(4);
    /// The name must exist.
    pub const NOCREATE: Flags = Flags(8);
    /// Keep the descriptor.
    pub const KEEPFD: Flags = Flags(16);
    /// Map a descriptor instead of opening something.
    pub const FROMFD: Flags = Flags(32);
    /// Remove the name right after mapping.
    pub const UNLINK: Flags = Flags(64);

    /// Flags from their bits.
    pub const fn from_bits(bits: u32) -> Self {
        Flags(bits)
    }

    /// The bits.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Whether all of `other`'s bits are set.
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Maps `size` bytes of `target`, or all of it if `size` is 0.
    ///
    /// # Errors
    ///
    /// [`Error::Flags`] for a combination without a meaning or with the wrong kind of target;
    /// otherwise as [`MapOptions::map`](crate::MapOptions::map).
    pub fn map(self, target: FlagTarget<'_>, size: u64) -> Result<FlagMap> {
        let shared = self.check(&target)?;
        let source = match target {
            FlagTarget::Path(path) => Source::File(path),
            FlagTarget::Name(dir, name) => Source::Named(dir.path_of(name)),
            FlagTarget::Descriptor(fd) => Source::Descriptor(fd),
        };
        let plan = Plan {
            create: self.create(shared, &source),
            source,
            protection: if shared { Protection::SharedWrite } else { Protection::CopyOnWrite },
            len: (size > 0).then_some(size),
            offset: 0,
            may_grow: false,
            reserve: true,
            keep: self.contains(Flags::KEEPFD),
            unlink: self.contains(Flags::UNLINK),
            sequential: true,
        };
        let mut mapped = plan.carry_out()?;
        Ok(match (shared, mapped.fd.take()) {
            (true, None) => FlagMap::Shared(Map::new(mapped, ())),
            (true, Some(fd)) => FlagMap::SharedKept(Map::new(mapped, fd)),
            (false, None) => FlagMap::Private(Map::new(mapped, ())),
            (false, Some(fd)) => FlagMap::PrivateKept(Map::new(mapped, fd)),
        })
    }

    /// Whether to create the name of a reference-counted map, after checking the flags for one.
    pub(crate) fn counted(self) -> Result<Create> {
        let no_descriptor = [Flags::FROMFD, Flags::KEEPFD, Flags::UNLINK];
        if no_descriptor.iter().any(|&flag| self.contains(flag)) {
            return Err(self.refuse("a counted map takes no FROMFD, KEEPFD or UNLINK"));
        }
        if !self.contains(Flags::SHAREDMEM) {
            return Err(self.refuse("a counted map needs SHAREDMEM"));
        }
        self.check_bits()?;
        Ok(self.shared_create())
    }

    /// Checks everything; answers whether the map is shared.
    fn check(self, target: &FlagTarget<'_>) -> Result<bool> {
        self.check_bits()?;
        let from_fd = self.contains(Flags::FROMFD);
        match target {
            FlagTarget::Descriptor(_) if !from_fd => Err(self.refuse("a descriptor needs FROMFD")),
            FlagTarget::Path(_) | FlagTarget::Name(..) if from_fd => {
                Err(self.refuse("FROMFD needs a descriptor"))
            }
            FlagTarget::Name(..) if !self.contains(Flags::SHAREDMEM) => {
                Err(self.refuse("a name of shared memory needs SHAREDMEM"))
            }
            FlagTarget::Path(_) if self.contains(Flags::SHAREDMEM) => {
                Err(self.refuse("SHAREDMEM needs a name of shared memory"))
            }
            _ => Ok(self.is_shared()),
        }
    }

    fn check_bits(self) -> Result<()> {
        let pair = |a: Flags, b: Flags| self.contains(a | b);
        if self.0 > 127 {
            Err(self.refuse("unknown bits"))
        } else if pair(Flags::SHARED, Flags::SHAREDMEM) {
            Err(self.refuse("either a file or shared memory, not both"))
        } else if self.contains(Flags::EXCLUSIVE) && !self.is_shared() {
            Err(self.refuse("EXCLUSIVE needs SHARED or SHAREDMEM"))
        } else if pair(Flags::EXCLUSIVE, Flags::NOCREATE) {
            Err(self.refuse("EXCLUSIVE creates and NOCREATE forbids it"))
        } else if pair(Flags::FROMFD, Flags::EXCLUSIVE) {
            Err(self.refuse("FROMFD opens nothing that could be EXCLUSIVE"))
        } else if pair(Flags::FROMFD, Flags::UNLINK) {
            Err(self.refuse("FROMFD knows no name to UNLINK"))
        } else if self.contains(Flags::UNLINK) && !self.is_shared() {
            Err(self.refuse("UNLINK needs SHARED or SHAREDMEM"))
        } else {
            Ok(())
        }
    }

    fn is_shared(self) -> bool {
        self.contains(Flags::SHARED) || self.contains(Flags::SHAREDMEM)
    }

    fn create(self, shared: bool, source: &Source) -> Create {
        if shared && !matches!(source, Source::Descriptor(_)) {
            self.shared_create()
        } else {
            Create::Never
        }
    }

    fn shared_create(self) -> Create {
        if self.contains(Flags::EXCLUSIVE) {
            Create::Exclusive
        } else if self.contains(Flags::NOCREATE) {
            Create::Never
        } else {
            Create::IfMissing
        }
    }

    fn refuse(self, why: &'static str) -> Error {
        Error::Flags { flags: self, why }
    }
}

impl BitOr for Flags {
    type Output = Flags;
    fn bitor(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 7] =
            ["SHARED", "SHAREDMEM", "EXCLUSIVE", "NOCREATE", "KEEPFD", "FROMFD", "UNLINK"];
        let set = NAMES.iter().enumerate().filter(|(bit, _)| self.0 & (1 << bit) != 0);
        let names: Vec<&str> = set.map(|(_, &name)| name).collect();
        write!(f, "{}[{}]", self.0, names.join("|"))
    }
}

/// What flags are applied to.
#[derive(Debug)]
pub enum FlagTarget<'a> {
    /// A file's path.
    Path(PathBuf),
    /// A name of shared memory.
    Name(&'a ShmDir, &'a Name),
    /// A descriptor.
    Descriptor(OwnedFd),
}

/// What flags made.
#[derive(Debug)]
pub enum FlagMap {
    /// Shared, descriptor closed.
    Shared(Map<ReadWrite>),
    /// Shared, descriptor kept.
    SharedKept(Map<ReadWrite, OwnedFd>),
    /// Copy on write, descriptor closed.
    Private(Map<CopyOnWrite>),
    /// Copy on write, descriptor kept.
    PrivateKept(Map<CopyOnWrite, OwnedFd>),
}

impl FlagMap {
    /// Bytes mapped.
    pub fn len(&self) -> u64 {
        match self {
            FlagMap::Shared(map) => map.len(),
            FlagMap::SharedKept(map) => map.len(),
            FlagMap::Private(map) => map.len(),
            FlagMap::PrivateKept(map) => map.len(),
        }
    }

    /// Whether no byte is mapped.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
