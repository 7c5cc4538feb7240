//! Threads on one stream whose small requests go to heaps of their own (policy ours, I14).

use crate::cases_threads::in_time;
use crate::rig::*;
use alloc_core::config::PeakMode;
use alloc_core::{Addr, AllocError, CachingAllocator, OomReport, Policy, PoolOptions};
use mock_backend::{Call, Fault, Judged, MockBackend, MockStream, Rng, Work};
use std::collections::BTreeSet;
use std::sync::Barrier;
use std::thread;

/// Divided from the start; memory moves from the first shortage on.
const DIVIDED: &str = "expandable_segments:True,ours_collisions:0";
const TIGHT: &str = "ours_margin:0,ours_margin_min_mb:0,ours_ahead:1";

/// What a shard may have free before it turns to others: so much, and an eighth of what is in use.
const SLACK: u64 = 8 * MIB;

fn judged(text: &str) -> (Judged<Alloc>, MockStream) {
    judged_by(Policy::Ours, text)
}

fn judged_by(policy: Policy, text: &str) -> (Judged<Alloc>, MockStream) {
    let backend = MockBackend::builder().device(8 * GIB).strict().log(100_000).build();
    let config = config(policy, text);
    let alloc = CachingAllocator::with_virtual_memory(backend.clone(), config).unwrap();
    let stream = backend.stream(DEV0);
    (Judged::new(backend, alloc), stream)
}

/// Runs on a thread that is not seen again.
fn elsewhere<R: Send>(act: impl FnOnce() -> R + Send) -> R {
    thread::scope(|scope| scope.spawn(act).join().unwrap())
}

/// Allocates until there is no memory.
fn exhaust(judged: &Judged<Alloc>, bytes: u64, stream: &MockStream) -> (Vec<Addr>, Box<OomReport>) {
    let mut addrs = Vec::new();
    loop {
        match judged.allocate(bytes, stream) {
            Ok(addr) => addrs.push(addr),
            Err(AllocError::OutOfMemory(report)) => return (addrs, report),
            Err(error) => panic!("{error}"),
        }
    }
}

fn reserved(judged: &Judged<Alloc>) -> u64 {
    judged.subject.stats(DEV0).unwrap().get("reserved_bytes.all.current").unwrap() as u64
}

fn calls(judged: &Judged<Alloc>, call: Call) -> usize {
    judged.backend.take_log().iter().filter(|entry| entry.info.call == call).count()
}

fn free_all(judged: &Judged<Alloc>, addrs: impl IntoIterator<Item = Addr>) {
    addrs.into_iter().for_each(|addr| judged.free(addr).unwrap());
    judged.subject.check().unwrap();
}

fn ends(judged: Judged<Alloc>) {
    judged.subject.check().unwrap();
    judged.backend.sync();
    judged.subject.empty_cache().unwrap();
    judged.subject.check().unwrap();
    assert_eq!(judged.backend.used(DEV0), 0, "the idle memory of shards goes back");
    judged.finish();
}

/// The segments that blocks of `bytes` lie in, one allocated by each of some threads.
fn segments(judged: &Judged<Alloc>, bytes: u64, stream: &MockStream) -> usize {
    let addrs: Vec<_> =
        (0..8).map(|_| elsewhere(|| judged.allocate(bytes, stream).unwrap())).collect();
    let segment = |addr: &Addr| judged.subject.locate(*addr).unwrap().segment;
    let segments: BTreeSet<_> = addrs.iter().map(segment).collect();
    free_all(judged, addrs);
    segments.len()
}

#[test]
fn small_requests_of_a_thread_go_to_its_shard_and_large_ones_do_not() {
    // Lanes have segments of their own, too.
    let divided = format!("{DIVIDED},ours_lasting:0");
    let (judged, stream) = judged(&divided);
    assert!(segments(&judged, MIB, &stream) > 1);
    assert_eq!(segments(&judged, MIB + 1, &stream), 1);
    ends(judged);
    let (judged, stream) = self::judged(&format!("{divided},ours_shard_max_kb:64"));
    assert!(segments(&judged, 64 * KIB, &stream) > 1);
    assert_eq!(segments(&judged, 64 * KIB + 1, &stream), 1);
    ends(judged);
}

