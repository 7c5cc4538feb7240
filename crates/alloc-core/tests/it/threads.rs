//! Real threads under the judge: what single-threaded tests cannot reach. Short, and under a
//! timeout.

use crate::cases_threads::in_time;
use crate::rig::*;
use alloc_core::config::PeakMode;
use alloc_core::{Addr, CachingAllocator, Config, Policy};
use mock_backend::{Judged, MockBackend, MockStream, Rng};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

const THREADS: usize = 8;
const STEPS: u64 = 300;
const KINDS: [&str; 2] = ["", "expandable_segments:True"];

/// Options under which memory of policy ours moves from the first miss on.
const MOVING: &str = "expandable_segments:True,ours_margin:0,ours_margin_min_mb:0,\
                      ours_handle_max_mb:6,ours_handle_calm_mb:6,ours_ahead:1,ours_views_max:1";

/// Options under which small requests go to shards besides.
const DIVIDED: &str = "expandable_segments:True,ours_margin:0,ours_margin_min_mb:0,\
                       ours_handle_max_mb:6,ours_handle_calm_mb:6,ours_ahead:1,ours_views_max:1,\
                       ours_shards:3,ours_collisions:0";

/// Every mixture of policy, kind of segment and way to keep peaks.
fn mixtures() -> Vec<Config> {
    let kinds = BOTH.into_iter().flat_map(|policy| KINDS.map(|text| (policy, text)));
    let kinds = kinds.chain([(Policy::Ours, MOVING), (Policy::Ours, DIVIDED)]);
    let each = |(policy, text)| {
        [PeakMode::Exact, PeakMode::PerHeap].map(|peaks| Config { peaks, ..config(policy, text) })
    };
    kinds.flat_map(each).collect()
}

fn judged(capacity: u64, config: Config) -> Judged<Alloc> {
    let backend = MockBackend::builder().device_with(capacity, 8 * GIB).strict().build();
    let alloc = CachingAllocator::with_virtual_memory(backend.clone(), config).unwrap();
    Judged::new(backend, alloc)
}

/// Sizes of both classes, most of them small.
fn size(rng: &mut Rng) -> u64 {
    let most = [KIB, 64 * KIB, MIB, 6 * MIB, 24 * MIB][rng.below(5) as usize];
    rng.between(1, most)
}

/// Allocates and frees at random on one stream, uses blocks on another one now and then.
fn churn(judged: &Judged<Alloc>, seed: u64, own: MockStream, side: MockStream) {
    let mut rng = Rng::new(seed);
    let mut live: Vec<Addr> = Vec::new();
    for _ in 0..STEPS {
        if live.len() > 12 || (!live.is_empty() && rng.chance(0.45)) {
            let addr = live.swap_remove(rng.below(live.len() as u64) as usize);
            judged.free(addr).unwrap();
        } else {
            let addr = judged.allocate(size(&mut rng), &own).unwrap();
            live.push(addr);
            if rng.chance(0.2) {
                judged.use_on(addr, &side).unwrap();
            }
        }
        if rng.chance(0.05) {
            judged.backend.pass(&side);
        }
    }
    live.into_iter().for_each(|addr| judged.free(addr).unwrap());
}

/// Nothing is live: everything is consistent and goes back.
fn ends_empty(judged: Judged<Alloc>) {
    let alloc = &judged.subject;
    alloc.check().unwrap();
    judged.backend.sync();
    alloc.empty_cache().unwrap();
    alloc.check().unwrap();
    let stats = alloc.stats(DEV0).unwrap();
    for key in ["allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes"] {
        assert_eq!(stats.get(&format!("{key}.all.current")), Some(0), "{key}");
        let sums = ["allocated", "freed"].map(|field| stats.get(&format!("{key}.all.{field}")));
        assert_eq!(sums[0], sums[1], "{key}");
    }
    assert_eq!(stats.get("num_ooms"), Some(0));
    assert_eq!(judged.backend.used(DEV0), 0);
    judged.finish();
}

fn in_parallel(count: usize, act: impl Fn(usize) + Sync) {
    let start = Barrier::new(count);
    thread::scope(|scope| {
        for n in 0..count {
            let (start, act) = (&start, &act);
            scope.spawn(move || {
                start.wait();
                act(n);
            });
        }
    });
}

