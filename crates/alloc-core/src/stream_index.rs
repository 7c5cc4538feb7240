//! From a stream to what belongs to it, without a lock.
//!
//! A chain of hash tables, each twice as large as the one before. A key lies in the first table in
//! which its slot was free when it came; slots are filled once and never emptied, so a search that
//! meets an empty one knows that the key is not there.

use crate::sync::OnceLock;
use crate::units::{DeviceId, StreamId};

/// Little where loom counts every cell.
const FIRST_TABLE_BITS: u32 = if cfg!(loom) { 1 } else { 6 };
const TABLES: usize = if cfg!(loom) { 3 } else { 16 };

type Key = (DeviceId, StreamId);
type Table<T> = Box<[OnceLock<(Key, T)>]>;

/// Entries never move and never go away, so a reference lives as long as the index.
#[derive(Debug)]
pub(crate) struct StreamIndex<T> {
    tables: [OnceLock<Table<T>>; TABLES],
}

/// The slots of a key, one in each table.
fn slots((device, stream): Key) -> impl Iterator<Item = (usize, usize)> {
    // Knuth's multiplier: the upper bits of a product depend on all bits of the key.
    const SPREAD: u64 = 6_364_136_223_846_793_005;
    let mut hash = stream.get() ^ (device.index() as u64).rotate_right(16);
    (0..TABLES).map(move |table| {
        hash = (hash ^ (hash >> 32)).wrapping_mul(SPREAD).wrapping_add(1);
        (table, (hash >> (u64::BITS - FIRST_TABLE_BITS - table as u32)) as usize)
    })
}

impl<T> StreamIndex<T> {
    pub(crate) fn new() -> Self {
        StreamIndex { tables: std::array::from_fn(|_| OnceLock::new()) }
    }

    #[inline]
    pub(crate) fn get(&self, device: DeviceId, stream: StreamId) -> Option<&T> {
        let key = (device, stream);
        for (table, slot) in slots(key) {
            let (found, value) = self.tables[table].get()?[slot].get()?;
            if *found == key {
                return Some(value);
            }
        }
        None
    }

    /// Enters a value, unless there is one: threads may enter the same stream at once, and one of the
    /// values stays. A stream whose slots are all taken is left out; that needs millions of streams
    /// or very odd ids.
    pub(crate) fn insert(&self, device: DeviceId, stream: StreamId, mut value: T) {
        let key = (device, stream);
        for (table, slot) in slots(key) {
            let slots = self.tables[table].get_or_init(|| {
                (0..1usize << (FIRST_TABLE_BITS as usize + table))
                    .map(|_| OnceLock::new())
                    .collect()
            });
            match slots[slot].set((key, value)) {
                Ok(()) => return,
                Err((_, refused)) => value = refused,
            }
            if slots[slot].get().is_some_and(|(found, _)| *found == key) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stream_is_found() {
        let index = StreamIndex::new();
        let ids = (0..3000u64).map(|n| [n, n << 12, n << 48, u64::MAX - n]);
        let keys = || {
            let ids = ids.clone().flatten().filter(|id| *id > 3000 || id % 2 == 0);
            ids.flat_map(|id| [0, 1].map(|d| (DeviceId::new(d), StreamId::new(id))))
        };
        for (device, stream) in keys() {
            if index.get(device, stream).is_none() {
                index.insert(device, stream, (device, stream));
            }
        }
        for (device, stream) in keys() {
            assert_eq!(index.get(device, stream), Some(&(device, stream)));
        }
        for id in (1..3000).step_by(2) {
            assert_eq!(index.get(DeviceId::new(0), StreamId::new(id)), None);
        }
        let filled = index.tables.iter().filter(|table| table.get().is_some()).count();
        assert!(filled < TABLES, "{filled} tables for some 20,000 streams");
    }

    #[test]
    fn the_first_value_stays() {
        let index = StreamIndex::new();
        let (device, stream) = (DeviceId::new(0), StreamId::new(5));
        assert_eq!(index.get(device, stream), None);
        index.insert(device, stream, 1);
        index.insert(device, stream, 2);
        assert_eq!(index.get(device, stream), Some(&1));
        assert_eq!(index.get(DeviceId::new(1), stream), None);
    }

    #[test]
    fn a_stream_without_a_slot_is_left_out() {
        let index = StreamIndex::new();
        let (device, stream) = (DeviceId::new(0), StreamId::new(9));
        // Whatever lies in the first tables, a search that finds no end gives up.
        for (table, slot) in slots((device, stream)).take(3) {
            let bits = FIRST_TABLE_BITS as usize + table;
            let slots = index.tables[table]
                .get_or_init(|| (0..1usize << bits).map(|_| OnceLock::new()).collect());
            slots[slot].set(((device, StreamId::new(1000 + table as u64)), 0)).unwrap();
        }
        assert_eq!(index.get(device, stream), None);
        index.insert(device, stream, 7);
        assert_eq!(index.get(device, stream), Some(&7));
        assert!(index.tables[4].get().is_none());
    }
}
