//! The free blocks of one heap: best fit by size, then address.
//!
//! Sizes are multiples of the heap's granule. The first [`BINS`] multiples have a bin each, found
//! through two levels of bitmap; larger sizes share one ordered map.

use crate::units::Addr;
use std::collections::BTreeMap;

const WORD: usize = 64;
const BINS: usize = WORD * WORD;

/// A free block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct FreeBlock {
    pub(crate) bytes: u64,
    pub(crate) addr: Addr,
    /// Its slot in the block table.
    pub(crate) index: u32,
}

/// A bin with more blocks than this becomes a tree, as keeping a list in order takes time
/// proportional to its length.
const FEW_MAX: usize = 32;

/// The blocks of one size. Most bins hold none or a few.
#[derive(Debug)]
enum Bin {
    /// By address, the highest first.
    Few(Vec<(Addr, u32)>),
    Many(BTreeMap<Addr, u32>),
}

impl Bin {
    fn new() -> Self {
        Bin::Few(Vec::new())
    }

    #[inline]
    fn is_empty(&self) -> bool {
        match self {
            Bin::Few(blocks) => blocks.is_empty(),
            Bin::Many(blocks) => blocks.is_empty(),
        }
    }

    /// Adds a block; the one that was there already, if any.
    fn insert(&mut self, addr: Addr, index: u32) -> Option<u32> {
        let blocks = match self {
            Bin::Few(blocks) => blocks,
            Bin::Many(blocks) => return blocks.insert(addr, index),
        };
        if blocks.is_empty() {
            blocks.push((addr, index));
            return None;
        }
        let at = blocks.partition_point(|&(other, _)| other > addr);
        if let Some(&(_, before)) = blocks.get(at).filter(|&&(other, _)| other == addr) {
            return Some(before);
        }
        blocks.insert(at, (addr, index));
        if blocks.len() > FEW_MAX {
            *self = Bin::Many(blocks.drain(..).collect());
        }
        None
    }

    fn remove(&mut self, addr: Addr) -> Option<u32> {
        match self {
            Bin::Few(blocks) => {
                let at = blocks.iter().position(|&(other, _)| other == addr)?;
                Some(blocks.remove(at).1)
            }
            Bin::Many(blocks) => blocks.remove(&addr),
        }
    }

    fn pop_lowest(&mut self) -> Option<(Addr, u32)> {
        match self {
            Bin::Few(blocks) => blocks.pop(),
            Bin::Many(blocks) => blocks.pop_first(),
        }
    }

    /// All blocks by address, ascending.
    fn iter(&self) -> impl Iterator<Item = (Addr, u32)> + '_ {
        let (few, many) = match self {
            Bin::Few(blocks) => (Some(blocks), None),
            Bin::Many(blocks) => (None, Some(blocks)),
        };
        let few = few.into_iter().flat_map(|blocks| blocks.iter().rev().copied());
        let many = many.into_iter().flatten().map(|(&addr, &index)| (addr, index));
        few.chain(many)
    }
}

#[derive(Debug)]
pub(crate) struct FreeIndex {
    /// log2 of the granule.
    shift: u32,
    /// Bit `w` says whether `words[w]` is not 0.
    summary: u64,
    /// Bit `b` of word `w` says whether bin `64 w + b` is not empty.
    words: [u64; WORD],
    /// Bin `k` holds blocks of `k` granules; grown on demand.
    bins: Vec<Bin>,
    large: BTreeMap<(u64, Addr), u32>,
    bytes: u64,
}

impl FreeIndex {
    /// `granule` is a power of two.
    pub(crate) fn new(granule: u64) -> Self {
        FreeIndex {
            shift: granule.trailing_zeros(),
            summary: 0,
            words: [0; WORD],
            bins: Vec::new(),
            large: BTreeMap::new(),
            bytes: 0,
        }
    }

    /// Bytes of all blocks in it.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The bin of a size, or `None` if it is large.
    fn bin(&self, bytes: u64) -> Option<usize> {
        let granules = bytes >> self.shift;
        (granules < BINS as u64).then_some(granules as usize)
    }

    pub(crate) fn insert(&mut self, block: FreeBlock) {
        let FreeBlock { bytes, addr, index } = block;
        debug_assert!((bytes >> self.shift) << self.shift == bytes && bytes > 0, "{bytes}");
        self.bytes += bytes;
        let before = match self.bin(bytes) {
            Some(bin) => {
                if self.bins.len() <= bin {
                    self.bins.resize_with(bin + 1, Bin::new);
                }
                self.words[bin / WORD] |= 1 << (bin % WORD);
                self.summary |= 1 << (bin / WORD);
                self.bins[bin].insert(addr, index)
            }
            None => self.large.insert((bytes, addr), index),
        };
        assert!(before.is_none(), "H2: two free blocks at {addr}");
    }

    /// # Panics
    /// If there is no such block.
    pub(crate) fn remove(&mut self, bytes: u64, addr: Addr) {
        let removed = match self.bin(bytes) {
            Some(bin) => {
                let removed = self.bins[bin].remove(addr);
                self.note_emptied(bin);
                removed
            }
            None => self.large.remove(&(bytes, addr)),
        };
        assert!(removed.is_some(), "H4: the free block at {addr} is not in the index");
        self.bytes -= bytes;
    }

