//! Copies keep both ends, and stay inside them.

use crate::{FIRST, MIB, Rig, rig};
use alloc_core::Addr;
use memory_manager::{DeviceAllocatorMode, ManagerError, MemoryKind};
use mock_backend::MockStream;
use std::sync::atomic::Ordering;

/// A copy in each direction that has not ended, with both ends freed.
fn freed_under_copies(rig: &Rig, stream: &MockStream) -> (Addr, Addr) {
    let (host, device) = (rig.pinned(2 * MIB), rig.device(2 * MIB));
    rig.manager.copy_to_device_async(device, host, 2 * MIB, stream).unwrap();
    rig.manager.copy_to_host_async(host, device, 2 * MIB, stream).unwrap();
    rig.free_pinned(host);
    rig.free_device(device);
    (host, device)
}

#[test]
fn both_ends_can_be_freed_while_the_copy_runs() {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(mode);
        let stream = rig.stream();
        rig.gpu.busy(&stream);
        let (host, device) = freed_under_copies(&rig, &stream);
        let others = (rig.pinned(2 * MIB), rig.device(2 * MIB));
        assert_ne!(others.0, host, "{mode}");
        assert_ne!(others.1, device, "{mode}");
        rig.gpu.sync_stream(&stream);
        rig.manager.empty_caches().unwrap();
        rig.free_pinned(others.0);
        rig.free_device(others.1);
        rig.expect_no_violations();
        rig.finish();
    }
}

#[test]
fn copies_come_after_what_used_the_memory_before() {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(mode);
        let main = rig.gpu.default_stream(FIRST);
        let old = rig.device(2 * MIB);
        crate::work_on(&rig.gpu, &main, old, 2 * MIB);
        rig.free_device(old);
        // The same memory again, for the same stream; but the copy is on another.
        let device = rig.device(2 * MIB);
        assert_eq!(device, old, "{mode}");
        let (host, stream) = (rig.pinned(2 * MIB), rig.stream());
        rig.manager.copy_to_device_async(device, host, 2 * MIB, &stream).unwrap();
        assert!(!rig.gpu.finish_next(&stream), "it waits for the old work");
        rig.manager.copy_to_device_async(device, host, MIB, &stream).unwrap();
        rig.gpu.sync();
        rig.free_device(device);
        rig.free_pinned(host);
        rig.expect_no_violations();
        rig.finish();
    }
}

#[test]
fn the_order_is_made_once_for_each_stream() {
    let rig = rig(DeviceAllocatorMode::Caching);
    let (host, device, stream) = (rig.pinned(1000), rig.device(1000), rig.stream());
    for _ in 0..5 {
        rig.manager.copy_to_device_async(device, host, 1000, &stream).unwrap();
    }
    assert_eq!(rig.gpu.costs().calls(mock_backend::Call::WaitEvent), 1);
}

#[test]
fn copies_may_be_of_parts_and_end_where_the_allocations_end() {
    let rig = rig(DeviceAllocatorMode::Caching);
    let (host, device, stream) = (rig.pinned(1000), rig.device(2000), rig.stream());
    let to_device = |to, from, bytes| rig.manager.copy_to_device_async(to, from, bytes, &stream);
    to_device(device + 1000, host, 1000).unwrap();
    to_device(device + 1999, host + 999, 1).unwrap();
    for (result, expected, kind) in [
        (to_device(device + 1001, host, 1000), (device + 1001, 999), MemoryKind::Device),
        (to_device(device, host, 1001), (host, 1000), MemoryKind::Pinned),
        (to_device(device, host + 999, u64::MAX), (device, 2000), MemoryKind::Device),
    ] {
        match result {
            Err(ManagerError::OutOfRange { addr, available, kind: k, .. }) => {
                assert_eq!(((addr, available), k), (expected, kind));
            }
            other => panic!("{other:?}"),
        }
    }
    let to_host = rig.manager.copy_to_host_async(host, device, 1001, &stream);
    assert!(matches!(to_host, Err(ManagerError::OutOfRange { kind: MemoryKind::Pinned, .. })));
    assert!(matches!(to_device(device, host, 0), Err(ManagerError::ZeroSize(_))));
    for (to, from) in
        [(host, device), (device + 2000, host), (device, Addr::new(8)), (Addr::NULL, host)]
    {
        assert!(matches!(to_device(to, from, 1), Err(ManagerError::UnknownAddress { .. })));
    }
    rig.gpu.sync();
    rig.free_pinned(host);
    assert!(to_device(device, host, 1).is_err(), "the source is freed");
    rig.free_device(device);
    rig.expect_no_violations();
    rig.finish();
}

