//! Stream-ordered pools, and the order of streams by events.

use super::{Harness, MIB, StreamOf, must, must_take};
use alloc_core::Addr;
use alloc_core::backend::{Backend, BackendError, Completion, ErrorKind, Stream};
use alloc_core::ordered::{
    OrderedMemory, PoolOptions, PoolReuse, PoolUsage, StreamOrdered, StreamWait,
};

/// What every backend with stream-ordered pools must do besides, on a device that has them.
///
/// # Panics
/// If the backend breaks the contract.
pub fn run_pools<H: Harness>(make: impl Fn() -> H)
where
    H::Backend: StreamOrdered,
{
    the_device_has_a_pool(&make());
    settings_stay_as_they_are_set(&make());
    memory_is_aligned_and_apart(&make());
    freed_memory_serves_its_stream_again(&make());
    figures_follow(&make());
    bounds_are_kept(&make());
    memory_outlives_its_pool(&make());
    streams_wait_for_events(&make());
}

type PoolOf<H> = <<H as Harness>::Backend as StreamOrdered>::Pool;
type MemoryOf<H> = <<H as Harness>::Backend as StreamOrdered>::Ordered;

/// A pool of its own that keeps what it gets.
struct Private<'a, H: Harness>
where
    H::Backend: StreamOrdered,
{
    harness: &'a H,
    stream: StreamOf<H>,
    pool: PoolOf<H>,
}

impl<'a, H: Harness> Private<'a, H>
where
    H::Backend: StreamOrdered,
{
    fn new(harness: &'a H, bytes_max: Option<u64>) -> Self {
        let (backend, stream) = (harness.backend(), harness.stream());
        let pool = must("create_pool", backend.create_pool(stream.device(), bytes_max));
        let options = PoolOptions { reuse: PoolReuse::ALL, release_threshold: u64::MAX };
        must("set_pool_options", backend.set_pool_options(&pool, options));
        Private { harness, stream, pool }
    }

    fn allocate(&self, bytes: u64) -> MemoryOf<H> {
        let memory = self.harness.backend().allocate_ordered(&self.pool, bytes, &self.stream);
        must("allocate_ordered", memory)
    }

    fn free(&self, memory: MemoryOf<H>) {
        must_take("free_ordered", self.harness.backend().free_ordered(memory, &self.stream));
    }

    fn usage(&self) -> PoolUsage {
        must("pool_usage", self.harness.backend().pool_usage(&self.pool))
    }

    fn end(self) {
        self.harness.synchronize(&self.stream);
        must_take("destroy_pool", self.harness.backend().destroy_pool(self.pool));
    }
}

fn the_device_has_a_pool<H: Harness>(harness: &H)
where
    H::Backend: StreamOrdered,
{
    let (backend, device) = (harness.backend(), harness.stream().device());
    assert!(must("has_pools", backend.has_pools(device)), "the device has no pools");
    let pool = must("default_pool", backend.default_pool(device));
    must("pool_usage", backend.pool_usage(&pool));
    must_take("destroy_pool", backend.destroy_pool(pool));
    let again = must("default_pool", backend.default_pool(device));
    must("pool_usage of a default pool that was ended", backend.pool_usage(&again));
}

fn settings_stay_as_they_are_set<H: Harness>(harness: &H)
where
    H::Backend: StreamOrdered,
{
    let private = Private::new(harness, None);
    let backend = harness.backend();
    for bits in 0..8_u64 {
        let reuse = PoolReuse {
            follow_events: bits & 1 != 0,
            opportunistic: bits & 2 != 0,
            internal_dependencies: bits & 4 != 0,
        };
        let options = PoolOptions { reuse, release_threshold: bits * MIB };
        must("set_pool_options", backend.set_pool_options(&private.pool, options));
        assert_eq!(must("pool_options", backend.pool_options(&private.pool)), options);
    }
    private.end();
}

