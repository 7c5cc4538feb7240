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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FreeKey {
    pub(crate) bytes: u64,
    pub(crate) addr: Addr,
}

impl FreeKey {
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
const FINENESS: u32 = 4;
/// Block sizes stay below 2^62 bytes, 2^53 quanta.
const BINS: usize = ((53 - FINENESS + 1) << FINENESS) as usize;
const WORDS: usize = BINS.div_ceil(64);
/// Longer runs are split, so that insertion moves little.
const RUN_MAX: usize = 64;

/// The bin of a block size (a multiple of the quantum, not 0): how far its leading 1 is above the
/// finest step, then that 1 and the bits after it.
#[inline]
fn bin_of(bytes: u64) -> usize {
    let quanta = bytes / BLOCK_BYTES_MIN;
    let step = (quanta | 1 << FINENESS).ilog2() - FINENESS;
    (u64::from(step << FINENESS) + (quanta >> step)) as usize
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: FreeKey,
    block: BlockIdx,
}

/// Blocks in descending order: the best one is last, where it is cheap to take.
type Run = Vec<Entry>;

/// Where `key` is in a run, or where it would be.
fn position(run: &Run, key: FreeKey) -> usize {
    run.partition_point(|entry| entry.key > key)
}

/// The blocks of one bin. The best one is kept apart: most bins hold no other, and most searches ask
/// for no other.
#[derive(Debug, Default)]
struct Bin {
    /// `None` only in an empty bin.
    best: Option<Entry>,
    /// The next better ones. Empty only if `rest` is.
    low: Run,
    /// Larger keys, run by run, ascending.
    rest: Vec<Run>,
}

impl Bin {
    #[inline]
    fn insert(&mut self, entry: Entry) {
        match self.best {
            None => self.best = Some(entry),
            Some(best) if entry.key < best.key && self.low.len() < RUN_MAX => {
                self.low.push(best);
                self.best = Some(entry);
            }
            Some(best) if entry.key < best.key => {
                self.insert_among(best);
                self.best = Some(entry);
            }
            Some(_) => self.insert_among(entry),
        }
    }

    /// Removes `key`. Returns whether the bin is empty now.
    #[inline]
    fn remove(&mut self, key: FreeKey) -> bool {
        if self.best.is_none_or(|best| best.key != key) {
            self.remove_among(key);
            return false;
        }
        self.best = self.low.pop();
        if self.low.is_empty() && !self.rest.is_empty() {
            self.low = self.rest.remove(0);
        }
        self.best.is_none()
    }

    /// Puts `new` in the place of `old`, if that is its place among the others.
    #[inline]
    fn replace_best(&mut self, old: FreeKey, new: Entry) -> bool {
        let next = self.low.last();
        match &mut self.best {
            Some(best) if best.key == old && next.is_none_or(|next| new.key < next.key) => {
                *best = new;
                true
            }
            _ => false,
        }
    }

    /// The smallest entry that is not below `key`.
    #[inline]
    fn at_or_above(&self, key: FreeKey) -> Option<&Entry> {
        match &self.best {
            Some(best) if best.key >= key => Some(best),
            _ if self.low.is_empty() => None,
            _ => self.at_or_above_among(key),
        }
    }

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

    #[inline(never)]
    fn at_or_above_among(&self, key: FreeKey) -> Option<&Entry> {
        let within = |run: &'_ Run| run.partition_point(|entry| entry.key >= key).checked_sub(1);
        if self.low.first()?.key >= key {
            return self.low.get(within(&self.low)?);
        }
        let run = self.rest.get(self.rest.partition_point(|run| run[0].key < key))?;
        run.get(within(run)?)
    }

    fn iter(&self) -> impl Iterator<Item = &Entry> {
        let rest = self.rest.iter().flat_map(|run| run.iter().rev());
        self.best.iter().chain(self.low.iter().rev()).chain(rest)
    }
}

/// Best fit by size, ties by lowest address.
///
/// The block that came or changed last is kept aside, outside the bins: most often the next request
/// is cut from it, or it merges with the next block freed, and then no bin is touched at all.
#[derive(Debug, Default)]
pub(crate) struct FreeIndex {
    latest: Option<Entry>,
    /// Which words are not 0.
    summary: u64,
    /// Which bins are not empty.
    words: [u64; WORDS],
    /// Made on the first insertion.
    bins: Vec<Bin>,
}

const _: () = assert!(WORDS <= 64);

impl FreeIndex {
    #[inline]
    pub(crate) fn insert(&mut self, key: FreeKey, block: BlockIdx) {
        if let Some(before) = self.latest.replace(Entry { key, block }) {
            self.insert_binned(before);
        }
    }

