//! The example of the interface's first description, with data, in every mode; and mistakes.

use crate::rig::{Gate, MIB, Rig, bytes_at, fill, is_filled, stream_of};
use crate::{Outcome, Test};
use alloc_core::Addr;
use memory_manager::{DeviceAllocatorMode, ManagerError, MemoryManager};

pub(crate) const TESTS: &[Test] = &[
    ("the_example_runs_in_every_mode", example),
    ("buffers_carry_data_both_ways", buffers),
    ("memory_freed_under_copies_keeps_its_bytes", freed_under_copies),
    ("mistakes_are_errors", mistakes),
    ("shutdown_leaves_what_is_out", shutdown),
    ("the_manager_of_the_process_is_one", instance),
];

fn example(rig: &Rig) -> Outcome {
    for mode in DeviceAllocatorMode::ALL {
        let manager = rig.manager(DeviceAllocatorMode::Caching);
        manager.set_pinned_pool_size(128 * MIB).expect("before first use");
        manager.set_device_pool_size(128 * MIB).expect("before first use");
        let report = manager.set_device_allocator_mode(mode).expect("a device");
        println!("  {report}");
        if manager.supports_async_device_allocator().expect("a device") {
            assert_eq!(report.effective, mode);
        }
        let (size, seed) = (5 * MIB + 12345, mode as u8 + 1);
        let host = manager.allocate_pinned(size).expect("pinned memory");
        let device = manager.allocate_device(size).expect("device memory");
        let stream = stream_of(&manager);
        // SAFETY: just allocated, and no copy runs.
        fill(unsafe { bytes_at(host, size) }, seed);
        manager.copy_to_device_async(device, host, size, &stream).expect("queued");
        stream.synchronize().expect("copied");
        // SAFETY: the copy is done.
        unsafe { bytes_at(host, size) }.fill(0);
        manager.copy_to_host_async(host, device, size, &stream).expect("queued");
        stream.synchronize().expect("copied");
        // SAFETY: the copy is done.
        assert!(is_filled(unsafe { bytes_at(host, size) }, seed), "{mode}");

        manager.free_device(device).expect("freed");
        manager.free_pinned(host).expect("freed");
        let on_stream = manager.allocate_device_on(size, &stream).expect("device memory");
        manager.free_device_on(on_stream, &stream).expect("freed");
        let report = manager.shutdown();
        assert!(report.outstanding.is_empty() && report.failure.is_none(), "{report:?}");
    }
    Outcome::Done
}

fn buffers(rig: &Rig) -> Outcome {
    for mode in DeviceAllocatorMode::ALL {
        let manager = rig.manager(mode);
        let (first, second) = (stream_of(&manager), stream_of(&manager));
        let mut source = manager.pinned_buffer(MIB).expect("pinned memory");
        let device = manager.device_buffer(3 * MIB, &first).expect("device memory");
        fill(&mut source, 9);
        let source = source.copy_to_device(&device, 2 * MIB, &first).expect("queued");
        let source = source.wait().expect("copied");
        let target = manager.pinned_buffer(MIB).expect("pinned memory");
        // On another stream, which is ordered after the allocation, and here after the copy.
        let target = target.copy_from_device(&device, 2 * MIB, &second).expect("queued");
        drop(device);
        let target = target.wait().expect("copied");
        assert!(is_filled(&target, 9), "{mode}");
        drop((source, target));
        assert!(manager.shutdown().failure.is_none());
    }
    Outcome::Done
}

