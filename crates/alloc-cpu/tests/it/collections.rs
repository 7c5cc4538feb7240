//! Collections in this memory.

use alloc_api::Allocator as _;
use alloc_cpu::{CpuAllocator, CpuConfig, Fill, Guards};
use allocator_api2::boxed::Box;
use allocator_api2::vec::Vec;

#[test]
fn vectors_grow_shrink_and_go_in_every_configuration() {
    let base = CpuConfig::default();
    let guards = Some(Guards { before: 64, after: 16 });
    for config in [
        base,
        CpuConfig { huge_pages: true, ..base },
        CpuConfig { guards, fill: Fill::Junk, ..base },
        CpuConfig { cache: true, guards, ..base },
    ] {
        let cpu = CpuAllocator::new(config).unwrap();
        let mut values: Vec<u64, _> = Vec::new_in(cpu.clone());
        values.extend(0..500_000);
        assert!(values.iter().copied().eq(0..500_000));
        values.truncate(3);
        values.shrink_to_fit();
        assert_eq!(values.as_slice(), [0, 1, 2]);
        assert!(values.as_ptr().addr().is_multiple_of(64));
        drop(values);
        assert_eq!(cpu.stats().unwrap().allocated.current, 0, "{config:?}");
    }
}

#[repr(align(256))]
struct Wide([u8; 256]);

#[test]
fn alignment_of_the_type_is_kept() {
    let cpu = CpuAllocator::new(CpuConfig { cache: true, ..CpuConfig::default() }).unwrap();
    for _ in 0..4 {
        let narrow = Box::new_in([0_u8; 256], cpu.clone());
        let wide = Box::new_in(Wide([1; 256]), cpu.clone());
        assert!((&raw const *wide).addr().is_multiple_of(256));
        assert_eq!(narrow[0] + wide.0[0], 1);
    }
}

#[test]
fn what_has_no_size_takes_no_memory_and_what_is_too_large_is_an_error() {
    let cpu = CpuAllocator::default();
    let mut nothings: Vec<(), _> = Vec::new_in(cpu.clone());
    nothings.push(());
    let mut bytes: Vec<u8, _> = Vec::new_in(cpu.clone());
    assert!(bytes.try_reserve(1 << 61).is_err());
    assert_eq!(cpu.stats().unwrap().allocated.peak, 0);
}

#[test]
fn memory_outlives_the_allocator_it_is_from() {
    let values = {
        let cpu = CpuAllocator::default();
        let mut values: Vec<u8, _> = Vec::new_in(cpu);
        values.extend_from_slice(&[1, 2, 3]);
        values
    };
    assert_eq!(values.as_slice(), [1, 2, 3]);
}

#[test]
fn many_threads_share_one() {
    for cache in [false, true] {
        let cpu = CpuAllocator::new(CpuConfig { cache, ..CpuConfig::default() }).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8_u64 {
                let cpu = cpu.clone();
                scope.spawn(move || {
                    for step in 0..2000_u64 {
                        let mut values: Vec<u64, _> = Vec::new_in(cpu.clone());
                        values.resize((step % 50) as usize + 1, thread);
                        assert!(values.iter().all(|&value| value == thread));
                    }
                });
            }
        });
        assert_eq!(cpu.stats().unwrap().allocated.current, 0);
    }
}
