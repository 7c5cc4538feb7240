//! Buffers, copies and collections.

use crate::rig::*;
use crate::{Outcome, Test};
use alloc_core::DeviceId;
use alloc_core::host::{HostConfig, HostError, NodeId, Place};
use alloc_host_cuda::{HostFlags, PinOptions, PinTimes, Touch};
use allocator_api2::vec::Vec as PinnedVec;
use std::time::Duration;

pub(crate) const TESTS: &[Test] = &[
    ("buffers_hold_what_is_written", holds_what_is_written),
    ("pages_are_touched_first_or_meanwhile", touched),
    ("copies_go_there_and_back", there_and_back),
    ("copies_cross_registrations", crosses_registrations),
    ("a_dropped_copy_keeps_its_memory", dropped_copy),
    ("a_copy_that_does_not_fit_is_refused", does_not_fit),
    ("collections_live_in_pinned_memory", collections),
    ("write_combined_memory", write_combined),
    ("memory_goes_back", goes_back),
    ("the_reserve_serves", reserve),
    ("several_devices_share_a_buffer", several_devices),
    ("places_are_checked", places),
];

fn holds_what_is_written(rig: &Rig) -> Outcome {
    for config in configs() {
        let pinned = rig.allocator(config);
        let mut buffers: Vec<_> =
            [1, 100, 4096, 70 * KIB, MIB, 5 * MIB + 3].map(|bytes| buffer(&pinned, bytes)).into();
        for (seed, buffer) in (0..).zip(&mut buffers) {
            fill(buffer, seed);
        }
        for (seed, buffer) in (0..).zip(&buffers) {
            assert!(is_filled(buffer, seed));
            assert!(pinned.is_pinned(&buffer[0]) && pinned.is_pinned(&buffer[buffer.len() - 1]));
        }
        assert!(buffer(&pinned, 0).is_empty());
        pinned.check().expect("consistent");
    }
    Outcome::Done
}

/// Each time the memory is new, all of it is there, and the parts of the time are known.
fn touched(rig: &Rig) -> Outcome {
    for (touch, threads) in
        [Touch::First, Touch::Meanwhile].into_iter().flat_map(|t| [(t, 1), (t, 8)])
    {
        let config = HostConfig { register_threads: threads, ..HostConfig::ours() };
        let pinned = rig.allocator_with(config, PinOptions { touch, ..PinOptions::default() });
        assert_eq!(pinned.pin_times(), PinTimes::default());
        let mut large = buffer(&pinned, 9 * MIB + 5);
        assert!(large.iter().all(|byte| *byte == 0));
        fill(&mut large, 3);
        assert!(is_filled(&large, 3));
        let times = pinned.pin_times();
        assert!(times.touch > Duration::ZERO && times.register > Duration::ZERO, "{times:?}");
        drop(large);
        pinned.empty_cache().expect("given back");
    }
    Outcome::Done
}

fn there_and_back(rig: &Rig) -> Outcome {
    for config in configs() {
        let pinned = rig.allocator(config);
        let stream = stream_of(&pinned);
        for (seed, bytes) in (1..).zip([1, 1000, 64 * KIB, 3 * MIB + 17]) {
            let memory = device_memory(&stream, bytes + 64);
            let mut there = buffer(&pinned, bytes);
            fill(&mut there, seed);
            let there = there.copy_to_device(&memory, 64, &stream).expect("queued");
            let back = buffer(&pinned, bytes);
            let back = back.copy_from_device(&memory, 64, &stream).expect("queued");
            let back = back.wait().expect("copied");
            assert!(is_filled(&back, seed), "{bytes} bytes");
            assert!(there.is_done().expect("asked"), "earlier on the same stream");
            drop(there);
            memory.free().expect("given back");
        }
        pinned.check().expect("consistent");
    }
    Outcome::Done
}

