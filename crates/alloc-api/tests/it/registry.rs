//! Which allocator is found, and what becomes of the ones that are replaced.

use alloc_api::{
    Allocator, AllocatorError, AllocatorStats, DataPtr, Device, DeviceType, RawFree, Registry,
    get_allocator, set_allocator,
};
use alloc_core::Addr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Weak};

/// Hands out made-up addresses; its number tells it from others.
struct Numbered {
    number: u64,
    live: Arc<AtomicUsize>,
    simple: bool,
    me: Weak<Numbered>,
}

struct Owned(Arc<Numbered>);

impl Drop for Owned {
    fn drop(&mut self) {
        self.0.live.fetch_sub(1, Ordering::Relaxed);
    }
}

fn numbered(number: u64, simple: bool) -> Arc<Numbered> {
    Arc::new_cyclic(|me| Numbered { number, live: Arc::default(), simple, me: me.clone() })
}

impl Allocator for Numbered {
    fn device(&self) -> Device {
        Device::CPU
    }
    fn allocate(&self, bytes: u64) -> Result<DataPtr, AllocatorError> {
        if bytes == 0 {
            return Ok(DataPtr::null(Device::CPU));
        }
        self.live.fetch_add(1, Ordering::Relaxed);
        let owner = Owned(self.me.upgrade().unwrap());
        Ok(DataPtr::owned(Addr::new(self.number), owner, Device::CPU))
    }
    fn empty_cache(&self) -> Result<(), AllocatorError> {
        Ok(())
    }
    fn stats(&self) -> Result<AllocatorStats, AllocatorError> {
        Ok(AllocatorStats::default())
    }
    fn raw(&self) -> Option<&dyn RawFree> {
        self.simple.then_some(self as &dyn RawFree)
    }
}

impl RawFree for Numbered {
    fn free_raw(&self, addr: Addr) -> Result<(), AllocatorError> {
        Err(AllocatorError::UnknownAddress(addr))
    }
}

fn number(registry: &Registry, kind: DeviceType) -> u64 {
    registry.get_allocator(kind).unwrap().allocate(1).unwrap().get().get()
}

#[test]
fn a_higher_priority_wins_and_among_equals_the_last() {
    let registry = Registry::new();
    let kind = DeviceType::Cuda;
    assert!(
        matches!(registry.get_allocator(kind), Err(AllocatorError::NoAllocator(k)) if k == kind)
    );
    assert!(registry.set_allocator(kind, numbered(1, false), 0));
    assert!(registry.set_allocator(kind, numbered(2, false), 0));
    assert_eq!(number(&registry, kind), 2);
    assert!(registry.set_allocator(kind, numbered(3, false), 5));
    assert!(!registry.set_allocator(kind, numbered(4, false), 4));
    assert_eq!(number(&registry, kind), 3);
    assert!(registry.set_allocator(kind, numbered(5, false), 5));
    assert_eq!(number(&registry, kind), 5);
    assert!(registry.get_allocator(DeviceType::Cpu).is_err(), "kinds are apart");
    assert!(registry.remove_allocator(kind).is_some());
    assert!(registry.set_allocator(kind, numbered(6, false), 0), "the priority starts over");
}

#[test]
fn host_allocators_are_registered_apart() {
    let registry = Registry::new();
    let kind = DeviceType::Cuda;
    registry.set_allocator(kind, numbered(1, false), 0);
    let missing = registry.get_host_allocator(kind).err().unwrap();
    assert!(matches!(missing, AllocatorError::NoHostAllocator(k) if k == kind));
    let text = missing.to_string();
    assert!(text.contains("cuda") && text.contains("set_host_allocator"), "{text}");
    registry.set_host_allocator(kind, numbered(2, false), 0);
    let found = registry.get_host_allocator(kind).unwrap();
    assert_eq!(found.allocate(1).unwrap().get(), Addr::new(2));
    assert_eq!(number(&registry, kind), 1);
}

#[test]
fn pointers_keep_a_replaced_allocator_alive() {
    let registry = Registry::new();
    let old = numbered(1, false);
    let (weak, live) = (Arc::downgrade(&old), old.live.clone());
    registry.set_allocator(DeviceType::Cpu, old, 0);
    let pointer = registry.get_allocator(DeviceType::Cpu).unwrap().allocate(8).unwrap();
    registry.set_allocator(DeviceType::Cpu, numbered(2, false), 0);
    assert!(weak.upgrade().is_some());
    assert_eq!(live.load(Ordering::Relaxed), 1);
    drop(pointer);
    assert_eq!(live.load(Ordering::Relaxed), 0);
    assert!(weak.upgrade().is_none(), "the last pointer was the last to hold it");
}

#[test]
fn the_registry_of_the_process_is_one() {
    let kind = DeviceType::Other(200);
    assert!(get_allocator(kind).is_err());
    assert!(set_allocator(kind, numbered(9, false), 0));
    assert_eq!(get_allocator(kind).unwrap().allocate(1).unwrap().get(), Addr::new(9));
}

#[test]
fn an_interface_by_address_that_would_not_match_is_an_error() {
    let without: Arc<dyn Allocator> = numbered(1, false);
    assert!(matches!(without.allocate_raw(1), Err(AllocatorError::NotSimple { .. })));
    assert!(matches!(without.free_raw(Addr::new(1)), Err(AllocatorError::Unsupported(_))));
    // One that claims to have it, but whose pointers own something else than their address.
    let numbered = numbered(1, true);
    let liar: Arc<dyn Allocator> = numbered.clone();
    let refused = liar.allocate_raw(1).unwrap_err();
    assert!(matches!(refused, AllocatorError::NotSimple { .. }), "{refused}");
    assert_eq!(numbered.live.load(Ordering::Relaxed), 0, "nothing stays allocated");
    assert_eq!(liar.allocate_raw(0).unwrap(), Addr::NULL);
    assert!(matches!(liar.clone_data(&DataPtr::default(), 1), Err(AllocatorError::Unsupported(_))));
}

#[test]
fn many_threads_replace_and_use_it() {
    let registry = Arc::new(Registry::new());
    registry.set_allocator(DeviceType::Cpu, numbered(1, false), 0);
    let start = Arc::new(Barrier::new(4));
    let threads = (0..4).map(|thread| {
        let (registry, start) = (registry.clone(), start.clone());
        std::thread::spawn(move || {
            start.wait();
            for _ in 0..2000 {
                if thread == 0 {
                    registry.set_allocator(DeviceType::Cpu, numbered(1, false), 0);
                }
                assert_eq!(number(&registry, DeviceType::Cpu), 1);
            }
        })
    });
    for thread in threads.collect::<Vec<_>>() {
        thread.join().unwrap();
    }
}
