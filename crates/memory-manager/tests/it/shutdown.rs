//! The end of a manager, and memory that outlives it.

use crate::{MIB, rig};
use alloc_core::Addr;
use memory_manager::{DeviceAllocatorMode, ManagerError};
use mock_backend::Fault;

#[test]
fn later_calls_are_errors_and_a_second_shutdown_is_none() {
    let rig = rig(DeviceAllocatorMode::Caching);
    let stream = rig.stream();
    let manager = &rig.manager;
    assert!(!manager.is_shut_down());
    manager.shutdown();
    let again = manager.shutdown();
    assert!(again.outstanding.is_empty() && again.failure.is_none() && manager.is_shut_down());
    let addr = Addr::new(4096);
    for result in [
        manager.allocate_pinned(1).map(drop),
        manager.allocate_pinned_on(1, &stream).map(drop),
        manager.pinned_buffer(1).map(drop),
        manager.free_pinned(addr),
        manager.free_pinned(Addr::NULL),
        manager.free_pinned_on(addr, &stream),
        manager.allocate_device(1).map(drop),
        manager.allocate_device_on(1, &stream).map(drop),
        manager.device_buffer(1, &stream).map(drop),
        manager.free_device(addr),
        manager.free_device_on(addr, &stream),
        manager.record_use(addr, &stream),
        manager.copy_to_device_async(addr, addr, 1, &stream),
        manager.copy_to_host_async(addr, addr, 1, &stream),
        manager.set_pinned_pool_size(1),
        manager.set_device_pool_size(1),
        manager.set_release_threshold(1),
        manager.trim_device_pools(0),
        manager.set_device_allocator_mode(DeviceAllocatorMode::Caching).map(drop),
        manager.effective_device_allocator_mode().map(drop),
        manager.supports_async_device_allocator().map(drop),
        manager.empty_caches(),
        manager.stats().map(drop),
    ] {
        assert!(matches!(result, Err(ManagerError::ShutDown)), "{result:?}");
    }
}

#[test]
fn memory_that_is_out_is_reported_and_never_freed() {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(mode);
        let (host, device) = (rig.pinned(1000), rig.device(3000));
        let cached = rig.device(8 * MIB);
        rig.free_device(cached);
        let used = rig.gpu.used(crate::FIRST);
        for _ in 0..2 {
            let report = rig.manager.shutdown();
            assert_eq!(report.outstanding.pinned, [(host, 1000)]);
            assert_eq!(report.outstanding.device, [(device, 3000)]);
            assert!(report.failure.is_none());
        }
        let left = rig.gpu.used(crate::FIRST);
        assert!(left < used && left > 0, "{mode}: what was cached is given back");
        assert!(matches!(rig.manager.free_device(device), Err(ManagerError::ShutDown)));
        drop(rig.manager);
        assert_eq!(rig.gpu.used(crate::FIRST), left, "{mode}: not with the manager either");
        let stream = rig.gpu.default_stream(crate::FIRST);
        crate::work_on(&rig.gpu, &stream, device, 3000);
        crate::work_on(&rig.gpu, &stream, host, 1000);
        assert_eq!(rig.gpu.violations(), [], "{mode}: it is still there");
    }
}

#[test]
fn buffers_free_themselves_after_a_shutdown_and_then_nothing_is_left() {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(mode);
        let stream = rig.stream();
        let pinned = rig.manager.pinned_buffer(1000).unwrap();
        let device = rig.manager.device_buffer(3000, &stream).unwrap();
        rig.gpu.judge().allocated_on_host(pinned.addr(), 1000);
        rig.gpu.judge().allocated(device.addr(), 3000, &stream);
        let copy = pinned.copy_to_device(&device, 0, &stream).unwrap();
        let report = rig.manager.shutdown();
        assert!(report.outstanding.is_empty(), "buffers have an owner");
        let pinned = copy.wait().unwrap();
        let refused = pinned.copy_to_device(&device, 0, &stream).unwrap_err();
        assert!(matches!(refused.error, ManagerError::ShutDown));
        rig.gpu.judge().freed(refused.buffer.addr());
        rig.gpu.judge().freed(device.addr());
        drop((refused, device));
        rig.gpu.sync();
        rig.gpu.assert_clean();
    }
}

#[test]
fn a_manager_that_is_dropped_gives_everything_back_that_nobody_has() {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(mode);
        let (host, device) = (rig.pinned(1000), rig.device(3000));
        rig.free_pinned(host);
        rig.free_device(device);
        let clone = rig.manager.clone();
        drop(rig.manager);
        assert!(clone.stats().unwrap().device_reserved > 0);
        drop(clone);
        rig.gpu.sync();
        rig.gpu.assert_clean();
    }
}

#[test]
fn the_driver_may_be_gone_by_then() {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(mode);
        let device = rig.device(3000);
        rig.free_device(device);
        rig.gpu.unload();
        let report = rig.manager.shutdown();
        assert!(matches!(report.failure, Some(ManagerError::DeviceLost(_))), "{mode}: {report:?}");
        drop(rig.manager);
    }
}

#[test]
fn what_cannot_be_given_back_is_in_the_report() {
    let rig = rig(DeviceAllocatorMode::AsyncStreamOrdered);
    let device = rig.device(3000);
    rig.free_device(device);
    rig.gpu.set_faults([Fault::every(1)]);
    let report = rig.manager.shutdown();
    assert!(report.failure.is_some());
}

#[test]
fn a_panic_between_calls_breaks_nothing() {
    let rig = rig(DeviceAllocatorMode::Caching);
    let manager = rig.manager.clone();
    let thread = std::thread::spawn(move || {
        let _buffer = manager.pinned_buffer(1000).unwrap();
        panic!("the user fails");
    });
    assert!(thread.join().is_err());
    assert_eq!(rig.manager.outstanding(), Default::default());
    rig.finish();
}
