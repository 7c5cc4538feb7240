//! PyTorch's rules for pinned memory, one test each: sizes, allocation, free, recorded uses. Where the
//! policies differ, both are tested.

use crate::support::*;
use alloc_core::Addr;
use alloc_core::host::{HostConfig, HostError, HostOp, Place, REQUEST_BYTES_MAX};
use mock_backend::{Call, Fault};

// Size classes.

#[test]
fn sizes_are_rounded_to_the_next_power_of_two() {
    let rig = pytorch();
    for (bytes, block) in [(1, 1), (3, 4), (40 * KIB, 64 * KIB), (64 * KIB, 64 * KIB)] {
        let a = rig.allocate(bytes);
        assert_eq!((a.requested(), a.bytes()), (bytes, block));
        rig.free(a);
    }
    rig.finish();
}

#[test]
fn there_is_no_least_block() {
    let rig = pytorch();
    let a = rig.allocate(1);
    assert_eq!(rig.pinned(), 1, "one byte is pinned for one byte");
    rig.free(a);
    rig.finish();
}

#[test]
fn a_request_looks_into_its_own_class_only() {
    let rig = pytorch();
    let large = rig.allocate(128);
    rig.free(large);
    let small = rig.allocate(64);
    assert_eq!(rig.calls(Call::Pin), 2, "the free block of 128 bytes was not taken");
    rig.free(small);
    rig.finish();
}

#[test]
fn sizes_beyond_all_memory_are_refused_not_rounded() {
    for rig in both() {
        for bytes in [REQUEST_BYTES_MAX + 1, (1 << 63) + 1, u64::MAX] {
            let error = rig.try_allocate(bytes).expect_err("too large");
            assert!(matches!(error, HostError::TooLarge { requested } if requested == bytes));
        }
        assert_eq!(rig.calls(Call::Pin), 0);
        rig.finish();
    }
}

// Allocate.

#[test]
fn zero_bytes_are_the_null_address_and_cost_nothing() {
    for rig in both() {
        let a = rig.allocate(0);
        assert_eq!((a.addr(), a.bytes()), (Addr::NULL, 0));
        rig.host.record_use(&a, &rig.stream()).expect("harmless");
        rig.free(a);
        assert_eq!(rig.host.stats().active_requests.allocated, 0);
        assert_eq!(rig.backend.costs().total_calls(), 0);
        rig.finish();
    }
}

#[test]
fn free_then_allocate_returns_the_same_address() {
    for rig in both() {
        let a = rig.allocate(8 * MIB);
        let addr = a.addr();
        rig.free(a);
        let b = rig.allocate(8 * MIB);
        assert_eq!(b.addr(), addr);
        assert_eq!(rig.calls(Call::Pin), 1);
        rig.free(b);
        rig.finish();
    }
}

#[test]
fn the_youngest_free_block_is_taken_first() {
    for rig in both() {
        let [a, b, c] = [(); 3].map(|()| rig.allocate(4096));
        let (first, last) = (a.addr(), c.addr());
        rig.free(a);
        rig.free(c);
        let d = rig.allocate(4096);
        let e = rig.allocate(4096);
        assert_eq!((d.addr(), e.addr()), (last, first));
        [b, d, e].into_iter().for_each(|x| rig.free(x));
        rig.finish();
    }
}

#[test]
fn every_allocation_processes_events_first() {
    let rig = pytorch();
    let stream = rig.stream();
    let a = rig.allocate(64);
    let addr = a.addr();
    rig.use_on(&a, &stream);
    rig.free(a);
    let other = rig.allocate(4096);
    assert_eq!(rig.calls(Call::Query), 1, "a request of another class asks too");
    rig.backend.pass(&stream);
    let b = rig.allocate(64);
    assert_eq!(b.addr(), addr);
    rig.free(b);
    rig.free(other);
    rig.finish();
}

