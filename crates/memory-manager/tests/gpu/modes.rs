//! The stream-ordered modes on the driver's pools.

use crate::rig::{FIRST, MIB, Rig, stream_of};
use crate::{Outcome, Test};
use alloc_core::backend::Backend;
use alloc_core::ordered::{
    OrderedAllocator, OrderedConfig, OrderedError, OrderedMemory, PoolOptions, PoolReuse,
    StreamOrdered, StreamWait,
};
use memory_manager::{DeviceAllocatorMode, ManagerConfig, ManagerError};

pub(crate) const TESTS: &[Test] = &[
    ("pools_keep_their_settings", settings),
    ("pools_are_bounded_and_trimmed", bounds),
    ("freed_memory_is_reused_on_its_stream", reuse),
    ("memory_of_several_streams_is_freed_after_all", several_streams),
    ("devices_without_pools_fall_back", fallback),
    ("the_mode_changes_for_new_memory_only", change),
];

const NO_POOLS: Outcome = Outcome::Skipped("the device has no memory pools");

fn has_pools(rig: &Rig) -> bool {
    rig.backend().has_pools(FIRST).expect("a device")
}

fn settings(rig: &Rig) -> Outcome {
    if !has_pools(rig) {
        return NO_POOLS;
    }
    let backend = rig.backend();
    let pool = backend.create_pool(FIRST, None).expect("a pool");
    for (release_threshold, follow_events) in [(0, true), (64 * MIB, false), (u64::MAX, true)] {
        let reuse = PoolReuse { follow_events, ..PoolReuse::NONE };
        let options = PoolOptions { reuse, release_threshold };
        backend.set_pool_options(&pool, options).expect("set");
        assert_eq!(backend.pool_options(&pool).expect("get"), options);
    }
    backend.destroy_pool(pool).expect("destroyed");
    Outcome::Done
}

fn bounds(rig: &Rig) -> Outcome {
    if !has_pools(rig) {
        return NO_POOLS;
    }
    let config = ManagerConfig {
        mode: DeviceAllocatorMode::CudaAsyncPool,
        release_threshold: Some(u64::MAX),
        ..ManagerConfig::default()
    };
    let manager = rig.manager_with(config);
    manager.set_device_pool_size(64 * MIB).expect("before first use");
    let stream = stream_of(&manager);
    let first = manager.allocate_device_on(48 * MIB, &stream).expect("room");
    let refused = manager.allocate_device_on(48 * MIB, &stream);
    assert!(matches!(refused, Err(ManagerError::OutOfMemory { .. })), "{refused:?}");
    manager.free_device(first).expect("freed");
    let second = manager.allocate_device_on(48 * MIB, &stream).expect("room again");
    manager.free_device(second).expect("freed");
    stream.synchronize().expect("no failed work");
    println!("  held before emptying: {} bytes", manager.stats().expect("figures").device_reserved);
    manager.empty_caches().expect("emptied");
    assert_eq!(manager.stats().expect("figures").device_reserved, 0);
    assert!(manager.shutdown().failure.is_none());
    Outcome::Done
}

fn reuse(rig: &Rig) -> Outcome {
    if !has_pools(rig) {
        return NO_POOLS;
    }
    let manager = rig.manager(DeviceAllocatorMode::CudaAsyncPool);
    let stream = stream_of(&manager);
    let mut reserved = Vec::new();
    for _ in 0..100 {
        let addr = manager.allocate_device_on(8 * MIB, &stream).expect("room");
        manager.free_device(addr).expect("freed");
        reserved.push(manager.stats().expect("figures").device_reserved);
    }
    if rig.imitation().is_none() {
        assert!(reserved[0] >= 8 * MIB);
        assert_eq!(reserved.first(), reserved.last(), "the pool does not grow: {reserved:?}");
    }
    assert!(manager.shutdown().failure.is_none());
    Outcome::Done
}

fn several_streams(rig: &Rig) -> Outcome {
    if !has_pools(rig) {
        return NO_POOLS;
    }
    let backend = rig.backend();
    let [main, side, unifier] = [(); 3].map(|()| backend.create_stream(FIRST).expect("a stream"));
    let config = OrderedConfig::private_pool(None);
    let pool = OrderedAllocator::new(backend.clone(), unifier, config).expect("a pool");
    let addr = pool.allocate(4 * MIB, &main).expect("room");
    let event = backend.record(&main).expect("recorded");
    backend.wait_event(&side, &event).expect("ordered");
    pool.record_use(addr, &side).expect("live");
    pool.free(addr).expect("freed");
    assert!(matches!(pool.free(addr), Err(OrderedError::UnknownAddress(_))));
    pool.empty_cache().expect("emptied");
    let usage = pool.stats().expect("figures");
    assert_eq!((usage.used, usage.reserved), (0, 0));
    assert!(usage.used_peak >= 4 * MIB);
    pool.reset_peaks().expect("reset");
    assert_eq!(pool.stats().expect("figures").used_peak, 0);
    // Tokens keep what they are.
    let raw = backend.default_pool(FIRST).expect("a pool");
    let memory = backend.allocate_ordered(&raw, 1000, &main).expect("room");
    assert_eq!(memory.bytes(), 1000);
    backend.free_ordered(memory, &main).expect("freed");
    main.synchronize().expect("no failed work");
    Outcome::Done
}

fn fallback(rig: &Rig) -> Outcome {
    let Some(imitation) = rig.imitation() else {
        return Outcome::Skipped("the device has what it has");
    };
    imitation.remove_memory_pools();
    let manager = rig.manager(DeviceAllocatorMode::Caching);
    let wanted = DeviceAllocatorMode::CudaAsyncPool;
    let report = manager.set_device_allocator_mode(wanted).expect("a device");
    assert_eq!(report.effective, DeviceAllocatorMode::Caching);
    assert!(report.reason.is_some());
    assert!(!manager.supports_async_device_allocator().expect("a device"));
    let addr = manager.allocate_device(MIB).expect("room");
    manager.free_device(addr).expect("freed");
    assert!(manager.shutdown().failure.is_none());
    Outcome::Done
}

fn change(rig: &Rig) -> Outcome {
    let manager = rig.manager(DeviceAllocatorMode::Caching);
    let stream = stream_of(&manager);
    let mut held = Vec::new();
    for mode in DeviceAllocatorMode::ALL {
        manager.set_device_allocator_mode(mode).expect("a device");
        held.push(manager.allocate_device_on(3 * MIB, &stream).expect("room"));
    }
    held.into_iter().for_each(|addr| manager.free_device_on(addr, &stream).expect("freed"));
    assert!(manager.shutdown().failure.is_none());
    Outcome::Done
}
