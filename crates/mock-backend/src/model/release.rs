//! Giving memory back: collection, oversize blocks, everything.

use alloc_core::{PoolId, StreamId};

use super::ModelAction;
use super::device::{Block, DeviceModel, Request};
use super::driver::Driver;

impl DeviceModel {
    /// Free blocks of a class of a pool, in its order: by stream, size, address. Their addresses.
    fn pool_order(&self, pool: PoolId, small: bool) -> Vec<u64> {
        let mine = |b: &&Block| b.is_free() && (b.pool, b.small) == (pool, small);
        let mut free: Vec<_> = self.blocks.iter().filter(mine).collect();
        free.sort_by_key(|b| (b.stream, b.bytes, b.addr));
        free.into_iter().map(|b| b.addr).collect()
    }

    /// Whether the block is a whole ordinary segment.
    fn is_whole(&self, addr: u64) -> bool {
        let at = self.index(addr);
        !self.is_split(at) && !self.blocks[at].is_expandable()
    }

    /// Gives old whole segments of the large class back until the total is under the threshold.
    pub(super) fn collect_garbage(&mut self, driver: &mut Driver) {
        let limit = self.limit.unwrap_or(u64::MAX);
        let threshold = (driver.conf.gc_threshold * limit as f64) as u64;
        let Some(target) = self.total.checked_sub(threshold).filter(|&target| target > 0) else {
            return;
        };
        let searches = self.searches[1];
        let age = |device: &Self, addr| searches - device.blocks[device.index(addr)].stamp;
        let mut reclaimed = 0;
        loop {
            let unsplit: Vec<u64> = self
                .pool_order(PoolId::DEFAULT, false)
                .into_iter()
                .filter(|&addr| !self.is_split(self.index(addr)))
                .collect();
            if unsplit.is_empty() || reclaimed >= target {
                return;
            }
            let total_age: u64 = unsplit.iter().map(|&addr| age(self, addr)).sum();
            let average = total_age as f64 / unsplit.len() as f64;
            let before = reclaimed;
            for addr in unsplit {
                if self.is_whole(addr) && age(self, addr) as f64 >= average {
                    reclaimed += self.release(driver, addr);
                }
            }
            if reclaimed == before {
                return;
            }
        }
    }

    /// Gives oversize blocks back that make room for the request; whether that was enough.
    pub(super) fn release_available(&mut self, driver: &mut Driver, request: &Request) -> bool {
        let Some(max_split) = driver.conf.max_split else {
            return false;
        };
        if self.is_pinned(request.pool) {
            return false;
        }
        let needed = request.rounded.max(max_split);
        let free: Vec<(u64, u64, bool)> = self
            .free_of(request)
            .into_iter()
            .map(|b| (b.addr, b.bytes, b.is_expandable()))
            .collect();
        let first_fit = free.iter().find(|(_, bytes, _)| *bytes >= needed);
        if let Some(&(addr, _, false)) = first_fit {
            // Part of a segment cannot go. (Expandable mode splits oversize segments.)
            let whole = self.is_whole(addr);
            if whole {
                self.release(driver, addr);
            }
            return whole;
        }
        // Those that are too small alone, largest first. Larger ones behind an expandable block that
        // would fit are not looked at.
        let mut released = 0;
        let smaller = free.iter().rev().filter(|(_, bytes, _)| *bytes < needed);
        for &(addr, _, expandable) in smaller.take_while(|(_, bytes, _)| *bytes >= max_split) {
            if released < needed && !expandable && self.is_whole(addr) {
                released += self.release(driver, addr);
            }
        }
        released >= needed
    }

    /// Waits for all events and gives everything back.
    pub(super) fn release_cached(&mut self, driver: &mut Driver) {
        self.synchronize(driver);
        self.release_class(driver, PoolId::DEFAULT, false);
        self.release_class(driver, PoolId::DEFAULT, true);
        self.release_unreferenced(driver);
    }

    pub(super) fn release_class(&mut self, driver: &mut Driver, pool: PoolId, small: bool) {
        let free = self.pool_order(pool, small);
        let is_expandable = |addr: &u64| self.blocks[self.index(*addr)].is_expandable();
        let (expandable, ordinary): (Vec<u64>, Vec<u64>) =
            free.into_iter().partition(is_expandable);
        for addr in ordinary {
            if self.is_whole(addr) {
                self.release(driver, addr);
            }
        }
        for addr in expandable {
            self.unmap(driver, addr);
        }
    }

    /// Gives one whole segment back; its size.
    fn release(&mut self, driver: &mut Driver, addr: u64) -> u64 {
        let block = self.blocks.remove(self.index(addr));
        let (bytes, small, stream): (u64, bool, StreamId) =
            (block.bytes, block.small, block.stream);
        // cudaFree waits for the device.
        driver.finish_device(self.id);
        driver.put_back(self.id, bytes);
        self.total -= bytes;
        self.stats.num_device_free += 1;
        self.stats.segment.down(small, 1);
        self.stats.reserved_bytes.down(small, bytes);
        if driver.conf.max_split.is_some_and(|max| bytes >= max) {
            self.stats.oversize_segments.down(1);
        }
        self.trace(driver, ModelAction::SegmentFree, (addr, bytes), stream);
        bytes
    }
}
