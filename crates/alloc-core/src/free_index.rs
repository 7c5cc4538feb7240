//! The free blocks of one class of one heap: best fit by size, ties by lowest address.
//!
//! Blocks are binned by size, sixteen bins to a power of two, one size to a bin where that is
//! finer. Bins are ordered like their sizes, so the best fit is the first sufficient block of the
//! request's own bin, or else the first of the next bin that a bitmap says is not empty: no search
//! depends on how many blocks there are, except by the logarithm within one bin.

use crate::block::BlockIdx;
use crate::size_class::BLOCK_BYTES_MIN;
use crate::units::Addr;

/// Key of a free block: its size in bytes, then its address. The order of keys is the order of best
/// fit and of flushes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct FreeKey {
    pub(crate) bytes: u64,
    pub(crate) addr: Addr,
}

/// Bins per power of two, as a power of two.
const FINENESS: u32 = 4;
/// Below this many quanta every size has its own bin.
const EXACT_BELOW: u64 = 2 << FINENESS;
/// Block sizes stay below 2^62 bytes.
const BINS: usize = (EXACT_BELOW + ((62 - 9 - FINENESS as u64 - 1) << FINENESS)) as usize;
const WORDS: usize = BINS.div_ceil(64);
/// Longer runs are split, so that insertion moves little.
const RUN_MAX: usize = 64;

/// The bin of a block size (a multiple of the quantum, not 0).
#[inline]
fn bin_of(bytes: u64) -> usize {
    let quanta = bytes / BLOCK_BYTES_MIN;
    if quanta < EXACT_BELOW {
        return quanta as usize;
    }
    let log = quanta.ilog2();
    let step = (quanta >> (log - FINENESS)) & ((1 << FINENESS) - 1);
    (EXACT_BELOW + (u64::from(log - FINENESS - 1) << FINENESS) + step) as usize
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: FreeKey,
    block: BlockIdx,
}

/// Blocks in descending order: the best one is last, where it is cheap to take.
type Run = Vec<Entry>;

/// Position of `key` in a run, or where it would be.
fn position(run: &Run, key: FreeKey) -> usize {
    match run.last() {
        // Most bins hold one block.
        Some(last) if run.len() == 1 => usize::from(last.key > key),
        _ => run.partition_point(|entry| entry.key > key),
    }
}

/// The blocks of one bin, cut into runs; `low` holds the smallest keys and is empty only if the bin
/// is.
#[derive(Debug, Default)]
struct Bin {
    low: Run,
    /// Larger keys, run by run, ascending.
    rest: Vec<Run>,
}

impl Bin {
    /// The run that holds `key` or would: the first whose largest key is not below it.
    fn run_of(&mut self, key: FreeKey) -> usize {
        if self.rest.is_empty() || self.low.first().is_some_and(|entry| entry.key >= key) {
            return 0;
        }
        let rest = self.rest.partition_point(|run| run[0].key < key);
        (rest + 1).min(self.rest.len())
    }

    fn run(&mut self, index: usize) -> &mut Run {
        match index {
            0 => &mut self.low,
            _ => &mut self.rest[index - 1],
        }
    }

    #[inline]
    fn insert(&mut self, entry: Entry) {
        // The usual cases: an empty bin, or a block better than the one in it.
        if self.low.last().is_none_or(|last| last.key > entry.key && self.low.len() < RUN_MAX) {
            return self.low.push(entry);
        }
        self.insert_among(entry);
    }

    #[inline(never)]
    fn insert_among(&mut self, entry: Entry) {
        let index = self.run_of(entry.key);
        let run = self.run(index);
        let at = position(run, entry.key);
        debug_assert!(
            run.get(at).is_none_or(|next| next.key != entry.key),
            "I2: one address twice"
        );
        run.insert(at, entry);
        if run.len() > RUN_MAX {
            // The upper half, which comes first, becomes a run of its own above.
            let lower = run.split_off(RUN_MAX / 2);
            let upper = std::mem::replace(run, lower);
            self.rest.insert(index, upper);
        }
    }

    /// Removes `key`. Returns whether the bin is empty now.
    #[inline]
    fn remove(&mut self, key: FreeKey) -> bool {
        // The usual case: the best block of the bin.
        if self.low.len() == 1 || self.low.last().is_some_and(|last| last.key == key) {
            if self.low.len() > 1 {
                self.low.pop();
                return false;
            }
            if self.rest.is_empty() && self.low[0].key == key {
                self.low.clear();
                return true;
            }
        }
        self.remove_among(key);
        self.low.is_empty()
    }

