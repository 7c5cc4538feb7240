//! Sizes of pools, best fit, caches, and reports.

use crate::{FIRST, MIB, rig, rig_on};
use alloc_api::Device;
use alloc_api::report::{self, MemoryReporter, MemoryUsage, OutOfMemory};
use alloc_core::Config;
use alloc_core::ordered::StreamOrdered;
use memory_manager::{DeviceAllocatorMode, ManagerConfig, ManagerError, MemoryKind};
use mock_backend::MockBackend;
use parking_lot::Mutex;
use std::sync::Arc;

#[test]
fn sizes_bound_the_pools_in_every_mode() {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(mode);
        rig.manager.set_device_pool_size(24 * MIB).unwrap();
        rig.manager.set_pinned_pool_size(8 * MIB).unwrap();
        let held = (rig.device(12 * MIB), rig.pinned(3 * MIB));
        let device = rig.manager.allocate_device(14 * MIB);
        assert!(matches!(device, Err(ManagerError::OutOfMemory { kind: MemoryKind::Device, .. })));
        let pinned = rig.manager.allocate_pinned(7 * MIB);
        assert!(matches!(pinned, Err(ManagerError::OutOfMemory { kind: MemoryKind::Pinned, .. })));
        rig.free_device(held.0);
        rig.free_pinned(held.1);
        let device = rig.device(20 * MIB);
        rig.free_device(device);
        rig.finish();
    }
}

#[test]
fn sizes_are_set_before_first_use_or_not_at_all() {
    let rig = rig(DeviceAllocatorMode::Caching);
    for result in [rig.manager.set_device_pool_size(0), rig.manager.set_pinned_pool_size(0)] {
        assert!(matches!(result, Err(ManagerError::ZeroSize(_))));
    }
    rig.manager.set_device_pool_size(8 * MIB).unwrap();
    rig.manager.set_device_pool_size(32 * MIB).unwrap();
    let device = rig.device(16 * MIB);
    let late = rig.manager.set_device_pool_size(MIB);
    assert!(matches!(late, Err(ManagerError::PoolInUse(MemoryKind::Device))), "{late:?}");
    assert!(late.unwrap_err().to_string().contains("before the first allocation"));
    rig.manager.set_pinned_pool_size(8 * MIB).unwrap();
    let host = rig.pinned(MIB);
    let late = rig.manager.set_pinned_pool_size(MIB);
    assert!(matches!(late, Err(ManagerError::PoolInUse(MemoryKind::Pinned))));
    rig.free_device(device);
    rig.free_pinned(host);
    assert!(rig.manager.set_device_pool_size(MIB).is_err(), "also when all is freed");
    rig.finish();
}

#[test]
fn pools_are_trimmed_and_keep_what_they_may() {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(mode);
        rig.manager.set_release_threshold(4 * MIB).unwrap();
        let addrs = [2 * MIB, 2 * MIB, 2 * MIB].map(|bytes| rig.device(bytes));
        let late = rig.manager.set_release_threshold(0);
        assert!(matches!(late, Err(ManagerError::PoolInUse(MemoryKind::Device))));
        addrs.into_iter().for_each(|addr| rig.free_device(addr));
        rig.gpu.sync();
        let is_caching = mode == DeviceAllocatorMode::Caching;
        assert_eq!(rig.gpu.used(FIRST) == 4 * MIB, !is_caching, "{mode}");
        rig.manager.trim_device_pools(2 * MIB).unwrap();
        assert_eq!(rig.gpu.used(FIRST) == 2 * MIB, !is_caching, "{mode}");
        rig.finish();
    }
}

#[test]
fn a_private_pool_keeps_what_its_size_allows() {
    let config = ManagerConfig {
        mode: DeviceAllocatorMode::CudaAsyncPool,
        release_threshold: Some(4 * MIB),
        ..ManagerConfig::default()
    };
    let rig = rig_on(MockBackend::builder().device(64 * MIB).build(), config);
    let addrs = [2 * MIB, 2 * MIB, 2 * MIB].map(|bytes| rig.device(bytes));
    addrs.into_iter().for_each(|addr| rig.free_device(addr));
    assert_eq!(rig.gpu.used(FIRST), 6 * MIB);
    rig.gpu.sync();
    assert_eq!(rig.gpu.used(FIRST), 4 * MIB);
    let default = rig.gpu.default_pool(FIRST).unwrap();
    assert_eq!(rig.gpu.pool_usage(&default).unwrap().reserved, 0);
    rig.finish();
}

