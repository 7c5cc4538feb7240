//! Where segments and reservations are placed in the one address space of the process.

use std::collections::BTreeMap;
use std::fmt;

use alloc_core::backend::SEGMENT_ALIGN;
use alloc_core::{Addr, align_up};

/// How the simulated driver chooses addresses when no feed does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// The lowest free place that fits, so that given-back ranges are soon used again and
    /// neighbours touch. `gap` bytes (rounded up to 2 MiB) stay free behind each range.
    Reuse {
        /// Bytes left free behind each range.
        gap: u64,
    },
    /// Ever higher addresses, never one twice. `gap` as above; 0 makes neighbours touch.
    Fresh {
        /// Bytes left free behind each range.
        gap: u64,
    },
}

/// What an address is wanted for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SpanKind {
    /// A segment (`acquire`).
    Segment,
    /// A reservation (`reserve`).
    Reservation,
}

/// An answer of a feed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fed {
    /// Place it here.
    At(Addr),
    /// Place it here; it was recorded with this many bytes, anything else is a violation.
    Exactly(Addr, u64),
    /// Let the [`Placement`] decide.
    Choose,
}

/// Decides addresses in place of the simulator: called once for each segment and reservation, in
/// order, with its size in bytes. `None` means that the feed has run out, which is a violation.
/// No simulator lock is held during the call, but no second call runs at the same time.
pub type Feed = Box<dyn FnMut(SpanKind, u64) -> Option<Fed> + Send>;

/// A feed for segments from a recorded list of (address, bytes); reservations are placed by the
/// simulator.
///
/// ```
/// use alloc_core::Addr;
/// use mock_backend::{MockBackend, recorded_segments};
/// let recorded = vec![(Addr::new(0x7f00_0000_0000), 2 << 20)];
/// let backend = MockBackend::builder().feed(recorded_segments(recorded)).build();
/// # let _ = backend;
/// ```
pub fn recorded_segments(list: impl IntoIterator<Item = (Addr, u64)>) -> Feed {
    let mut rest = list.into_iter().collect::<Vec<_>>().into_iter();
    Box::new(move |kind, _| match kind {
        SpanKind::Segment => rest.next().map(|(addr, bytes)| Fed::Exactly(addr, bytes)),
        SpanKind::Reservation => Some(Fed::Choose),
    })
}

/// The address space: which ranges are taken, and the strategy for the next one.
pub(crate) struct AddressSpace {
    placement: Placement,
    first: u64,
    end: u64,
    /// Next address of [`Placement::Fresh`].
    next: u64,
    /// start → end of live ranges, rounded up to [`SEGMENT_ALIGN`].
    taken: BTreeMap<u64, u64>,
}

impl AddressSpace {
    pub(crate) fn new(placement: Placement, first: Addr, bytes: u64) -> Self {
        let first = align_up(first.get().max(SEGMENT_ALIGN), SEGMENT_ALIGN).unwrap_or(u64::MAX);
        let end = first.saturating_add(bytes) / SEGMENT_ALIGN * SEGMENT_ALIGN;
        AddressSpace { placement, first, end, next: first, taken: BTreeMap::new() }
    }

    /// Takes a range where the strategy wants it; `None` if there is no room.
    pub(crate) fn choose(&mut self, bytes: u64) -> Option<Addr> {
        let (Placement::Reuse { gap } | Placement::Fresh { gap }) = self.placement;
        let need = align_up(bytes.checked_add(gap)?, SEGMENT_ALIGN)?;
        let from = match self.placement {
            Placement::Fresh { .. } => self.next,
            Placement::Reuse { .. } => self.first,
        };
        let start = self.lowest_hole(from, need, gap)?;
        let after = start.checked_add(need).filter(|&after| after <= self.end)?;
        self.next = self.next.max(after);
        self.taken.insert(start, start + align_up(bytes, SEGMENT_ALIGN)?);
        Some(Addr::new(start))
    }

    /// Takes the range at a fed address; `false` if it may not lie there.
    pub(crate) fn place(&mut self, at: Addr, bytes: u64) -> bool {
        let Some(end) = at.get().checked_add(bytes).and_then(|end| align_up(end, SEGMENT_ALIGN))
        else {
            return false;
        };
        let lower = self.taken.range(..end).next_back();
        let free = lower.is_none_or(|(_, &taken_to)| taken_to <= at.get());
        let good = !at.is_null() && at.is_aligned(SEGMENT_ALIGN) && free;
        if good {
            self.taken.insert(at.get(), end);
        }
        good
    }

    /// Gives the range at `at` back.
    pub(crate) fn give_back(&mut self, at: Addr) {
        self.taken.remove(&at.get());
    }

    /// The lowest free place of `need` bytes at or above `at`.
    fn lowest_hole(&self, mut at: u64, need: u64, gap: u64) -> Option<u64> {
        let gap = align_up(gap, SEGMENT_ALIGN)?;
        for (&start, &end) in self.taken.range(..self.end) {
            if start >= at && start - at >= need {
                break;
            }
            at = at.max(end.checked_add(gap)?);
        }
        Some(at)
    }
}

impl fmt::Debug for AddressSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressSpace").field("taken", &self.taken.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn space(placement: Placement) -> AddressSpace {
        AddressSpace::new(placement, Addr::new(64 * MIB), 64 * MIB)
    }

    #[test]
    fn reuse_takes_the_lowest_hole_and_fresh_never_does() {
        for (placement, again) in
            [(Placement::Reuse { gap: 0 }, 64 * MIB), (Placement::Fresh { gap: 0 }, 72 * MIB)]
        {
            let mut space = space(placement);
            assert_eq!(space.choose(4 * MIB), Some(Addr::new(64 * MIB)));
            assert_eq!(space.choose(3 * MIB), Some(Addr::new(68 * MIB)));
            space.give_back(Addr::new(64 * MIB));
            assert_eq!(space.choose(2 * MIB), Some(Addr::new(again)));
        }
    }

    #[test]
    fn gaps_stay_free_and_the_end_is_the_end() {
        let mut space = space(Placement::Reuse { gap: 1 });
        assert_eq!(space.choose(2 * MIB), Some(Addr::new(64 * MIB)));
        assert_eq!(space.choose(2 * MIB), Some(Addr::new(68 * MIB)));
        assert_eq!(space.choose(64 * MIB), None);
        assert_eq!(space.choose(u64::MAX), None);
        assert_eq!(space.choose(54 * MIB), Some(Addr::new(72 * MIB)));
    }

    #[test]
    fn fed_addresses_must_be_aligned_and_free() {
        let mut space = space(Placement::Reuse { gap: 0 });
        assert!(space.place(Addr::new(10 * MIB), 20 * MIB));
        assert!(!space.place(Addr::new(28 * MIB), 4 * MIB));
        assert!(!space.place(Addr::new(8 * MIB), 4 * MIB));
        assert!(!space.place(Addr::new(31 * MIB), MIB));
        assert!(!space.place(Addr::NULL, MIB));
        assert!(space.place(Addr::new(30 * MIB), 4 * MIB));
        space.give_back(Addr::new(10 * MIB));
        assert!(space.place(Addr::new(28 * MIB), 2 * MIB));
    }
}
