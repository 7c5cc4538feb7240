//! Threads that allocate, copy and free at once.

use crate::rig::*;
use crate::{Outcome, Test};
use alloc_core::host::HostConfig;
use alloc_host_cuda::PinnedAllocator;
use std::time::Duration;

pub(crate) const TESTS: &[Test] =
    &[("threads_do_not_disturb_each_other", storm), ("the_background_thread_works", background)];

fn storm(rig: &Rig) -> Outcome {
    for config in [HostConfig::pytorch(), HostConfig { shards: 4, ..HostConfig::ours() }] {
        let pinned = rig.allocator(config);
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let pinned = &pinned;
                scope.spawn(move || copy_around(pinned, seed));
            }
        });
        pinned.process_events().expect("asked");
        assert_eq!(pinned.stats().active_requests.current, 0);
        pinned.check().expect("consistent");
    }
    Outcome::Done
}

/// Sends patterns to the device and back, dropping every other buffer while its copy is queued.
fn copy_around(pinned: &PinnedAllocator, seed: u8) {
    let stream = stream_of(pinned);
    let memory = device_memory(&stream, 256 * KIB);
    for round in 0..30_usize {
        let bytes = 1 + (round * 7919 * (usize::from(seed) + 3)) % (256 * KIB);
        let seed = seed.wrapping_mul(31) ^ round as u8;
        let mut there = buffer(pinned, bytes);
        fill(&mut there, seed);
        drop(there.copy_to_device(&memory, 0, &stream).expect("queued"));
        let back = buffer(pinned, bytes).copy_from_device(&memory, 0, &stream).expect("queued");
        assert!(is_filled(&back.wait().expect("copied"), seed));
    }
    memory.free().expect("given back");
}

fn background(rig: &Rig) -> Outcome {
    let config = HostConfig {
        background: true,
        background_period: Duration::from_millis(1),
        ..HostConfig::ours()
    };
    let pinned = rig.allocator(config);
    let stream = stream_of(&pinned);
    let used = buffer(&pinned, MIB);
    used.record_use(&stream).expect("live");
    drop(used);
    while pinned.stats().draining_bytes > 0 {
        std::thread::yield_now();
    }
    Outcome::Done
}
