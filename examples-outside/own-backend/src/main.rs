//! Uses the caching allocator over the backend of this crate, up to the end of its memory.
#![forbid(unsafe_code)]

use alloc_core::backend::MemoryInfo;
use alloc_core::{AllocError, CachingAllocator, Config, DeviceId};
use own_backend::{HostBackend, HostStream};
use std::error::Error;

const BUDGET: u64 = 64 << 20;
const DEVICE: DeviceId = DeviceId::new(0);

fn main() -> Result<(), Box<dyn Error>> {
    let allocator = CachingAllocator::new(HostBackend::new(BUDGET), Config::ours())?;
    let stream = HostStream(0);

    let weights = allocator.allocate(3_000_000, &stream)?;
    let scratch = allocator.allocate(1_000, &stream)?;
    println!("weights: {} bytes at {}", weights.bytes(), weights.addr());
    println!("scratch: {} bytes at {}", scratch.bytes(), scratch.addr());

    let place = scratch.addr();
    allocator.free(scratch)?;
    let scratch = allocator.allocate(900, &stream)?;
    assert_eq!(scratch.addr(), place, "a free block serves again");

    match allocator.allocate(BUDGET, &stream) {
        Err(AllocError::OutOfMemory(report)) => println!("\n{report}\n"),
        other => panic!("there is no room for {BUDGET} bytes more: {other:?}"),
    }

    allocator.free(weights)?;
    allocator.free(scratch)?;
    let stats = allocator.stats(DEVICE)?;
    for name in
        ["allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_device_alloc", "num_ooms"]
    {
        println!("{name}: {}", stats.get(name).ok_or(name)?);
    }

    allocator.check()?;
    allocator.empty_cache()?;
    assert_eq!(allocator.backend().memory(DEVICE)?.free, BUDGET, "everything was given back");
    Ok(())
}