#[test]
fn a_query_that_fails_fails_the_allocation_and_loses_nothing() {
    let rig = pytorch();
    let stream = rig.stream();
    let a = rig.allocate(64);
    rig.use_on(&a, &stream);
    rig.free(a);
    rig.backend.set_faults([Fault::nth(1).of(Call::Query)]);
    let error = rig.try_allocate(64).expect_err("the query failed");
    assert!(matches!(error, HostError::Backend { op: HostOp::Query, .. }));
    rig.check();
    rig.backend.pass(&stream);
    let b = rig.allocate(64);
    assert_eq!(rig.calls(Call::Pin), 1, "the block came back");
    rig.free(b);
    rig.finish();
}

#[test]
fn ours_hits_without_a_driver_call() {
    let rig = ours();
    let a = rig.allocate(64);
    rig.free(a);
    let before = rig.backend.costs().total_calls();
    for _ in 0..100 {
        let a = rig.allocate(64);
        rig.free(a);
    }
    assert_eq!(rig.backend.costs().total_calls(), before);
    rig.finish();
}

// Free.

#[test]
fn a_block_without_uses_is_free_at_once() {
    for rig in both() {
        let a = rig.allocate(4096);
        rig.free(a);
        assert_eq!(rig.calls(Call::Record), 0);
        assert_eq!(rig.host.stats().active_requests.current, 0);
        rig.finish();
    }
}

#[test]
fn a_used_block_waits_for_every_stream() {
    for rig in both() {
        let (s1, s2) = (rig.stream(), rig.stream());
        let a = rig.allocate(3 * MIB);
        let addr = a.addr();
        rig.use_on(&a, &s1);
        rig.use_on(&a, &s2);
        rig.free(a);
        rig.host.process_events().expect("asked");
        rig.backend.pass(&s2);
        let b = rig.allocate(3 * MIB);
        assert_ne!(b.addr(), addr, "the first stream still works on it");
        rig.backend.pass(&s1);
        rig.host.process_events().expect("asked");
        rig.free(b);
        let c = rig.allocate(3 * MIB);
        let d = rig.allocate(3 * MIB);
        assert!([c.addr(), d.addr()].contains(&addr));
        rig.free(c);
        rig.free(d);
        rig.finish();
    }
}

#[test]
fn a_use_is_recorded_at_free_once_per_stream() {
    let rig = pytorch();
    let (s1, s2) = (rig.stream(), rig.stream());
    let a = rig.allocate(4096);
    for stream in [&s1, &s1, &s2, &s1] {
        rig.use_on(&a, stream);
    }
    assert_eq!(rig.calls(Call::Record), 0, "nothing is recorded at use");
    rig.free(a);
    assert_eq!(rig.calls(Call::Record), 2);
    rig.backend.sync();
    rig.finish();
}

#[test]
fn ours_records_one_event_for_many_frees() {
    let mut config = HostConfig::ours();
    config.batch_blocks_max = 4;
    let rig = Rig::new(machine(), config);
    let stream = rig.stream();
    for round in 1..=3 {
        for _ in 0..4 {
            let a = rig.allocate(4096);
            rig.use_on(&a, &stream);
            rig.free(a);
            rig.check();
        }
        assert_eq!(rig.calls(Call::Record), round);
    }
    rig.backend.pass(&stream);
    rig.host.process_events().expect("asked");
    assert_eq!(rig.host.stats().draining_bytes, 0);
    rig.finish();
}

#[test]
fn ours_gives_a_large_block_its_event_at_once() {
    let rig = ours();
    let stream = rig.stream();
    let a = rig.allocate(16 * MIB);
    rig.use_on(&a, &stream);
    rig.free(a);
    assert_eq!(rig.calls(Call::Record), 1);
    rig.backend.pass(&stream);
    rig.finish();
}

#[test]
fn a_failed_record_leaves_the_allocation_with_its_uses() {
    let rig = pytorch();
    let (s1, s2) = (rig.stream(), rig.stream());
    let a = rig.allocate(4096);
    rig.use_on(&a, &s1);
    rig.use_on(&a, &s2);
    rig.backend.set_faults([Fault::nth(2).of(Call::Record)]);
    let failed = rig.try_free(a).expect_err("the second record failed");
    assert!(matches!(failed.error, HostError::Backend { op: HostOp::Record, .. }));
    rig.check();
    assert_eq!(rig.host.stats().active_requests.current, 1);
    let addr = failed.allocation.addr();
    rig.free(failed.allocation);
    assert_eq!(rig.calls(Call::Record), 4, "both streams are recorded again");
    rig.backend.sync();
    let b = rig.allocate(4096);
    assert_eq!(b.addr(), addr, "nothing was lost");
    rig.free(b);
    rig.finish();
}

