//! The allocator.

use crate::aligned::{Memory, page_bytes};
use crate::config::{CpuConfig, Plan};
use crate::error::CpuError;
use crate::reporter::Ledger;
use alloc_api::{
    Allocator, AllocatorError, AllocatorStats, CopyData, DataPtr, Deleter, Device, RawFree,
};
use alloc_core::Addr;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

/// An allocator of CPU memory. Clones are the same allocator; any thread may use it.
///
/// Nothing is cached unless [`CpuConfig::cache`] says so: each call goes to the C library, or to the
/// system for huge pages and NUMA nodes.
#[derive(Clone)]
pub struct CpuAllocator {
    shared: Arc<Shared>,
}

struct Shared {
    config: CpuConfig,
    page: u64,
    ledger: Ledger,
    /// Freed memory by its exact size, if it is kept.
    cache: Mutex<BTreeMap<u64, Vec<Memory>>>,
    /// Memory that is known to its user by address only.
    raw: Mutex<HashMap<Addr, Memory>>,
}

impl fmt::Debug for CpuAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuAllocator").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

impl Default for CpuAllocator {
    fn default() -> Self {
        Self::build(CpuConfig::default(), page_bytes())
    }
}

impl CpuAllocator {
    /// An allocator with these settings.
    ///
    /// # Errors
    /// [`CpuError::BadConfig`].
    pub fn new(config: CpuConfig) -> Result<CpuAllocator, CpuError> {
        let page = page_bytes();
        config.validate(page)?;
        Ok(Self::build(config, page))
    }

    fn build(config: CpuConfig, page: u64) -> CpuAllocator {
        let shared = Shared {
            config,
            page,
            ledger: Ledger::default(),
            cache: Mutex::default(),
            raw: Mutex::default(),
        };
        CpuAllocator { shared: Arc::new(shared) }
    }

    /// Its settings.
    pub fn config(&self) -> &CpuConfig {
        &self.shared.config
    }

    /// What has been handed out.
    pub fn ledger(&self) -> &Ledger {
        &self.shared.ledger
    }

    /// The bytes from the pointer's address to the end of its allocation, if it owns one of this
    /// allocator.
    pub fn bytes<'a>(&self, pointer: &'a DataPtr) -> Option<&'a [MaybeUninit<u8>]> {
        let context = pointer.cast_context::<Block>().filter(|context| self.owns(context))?;
        let offset = pointer.get().get().checked_sub(context.memory.addr().get())?;
        context.memory.bytes().get(offset as usize..)
    }

    /// [`bytes`](Self::bytes), to change.
    pub fn bytes_mut<'a>(&self, pointer: &'a mut DataPtr) -> Option<&'a mut [MaybeUninit<u8>]> {
        let start = pointer.get().get();
        let context = pointer.cast_context_mut::<Block>().filter(|context| self.owns(context))?;
        let offset = start.checked_sub(context.memory.addr().get())?;
        context.memory.bytes_mut().get_mut(offset as usize..)
    }

    fn owns(&self, context: &BlockOf) -> bool {
        Arc::ptr_eq(&context.allocator.shared, &self.shared)
    }

    pub(crate) fn plan(&self, bytes: u64, align: u64) -> Result<Plan, CpuError> {
        Plan::new(&self.shared.config, self.shared.page, bytes, align)
    }

    /// Memory of `bytes`, not 0, at a multiple of `align` at least.
    pub(crate) fn take(&self, bytes: u64, align: u64) -> Result<Memory, CpuError> {
        let Shared { config, ledger, .. } = &*self.shared;
        let plan = self.plan(bytes, align)?;
        let memory = match self.cached(&plan) {
            Some(mut memory) => {
                memory.fill(config);
                Ok(memory)
            }
            None => self.take_from_system(plan),
        };
        match &memory {
            Ok(memory) => ledger.allocated(memory.addr(), bytes),
            Err(_) => ledger.out_of_memory(bytes),
        }
        memory
    }

    fn cached(&self, plan: &Plan) -> Option<Memory> {
        if !self.shared.config.cache {
            return None;
        }
        let mut cache = self.shared.cache.lock();
        let list = cache.get_mut(&plan.bytes)?;
        // Of the same plan: it is freed by the plan of its new request.
        let at = list.iter().rposition(|memory| memory.plan() == plan)?;
        Some(list.remove(at))
    }

    /// Memory from the system; before it fails for lack of it, the cache is given back.
    fn take_from_system(&self, plan: Plan) -> Result<Memory, CpuError> {
        match Memory::new(plan, &self.shared.config) {
            Err(CpuError::OutOfMemory { .. }) if self.shared.empty_cache() => {
                Memory::new(plan, &self.shared.config)
            }
            result => result,
        }
    }

    /// Gives memory back, to the cache or to the system.
    pub(crate) fn put_back(&self, memory: Memory) {
        let Shared { config, ledger, cache, .. } = &*self.shared;
        let (addr, bytes) = (memory.addr(), memory.len());
        // Told first: another thread may be handed the address at once.
        ledger.freed(addr, bytes);
        if config.cache {
            cache.lock().entry(bytes).or_default().push(memory);
        }
    }
}

