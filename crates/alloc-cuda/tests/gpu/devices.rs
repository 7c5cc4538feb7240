//! Several devices.

use crate::Scenario;
use crate::rig::{FIRST, Gate, MIB, Rig};
use alloc_core::backend::Stream as _;
use alloc_core::{Config, DeviceId};
use alloc_cuda::CudaError;
use cuda_driver::fake::Outcome;

pub(crate) const SCENARIOS: &[Scenario] = &[
    ("devices::side_by_side", side_by_side),
    ("devices::used_from_the_other", used_from_the_other),
    ("devices::peer_access", peer_access),
];

const SECOND: DeviceId = DeviceId::new(1);
const ALONE: &str = "needs two devices";

fn side_by_side(rig: &Rig) -> Outcome {
    if rig.devices() < 2 {
        return Outcome::Skipped(ALONE);
    }
    let allocator = rig.allocator(Config::ours());
    let streams = [FIRST, SECOND].map(|d| rig.backend.default_stream(d).expect("stream"));
    let blocks = streams.each_ref().map(|s| allocator.allocate(8 * MIB, s).expect("room"));
    for (seed, (stream, block)) in streams.iter().zip(&blocks).enumerate() {
        let located = allocator.locate(block.addr()).expect("handed out");
        assert_eq!(located.device, stream.device());
        rig.fill(stream, block.addr(), 8 * MIB, seed as u32);
        rig.check(stream, block.addr(), 8 * MIB, seed as u32);
    }
    assert_eq!((rig.wrong_words(FIRST), rig.wrong_words(SECOND)), (0, 0));
    for block in blocks {
        allocator.free(block).expect("frees");
    }
    let current = rig.context(FIRST).enter().expect("enter");
    allocator.empty_cache().expect("gives everything back");
    drop(current);
    allocator.check().expect("sound");
    Outcome::Done
}

/// A block of one device that work of the other uses waits for that work.
fn used_from_the_other(rig: &Rig) -> Outcome {
    if rig.devices() < 2 {
        return Outcome::Skipped(ALONE);
    }
    // A plain copy between devices reaches mapped pages only where access was given; without peers
    // it has to be the driver's copy between contexts.
    match rig.backend.enable_peer_access(FIRST, SECOND) {
        Ok(()) => {}
        Err(CudaError::NoPeerAccess { .. }) => return Outcome::Skipped("the devices are no peers"),
        Err(error) => panic!("{error}"),
    }
    let allocator = rig.allocator(Config::ours());
    let own = rig.backend.create_stream(SECOND).expect("stream");
    let other = rig.backend.create_stream(FIRST).expect("stream");
    let target = allocator.allocate(16 * MIB, &other).expect("room");
    let block = allocator.allocate(16 * MIB, &own).expect("room");
    // In the cache for later, when asking the driver might wait for what is held up.
    let spare = allocator.allocate(16 * MIB, &own).expect("room");
    allocator.free(spare).expect("frees");
    let addr = block.addr();
    rig.fill(&own, addr, 16 * MIB, 1);
    own.synchronize().expect("no failed work");
    let gate = Gate::close(&other);
    // SAFETY: device memory of the test on both sides.
    unsafe { other.driver_stream().copy_on_device(target.addr().get(), addr.get(), 16 * MIB) }
        .expect("copies between devices");
    allocator.record_stream(&block, &other).expect("records");
    allocator.free(block).expect("frees");
    let next = allocator.allocate(16 * MIB, &own).expect("room");
    assert_ne!(next.addr(), addr, "the other device still reads it");
    rig.fill(&own, next.addr(), 16 * MIB, 2);
    own.synchronize().expect("no failed work");
    gate.open();
    rig.check(&other, target.addr(), 16 * MIB, 1);
    assert_eq!(rig.wrong_words(FIRST), 0);
    allocator.free(next).expect("frees");
    allocator.free(target).expect("frees");
    Outcome::Done
}

/// Kernels of one device write the other's memory: whole segments, and pages mapped before and
/// after access was given.
fn peer_access(rig: &Rig) -> Outcome {
    if rig.devices() < 2 {
        return Outcome::Skipped(ALONE);
    }
    let whole = rig.allocator(Config::ours());
    let mut config = Config::ours();
    config.settings.expandable_segments = Some(true);
    let growing = rig.allocator(config);
    let home = rig.backend.create_stream(SECOND).expect("stream");
    let guest = rig.backend.create_stream(FIRST).expect("stream");
    let before = growing.allocate(20 * MIB, &home).expect("room");
    match rig.backend.enable_peer_access(FIRST, SECOND) {
        Ok(()) => {}
        Err(CudaError::NoPeerAccess { .. }) => return Outcome::Skipped("the devices are no peers"),
        Err(error) => panic!("{error}"),
    }
    let after = growing.allocate(40 * MIB, &home).expect("room");
    let segment = whole.allocate(20 * MIB, &home).expect("room");
    let blocks = [(&before, 20 * MIB), (&after, 40 * MIB), (&segment, 20 * MIB)];
    for (seed, (block, bytes)) in blocks.into_iter().enumerate() {
        rig.fill(&guest, block.addr(), bytes, seed as u32);
    }
    guest.synchronize().expect("the memory can be reached");
    for (seed, (block, bytes)) in blocks.into_iter().enumerate() {
        rig.check(&home, block.addr(), bytes, seed as u32);
    }
    assert_eq!(rig.wrong_words(SECOND), 0);
    growing.free(before).expect("frees");
    growing.free(after).expect("frees");
    whole.free(segment).expect("frees");
    Outcome::Done
}