fn crosses_registrations(rig: &Rig) -> Outcome {
    let piece = 256 * KIB as u64;
    let config = HostConfig { piece_bytes_max: piece, ..HostConfig::ours() };
    let pinned = rig.allocator(config);
    let stream = stream_of(&pinned);
    let bytes = 3 * MIB + 100;
    let memory = device_memory(&stream, bytes);
    let mut there = buffer(&pinned, bytes);
    fill(&mut there, 5);
    drop(there.copy_to_device(&memory, 0, &stream).expect("queued"));
    let back = buffer(&pinned, bytes).copy_from_device(&memory, 0, &stream).expect("queued");
    assert!(is_filled(&back.wait().expect("copied"), 5));
    memory.free().expect("given back");
    pinned.empty_cache().expect("all pieces unregistered");
    assert_eq!(pinned.stats().allocated_bytes.current, 0);
    Outcome::Done
}

/// Whoever drops a copy that is still queued loses nothing: the memory is not reused before it ends.
fn dropped_copy(rig: &Rig) -> Outcome {
    for config in configs() {
        let pinned = rig.allocator(config);
        let stream = stream_of(&pinned);
        let bytes = 2 * MIB;
        let memory = device_memory(&stream, bytes);
        let gate = Gate::close(&stream);
        let mut first = buffer(&pinned, bytes);
        fill(&mut first, 1);
        let addr = first.addr();
        drop(first.copy_to_device(&memory, 0, &stream).expect("queued"));
        let mut second = buffer(&pinned, bytes);
        assert_ne!(second.addr(), addr, "the copy has not even begun");
        fill(&mut second, 2);
        gate.open();
        let back = buffer(&pinned, bytes).copy_from_device(&memory, 0, &stream).expect("queued");
        assert!(is_filled(&back.wait().expect("copied"), 1), "nobody wrote over it");
        drop(second);
        pinned.process_events().expect("asked");
        let again: Vec<_> = (0..3).map(|_| buffer(&pinned, bytes)).collect();
        assert!(again.iter().any(|buffer| buffer.addr() == addr), "now it serves again");
        memory.free().expect("given back");
    }
    Outcome::Done
}

fn does_not_fit(rig: &Rig) -> Outcome {
    let pinned = rig.allocator(HostConfig::ours());
    let stream = stream_of(&pinned);
    let memory = device_memory(&stream, 1000);
    let refused = buffer(&pinned, 1001).copy_to_device(&memory, 0, &stream).expect_err("larger");
    assert!(matches!(refused.error, HostError::BadRange { bytes: 1001, available: 1000 }));
    let refused = refused.buffer.copy_from_device(&memory, 2000, &stream).expect_err("outside");
    assert!(matches!(refused.error, HostError::BadRange { available: 0, .. }));
    assert_eq!(refused.buffer.len(), 1001, "and still ours");
    memory.free().expect("given back");
    Outcome::Done
}

fn collections(rig: &Rig) -> Outcome {
    for config in configs() {
        let pinned = rig.allocator(config);
        let stream = stream_of(&pinned);
        let mut numbers = PinnedVec::new_in(pinned.clone());
        for number in 0..100_000_u64 {
            numbers.push(number);
        }
        assert!(numbers.iter().copied().eq(0..100_000));
        assert!(pinned.is_pinned(&numbers[99_999]));
        assert!(pinned.record_use_of(&numbers, &stream));
        assert!(!pinned.record_use_of(&[1_u8, 2], &stream), "not from here");
        assert!(!pinned.record_use_of(&numbers[..0], &stream), "nothing to use");
        numbers.shrink_to_fit();
        assert!(numbers.iter().copied().eq(0..100_000));
        let words: PinnedVec<String, _> = {
            let mut words = PinnedVec::new_in(pinned.clone());
            words.extend(["dropped".to_owned(), "in order".to_owned()]);
            words
        };
        drop((numbers, words));
        pinned.process_events().expect("asked");
        assert_eq!(pinned.stats().active_requests.current, 0);
        pinned.check().expect("consistent");
    }
    Outcome::Done
}

