//! The allocations that are known to their users by address.

use crate::block::Block;
use crate::error::{ManagerError, MemoryKind};
use crate::platform::Platform;
use alloc_core::Addr;
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Allocations of one kind by address.
pub(crate) struct Table<P: Platform> {
    kind: MemoryKind,
    blocks: RwLock<BTreeMap<Addr, Arc<Block<P>>>>,
}

impl<P: Platform> Table<P> {
    pub(crate) fn new(kind: MemoryKind) -> Self {
        Table { kind, blocks: RwLock::default() }
    }

    pub(crate) fn insert(&self, block: Arc<Block<P>>) {
        self.blocks.write().insert(block.addr(), block);
    }

    /// The allocation at `addr`. It is not freed before the value is dropped.
    pub(crate) fn at(&self, addr: Addr) -> Result<Arc<Block<P>>, ManagerError> {
        let found = self.blocks.read().get(&addr).cloned();
        found.ok_or(ManagerError::UnknownAddress { addr, kind: self.kind })
    }

    /// Takes the allocation at `addr` out.
    pub(crate) fn remove(&self, addr: Addr) -> Result<Arc<Block<P>>, ManagerError> {
        let found = self.blocks.write().remove(&addr);
        found.ok_or(ManagerError::UnknownAddress { addr, kind: self.kind })
    }

    /// The allocation that holds `bytes` from `addr` on.
    pub(crate) fn holding(&self, addr: Addr, bytes: u64) -> Result<Arc<Block<P>>, ManagerError> {
        let kind = self.kind;
        let block = self.blocks.read().range(..=addr).next_back().map(|(_, block)| block.clone());
        let inside = block.filter(|block| addr - block.addr() < block.bytes());
        let block = inside.ok_or(ManagerError::UnknownAddress { addr, kind })?;
        let available = block.bytes() - (addr - block.addr());
        if bytes > available {
            return Err(ManagerError::OutOfRange { bytes, addr, available, kind });
        }
        Ok(block)
    }

    /// Address and bytes of each.
    pub(crate) fn list(&self) -> Vec<(Addr, u64)> {
        self.blocks.read().iter().map(|(&addr, block)| (addr, block.bytes())).collect()
    }

    /// Leaves all of them to their users for ever.
    pub(crate) fn forget(&mut self) {
        // The blocks only: the map itself has memory even when it is empty.
        std::mem::take(self.blocks.get_mut()).into_values().for_each(std::mem::forget);
    }
}
