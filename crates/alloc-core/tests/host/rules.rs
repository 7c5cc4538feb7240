//! PyTorch's rules for pinned memory, one test each. Where the policies differ, both are tested.

use crate::support::*;
use alloc_core::backend::ErrorKind;
use alloc_core::host::{HostConfig, HostError, HostOp, PinMethod, Place, REQUEST_BYTES_MAX};
use alloc_core::{Addr, DeviceId};
use mock_backend::{Call, Fault, Work};
use std::time::Duration;

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

// Process events.

#[test]
fn an_event_that_is_not_reached_holds_up_nobody_else() {
    let rig = pytorch();
    let (stuck, quick) = (rig.stream(), rig.stream());
    let a = rig.allocate(64);
    rig.use_on(&a, &stuck);
    rig.free(a);
    let blocks = [(); 3].map(|()| rig.allocate(4096));
    for block in blocks {
        rig.use_on(&block, &quick);
        rig.free(block);
    }
    rig.backend.pass(&quick);
    rig.host.process_events().expect("asked");
    let stats = rig.host.stats();
    assert_eq!(stats.draining_bytes, 64, "only the stuck one is left");
    rig.backend.pass(&stuck);
    rig.finish();
}

#[test]
fn one_pass_asks_an_unready_stream_once() {
    let rig = pytorch();
    let stream = rig.stream();
    let blocks = [(); 5].map(|()| rig.allocate(64));
    for block in blocks {
        rig.use_on(&block, &stream);
        rig.free(block);
    }
    let before = rig.calls(Call::Query);
    rig.host.process_events().expect("asked");
    assert_eq!(rig.calls(Call::Query) - before, 1, "later events of the stream cannot be reached");
    rig.backend.pass(&stream);
    rig.host.process_events().expect("asked");
    assert_eq!(rig.host.stats().draining_bytes, 0);
    rig.finish();
}

#[test]
fn blocks_come_back_in_the_order_of_their_frees() {
    let rig = pytorch();
    let (s1, s2) = (rig.stream(), rig.stream());
    let blocks = [(); 3].map(|()| rig.allocate(64));
    let order = [1, 0, 2].map(|i| blocks[i].addr());
    let mut blocks: Vec<_> = blocks.into_iter().map(Some).collect();
    for (i, stream) in [(1, &s1), (0, &s2), (2, &s1)] {
        let block = blocks[i].take().expect("once");
        rig.use_on(&block, stream);
        rig.free(block);
    }
    rig.backend.sync();
    let again = [(); 3].map(|()| rig.allocate(64));
    let youngest_first = [2, 1, 0].map(|i| order[i]);
    assert_eq!(again.each_ref().map(|block| block.addr()), youngest_first);
    again.into_iter().for_each(|block| rig.free(block));
    rig.finish();
}

#[test]
fn one_class_is_processed_until_one_block_is_free() {
    let rig = pytorch();
    let stream = rig.stream();
    let small = [(); 2].map(|()| rig.allocate(64));
    let large = rig.allocate(4096);
    for block in [large].into_iter().chain(small) {
        rig.use_on(&block, &stream);
        rig.free(block);
    }
    rig.backend.pass(&stream);
    rig.host.process_events_for(64).expect("asked");
    let stats = rig.host.stats();
    assert_eq!(stats.draining_bytes, 4096 + 64, "one block of the class was enough");
    rig.host.process_events_for(64).expect("asked");
    rig.host.process_events_for(64).expect("asked");
    assert_eq!(rig.host.stats().draining_bytes, 4096, "other classes are left alone");
    rig.finish();
}

#[test]
fn a_failed_query_does_not_stop_the_others() {
    for rig in both() {
        let (bad, good) = (rig.stream(), rig.stream());
        for stream in [&bad, &good] {
            let a = rig.allocate(16 * MIB);
            rig.use_on(&a, stream);
            rig.free(a);
        }
        rig.backend.pass(&bad);
        rig.backend.pass(&good);
        rig.backend.set_faults([Fault::nth(1).of(Call::Query)]);
        rig.host.process_events().expect_err("the first query failed");
        assert_eq!(rig.host.stats().draining_bytes, 16 * MIB);
        rig.check();
        rig.host.process_events().expect("asked again");
        assert_eq!(rig.host.stats().draining_bytes, 0);
        rig.finish();
    }
}

// Background thread.

