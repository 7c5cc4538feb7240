//! Stream-ordered pools: who gets freed memory, when it goes back to the device, and what the judge
//! says to clients that are not in order.

use crate::rules::{DEV0, DEV1, MIB};
use alloc_core::Addr;
use alloc_core::backend::{Backend, BackendError, ErrorKind};
use alloc_core::ordered::{OrderedMemory, PoolOptions, PoolReuse, StreamOrdered};
use mock_backend::*;

struct Rig {
    gpu: MockBackend,
    pool: MockPool,
    s0: MockStream,
    s1: MockStream,
}

fn rig(reuse: PoolReuse) -> Rig {
    let gpu = MockBackend::builder().device(16 * MIB).device(16 * MIB).log(1000).build();
    let pool = gpu.default_pool(DEV0).unwrap();
    let options = PoolOptions { reuse, release_threshold: u64::MAX };
    gpu.set_pool_options(&pool, options).unwrap();
    assert_eq!(gpu.pool_options(&pool).unwrap(), options);
    let (s0, s1) = (gpu.default_stream(DEV0), gpu.stream(DEV0));
    Rig { gpu, pool, s0, s1 }
}

impl Rig {
    fn allocate(&self, bytes: u64, stream: &MockStream) -> MockOrdered {
        let memory = self.gpu.allocate_ordered(&self.pool, bytes, stream).unwrap();
        self.gpu.judge().allocated(memory.addr(), bytes, stream);
        memory
    }

    fn use_on(&self, memory: &MockOrdered, stream: &MockStream) {
        self.gpu.launch(stream, Work::new().touching(memory.addr(), memory.bytes()).endless());
    }

    fn free(&self, memory: MockOrdered, stream: &MockStream) -> Addr {
        let addr = memory.addr();
        self.gpu.judge().freed(addr);
        self.gpu.free_ordered(memory, stream).unwrap();
        addr
    }

    fn reserved(&self) -> u64 {
        self.gpu.pool_usage(&self.pool).unwrap().reserved
    }

    /// Memory of 2 MiB that work on `s0` still uses when it is freed there.
    fn freed_under_work_of_its_stream(&self) -> Addr {
        let memory = self.allocate(2 * MIB, &self.s0);
        self.use_on(&memory, &self.s0);
        self.free(memory, &self.s0)
    }

    #[track_caller]
    fn expect(&self, rules: &[Rule]) {
        let found: Vec<Rule> = self.gpu.take_violations().iter().map(|v| v.rule).collect();
        assert_eq!(found, rules);
    }
}

const ONLY: PoolReuse = PoolReuse::NONE;

#[test]
fn the_same_stream_reuses_at_once() {
    let rig = rig(ONLY);
    let addr = rig.freed_under_work_of_its_stream();
    let again = rig.allocate(2 * MIB, &rig.s0);
    assert_eq!(again.addr(), addr);
    rig.use_on(&again, &rig.s0);
    rig.free(again, &rig.s0);
    assert_eq!(rig.reserved(), 2 * MIB);
    rig.expect(&[]);
}

#[test]
fn another_stream_gets_other_memory_without_an_order() {
    let rig = rig(ONLY);
    let addr = rig.freed_under_work_of_its_stream();
    let other = rig.allocate(2 * MIB, &rig.s1);
    assert_ne!(other.addr(), addr);
    assert_eq!(rig.reserved(), 4 * MIB);
    // Even when the work is done: nobody has looked.
    rig.gpu.pass(&rig.s0);
    assert_ne!(rig.allocate(2 * MIB, &rig.s1).addr(), addr);
    // Once the host has seen it, anybody may have it.
    rig.gpu.sync_stream(&rig.s0);
    assert_eq!(rig.allocate(2 * MIB, &rig.s1).addr(), addr);
    rig.expect(&[]);
}

#[test]
fn a_stream_that_comes_after_the_free_reuses_if_events_are_followed() {
    for follow_events in [false, true] {
        let rig = rig(PoolReuse { follow_events, ..ONLY });
        let addr = rig.freed_under_work_of_its_stream();
        let event = rig.gpu.record(&rig.s0).unwrap();
        rig.gpu.wait_event(&rig.s1, &event).unwrap();
        let other = rig.allocate(2 * MIB, &rig.s1);
        assert_eq!(other.addr() == addr, follow_events);
        rig.use_on(&other, &rig.s1);
        rig.expect(&[]);
    }
}

#[test]
fn an_event_from_before_the_free_is_no_order() {
    let rig = rig(PoolReuse { follow_events: true, ..ONLY });
    let memory = rig.allocate(2 * MIB, &rig.s0);
    rig.gpu.order(&rig.s0, &rig.s1);
    let addr = rig.free(memory, &rig.s0);
    assert_ne!(rig.allocate(2 * MIB, &rig.s1).addr(), addr);
}

