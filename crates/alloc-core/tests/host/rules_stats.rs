//! The rules of statistics, one test each. Where the policies differ, both are tested.

use crate::support::*;

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
