//! Which allocator serves which kind of device.

use crate::allocator::Allocator;
use crate::device::DeviceType;
use crate::error::AllocatorError;
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// An allocator and the priority it was registered with.
struct Entry {
    allocator: Arc<dyn Allocator>,
    priority: u8,
}

type Slots = RwLock<BTreeMap<DeviceType, Entry>>;

/// Allocators by kind of device, of the devices' own memory and of host memory pinned for them. Any
/// thread may call, at any time; an allocator that is replaced lives on in the pointers it made.
#[derive(Default)]
pub struct Registry {
    device: Slots,
    host: Slots,
}

impl Registry {
    /// A registry of nothing.
    pub const fn new() -> Self {
        Registry { device: RwLock::new(BTreeMap::new()), host: RwLock::new(BTreeMap::new()) }
    }

    /// Registers the allocator of a kind of device, unless one of higher priority is registered: among
    /// equals the last one wins. Whether it was registered.
    pub fn set_allocator(
        &self,
        kind: DeviceType,
        allocator: Arc<dyn Allocator>,
        priority: u8,
    ) -> bool {
        set(&self.device, kind, allocator, priority)
    }

    /// The allocator of a kind of device.
    ///
    /// # Errors
    /// [`AllocatorError::NoAllocator`].
    pub fn get_allocator(&self, kind: DeviceType) -> Result<Arc<dyn Allocator>, AllocatorError> {
        get(&self.device, kind).ok_or(AllocatorError::NoAllocator(kind))
    }

    /// [`set_allocator`](Self::set_allocator) for host memory that is pinned for a kind of device.
    pub fn set_host_allocator(
        &self,
        kind: DeviceType,
        allocator: Arc<dyn Allocator>,
        priority: u8,
    ) -> bool {
        set(&self.host, kind, allocator, priority)
    }

    /// The allocator of host memory that is pinned for a kind of device.
    ///
    /// # Errors
    /// [`AllocatorError::NoHostAllocator`].
    pub fn get_host_allocator(
        &self,
        kind: DeviceType,
    ) -> Result<Arc<dyn Allocator>, AllocatorError> {
        get(&self.host, kind).ok_or(AllocatorError::NoHostAllocator(kind))
    }

    /// Takes the allocator of a kind of device out; the priority starts at 0 again.
    pub fn remove_allocator(&self, kind: DeviceType) -> Option<Arc<dyn Allocator>> {
        Some(self.device.write().remove(&kind)?.allocator)
    }
}

fn set(slots: &Slots, kind: DeviceType, allocator: Arc<dyn Allocator>, priority: u8) -> bool {
    let mut slots = slots.write();
    let wins = slots.get(&kind).is_none_or(|entry| priority >= entry.priority);
    let replaced = if wins { slots.insert(kind, Entry { allocator, priority }) } else { None };
    drop(slots);
    // Dropped without the lock: an allocator may call the registry when it goes.
    drop(replaced);
    wins
}

fn get(slots: &Slots, kind: DeviceType) -> Option<Arc<dyn Allocator>> {
    Some(slots.read().get(&kind)?.allocator.clone())
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = |slots: &Slots| slots.read().keys().copied().collect::<Vec<_>>();
        f.debug_struct("Registry")
            .field("device", &kinds(&self.device))
            .field("host", &kinds(&self.host))
            .finish()
    }
}

/// The registry of the process. A library that wants one of its own makes a [`Registry`].
pub fn registry() -> &'static Registry {
    static PROCESS: Registry = Registry::new();
    &PROCESS
}

/// [`Registry::set_allocator`] in the registry of the process.
pub fn set_allocator(kind: DeviceType, allocator: Arc<dyn Allocator>, priority: u8) -> bool {
    registry().set_allocator(kind, allocator, priority)
}

/// [`Registry::get_allocator`] in the registry of the process.
///
/// # Errors
/// As there.
pub fn get_allocator(kind: DeviceType) -> Result<Arc<dyn Allocator>, AllocatorError> {
    registry().get_allocator(kind)
}