    #[inline(never)]
    fn insert_binned(&mut self, entry: Entry) {
        let bin = bin_of(entry.key.bytes);
        match self.bins.get_mut(bin) {
            Some(bin) => bin.insert(entry),
            None => self.make_bins()[bin].insert(entry),
        }
        self.words[bin / 64] |= 1 << (bin % 64);
        self.summary |= 1 << (bin / 64);
    }

    #[cold]
    fn make_bins(&mut self) -> &mut [Bin] {
        self.bins.resize_with(BINS, Bin::default);
        &mut self.bins
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
        let bin = bin_of(key.bytes);
        if self.bins[bin].remove(key) {
            self.words[bin / 64] &= !(1 << (bin % 64));
            if self.words[bin / 64] == 0 {
                self.summary &= !(1 << (bin / 64));
            }
        }
    }

    /// The same as removing `old` and inserting the other: a block became larger or smaller.
    ///
    /// # Panics
    /// If no block has the key `old`.
    #[inline]
    pub(crate) fn replace(&mut self, old: FreeKey, key: FreeKey, block: BlockIdx) {
        let new = Entry { key, block };
        match &mut self.latest {
            Some(latest) if latest.key == old => *latest = new,
            _ => self.replace_binned(old, new),
        }
    }

    #[inline(never)]
    fn replace_binned(&mut self, old: FreeKey, new: Entry) {
        let bin = bin_of(old.bytes);
        if bin != bin_of(new.key.bytes) || !self.bins[bin].replace_best(old, new) {
            self.remove_binned(old);
            self.insert(new.key, new.block);
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
        let latest = self.latest.as_ref().filter(|latest| latest.key >= key);
        let binned = self.binned_at_or_above(key);
        let entry = match (latest, binned) {
            (Some(latest), Some(binned)) if latest.key < binned.key => latest,
            (latest, binned) => binned.or(latest)?,
        };
        Some((entry.key, entry.block))
    }

    #[inline]
    fn binned_at_or_above(&self, key: FreeKey) -> Option<&Entry> {
        let own = bin_of(key.bytes);
        let bin = self.first_bin(own)?;
        let best = self.bins[bin].best.as_ref();
        match best {
            Some(best) if best.key < key => self.beyond_best(own, key),
            _ => best,
        }
    }

    /// [`binned_at_or_above`](Self::binned_at_or_above) where the best block of the bin is too small.
    #[inline(never)]
    fn beyond_best(&self, bin: usize, key: FreeKey) -> Option<&Entry> {
        let own = self.bins[bin].at_or_above(key);
        own.or_else(|| self.bins[self.first_bin(bin + 1)?].best.as_ref())
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

    /// All blocks, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (FreeKey, BlockIdx)> + '_ {
        self.iter_from(0)
    }

    /// The blocks of at least `bytes`, ascending.
    pub(crate) fn iter_from(&self, bytes: u64) -> impl Iterator<Item = (FreeKey, BlockIdx)> + '_ {
        let mut latest = self.latest.as_ref().filter(|latest| latest.key.bytes >= bytes);
        let first = self.first_bin(bin_of(bytes));
        let occupied = std::iter::successors(first, |bin| self.first_bin(bin + 1));
        let bins = occupied.flat_map(|bin| self.bins[bin].iter());
        let mut binned = bins.skip_while(move |entry| entry.key.bytes < bytes).peekable();
        let entries = std::iter::from_fn(move || match (latest, binned.peek()) {
            (Some(first), Some(next)) if first.key > next.key => binned.next(),
            (Some(_), _) => latest.take(),
            (None, _) => binned.next(),
        });
        entries.map(|entry| (entry.key, entry.block))
    }

    pub(crate) fn contains(&self, key: FreeKey, block: BlockIdx) -> bool {
        self.at_or_above(key) == Some((key, block))
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
            assert_eq!(index.best_fit(at.bytes), fit);
            let after = (Bound::Excluded(at), Bound::Unbounded);
            assert_eq!(index.after(at), model.range(after).next().map(|(k, b)| (*k, *b)));
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
        differential(1, 20_000, 300, 1_000);
        differential(2, 20_000, 3, 100_000);
        differential(3, 20_000, 60_000, 50);
        differential(4, 5_000, 2, 20);
    }
}
