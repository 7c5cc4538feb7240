//! The engine for real devices, on the simulated one: its account of the driver is the simulator's.

use alloc_lab::configuration::{Configuration, DEFAULT_CAPACITY, PolicyName};
use alloc_lab::engine::{CoreEngine, DeviceEngine, Metered};
use alloc_lab::format::read_workload;
use alloc_lab::machine::{DEVICE, allocator};
use alloc_lab::replay::{Options, Outcome, replay};
use mock_backend::MockBackend;

use crate::trace;

#[test]
fn the_meter_counts_what_the_simulator_counts() {
    let workload = read_workload(&trace("unet_res")).expect("a trace");
    let options = Options { capacity: DEFAULT_CAPACITY, feed: false, timing: false };
    for (policy, conf) in [
        (PolicyName::Pytorch, ""),
        (PolicyName::Pytorch, "expandable_segments:True"),
        // One of them has a clock: what is in time must not depend on how busy this machine is.
        (PolicyName::Ours, "ours_hurry_max:0"),
    ] {
        let configuration = Configuration::new(policy, conf);
        let own = replay(|plan| CoreEngine::new(&configuration, plan), &workload, options, |_| {});
        let mut metered = replay(
            |_| {
                let backend = MockBackend::builder().device(DEFAULT_CAPACITY).build();
                let streams: Vec<_> =
                    workload.streams.iter().map(|_| backend.stream(DEVICE)).collect();
                let config = configuration.config()?;
                let allocator = allocator(Metered::new(backend), config, true)?;
                Ok(DeviceEngine::new(allocator, DEVICE, &streams).expect("streams"))
            },
            &workload,
            options,
            |_| {},
        )
        .expect("an engine");
        let mut own: Outcome = own.expect("an engine");
        assert!(own.driver.stall_ns > 0 && metered.driver.stall_ns > 0);
        // One is measured, one is modelled.
        own.driver.stall_ns = 0;
        metered.driver.stall_ns = 0;
        assert_eq!(own, metered, "{}", configuration.label());
    }
}