#[test]
fn the_background_thread_starts_with_the_first_miss_and_processes_events() {
    for mut config in [HostConfig::pytorch(), HostConfig::ours()] {
        config.background = true;
        config.background_period = Duration::from_millis(1);
        let rig = Rig::new(machine(), config);
        let stream = rig.stream();
        let a = rig.allocate(16 * MIB);
        rig.use_on(&a, &stream);
        rig.free(a);
        rig.backend.pass(&stream);
        while rig.host.stats().draining_bytes > 0 {
            std::thread::yield_now();
        }
        drop(rig.host);
        rig.backend.assert_clean();
    }
}

#[test]
fn with_the_thread_an_allocation_asks_for_its_own_class_and_on_a_miss_only() {
    let mut config = HostConfig::pytorch();
    config.background = true;
    config.background_period = Duration::from_secs(3600);
    let rig = Rig::new(machine(), config);
    let stream = rig.stream();
    let a = rig.allocate(64);
    let b = rig.allocate(4096);
    // The thread's first look may happen at any time, but never finds anything reached.
    rig.use_on(&a, &stream);
    rig.free(a);
    rig.free(b);
    std::thread::sleep(Duration::from_millis(20));
    let before = rig.calls(Call::Query);
    let b = rig.allocate(4096);
    assert_eq!(rig.calls(Call::Query), before, "a hit asks nothing");
    rig.backend.pass(&stream);
    let a = rig.allocate(64);
    assert_eq!(rig.calls(Call::Query), before + 1, "a miss asks, and is served");
    assert_eq!(rig.calls(Call::Pin), 2);
    rig.free(a);
    rig.free(b);
    rig.finish();
}

#[test]
fn the_default_period_is_a_tenth_of_a_second() {
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        assert_eq!(config.background_period, Duration::from_millis(100));
        assert!(!config.background);
    }
}

// Empty cache.

#[test]
fn empty_cache_gives_back_what_is_free_and_only_that() {
    for rig in both() {
        let stream = rig.stream();
        let live = rig.allocate(64 * MIB);
        let waiting = rig.allocate(64 * MIB);
        let free = rig.allocate(64 * MIB);
        rig.use_on(&waiting, &stream);
        rig.free(waiting);
        rig.free(free);
        rig.host.empty_cache().expect("given back");
        assert_eq!(rig.pinned(), 128 * MIB);
        rig.backend.pass(&stream);
        rig.host.empty_cache().expect("given back");
        assert_eq!(rig.pinned(), 64 * MIB, "events are processed first");
        rig.free(live);
        rig.host.empty_cache().expect("given back");
        assert_eq!(rig.pinned(), 0);
        rig.finish();
    }
}

#[test]
fn what_the_system_does_not_take_back_stays_cached() {
    for rig in both() {
        for _ in 0..2 {
            let [a, b] = [(); 2].map(|()| rig.allocate(64 * MIB));
            rig.free(a);
            rig.free(b);
        }
        rig.backend.set_faults([Fault::nth(1).of(Call::Unpin)]);
        rig.host.empty_cache().expect_err("one unpin failed");
        rig.check();
        let stats = rig.host.stats();
        assert_eq!((stats.allocated_bytes.current, stats.unpin_failures), (64 << 20, 1));
        let a = rig.allocate(64 * MIB);
        assert_eq!(rig.calls(Call::Pin), 2, "it still serves");
        rig.free(a);
        rig.finish();
    }
}

#[test]
fn empty_cache_works_in_both_modes_and_after_toggling() {
    for rig in both() {
        for register in ["True", "False", "True"] {
            let conf = format!("pinned_use_cuda_host_register:{register}");
            rig.host.apply(&conf).expect("valid");
            let a = rig.allocate(8 * MIB);
            rig.free(a);
            rig.host.empty_cache().expect("given back");
            assert_eq!(rig.pinned(), 0);
        }
        rig.finish();
    }
}

// Statistics.

