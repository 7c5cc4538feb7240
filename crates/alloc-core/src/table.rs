//! A table that only grows, read without a lock.

use crate::sync::{Mutex, OnceLock};

/// Little where loom counts every cell.
const FIRST_CHUNK_BITS: u32 = if cfg!(loom) { 1 } else { 6 };
const CHUNKS: usize = if cfg!(loom) { 3 } else { (u32::BITS - FIRST_CHUNK_BITS) as usize };

/// Entries never move and never go away, so a reference lives as long as the table. Chunk k holds
/// 2^(6+k) entries.
#[derive(Debug)]
pub(crate) struct AppendTable<T> {
    chunks: [OnceLock<Box<[OnceLock<T>]>>; CHUNKS],
    len: Mutex<u32>,
}

/// Chunk and position in it of entry `index`.
fn position(index: u32) -> (usize, usize) {
    let shifted = u64::from(index) + (1 << FIRST_CHUNK_BITS);
    let chunk = shifted.ilog2();
    ((chunk - FIRST_CHUNK_BITS) as usize, (shifted - (1 << chunk)) as usize)
}

impl<T> AppendTable<T> {
    pub(crate) fn new() -> Self {
        AppendTable { chunks: std::array::from_fn(|_| OnceLock::new()), len: Mutex::new(0) }
    }

    /// Appends the entry that `make` builds from its index.
    pub(crate) fn push(&self, make: impl FnOnce(u32) -> T) -> &T {
        let mut len = self.len.lock();
        let (chunk, at) = position(*len);
        let entries = self.chunks[chunk].get_or_init(|| {
            (0..1usize << (chunk as u32 + FIRST_CHUNK_BITS)).map(|_| OnceLock::new()).collect()
        });
        let entry = entries[at].get_or_init(|| make(*len));
        *len += 1;
        entry
    }

    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        let (chunk, at) = position(index);
        self.chunks.get(chunk)?.get()?[at].get()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        (0..*self.len.lock()).filter_map(|index| self.get(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_keep_their_index() {
        let table = AppendTable::new();
        for expected in 0..1000u32 {
            assert_eq!(*table.push(|index| index * 3), expected * 3);
        }
        assert_eq!(table.get(64), Some(&192));
        assert_eq!(table.get(999), Some(&2997));
        assert_eq!(table.get(1000), None);
        assert_eq!(table.get(u32::MAX), None);
        assert_eq!(table.iter().count(), 1000);
    }
}