    #[inline(never)]
    fn remove_among(&mut self, key: FreeKey) {
        let index = self.run_of(key);
        let run = self.run(index);
        let at = position(run, key);
        assert!(
            run.get(at).is_some_and(|entry| entry.key == key),
            "I4: the free block at {} is not in the index",
            key.addr
        );
        run.remove(at);
        if run.is_empty() && !self.rest.is_empty() {
            // An empty `low` takes the place of the next run.
            let next = self.rest.remove(index.saturating_sub(1));
            if index == 0 {
                self.low = next;
            }
        }
    }

    /// The smallest entry that is not below `key`.
    #[inline]
    fn at_or_above(&self, key: FreeKey) -> Option<&Entry> {
        match self.low.last() {
            None => None,
            Some(last) if last.key >= key => Some(last),
            Some(_) if self.low.len() == 1 && self.rest.is_empty() => None,
            Some(_) => self.at_or_above_among(key),
        }
    }

    #[inline(never)]
    fn at_or_above_among(&self, key: FreeKey) -> Option<&Entry> {
        if self.low.first()?.key >= key {
            let at = self.low.partition_point(|entry| entry.key >= key);
            return self.low.get(at.checked_sub(1)?);
        }
        let run = self.rest.get(self.rest.partition_point(|run| run[0].key < key))?;
        let at = run.partition_point(|entry| entry.key >= key);
        run.get(at.checked_sub(1)?)
    }

    fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.low.iter().rev().chain(self.rest.iter().flat_map(|run| run.iter().rev()))
    }
}

/// Best fit by size, ties by lowest address.
///
/// The block that came last is kept aside, outside the bins: most often the next request is cut
/// from it, or it merges with the next block freed, and then the bins are not touched at all.
#[derive(Debug, Default)]
pub(crate) struct FreeIndex {
    latest: Option<Entry>,
    /// Made on the first insertion.
    bins: Vec<Bin>,
    /// Which bins are not empty.
    words: [u64; WORDS],
    /// Which words are not 0.
    summary: u64,
    len: usize,
}

const _: () = assert!(WORDS <= 64);

impl FreeIndex {
    #[inline]
    pub(crate) fn insert(&mut self, key: FreeKey, block: BlockIdx) {
        self.len += 1;
        if let Some(before) = self.latest.replace(Entry { key, block }) {
            self.insert_binned(before);
        }
    }

    fn insert_binned(&mut self, entry: Entry) {
        if self.bins.is_empty() {
            self.make_bins();
        }
        let bin = bin_of(entry.key.bytes);
        self.bins[bin].insert(entry);
        self.words[bin / 64] |= 1 << (bin % 64);
        self.summary |= 1 << (bin / 64);
    }

    #[cold]
    fn make_bins(&mut self) {
        self.bins.resize_with(BINS, Bin::default);
    }

    /// # Panics
    /// If no block has this key.
    #[inline]
    pub(crate) fn remove(&mut self, key: FreeKey) {
        self.len -= 1;
        match self.latest {
            Some(latest) if latest.key == key => self.latest = None,
            _ => self.remove_binned(key),
        }
    }

    fn remove_binned(&mut self, key: FreeKey) {
        let bin = bin_of(key.bytes);
        if self.bins[bin].remove(key) {
            self.words[bin / 64] &= !(1 << (bin % 64));
            if self.words[bin / 64] == 0 {
                self.summary &= !(1 << (bin / 64));
            }
        }
    }

    /// The smallest block of at least `bytes`; among equals the lowest.
    #[inline]
    pub(crate) fn best_fit(&self, bytes: u64) -> Option<(FreeKey, BlockIdx)> {
        self.at_or_above(FreeKey { bytes, addr: Addr::NULL })
    }

    /// The next block in order.
    pub(crate) fn after(&self, key: FreeKey) -> Option<(FreeKey, BlockIdx)> {
        self.at_or_above(FreeKey { addr: Addr::new(key.addr.get() + 1), ..key })
    }