#[test]
fn host_memory_stats() {
    let rig = pytorch();
    let current = |key: &str| rig.host.stats().get(key).expect(key);
    for key in ["allocations.current", "allocated_bytes.current", "active_bytes.current"] {
        assert_eq!(current(key), 0, "{key}");
    }
    let a = rig.allocate(40 * KIB);
    assert_eq!(current("allocations.current"), 1);
    assert_eq!(current("allocated_bytes.current"), 64 << 10);
    assert_eq!(current("active_bytes.current"), 64 << 10);
    assert_eq!(current("requested_bytes.current"), 40 << 10);
    let b = rig.allocate(80 * KIB);
    assert_eq!(current("allocated_bytes.current"), (64 + 128) << 10);
    assert_eq!(current("active_requests.current"), 2);
    rig.host.empty_cache().expect("nothing to do");
    assert_eq!(current("num_host_free"), 0, "live blocks change nothing");
    rig.free(a);
    assert_eq!(current("active_requests.current"), 1, "falls at the free");
    assert_eq!(current("active_bytes.current"), 128 << 10);
    assert_eq!(current("active_bytes.peak"), (64 + 128) << 10);
    assert_eq!(current("allocated_bytes.current"), (64 + 128) << 10, "cached, still owned");
    rig.free(b);
    rig.host.empty_cache().expect("given back");
    assert_eq!(current("allocations.freed"), 2);
    assert_eq!(current("num_host_alloc"), 2);
    assert_eq!(current("allocated_bytes.current"), 0);
    rig.finish();
}

#[test]
fn active_figures_fall_by_the_block_when_its_event_is_reached() {
    for rig in both() {
        let stream = rig.stream();
        for bytes in [100, 5000, 3 * MIB] {
            let a = rig.allocate(bytes);
            rig.use_on(&a, &stream);
            rig.free(a);
        }
        let stats = rig.host.stats();
        assert_eq!(stats.active_requests.current, 3, "waiting blocks are active");
        assert_eq!(stats.draining_bytes, stats.active_bytes.current as u64);
        rig.backend.pass(&stream);
        rig.host.process_events().expect("asked");
        let stats = rig.host.stats();
        assert_eq!(stats.active_requests.current, 0);
        assert_eq!((stats.active_bytes.current, stats.requested_bytes.current), (0, 0));
        rig.finish();
    }
}

#[test]
fn buckets_count_what_belongs_to_their_class() {
    let rig = pytorch();
    let [a, b, c] = [40 * KIB, 33 * KIB, 3000].map(|bytes| rig.allocate(bytes));
    rig.free(a);
    let stats = rig.host.stats();
    assert_eq!((stats.bucket_allocation[16], stats.bucket_allocation[12]), (2, 1));
    let class = &stats.buckets[16];
    assert_eq!((class.active_requests.current, class.active_requests.peak), (1, 2));
    assert_eq!(class.active_bytes.current, 64 << 10);
    assert_eq!((class.allocations.current, class.allocated_bytes.current), (2, 128 << 10));
    assert_eq!(stats.buckets[12].active_bytes.current, 4096);
    rig.free(b);
    rig.free(c);
    rig.host.empty_cache().expect("given back");
    assert_eq!(rig.host.stats().buckets[16].allocations.current, 0);
    assert_eq!(rig.host.stats().bucket_allocation[16], 2, "blocks ever made");
    rig.finish();
}

#[test]
fn driver_calls_are_timed_in_microseconds() {
    for rig in both() {
        let a = rig.allocate(64 * MIB);
        let b = rig.allocate(256 * MIB);
        rig.free(a);
        rig.free(b);
        rig.host.empty_cache().expect("given back");
        let stats = rig.host.stats();
        for time in [stats.host_alloc_time, stats.host_free_time] {
            assert_eq!(time.count, 2);
            assert!(0 < time.min && time.min < time.max);
            assert_eq!(time.total, time.min + time.max);
        }
        rig.finish();
    }
}

#[test]
fn statistics_can_be_reset() {
    for rig in both() {
        let a = rig.allocate(MIB);
        let b = rig.allocate(MIB);
        rig.free(b);
        rig.host.reset_peak_stats();
        rig.host.reset_accumulated_stats();
        let stats = rig.host.stats();
        for (stat, current) in [
            (stats.active_requests, 1),
            (stats.active_bytes, 1 << 20),
            (stats.allocations, stats.allocations.current),
            (stats.buckets[20].active_requests, 1),
        ] {
            assert_eq!((stat.current, stat.peak), (current, current));
            assert_eq!((stat.allocated, stat.freed), (0, 0));
        }
        assert_eq!(stats.host_alloc_time, Default::default());
        rig.free(a);
        assert_eq!(rig.host.stats().active_requests.freed, 1);
        rig.finish();
    }
}

#[test]
fn statistics_do_not_process_events() {
    for rig in both() {
        let stream = rig.stream();
        let a = rig.allocate(16 * MIB);
        rig.use_on(&a, &stream);
        rig.free(a);
        rig.backend.pass(&stream);
        let before = rig.backend.costs().total_calls();
        assert_eq!(rig.host.stats().active_requests.current, 1);
        assert_eq!(rig.backend.costs().total_calls(), before);
        rig.finish();
    }
}

