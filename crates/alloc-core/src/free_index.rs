//! The free blocks of one class of one heap: best fit by size, ties by lowest address.
//!
//! Blocks are binned by size, sixty-four bins to a power of two, one size to a bin where that is
//! finer. Bins are ordered like their sizes, so the best fit is the first sufficient block of the
//! request's own bin, or else the first of the next bin that a bitmap says is not empty: no search
//! depends on how many blocks there are, except by the logarithm within one bin.
//!
//! Which block is freed or asked for next is as good as random to the processor, and a mispredicted
//! branch costs as much as forty instructions: a bin keeps its first few blocks in one cache line,
//! unordered, and always looks at all of them.

mod runs;

use crate::block::BlockIdx;
use crate::directory::ADDRESS_END;
use crate::size_class::BLOCK_BYTES_MIN;
use crate::units::Addr;
use runs::Runs;
use smallvec::SmallVec;
use std::hint::select_unpredictable;

/// Key of a free block: its size in bytes, then its address. The order of keys is the order of best
/// fit and of flushes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FreeKey {
    pub(crate) bytes: u64,
    pub(crate) addr: Addr,
}

impl FreeKey {
    /// Larger than any block's.
    const MAX: FreeKey = FreeKey { bytes: u64::MAX, addr: Addr::new(u64::MAX) };

    /// One number in the order of keys: two instructions compare it, without a branch.
    #[inline]
    fn rank(self) -> u128 {
        u128::from(self.bytes) << 64 | u128::from(self.addr.get())
    }
}

impl Ord for FreeKey {
    #[inline]
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.rank().cmp(&other.rank())
    }
}

impl PartialOrd for FreeKey {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Bins per power of two, as a power of two.
const FINENESS: u32 = 6;
/// Bits of an address in quanta: addresses stay below 2^57.
const ADDR_BITS: u32 = 48;
/// Bins are at most 2^16 quanta wide, so that size and address of a block in a bin are one number.
const STEP_MAX: u32 = u64::BITS - ADDR_BITS;
/// Blocks of at least as many bytes are in no bin.
const HUGE_BYTES_MIN: u64 = BLOCK_BYTES_MIN << (STEP_MAX + FINENESS + 1);
const BINS: usize = ((STEP_MAX + 2) << FINENESS) as usize;
const WORDS: usize = BINS.div_ceil(64);
/// Blocks in the cache line of a bin.
const FRONT: usize = 5;

const _: () = assert!(WORDS <= 64);
const _: () = assert!(size_of::<Bin>() == 64);
const _: () = assert!(ADDRESS_END / BLOCK_BYTES_MIN <= 1 << ADDR_BITS);

/// Where a key belongs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place {
    bin: usize,
    /// What is left of the size, then the address: the order within the bin. Never `u64::MAX`, for
    /// no block is that large and starts at the last quantum of the address space.
    rank: u64,
}

impl Place {
    /// Of a key, in multiples of the quantum; `None` if it is in no bin. The bin is how far the leading 1 of the size is above the finest step, then that 1 and the bits
    /// after it.
    #[inline]
    fn of(key: FreeKey) -> Option<Self> {
        if key.bytes >= HUGE_BYTES_MIN {
            return None;
        }
        let quanta = key.bytes / BLOCK_BYTES_MIN;
        let step = (quanta | 1 << FINENESS).ilog2() - FINENESS;
        let bin = (u64::from(step << FINENESS) + (quanta >> step)) as usize;
        let over = quanta & !(u64::MAX << step);
        let addr = key.addr.get() / BLOCK_BYTES_MIN;
        Some(Place { bin, rank: (over << ADDR_BITS) + addr })
    }