#[test]
fn catch_all_puts_a_failed_record_off() {
    let rig = pytorch_with("pinned_free_catch_all:True");
    let stream = rig.stream();
    let a = rig.allocate(4096);
    let addr = a.addr();
    rig.use_on(&a, &stream);
    rig.backend.set_faults([Fault::nth(1).of(Call::Record)]);
    rig.free(a);
    rig.check();
    assert_eq!(rig.host.stats().deferred_failures, 1);
    rig.backend.pass(&stream);
    let b = rig.allocate(4096);
    assert_eq!(b.addr(), addr, "recorded later, reached, free");
    rig.free(b);
    rig.finish();
}

#[test]
fn an_allocation_of_another_allocator_comes_back() {
    for (rig, other) in both().into_iter().zip(both()) {
        let a = rig.allocate(4096);
        let failed = other.host.free(a).expect_err("foreign");
        assert!(matches!(failed.error, HostError::ForeignAllocation(_)));
        assert!(other.host.record_use(&failed.allocation, &other.stream()).is_err());
        rig.free(failed.allocation);
        rig.finish();
    }
}

#[test]
fn a_second_free_of_an_address_is_caught() {
    for rig in both() {
        let addr = rig.host.allocate_raw(4096, Place::Anywhere).expect("memory");
        rig.host.free_raw(addr).expect("live");
        assert!(matches!(rig.host.free_raw(addr), Err(HostError::UnknownAddress(a)) if a == addr));
        let other = Addr::new(addr.get() + 8);
        assert!(rig.host.free_raw(other).is_err(), "inside a block");
        rig.host.free_raw(Addr::NULL).expect("nothing");
        rig.finish();
    }
}

// Record event.

/// By context or first address it is found; a foreign context does not matter then.
#[test]
fn record_event_truth_table() {
    for rig in both() {
        let stream = rig.stream();
        let foreign = pytorch();
        let stranger = foreign.allocate(64);
        let a = rig.allocate(MIB);
        let (base, inside) = (a.addr(), Addr::new(a.addr().get() + 4096));
        let unknown = Addr::new(0x1234_5678_0000);
        let (own, strange) = (Some(a.context()), Some(stranger.context()));
        let record = |addr, context| rig.host.record_event(addr, context, &stream);
        assert!(record(base, own));
        assert!(record(inside, own), "a slice, by its context");
        assert!(record(base, strange), "first address, foreign context");
        assert!(record(base, None));
        assert_eq!(record(inside, strange), rig.is_ours());
        assert_eq!(record(inside, None), rig.is_ours());
        assert!(!record(unknown, strange));
        assert!(!record(unknown, None));
        let context = a.context();
        rig.free(a);
        assert!(!record(base, Some(context)), "not live any more");
        let b = rig.allocate(MIB);
        assert!(!record(unknown, Some(context)), "the context is not the next allocation's");
        rig.free(b);
        foreign.free(stranger);
        rig.finish();
    }
}

#[test]
fn an_emptied_allocation_is_not_found_again() {
    for rig in both() {
        let a = rig.allocate(MIB);
        let (addr, context) = (a.addr(), a.context());
        rig.free(a);
        rig.host.empty_cache().expect("given back");
        assert!(!rig.host.record_event(addr, Some(context), &rig.stream()));
        assert!(!rig.host.is_pinned(addr));
        rig.finish();
    }
}

#[test]
fn is_pinned_knows_interior_addresses() {
    for rig in both() {
        let a = rig.allocate(3 * MIB);
        let at = |offset| Addr::new(a.addr().get() + offset);
        assert!(rig.host.is_pinned(at(0)) && rig.host.is_pinned(at(3 * MIB - 1)));
        assert!(!rig.host.is_pinned(at(64 * MIB)));
        assert!(!rig.host.is_pinned(Addr::NULL));
        let addr = a.addr();
        rig.free(a);
        assert!(rig.host.is_pinned(addr), "cached memory is pinned");
        rig.finish();
    }
}
