//! What the host allocator itself costs, on a backend that costs nothing: hit pairs, recorded uses,
//! churn, threads. Prints one JSON line a measurement. Times are those the thread ran, so that a busy
//! machine does not count; they are exact to a few milliseconds over the whole measurement.
//!
//! `cargo bench -p alloc-core --bench host [-- NAME]`, where NAME selects measurements by prefix.

use alloc_core::backend::{BackendError, Completion, ErrorKind, Refused, Stream};
use alloc_core::host::{
    HostAllocation, HostAllocator, HostBackend, HostConfig, NodeId, PinRequest, PinnedSegment,
};
use alloc_core::{Addr, DeviceId, StreamId};
use std::fmt;
use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Hands out ever higher addresses. An event is reached so many rounds after it was recorded.
#[derive(Debug, Default)]
struct Free {
    used: AtomicU64,
    rounds: AtomicU64,
    latency: AtomicU64,
}

#[derive(Clone, Debug)]
struct FreeStream(u64);

#[derive(Debug)]
struct Pinned(Addr, u64);

#[derive(Debug)]
struct Never;

impl fmt::Display for Never {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("never")
    }
}

impl std::error::Error for Never {}

impl BackendError for Never {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Other
    }
}

impl Stream for FreeStream {
    fn id(&self) -> StreamId {
        StreamId::new(self.0)
    }

    fn device(&self) -> DeviceId {
        DeviceId::new(0)
    }
}

impl PinnedSegment for Pinned {
    fn base(&self) -> Addr {
        self.0
    }

    fn bytes(&self) -> u64 {
        self.1
    }
}

impl HostBackend for Free {
    type Stream = FreeStream;
    type Event = u64;
    type Pinned = Pinned;
    type Error = Never;

    fn node_count(&self) -> u16 {
        1
    }

    fn node_of(&self, _: DeviceId) -> Option<NodeId> {
        Some(NodeId::new(0))
    }

    fn pin(&self, request: &PinRequest) -> Result<Pinned, Never> {
        let bytes = request.bytes.next_multiple_of(4096);
        Ok(Pinned(Addr::new((1 << 40) + self.used.fetch_add(bytes, Relaxed)), request.bytes))
    }

    fn unpin(&self, _: Pinned) -> Result<(), Refused<Pinned, Never>> {
        Ok(())
    }

    fn record(&self, _: &FreeStream) -> Result<u64, Never> {
        Ok(self.rounds.load(Relaxed) + self.latency.load(Relaxed))
    }

    fn query(&self, reached_at: &u64) -> Result<Completion, Never> {
        let is_reached = self.rounds.load(Relaxed) >= *reached_at;
        Ok(if is_reached { Completion::Reached } else { Completion::Pending })
    }

    fn wait(&self, _: &u64) -> Result<(), Never> {
        Ok(())
    }

    fn now(&self) -> Duration {
        Duration::ZERO
    }
}

type Host = HostAllocator<Free>;

/// Knuth's MMIX generator, top 31 bits: the same as in the drivers for other allocators.
struct Lcg(u64);

impl Lcg {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}

fn draw(random: &mut Lcg, max_log: u64) -> u64 {
    let log = 9 + random.next() % (max_log - 9);
    (1 << log) + random.next() % (1 << log)
}

/// Nanoseconds that this thread has run; Linux only, elsewhere the time since `start`.
fn thread_nanos(start: Instant) -> f64 {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let on_cpu = schedstat.and_then(|line| line.split(' ').next()?.parse().ok());
    on_cpu.unwrap_or_else(|| start.elapsed().as_nanos() as f64)
}

/// Mean nanoseconds of this thread for one of `rounds`.
fn timed(rounds: u32, work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    let before = thread_nanos(start);
    work();
    (thread_nanos(start) - before) / f64::from(rounds)
}

fn per_round(rounds: u32, mut round: impl FnMut()) -> f64 {
    for _ in 0..rounds / 10 + 1 {
        round();
    }
    timed(rounds, || (0..rounds).for_each(|_| round()))
}