// Backend calls.

#[test]
fn pinning_fails_only_after_events_cache_and_waiting_were_tried() {
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        let machine = mock_backend::MockBackend::builder().strict().host_node(128 * MIB).build();
        let rig = Rig::new(machine, config);
        let stream = rig.stream();
        // Half is cached in a size that does not fit, half waits for a stream.
        let [a, b] = [(); 2].map(|()| rig.allocate(64 * MIB));
        rig.use_on(&b, &stream);
        rig.free(a);
        rig.free(b);
        let c = rig.allocate(128 * MIB);
        assert_eq!(c.bytes(), 128 * MIB);
        assert_eq!(rig.host.stats().num_ooms, 0);
        let error = rig.try_allocate(MIB).expect_err("full");
        let HostError::OutOfMemory(report) = error else { panic!("{error}") };
        assert_eq!((report.requested, report.reserved, report.cached), (MIB, 128 * MIB, 0));
        assert_eq!((report.active, report.draining), (128 * MIB, 0));
        assert_eq!(report.source.map(|e| e.call()), Some(Call::Pin));
        assert_eq!(rig.host.stats().num_ooms, 1);
        rig.check();
        rig.free(c);
        rig.finish();
    }
}

#[test]
fn another_failure_to_pin_is_not_out_of_memory() {
    for rig in both() {
        rig.backend.set_faults([Fault::from(1).of(Call::Pin).kind(ErrorKind::DeviceLost)]);
        let error = rig.try_allocate(MIB).expect_err("lost");
        assert!(matches!(error, HostError::Backend { op: HostOp::Pin, .. }));
        assert_eq!(rig.calls(Call::Pin), 1, "asked once");
        assert!(!error.is_out_of_memory());
        rig.backend.set_faults([]);
        rig.finish();
    }
}

#[test]
fn the_method_of_pinning_follows_the_setting_of_the_moment() {
    let rig = pytorch_with("pinned_num_register_threads:8");
    let a = rig.allocate(64);
    rig.host.apply("pinned_use_cuda_host_register:True").expect("valid");
    let b = rig.allocate(64);
    let methods: Vec<_> = rig.backend.pins().iter().map(|(_, request)| request.method).collect();
    assert_eq!(methods, [PinMethod::Allocate, PinMethod::Register { threads: 8 }]);
    rig.free(a);
    rig.free(b);
    rig.finish();
}

#[test]
fn a_bad_settings_string_changes_nothing() {
    let rig = pytorch();
    rig.host.apply("pinned_use_cuda_host_register:True,pinned_what:1").expect_err("unknown key");
    assert_eq!(rig.host.config(), HostConfig::pytorch());
    rig.finish();
}

#[test]
fn the_reserve_serves_until_it_is_full() {
    let rig = pytorch_with("pinned_reserve_segment_size_mb:1");
    let a = rig.allocate(600 * KIB);
    assert_eq!((a.bytes(), rig.pinned()), (MIB, MIB), "the reserve is pinned, and used whole");
    let b = rig.allocate(600 * KIB);
    assert_eq!(rig.pinned(), 2 * MIB, "full: pinned the usual way");
    rig.free(a);
    rig.free(b);
    rig.finish();
}

#[test]
fn the_reserve_takes_memory_back_when_the_cache_is_emptied() {
    let rig = pytorch_with("pinned_reserve_segment_size_mb:1");
    for _ in 0..3 {
        let blocks: Vec<_> = (0..4).map(|_| rig.allocate(256 * KIB)).collect();
        assert_eq!(rig.pinned(), MIB, "all four from the reserve");
        blocks.into_iter().for_each(|block| rig.free(block));
        rig.host.empty_cache().expect("given back");
        assert_eq!(rig.pinned(), MIB, "the reserve itself stays");
        rig.check();
    }
    assert_eq!(rig.calls(Call::Pin), 1);
    assert_eq!(rig.host.stats().num_host_alloc(), 1, "pieces are no driver calls");
    rig.finish();
}

#[test]
fn without_room_for_the_reserve_there_is_none() {
    let machine = mock_backend::MockBackend::builder().strict().host_node(MIB).build();
    let mut config = HostConfig::pytorch();
    config.reserve_bytes = 2 * MIB;
    let rig = Rig::new(machine, config);
    let a = rig.allocate(MIB);
    rig.free(a);
    rig.finish();
}

