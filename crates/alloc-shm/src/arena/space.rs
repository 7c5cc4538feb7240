//! Which ranges of an arena are free: plain numbers, no memory.
//!
//! Every block is laid out as `[header 64][payload, a multiple of 64]`; the payload begins on the
//! alignment asked for. Placement is best fit, then the lowest address; neighbours merge at once.

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Everything is a multiple of this, in bytes: one cache line.
pub(crate) const GRANULE: u64 = 64;
/// Bytes before each payload that tell receivers what it is.
pub(crate) const BLOCK_HEADER: u64 = GRANULE;

/// A block as the space knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Placed {
    /// Where the payload begins.
    pub(crate) offset: u64,
    /// Payload bytes asked for.
    pub(crate) requested: u64,
    /// Differs between any two blocks this space ever placed; never 0.
    pub(crate) generation: u64,
}

/// The free and live ranges of one arena.
#[derive(Debug)]
pub(crate) struct Space {
    /// Free ranges: offset to length. No two touch.
    free: BTreeMap<u64, u64>,
    /// The same as (length, offset).
    by_len: BTreeSet<(u64, u64)>,
    /// Live blocks by payload offset, with the whole range that each takes.
    live: HashMap<u64, (Placed, Range)>,
    live_bytes: u64,
    generation: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Range {
    start: u64,
    len: u64,
}

/// Counters of a space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ArenaStats {
    /// Blocks in use.
    pub live_blocks: u64,
    /// Payload bytes that users asked for and have not given back.
    pub live_bytes: u64,
    /// Bytes in free ranges.
    pub free_bytes: u64,
    /// Free ranges.
    pub free_ranges: u64,
    /// The largest payload that would fit now.
    pub largest_free: u64,
}

impl Space {
    /// An empty space of `size` bytes, rounded down to the granule.
    pub(crate) fn new(size: u64) -> Self {
        let size = size / GRANULE * GRANULE;
        let mut space = Space {
            free: BTreeMap::new(),
            by_len: BTreeSet::new(),
            live: HashMap::new(),
            live_bytes: 0,
            generation: 0,
        };
        space.insert(Range { start: 0, len: size });
        space
    }

    /// Places `requested` bytes on a multiple of `align` (a power of two); `None` if none fits.
    pub(crate) fn allocate(&mut self, requested: u64, align: u64) -> Option<Placed> {
        let align = align.max(GRANULE);
        let payload = requested.max(1).checked_next_multiple_of(GRANULE)?;
        let least = payload.checked_add(BLOCK_HEADER)?.checked_add(align - GRANULE)?;
        let &(len, start) = self.by_len.range((least, 0)..).next()?;
        let found = Range { start, len };
        let offset = (start + BLOCK_HEADER).checked_next_multiple_of(align)?;
        let taken = Range { start: offset - BLOCK_HEADER, len: payload + BLOCK_HEADER };
        self.remove(found);
        self.insert(Range { start, len: taken.start - start });
        self.insert(Range { start: taken.end(), len: found.end() - taken.end() });
        self.generation += 1;
        let placed = Placed { offset, requested, generation: self.generation };
        self.live.insert(offset, (placed, taken));
        self.live_bytes += requested;
        Some(placed)
    }

    /// The live block whose payload begins at `offset`.
    pub(crate) fn at(&self, offset: u64) -> Option<Placed> {
        self.live.get(&offset).map(|(placed, _)| *placed)
    }

    /// Takes a live block back. Answers false, and changes nothing, if there is no such block.
    pub(crate) fn free(&mut self, offset: u64, generation: u64) -> bool {
        match self.at(offset) {
            Some(placed) if placed.generation == generation => {}
            _ => return false,
        }
        if let Some((placed, range)) = self.live.remove(&offset) {
            self.live_bytes -= placed.requested;
            let merged = self.merge(range);
            self.insert(merged);
        }
        true
    }

    pub(crate) fn stats(&self) -> ArenaStats {
        let longest = self.by_len.last().map_or(0, |&(len, _)| len);
        ArenaStats {
            live_blocks: self.live.len() as u64,
            live_bytes: self.live_bytes,
            free_bytes: self.free.values().sum(),
            free_ranges: self.free.len() as u64,
            largest_free: longest.saturating_sub(BLOCK_HEADER),
        }
    }

    /// Takes the free neighbours of a range out and answers with the whole.
    fn merge(&mut self, mut range: Range) -> Range {
        let before = self.free.range(..range.start).next_back();
        let before = before.map(|(&start, &len)| Range { start, len });
        if let Some(before) = before.filter(|before| before.end() == range.start) {
            self.remove(before);
            range = Range { start: before.start, len: before.len + range.len };
        }
        if let Some(&len) = self.free.get(&range.end()) {
            self.remove(Range { start: range.end(), len });
            range.len += len;
        }
        range
    }