fn hit_pair(host: &Host, bytes: u64) -> f64 {
    per_round(2_000_000, || {
        let block = host.allocate(black_box(bytes)).expect("memory");
        host.free(black_box(block)).expect("freed");
    })
}

fn recorded_pair(host: &Host, bytes: u64, latency: u64) -> f64 {
    let stream = FreeStream(1);
    host.backend().latency.store(latency, Relaxed);
    per_round(500_000, || {
        host.backend().rounds.fetch_add(1, Relaxed);
        let block = host.allocate(black_box(bytes)).expect("memory");
        host.record_use(&block, &stream).expect("live");
        host.free(block).expect("freed");
    })
}

/// Nanoseconds a step: a random one of `slots` blocks is freed and replaced by one of random size.
fn churn(host: &Host, slots: usize, steps: u32, max_log: u64, seed: u64) -> f64 {
    let mut random = Lcg(seed);
    let mut blocks: Vec<Option<HostAllocation>> = (0..slots).map(|_| None).collect();
    let mut run = |count: u32| {
        for _ in 0..count {
            let slot = random.next() as usize % slots;
            if let Some(block) = blocks[slot].take() {
                host.free(block).expect("freed");
            }
            let bytes = draw(&mut random, max_log);
            blocks[slot] = Some(host.allocate(bytes).expect("memory"));
        }
    };
    run(steps / 2);
    let nanos = timed(steps, || run(steps));
    blocks.into_iter().flatten().for_each(|block| host.free(block).expect("freed"));
    nanos
}

/// Million steps a second of all threads together, if each had a core of its own.
fn threads(host: &Host, count: u64, max_log: u64) -> f64 {
    let barrier = Barrier::new(count as usize);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..count)
            .map(|seed| {
                let (host, barrier) = (host.clone(), &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    churn(&host, 64, 300_000, max_log, 7 + seed)
                })
            })
            .collect();
        workers.into_iter().map(|worker| 1e3 / worker.join().expect("no panic")).sum()
    })
}

fn main() {
    let wanted = std::env::args().skip(1).find(|arg| !arg.starts_with('-')).unwrap_or_default();
    let policies = [("ours", HostConfig::ours()), ("pytorch", HostConfig::pytorch())];
    for (policy, config) in policies {
        let run = |name: &str, measure: &dyn Fn(&Host) -> f64, unit: &str| {
            if name.starts_with(&wanted) {
                let host = HostAllocator::new(Free::default(), config.clone()).expect("valid");
                let value = measure(&host);
                let stats = host.stats();
                let peak = |stat: alloc_core::host::HostStat| stat.peak as f64;
                let ratio = peak(stats.allocated_bytes) / peak(stats.requested_bytes).max(1.0);
                println!(
                    "{{\"policy\":\"{policy}\",\"name\":\"{name}\",\"{unit}\":{value:.1},\
                     \"reserved_to_requested\":{ratio:.3},\"misses\":{}}}",
                    stats.num_misses
                );
            }
        };
        for bytes in [64, 4096, 1 << 20, 16 << 20] {
            run(&format!("hit_{bytes}"), &|host| hit_pair(host, bytes), "ns_per_pair");
        }
        for (bytes, latency) in
            [4096, 1 << 20, 16 << 20].into_iter().flat_map(|b| [(b, 0), (b, 30)])
        {
            let pair = |host: &Host| recorded_pair(host, bytes, latency);
            run(&format!("recorded_{bytes}_late_{latency}"), &pair, "ns_per_pair");
        }
        for max_log in [16, 20, 24] {
            run(
                &format!("churn_{max_log}"),
                &|host| churn(host, 64, 300_000, max_log, 7),
                "ns_per_step",
            );
        }
        for count in [1, 2, 4, 16] {
            run(&format!("threads_{count}"), &|host| threads(host, count, 20), "mega_steps_per_s");
        }
    }
}