/// Who never collides, who has no virtual memory, and who works with policy `pytorch`, has one heap.
#[test]
fn threads_share_a_heap_until_they_collide() {
    for text in [
        "expandable_segments:True",
        "expandable_segments:True,ours_collisions:0,ours_shards:1",
        "ours_collisions:0",
    ] {
        let (judged, stream) = judged(text);
        assert_eq!(segments(&judged, KIB, &stream), 1, "{text}");
        ends(judged);
    }
    let (judged, stream) = judged_by(Policy::Pytorch, DIVIDED);
    assert_eq!(segments(&judged, KIB, &stream), 1);
    ends(judged);
}

/// Threads that find the heap in use divide it, sooner or later.
#[test]
fn collisions_divide_a_heap() {
    in_time(|| {
        let (judged, stream) = judged("expandable_segments:True,ours_collisions:1");
        while segments(&judged, KIB, &stream) == 1 {
            thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        let handle = judged.subject.stream(&stream).unwrap();
                        for _ in 0..2000 {
                            handle.free(handle.allocate(KIB).unwrap()).unwrap();
                        }
                    });
                }
            });
        }
        ends(judged);
    });
}

/// Idle memory of a shard serves any request of the stream at once: no event is recorded, and nothing is
/// created.
#[test]
fn idle_handles_of_a_shard_serve_the_whole_stream() {
    for bytes in [40 * MIB, 200 * KIB] {
        let (judged, stream) = judged(&format!("{DIVIDED},{TIGHT}"));
        let addrs = elsewhere(|| {
            let small = || judged.allocate(200 * KIB, &stream).unwrap();
            (0..240).map(|_| small()).collect::<Vec<_>>()
        });
        let before = reserved(&judged);
        free_all(&judged, addrs);
        judged.backend.take_log();
        let count = 40 * MIB / bytes;
        let moved = elsewhere(|| {
            (0..count).map(|_| judged.allocate(bytes, &stream).unwrap()).collect::<Vec<_>>()
        });
        // A small request goes to another shard, and two of those may have their slack.
        let slack = if bytes < MIB { 2 * SLACK + 40 * MIB / 8 } else { 0 };
        assert!(reserved(&judged) <= before + slack, "{} after {before}", reserved(&judged));
        assert_eq!(calls(&judged, Call::Record), 0);
        free_all(&judged, moved);
        ends(judged);
    }
}

/// Before memory runs out, what is free between blocks of other threads is used as well, also by
/// threads whose shard is new.
#[test]
fn free_blocks_of_all_shards_are_used_before_memory_runs_out() {
    let (judged, stream) = judged(&format!("{DIVIDED},{TIGHT}"));
    judged.subject.set_memory_limit(DEV0, Some(32 * MIB)).unwrap();
    let (addrs, _) = elsewhere(|| exhaust(&judged, 96 * KIB, &stream));
    let (odd, even): (Vec<_>, Vec<_>) =
        addrs.iter().enumerate().partition(|(place, _)| place % 2 == 1);
    free_all(&judged, odd.iter().map(|(_, addr)| **addr));
    let (again, report) = elsewhere(|| exhaust(&judged, 96 * KIB, &stream));
    assert_eq!(again.len(), odd.len(), "every gap serves");
    let [heap] = &report.heaps[..] else { panic!("one stream, one entry: {report:?}") };
    assert_eq!(heap.reserved, 32 * MIB);
    assert_eq!(heap.allocated, 96 * KIB * addrs.len() as u64);
    assert_eq!(heap.allocated + heap.cached, heap.reserved);
    // Foreign frees: this thread has had none of the blocks.
    free_all(&judged, again.into_iter().chain(even.into_iter().map(|(_, addr)| *addr)));
    ends(judged);
}

/// What is freed while a request waits for events serves it, whichever heap it is in.
#[test]
fn pending_blocks_of_other_shards_are_waited_for() {
    let (judged, stream) = judged(&format!("{DIVIDED},{TIGHT}"));
    let side = judged.backend.stream(DEV0);
    judged.subject.set_memory_limit(DEV0, Some(8 * MIB)).unwrap();
    let (mut addrs, _) = elsewhere(|| exhaust(&judged, 100 * KIB, &stream));
    let last = addrs.pop().unwrap();
    judged.use_on(last, &side).unwrap();
    judged.free(last).unwrap();
    let served = elsewhere(|| judged.allocate(100 * KIB, &stream).unwrap());
    assert_eq!(served, last);
    free_all(&judged, addrs.into_iter().chain([served]));
    ends(judged);
}