    #[inline]
    fn key(self) -> FreeKey {
        let step = ((self.bin as u32) >> FINENESS).saturating_sub(1);
        let least = (self.bin as u64 - u64::from(step << FINENESS)) << step;
        let quanta = least + (self.rank >> ADDR_BITS);
        let addr = (self.rank & !(u64::MAX << ADDR_BITS)) * BLOCK_BYTES_MIN;
        FreeKey { bytes: quanta * BLOCK_BYTES_MIN, addr: Addr::new(addr) }
    }
}

/// The first blocks of one bin, in any order, and then `u64::MAX`. All others, in [`FreeIndex::deep`],
/// are larger, and there are some only if there are some here.
#[derive(Clone, Debug)]
#[repr(align(64))]
struct Bin {
    ranks: [u64; FRONT],
    blocks: [Option<BlockIdx>; FRONT],
    len: u8,
    /// Whether there are others.
    deep: bool,
}

impl Default for Bin {
    fn default() -> Self {
        Bin { ranks: [u64::MAX; FRONT], blocks: [None; FRONT], len: 0, deep: false }
    }
}

impl Bin {
    /// Adds a block if there is room and it is known to come before all others.
    #[inline]
    fn push(&mut self, rank: u64, block: BlockIdx) -> bool {
        let at = usize::from(self.len);
        let fits = (at < FRONT) & !self.deep;
        if fits {
            self.ranks[at] = rank;
            self.blocks[at] = Some(block);
            self.len += 1;
        }
        fits
    }

    /// Where `rank` is; [`FRONT`] if it is not here.
    #[inline]
    fn position(&self, rank: u64) -> usize {
        (0..FRONT).fold(FRONT, |found, at| if self.ranks[at] == rank { at } else { found })
    }

    #[inline]
    fn take(&mut self, at: usize) {
        let last = usize::from(self.len) - 1;
        self.ranks[at] = self.ranks[last];
        self.blocks[at] = self.blocks[last];
        self.ranks[last] = u64::MAX;
        self.len -= 1;
    }

    /// The least that is not below `rank`, and where it is.
    #[inline]
    fn at_or_above(&self, rank: u64) -> Option<(u64, BlockIdx, usize)> {
        // What is below wraps around, and so comes after the empty places.
        let ahead = |at: usize| self.ranks[at].wrapping_sub(rank);
        let (mut least, mut found) = (ahead(0), 0);
        for at in 1..FRONT {
            let next = ahead(at);
            found = if next < least { at } else { found };
            least = least.min(next);
        }
        if least >= u64::MAX - rank {
            return None;
        }
        Some((rank + least, self.blocks[found]?, found))
    }

    /// Where the last in order is.
    fn largest(&self) -> usize {
        (1..FRONT).fold(0, |found, at| if self.ranks[at] > self.ranks[found] { at } else { found })
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: FreeKey,
    block: BlockIdx,
}

/// A free block that a search found. Its place holds until the index changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub(crate) key: FreeKey,
    pub(crate) block: BlockIdx,
    spot: Spot,
}

/// Where in the index a block is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Spot(u32);

impl Spot {
    /// Outside the bins.
    const LATEST: Spot = Spot(u32::MAX);
    /// Among those that no bin has room for.
    const DEEP: Spot = Spot(u32::MAX - 1);

    #[inline]
    const fn in_bin(bin: usize, at: usize) -> Self {
        Spot((bin << 3 | at) as u32)
    }

    #[inline]
    const fn bin(self) -> (usize, usize) {
        (self.0 as usize >> 3, self.0 as usize & 7)
    }
}

const _: () = assert!(FRONT <= 8 && BINS < 1 << 28);

#[cold]
#[inline(never)]
fn not_indexed(key: FreeKey) -> ! {
    panic!("I4: {key:?} is not in the index")
}