    fn note_emptied(&mut self, bin: usize) {
        if self.bins[bin].is_empty() {
            self.words[bin / WORD] &= !(1 << (bin % WORD));
            if self.words[bin / WORD] == 0 {
                self.summary &= !(1 << (bin / WORD));
            }
        }
    }

    /// Takes out the smallest block of at least `bytes` (a multiple of the granule); among equals
    /// the lowest.
    pub(crate) fn take_best(&mut self, bytes: u64) -> Option<FreeBlock> {
        let found = match self.bin(bytes).and_then(|bin| self.first_bin_from(bin)) {
            Some(bin) => {
                let (addr, index) = self.bins[bin].pop_lowest()?;
                self.note_emptied(bin);
                FreeBlock { bytes: (bin as u64) << self.shift, addr, index }
            }
            None => {
                let (&(bytes, addr), &index) = self.large.range((bytes, Addr::NULL)..).next()?;
                self.large.remove(&(bytes, addr));
                FreeBlock { bytes, addr, index }
            }
        };
        self.bytes -= found.bytes;
        Some(found)
    }

    /// The first bin from `bin` on that is not empty.
    fn first_bin_from(&self, bin: usize) -> Option<usize> {
        let (word, bit) = (bin / WORD, bin % WORD);
        let here = self.words[word] & (u64::MAX << bit);
        if here != 0 {
            return Some(word * WORD + here.trailing_zeros() as usize);
        }
        let above = self.summary & u64::MAX.checked_shl(word as u32 + 1).unwrap_or(0);
        if above == 0 {
            return None;
        }
        let word = above.trailing_zeros() as usize;
        Some(word * WORD + self.words[word].trailing_zeros() as usize)
    }

    /// Bytes of the largest block; 0 if there is none.
    pub(crate) fn largest(&self) -> u64 {
        if let Some((&(bytes, _), _)) = self.large.last_key_value() {
            return bytes;
        }
        if self.summary == 0 {
            return 0;
        }
        let word = WORD - 1 - self.summary.leading_zeros() as usize;
        let bit = WORD - 1 - self.words[word].leading_zeros() as usize;
        ((word * WORD + bit) as u64) << self.shift
    }

    /// All blocks of at least `bytes`, in order of size, then address.
    pub(crate) fn iter_from(&self, bytes: u64) -> impl Iterator<Item = FreeBlock> + '_ {
        let next = |bin: usize| (bin < BINS).then(|| self.first_bin_from(bin)).flatten();
        let first = self.bin(bytes).and_then(next);
        let small = std::iter::successors(first, move |&bin| next(bin + 1)).flat_map(move |bin| {
            let bytes = (bin as u64) << self.shift;
            self.bins[bin].iter().map(move |(addr, index)| FreeBlock { bytes, addr, index })
        });
        let large = self
            .large
            .range((bytes, Addr::NULL)..)
            .map(|(&(bytes, addr), &index)| FreeBlock { bytes, addr, index });
        small.chain(large)
    }

    /// All blocks, in order of size, then address.
    pub(crate) fn iter(&self) -> impl Iterator<Item = FreeBlock> + '_ {
        self.iter_from(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Random inserts, removals and searches, compared with an ordered set after each.
    #[test]
    fn behaves_like_an_ordered_set() {
        for granule in [64, 512, 4096] {
            let mut index = FreeIndex::new(granule);
            let mut model = BTreeSet::new();
            let mut state = 0x9E37_79B9_7F4A_7C15_u64 ^ granule;
            let mut draw = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) % below
            };
            for step in 0..20_000_u32 {
                // Bins with many blocks, bins with few, and large blocks.
                let granules = match draw(4) {
                    0 => draw(3 * BINS as u64),
                    1 => draw(200),
                    _ => draw(3),
                };
                let bytes = (1 + granules) * granule;
                // More inserts than removals for a while, then the other way round.
                let action = draw(3);
                match if step / 5000 % 2 == 0 { action } else { action.max(draw(3)) } {
                    0 => {
                        let addr = Addr::new((u64::from(step) + 1) * 4096);
                        index.insert(FreeBlock { bytes, addr, index: step });
                        model.insert(FreeBlock { bytes, addr, index: step });
                    }
                    1 => {
                        let from = FreeBlock { bytes, addr: Addr::NULL, index: 0 };
                        let expected = model.range(from..).next().copied();
                        assert_eq!(index.take_best(bytes), expected);
                        expected.map(|found| model.remove(&found));
                    }
                    _ => {
                        let any = model.iter().nth(draw(50) as usize).copied();
                        if let Some(block) = any {
                            index.remove(block.bytes, block.addr);
                            model.remove(&block);
                        }
                    }
                }
                assert_eq!(index.largest(), model.last().map_or(0, |block| block.bytes));
                assert_eq!(index.bytes(), model.iter().map(|block| block.bytes).sum::<u64>());
                if step % 1000 == 0 {
                    assert!(index.iter().eq(model.iter().copied()));
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "H4")]
    fn removing_what_is_not_there_is_a_bug() {
        let mut index = FreeIndex::new(64);
        index.insert(FreeBlock { bytes: 128, addr: Addr::new(64), index: 0 });
        index.remove(128, Addr::new(128));
    }
}