#[test]
fn buffers_come_back_from_copies() {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(mode);
        let stream = rig.stream();
        let pinned = rig.manager.pinned_buffer(MIB).unwrap();
        let device = rig.manager.device_buffer(2 * MIB, &stream).unwrap();
        rig.gpu.judge().allocated_on_host(pinned.addr(), MIB);
        rig.gpu.judge().allocated(device.addr(), 2 * MIB, &stream);
        let addr = pinned.addr();
        let copy = pinned.copy_to_device(&device, MIB, &stream).unwrap();
        assert!(!copy.is_done().unwrap());
        let pinned = copy.wait().unwrap();
        assert_eq!((pinned.addr(), pinned.bytes()), (addr, MIB));

        let refused = pinned.copy_from_device(&device, MIB + 1, &stream).unwrap_err();
        assert!(
            matches!(refused.error, ManagerError::OutOfRange { available, .. } if available == MIB - 1)
        );
        let refused = refused.buffer.copy_from_device(&device, u64::MAX, &stream).unwrap_err();
        assert!(matches!(refused.error, ManagerError::OutOfRange { available: 0, .. }));
        let copy = refused.buffer.copy_from_device(&device, 0, &stream).unwrap();
        rig.gpu.judge().freed(device.addr());
        drop(device); // while the copy reads it
        rig.gpu.judge().freed(addr);
        drop(copy);
        let next = rig.manager.pinned_buffer(MIB).unwrap();
        assert_ne!(next.addr(), addr, "the copy still writes there");
        drop(next);
        rig.gpu.sync();
        rig.expect_no_violations();
        rig.finish();
    }
}

#[test]
fn a_copy_that_fails_leaves_all_as_it_was() {
    let rig = rig(DeviceAllocatorMode::Caching);
    let (host, device, stream) = (rig.pinned(1000), rig.device(1000), rig.stream());
    rig.machine.copies_fail.store(true, Ordering::Relaxed);
    assert!(rig.manager.copy_to_device_async(device, host, 1000, &stream).is_err());
    let pinned = rig.manager.pinned_buffer(8).unwrap();
    let buffer = rig.manager.device_buffer(8, &stream).unwrap();
    let refused = pinned.copy_to_device(&buffer, 0, &stream).unwrap_err();
    assert_eq!(refused.to_string(), "the copy fails");
    drop((refused, buffer));
    rig.machine.copies_fail.store(false, Ordering::Relaxed);
    rig.manager.copy_to_device_async(device, host, 1000, &stream).unwrap();
    rig.gpu.sync();
    rig.free_device(device);
    rig.free_pinned(host);
    rig.finish();
}

#[test]
fn captures_are_not_broken() {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(mode);
        let (host, device, stream) = (rig.pinned(1000), rig.device(1000), rig.stream());
        rig.gpu.begin_capture(&stream, mock_backend::CaptureMode::Global).unwrap();
        for result in [
            rig.manager.copy_to_device_async(device, host, 1000, &stream),
            rig.manager.copy_to_host_async(host, device, 1000, &stream),
            rig.manager.record_use(device, &stream),
            rig.manager.free_device_on(device, &stream),
        ] {
            assert!(matches!(result, Err(ManagerError::Capturing(_))), "{result:?}");
        }
        rig.gpu.end_capture(&stream).unwrap();
        rig.free_device(device);
        rig.free_pinned(host);
        rig.expect_no_violations();
        rig.finish();
    }
}

#[test]
fn a_copy_whose_event_fails_is_waited_for() {
    let rig = rig(DeviceAllocatorMode::Caching);
    let stream = rig.stream();
    let pinned = rig.manager.pinned_buffer(8).unwrap();
    let device = rig.manager.device_buffer(8, &stream).unwrap();
    rig.gpu.judge().allocated_on_host(pinned.addr(), 8);
    rig.gpu.judge().allocated(device.addr(), 8, &stream);
    rig.gpu.set_faults([mock_backend::Fault::nth(1).of(mock_backend::Call::Record)]);
    let refused = pinned.copy_to_device(&device, 0, &stream).unwrap_err();
    assert!(!rig.gpu.is_busy(&stream));
    rig.gpu.judge().freed(device.addr());
    rig.gpu.judge().freed(refused.buffer.addr());
    drop((refused, device));
    rig.finish();
}