/// Best fit by size, ties by lowest address.
///
/// The block that came or changed last is kept aside, outside the bins: the next request is often
/// cut from it, or it merges with the next block freed, and then no bin is written at all.
#[derive(Debug, Default)]
pub(crate) struct FreeIndex {
    latest: Option<Entry>,
    /// Which words are not 0.
    summary: u64,
    /// Which bins are not empty.
    words: [u64; WORDS],
    /// Made on the first insertion.
    bins: Vec<Bin>,
    /// What the bins have no room for, by bin. Made when that is first so.
    deep: Vec<Runs<u64>>,
    /// Blocks that are in no bin.
    huge: Runs<FreeKey>,
}

impl FreeIndex {
    #[inline]
    pub(crate) fn insert(&mut self, key: FreeKey, block: BlockIdx) {
        if let Some(before) = self.latest.replace(Entry { key, block }) {
            self.insert_binned(before);
        }
    }

    #[inline]
    fn insert_binned(&mut self, Entry { key, block }: Entry) {
        match Place::of(key) {
            Some(place) => self.insert_at(place, block),
            None => self.huge.insert(key, block),
        }
    }

    #[inline]
    fn insert_at(&mut self, Place { bin, rank }: Place, block: BlockIdx) {
        let pushed = self.bins.get_mut(bin).is_some_and(|slot| slot.push(rank, block));
        if !pushed {
            self.insert_deep(bin, rank, block);
        }
        self.words[bin / 64] |= 1 << (bin % 64);
        self.summary |= 1 << (bin / 64);
    }

    /// [`insert_at`](Self::insert_at) where the bin is full, or has others.
    #[inline(never)]
    fn insert_deep(&mut self, bin: usize, mut rank: u64, mut block: BlockIdx) {
        if self.bins.is_empty() {
            self.bins.resize_with(BINS, Bin::default);
            self.bins[bin].push(rank, block);
            return;
        }
        self.make_room();
        let (slot, deep) = (&mut self.bins[bin], &mut self.deep[bin]);
        let is_first = deep.first().is_none_or(|first| rank < first.0);
        if is_first && usize::from(slot.len) < FRONT {
            slot.deep = false;
            slot.push(rank, block);
            slot.deep = !deep.is_empty();
            return;
        }
        if is_first {
            // The largest here has to make room, if it is not the new one.
            let at = slot.largest();
            if slot.ranks[at] > rank {
                std::mem::swap(&mut slot.ranks[at], &mut rank);
                block = slot.blocks[at].replace(block).expect("I10: a full bin has blocks");
            }
        }
        deep.insert(rank, block);
        slot.deep = true;
    }

    /// Makes what a bin that is full needs, where there are bins.
    pub(crate) fn make_room(&mut self) {
        if self.deep.is_empty() && !self.bins.is_empty() {
            self.deep.resize_with(BINS, Runs::default);
        }
    }

    /// # Panics
    /// If no block has this key.
    #[inline]
    pub(crate) fn remove(&mut self, key: FreeKey) {
        match self.latest {
            Some(latest) if latest.key == key => self.latest = None,
            _ => self.remove_binned(key),
        }
    }

    #[inline(never)]
    fn remove_binned(&mut self, key: FreeKey) {
        let Some(Place { bin, rank }) = Place::of(key) else { return self.huge.remove(key) };
        let slot = &mut self.bins[bin];
        if slot.deep {
            return self.remove_deep(bin, rank);
        }
        let at = slot.position(rank);
        if at == FRONT {
            not_indexed(key);
        }
        self.take_from(bin, at);
    }

    /// Takes a block out of a bin that has no others.
    #[inline]
    fn take_from(&mut self, bin: usize, at: usize) {
        let slot = &mut self.bins[bin];
        slot.take(at);
        // Whether the bin is empty now is hard to foretell, so there is no branch.
        let word = &mut self.words[bin / 64];
        *word &= !(u64::from(slot.len == 0) << (bin % 64));
        self.summary &= !(u64::from(*word == 0) << (bin / 64));
    }

    /// [`remove`](Self::remove) of what a search found.
    #[inline]
    pub(crate) fn take(&mut self, found: &Found) {
        if found.spot == Spot::LATEST {
            self.latest = None;
        } else {
            self.take_binned(found);
        }
    }

