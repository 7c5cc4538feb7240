//! How long blocks of one size live, as far as it has shown.
//!
//! Programs that train ask for the same sizes again and again: what lived long will do so next time.
//! Time is told by what is allocated meanwhile. For each size the mean life is the time that blocks of
//! it have lived, those that still do included, by the number of those that died. A block that waits
//! for a request of its size lives on, and what such a request gets is no birth: what counts is how
//! long memory stays taken.

use super::Heap;
use crate::block::{Block, BlockIdx, BlockState};
use crate::lane::Lane;
use crate::size_class::{OURS_SMALL_BYTES_MAX, SizeClass};

/// Sizes that share an estimate, as parts of a power of two: they differ by less than a hundredth.
/// Programs differ in the lives of sizes a twentieth apart, and change a size by less from time to
/// time.
const STEPS: u32 = 128;
/// The powers of two that are told apart, from the smallest size of the large class on: to 64 GiB.
const DOUBLINGS: u32 = 18;
const SLOTS: usize = (DOUBLINGS * STEPS) as usize;
/// Deaths above which the past counts half, so that an estimate follows the program.
const DEATHS_MAX: u32 = 64;
/// Bytes to a unit of time, as a power of two: sums of lives stay far below 2^64.
const UNIT: u32 = 16;

/// What is known of the blocks of one size.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    live: u32,
    /// Of late.
    deaths: u32,
    /// Until when `lived` has been counted.
    since: u64,
    /// How long blocks have lived, in all.
    lived: u64,
    /// The latest size that was asked for.
    latest: u64,
}

impl Slot {
    /// Counts the lives up to `now`.
    const fn at(mut self, now: u64) -> Self {
        self.lived += self.live as u64 * (now - self.since);
        self.since = now;
        self
    }
}

/// The lives of the blocks of one heap, by size.
#[derive(Debug, Default)]
pub(super) struct Lives {
    /// What was allocated so far: the time.
    now: u64,
    live: u64,
    live_peak: u64,
    /// Made at the first birth, on which memory grows.
    slots: Vec<Slot>,
}

fn slot_of(bytes: u64) -> usize {
    let bytes = bytes.max(OURS_SMALL_BYTES_MAX);
    let doublings = bytes.ilog2() - OURS_SMALL_BYTES_MAX.ilog2();
    let step = bytes >> (bytes.ilog2() - STEPS.ilog2()) & u64::from(STEPS - 1);
    ((doublings * STEPS) as usize + step as usize).min(SLOTS - 1)
}

const fn units(bytes: u64) -> u64 {
    bytes.div_ceil(1 << UNIT)
}

impl Lives {
    /// A block of `bytes` is handed out. Returns whether the one before among sizes like it was as large.
    #[inline(never)]
    fn begin(&mut self, bytes: u64) -> bool {
        if self.slots.is_empty() {
            self.slots = vec![Slot::default(); SLOTS];
        }
        self.now += units(bytes);
        self.live += units(bytes);
        self.live_peak = self.live_peak.max(self.live);
        let slot = &mut self.slots[slot_of(bytes)];
        *slot = slot.at(self.now);
        slot.live += 1;
        std::mem::replace(&mut slot.latest, bytes) == bytes
    }

    /// A block of `bytes` can be used for other sizes.
    #[inline(never)]
    pub(super) fn end(&mut self, bytes: u64) {
        let slot = &mut self.slots[slot_of(bytes)];
        *slot = slot.at(self.now);
        slot.live -= 1;
        slot.deaths += 1;
        if slot.deaths == DEATHS_MAX {
            slot.deaths /= 2;
            slot.lived /= 2;
        }
        self.live -= units(bytes);
    }

    /// Whether blocks of `bytes` live for so many turnovers on average: times in which as much is
    /// allocated as ever lived at once. Of a size that was never asked for, no.
    fn are_long(&self, bytes: u64, turnovers: u32) -> bool {
        let Some(slot) = self.slots.get(slot_of(bytes)) else { return false };
        let known = (slot.live > 0) | (slot.deaths > 0);
        // Turnovers are at most 2^16 (`LASTING_MAX`), peaks below 2^41 units and deaths below 2^6.
        let long = u64::from(turnovers) * self.live_peak * (u64::from(slot.deaths) + 1);
        known & (slot.at(self.now).lived >= long)
    }

