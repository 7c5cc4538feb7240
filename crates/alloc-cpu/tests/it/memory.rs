//! Pointers, copies, addresses, the cache, and errors.

use alloc_api::{Allocator, AllocatorError, DataPtr, Device, DeviceType, Registry};
use alloc_core::Addr;
use alloc_cpu::{CpuAllocator, CpuConfig, CpuError, Fill, Guards};
use std::mem::MaybeUninit;
use std::sync::Arc;

fn with(change: impl FnOnce(&mut CpuConfig)) -> CpuAllocator {
    let mut config = CpuConfig::default();
    change(&mut config);
    CpuAllocator::new(config).unwrap()
}

fn write(cpu: &CpuAllocator, pointer: &mut DataPtr, seed: u8) {
    let bytes = cpu.bytes_mut(pointer).unwrap();
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = MaybeUninit::new(at as u8 ^ seed));
}

/// The bytes of a collection in this allocator's memory, read without `unsafe`.
fn read(cpu: &CpuAllocator, pointer: &DataPtr) -> Vec<u8> {
    // A copy to memory that was zeroed could be read; comparing through a buffer is simpler.
    let mut out = vec![0_u8; cpu.bytes(pointer).unwrap().len()];
    peek(pointer.get(), &mut out);
    out
}

/// Reads this process's memory through the system, so that tests need no pointer.
fn peek(addr: Addr, out: &mut [u8]) {
    use std::os::unix::fs::FileExt;
    let memory = std::fs::File::open("/proc/self/mem").unwrap();
    memory.read_exact_at(out, addr.get()).unwrap();
}

#[test]
fn nothing_is_null_on_the_cpu_and_counts_nothing() {
    let cpu = CpuAllocator::default();
    cpu.ledger().set_always(true);
    let null = cpu.allocate(0).unwrap();
    assert!(null.is_null() && null.is_simple());
    assert_eq!(null.device(), Device::CPU);
    drop(null);
    assert_eq!(cpu.ledger().totals(), Default::default());
}

#[test]
fn memory_is_aligned_and_holds_what_is_written_to_its_ends() {
    let cpu = CpuAllocator::default();
    let mut all = Vec::new();
    for bytes in [1, 63, 64, 65, 4096, 65_535, 65_536, 3 << 20] {
        let mut pointer = cpu.allocate(bytes).unwrap();
        let align = if bytes < CpuConfig::LARGE_BYTES_MIN { 64 } else { 4096 };
        assert!(pointer.get().is_aligned(align), "{bytes}");
        assert!(pointer.is_simple());
        write(&cpu, &mut pointer, bytes as u8);
        all.push((bytes, pointer));
    }
    for (bytes, pointer) in &all {
        let expected: Vec<u8> = (0..*bytes as usize).map(|at| at as u8 ^ *bytes as u8).collect();
        assert_eq!(read(&cpu, pointer), expected, "{bytes}");
    }
    let total: u64 = all.iter().map(|(bytes, _)| bytes).sum();
    assert_eq!(cpu.stats().unwrap().allocated.current, total);
    drop(all);
    let stats = cpu.stats().unwrap();
    assert_eq!((stats.allocated.current, stats.allocated.peak), (0, total));
}

#[test]
fn fills_cover_new_and_cached_memory() {
    for (fill, expected) in [(Fill::Zero, [0; 4]), (Fill::Junk, [0xef, 0xbe, 0xed, 0x7f])] {
        let cpu = with(|config| {
            config.fill = fill;
            config.cache = true;
        });
        let mut pointer = cpu.allocate(10_002).unwrap();
        let addr = pointer.get();
        for _ in 0..2 {
            let bytes = read(&cpu, &pointer);
            assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == expected[at % 4]));
            write(&cpu, &mut pointer, 3);
            drop(pointer.take());
            pointer = cpu.allocate(10_002).unwrap();
            assert_eq!(pointer.get(), addr, "the same memory, filled anew");
        }
    }
}

#[test]
fn guards_can_be_read_and_the_pointer_stays_simple() {
    let cpu = with(|config| config.guards = Some(Guards { before: 64, after: 16 }));
    for bytes in [1, 1000, 1 << 20] {
        let pointer = cpu.allocate(bytes).unwrap();
        assert!(pointer.get().is_aligned(64) && pointer.is_simple());
        let mut around = vec![0; bytes as usize + 80];
        peek(Addr::new(pointer.get().get() - 64), &mut around);
    }
    let raw = (&cpu as &dyn Allocator).allocate_raw(100).unwrap();
    (&cpu as &dyn Allocator).free_raw(raw).unwrap();
}