    #[inline]
    fn take_binned(&mut self, Found { key, spot, .. }: &Found) {
        let (bin, at) = spot.bin();
        match self.bins.get(bin) {
            Some(slot) if !slot.deep => self.take_from(bin, at),
            _ => self.remove_binned(*key),
        }
    }

    /// [`replace`](Self::replace) of what a search found.
    #[inline]
    pub(crate) fn put_in_place(&mut self, found: &Found, key: FreeKey, block: BlockIdx) {
        if found.spot == Spot::LATEST {
            self.latest = Some(Entry { key, block });
        } else {
            self.take_binned(found);
            self.insert(key, block);
        }
    }

    /// [`remove_binned`](Self::remove_binned) where the bin has others.
    #[inline(never)]
    fn remove_deep(&mut self, bin: usize, rank: u64) {
        let (slot, deep) = (&mut self.bins[bin], &mut self.deep[bin]);
        match slot.position(rank) {
            FRONT => deep.remove(rank),
            at => slot.take(at),
        }
        if slot.len == 0 {
            slot.deep = false;
            // Not all that there is room for, so that the next insertion finds some.
            for (rank, block) in std::iter::from_fn(|| deep.pop_first()).take(FRONT - 1) {
                slot.push(rank, block);
            }
        }
        slot.deep = !deep.is_empty();
    }

    /// The same as removing `old` and inserting the other: a block became larger or smaller.
    ///
    /// # Panics
    /// If no block has the key `old`.
    #[inline]
    pub(crate) fn replace(&mut self, old: FreeKey, key: FreeKey, block: BlockIdx) {
        match &mut self.latest {
            Some(latest) if latest.key == old => *latest = Entry { key, block },
            _ => {
                self.remove_binned(old);
                self.insert(key, block);
            }
        }
    }

    /// The smallest block of at least `bytes`; among equals the lowest.
    #[inline]
    pub(crate) fn best_fit(&self, bytes: u64) -> Option<Found> {
        self.at_or_above(FreeKey { bytes, addr: Addr::NULL })
    }

    /// The next block in order.
    pub(crate) fn after(&self, key: FreeKey) -> Option<Found> {
        self.at_or_above(FreeKey { addr: key.addr + BLOCK_BYTES_MIN, ..key })
    }

    #[inline(always)]
    fn at_or_above(&self, key: FreeKey) -> Option<Found> {
        let binned = self.binned_at_or_above(key);
        let Some(Entry { key: latest, block }) = self.latest else { return binned };
        let spot = Spot::LATEST;
        let binned = binned.unwrap_or(Found { key: FreeKey::MAX, block, spot });
        // Which one it is is hard to foretell.
        let is_latest = (latest >= key) & (latest < binned.key);
        let found = Found {
            key: select_unpredictable(is_latest, latest, binned.key),
            block: select_unpredictable(is_latest, block, binned.block),
            spot: select_unpredictable(is_latest, spot, binned.spot),
        };
        (found.key != FreeKey::MAX).then_some(found)
    }

    #[inline]
    fn binned_at_or_above(&self, key: FreeKey) -> Option<Found> {
        let deep = |(key, block)| Found { key, block, spot: Spot::DEEP };
        let Some(own) = Place::of(key) else { return self.huge.at_or_above(key).map(deep) };
        let Some(bin) = self.first_bin(own.bin) else { return self.huge.first().map(deep) };
        let rank = if bin == own.bin { own.rank } else { 0 };
        match self.bins[bin].at_or_above(rank) {
            Some((rank, block, at)) => {
                Some(Found { key: Place { bin, rank }.key(), block, spot: Spot::in_bin(bin, at) })
            }
            None => self.beyond_front(own),
        }
    }

