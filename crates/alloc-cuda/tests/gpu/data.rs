//! What is in memory stays there for as long as somebody may read it.

use crate::Scenario;
use crate::rig::{FIRST, Gate, MIB, Rig};
use alloc_core::{Addr, Config, DeviceId, Policy};
use cuda_driver::fake::Outcome;

pub(crate) const SCENARIOS: &[Scenario] = &[
    ("data::buffers", buffers),
    ("data::reuse_on_one_stream", reuse_on_one_stream),
    ("data::named_side_stream", named_side_stream),
    ("data::unnamed_side_stream", unnamed_side_stream),
    ("data::addresses_only", addresses_only),
];

/// Every configuration that a test should hold for.
pub(crate) fn configurations() -> Vec<(&'static str, Config)> {
    let mut all = Vec::new();
    for policy in [Policy::Pytorch, Policy::Ours] {
        for expandable in [false, true] {
            let mut config = Config::of(policy);
            config.settings.expandable_segments = Some(expandable);
            let name = match (policy, expandable) {
                (Policy::Pytorch, false) => "pytorch",
                (Policy::Pytorch, true) => "pytorch, expandable",
                (Policy::Ours, false) => "ours",
                (Policy::Ours, true) => "ours, expandable",
            };
            all.push((name, config));
        }
    }
    all
}

fn buffers(rig: &Rig) -> Outcome {
    for (name, config) in configurations() {
        let allocator = rig.allocator(config);
        let stream = rig.stream();
        let values: Vec<u32> = (0..100_000).map(|i: u32| i.wrapping_mul(2_654_435_761)).collect();
        let mut buffer = allocator.buffer::<u32>(values.len(), &stream).expect("room");
        buffer.copy_from_host(&values).expect("copies");
        assert!(buffer.to_vec().expect("copies") == values, "{name}");
        buffer.clear().expect("clears");
        assert!(buffer.to_vec().expect("copies").iter().all(|word| *word == 0), "{name}");
        buffer.free().expect("frees");
        allocator.check().expect("sound");
    }
    Outcome::Done
}

/// Work of one stream is in order, so its memory can be handed out again at once.
fn reuse_on_one_stream(rig: &Rig) -> Outcome {
    for (name, config) in configurations() {
        let allocator = rig.allocator(config);
        let stream = rig.stream();
        let gate = Gate::close(&stream);
        let mut addr = None;
        for seed in 0..8 {
            let block = allocator.allocate(6 * MIB, &stream).expect("room");
            let first = *addr.get_or_insert(block.addr());
            assert_eq!(block.addr(), first, "{name}: the same block every time");
            rig.fill(&stream, block.addr(), 6 * MIB, seed);
            rig.check(&stream, block.addr(), 6 * MIB, seed);
            allocator.free(block).expect("frees");
        }
        gate.open();
        assert_eq!(rig.wrong_words(FIRST), 0, "{name}");
    }
    Outcome::Done
}

/// A side stream that was named holds the block until it has read it.
fn named_side_stream(rig: &Rig) -> Outcome {
    for (name, config) in configurations() {
        let allocator = rig.allocator(config);
        let (main, side) = (rig.stream(), rig.stream());
        let block = allocator.allocate(6 * MIB, &main).expect("room");
        let addr = block.addr();
        rig.fill(&main, addr, 6 * MIB, 1);
        main.synchronize().expect("no failed work");
        let gate = Gate::close(&side);
        rig.check(&side, addr, 6 * MIB, 1);
        allocator.record_stream(&block, &side).expect("records");
        allocator.free(block).expect("frees");

        let next = allocator.allocate(6 * MIB, &main).expect("room");
        assert_ne!(next.addr(), addr, "{name}: still being read");
        rig.fill(&main, next.addr(), 6 * MIB, 2);
        main.synchronize().expect("no failed work");
        gate.open();
        assert_eq!(rig.wrong_words(FIRST), 0, "{name}");
        let after = allocator.allocate(6 * MIB, &main).expect("room");
        assert_eq!(after.addr(), addr, "{name}: free once it was read");
        allocator.free(next).expect("frees");
        allocator.free(after).expect("frees");
        allocator.check().expect("sound");
    }
    Outcome::Done
}

/// One that was not named does not, and reads what came later: the caller's mistake, shown here so
/// that the test above is known to test something.
fn unnamed_side_stream(rig: &Rig) -> Outcome {
    for (name, config) in configurations() {
        let allocator = rig.allocator(config);
        let (main, side) = (rig.stream(), rig.stream());
        let block = allocator.allocate(6 * MIB, &main).expect("room");
        let addr = block.addr();
        rig.fill(&main, addr, 6 * MIB, 1);
        main.synchronize().expect("no failed work");
        let gate = Gate::close(&side);
        rig.check(&side, addr, 6 * MIB, 1);
        allocator.free(block).expect("frees");

        let next = allocator.allocate(6 * MIB, &main).expect("room");
        assert_eq!(next.addr(), addr, "{name}: reused at once");
        rig.fill(&main, addr, 6 * MIB, 2);
        main.synchronize().expect("no failed work");
        gate.open();
        assert_eq!(rig.wrong_words(FIRST), rig.words_checked(6 * MIB), "{name}: every word is new");
        allocator.free(next).expect("frees");
    }
    Outcome::Done
}

fn addresses_only(rig: &Rig) -> Outcome {
    for (name, config) in configurations() {
        let allocator = rig.allocator(config);
        let (main, side) = (rig.stream(), rig.stream());
        let sizes = [1, 512, 100_000, 3 * MIB, 15 * MIB];
        let blocks = sizes.map(|bytes| allocator.allocate_raw(bytes, &main).expect("room"));
        for (seed, (&addr, bytes)) in blocks.iter().zip(sizes).enumerate() {
            rig.fill(&main, addr, bytes & !3, seed as u32);
        }
        for (seed, (&addr, bytes)) in blocks.iter().zip(sizes).enumerate() {
            rig.check(&main, addr, bytes & !3, seed as u32);
            allocator.record_stream_raw(addr, &side).expect("records");
            allocator.free_raw(addr).expect("frees");
            assert!(allocator.free_raw(addr).is_err(), "{name}: freed twice");
        }
        assert_eq!(rig.wrong_words(FIRST), 0, "{name}");
        assert!(allocator.free_raw(Addr::new(blocks[3].get() + 512)).is_err(), "{name}: inside");
        assert!(allocator.allocate_raw(0, &main).expect("nothing").is_null());
        allocator.empty_cache().expect("gives everything back");
        let stats = allocator.stats(DeviceId::new(0)).expect("stats");
        assert_eq!(stats.get("reserved_bytes.all.current"), Some(0), "{name}");
    }
    Outcome::Done
}