/// What comes from another heap of the stream may be under work still: what a request leaves of it goes
/// to no other stream before that is done.
#[test]
fn memory_of_a_shard_is_young_where_it_goes() {
    let conf = format!("{DIVIDED},{TIGHT},ours_handle_max_mb:64,ours_waiting_max:0,ours_lasting:0");
    let (judged, stream) = judged(&conf);
    let other = judged.backend.stream(DEV0);
    let [large, wall] = [20, 4].map(|mib| judged.allocate(mib * MIB, &stream).unwrap());
    let small: Vec<_> = (0..10).map(|_| judged.allocate(MIB, &stream).unwrap()).collect();
    assert_eq!(reserved(&judged), 34 * MIB, "two handles of the stream's heap, five of a shard");
    judged.free(large).unwrap();
    judged.backend.launch(&stream, Work::new().lasting(1_000_000));
    // Looks for memory: an event is recorded behind that work.
    let first = judged.allocate(2 * MIB, &other).unwrap();
    judged.backend.advance(1_000_000);
    small.iter().for_each(|addr| {
        judged.backend.launch(&stream, Work::new().touching(*addr, MIB));
    });
    // Three handles of the shard, apart from each other: the first ones are older than the large one.
    let (freed, kept): (Vec<_>, Vec<_>) =
        small.into_iter().enumerate().partition(|(index, _)| index / 2 % 2 == 0);
    freed.into_iter().for_each(|(_, addr)| judged.free(addr).unwrap());
    // Takes more of them than it needs.
    let larger = judged.allocate(22 * MIB, &stream).unwrap();
    let before = reserved(&judged);
    let second = judged.allocate(2 * MIB, &other).unwrap();
    assert_eq!(reserved(&judged), before + 2 * MIB, "none of them is idle");
    free_all(&judged, [wall, first, larger, second]);
    free_all(&judged, kept.into_iter().map(|(_, addr)| addr));
    ends(judged);
}

/// It waits for no more than that.
#[test]
fn a_request_is_served_as_soon_as_any_shard_can() {
    let (judged, stream) = judged(&format!("{DIVIDED},{TIGHT}"));
    let sides = [(); 2].map(|()| judged.backend.stream(DEV0));
    judged.subject.set_memory_limit(DEV0, Some(8 * MIB)).unwrap();
    let (mut addrs, _) = elsewhere(|| exhaust(&judged, 100 * KIB, &stream));
    let pending = [addrs.swap_remove(3), addrs.swap_remove(9)];
    for (addr, side) in pending.into_iter().zip(&sides) {
        judged.use_on(addr, side).unwrap();
        judged.free(addr).unwrap();
    }
    judged.backend.take_log();
    let served = elsewhere(|| judged.allocate(100 * KIB, &stream).unwrap());
    assert_eq!((served, calls(&judged, Call::Wait)), (pending[0], 1));
    free_all(&judged, addrs.into_iter().chain([served]));
    ends(judged);
}

/// A shard without addresses leaves its requests to the heap of the stream, which has some.
#[test]
fn shards_do_without_address_space() {
    // A heap reserves nine eighths of the device, a shard a sixteenth of that.
    let space = GIB + GIB / 8 + 16 * MIB;
    let backend = MockBackend::builder().device(GIB).address_space(Addr::new(2 * MIB), space);
    let backend = backend.strict().build();
    let alloc = Alloc::with_virtual_memory(backend.clone(), config(Policy::Ours, DIVIDED)).unwrap();
    let (stream, judged) = (backend.stream(DEV0), Judged::new(backend, alloc));
    let large = judged.allocate(2 * MIB, &stream).unwrap();
    // Small there, large here.
    assert_eq!(segments(&judged, 300 * KIB, &stream), 1);
    free_all(&judged, [large]);
    ends(judged);
}

/// With one shard allowed there is none, from then on; blocks go back to where they are from.
#[test]
fn shards_end_when_settings_say_so() {
    let (judged, stream) = judged(DIVIDED);
    let old: Vec<_> =
        (0..8).map(|_| elsewhere(|| judged.allocate(KIB, &stream).unwrap())).collect();
    // What is out of range is the nearest that is not.
    for (shards, divided) in [(1, false), (64, true), (0, false), (u32::MAX, true), (1, false)] {
        let mut settings = judged.subject.settings();
        settings.ours.shards = shards;
        settings.ours.shard_bytes_max = if divided { u64::MAX } else { 0 };
        judged.subject.set_settings(settings).unwrap();
        judged.subject.check().unwrap();
        assert_eq!(segments(&judged, KIB, &stream) > 1, divided);
    }
    free_all(&judged, old);
    ends(judged);
}