    /// Reads every line of the slots. What it returns means nothing.
    pub(super) fn read_through(&self) -> u64 {
        self.slots.iter().step_by(2).map(|slot| slot.lived).fold(0, u64::wrapping_add)
    }

    /// Whether just `blocks` live.
    fn count(&self, blocks: impl Iterator<Item = u64>) -> bool {
        let mut live = vec![0; self.slots.len()];
        for bytes in blocks {
            match live.get_mut(slot_of(bytes)) {
                Some(slot) => *slot += 1,
                None => return false,
            }
        }
        self.slots.iter().map(|slot| slot.live).eq(live)
    }
}

impl Heap {
    /// Where memory for a request of `bytes` belongs.
    #[inline]
    pub(crate) fn lane_for(&self, class: SizeClass, bytes: u64) -> Lane {
        let turnovers = self.rules.lasting_turnovers;
        let lasting =
            class == SizeClass::Large && turnovers > 0 && self.lives.are_long(bytes, turnovers);
        if lasting { Lane::Lasting } else { class.into() }
    }

    /// Whether the lives of blocks like this one are recorded.
    #[inline]
    fn is_watched(&self, block: &Block) -> bool {
        self.rules.watches_lives & block.expandable & (block.lane != Lane::Small)
    }

    /// A block is handed out that has not waited for it.
    #[inline]
    pub(super) fn begin_life(&mut self, id: BlockIdx) {
        let block = &self.blocks[id];
        if self.is_watched(block) {
            let repeated = self.lives.begin(block.bytes);
            self.variety.note(repeated);
        }
    }

    /// A freed block merges with others.
    #[inline]
    pub(super) fn end_life(&mut self, id: BlockIdx) {
        let block = &self.blocks[id];
        if self.is_watched(block) {
            self.lives.end(block.bytes);
        }
    }

    /// Whether the lives that are recorded are those of the blocks there are (I6).
    pub(crate) fn lives_are_right(&self) -> bool {
        let taken = self.blocks.iter().map(|(_, block)| block).filter(|block| {
            let taken = block.is_active() || matches!(block.state, BlockState::Waiting { .. });
            taken && self.is_watched(block)
        });
        let taken = taken.map(|block| block.bytes).chain(self.merged_bytes());
        self.lives.count(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn sizes_share_a_slot_with_their_like_only() {
        let sizes = [0, 256 << 10, (256 << 10) + (2 << 10), 512 << 10, MIB, MIB + (8 << 10)];
        assert_eq!(sizes.map(slot_of), [0, 0, 1, 128, 256, 257]);
        assert_eq!(slot_of(MIB), slot_of(MIB + (8 << 10) - 1));
        assert_eq!(slot_of(u64::MAX), SLOTS - 1);
        assert_eq!(slot_of((64 << 30) - 1), SLOTS - 1, "the last one of its own");
    }

    #[test]
    fn what_stays_lives_longer_than_what_comes_and_goes() {
        let mut lives = Lives::default();
        assert!(!lives.are_long(4 * MIB, 1), "nothing is known");
        for _ in 0..10 {
            lives.begin(4 * MIB);
            lives.begin(MIB);
            lives.begin(2 * MIB);
            lives.end(MIB);
            lives.end(2 * MIB);
        }
        // 40 MiB live, and 43 at most; 70 were allocated. The ten blocks lived while 66, 59 and so on
        // were: 345 MiB together.
        assert_eq!(lives.live_peak, units(43 * MIB));
        assert!(lives.are_long(4 * MIB, 8) && !lives.are_long(4 * MIB, 9));
        assert!(!lives.are_long(MIB, 1));
        assert!(!lives.are_long(3 * MIB, 0), "never asked for");
    }

    #[test]
    fn estimates_follow_the_program() {
        let mut lives = Lives::default();
        lives.begin(16 * MIB);
        let mut rounds = |between: u64| {
            for _ in 0..1000 {
                lives.begin(MIB);
                for _ in 0..between {
                    lives.begin(2 * MIB);
                    lives.end(2 * MIB);
                }
                lives.end(MIB);
            }
            lives.are_long(MIB, 2)
        };
        assert!(rounds(64));
        assert!(!rounds(4));
        assert!(rounds(64));
    }
}
