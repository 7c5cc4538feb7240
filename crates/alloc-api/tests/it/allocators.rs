//! The core's allocators behind the trait, under the judge.

use crate::report::Log;
use alloc_api::{
    Allocator, AllocatorError, CachingDevice, DataPtr, Device, DeviceType, PinnedHost, report,
};
use alloc_core::backend::Stream;
use alloc_core::host::{HostAllocator, HostConfig, Place};
use alloc_core::{Addr, CachingAllocator, Config, DeviceId, StreamId};
use mock_backend::{MockBackend, MockStream, Work};
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const FIRST: DeviceId = DeviceId::new(0);

struct Rig {
    gpu: MockBackend,
    streams: [MockStream; 2],
    device: CachingDevice<MockBackend>,
}

fn rig() -> Rig {
    let gpu = MockBackend::builder().device(64 * MIB).build();
    let streams = [gpu.default_stream(FIRST), gpu.stream(FIRST)];
    let caching = CachingAllocator::new(gpu.clone(), Config::pytorch()).unwrap();
    let machine = gpu.clone();
    let copy = move |to, from, bytes, stream: &MockStream| {
        machine.launch(stream, Work::new().touching(to, bytes).touching(from, bytes));
        Ok(())
    };
    let device = CachingDevice::with_copies(caching, DeviceType::Cuda, streams[0], Box::new(copy));
    device.add_stream(&streams[1]);
    Rig { gpu, streams, device }
}

#[test]
fn allocations_free_themselves_and_know_their_device() {
    let Rig { device, .. } = rig();
    let dynamic: &dyn Allocator = &device;
    let pointer = dynamic.allocate(1000).unwrap();
    assert_eq!(pointer.device(), Device::cuda(0));
    assert!(pointer.is_simple());
    assert_eq!(dynamic.stats().unwrap().allocated.current, 1024);
    drop(pointer);
    let stats = dynamic.stats().unwrap();
    assert_eq!((stats.allocated.current, stats.allocated.peak), (0, 1024));
    assert_eq!(stats.reserved.current, 2 * MIB);
    dynamic.empty_cache().unwrap();
    assert_eq!(dynamic.stats().unwrap().reserved.current, 0);
    let null = dynamic.allocate(0).unwrap();
    assert!(null.is_null());
    assert_eq!(null.device(), Device::cuda(0));
}

#[test]
fn raw_addresses_come_and_go() {
    let Rig { device, .. } = rig();
    let dynamic: &dyn Allocator = &device;
    let addr = dynamic.allocate_raw(512).unwrap();
    assert_eq!(dynamic.stats().unwrap().allocated.current, 512);
    let inside = dynamic.free_raw(addr + 8);
    assert!(matches!(inside, Err(AllocatorError::UnknownAddress(_))));
    dynamic.free_raw(addr).unwrap();
    assert!(matches!(dynamic.free_raw(addr), Err(AllocatorError::UnknownAddress(a)) if a == addr));
    dynamic.free_raw(Addr::NULL).unwrap();
    assert_eq!(dynamic.allocate_raw(0).unwrap(), Addr::NULL);
    assert_eq!(dynamic.stats().unwrap().allocated.current, 0);
}

#[test]
fn use_on_another_stream_holds_memory_back() {
    let Rig { gpu, streams: [main, side], device } = rig();
    let dynamic: &dyn Allocator = &device;
    gpu.busy(&side);
    let pointer = dynamic.allocate(MIB).unwrap();
    let addr = pointer.get();
    assert!(dynamic.record_use(&pointer, side.id()).unwrap());
    drop(pointer);
    assert_ne!(dynamic.allocate(MIB).unwrap().get(), addr);
    gpu.pass(&side);
    let on_main = dynamic.streams().unwrap().allocate_on(MIB, main.id()).unwrap();
    assert_eq!(on_main.get(), addr);

    let unknown = StreamId::new(99);
    let refused = dynamic.record_use(&on_main, unknown);
    assert!(matches!(refused, Err(AllocatorError::UnknownStream(id)) if id == unknown));
    let borrowed = DataPtr::borrowed(addr, Device::cuda(0));
    assert!(!dynamic.record_use(&borrowed, side.id()).unwrap());
    let other = rig();
    assert!(!(&other.device as &dyn Allocator).record_use(&on_main, main.id()).unwrap());
}