#[test]
fn threads_with_a_stream_each() {
    in_time(|| {
        for config in mixtures() {
            let judged = judged(8 * GIB, config);
            let streams: Vec<_> = (0..THREADS).map(|_| judged.backend.stream(DEV0)).collect();
            in_parallel(THREADS, |n| {
                churn(&judged, n as u64, streams[n], streams[(n + 1) % THREADS]);
            });
            ends_empty(judged);
        }
    });
}

#[test]
fn threads_on_one_stream() {
    in_time(|| {
        for config in mixtures() {
            let judged = judged(8 * GIB, config);
            let (own, side) = (judged.backend.stream(DEV0), judged.backend.stream(DEV0));
            in_parallel(THREADS, |n| churn(&judged, n as u64, own, side));
            ends_empty(judged);
        }
    });
}

/// One more thread gives the cache back, looks around and switches options all the while.
#[test]
fn threads_with_a_busybody() {
    in_time(|| {
        for config in mixtures() {
            let toggles = config.settings.expandable_segments == Some(true);
            let judged = judged(8 * GIB, config);
            let streams: Vec<_> = (0..THREADS).map(|_| judged.backend.stream(DEV0)).collect();
            let done = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    let alloc = &judged.subject;
                    let mut on = true;
                    while !done.load(Ordering::Relaxed) {
                        alloc.empty_cache().unwrap();
                        alloc.snapshot(DEV0).unwrap();
                        alloc.reset_peak_stats(DEV0).unwrap();
                        if toggles {
                            on = !on;
                            alloc.set_expandable_segments(on).unwrap();
                        }
                    }
                });
                in_parallel(THREADS, |n| {
                    churn(&judged, n as u64, streams[n], streams[(n + 3) % THREADS]);
                });
                done.store(true, Ordering::Relaxed);
            });
            ends_empty(judged);
        }
    });
}

/// Blocks are allocated on one thread and freed on another, through a ring of channels.
#[test]
fn blocks_freed_by_other_threads() {
    in_time(|| {
        for config in mixtures() {
            let judged = judged(8 * GIB, config);
            let (mut senders, receivers): (Vec<Sender<Addr>>, Vec<Receiver<Addr>>) =
                (0..THREADS).map(|_| channel()).unzip();
            // Each sends to the next one.
            senders.rotate_left(1);
            let streams: Vec<_> = (0..THREADS).map(|_| judged.backend.stream(DEV0)).collect();
            thread::scope(|scope| {
                for (n, (receiver, sender)) in receivers.into_iter().zip(senders).enumerate() {
                    let (judged, streams) = (&judged, &streams);
                    scope.spawn(move || {
                        let mut rng = Rng::new(n as u64);
                        for step in 0..STEPS {
                            let addr = judged.allocate(size(&mut rng), &streams[n]).unwrap();
                            if step % 4 == 0 {
                                judged.use_on(addr, &streams[(n + 1) % THREADS]).unwrap();
                            }
                            sender.send(addr).unwrap();
                            while let Ok(addr) = receiver.try_recv() {
                                judged.free(addr).unwrap();
                            }
                        }
                        drop(sender);
                        receiver.into_iter().for_each(|addr| judged.free(addr).unwrap());
                    });
                }
            });
            ends_empty(judged);
        }
    });
}

/// A device that is too small for all of them: threads run out of memory, flush each other's cache
/// and wait for each other's events. Whoever fails has freed everything before it tries again, so
/// that all come to their end.
#[test]
fn threads_that_run_out_of_memory() {
    in_time(|| {
        for config in mixtures() {
            let judged = judged(150 * MIB, config);
            let streams: Vec<_> = (0..THREADS).map(|_| judged.backend.stream(DEV0)).collect();
            in_parallel(THREADS, |n| {
                let mut rng = Rng::new(n as u64);
                let mut live = Vec::new();
                for _ in 0..STEPS {
                    match judged.allocate(rng.between(1, 20 * MIB), &streams[n]) {
                        Ok(addr) => {
                            live.push(addr);
                            if rng.chance(0.3) {
                                judged.use_on(addr, &streams[(n + 1) % THREADS]).unwrap();
                            }
                        }
                        Err(error) => {
                            assert!(error.is_out_of_memory(), "{error}");
                            live.drain(..).for_each(|addr| judged.free(addr).unwrap());
                        }
                    }
                }
                live.into_iter().for_each(|addr| judged.free(addr).unwrap());
            });
            judged.subject.check().unwrap();
            assert!(judged.subject.stats(DEV0).unwrap().get("num_ooms") > Some(0));
            judged.backend.sync();
            judged.subject.empty_cache().unwrap();
            assert_eq!(judged.backend.used(DEV0), 0);
            judged.finish();
        }
    });
}