#[test]
fn a_free_that_happens_to_be_done_is_reused_if_allowed() {
    for opportunistic in [false, true] {
        let rig = rig(PoolReuse { opportunistic, ..ONLY });
        let addr = rig.freed_under_work_of_its_stream();
        assert_ne!(rig.allocate(2 * MIB, &rig.s1).addr(), addr, "it is not done");
        rig.gpu.pass(&rig.s0);
        let other = rig.allocate(2 * MIB, &rig.s1);
        assert_eq!(other.addr() == addr, opportunistic);
        rig.use_on(&other, &rig.s1);
        rig.expect(&[]);
    }
}

#[test]
fn the_pool_makes_a_stream_wait_only_if_there_is_no_other_memory() {
    for internal_dependencies in [false, true] {
        let rig = rig(PoolReuse { internal_dependencies, ..ONLY });
        let addr = rig.freed_under_work_of_its_stream();
        assert_ne!(rig.allocate(2 * MIB, &rig.s1).addr(), addr, "the device has more");
        rig.gpu.set_capacity(DEV0, 0);
        let result = rig.gpu.allocate_ordered(&rig.pool, 2 * MIB, &rig.s1);
        if !internal_dependencies {
            assert_eq!(result.unwrap_err().kind(), ErrorKind::OutOfMemory);
            continue;
        }
        let other = result.unwrap();
        rig.gpu.judge().allocated(other.addr(), 2 * MIB, &rig.s1);
        assert_eq!(other.addr(), addr);
        rig.use_on(&other, &rig.s1);
        rig.expect(&[]);
        assert!(!rig.gpu.finish_next(&rig.s1), "it waits for the free on the other stream");
        rig.gpu.pass(&rig.s0);
        assert!(rig.gpu.finish_next(&rig.s1));
    }
}

#[test]
fn neighbours_join_and_the_smallest_fit_is_taken() {
    let rig = rig(PoolReuse::ALL);
    let blocks: Vec<_> = (0..4).map(|_| rig.allocate(512 << 10, &rig.s0)).collect();
    let addrs: Vec<Addr> = blocks.iter().map(OrderedMemory::addr).collect();
    let mut blocks = blocks.into_iter();
    let (a, b, c, d) =
        (blocks.next().unwrap(), blocks.next().unwrap(), blocks.next().unwrap(), blocks.next());
    rig.free(a, &rig.s0);
    rig.free(b, &rig.s0);
    rig.free(d.unwrap(), &rig.s0);
    assert_eq!(rig.allocate(512 << 10, &rig.s0).addr(), addrs[3], "the smallest hole");
    assert_eq!(rig.allocate(MIB, &rig.s0).addr(), addrs[0], "two neighbours");
    rig.free(c, &rig.s0);
    assert_eq!(rig.reserved(), 2 * MIB);
}

#[test]
fn figures_count_blocks_and_segments() {
    let rig = rig(PoolReuse::ALL);
    let memory = rig.allocate(1000, &rig.s0);
    let usage = rig.gpu.pool_usage(&rig.pool).unwrap();
    assert_eq!((usage.used, usage.reserved), (1024, 2 * MIB));
    rig.free(memory, &rig.s0);
    rig.gpu.sync();
    rig.gpu.trim_pool(&rig.pool, 0).unwrap();
    let usage = rig.gpu.pool_usage(&rig.pool).unwrap();
    assert_eq!((usage.used, usage.reserved), (0, 0));
    assert_eq!((usage.used_peak, usage.reserved_peak), (1024, 2 * MIB));
    rig.gpu.reset_pool_peaks(&rig.pool).unwrap();
    let usage = rig.gpu.pool_usage(&rig.pool).unwrap();
    assert_eq!((usage.used_peak, usage.reserved_peak), (0, 0));
    assert_eq!(rig.gpu.used(DEV0), 0);
}

#[test]
fn memory_beyond_the_threshold_goes_back_at_the_next_synchronisation() {
    let rig = rig(PoolReuse::ALL);
    for keep in [4 * MIB, 0] {
        let options = PoolOptions { reuse: PoolReuse::ALL, release_threshold: keep };
        rig.gpu.set_pool_options(&rig.pool, options).unwrap();
        let all: Vec<_> = (0..4).map(|_| rig.allocate(2 * MIB, &rig.s0)).collect();
        for memory in all {
            rig.free(memory, &rig.s0);
        }
        assert_eq!(rig.reserved(), 8 * MIB, "nothing happens before");
        let event = rig.gpu.record(&rig.s0).unwrap();
        Backend::wait(&rig.gpu, &event).unwrap();
        assert_eq!(rig.reserved(), keep);
    }
    rig.expect(&[]);
}

#[test]
fn trimming_spares_what_is_used_and_what_the_host_has_not_seen_freed() {
    let rig = rig(PoolReuse::ALL);
    let kept = rig.allocate(2 * MIB, &rig.s0);
    let unseen = rig.allocate(2 * MIB, &rig.s1);
    let freed = rig.allocate(2 * MIB, &rig.s0);
    rig.free(freed, &rig.s0);
    rig.gpu.sync();
    rig.free(unseen, &rig.s1);
    rig.gpu.trim_pool(&rig.pool, 0).unwrap();
    assert_eq!(rig.reserved(), 4 * MIB);
    rig.gpu.sync_stream(&rig.s1);
    rig.gpu.trim_pool(&rig.pool, 0).unwrap();
    assert_eq!(rig.reserved(), 2 * MIB);
    rig.free(kept, &rig.s0);
    rig.expect(&[]);
}

