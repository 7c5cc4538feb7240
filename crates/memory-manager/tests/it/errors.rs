//! Mistakes are errors with a type, and change nothing.

use crate::{MIB, Rig, device_of, rig};
use alloc_core::backend::Stream;
use alloc_core::{Addr, DeviceId};
use memory_manager::{DeviceAllocatorMode, ManagerError, MemoryKind};
use mock_backend::Fault;

fn each_mode(check: impl Fn(&Rig)) {
    for mode in DeviceAllocatorMode::ALL {
        let rig = rig(mode);
        check(&rig);
        rig.expect_no_violations();
    }
}

fn is_unknown(result: Result<(), ManagerError>, expected: Addr, expected_kind: MemoryKind) -> bool {
    matches!(result, Err(ManagerError::UnknownAddress { addr, kind })
        if addr == expected && kind == expected_kind)
}

#[test]
fn freeing_twice() {
    each_mode(|rig| {
        let (host, device) = (rig.pinned(100), rig.device(100));
        rig.free_pinned(host);
        rig.free_device(device);
        let before = rig.manager.stats().unwrap();
        assert!(is_unknown(rig.manager.free_pinned(host), host, MemoryKind::Pinned));
        assert!(is_unknown(rig.manager.free_device(device), device, MemoryKind::Device));
        assert_eq!(rig.manager.stats().unwrap(), before);
    });
}

#[test]
fn freeing_what_is_another_managers_or_of_another_kind_or_inside() {
    each_mode(|rig| {
        let other = crate::rig(DeviceAllocatorMode::Caching);
        let theirs = (other.pinned(100), other.device(100));
        let (host, device) = (rig.pinned(1000), rig.device(1000));
        let before = rig.manager.outstanding();
        for addr in [theirs.0 + 1, host + 1, device, Addr::new(1)] {
            assert!(is_unknown(rig.manager.free_pinned(addr), addr, MemoryKind::Pinned));
        }
        for addr in [device + 1, host, Addr::new(1)] {
            assert!(is_unknown(rig.manager.free_device(addr), addr, MemoryKind::Device));
        }
        assert_eq!(rig.manager.outstanding(), before);
        assert_eq!(other.manager.outstanding().device, [(theirs.1, 100)]);
        rig.manager.free_pinned(Addr::NULL).unwrap();
        rig.manager.free_device(Addr::NULL).unwrap();
        rig.free_pinned(host);
        rig.free_device(device);
    });
}

#[test]
fn streams_of_another_device() {
    each_mode(|rig| {
        let stream = rig.gpu.stream(DeviceId::new(1));
        let (host, device) = (rig.pinned(100), rig.device(100));
        for result in [
            rig.manager.free_device_on(device, &stream),
            rig.manager.record_use(device, &stream),
            rig.manager.copy_to_device_async(device, host, 100, &stream),
            rig.manager.copy_to_host_async(host, device, 100, &stream),
        ] {
            match result {
                Err(ManagerError::WrongStream { stream: id, device, expected }) => {
                    assert_eq!((id, device), (stream.id(), device_of(&stream)));
                    assert_eq!(expected, DeviceId::new(0));
                }
                other => panic!("{other:?}"),
            }
        }
        let there = rig.device_on(100, &stream);
        rig.free_device(there);
        rig.free_device(device);
        rig.free_pinned(host);
    });
}

#[test]
fn sizes_of_nothing_and_of_everything() {
    each_mode(|rig| {
        let stream = rig.stream();
        let manager = &rig.manager;
        let before = manager.stats().unwrap();
        let zero =
            |result: Result<Addr, ManagerError>| matches!(result, Err(ManagerError::ZeroSize(_)));
        assert!(zero(manager.allocate_pinned(0)) && zero(manager.allocate_pinned_on(0, &stream)));
        assert!(zero(manager.allocate_device(0)) && zero(manager.allocate_device_on(0, &stream)));
        for bytes in [u64::MAX, 1 << 63] {
            for result in [manager.allocate_pinned(bytes), manager.allocate_device(bytes)] {
                assert!(matches!(result, Err(ManagerError::TooLarge { bytes: b }) if b == bytes));
            }
        }
        for (result, expected) in [
            (manager.allocate_pinned(1 << 41), MemoryKind::Pinned),
            (manager.allocate_device(1 << 41), MemoryKind::Device),
        ] {
            match result {
                Err(ManagerError::OutOfMemory { kind, bytes, .. }) => {
                    assert_eq!((kind, bytes), (expected, 1 << 41));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(manager.stats().unwrap(), before);
    });
}

#[test]
fn errors_name_what_where_and_what_to_do() {
    let rig = rig(DeviceAllocatorMode::Caching);
    let text = rig.manager.allocate_device(1 << 41).unwrap_err().to_string();
    assert!(text.contains("device memory") && text.contains("2199023255552"), "{text}");
    let text = rig.manager.free_pinned(Addr::new(0x1234)).unwrap_err().to_string();
    assert!(text.contains("0x1234") && text.contains("freed before"), "{text}");
}

/// Whatever call of the driver fails: the error comes out, and afterwards everything can be freed.
#[test]
fn every_call_of_the_driver_can_fail() {
    for mode in DeviceAllocatorMode::ALL {
        for n in 1..60 {
            let rig = rig(mode);
            rig.gpu.set_faults([Fault::nth(n)]);
            let stream = rig.stream();
            let held = [rig.manager.allocate_pinned(MIB), rig.manager.allocate_device(MIB)];
            if let [Ok(host), Ok(device)] = held {
                rig.gpu.judge().allocated_on_host(host, MIB);
                rig.gpu.judge().allocated(device, MIB, &rig.gpu.default_stream(crate::FIRST));
                let _ = rig.manager.copy_to_device_async(device, host, MIB, &stream);
                let _ = rig.manager.copy_to_host_async(host, device, MIB, &stream);
            }
            let [host, device] = held;
            let free = |addr: Addr, free: &dyn Fn(Addr) -> Result<(), ManagerError>| {
                rig.gpu.judge().freed(addr);
                if free(addr).is_err() {
                    rig.gpu.set_faults([]);
                    free(addr).unwrap();
                }
            };
            if let Ok(host) = host {
                free(host, &|addr| rig.manager.free_pinned(addr));
            }
            if let Ok(device) = device {
                free(device, &|addr| rig.manager.free_device(addr));
            }
            rig.gpu.set_faults([]);
            rig.gpu.take_violations(); // frees that were reported before they failed
            rig.finish();
        }
    }
}
