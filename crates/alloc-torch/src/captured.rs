//! Memory that belongs to captured graphs.
//!
//! A graph uses the addresses it was captured with every time it runs, long after the program has
//! freed them. So what is allocated, or named, while a stream is captured is set aside when it is
//! freed, until PyTorch releases the graph's pool.

use alloc_core::{Addr, DeviceId};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// PyTorch's number of a memory pool.
pub(crate) type PoolNumber = (u64, u64);

/// One block that a graph uses.
#[derive(Clone, Copy)]
struct Entry {
    device: DeviceId,
    /// `None` until the end of the capture tells.
    pool: Option<PoolNumber>,
    /// The program has freed it.
    is_freed: bool,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Captured {
    entries: Mutex<BTreeMap<Addr, Entry>>,
    /// How many, so that programs without graphs pay one load.
    count: AtomicUsize,
}

impl Captured {
    /// A capture on `device` uses the block at `addr`.
    pub(crate) fn add(&self, device: DeviceId, addr: Addr) {
        let mut entries = self.entries.lock();
        entries.entry(addr).or_insert(Entry { device, pool: None, is_freed: false });
        self.count.store(entries.len(), Ordering::Relaxed);
    }

    /// The block at `addr` is being freed. Returns whether it must be kept.
    pub(crate) fn keeps(&self, addr: Addr) -> bool {
        if self.count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        match self.entries.lock().get_mut(&addr) {
            Some(entry) => {
                entry.is_freed = true;
                true
            }
            None => false,
        }
    }

    /// A capture on `device` into `pool` has ended: what was noted since the last one is its own.
    pub(crate) fn end(&self, device: DeviceId, pool: PoolNumber) {
        for entry in self.entries.lock().values_mut() {
            if entry.device == device && entry.pool.is_none() {
                entry.pool = Some(pool);
            }
        }
    }

    /// The graphs of `pool` are gone. Returns the blocks to be freed now; the others are ordinary
    /// blocks again.
    pub(crate) fn release(&self, device: DeviceId, pool: PoolNumber) -> Vec<Addr> {
        let mut freed = Vec::new();
        let mut entries = self.entries.lock();
        entries.retain(|&addr, entry| {
            let ends = entry.device == device && entry.pool == Some(pool);
            if ends && entry.is_freed {
                freed.push(addr);
            }
            !ends
        });
        self.count.store(entries.len(), Ordering::Relaxed);
        freed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_kept_until_their_pool_is_released() {
        let captured = Captured::default();
        let (first, second) = (DeviceId::new(0), DeviceId::new(1));
        let addr = |n: u64| Addr::new(n << 20);
        captured.add(first, addr(1));
        captured.add(first, addr(2));
        captured.add(second, addr(3));
        assert!(captured.keeps(addr(1)));
        assert!(!captured.keeps(addr(9)), "an ordinary block");
        captured.end(first, (1, 0));
        captured.add(first, addr(4));
        captured.end(first, (2, 0));
        assert!(captured.keeps(addr(4)));
        assert!(captured.release(first, (7, 0)).is_empty(), "no such pool");
        assert_eq!(captured.release(first, (1, 0)), [addr(1)]);
        assert!(!captured.keeps(addr(2)), "ordinary from now on");
        assert_eq!(captured.release(first, (2, 0)), [addr(4)]);
        assert!(captured.keeps(addr(3)), "its capture has not ended");
    }
}