    #[inline]
    fn at_or_above(&self, key: FreeKey) -> Option<(FreeKey, BlockIdx)> {
        let latest = self.latest.filter(|latest| latest.key >= key);
        let binned = self.binned_at_or_above(key);
        let entry = match (latest, binned) {
            (Some(latest), Some(binned)) if latest.key < binned.key => latest,
            (latest, None) => latest?,
            (_, Some(binned)) => *binned,
        };
        Some((entry.key, entry.block))
    }

    #[inline]
    fn binned_at_or_above(&self, key: FreeKey) -> Option<&Entry> {
        let bin = bin_of(key.bytes);
        if let Some(entry) = self.bins.get(bin)?.at_or_above(key) {
            return Some(entry);
        }
        self.bins[self.next_bin(bin + 1)?].low.last()
    }

    /// The first bin from `from` on that is not empty.
    fn next_bin(&self, from: usize) -> Option<usize> {
        let word = from / 64;
        if word >= WORDS {
            return None;
        }
        let here = self.words[word] & (u64::MAX << (from % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        // Shifting by word + 1 would overflow for the last possible word.
        let later = self.summary & (u64::MAX << word) & !(1 << word);
        if later == 0 {
            return None;
        }
        let word = later.trailing_zeros() as usize;
        Some(word * 64 + self.words[word].trailing_zeros() as usize)
    }

    /// All blocks, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (FreeKey, BlockIdx)> + '_ {
        let binned = || self.bins.iter().flat_map(Bin::iter);
        let is_below = |entry: &&Entry| self.latest.is_some_and(|latest| entry.key < latest.key);
        binned()
            .take_while(is_below)
            .chain(&self.latest)
            .chain(binned().skip_while(is_below))
            .map(|entry| (entry.key, entry.block))
    }

    /// The blocks of at least `bytes`, ascending.
    pub(crate) fn iter_from(&self, bytes: u64) -> impl Iterator<Item = (FreeKey, BlockIdx)> + '_ {
        let from = FreeKey { bytes, addr: Addr::NULL };
        std::iter::successors(self.at_or_above(from), |(key, _)| self.after(*key))
    }

    pub(crate) fn contains(&self, key: FreeKey, block: BlockIdx) -> bool {
        self.at_or_above(key) == Some((key, block))
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
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

    #[test]
    fn bins_are_ordered_like_sizes() {
        let mut last = 0;
        for quanta in 1..200_000u64 {
            let bin = bin_of(quanta * 512);
            assert!(bin == last || bin == last + 1, "{quanta}");
            last = bin;
        }
        assert!(bin_of((1 << 62) - 512) < BINS);
        assert_eq!(bin_of(512), 1);
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

    /// The same operations on the index and on a `BTreeMap`, compared after each.
    fn differential(seed: u64, steps: usize, sizes: u64, addresses: u64) {
        let mut random = Random(seed);
        let mut index = FreeIndex::default();
        let mut model = BTreeMap::new();
        for step in 0..steps {
            let quanta = 1 + random.below(sizes) * random.below(sizes).max(1);
            let at = key(quanta * 512, (1 + random.below(addresses)) * 512);
            // Grow for a while, then shrink, so that runs split and vanish.
            let grows = (step / 2_000).is_multiple_of(2);
            if random.below(3) < if grows { 2 } else { 1 } {
                if let Entry::Vacant(place) = model.entry(at) {
                    let block = BlockIdx::new(step as u32);
                    index.insert(at, block);
                    place.insert(block);
                }
            } else if let Some((found, _)) = model.range(at..).next().map(|(k, b)| (*k, *b)) {
                index.remove(found);
                model.remove(&found);
            }
            assert_eq!(index.len(), model.len());
            let fit = model.range(key(at.bytes, 0)..).next().map(|(k, b)| (*k, *b));
            assert_eq!(index.best_fit(at.bytes), fit);
            let after = (Bound::Excluded(at), Bound::Unbounded);
            assert_eq!(index.after(at), model.range(after).next().map(|(k, b)| (*k, *b)));
            if step % 997 == 0 {
                assert!(index.iter().eq(model.iter().map(|(k, b)| (*k, *b))));
                assert!(model.iter().all(|(k, b)| index.contains(*k, *b)));
            }
        }
    }

    #[test]
    fn agrees_with_a_btree() {
        differential(1, 20_000, 300, 1_000);
        differential(2, 20_000, 3, 100_000);
        differential(3, 20_000, 60_000, 50);
        differential(4, 5_000, 2, 20);
    }
}
