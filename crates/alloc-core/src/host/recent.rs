//! The last few freed blocks of a heap, not merged yet.
//!
//! Programs free a buffer and ask for the same size again. Such a request is served from here by a
//! short scan, without a split, a merge or a search.

use smallvec::SmallVec;

/// How many blocks are kept apart: few, as they are hidden from best fit until the heap would
/// otherwise have to grow.
pub(crate) const RECENT_MAX: usize = 8;

/// Bytes that a block may have in excess of what was asked for: 1/64 of the request.
pub(crate) const fn slack(bytes: u64) -> u64 {
    bytes >> 6
}

#[derive(Debug, Default)]
pub(crate) struct Recent {
    /// Size and slot of each, oldest first.
    blocks: SmallVec<[(u64, u32); RECENT_MAX]>,
}

impl Recent {
    /// Takes the youngest block that fits `bytes` without waste worth splitting off.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u32> {
        let fits = |&(size, _): &(u64, u32)| size.wrapping_sub(bytes) <= slack(bytes);
        let at = self.blocks.iter().rposition(fits)?;
        Some(self.blocks.remove(at).1)
    }

    /// Adds a block; returns the one that it pushes out.
    pub(crate) fn push(&mut self, bytes: u64, index: u32) -> Option<u32> {
        let oldest = (self.blocks.len() == RECENT_MAX).then(|| self.blocks.remove(0).1);
        self.blocks.push((bytes, index));
        oldest
    }

    /// Takes any block.
    pub(crate) fn pop(&mut self) -> Option<u32> {
        self.blocks.pop().map(|(_, index)| index)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.blocks.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_youngest_fitting_block_is_taken() {
        let mut recent = Recent::default();
        recent.push(4096, 1);
        recent.push(4160, 2);
        recent.push(4096, 3);
        recent.push(4096 + 128, 4);
        assert_eq!(recent.take(4096), Some(3));
        assert_eq!(recent.take(4096), Some(2), "1/64 more is near enough");
        assert_eq!(recent.take(4096), Some(1));
        assert_eq!(recent.take(4096), None, "1/32 more is not, nor is less");
        assert_eq!(recent.take(8192), None);
    }

    #[test]
    fn the_oldest_block_is_pushed_out() {
        let mut recent = Recent::default();
        for index in 0..RECENT_MAX as u32 {
            assert_eq!(recent.push(64, index), None);
        }
        assert_eq!(recent.push(64, 99), Some(0));
        assert_eq!(recent.take(64), Some(99));
    }
}
