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
    bytes: u64,
}

impl Recent {
    /// Bytes of all blocks.
    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Size and slot of the youngest block, if it fits as [`take`](Recent::take) means it.
    #[inline(always)]
    pub(crate) fn youngest(&self, bytes: u64) -> Option<(u64, u32)> {
        let youngest = *self.blocks.get(self.len.wrapping_sub(1))?;
        (youngest.0.wrapping_sub(bytes) <= slack(bytes)).then_some(youngest)
    }

    #[inline(always)]
    pub(crate) fn is_full(&self) -> bool {
        self.len >= RECENT_MAX
    }

    /// Adds a block; there is room.
    #[inline(always)]
    pub(crate) fn add(&mut self, bytes: u64, index: u32) {
        if let Some(place) = self.blocks.get_mut(self.len) {
            *place = (bytes, index);
            self.len += 1;
            self.bytes += bytes;
        }
    }

    /// Takes the youngest block that fits `bytes` without waste worth splitting off.
    #[inline]
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u32> {
        let fits = |&(size, _): &(u64, u32)| size.wrapping_sub(bytes) <= slack(bytes);
        let at = self.blocks[..self.len].iter().rposition(fits)?;
        let (bytes, index) = self.blocks[at];
        self.bytes -= bytes;
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
        if !self.is_full() {
            self.add(bytes, index);
            return None;
        }
        self.bytes += bytes;
        let (oldest_bytes, oldest) = self.blocks[0];
        self.bytes -= oldest_bytes;
        self.blocks.copy_within(1.., 0);
        self.blocks[RECENT_MAX - 1] = (bytes, index);
        Some(oldest)
    }

    /// Takes the youngest block.
    #[inline(always)]
    pub(crate) fn pop(&mut self) -> Option<u32> {
        let len = self.len.wrapping_sub(1);
        let (bytes, index) = *self.blocks.get(len)?;
        self.len = len;
        self.bytes -= bytes;
        Some(index)
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
        assert_eq!(recent.bytes(), 4096 + 128);
        assert_eq!(recent.pop(), Some(4));
        assert_eq!((recent.pop(), recent.bytes()), (None, 0));
    }

    #[test]
    fn the_oldest_block_is_pushed_out() {
        let mut recent = Recent::default();
        for index in 0..RECENT_MAX as u32 {
            assert_eq!(recent.push(64, index), None);
        }
        assert_eq!(recent.push(64, 99), Some(0));
        assert_eq!(recent.push(64, 100), Some(1));
        assert_eq!(recent.bytes(), 64 * RECENT_MAX as u64);
        assert_eq!(recent.take(64), Some(100));
        assert_eq!(recent.iter().map(|(_, index)| index).next(), Some(2));
    }
}
