//! The manager behind the registry and as data pointers.

use crate::{FIRST, MIB, rig};
use alloc_api::{AllocatorError, Device, DeviceType, Registry};
use memory_manager::{DeviceAllocatorMode, ManagedDevice, ManagedPinned};
use std::sync::Arc;

#[test]
fn it_serves_the_registry_in_every_mode() {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(mode);
        let registry = Registry::new();
        let stream = rig.gpu.default_stream(FIRST);
        let device = Arc::new(ManagedDevice::new(rig.manager.clone(), stream));
        let pinned = Arc::new(ManagedPinned::new(rig.manager.clone()));
        registry.set_allocator(DeviceType::Cuda, device, 0);
        registry.set_host_allocator(DeviceType::Cuda, pinned, 0);

        let on_device = registry.get_allocator(DeviceType::Cuda).unwrap();
        let on_host = registry.get_host_allocator(DeviceType::Cuda).unwrap();
        let pointers = [on_device.allocate(3000).unwrap(), on_host.allocate(1000).unwrap()];
        assert_eq!(pointers[0].device(), Device::cuda(0));
        assert_eq!(pointers[1].device(), Device::CPU);
        assert_eq!(on_device.stats().unwrap().allocated.current, 3000);
        assert_eq!(on_host.stats().unwrap().allocated.current, 1000);
        assert!(rig.manager.outstanding().is_empty(), "they have an owner");
        assert_eq!(on_device.allocate(0).unwrap().device(), Device::cuda(0));
        assert!(on_host.allocate(0).unwrap().is_null());

        let refused = on_device.allocate_raw(1);
        assert!(matches!(refused, Err(AllocatorError::NotSimple { .. })), "{refused:?}");
        let refused = on_device.allocate(65 * MIB);
        assert!(
            matches!(refused, Err(AllocatorError::OutOfMemory { bytes, .. }) if bytes == 65 * MIB)
        );
        assert!(matches!(on_host.allocate(u64::MAX), Err(AllocatorError::TooLarge { .. })));
        drop(pointers);
        on_device.empty_cache().unwrap();
        on_host.empty_cache().unwrap();
        assert_eq!(on_device.stats().unwrap().reserved.current, 0);
        rig.manager.shutdown();
        assert!(matches!(on_device.allocate(1), Err(AllocatorError::Other(_))));
        drop((registry, on_device, on_host));
        rig.finish();
    }
}