/// Exact peaks are those of the sum over all streams at one moment, never the sum of what each stream
/// held at its own: threads take turns, so that at most some of them hold a block at a time, then all
/// of them do.
#[test]
fn exact_peaks_over_streams() {
    const AT_ONCE: usize = 3;
    in_time(|| {
        for text in KINDS {
            let config = Config { peaks: PeakMode::Exact, ..config(Policy::Pytorch, text) };
            let judged = judged(8 * GIB, config);
            let streams: Vec<_> = (0..THREADS).map(|_| judged.backend.stream(DEV0)).collect();
            let peaks = |blocks: usize| {
                let stats = judged.subject.stats(DEV0).unwrap();
                let blocks = blocks as i64;
                assert_eq!(stats.get("allocation.all.peak"), Some(blocks));
                assert_eq!(stats.get("active.small_pool.peak"), Some(blocks));
                assert_eq!(stats.get("requested_bytes.small_pool.peak"), Some(1000 * blocks));
                assert_eq!(stats.get("allocated_bytes.all.peak"), Some(1024 * blocks));
            };
            let held = AtomicUsize::new(0);
            in_parallel(THREADS, |n| {
                for _ in 0..STEPS {
                    let enters = |held| (held < AT_ONCE).then_some(held + 1);
                    let (acquire, relaxed) = (Ordering::AcqRel, Ordering::Relaxed);
                    while held.fetch_update(acquire, relaxed, enters).is_err() {
                        thread::yield_now();
                    }
                    let addr = judged.allocate(1000, &streams[n]).unwrap();
                    judged.free(addr).unwrap();
                    held.fetch_sub(1, Ordering::AcqRel);
                }
            });
            assert!(judged.subject.stats(DEV0).unwrap().get("allocation.all.peak") <= Some(3));
            let first = (0..AT_ONCE).map(|n| judged.allocate(1000, &streams[n]).unwrap());
            first.collect::<Vec<_>>().into_iter().for_each(|addr| judged.free(addr).unwrap());
            peaks(AT_ONCE);
            let all = Barrier::new(THREADS);
            in_parallel(THREADS, |n| {
                for _ in 0..20 {
                    let addr = judged.allocate(1000, &streams[n]).unwrap();
                    all.wait();
                    judged.free(addr).unwrap();
                    all.wait();
                }
            });
            peaks(THREADS);
            judged.subject.reset_peak_stats(DEV0).unwrap();
            peaks(0);
            let addr = judged.allocate(1000, &streams[5]).unwrap();
            judged.free(addr).unwrap();
            peaks(1);
            ends_empty(judged);
        }
    });
}

/// Threads meet at streams that none of them has used before: each stream gets one heap, which all of
/// them find, and which serves all from the same segment.
#[test]
fn the_first_requests_of_a_stream_meet() {
    in_time(|| {
        for policy in BOTH {
            let judged = judged(GIB, config(policy, ""));
            for _ in 0..40 {
                let stream = judged.backend.stream(DEV0);
                in_parallel(4, |_| {
                    let addr = judged.allocate(KIB, &stream).unwrap();
                    judged.free(addr).unwrap();
                });
            }
            let heaps = judged.subject.snapshot(DEV0).unwrap().segments.len();
            assert_eq!(heaps, 40, "one segment of each stream");
            ends_empty(judged);
        }
    });
}

/// Two threads free the same address: exactly one succeeds.
#[test]
fn one_of_two_frees_wins() {
    in_time(|| {
        for text in KINDS {
            for used in [false, true] {
                let judged = judged(GIB, config(Policy::Ours, text));
                let (own, side) = (judged.backend.stream(DEV0), judged.backend.stream(DEV0));
                for _ in 0..200 {
                    let addr = judged.subject.allocate_raw(3 * MIB, &own).unwrap();
                    if used {
                        judged.subject.record_stream_raw(addr, &side).unwrap();
                    }
                    let wins = AtomicUsize::new(0);
                    in_parallel(2, |_| {
                        let won = judged.subject.free_raw(addr).is_ok();
                        wins.fetch_add(usize::from(won), Ordering::Relaxed);
                    });
                    assert_eq!(wins.into_inner(), 1);
                }
                judged.subject.check().unwrap();
                judged.finish();
            }
        }
    });
}