    /// [`binned_at_or_above`](Self::binned_at_or_above) where the first blocks of the bin are too small.
    #[inline(never)]
    fn beyond_front(&self, Place { bin, rank }: Place) -> Option<Found> {
        let spot = Spot::DEEP;
        let found = |bin, (rank, block)| Found { key: Place { bin, rank }.key(), block, spot };
        let deep = self.deep.get(bin).and_then(|deep| deep.at_or_above(rank));
        deep.map(|deep| found(bin, deep)).or_else(|| match self.first_bin(bin + 1) {
            Some(next) => {
                let first = self.bins[next].at_or_above(0);
                first.map(|(rank, block, _)| found(next, (rank, block)))
            }
            None => self.huge.first().map(|(key, block)| Found { key, block, spot }),
        })
    }

    /// The first bin from `from` on that is not empty.
    #[inline]
    fn first_bin(&self, from: usize) -> Option<usize> {
        let word = from / 64;
        let here = self.words.get(word)? & (u64::MAX << (from % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        // Shifting by word + 1 would overflow for the last possible word.
        let later = self.summary & (u64::MAX << word) & !(1 << word);
        let word = later.trailing_zeros() as usize;
        let bits = self.words.get(word)?;
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    /// Reads the line of every bin. What it returns means nothing.
    pub(crate) fn read_through(&self) -> u64 {
        self.bins.iter().map(|bin| bin.ranks[0]).fold(0, u64::wrapping_add)
    }

    /// All blocks, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (FreeKey, BlockIdx)> + '_ {
        self.iter_from(0)
    }

    /// The blocks of at least `bytes`, ascending.
    pub(crate) fn iter_from(&self, bytes: u64) -> impl Iterator<Item = (FreeKey, BlockIdx)> + '_ {
        let mut latest = self.latest.map(|latest| (latest.key, latest.block));
        let key = FreeKey { bytes, addr: Addr::NULL };
        let first = Place::of(key).and_then(|own| self.first_bin(own.bin));
        let occupied = std::iter::successors(first, |bin| self.first_bin(bin + 1));
        let mut binned =
            occupied.flat_map(|bin| self.iter_bin(bin)).chain(self.huge.iter()).peekable();
        let all = std::iter::from_fn(move || match (latest, binned.peek()) {
            (Some((first, _)), Some((next, _))) if first > *next => binned.next(),
            (Some(_), _) => latest.take(),
            (None, _) => binned.next(),
        });
        all.skip_while(move |(key, _)| key.bytes < bytes)
    }

    fn iter_bin(&self, bin: usize) -> impl Iterator<Item = (FreeKey, BlockIdx)> + '_ {
        let slot = &self.bins[bin];
        let front = slot.ranks.iter().zip(&slot.blocks).take(usize::from(slot.len));
        let mut front: SmallVec<[_; FRONT]> =
            front.filter_map(|(rank, block)| Some((*rank, (*block)?))).collect();
        front.sort_unstable();
        let deep = self.deep.get(bin).into_iter().flat_map(Runs::iter);
        let found = move |(rank, block)| (Place { bin, rank }.key(), block);
        front.into_iter().chain(deep).map(found)
    }

    pub(crate) fn contains(&self, key: FreeKey, block: BlockIdx) -> bool {
        self.at_or_above(key).is_some_and(|found| (found.key, found.block) == (key, block))
    }