/// A copy is held up; its source is freed, and others write into everything that is handed out
/// meanwhile.
fn freed_under_copies(rig: &Rig) -> Outcome {
    for mode in DeviceAllocatorMode::ALL {
        let manager = rig.manager(mode);
        let (stream, other) = (stream_of(&manager), stream_of(&manager));
        let size = 2 * MIB;
        let host = manager.allocate_pinned(size).expect("pinned memory");
        let device = manager.allocate_device_on(size, &other).expect("device memory");
        let back = manager.pinned_buffer(size).expect("pinned memory");
        // SAFETY: just allocated, and no copy runs.
        fill(unsafe { bytes_at(host, size) }, 77);
        // Before the gate: what makes or grows pools may wait for the device.
        let reserve = manager.allocate_pinned(size).expect("pinned memory");
        manager.free_pinned(reserve).expect("freed");
        let gate = Gate::close(&stream);
        manager.copy_to_device_async(device, host, size, &stream).expect("queued");
        manager.free_pinned(host).expect("freed");
        for _ in 0..4 {
            let mut noise = manager.pinned_buffer(size).expect("pinned memory");
            assert_ne!(noise.addr(), host, "{mode}");
            noise.fill(0xee);
        }
        gate.open();
        stream.synchronize().expect("copied");
        let target = manager.device_buffer(size, &stream).expect("device memory");
        let copy = manager.copy_to_host_async(back.addr(), device, size, &stream);
        assert!(matches!(copy, Err(ManagerError::UnknownAddress { .. })), "it has an owner");
        let check = manager.allocate_pinned(size).expect("pinned memory");
        manager.copy_to_host_async(check, device, size, &stream).expect("queued");
        manager.free_device(device).expect("freed");
        stream.synchronize().expect("copied");
        // SAFETY: the copy is done.
        assert!(is_filled(unsafe { bytes_at(check, size) }, 77), "{mode}");
        manager.free_pinned(check).expect("freed");
        drop((target, back));
        assert!(manager.shutdown().outstanding.is_empty());
    }
    Outcome::Done
}

fn mistakes(rig: &Rig) -> Outcome {
    for mode in DeviceAllocatorMode::ALL {
        let (manager, other) = (rig.manager(mode), rig.manager(mode));
        let stream = stream_of(&manager);
        let host = manager.allocate_pinned(100).expect("pinned memory");
        let device = manager.allocate_device(100).expect("device memory");
        let unknown = |result: Result<(), ManagerError>| {
            assert!(matches!(result, Err(ManagerError::UnknownAddress { .. })), "{result:?}");
        };
        unknown(other.free_device(device));
        unknown(other.free_pinned(host));
        unknown(manager.free_device(host));
        unknown(manager.free_device(Addr::new(device.get() + 1)));
        let long = manager.copy_to_device_async(device, host, 101, &stream);
        assert!(matches!(long, Err(ManagerError::OutOfRange { bytes: 101, .. })));
        for bytes in [0, u64::MAX, 1 << 59] {
            assert!(manager.allocate_device(bytes).is_err(), "{bytes}");
        }
        manager.free_device(device).expect("freed");
        unknown(manager.free_device(device));
        manager.free_pinned(host).expect("freed");
        assert!(manager.shutdown().outstanding.is_empty());
        assert!(matches!(manager.allocate_device(1), Err(ManagerError::ShutDown)));
    }
    Outcome::Done
}

fn shutdown(rig: &Rig) -> Outcome {
    if rig.imitation().is_some() {
        return Outcome::Skipped("the imitation counts what is left as lost");
    }
    for mode in DeviceAllocatorMode::ALL {
        let manager = rig.manager(mode);
        let stream = stream_of(&manager);
        let host = manager.allocate_pinned(4096).expect("pinned memory");
        let device = manager.allocate_device(4096).expect("device memory");
        let report = manager.shutdown();
        assert_eq!(report.outstanding.pinned, [(host, 4096)]);
        assert_eq!(report.outstanding.device, [(device, 4096)]);
        drop(manager);
        // SAFETY: still there, and nobody else's.
        let bytes = unsafe { bytes_at(host, 4096) };
        fill(bytes, 3);
        let driver = stream.driver_stream();
        // SAFETY: both ranges are still there; waited for below.
        unsafe { driver.copy_to_device(device.get(), bytes.as_ptr(), 4096) }.expect("queued");
        driver.synchronize().expect("copied");
    }
    Outcome::Done
}

fn instance(_: &Rig) -> Outcome {
    match MemoryManager::instance() {
        Ok(first) => {
            let second = MemoryManager::instance().expect("made already");
            assert!(std::ptr::eq(first, second));
            let addr = first.allocate_pinned(100).expect("pinned memory");
            second.free_pinned(addr).expect("the same manager");
        }
        Err(error) => {
            assert!(Rig::on_gpu().is_err(), "there is a GPU");
            assert!(matches!(error, ManagerError::DeviceLost(_)), "{error}");
        }
    }
    Outcome::Done
}
