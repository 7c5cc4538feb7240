//! The last few freed blocks of a heap, not merged yet.
//!
//! Programs free a buffer and ask for the same size again. Such a request is served from here by a
//! short scan, without a split, a merge or a search.

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
    blocks: [(u64, u32); RECENT_MAX],
    len: usize,
}

impl Recent {
    /// Takes the youngest block that fits `bytes` without waste worth splitting off.
    #[inline]
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u32> {
        let fits = |&(size, _): &(u64, u32)| size.wrapping_sub(bytes) <= slack(bytes);
        let at = self.blocks[..self.len].iter().rposition(fits)?;
        let index = self.blocks[at].1;
        self.len -= 1;
        // Mostly it is the last one, and nothing moves.
        for next in at..self.len {
            self.blocks[next] = self.blocks[next + 1];
        }
        Some(index)
    }

    /// Adds a block; returns the one that it pushes out.
    #[inline]
    pub(crate) fn push(&mut self, bytes: u64, index: u32) -> Option<u32> {
        if self.len < RECENT_MAX {
            self.blocks[self.len] = (bytes, index);
            self.len += 1;
            return None;
        }
        let oldest = self.blocks[0].1;
        self.blocks.copy_within(1.., 0);
        self.blocks[RECENT_MAX - 1] = (bytes, index);
        Some(oldest)
    }

    /// Takes the youngest block.
    pub(crate) fn pop(&mut self) -> Option<u32> {
        self.len = self.len.checked_sub(1)?;
        Some(self.blocks[self.len].1)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.blocks[..self.len].iter().copied()
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
        assert_eq!(recent.pop(), Some(4));
        assert_eq!(recent.pop(), None);
    }

    #[test]
    fn the_oldest_block_is_pushed_out() {
        let mut recent = Recent::default();
        for index in 0..RECENT_MAX as u32 {
            assert_eq!(recent.push(64, index), None);
        }
        assert_eq!(recent.push(64, 99), Some(0));
        assert_eq!(recent.push(64, 100), Some(1));
        assert_eq!(recent.take(64), Some(100));
        assert_eq!(recent.iter().map(|(_, index)| index).next(), Some(2));
    }
}