#[test]
fn private_pools_are_bounded_apart_and_end_with_their_last_memory() {
    let rig = rig(PoolReuse::ALL);
    let pool = rig.gpu.create_pool(DEV0, Some(4 * MIB)).unwrap();
    let first = rig.gpu.allocate_ordered(&pool, 3 * MIB, &rig.s0).unwrap();
    let refused = rig.gpu.allocate_ordered(&pool, MIB + 1, &rig.s0).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::OutOfMemory);
    assert_eq!(rig.reserved(), 0, "the default pool is another");
    assert_eq!(rig.gpu.leaks().pools, 1);
    rig.gpu.destroy_pool(pool).unwrap();
    assert_eq!(rig.gpu.used(DEV0), 4 * MIB, "its memory is still used");
    rig.gpu.busy(&rig.s0);
    rig.gpu.free_ordered(first, &rig.s0).unwrap();
    assert_eq!(rig.gpu.used(DEV0), 4 * MIB, "the free is not reached");
    rig.gpu.sync();
    assert_eq!(rig.gpu.used(DEV0), 0);
    assert_eq!(rig.gpu.leaks(), Leaks::default());
    rig.gpu.destroy_pool(rig.pool).unwrap();
    assert_eq!(rig.gpu.leaks(), Leaks::default(), "a default pool does not end");
}

#[test]
fn memory_that_is_not_freed_is_a_leak_and_what_a_default_pool_keeps_is_none() {
    let rig = rig(PoolReuse::ALL);
    let memory = rig.allocate(100, &rig.s0);
    let leaks = rig.gpu.leaks();
    assert_eq!(leaks.ordered, [(memory.addr(), 100)]);
    assert_eq!(leaks.segments, []);
    rig.free(memory, &rig.s0);
    rig.gpu.assert_clean();
}

#[test]
fn use_before_the_allocation() {
    let rig = rig(PoolReuse::ALL);
    let memory = rig.allocate(100, &rig.s0);
    rig.use_on(&memory, &rig.s1);
    rig.expect(&[Rule::UseBeforeAllocation]);
    rig.gpu.order(&rig.s0, &rig.s1);
    rig.use_on(&memory, &rig.s1);
    rig.expect(&[]);
    let other = rig.allocate(100, &rig.s0);
    rig.gpu.sync_stream(&rig.s0);
    rig.use_on(&other, &rig.s1);
    rig.expect(&[]);
}

#[test]
fn a_free_that_is_not_after_every_use() {
    for (order, rules) in [(false, &[Rule::FreeUnderWork][..]), (true, &[])] {
        let rig = rig(PoolReuse::ALL);
        let memory = rig.allocate(100, &rig.s0);
        rig.gpu.order(&rig.s0, &rig.s1);
        rig.use_on(&memory, &rig.s1);
        if order {
            rig.gpu.order(&rig.s1, &rig.s0);
        }
        rig.free(memory, &rig.s0);
        rig.expect(rules);
    }
}

#[test]
fn a_free_of_what_the_client_still_holds() {
    let rig = rig(PoolReuse::ALL);
    let memory = rig.allocate(100, &rig.s0);
    rig.gpu.free_ordered(memory, &rig.s0).unwrap();
    rig.expect(&[Rule::ReleaseOfAllocated]);
}

#[test]
fn wrong_streams_sizes_and_devices_without_pools() {
    let rig = rig(PoolReuse::ALL);
    let other_device = rig.gpu.default_stream(DEV1);
    assert!(rig.gpu.allocate_ordered(&rig.pool, 0, &rig.s0).is_err());
    assert!(rig.gpu.allocate_ordered(&rig.pool, 512, &other_device).is_err());
    let memory = rig.allocate(512, &rig.s0);
    let refused = rig.gpu.free_ordered(memory, &other_device).unwrap_err();
    rig.expect(&[Rule::BadRequest; 3]);
    rig.free(refused.value, &rig.s0);
    assert!(rig.gpu.has_pools(DEV1).unwrap());

    let old = MockBackend::builder().without_pools().build();
    assert!(!old.has_pools(DEV0).unwrap());
    assert_eq!(old.default_pool(DEV0).unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(old.create_pool(DEV0, None).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn captures_get_no_memory_from_pools() {
    let rig = rig(PoolReuse::ALL);
    let memory = rig.allocate(512, &rig.s0);
    rig.gpu.begin_capture(&rig.s1, CaptureMode::Relaxed).unwrap();
    let refused = rig.gpu.allocate_ordered(&rig.pool, 512, &rig.s1).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    let refused = rig.gpu.free_ordered(memory, &rig.s1).unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::Unsupported);
    rig.gpu.end_capture(&rig.s1).unwrap();
    rig.free(refused.value, &rig.s0);
}