#[test]
fn copies_and_clones_have_the_bytes_and_stay_in_range() {
    let cpu = CpuAllocator::default();
    let dynamic: &dyn Allocator = &cpu;
    let mut from = cpu.allocate(1000).unwrap();
    write(&cpu, &mut from, 7);
    let clone = dynamic.clone_data(&from, 1000).unwrap();
    assert_eq!(read(&cpu, &clone), read(&cpu, &from));
    assert!(dynamic.clone_data(&from, 0).unwrap().is_null());

    let mut to = cpu.allocate(600).unwrap();
    from.set_addr(from.get() + 500);
    dynamic.copy_data(&mut to, &from, 500).unwrap();
    assert_eq!(read(&cpu, &to)[..500], read(&cpu, &clone)[500..]);
    let refused = dynamic.copy_data(&mut to, &from, 501);
    assert!(matches!(refused, Err(AllocatorError::BadRange { bytes: 501, available: 500 })));
    assert!(dynamic.clone_data(&from, 501).is_err());
    let other = CpuAllocator::default().allocate(8).unwrap();
    assert!(matches!(
        dynamic.copy_data(&mut to, &other, 8),
        Err(AllocatorError::ForeignPointer(_))
    ));
    assert!(dynamic.clone_data(&DataPtr::borrowed(to.get(), Device::CPU), 8).is_err());
    let all = cpu.stats().unwrap().allocated.current;
    assert_eq!(all, 2600, "what failed has kept nothing");
}

#[test]
fn addresses_alone_can_be_freed_once() {
    let cpu = CpuAllocator::default();
    let dynamic: &dyn Allocator = &cpu;
    let addr = dynamic.allocate_raw(100).unwrap();
    assert_eq!(cpu.stats().unwrap().allocated.current, 100);
    for wrong in [addr + 1, Addr::new(64)] {
        assert!(
            matches!(dynamic.free_raw(wrong), Err(AllocatorError::UnknownAddress(a)) if a == wrong)
        );
    }
    let owned = dynamic.allocate(100).unwrap();
    assert!(dynamic.free_raw(owned.get()).is_err(), "its pointer still owns it");
    dynamic.free_raw(addr).unwrap();
    assert!(dynamic.free_raw(addr).is_err());
    dynamic.free_raw(Addr::NULL).unwrap();
    assert_eq!(cpu.stats().unwrap().allocated.current, 100);
}

#[test]
fn the_cache_serves_exact_sizes_and_can_be_emptied() {
    let cpu = with(|config| config.cache = true);
    let first = cpu.allocate(1000).unwrap();
    let addr = first.get();
    drop(first);
    assert_eq!(cpu.stats().unwrap().reserved.current, 1000);
    let other = cpu.allocate(1001).unwrap();
    assert_ne!(other.get(), addr);
    let same = cpu.allocate(1000).unwrap();
    assert_eq!(same.get(), addr);
    drop((same, other));
    cpu.empty_cache().unwrap();
    assert_eq!(cpu.stats().unwrap().reserved.current, 0);
}

#[test]
fn lack_of_memory_empties_the_cache_before_it_is_an_error() {
    let cpu = with(|config| config.cache = true);
    drop(cpu.allocate(1000).unwrap());
    let refused = cpu.allocate(1 << 61).unwrap_err();
    assert!(matches!(refused, AllocatorError::OutOfMemory { bytes, .. } if bytes == 1 << 61));
    assert!(refused.to_string().contains("2305843009213693952"), "{refused}");
    assert_eq!(cpu.stats().unwrap().reserved.current, 0);
}

#[test]
fn sizes_that_were_negative_are_refused_before_the_system_is_asked() {
    let cpu = CpuAllocator::default();
    for bytes in [-1_i64 as u64, i64::MIN as u64, i64::MAX as u64] {
        let refused = cpu.allocate(bytes).unwrap_err();
        assert!(matches!(refused, AllocatorError::TooLarge { bytes: b, .. } if b == bytes));
    }
}

#[test]
fn bad_settings_are_refused() {
    let config = CpuConfig { align: 3, ..CpuConfig::default() };
    assert!(matches!(CpuAllocator::new(config), Err(CpuError::BadConfig { what: "align", .. })));
}

#[test]
fn it_serves_the_registry_and_is_replaced_while_memory_lives() {
    let registry = Registry::new();
    registry.set_allocator(DeviceType::Cpu, Arc::new(CpuAllocator::default()), 0);
    let pointer = registry.get_allocator(DeviceType::Cpu).unwrap().allocate(100).unwrap();
    registry.set_allocator(DeviceType::Cpu, Arc::new(with(|config| config.cache = true)), 1);
    assert_eq!(pointer.device(), Device::CPU);
    std::thread::spawn(move || drop(pointer)).join().unwrap();
}
