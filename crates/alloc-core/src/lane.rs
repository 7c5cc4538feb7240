//! The stretches of address space that a heap keeps apart.

use crate::size_class::SizeClass;

/// A block belongs to the lane of its segment for life. Each lane has its own free index and holes.
///
/// Memory of one lane serves another by being moved, as from stream to stream; but a request that
/// finds nothing in its lane takes a free block of the other lane of its class, which costs nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Lane {
    /// All of the small class.
    Small,
    /// The large class.
    Large,
    /// What hardly ever is freed, of the large class in expandable segments of policy `ours`: weights,
    /// and what an optimizer keeps. Between blocks that come and go these leave gaps for good.
    Lasting,
}

impl Lane {
    /// How many there are.
    pub(crate) const COUNT: usize = 3;

    /// Position in tables of [`COUNT`](Self::COUNT).
    #[inline]
    pub(crate) const fn index(self) -> usize {
        self as usize
    }

    #[inline]
    pub(crate) const fn class(self) -> SizeClass {
        match self {
            Lane::Small => SizeClass::Small,
            Lane::Large | Lane::Lasting => SizeClass::Large,
        }
    }

    /// The lanes of a class.
    pub(crate) const fn of(class: SizeClass) -> &'static [Lane] {
        match class {
            SizeClass::Small => &[Lane::Small],
            SizeClass::Large => &[Lane::Large, Lane::Lasting],
        }
    }

    /// The other lane of the class, if it has two.
    #[inline]
    pub(crate) const fn other(self) -> Option<Lane> {
        match self {
            Lane::Small => None,
            Lane::Large => Some(Lane::Lasting),
            Lane::Lasting => Some(Lane::Large),
        }
    }
}

/// The lane of requests of which nothing else is known.
impl From<SizeClass> for Lane {
    #[inline]
    fn from(class: SizeClass) -> Self {
        match class {
            SizeClass::Small => Lane::Small,
            SizeClass::Large => Lane::Large,
        }
    }
}
