//! Requested and effective modes, what falls back to what, and changes while memory is out.

use crate::{MIB, rig, rig_on};
use alloc_core::backend::{ErrorKind, Stream};
use alloc_core::ordered::{PoolReuse, StreamOrdered};
use memory_manager::{DeviceAllocatorMode, ManagerConfig, ManagerError};
use mock_backend::{Call, CaptureMode, Fault, MockBackend};

use DeviceAllocatorMode::{AsyncStreamOrdered, Caching, CudaAsyncPool};

#[test]
fn devices_without_pools_fall_back_to_caching_and_say_so() {
    let gpu = MockBackend::builder().device(64 * MIB).without_pools().build();
    let rig = rig_on(gpu, ManagerConfig::default());
    assert!(!rig.manager.supports_async_device_allocator().unwrap());
    for mode in [AsyncStreamOrdered, CudaAsyncPool] {
        let report = rig.manager.set_device_allocator_mode(mode).unwrap();
        assert_eq!((report.requested, report.effective), (mode, Caching));
        let text = report.to_string();
        assert!(text.contains("not") && text.contains("no "), "{text}");
        assert_eq!(rig.manager.requested_device_allocator_mode(), mode);
        assert_eq!(rig.manager.effective_device_allocator_mode().unwrap(), Caching);
        let addr = rig.device(MIB);
        rig.free_device(addr);
    }
    let report = rig.manager.set_device_allocator_mode(Caching).unwrap();
    assert_eq!(report.reason, None);
    rig.finish();
}

#[test]
fn a_private_pool_that_cannot_be_made_falls_back_to_the_default_one() {
    let rig = rig(CudaAsyncPool);
    assert!(rig.manager.supports_async_device_allocator().unwrap());
    assert_eq!(rig.manager.effective_device_allocator_mode().unwrap(), CudaAsyncPool);
    rig.gpu.set_faults([Fault::nth(1).of(Call::CreatePool).kind(ErrorKind::Unsupported)]);
    let addr = rig.device(MIB);
    assert_eq!(rig.manager.effective_device_allocator_mode().unwrap(), AsyncStreamOrdered);
    let pool = rig.gpu.default_pool(crate::FIRST).unwrap();
    assert_eq!(rig.gpu.pool_usage(&pool).unwrap().used, MIB);
    rig.free_device(addr);
    rig.finish();
}

#[test]
fn the_mode_changes_for_new_memory_only() {
    let rig = rig(Caching);
    let mut held = Vec::new();
    for mode in [Caching, AsyncStreamOrdered, CudaAsyncPool, Caching] {
        rig.manager.set_device_allocator_mode(mode).unwrap();
        held.push(rig.device(MIB));
    }
    let calls = |call| rig.gpu.costs().calls(call);
    assert_eq!(calls(Call::AllocateOrdered), 2);
    let stream = rig.stream();
    let host = rig.pinned(MIB);
    for addr in held {
        rig.manager.copy_to_device_async(addr, host, MIB, &stream).unwrap();
        rig.gpu.judge().freed(addr);
        rig.manager.free_device_on(addr, &stream).unwrap();
    }
    rig.gpu.sync();
    rig.free_pinned(host);
    rig.expect_no_violations();
    rig.finish();
}

#[test]
fn stream_ordered_memory_is_reused_in_the_order_of_streams() {
    for mode in [AsyncStreamOrdered, CudaAsyncPool] {
        let config = ManagerConfig {
            mode,
            reuse: PoolReuse { follow_events: true, ..PoolReuse::NONE },
            ..ManagerConfig::default()
        };
        let rig = rig_on(MockBackend::builder().device(64 * MIB).build(), config);
        let (s, t) = (rig.stream(), rig.stream());
        let addr = rig.device_on(MIB, &s);
        crate::work_on(&rig.gpu, &s, addr, MIB);
        rig.free_device(addr);
        let same = rig.device_on(MIB, &s);
        assert_eq!(same, addr, "the same stream");
        rig.free_device(same);
        let other = rig.device_on(MIB, &t);
        assert_ne!(other, addr, "no order");
        rig.free_device(other);
        rig.gpu.order(&s, &t);
        let third = rig.device_on(2 * MIB - 512, &t);
        rig.free_device(third);
        rig.expect_no_violations();
    }
}

#[test]
fn a_mode_that_cannot_be_asked_about_changes_nothing() {
    let rig = rig(Caching);
    rig.manager.set_device_allocator_mode(CudaAsyncPool).unwrap();
    rig.manager.shutdown();
    assert!(rig.manager.set_device_allocator_mode(Caching).is_err());
    assert_eq!(rig.manager.requested_device_allocator_mode(), CudaAsyncPool);
}

#[test]
fn captured_streams_get_no_memory_of_pools_and_disturb_no_free() {
    for mode in [AsyncStreamOrdered, CudaAsyncPool] {
        let rig = rig(mode);
        let stream = rig.stream();
        let before = rig.device_on(MIB, &stream);
        rig.gpu.begin_capture(&stream, CaptureMode::Global).unwrap();
        let refused = rig.manager.allocate_device_on(MIB, &stream);
        assert!(matches!(refused, Err(ManagerError::Capturing(id)) if id == stream.id()));
        rig.free_device(before);
        rig.gpu.end_capture(&stream).unwrap();
        assert!(rig.manager.outstanding().is_empty());
        let after = rig.device_on(MIB, &stream);
        rig.free_device(after);
        assert_eq!(rig.gpu.leaks().ordered, [], "what was freed meanwhile has been freed");
        rig.expect_no_violations();
        rig.finish();
    }
}
