//! Capture: memory of a graph, and streams that must be left alone.

use crate::rig::*;
use crate::{Outcome, Test};
use alloc_core::PoolId;
use alloc_core::backend::Stream;
use alloc_core::host::{HostConfig, Place};
use cuda_driver::CaptureMode;

pub(crate) const TESTS: &[Test] = &[
    ("memory_of_a_graph_is_kept", kept),
    ("pinning_does_not_break_a_capture", pins_meanwhile),
    ("a_copy_into_a_capture_is_refused", refused),
];

fn kept(rig: &Rig) -> Outcome {
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        let pinned = rig.allocator(config);
        let stream = stream_of(&pinned);
        let (pool, captured) = (PoolId(1, 0), stream.id());
        stream.driver_stream().begin_capture(CaptureMode::Global).expect("begun");
        pinned.begin_allocate_to_pool(pool, move |id| id == captured).expect("begun");
        let used = pinned.buffer_for(MIB, Place::Anywhere, &stream).expect("pinned memory");
        used.record_use(&stream).expect("live");
        let addr = used.addr();
        drop(used);
        let other = pinned.buffer_for(MIB, Place::Anywhere, &stream).expect("pinned memory");
        assert_ne!(other.addr(), addr, "the graph will read it");
        pinned.process_events().expect("leaves the stream alone");
        pinned.end_allocate_to_pool(pool).expect("ended");
        let graph = stream.driver_stream().end_capture().expect("the capture is still valid");
        drop((other, graph));
        pinned.release_pool(pool).expect("released");
        pinned.process_events().expect("asked");
        assert_eq!(pinned.stats().draining_bytes, 0);
        pinned.check().expect("consistent");
    }
    Outcome::Done
}

/// Pinning, recording elsewhere and asking are allowed while a stream is captured in the strictest
/// mode.
fn pins_meanwhile(rig: &Rig) -> Outcome {
    for mut config in configs() {
        config.batch_blocks_max = 1;
        let pinned = rig.allocator(config);
        let (captured, other) = (stream_of(&pinned), stream_of(&pinned));
        captured.driver_stream().begin_capture(CaptureMode::Global).expect("begun");
        let id = captured.id();
        pinned.begin_allocate_to_pool(PoolId(2, 0), move |stream| stream == id).expect("begun");
        let used = buffer(&pinned, 3 * MIB);
        used.record_use(&other).expect("live");
        drop(used);
        pinned.process_events().expect("asked");
        drop(buffer(&pinned, 9 * MIB));
        pinned.end_allocate_to_pool(PoolId(2, 0)).expect("ended");
        drop(captured.driver_stream().end_capture().expect("the capture is still valid"));
        pinned.release_pool(PoolId(2, 0)).expect("released");
    }
    Outcome::Done
}

fn refused(rig: &Rig) -> Outcome {
    let pinned = rig.allocator(HostConfig::ours());
    let stream = stream_of(&pinned);
    let memory = device_memory(&stream, 4096);
    stream.driver_stream().begin_capture(CaptureMode::Relaxed).expect("begun");
    let refused = buffer(&pinned, 4096).copy_to_device(&memory, 0, &stream).expect_err("captured");
    drop(refused.buffer);
    drop(stream.driver_stream().end_capture().expect("the capture is still valid"));
    memory.free().expect("given back");
    Outcome::Done
}