fn memory_is_aligned_and_apart<H: Harness>(harness: &H)
where
    H::Backend: StreamOrdered,
{
    let private = Private::new(harness, None);
    let held: Vec<_> =
        [1, 512, 1000, MIB, 3 * MIB + 1].into_iter().map(|bytes| private.allocate(bytes)).collect();
    let mut ranges: Vec<(Addr, u64)> = held.iter().map(|m| (m.addr(), m.bytes())).collect();
    assert!(ranges.iter().all(|(addr, _)| !addr.is_null() && addr.is_aligned(256)), "{ranges:?}");
    ranges.sort();
    for pair in ranges.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "memory overlaps: {pair:?}");
    }
    held.into_iter().for_each(|memory| private.free(memory));
    private.end();
}

fn freed_memory_serves_its_stream_again<H: Harness>(harness: &H)
where
    H::Backend: StreamOrdered,
{
    let private = Private::new(harness, None);
    private.free(private.allocate(4 * MIB));
    let reserved = private.usage().reserved;
    for _ in 0..20 {
        // What is freed under work need not be there for the next one.
        harness.synchronize(&private.stream);
        private.free(private.allocate(4 * MIB));
        assert!(private.usage().reserved <= reserved.max(4 * MIB), "the pool grows without need");
    }
    private.end();
}

fn figures_follow<H: Harness>(harness: &H)
where
    H::Backend: StreamOrdered,
{
    let private = Private::new(harness, None);
    let backend = harness.backend();
    let memory = private.allocate(6 * MIB);
    let usage = private.usage();
    assert!(usage.used >= 6 * MIB && usage.reserved >= usage.used, "{usage:?}");
    assert!(usage.used_peak >= usage.used && usage.reserved_peak >= usage.reserved, "{usage:?}");
    private.free(memory);
    harness.synchronize(&private.stream);
    must("trim_pool", backend.trim_pool(&private.pool, 0));
    let usage = private.usage();
    assert_eq!((usage.used, usage.reserved), (0, 0), "all of it was freed and trimmed");
    assert!(usage.used_peak >= 6 * MIB && usage.reserved_peak >= 6 * MIB, "{usage:?}");
    must("reset_pool_peaks", backend.reset_pool_peaks(&private.pool));
    let usage = private.usage();
    assert_eq!((usage.used_peak, usage.reserved_peak), (0, 0), "peaks start over from now");
    private.end();
}

fn bounds_are_kept<H: Harness>(harness: &H)
where
    H::Backend: StreamOrdered,
{
    let private = Private::new(harness, Some(64 * MIB));
    let first = private.allocate(16 * MIB);
    let backend = harness.backend();
    match backend.allocate_ordered(&private.pool, 96 * MIB, &private.stream) {
        Ok(_) => panic!("96 MiB from a pool of 64 MiB"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}"),
    }
    private.free(private.allocate(8 * MIB));
    private.free(first);
    private.end();
}

fn memory_outlives_its_pool<H: Harness>(harness: &H)
where
    H::Backend: StreamOrdered,
{
    let private = Private::new(harness, None);
    let memory = private.allocate(2 * MIB);
    let stream = private.stream.clone();
    private.end();
    must_take("free_ordered", harness.backend().free_ordered(memory, &stream));
    harness.synchronize(&stream);
}

fn streams_wait_for_events<H: Harness>(harness: &H)
where
    H::Backend: StreamWait,
{
    let (backend, first, second) = (harness.backend(), harness.stream(), harness.stream());
    for _ in 0..5 {
        harness.queue_work(&first);
        let event = must("record", backend.record(&first));
        must("wait_event", backend.wait_event(&second, &event));
        let after = must("record", backend.record(&second));
        must("wait", backend.wait(&after));
        let earlier = must("query", backend.query(&event));
        assert_eq!(earlier, Completion::Reached, "a stream has overtaken what it waits for");
    }
}
