//! Many threads at once.

use crate::{FIRST, MIB, Rig, rig_on};
use alloc_core::Addr;
use memory_manager::{DeviceAllocatorMode, ManagerConfig, ManagerError};
use mock_backend::{MockBackend, MockStream, Rng};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

const THREADS: u64 = 8;
const CALLS: u64 = 100_000;

/// What one thread holds.
#[derive(Default)]
struct Held {
    pinned: Vec<(Addr, u64)>,
    device: Vec<(Addr, u64)>,
}

fn any(rng: &mut Rng, list: &[(Addr, u64)]) -> usize {
    rng.below(list.len() as u64) as usize
}

/// One call: an allocation, a free or a copy of some kind, on the thread's stream or the default one.
/// The judge is told of everything.
fn one_call(rig: &Rig, rng: &mut Rng, stream: &MockStream, held: &mut Held) {
    let Held { pinned, device } = held;
    let (manager, judge, bytes) = (&rig.manager, rig.gpu.judge(), 1 + rng.below(4096));
    match rng.below(8) {
        0 | 1 if pinned.len() < 32 => {
            let addr = match rng.below(2) {
                0 => manager.allocate_pinned(bytes),
                _ => manager.allocate_pinned_on(bytes, stream),
            };
            let addr = addr.unwrap();
            judge.allocated_on_host(addr, bytes);
            pinned.push((addr, bytes));
        }
        2 if device.len() < 32 => device.push((rig.device(bytes), bytes)),
        3 if device.len() < 32 => device.push((rig.device_on(bytes, stream), bytes)),
        4 if !pinned.is_empty() => {
            let (addr, _) = pinned.swap_remove(any(rng, pinned));
            rig.free_pinned(addr);
        }
        5 if !device.is_empty() => {
            let (addr, _) = device.swap_remove(any(rng, device));
            judge.freed(addr);
            match rng.below(2) {
                0 => manager.free_device(addr).unwrap(),
                _ => manager.free_device_on(addr, stream).unwrap(),
            }
        }
        6 if !pinned.is_empty() && !device.is_empty() => {
            let (host, on_device) = (pinned[any(rng, pinned)], device[any(rng, device)]);
            let bytes = host.1.min(on_device.1);
            let copied = match rng.below(2) {
                0 => manager.copy_to_device_async(on_device.0, host.0, bytes, stream),
                _ => manager.copy_to_host_async(host.0, on_device.0, bytes, stream),
            };
            copied.unwrap();
        }
        _ => rig.gpu.sync_stream(stream),
    }
}

fn mix(rig: &Rig, seed: u64, calls: u64) {
    let (mut rng, stream, mut held) = (Rng::new(seed), rig.stream(), Held::default());
    for _ in 0..calls {
        one_call(rig, &mut rng, &stream, &mut held);
    }
    held.pinned.into_iter().for_each(|(addr, _)| rig.free_pinned(addr));
    held.device.into_iter().for_each(|(addr, _)| rig.free_device(addr));
}

/// Shared between the modes.
#[test]
fn eight_threads_with_a_hundred_thousand_calls_each() {
    for (index, mode) in DeviceAllocatorMode::ALL.into_iter().enumerate() {
        let gpu = MockBackend::builder().device(1 << 30).ends_by_chance(7, 0.5).build();
        let rig = rig_on(gpu, ManagerConfig { mode, ..ManagerConfig::default() });
        let calls = CALLS / DeviceAllocatorMode::ALL.len() as u64 + 1;
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let rig = &rig;
                scope.spawn(move || mix(rig, thread * 10 + index as u64, calls));
            }
        });
        assert_eq!(rig.manager.outstanding(), Default::default(), "{mode}");
        rig.expect_no_violations();
        rig.finish();
    }
}

#[test]
fn one_address_is_freed_by_one_thread_only() {
    let rig = rig_on(MockBackend::builder().device(64 * MIB).build(), ManagerConfig::default());
    let (host, stream) = (rig.manager.allocate_pinned(4096).unwrap(), rig.stream());
    for _ in 0..500 {
        let addr = rig.manager.allocate_device(4096).unwrap();
        let (freed, start) = (AtomicUsize::new(0), Barrier::new(3));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    start.wait();
                    match rig.manager.free_device(addr) {
                        Ok(()) => freed.fetch_add(1, Ordering::Relaxed),
                        Err(ManagerError::UnknownAddress { .. }) => 0,
                        Err(other) => panic!("{other}"),
                    };
                });
            }
            scope.spawn(|| {
                start.wait();
                // Queued before the free, or refused after it.
                let _ = rig.manager.copy_to_device_async(addr, host, 4096, &stream);
            });
        });
        assert_eq!(freed.load(Ordering::Relaxed), 1);
    }
    rig.gpu.sync();
    rig.manager.free_pinned(host).unwrap();
    rig.gpu.take_violations();
    rig.finish();
}

#[test]
fn a_shutdown_lets_calls_finish() {
    for _ in 0..50 {
        let rig = rig_on(MockBackend::builder().device(64 * MIB).build(), ManagerConfig::default());
        let start = Barrier::new(5);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    start.wait();
                    for _ in 0..100 {
                        match rig.manager.allocate_device(4096) {
                            Ok(addr) => match rig.manager.free_device(addr) {
                                Ok(()) | Err(ManagerError::ShutDown) => {}
                                Err(other) => panic!("{other}"),
                            },
                            Err(ManagerError::ShutDown) => return,
                            Err(other) => panic!("{other}"),
                        }
                    }
                });
            }
            scope.spawn(|| {
                start.wait();
                rig.manager.shutdown();
            });
        });
        let outstanding = rig.manager.outstanding().device.len();
        assert!(outstanding <= 4, "at most what each thread held when it was cut off");
        assert_eq!(rig.gpu.used(FIRST) > 0, outstanding > 0);
    }
}
