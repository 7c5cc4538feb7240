//! What a manager is made with.

use crate::mode::DeviceAllocatorMode;
use alloc_core::host::HostConfig;
use alloc_core::ordered::PoolReuse;
use alloc_core::{Config, DeviceId};

/// What a manager is made with.
#[derive(Clone, PartialEq, Debug)]
pub struct ManagerConfig {
    /// The device of calls that name no stream.
    pub device: DeviceId,
    /// Where device memory comes from.
    pub mode: DeviceAllocatorMode,
    /// How the pinned pool behaves.
    pub pinned: HostConfig,
    /// How device memory behaves in [`DeviceAllocatorMode::Caching`].
    pub caching: Config,
    /// How stream-ordered pools reuse memory.
    pub reuse: PoolReuse,
    /// See [`set_release_threshold`](crate::MemoryManager::set_release_threshold).
    pub release_threshold: Option<u64>,
}

impl Default for ManagerConfig {
    /// Device 0, caching, with this project's own policies.
    fn default() -> Self {
        ManagerConfig {
            device: DeviceId::new(0),
            mode: DeviceAllocatorMode::Caching,
            pinned: HostConfig::ours(),
            caching: Config::ours(),
            reuse: PoolReuse::ALL,
            release_threshold: None,
        }
    }
}
