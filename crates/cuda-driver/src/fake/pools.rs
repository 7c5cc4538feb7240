//! The imitation's memory pools: settings and counters. They keep no freed memory.

use super::memory::Code;
use crate::error::code;
use std::collections::BTreeMap;

/// Attributes from this number to the next are flags of 32 bits, the others numbers of 64.
pub(super) const FIRST_FLAG: u32 = 1;
pub(super) const LAST_FLAG: u32 = 3;
const THRESHOLD: u32 = 4;
const RESERVED_NOW: u32 = 5;
const RESERVED_PEAK: u32 = 6;
const USED_NOW: u32 = 7;
const USED_PEAK: u32 = 8;

/// One pool.
struct Pool {
    device: usize,
    /// 0 is no bound.
    bytes_max: u64,
    flags: [bool; 3],
    threshold: u64,
    used: u64,
    used_peak: u64,
    reserved_peak: u64,
    /// Destroyed by its owner. It goes with its last memory.
    is_destroyed: bool,
}

/// All pools by handle. Those of the devices have small numbers and exist once asked for.
#[derive(Default)]
pub(super) struct Pools {
    all: BTreeMap<usize, Pool>,
    /// Address of memory → its pool and bytes.
    live: BTreeMap<u64, (usize, u64)>,
    /// Whether devices say that they have none.
    pub(super) are_missing: bool,
}

impl Pools {
    fn check(&self) -> Result<(), Code> {
        if self.are_missing { Err(code::NOT_SUPPORTED) } else { Ok(()) }
    }

    pub(super) fn default_of(&mut self, device: usize) -> Result<usize, Code> {
        self.check()?;
        self.all.entry(device + 1).or_insert_with(|| Pool::new(device, 0));
        Ok(device + 1)
    }

    pub(super) fn create(
        &mut self,
        handle: usize,
        device: usize,
        bytes_max: u64,
    ) -> Result<(), Code> {
        self.check()?;
        self.all.insert(handle, Pool::new(device, bytes_max));
        Ok(())
    }

    pub(super) fn destroy(&mut self, handle: usize) -> Result<(), Code> {
        let pool = self.all.get_mut(&handle).ok_or(code::INVALID_VALUE)?;
        pool.is_destroyed = true;
        self.sweep(handle);
        Ok(())
    }

    /// Pools that were created and are still there.
    pub(super) fn created(&self) -> usize {
        self.all.iter().filter(|(handle, pool)| **handle != pool.device + 1).count()
    }

    pub(super) fn find(&mut self, handle: usize) -> Result<(), Code> {
        self.pool(handle).map(drop)
    }

    fn pool(&mut self, handle: usize) -> Result<&mut Pool, Code> {
        self.all.get_mut(&handle).filter(|pool| !pool.is_destroyed).ok_or(code::INVALID_VALUE)
    }

    pub(super) fn set(&mut self, handle: usize, which: u32, value: u64) -> Result<(), Code> {
        let pool = self.pool(handle)?;
        match which {
            FIRST_FLAG..=LAST_FLAG => pool.flags[(which - FIRST_FLAG) as usize] = value != 0,
            THRESHOLD => pool.threshold = value,
            // Peaks can be set to 0 only, which means: to what is there now.
            RESERVED_PEAK if value == 0 => pool.reserved_peak = pool.used,
            USED_PEAK if value == 0 => pool.used_peak = pool.used,
            _ => return Err(code::INVALID_VALUE),
        }
        Ok(())
    }

    pub(super) fn get(&mut self, handle: usize, which: u32) -> Result<u64, Code> {
        let pool = self.pool(handle)?;
        match which {
            FIRST_FLAG..=LAST_FLAG => Ok(u64::from(pool.flags[(which - FIRST_FLAG) as usize])),
            THRESHOLD => Ok(pool.threshold),
            RESERVED_NOW | USED_NOW => Ok(pool.used),
            RESERVED_PEAK => Ok(pool.reserved_peak),
            USED_PEAK => Ok(pool.used_peak),
            _ => Err(code::INVALID_VALUE),
        }
    }

    /// Counts memory that is about to be taken, if the pool may hold it.
    pub(super) fn claim(&mut self, handle: usize, device: usize, bytes: u64) -> Result<(), Code> {
        let pool = self.pool(handle)?;
        if pool.device != device {
            return Err(code::INVALID_VALUE);
        }
        let used = pool.used.checked_add(bytes).ok_or(code::OUT_OF_MEMORY)?;
        if pool.bytes_max > 0 && used > pool.bytes_max {
            return Err(code::OUT_OF_MEMORY);
        }
        pool.used = used;
        Ok(())
    }

    pub(super) fn unclaim(&mut self, handle: usize, bytes: u64) {
        if let Some(pool) = self.all.get_mut(&handle) {
            pool.used -= bytes;
        }
    }

    /// Enters memory that was claimed and taken.
    pub(super) fn enter(&mut self, handle: usize, addr: u64, bytes: u64) {
        self.live.insert(addr, (handle, bytes));
        if let Some(pool) = self.all.get_mut(&handle) {
            pool.used_peak = pool.used_peak.max(pool.used);
            pool.reserved_peak = pool.reserved_peak.max(pool.used);
        }
    }

    /// Memory is freed.
    pub(super) fn leave(&mut self, addr: u64) {
        if let Some((handle, bytes)) = self.live.remove(&addr) {
            self.unclaim(handle, bytes);
            self.sweep(handle);
        }
    }

    fn sweep(&mut self, handle: usize) {
        if self.all.get(&handle).is_some_and(|pool| pool.is_destroyed && pool.used == 0) {
            self.all.remove(&handle);
        }
    }
}

impl Pool {
    fn new(device: usize, bytes_max: u64) -> Self {
        Pool {
            device,
            bytes_max,
            flags: [true; 3],
            threshold: 0,
            used: 0,
            used_peak: 0,
            reserved_peak: 0,
            is_destroyed: false,
        }
    }
}
