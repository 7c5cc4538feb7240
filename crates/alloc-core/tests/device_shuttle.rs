//! Whole allocators on the simulator, the judge watching, under shuttle: `cargo xtask shuttle`.
//!
//! shuttle runs one thread at a time and decides at every lock which goes on, from a seed that a
//! failure prints; it knows a deadlock when it sees one. `SHUTTLE_RUNS` says how many schedules of each
//! test are played.
#![cfg(shuttle)]

use alloc_core::config::{PeakMode, Settings};
use alloc_core::{Addr, CachingAllocator, Config, DeviceId, Policy, PoolOptions, ScopeFilter};
use mock_backend::{Call, Judged, MockBackend, MockStream};
use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

const DEV: DeviceId = DeviceId::new(0);
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const THREADS: usize = 3;
const STEPS: usize = 14;

/// Options under which memory of policy ours moves from the first miss on.
const MOVING: &str = "expandable_segments:True,ours_margin:0,ours_margin_min_mb:0,\
                      ours_handle_max_mb:6,ours_handle_calm_mb:6,ours_ahead:1,ours_views_max:1";

/// Options under which small requests go to shards besides, after the first collision.
const DIVIDED: &str = "expandable_segments:True,ours_margin:0,ours_margin_min_mb:0,\
                       ours_handle_max_mb:6,ours_handle_calm_mb:6,ours_ahead:1,ours_views_max:1,\
                       ours_shards:2,ours_collisions:1";

type Alloc = CachingAllocator<MockBackend>;

/// An allocator, and a stream of each thread.
struct Stage {
    judged: Judged<Alloc>,
    streams: Vec<MockStream>,
}

/// Every mixture of policy, kind of segment and way to keep peaks.
fn mixtures() -> Vec<Config> {
    let kinds = [
        (Policy::Pytorch, ""),
        (Policy::Pytorch, "expandable_segments:True"),
        (Policy::Ours, ""),
        (Policy::Ours, MOVING),
        (Policy::Ours, DIVIDED),
    ];
    let each = |(policy, text)| {
        [PeakMode::Exact, PeakMode::PerHeap].map(|peaks| {
            let settings = Settings { expandable_segments: Some(false), ..Settings::default() };
            let mut config = Config { peaks, settings, ..Config::of(policy) };
            config.apply(text).expect("valid");
            config
        })
    };
    kinds.into_iter().flat_map(each).collect()
}

/// Plays `act` on several threads, each with its number, under many schedules. Afterwards everything
/// is consistent and goes back.
fn play(capacity: u64, act: fn(&Stage, usize)) {
    let runs = std::env::var("SHUTTLE_RUNS").map_or(60, |runs| runs.parse().expect("a number"));
    for config in mixtures() {
        let run = move || {
            let backend = MockBackend::builder().device(capacity).strict().build();
            let alloc = Alloc::with_virtual_memory(backend.clone(), config.clone()).expect("made");
            let streams = (0..THREADS).map(|_| backend.stream(DEV)).collect();
            let stage = Arc::new(Stage { judged: Judged::new(backend, alloc), streams });
            let start = |n| {
                let stage = Arc::clone(&stage);
                thread::spawn(move || act(&stage, n))
            };
            let threads: Vec<_> = (0..THREADS).map(start).collect();
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
            stage.judged.backend.clear_hook(Call::Query);
            let Ok(Stage { judged, .. }) = Arc::try_unwrap(stage) else { panic!("all are done") };
            judged.subject.check().expect("consistent");
            judged.backend.sync();
            judged.subject.empty_cache().expect("emptied");
            judged.subject.check().expect("consistent");
            assert_eq!(judged.backend.used(DEV), 0);
            judged.finish();
        };
        shuttle::check_random(run.clone(), runs);
        shuttle::check_pct(run, runs, 3);
    }
}

fn size() -> u64 {
    let mut rng = thread_rng();
    let most = [KIB, 64 * KIB, MIB, 6 * MIB, 24 * MIB][rng.gen_range(0..5)];
    rng.gen_range(1..=most)
}

