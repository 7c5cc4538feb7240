//! The end of memory, and the way back.

use crate::Scenario;
use crate::data::configurations;
use crate::rig::{FIRST, MIB, Rig};
use alloc_core::backend::MemoryInfo;
use alloc_core::{AllocError, Allocation, DeviceId};
use cuda_driver::fake::Outcome;

pub(crate) const SCENARIOS: &[Scenario] = &[
    ("limits::device_full_and_recovery", device_full_and_recovery),
    ("limits::pending_memory_is_waited_for", pending_memory),
    ("limits::memory_limit", memory_limit),
];

fn device_full_and_recovery(rig: &Rig) -> Outcome {
    for (name, config) in configurations() {
        if config.settings.expandable_segments == Some(true)
            && !rig.backend.has_virtual_memory(FIRST).expect("exists")
        {
            continue;
        }
        let allocator = rig.allocator(config);
        let stream = rig.stream();
        let memory = rig.backend.memory(FIRST).expect("memory figures");
        let unit = memory.total / 40 / (2 * MIB) * (2 * MIB);

        let mut blocks: Vec<Allocation> = Vec::new();
        let report = loop {
            match allocator.allocate(unit, &stream) {
                Ok(block) => {
                    rig.fill(&stream, block.addr(), unit, blocks.len() as u32);
                    blocks.push(block);
                }
                Err(AllocError::OutOfMemory(report)) => break report,
                Err(error) => panic!("{name}: {error}"),
            }
            let most = memory.total / unit;
            assert!(blocks.len() as u64 <= most, "{name}: more than the device has");
        };
        let fits = memory.free / unit;
        assert!(blocks.len() as u64 + 2 >= fits, "{name}: {} of {fits} blocks", blocks.len());
        let left = report.device_free.expect("the device knows");
        assert!(left < unit + 64 * MIB, "{name}: {} MiB were left", left / MIB);
        assert!(report.to_string().starts_with("out of memory"), "{report}");

        // Every second block goes; together they hold a request that none of them does.
        let mut kept = Vec::new();
        for (seed, block) in blocks.into_iter().enumerate() {
            if seed % 2 == 0 {
                kept.push((seed as u32, block));
            } else {
                allocator.free(block).expect("frees");
            }
        }
        let large = 3 * unit;
        let block = allocator.allocate(large, &stream).expect("cached memory was given back");
        rig.fill(&stream, block.addr(), large, 1000);
        for (seed, kept) in &kept {
            rig.check(&stream, kept.addr(), unit, *seed);
        }
        rig.check(&stream, block.addr(), large, 1000);
        assert_eq!(rig.wrong_words(FIRST), 0, "{name}");
        allocator.free(block).expect("frees");
        for (_, block) in kept {
            allocator.free(block).expect("frees");
        }
        allocator.empty_cache().expect("gives everything back");
        assert_eq!(reserved(&allocator), Some(0), "{name}");
        allocator.check().expect("sound");
        let after = rig.free_bytes(FIRST);
        assert!(
            after + 64 * MIB >= memory.free,
            "{name}: {} MiB gone",
            (memory.free - after) / MIB
        );
    }
    Outcome::Done
}

fn reserved(allocator: &alloc_cuda::CudaAllocator) -> Option<i64> {
    allocator.stats(DeviceId::new(0)).expect("stats").get("reserved_bytes.all.current")
}

/// Memory that only waits for another stream's work is no reason to fail.
fn pending_memory(rig: &Rig) -> Outcome {
    for (name, config) in configurations() {
        let allocator = rig.allocator(config);
        allocator.set_memory_limit(FIRST, Some(100 * MIB)).expect("sets");
        let (main, side) = (rig.stream(), rig.stream());
        let block = allocator.allocate(80 * MIB, &main).expect("room");
        rig.fill(&main, block.addr(), 80 * MIB, 1);
        main.synchronize().expect("no failed work");
        // Enough work that the request comes before its end.
        for _ in 0..50 {
            rig.check(&side, block.addr(), 80 * MIB, 1);
            if !rig.is_real {
                break;
            }
        }
        allocator.record_stream(&block, &side).expect("records");
        allocator.free(block).expect("frees");
        let next = allocator.allocate(80 * MIB, &main).expect("waited for");
        rig.fill(&main, next.addr(), 80 * MIB, 2);
        assert_eq!(rig.wrong_words(FIRST), 0, "{name}: read before it was handed out again");
        let stats = allocator.stats(FIRST).expect("stats");
        assert_eq!(stats.get("num_ooms"), Some(0), "{name}");
        allocator.free(next).expect("frees");
    }
    Outcome::Done
}

fn memory_limit(rig: &Rig) -> Outcome {
    for (name, config) in configurations() {
        let allocator = rig.allocator(config);
        let stream = rig.stream();
        allocator.set_memory_limit(FIRST, Some(64 * MIB)).expect("sets");
        let block = allocator.allocate(60 * MIB, &stream).expect("within the limit");
        let error = allocator.allocate(60 * MIB, &stream).expect_err("beyond it");
        assert!(error.is_out_of_memory(), "{name}: {error}");
        allocator.set_memory_limit(FIRST, None).expect("lifts");
        let second = allocator.allocate(60 * MIB, &stream).expect("no limit");
        allocator.free(block).expect("frees");
        allocator.free(second).expect("frees");
    }
    Outcome::Done
}