impl Shared {
    /// Whether there was anything to give back.
    fn empty_cache(&self) -> bool {
        let cache = std::mem::take(&mut *self.cache.lock());
        cache.values().any(|list| !list.is_empty())
    }

    fn cached_bytes(&self) -> u64 {
        let cache = self.cache.lock();
        cache.iter().map(|(bytes, list)| bytes * list.len() as u64).sum()
    }
}

/// What a pointer owns.
struct BlockOf {
    allocator: CpuAllocator,
    memory: Memory,
}

/// Frees it.
struct Block;

impl Deleter for Block {
    type Context = BlockOf;

    fn release(BlockOf { allocator, memory }: BlockOf) {
        allocator.put_back(memory);
    }

    fn raw_addr(context: &BlockOf) -> Option<Addr> {
        Some(context.memory.addr())
    }

    fn disown(BlockOf { allocator, memory }: BlockOf) {
        allocator.shared.raw.lock().insert(memory.addr(), memory);
    }
}

impl Allocator for CpuAllocator {
    fn device(&self) -> Device {
        Device::CPU
    }

    fn allocate(&self, bytes: u64) -> Result<DataPtr, AllocatorError> {
        if bytes == 0 {
            return Ok(DataPtr::null(Device::CPU));
        }
        let memory = self.take(bytes, 1)?;
        let addr = memory.addr();
        let context = BlockOf { allocator: self.clone(), memory };
        Ok(DataPtr::with_context::<Block>(addr, context, Device::CPU))
    }

    fn empty_cache(&self) -> Result<(), AllocatorError> {
        self.shared.empty_cache();
        Ok(())
    }

    fn stats(&self) -> Result<AllocatorStats, AllocatorError> {
        Ok(self.shared.ledger.stats(self.shared.cached_bytes()))
    }

    fn raw(&self) -> Option<&dyn RawFree> {
        Some(self)
    }

    fn copies(&self) -> Option<&dyn CopyData> {
        Some(self)
    }
}

impl RawFree for CpuAllocator {
    fn free_raw(&self, addr: Addr) -> Result<(), AllocatorError> {
        if addr.is_null() {
            return Ok(());
        }
        let memory = self.shared.raw.lock().remove(&addr);
        self.put_back(memory.ok_or(AllocatorError::UnknownAddress(addr))?);
        Ok(())
    }
}

impl CopyData for CpuAllocator {
    fn copy(&self, to: &mut DataPtr, from: &DataPtr, bytes: u64) -> Result<(), AllocatorError> {
        let foreign = AllocatorError::ForeignPointer;
        let from = self.bytes(from).ok_or(foreign(from.get()))?;
        let (addr, available) = (to.get(), from.len() as u64);
        let to = self.bytes_mut(to).ok_or(foreign(addr))?;
        let available = available.min(to.len() as u64);
        if bytes > available {
            return Err(AllocatorError::BadRange { bytes, available });
        }
        to[..bytes as usize].copy_from_slice(&from[..bytes as usize]);
        Ok(())
    }
}