    pub(crate) fn len(&self) -> usize {
        self.iter().count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::collections::btree_map::Entry;
    use std::ops::Bound;

    fn key(bytes: u64, addr: u64) -> FreeKey {
        FreeKey { bytes, addr: Addr::new(addr) }
    }

    fn place(bytes: u64, addr: u64) -> Place {
        Place::of(key(bytes, addr)).expect("a bin")
    }

    #[test]
    fn places_are_ordered_like_keys() {
        let mut last = place(512, 0);
        assert_eq!(last.bin, 1);
        for quanta in 1..200_000u64 {
            let lowest = place(quanta * 512, 0);
            assert!(
                lowest.bin == last.bin && lowest.rank >= last.rank || lowest.bin == last.bin + 1
            );
            last = place(quanta * 512, ADDRESS_END - quanta * 512);
            assert!(last.bin == lowest.bin && last.rank > lowest.rank, "{quanta}");
            assert_eq!(lowest.key(), key(quanta * 512, 0));
            assert_eq!(last.key(), key(quanta * 512, ADDRESS_END - quanta * 512));
        }
    }

    #[test]
    fn the_largest_block_of_a_bin_and_the_first_of_none() {
        let largest = HUGE_BYTES_MIN - 512;
        let top = place(largest, ADDRESS_END - largest);
        assert_eq!((top.bin, top.key()), (BINS - 1, key(largest, ADDRESS_END - largest)));
        assert!(top.rank < u64::MAX);
        assert_eq!(Place::of(key(HUGE_BYTES_MIN, 0)), None);
    }

    /// xorshift64*
    struct Random(u64);

    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
        }
    }

    /// The same operations on the index and on a `BTreeMap`, compared after each. Sizes are multiples of
    /// `unit` quanta.
    fn differential(seed: u64, steps: usize, sizes: u64, addresses: u64, unit: u64) {
        let mut random = Random(seed);
        let mut index = FreeIndex::default();
        let mut model = BTreeMap::new();
        for step in 0..steps {
            let quanta = unit * (1 + random.below(sizes) * random.below(sizes).max(1));
            let at = key(quanta * 512, (1 + random.below(addresses)) * 512);
            // Grow for a while, then shrink, so that runs split and vanish.
            let grows = (step / 2_000).is_multiple_of(2);
            if random.below(4) == 0 {
                // A block changes its size and, as when its low part goes, its address.
                let found = model.range(at..).next().map(|(k, b)| (*k, *b));
                let new = key(at.bytes + 512 * random.below(3), at.addr.get() + 512);
                if let Some((old, block)) = found.filter(|_| !model.contains_key(&new)) {
                    index.replace(old, new, block);
                    model.remove(&old);
                    model.insert(new, block);
                }
            } else if random.below(3) < if grows { 2 } else { 1 } {
                if let Entry::Vacant(place) = model.entry(at) {
                    let block = BlockIdx::new(step + 1);
                    index.insert(at, block);
                    place.insert(block);
                }
            } else if let Some((found, _)) = model.range(at..).next().map(|(k, b)| (*k, *b)) {
                index.remove(found);
                model.remove(&found);
            }
            let fit = model.range(key(at.bytes, 0)..).next().map(|(k, b)| (*k, *b));
            let pair = |found: Found| (found.key, found.block);
            assert_eq!(index.best_fit(at.bytes).map(pair), fit);
            let after = (Bound::Excluded(at), Bound::Unbounded);
            assert_eq!(index.after(at).map(pair), model.range(after).next().map(|(k, b)| (*k, *b)));
            if step % 997 == 0 {
                assert_eq!(index.len(), model.len());
                let from = index.iter_from(at.bytes);
                assert!(from.eq(model.range(key(at.bytes, 0)..).map(|(k, b)| (*k, *b))));
                assert!(index.iter().eq(model.iter().map(|(k, b)| (*k, *b))));
                assert!(model.iter().all(|(k, b)| index.contains(*k, *b)));
            }
        }
    }

    #[test]
    fn agrees_with_a_btree() {
        differential(1, 20_000, 300, 1_000, 1);
        differential(2, 20_000, 3, 100_000, 1);
        differential(3, 20_000, 60_000, 50, 1);
        differential(4, 5_000, 2, 20, 1);
        // About half of them are in no bin.
        differential(5, 20_000, 64, 1_000, HUGE_BYTES_MIN / 512 / 1_000);
        // Widest bins, with room for few.
        differential(6, 20_000, 4, 100_000, HUGE_BYTES_MIN / 512 / 10);
    }
}