// Thresholds.

#[test]
fn sizes_above_the_round_threshold_are_exact() {
    let rig = pytorch_with("pinned_max_round_threshold_mb:64");
    let a = rig.allocate(80 * MIB);
    assert_eq!((a.bytes(), rig.pinned()), (80 * MIB, 80 * MIB));
    let b = rig.allocate(40 * MIB);
    assert_eq!(b.bytes(), 64 * MIB);
    rig.free(a);
    rig.free(b);
    rig.finish();
}

#[test]
fn blocks_above_the_cached_threshold_leave_when_they_are_freed() {
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        let mut config = config;
        config.apply("pinned_max_cached_size_mb:16").expect("valid");
        let rig = Rig::new(machine(), config);
        let stream = rig.stream();
        let a = rig.allocate(17 * MIB);
        assert_eq!((a.bytes(), rig.pinned()), (17 * MIB, 17 * MIB), "nor are they rounded");
        rig.free(a);
        assert_eq!(rig.pinned(), 0);
        let b = rig.allocate(17 * MIB);
        rig.use_on(&b, &stream);
        rig.free(b);
        assert_eq!(rig.pinned(), 17 * MIB, "not before its event");
        rig.backend.pass(&stream);
        rig.host.process_events().expect("asked");
        assert_eq!(rig.pinned(), 0);
        let c = rig.allocate(16 * MIB);
        rig.free(c);
        assert_eq!(rig.pinned(), 16 * MIB, "smaller ones are kept");
        rig.check();
        rig.finish();
    }
}

#[test]
fn a_cached_threshold_of_zero_keeps_nothing() {
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        let mut config = config;
        config.apply("pinned_max_cached_size_mb:0").expect("valid");
        let rig = Rig::new(machine(), config);
        for bytes in [1, 4096, MIB] {
            let a = rig.allocate(bytes);
            rig.free(a);
            assert_eq!(rig.pinned(), 0);
        }
        rig.finish();
    }
}

#[test]
fn what_cannot_leave_when_freed_stays_cached() {
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        let mut config = config;
        config.apply("pinned_max_cached_size_mb:0").expect("valid");
        let rig = Rig::new(machine(), config);
        let a = rig.allocate(MIB);
        rig.backend.set_faults([Fault::nth(1).of(Call::Unpin)]);
        rig.free(a);
        assert_eq!((rig.pinned(), rig.host.stats().unpin_failures), (MIB, 1));
        rig.check();
        rig.host.empty_cache().expect("given back now");
        assert_eq!(rig.pinned(), 0);
        rig.finish();
    }
}

// Copying.

#[test]
fn copies_stay_inside_what_was_asked_for() {
    for rig in both() {
        let mut a = rig.allocate(1000);
        let b = rig.allocate(2000);
        rig.host.copy_data((&mut a, 0), (&b, 1000), 1000).expect("inside");
        rig.host.copy_data((&mut a, 1000), (&b, 0), 0).expect("nothing");
        for (to, from, bytes) in [(1, 0, 1000), (0, 1001, 1000), (0, 0, u64::MAX), (5000, 0, 1)] {
            let error = rig.host.copy_data((&mut a, to), (&b, from), bytes).expect_err("outside");
            assert!(matches!(error, HostError::BadRange { .. }));
        }
        assert_eq!(rig.calls(Call::Copy), 1);
        rig.free(a);
        rig.free(b);
        rig.finish();
    }
}

// Places.

#[test]
fn places_that_do_not_exist_are_refused() {
    use alloc_core::host::NodeId;
    for rig in both() {
        for place in [Place::Device(DeviceId::new(7)), Place::Node(NodeId::new(1))] {
            let error = rig.host.allocate_on(64, place).expect_err("no such place");
            assert!(matches!(error, HostError::NoSuchPlace(p) if p == place));
        }
        rig.finish();
    }
}

#[test]
fn work_queued_but_not_recorded_is_the_clients_own_mistake() {
    // The judge sees it: this is what recording is for.
    let backend = mock_backend::MockBackend::new();
    let rig = Rig::new(backend, HostConfig::ours());
    let stream = rig.stream();
    let a = rig.allocate(4096);
    rig.backend.launch(&stream, Work::new().touching(a.addr(), 4096).endless());
    rig.free(a);
    let b = rig.allocate(4096);
    assert_eq!(rig.backend.take_violations()[0].rule, mock_backend::Rule::EarlyReuse);
    rig.free(b);
}
