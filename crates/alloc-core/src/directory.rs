//! From a raw address to the heap and segment that own it, without a lock.
//!
//! Segments start at multiples of 2 MiB, so no two share a 2 MiB page and the page number is an
//! exact index. A table of three levels of 2^12 entries covers 57 bits of address, the widest that
//! current hosts and GPUs use.

use crate::backend::SEGMENT_ALIGN;
use crate::heap::SegmentId;
use crate::sync::OnceLock;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::units::Addr;

/// Little where loom counts every cell.
const LEVEL_BITS: u32 = if cfg!(loom) { 2 } else { 12 };
const FANOUT: usize = 1 << LEVEL_BITS;
const PAGE_BITS: u32 = SEGMENT_ALIGN.ilog2();
/// Addresses at and above this one cannot be registered.
pub(crate) const ADDRESS_END: u64 = 1 << (3 * LEVEL_BITS + PAGE_BITS);

/// Who owns a page of address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Owner {
    /// Position in the allocator's table of heaps.
    pub(crate) heap: u32,
    pub(crate) segment: SegmentId,
}

impl Owner {
    /// 0 is "nobody", so the heap is stored plus one.
    fn pack(self) -> u64 {
        (u64::from(self.heap) + 1) << 32 | u64::from(self.segment.get())
    }

    fn unpack(raw: u64) -> Option<Self> {
        let heap = (raw >> 32).checked_sub(1)? as u32;
        Some(Owner { heap, segment: SegmentId::new(raw as u32) })
    }
}

type Leaf = Box<[AtomicU64]>;
type Middle = Box<[OnceLock<Leaf>]>;

/// The address directory of one allocator.
pub(crate) struct Directory {
    root: Box<[OnceLock<Middle>]>,
}

impl std::fmt::Debug for Directory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Directory").finish_non_exhaustive()
    }
}

fn table<T>(mut entry: impl FnMut() -> T) -> Box<[T]> {
    (0..FANOUT).map(|_| entry()).collect()
}

fn split(page: u64) -> [usize; 3] {
    let mask = FANOUT as u64 - 1;
    [
        (page >> (2 * LEVEL_BITS)) as usize,
        ((page >> LEVEL_BITS) & mask) as usize,
        (page & mask) as usize,
    ]
}

impl Directory {
    pub(crate) fn new() -> Self {
        Directory { root: table(OnceLock::new) }
    }

    /// Who owns `addr`, if anybody.
    pub(crate) fn owner(&self, addr: Addr) -> Option<Owner> {
        let [high, middle, low] = split(addr.get() >> PAGE_BITS);
        let leaf = self.root.get(high)?.get()?[middle].get()?;
        // Pairs with the release store of `fill`: whoever learns of a segment here also sees the
        // heap that the table of heaps holds for it.
        Owner::unpack(leaf[low].load(Ordering::Acquire))
    }

    /// Whether anybody owns a page that `bytes` from `base` on touch. The range lies below
    /// [`ADDRESS_END`]. Address space is reserved by the size of the device, so stretches of which no page
    /// ever had an owner are passed at once.
    pub(crate) fn is_owned(&self, base: Addr, bytes: u64) -> bool {
        let mut page = base.get() >> PAGE_BITS;
        let last = (base.get() + bytes - 1) >> PAGE_BITS;
        while page <= last {
            let [high, middle, low] = split(page);
            let end = (last - page).min((FANOUT - 1 - low) as u64) as usize + low;
            let leaf = self.root[high].get().and_then(|middles| middles[middle].get());
            let owned =
                |leaf: &Leaf| leaf[low..=end].iter().any(|p| p.load(Ordering::Acquire) != 0);
            if leaf.is_some_and(owned) {
                return true;
            }
            page += (end - low) as u64 + 1;
        }
        false
    }

    /// Registers all pages that `bytes` from `base` on touch. The range lies below [`ADDRESS_END`].
    pub(crate) fn register(&self, base: Addr, bytes: u64, owner: Owner) {
        self.fill(base, bytes, owner.pack());
    }

    /// Forgets all pages that `bytes` from `base` on touch.
    pub(crate) fn unregister(&self, base: Addr, bytes: u64) {
        self.fill(base, bytes, 0);
    }

    fn fill(&self, base: Addr, bytes: u64, value: u64) {
        let first = base.get() >> PAGE_BITS;
        let last = (base.get() + bytes - 1) >> PAGE_BITS;
        for page in first..=last {
            let [high, middle, low] = split(page);
            let middles = self.root[high].get_or_init(|| table(OnceLock::new));
            let leaf = middles[middle].get_or_init(|| table(|| AtomicU64::new(0)));
            leaf[low].store(value, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_found_by_any_address_inside() {
        let directory = Directory::new();
        let base = Addr::new(0x7f51_2a00_0000);
        let owner = Owner { heap: 7, segment: SegmentId::new(3) };
        assert_eq!(directory.owner(base), None);
        directory.register(base, 5 << 20, owner);
        for offset in [0, 1, (5 << 20) - 1] {
            assert_eq!(directory.owner(base + offset), Some(owner));
        }
        assert_eq!(directory.owner(base + (6 << 20)), None);
        directory.unregister(base, 5 << 20);
        assert_eq!(directory.owner(base), None);
    }

    #[test]
    fn ranges_of_any_length_are_looked_through() {
        let stretch = FANOUT as u64 * SEGMENT_ALIGN;
        let directory = Directory::new();
        let owner = Owner { heap: 1, segment: SegmentId::new(2) };
        let owned = Addr::new(5 * stretch + 7 * SEGMENT_ALIGN);
        directory.register(owned, 2 * SEGMENT_ALIGN, owner);
        let is_owned = |from: u64, to: u64| directory.is_owned(Addr::new(from), to - from);
        let (first, end) = (owned.get(), owned.get() + 2 * SEGMENT_ALIGN);
        for (from, to, expected) in [
            (first, first + 1, true),
            (end - 1, end, true),
            (first - SEGMENT_ALIGN, first, false),
            (first - SEGMENT_ALIGN, first + 1, true),
            (end, end + SEGMENT_ALIGN, false),
            (SEGMENT_ALIGN, first, false),
            (SEGMENT_ALIGN, first + 1, true),
            (end, end + 3 * stretch, false),
            (SEGMENT_ALIGN, ADDRESS_END, true),
            (end, ADDRESS_END, false),
        ] {
            assert_eq!(is_owned(from, to), expected, "{from:x} to {to:x}");
        }
        directory.unregister(owned, 2 * SEGMENT_ALIGN);
        assert!(!is_owned(SEGMENT_ALIGN, ADDRESS_END));
    }

    #[test]
    fn both_ends_of_the_address_space() {
        let directory = Directory::new();
        let owner = Owner { heap: 0, segment: SegmentId::new(0) };
        let top = Addr::new(ADDRESS_END - SEGMENT_ALIGN);
        directory.register(top, SEGMENT_ALIGN, owner);
        assert_eq!(directory.owner(Addr::new(ADDRESS_END - 1)), Some(owner));
        assert_eq!(directory.owner(Addr::new(ADDRESS_END)), None);
        assert_eq!(directory.owner(Addr::new(u64::MAX)), None);
        assert_eq!(directory.owner(Addr::NULL), None);
    }
}
