//! Driver calls that fail, which only the imitation does on demand.

use crate::rig::*;
use crate::{Outcome, Test};
use alloc_core::host::{HostConfig, HostError};
use cuda_driver::code;

pub(crate) const TESTS: &[Test] = &[
    ("a_failed_registration_leaves_nothing", registration),
    ("a_failed_unregistration_keeps_the_memory", unregistration),
    ("a_failed_copy_hands_the_buffer_back", copy),
    ("a_failed_record_keeps_the_memory", record),
    ("the_driver_may_be_gone_at_the_end", gone),
];

const ONLY_IMITATION: Outcome = Outcome::Skipped("calls fail on demand only in the imitation");

fn pieces() -> HostConfig {
    HostConfig { piece_bytes_max: MIB as u64, register_threads: 2, ..HostConfig::ours() }
}

fn registration(rig: &Rig) -> Outcome {
    let Some(imitation) = rig.imitation() else { return ONLY_IMITATION };
    for successes in 0..4 {
        let pinned = rig.allocator(pieces());
        let before = imitation.outstanding();
        // The step that grows exactly would succeed, were it not for another failure.
        for code in [code::INVALID_VALUE, code::NOT_SUPPORTED] {
            imitation.fail("cuMemHostRegister_v2", successes, code);
            let error = pinned.buffer(4 * MIB).expect_err("one piece was refused");
            assert!(matches!(error, HostError::Backend { .. }), "{error}");
            assert_eq!(imitation.outstanding(), before, "earlier pieces were unregistered");
            pinned.check().expect("consistent");
        }
        drop(buffer(&pinned, 4 * MIB));
    }
    Outcome::Done
}

fn unregistration(rig: &Rig) -> Outcome {
    let Some(imitation) = rig.imitation() else { return ONLY_IMITATION };
    for successes in 0..4 {
        let pinned = rig.allocator(pieces());
        drop(buffer(&pinned, 4 * MIB));
        let before = imitation.outstanding();
        imitation.fail("cuMemHostUnregister", successes, code::INVALID_VALUE);
        pinned.empty_cache().expect_err("one piece stayed");
        assert_eq!(imitation.outstanding(), before, "and so did all others");
        assert_eq!(pinned.stats().unpin_failures, 1);
        let mut again = buffer(&pinned, 4 * MIB);
        fill(&mut again, 1);
        assert_eq!(pinned.stats().num_host_alloc(), 1, "it still serves");
        drop(again);
        pinned.empty_cache().expect("given back");
    }
    Outcome::Done
}

fn copy(rig: &Rig) -> Outcome {
    let Some(imitation) = rig.imitation() else { return ONLY_IMITATION };
    let pinned = rig.allocator(HostConfig::ours());
    let stream = stream_of(&pinned);
    let memory = device_memory(&stream, 4096);
    let mut there = buffer(&pinned, 4096);
    fill(&mut there, 6);
    imitation.fail("cuMemcpyHtoDAsync_v2", 0, code::INVALID_VALUE);
    let refused = there.copy_to_device(&memory, 0, &stream).expect_err("refused");
    assert!(is_filled(&refused.buffer, 6));
    imitation.fail("cuEventRecord", 0, code::UNKNOWN);
    let refused = refused.buffer.copy_to_device(&memory, 0, &stream).expect_err("no event");
    let copy = refused.buffer.copy_to_device(&memory, 0, &stream).expect("queued");
    assert!(is_filled(&copy.wait().expect("copied"), 6));
    memory.free().expect("given back");
    Outcome::Done
}

fn record(rig: &Rig) -> Outcome {
    let Some(imitation) = rig.imitation() else { return ONLY_IMITATION };
    // One event for each free, and one that fails: the memory must stay out of use.
    let config = HostConfig { batch_blocks_max: 1, ..HostConfig::ours() };
    let pinned = rig.allocator(config);
    let stream = stream_of(&pinned);
    let used = buffer(&pinned, 4096);
    used.record_use(&stream).expect("live");
    let addr = used.addr();
    imitation.fail("cuEventRecord", 0, code::UNKNOWN);
    drop(used);
    assert_eq!(pinned.stats().deferred_failures, 1);
    let other = buffer(&pinned, 4096);
    assert_ne!(other.addr(), addr);
    pinned.process_events().expect("recorded now");
    assert_eq!(pinned.stats().draining_bytes, 0);
    Outcome::Done
}

fn gone(rig: &Rig) -> Outcome {
    let Some(imitation) = rig.imitation() else { return ONLY_IMITATION };
    let mut left = Vec::new();
    for config in configs() {
        let pinned = rig.allocator(config);
        let stream = stream_of(&pinned);
        let used = buffer(&pinned, MIB);
        used.record_use(&stream).expect("live");
        drop(used);
        let copied = device_memory(&stream, MIB);
        let copy = buffer(&pinned, MIB).copy_to_device(&copied, 0, &stream).expect("queued");
        left.push((buffer(&pinned, MIB), copy, stream, pinned));
    }
    imitation.shut_down();
    let error = left[0].3.buffer(64 * MIB).expect_err("no driver");
    assert!(matches!(error, HostError::Backend { .. }));
    // Nothing can be given back, and nothing may crash.
    drop(left);
    Outcome::Done
}
