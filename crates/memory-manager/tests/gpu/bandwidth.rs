//! Copies of the manager against plain copies of pinned memory, in one run.

use crate::rig::{FIRST, MIB, Rig, stream_of};
use crate::{Outcome, Test};
use cuda_driver::{DeviceMemory, HostFlags};
use memory_manager::DeviceAllocatorMode;
use std::time::Instant;

pub(crate) const TESTS: &[Test] = &[("copies_are_as_fast_as_plain_ones", as_fast)];

/// The least that a copy of the manager may reach of a plain one's bandwidth.
const RATIO_MIN: f64 = 0.95;

const BYTES: u64 = 256 * MIB;
const ROUNDS: usize = 15;

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn as_fast(rig: &Rig) -> Outcome {
    if rig.imitation().is_some() {
        return Outcome::Skipped("the imitation has no bandwidth");
    }
    let manager = rig.manager(DeviceAllocatorMode::Caching);
    let stream = stream_of(&manager);
    let host = manager.allocate_pinned(BYTES).expect("pinned memory");
    let device = manager.allocate_device_on(BYTES, &stream).expect("device memory");
    let context = rig.backend().context(FIRST).expect("a context");
    let plain_host = context.host_allocate(BYTES, HostFlags::default()).expect("pinned memory");
    let plain_device = DeviceMemory::allocate(&context, BYTES).expect("device memory");
    let driver = stream.driver_stream();
    let time = |queue: &dyn Fn()| {
        let start = Instant::now();
        queue();
        driver.synchronize().expect("copied");
        BYTES as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    let (to, from) = (plain_device.addr(), plain_host.as_ptr());
    let plain: [&dyn Fn(); 2] = [
        // SAFETY: both ranges live until the end of this function; waited for at once.
        &|| unsafe { driver.copy_to_device(to, from, BYTES) }.expect("queued"),
        // SAFETY: as above.
        &|| unsafe { driver.copy_to_host(from, to, BYTES) }.expect("queued"),
    ];
    let ours: [&dyn Fn(); 2] =
        [&|| manager.copy_to_device_async(device, host, BYTES, &stream).expect("queued"), &|| {
            manager.copy_to_host_async(host, device, BYTES, &stream).expect("queued")
        }];
    for (name, (plain, ours)) in ["to the device", "to the host"].iter().zip(plain.iter().zip(ours))
    {
        // In turn, so that whatever else the machine does falls on both; the first warms up.
        let (mut plain_rates, mut our_rates) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let rates = (time(plain), time(ours));
            if round > 0 {
                plain_rates.push(rates.0);
                our_rates.push(rates.1);
            }
        }
        let (plain, ours) = (median(plain_rates), median(our_rates));
        println!("  {name}: {ours:.2} GB/s, plain {plain:.2} GB/s, ratio {:.3}", ours / plain);
        assert!(ours / plain >= RATIO_MIN, "{name}");
    }
    manager.free_device(device).expect("freed");
    manager.free_pinned(host).expect("freed");
    assert!(manager.shutdown().failure.is_none());
    // SAFETY: allocated above, and no copy runs.
    unsafe { context.host_free(plain_host) }.expect("freed");
    plain_device.free().expect("freed");
    Outcome::Done
}