#[test]
fn the_smallest_block_that_fits_is_taken_split_and_merged() {
    let caching = Config::pytorch();
    let config = ManagerConfig { caching, ..ManagerConfig::default() };
    let rig = rig_on(MockBackend::builder().device(64 * MIB).build(), config);
    let kib = 1 << 10;
    // Holes of 40, 20 and 30 KiB between blocks that stay.
    let sizes = [40, 1, 20, 1, 30, 1].map(|size| size * kib);
    let blocks = sizes.map(|bytes| rig.device(bytes));
    for hole in [0, 2, 4] {
        rig.free_device(blocks[hole]);
    }
    let fits = rig.device(18 * kib);
    assert_eq!(fits, blocks[2], "the hole of 20 KiB");
    let fits_split = rig.device(kib);
    assert_eq!(fits_split, blocks[2] + 18 * kib, "what was split off");
    rig.free_device(fits_split);
    rig.free_device(fits);
    let merged = rig.device(20 * kib);
    assert_eq!(merged, blocks[2], "merged again");
    rig.free_device(merged);
    for kept in [1, 3, 5] {
        rig.free_device(blocks[kept]);
    }
    rig.finish();
}

#[test]
fn figures_follow_allocations_and_caches() {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(mode);
        assert_eq!(rig.manager.stats().unwrap(), Default::default());
        let (host, device) = (rig.pinned(1000), rig.device(3000));
        let stats = rig.manager.stats().unwrap();
        assert_eq!((stats.pinned_allocated, stats.device_allocated), (1000, 3000));
        assert!(stats.pinned_reserved >= 1000 && stats.device_reserved >= 3000, "{stats:?}");
        rig.free_pinned(host);
        rig.free_device(device);
        rig.manager.empty_caches().unwrap();
        assert_eq!(rig.manager.stats().unwrap(), Default::default(), "{mode}");
        rig.finish();
    }
}

#[derive(Default)]
struct Log {
    usages: Mutex<Vec<(Device, i64, u64)>>,
    failures: Mutex<Vec<(Device, u64, u64)>>,
}

impl MemoryReporter for Log {
    fn usage(&self, usage: &MemoryUsage) {
        self.usages.lock().push((usage.device, usage.delta, usage.allocated));
    }

    fn out_of_memory(&self, request: &OutOfMemory) {
        self.failures.lock().push((request.device, request.bytes, request.allocated));
    }
}

#[test]
fn the_reporter_of_the_thread_is_told() {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(mode);
        let log = Arc::new(Log::default());
        let _scope = report::scope(log.clone());
        let (host, device) = (rig.pinned(1000), rig.device(3000));
        let buffer = rig.manager.pinned_buffer(500).unwrap();
        assert!(rig.manager.allocate_device(1 << 41).is_err());
        assert!(rig.manager.allocate_pinned(1 << 41).is_err());
        assert!(rig.manager.allocate_pinned(u64::MAX).is_err(), "too large is no lack of memory");
        drop(buffer);
        rig.free_device(device);
        rig.free_pinned(host);
        let gpu = Device::cuda(0);
        let expected = [
            (Device::CPU, 1000, 1000),
            (gpu, 3000, 3000),
            (Device::CPU, 500, 1500),
            (Device::CPU, -500, 1000),
            (gpu, -3000, 0),
            (Device::CPU, -1000, 0),
        ];
        assert_eq!(*log.usages.lock(), expected, "{mode}");
        assert_eq!(*log.failures.lock(), [(gpu, 1 << 41, 3000), (Device::CPU, 1 << 41, 1500)]);
        rig.finish();
    }
}