fn write_combined(rig: &Rig) -> Outcome {
    let flags = HostFlags { portable: true, write_combined: true, ..HostFlags::default() };
    let options = PinOptions { flags, ..PinOptions::default() };
    // Registration is asked for, but cannot be: the driver allocates.
    let pinned = rig.allocator_with(HostConfig::ours(), options);
    let stream = stream_of(&pinned);
    let memory = device_memory(&stream, MIB);
    let mut there = buffer(&pinned, MIB);
    fill(&mut there, 9);
    drop(there.copy_to_device(&memory, 0, &stream).expect("queued"));
    let back = buffer(&pinned, MIB).copy_from_device(&memory, 0, &stream).expect("queued");
    assert!(is_filled(&back.wait().expect("copied"), 9));
    assert!(!pinned.config().register);
    memory.free().expect("given back");
    Outcome::Done
}

fn goes_back(rig: &Rig) -> Outcome {
    for config in configs() {
        let pinned = rig.allocator(config);
        let buffers: Vec<_> = (0..5).map(|i| buffer(&pinned, (i + 1) * MIB)).collect();
        drop(buffers);
        assert!(pinned.stats().allocated_bytes.current > 0, "cached");
        pinned.empty_cache().expect("given back");
        let stats = pinned.stats();
        assert_eq!(stats.allocated_bytes.current, 0);
        assert_eq!(stats.num_host_alloc(), stats.num_host_free());
    }
    Outcome::Done
}

fn reserve(rig: &Rig) -> Outcome {
    for mut config in configs() {
        config.apply("pinned_reserve_segment_size_mb:8").expect("valid");
        let pinned = rig.allocator(config);
        let mut buffers: Vec<_> = (0..4).map(|_| buffer(&pinned, MIB)).collect();
        buffers.iter_mut().for_each(|buffer| fill(buffer, 3));
        let stats = pinned.stats();
        assert_eq!((stats.num_host_alloc(), stats.allocated_bytes.current), (1, 8 << 20));
        drop(buffers);
        pinned.empty_cache().expect("given back");
        assert_eq!(pinned.stats().allocated_bytes.current, 8 << 20, "it stays");
    }
    Outcome::Done
}

fn several_devices(rig: &Rig) -> Outcome {
    if rig.device_count() < 2 {
        return Outcome::Skipped("one device");
    }
    let devices = [DeviceId::new(0), DeviceId::new(1)];
    let pinned = rig.allocator_for(&devices, HostConfig::ours(), PinOptions::default());
    let streams = devices.map(|device| pinned.streams().create(device).expect("a stream"));
    let memories = streams.each_ref().map(|stream| device_memory(stream, MIB));
    let mut shared = pinned.buffer_on(MIB, Place::Device(devices[1])).expect("pinned memory");
    fill(&mut shared, 4);
    let gate = Gate::close(&streams[1]);
    let addr = shared.addr();
    let copy = shared.copy_to_device(&memories[0], 0, &streams[0]).expect("queued");
    let shared = copy.wait().expect("copied");
    drop(shared.copy_to_device(&memories[1], 0, &streams[1]).expect("queued"));
    pinned.process_events().expect("asked");
    let other = pinned.buffer_on(MIB, Place::Device(devices[1])).expect("pinned memory");
    assert_ne!(other.addr(), addr, "the second device has not read it");
    gate.open();
    for (stream, memory) in streams.iter().zip(memories) {
        let back = buffer(&pinned, MIB).copy_from_device(&memory, 0, stream).expect("queued");
        assert!(is_filled(&back.wait().expect("copied"), 4));
        memory.free().expect("given back");
    }
    Outcome::Done
}

fn places(rig: &Rig) -> Outcome {
    let pinned = rig.allocator(HostConfig::ours());
    for place in [Place::Device(DeviceId::new(500)), Place::Node(NodeId::new(500))] {
        let refused = pinned.buffer_on(64, place).expect_err("no such place");
        assert!(matches!(refused, HostError::NoSuchPlace(p) if p == place));
    }
    drop(pinned.buffer_on(64, Place::Node(NodeId::new(0))).expect("the first node"));
    Outcome::Done
}