    fn insert(&mut self, range: Range) {
        if range.len > 0 {
            self.free.insert(range.start, range.len);
            self.by_len.insert((range.len, range.start));
        }
    }

    fn remove(&mut self, range: Range) {
        self.free.remove(&range.start);
        self.by_len.remove(&(range.len, range.start));
    }
}

impl Range {
    fn end(self) -> u64 {
        self.start + self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl Space {
        /// Rebuilds everything from the live blocks and compares.
        fn check(&self, size: u64) {
            let mut ranges: Vec<(u64, u64, bool)> =
                self.free.iter().map(|(&start, &len)| (start, len, true)).collect();
            ranges.extend(self.live.values().map(|(_, range)| (range.start, range.len, false)));
            ranges.sort_unstable();
            let mut end = 0;
            let mut free_before = false;
            for (start, len, free) in ranges {
                assert_eq!(start, end, "ranges tile the arena");
                assert!(len > 0 && len.is_multiple_of(GRANULE));
                assert!(!(free && free_before), "free neighbours are merged");
                (end, free_before) = (start + len, free);
            }
            assert_eq!(end, size);
            let by_len: BTreeSet<_> = self.free.iter().map(|(&start, &len)| (len, start)).collect();
            assert_eq!(by_len, self.by_len);
            let bytes: u64 = self.live.values().map(|(placed, _)| placed.requested).sum();
            assert_eq!(bytes, self.live_bytes);
        }
    }

    #[derive(Clone, Debug)]
    enum Op {
        Allocate(u64, u32),
        Free(prop::sample::Index),
        FreeAgain(prop::sample::Index),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            3 => (0u64..3000, 0u32..13).prop_map(|(len, align)| Op::Allocate(len, align)),
            2 => any::<prop::sample::Index>().prop_map(Op::Free),
            1 => any::<prop::sample::Index>().prop_map(Op::FreeAgain),
        ];
        proptest::collection::vec(op, 1..120)
    }

    /// Whether some aligned place is free, found by trying them all.
    fn fits(live: &[Placed], size: u64, requested: u64, align: u64) -> bool {
        let end = |offset, requested: u64| offset + requested.max(1).next_multiple_of(GRANULE);
        (BLOCK_HEADER..size).step_by(GRANULE as usize).any(|at| {
            at.is_multiple_of(align.max(GRANULE))
                && end(at, requested) <= size
                && live.iter().all(|other| {
                    at - BLOCK_HEADER >= end(other.offset, other.requested)
                        || end(at, requested) <= other.offset - BLOCK_HEADER
                })
        })
    }

    proptest! {
        #[test]
        fn agrees_with_a_naive_model_after_every_operation(ops in ops()) {
            let size = 32 * 1024;
            let mut space = Space::new(size + 17);
            let mut live: Vec<Placed> = Vec::new();
            let mut dead: Vec<Placed> = Vec::new();
            for op in ops {
                match op {
                    Op::Allocate(requested, align) => {
                        let align = 1 << align;
                        match space.allocate(requested, align) {
                            Some(placed) => {
                                prop_assert!(placed.offset.is_multiple_of(align.max(GRANULE)));
                                prop_assert!(placed.offset + requested <= size);
                                prop_assert!(dead.iter().all(|d| d.generation != placed.generation));
                                live.push(placed);
                            }
                            // Only a request with a large alignment may miss a place that fits.
                            None => prop_assert!(
                                align > GRANULE || !fits(&live, size, requested, align)
                            ),
                        }
                    }
                    Op::Free(index) if !live.is_empty() => {
                        let placed = live.swap_remove(index.index(live.len()));
                        prop_assert!(space.free(placed.offset, placed.generation));
                        dead.push(placed);
                    }
                    Op::FreeAgain(index) if !dead.is_empty() => {
                        let placed = dead[index.index(dead.len())];
                        prop_assert!(!space.free(placed.offset, placed.generation));
                    }
                    _ => {}
                }
                space.check(size);
                for placed in &live {
                    prop_assert_eq!(space.at(placed.offset), Some(*placed));
                }
            }
            for placed in live {
                prop_assert!(space.free(placed.offset, placed.generation));
            }
            space.check(size);
            prop_assert_eq!(space.stats().free_ranges, 1);
            prop_assert_eq!(space.stats().largest_free, size - BLOCK_HEADER);
        }
    }

    #[test]
    fn absurd_sizes_do_not_wrap() {
        let mut space = Space::new(4096);
        assert_eq!(space.allocate(u64::MAX, 1), None);
        assert_eq!(space.allocate(u64::MAX - 100, 64), None);
        assert_eq!(space.allocate(1, 1 << 63), None);
        space.check(4096);
        assert_eq!(Space::new(63).allocate(0, 1), None, "an arena smaller than a granule");
    }
}
