//! The example of the interface's first description, in every mode.

use crate::{FIRST, MIB, rig};
use memory_manager::DeviceAllocatorMode;

#[test]
fn the_example_runs_in_every_mode() {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(DeviceAllocatorMode::Caching);
        let (manager, size) = (&rig.manager, 4 * MIB);
        manager.set_pinned_pool_size(128 * MIB).unwrap();
        manager.set_device_pool_size(48 * MIB).unwrap();
        let report = manager.set_device_allocator_mode(mode).unwrap();
        assert_eq!((report.requested, report.effective, report.reason), (mode, mode, None));

        let host = rig.pinned(size);
        let device = rig.device(size);
        let stream = rig.gpu.stream(FIRST);
        manager.copy_to_device_async(device, host, size, &stream).unwrap();
        manager.copy_to_host_async(host, device, size, &stream).unwrap();
        rig.gpu.sync_stream(&stream);
        rig.free_device(device);
        rig.free_pinned(host);

        let on_stream = rig.device_on(size, &stream);
        rig.gpu.judge().freed(on_stream);
        manager.free_device_on(on_stream, &stream).unwrap();
        rig.expect_no_violations();
        rig.finish();
    }
}