/// Requests that a scope or a capture claims go to its pool, which is not divided.
#[test]
fn private_pools_have_no_shards() {
    let rig = Rig::new(Policy::Ours, DIVIDED);
    let plain = rig.alloc(KIB, &rig.s(1));
    let pool = rig.create_pool(DEV0, PoolOptions::new()).unwrap();
    let scope = pool.enter();
    let scoped = rig.alloc(KIB, &rig.s(1));
    assert_eq!(rig.pool_of(&scoped), pool.id());
    drop(scope);
    let mut memory = rig.graph_memory();
    let (graph, captured) = rig.capture(&mut memory, &rig.s(1), || rig.alloc(KIB, &rig.s(1)));
    assert_eq!(rig.pool_of(&captured), memory.pool());
    let again = rig.alloc(KIB, &rig.s(1));
    assert_eq!(
        rig.locate(again.addr()).unwrap().segment,
        rig.locate(plain.addr()).unwrap().segment
    );
    for block in [plain, scoped, captured, again] {
        rig.free(block);
    }
    drop((graph, memory));
}

/// Threads in step, each with many small blocks and some large ones: what shards cost is their slack
/// and what does not fit together.
#[test]
fn shards_cost_little_memory() {
    const THREADS: usize = 4;
    const STEPS: usize = 1500;
    let peak = |text: &str| {
        let (judged, stream) = judged(text);
        let step = Barrier::new(THREADS);
        thread::scope(|scope| {
            for n in 0..THREADS {
                let (judged, step) = (&judged, &step);
                scope.spawn(move || churn_in_step(judged, &stream, step, n as u64));
            }
        });
        let stats = judged.subject.stats(DEV0).unwrap();
        let peak = stats.get("reserved_bytes.all.peak").unwrap() as u64;
        ends(judged);
        peak
    };
    fn churn_in_step(judged: &Judged<Alloc>, stream: &MockStream, step: &Barrier, n: u64) {
        let mut rng = Rng::new(n);
        let mut slots = [None; 128];
        for count in 0..STEPS {
            if count % 10 == 0 {
                step.wait();
            }
            let slot = &mut slots[rng.below(128) as usize];
            if let Some(addr) = slot.take() {
                judged.free(addr).unwrap();
            }
            let log = 9 + rng.below(13);
            *slot = Some(judged.allocate(rng.between(1 << log, 2 << log), stream).unwrap());
        }
        slots.into_iter().flatten().for_each(|addr| judged.free(addr).unwrap());
    }
    in_time(move || {
        let (one, divided) = (peak("expandable_segments:True"), peak(DIVIDED));
        let most = one + one / 10 + THREADS as u64 * SLACK;
        assert!(divided <= most, "{} MiB with shards, {} without", divided / MIB, one / MIB);
    });
}

/// Every call of the driver fails once while threads take turns on a divided stream.
#[test]
fn a_failure_at_any_call_leaves_shards_consistent() {
    for nth in 0.. {
        let (judged, stream) = judged(&format!("{DIVIDED},{TIGHT}"));
        judged.backend.set_faults([Fault::nth(nth)]);
        let mut live = Vec::new();
        for bytes in [100 * KIB, 200 * KIB, 3 * MIB, 100 * KIB] {
            let some = elsewhere(|| {
                let some: Vec<_> =
                    (0..40).filter_map(|_| judged.allocate(bytes, &stream).ok()).collect();
                judged.subject.check().unwrap();
                some
            });
            live.extend(some);
            let kept = live.split_off(live.len() / 2);
            free_all(&judged, std::mem::replace(&mut live, kept));
        }
        free_all(&judged, live);
        let struck = judged.backend.fault_counts().1 > 0;
        judged.backend.set_faults([]);
        ends(judged);
        if !struck {
            break;
        }
    }
}

/// Peaks of sums are exact over shards as over streams.
#[test]
fn peaks_are_exact_over_shards() {
    let (backend, config) = (
        MockBackend::builder().device(GIB).strict().build(),
        alloc_core::Config { peaks: PeakMode::Exact, ..config(Policy::Ours, DIVIDED) },
    );
    let alloc = Alloc::with_virtual_memory(backend.clone(), config).unwrap();
    let stream = backend.stream(DEV0);
    for _ in 0..8 {
        let addr = elsewhere(|| alloc.allocate_raw(1000, &stream).unwrap());
        alloc.free_raw(addr).unwrap();
    }
    let stats = alloc.stats(DEV0).unwrap();
    assert_eq!(stats.get("allocation.all.peak"), Some(1));
    assert_eq!(stats.get("requested_bytes.small_pool.peak"), Some(1000));
    alloc.check().unwrap();
}
