//! Many threads, each of which checks the bytes that it has sent to the device and back.

use crate::rig::{MIB, Manager, Rig, fill, is_filled, stream_of};
use crate::{Outcome, Test};
use memory_manager::{DeviceAllocatorMode, PinnedBuffer};

pub(crate) const TESTS: &[Test] = &[("threads_get_their_own_bytes_back", own_bytes)];

const THREADS: u8 = 8;

fn own_bytes(rig: &Rig) -> Outcome {
    let rounds = if rig.imitation().is_some() { 8 } else { 2000 };
    for mode in DeviceAllocatorMode::ALL {
        let manager = rig.manager(mode);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let manager = &manager;
                scope.spawn(move || round_trips(manager, thread, rounds));
            }
        });
        assert!(manager.outstanding().is_empty(), "{mode}");
        assert!(manager.shutdown().failure.is_none());
    }
    Outcome::Done
}

fn round_trips(manager: &Manager, thread: u8, rounds: u32) {
    let streams = [stream_of(manager), stream_of(manager)];
    let buffer = |bytes: u64| -> PinnedBuffer<_> { manager.pinned_buffer(bytes).expect("room") };
    for round in 0..rounds {
        let bytes = 1 + u64::from(round) * 7919 % MIB;
        let (seed, stream) = (thread.wrapping_mul(31) ^ round as u8, &streams[round as usize % 2]);
        let mut source = buffer(bytes);
        fill(&mut source, seed);
        let device = manager.device_buffer(bytes, &streams[0]).expect("room");
        let sent = source.copy_to_device(&device, 0, stream).expect("queued");
        let back = buffer(bytes).copy_from_device(&device, 0, stream).expect("queued");
        drop((sent, device)); // while the copies run
        let back = back.wait().expect("copied");
        assert!(is_filled(&back, seed), "thread {thread}, round {round}");
    }
}