#[test]
fn copies_and_clones_stay_inside_what_they_are_of() {
    let Rig { gpu, streams: [main, side], device } = rig();
    let dynamic: &dyn Allocator = &device;
    let mut from = device.allocate(1000).unwrap();
    // Whatever `main` copies, memory of another stream must not be reused before.
    let on_side = dynamic.streams().unwrap().allocate_on(1000, side.id()).unwrap();
    gpu.judge().allocated(from.get(), 1000, &main);
    gpu.judge().allocated(on_side.get(), 1000, &side);
    let mut to = dynamic.clone_data(&from, 0).unwrap();
    assert!(to.is_null());
    to = device.allocate(600).unwrap();
    gpu.judge().allocated(to.get(), 600, &main);
    dynamic.copy_data(&mut to, &from, 600).unwrap();
    assert!(gpu.is_busy(&main));
    let refused = dynamic.copy_data(&mut to, &from, 601);
    assert!(matches!(refused, Err(AllocatorError::BadRange { bytes: 601, available: 600 })));
    from.set_addr(from.get() + 500);
    let refused = dynamic.copy_data(&mut to, &from, 501);
    assert!(matches!(refused, Err(AllocatorError::BadRange { bytes: 501, available: 500 })));
    from.set_addr(from.get() + 501);
    assert!(matches!(dynamic.copy_data(&mut to, &from, 1), Err(AllocatorError::ForeignPointer(_))));
    let borrowed = DataPtr::borrowed(to.get(), Device::cuda(0));
    assert!(matches!(
        dynamic.copy_data(&mut to, &borrowed, 1),
        Err(AllocatorError::ForeignPointer(_))
    ));
    let before = device.stats().unwrap();
    assert!(dynamic.clone_data(&borrowed, 4).is_err());
    assert_eq!(device.stats().unwrap().allocated.current, before.allocated.current);
    dynamic.copy_data(&mut to, &on_side, 100).unwrap();
    gpu.judge().freed(on_side.get());
    drop(on_side);
    let next = dynamic.streams().unwrap().allocate_on(1000, side.id()).unwrap();
    gpu.judge().allocated(next.get(), 1000, &side);
    assert_eq!(gpu.violations(), []);
}

#[test]
fn failures_are_typed_and_reported() {
    let Rig { device, .. } = rig();
    let log = Arc::new(Log::default());
    let _scope = report::scope(log.clone());
    assert!(matches!(device.allocate(1 << 60), Err(AllocatorError::TooLarge { .. })));
    let refused = device.allocate(65 * MIB).unwrap_err();
    assert!(matches!(&refused, AllocatorError::OutOfMemory { bytes, .. } if *bytes == 65 * MIB));
    assert!(refused.to_string().contains("cuda:0"), "{refused}");
    let failures = log.failures.lock();
    assert_eq!(failures.last().map(|failure| failure.bytes), Some(65 * MIB));
}

#[test]
fn every_allocation_and_free_is_reported_with_totals() {
    let Rig { device, .. } = rig();
    let log = Arc::new(Log::default());
    let scope = report::scope(log.clone());
    let pointer = device.allocate(1000).unwrap();
    let addr = pointer.get();
    drop(pointer);
    let raw = (&device as &dyn Allocator).allocate_raw(512).unwrap();
    (&device as &dyn Allocator).free_raw(raw).unwrap();
    {
        let usages = log.usages.lock();
        assert_eq!(usages[0].addr, addr);
        assert_eq!((usages[0].allocated, usages[0].reserved), (1024, 2 * MIB));
        assert_eq!(usages[1].allocated, 0);
        assert_eq!(usages[0].device, Device::cuda(0));
    }
    assert_eq!(log.deltas(), [1000, -1000, 512, -512]);
    drop(scope);
    drop(device.allocate(1).unwrap());
    assert_eq!(log.deltas(), []);
}

#[test]
fn pinned_memory_is_an_allocator_too() {
    let gpu = MockBackend::new();
    let side = gpu.stream(FIRST);
    let host = HostAllocator::new(gpu.clone(), HostConfig::pytorch()).unwrap();
    let pinned = PinnedHost::new(host, Place::Device(FIRST));
    pinned.add_stream(&side);
    let dynamic: &dyn Allocator = &pinned;
    let pointer = dynamic.allocate(1000).unwrap();
    assert_eq!(pointer.device(), Device::CPU);
    assert_eq!(dynamic.stats().unwrap().allocated.current, 1024);
    gpu.busy(&side);
    let addr = pointer.get();
    assert!(dynamic.record_use(&pointer, side.id()).unwrap());
    drop(pointer);
    let other = dynamic.allocate(1000).unwrap();
    assert_ne!(other.get(), addr);
    gpu.judge().allocated_on_host(other.get(), 1000);
    let mut copy = dynamic.allocate(1000).unwrap();
    gpu.judge().allocated_on_host(copy.get(), 1000);
    dynamic.copy_data(&mut copy, &other, 1000).unwrap();
    assert!(matches!(
        dynamic.copy_data(&mut copy, &other, 1001),
        Err(AllocatorError::BadRange { .. })
    ));
    let raw = dynamic.allocate_raw(64).unwrap();
    dynamic.free_raw(raw).unwrap();
    assert!(matches!(dynamic.free_raw(raw), Err(AllocatorError::UnknownAddress(_))));
    assert_eq!(gpu.violations(), []);
}