impl Stage {
    /// A block for the stream of a thread; out of memory frees what it has.
    fn allocate(&self, n: usize, live: &mut Vec<Addr>) {
        match self.judged.allocate(size(), &self.streams[n]) {
            Ok(addr) => live.push(addr),
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error}");
                live.drain(..).for_each(|addr| self.judged.free(addr).expect("live"));
            }
        }
    }

    /// One step of a client at random.
    fn step(&self, n: usize, live: &mut Vec<Addr>) {
        let mut rng = thread_rng();
        let alloc = &self.judged.subject;
        match rng.gen_range(0..20) {
            0 => alloc.empty_cache().expect("emptied"),
            1 => drop(alloc.stats(DEV).expect("a device")),
            2 => drop(alloc.snapshot(DEV).expect("a device")),
            3 => alloc.reset_peak_stats(DEV).expect("a device"),
            4 => self.judged.backend.pass(&self.streams[rng.gen_range(0..THREADS)]),
            5..=7 if !live.is_empty() => {
                let addr = live[rng.gen_range(0..live.len())];
                self.judged.use_on(addr, &self.streams[(n + 1) % THREADS]).expect("live");
            }
            8..=12 if !live.is_empty() => {
                let addr = live.swap_remove(rng.gen_range(0..live.len()));
                self.judged.free(addr).expect("live");
            }
            _ => self.allocate(n, live),
        }
    }
}

fn churn(stage: &Stage, n: usize) {
    let mut live = Vec::new();
    (0..STEPS).for_each(|_| stage.step(n, &mut live));
    live.into_iter().for_each(|addr| stage.judged.free(addr).expect("live"));
}

/// A stream to each thread, memory enough for all.
#[test]
fn streams_of_their_own() {
    play(8 << 30, churn);
}

/// One stream for all.
#[test]
fn one_stream() {
    play(8 << 30, |stage, _| churn(stage, 0));
}

/// One stream for all, and too little memory: what one thread frees serves the others, whatever heap
/// it is in.
#[test]
fn one_stream_of_a_device_that_is_too_small() {
    play(70 * MIB, |stage, _| churn(stage, 0));
}

/// Threads run out of memory, flush each other's cache and wait for each other's events.
#[test]
fn a_device_that_is_too_small() {
    play(70 * MIB, churn);
}

/// Private pools come, are served from, and go, among requests of the default pool.
#[test]
fn pools_come_and_go() {
    play(8 << 30, |stage, n| {
        let mut live = Vec::new();
        for _ in 0..3 {
            let pool = stage.judged.subject.create_pool(DEV, PoolOptions::new()).expect("a pool");
            let scope = pool.enter();
            (0..STEPS / 3).for_each(|_| stage.step(n, &mut live));
            drop(scope);
            if n == 0 {
                pool.empty_cache().expect("emptied");
            }
        }
        live.into_iter().for_each(|addr| stage.judged.free(addr).expect("live"));
    });
}

/// The backend, asked about an event, asks for memory of its own, while other threads flush and wait
/// for that event: nobody waits for ever.
#[test]
fn a_query_that_asks_for_memory() {
    play(64 * MIB, |stage, n| {
        let Stage { judged, streams } = stage;
        let (alloc, stream) = (judged.subject.clone(), streams[2]);
        let asking = AtomicBool::new(false);
        judged.backend.set_hook(Call::Query, move |_| {
            if !asking.swap(true, SeqCst) {
                if let Ok(addr) = alloc.allocate_raw(24 * MIB, &stream) {
                    alloc.free_raw(addr).expect("live");
                }
                asking.store(false, SeqCst);
            }
        });
        let mut live = Vec::new();
        for bytes in [MIB, 30 * MIB, 50 * MIB] {
            if let Ok(addr) = judged.allocate(bytes, &streams[n]) {
                judged.use_on(addr, &streams[(n + 1) % THREADS]).expect("live");
                live.push(addr);
            }
            live.drain(..).for_each(|addr| judged.free(addr).expect("live"));
        }
        if n == 0 {
            judged.subject.empty_cache().expect("emptied");
        }
    });
}

/// Pools lose their scope and their last reference while requests of other threads look at the scope:
/// who lets go of it last ends the pool.
#[test]
fn pools_end_while_requests_look_at_their_scopes() {
    play(8 << 30, |stage, n| {
        let alloc = &stage.judged.subject;
        let claims_nothing = |_: &MockStream| {
            thread::yield_now();
            false
        };
        for _ in 0..3 {
            let pool = alloc.create_pool(DEV, PoolOptions::new()).expect("a pool");
            let scope = pool.scope(ScopeFilter::When(Arc::new(claims_nothing)));
            let addr = stage.judged.allocate(KIB, &stage.streams[n]).expect("memory");
            drop((scope, pool));
            stage.judged.free(addr).expect("live");
        }
    });
}
