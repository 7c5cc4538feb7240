//! Reports about user pools, and what upstream's tests of them assert.

use crate::rig::*;
use alloc_core::{AllocError, LadderStep, MemPool, Policy, PoolId, PoolOptions, ScopeFilter};
use mock_backend::{Call, Judged, MockBackend, MockStream, Rng};
use std::collections::BTreeSet;
use std::sync::{Barrier, Mutex};

const EXPANDABLE: &str = "expandable_segments:True";

fn pool(rig: &Rig) -> MemPool<MockBackend> {
    rig.create_pool(DEV0, PoolOptions::new()).unwrap()
}

/// Pools that segments belong to, by address of the segment.
fn owners(rig: &Rig) -> Vec<PoolId> {
    rig.snapshot(DEV0).unwrap().segments.iter().map(|segment| segment.pool).collect()
}

fn count(rig: &Rig, pool: PoolId) -> usize {
    owners(rig).into_iter().filter(|owner| *owner == pool).count()
}

/// Allocations of other threads landed in the pool of the one that had opened it.
#[test]
fn case_g1_only_the_thread_of_a_scope_uses_its_pool() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let p = pool(&rig);
        let (s0, s1) = (rig.s(0), rig.s(1));
        let alloc = (*rig).clone();
        let both = Barrier::new(2);
        let (x, y) = std::thread::scope(|threads| {
            let inside = threads.spawn(|| {
                let _scope = p.enter();
                both.wait();
                let x = alloc.allocate_raw(MIB, &s0).unwrap();
                both.wait();
                x
            });
            let outside = threads.spawn(|| {
                both.wait();
                let y = alloc.allocate_raw(MIB, &s1).unwrap();
                both.wait();
                y
            });
            (inside.join().unwrap(), outside.join().unwrap())
        });
        assert_eq!(rig.locate(x).unwrap().pool, p.id());
        assert_eq!(rig.locate(y).unwrap().pool, PoolId::DEFAULT);
        let listed = p.snapshot().segments;
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].addr, rig.locate(x).unwrap().segment);
        rig.free_raw(x).unwrap();
        rig.free_raw(y).unwrap();
    }
}

/// With nested scopes the inner pool got nothing.
#[test]
fn case_g2_the_innermost_scope_wins() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let (p1, p2) = (pool(&rig), pool(&rig));
        let s0 = rig.s(0);
        let outer = p1.enter();
        let a = rig.alloc(32, &s0);
        let inner = p2.enter();
        let b = rig.alloc(32, &s0);
        drop(inner);
        let c = rig.alloc(32, &s0);
        drop(outer);
        let d = rig.alloc(32, &s0);
        let of = |block: &alloc_core::Allocation| rig.locate(block.addr()).unwrap().pool;
        assert_eq!([of(&a), of(&b), of(&c)], [p1.id(), p2.id(), p1.id()]);
        assert_eq!(of(&d), PoolId::DEFAULT);
        assert_eq!(rig.segment(&a), rig.segment(&c));
        assert_eq!([count(&rig, p1.id()), count(&rig, p2.id())], [1, 1]);
        for block in [a, b, c, d] {
            rig.free(block);
        }
    }
}

/// A pool of one device used while another one is current: its scope claims nothing there, and
/// asking it for memory there is an error that says what to do.
#[test]
fn case_g3_a_pool_is_of_one_device() {
    for policy in BOTH {
        let rig = Rig::on(MockBackend::builder().device(GIB).device(GIB), policy, "");
        let p = pool(&rig);
        let _scope = p.enter();
        let a = rig.alloc(MIB, &rig.s1(0));
        assert_eq!(rig.locate(a.addr()).unwrap().pool, PoolId::DEFAULT);
        let error = p.allocate(MIB, &rig.s1(0)).unwrap_err();
        assert!(matches!(error, AllocError::InvalidArgument { what: "stream", .. }), "{error}");
        rig.free(a);
    }
}

/// A deleted pool was still used on out of memory; a live one helps before anything cached is given
/// back, at the same address.
#[test]
fn case_g5_use_on_oom() {
    for policy in BOTH {
        let rig = Rig::of_size(100 * MIB, policy, "");
        let s0 = rig.s(0);
        let p = rig.create_pool(DEV0, PoolOptions::new().use_on_oom()).unwrap();
        let a = {
            let _scope = p.enter();
            rig.alloc(40 * MIB, &s0)
        };
        let at = a.addr();
        rig.free(a);
        let cached = rig.alloc(20 * MIB, &s0);
        rig.free(cached);
        let fill = rig.alloc(38 * MIB, &s0);
        rig.backend.take_log();
        let b = rig.alloc(40 * MIB, &s0);
        assert_eq!((b.addr(), rig.locate(b.addr()).unwrap().pool), (at, p.id()));
        assert!(rig.calls(Call::Release).is_empty(), "nothing cached was given back");
        // Other streams never use it, and what it lacks it does not grow for others.
        let error = rig.oom(50 * MIB, &rig.s(1));
        let AllocError::OutOfMemory(report) = &error else { panic!("{error}") };
        assert!(report.steps.contains(&LadderStep::UseOnOom), "{error}");
        assert!(error.to_string().contains("used on out of memory"), "{error}");
        rig.free(b);
        drop(p);
        // The pool is gone, and so is its memory.
        let b = rig.alloc(40 * MIB, &s0);
        assert_eq!(rig.locate(b.addr()).unwrap().pool, PoolId::DEFAULT);
        rig.free(b);
        rig.free(fill);
    }
}

/// A dropped pool whose memory a caller still holds is never used for others.
#[test]
fn a_deleted_pool_is_not_used_on_oom() {
    for policy in BOTH {
        let rig = Rig::of_size(100 * MIB, policy, "");
        let s0 = rig.s(0);
        let p = rig.create_pool(DEV0, PoolOptions::new().use_on_oom()).unwrap();
        let a = rig.alloc_in(&p, 40 * MIB, &s0);
        drop(p);
        let fill = rig.alloc(60 * MIB, &s0);
        rig.free(a);
        // The flush takes the memory of a pool that nobody refers to, and a new segment is made.
        let b = rig.alloc(40 * MIB, &s0);
        assert_eq!(rig.locate(b.addr()).unwrap().pool, PoolId::DEFAULT);
        assert!(rig.pools(DEV0).unwrap().is_empty());
        rig.free(b);
        rig.free(fill);
    }
}

/// Emptying the cache leaves the segments of a pool in use; emptying that pool, or dropping it, gives
/// them back.
#[test]
fn case_g8_whose_cache_is_emptied() {
    for policy in BOTH {
        for text in ["", EXPANDABLE] {
            let rig = Rig::new(policy, text);
            let s0 = rig.s(0);
            let p = pool(&rig);
            let a = rig.alloc_in(&p, 60 * MIB, &s0);
            rig.free(a);
            rig.empty();
            assert!(rig.reserved() >= 60 * MIB);
            let given = p.empty_cache().unwrap();
            assert!(given >= 60 * MIB);
            assert_eq!(rig.reserved(), 0);
            let a = rig.alloc_in(&p, 60 * MIB, &s0);
            let b = rig.alloc(60 * MIB, &s0);
            rig.free(b);
            rig.free(a);
            let all = rig.reserved();
            drop(p);
            assert_eq!(rig.reserved() + given, all, "the default pool keeps its own");
            assert!(rig.pools(DEV0).unwrap().is_empty());
            rig.verify();
        }
    }
}

/// What a pool's last handle leaves behind goes with the flush after the last block.
#[test]
fn blocks_outlive_their_pool() {
    for policy in BOTH {
        for text in ["", EXPANDABLE] {
            let rig = Rig::new(policy, text);
            let s0 = rig.s(0);
            let p = pool(&rig);
            let id = p.id();
            let (a, b) = (rig.alloc_in(&p, KIB, &s0), rig.alloc_in(&p, 30 * MIB, &s0));
            drop(p);
            rig.check().unwrap();
            assert_eq!(rig.pools(DEV0).unwrap()[0].references, 0);
            rig.free(b);
            assert_eq!(count(&rig, id), 2, "what is free stays until the flush");
            rig.empty_cache().unwrap();
            assert_eq!(count(&rig, id), 1);
            rig.free(a);
            rig.empty();
            assert!(rig.pools(DEV0).unwrap().is_empty());
            assert_eq!(rig.reserved(), 0);
        }
    }
}

/// Naming a pool that nobody refers to but that holds memory revives it; upstream fails an
/// assertion (F9).
#[test]
fn case_f9_a_pool_is_revived() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let s0 = rig.s(0);
        let graph = rig.create_capture_pool(DEV0).unwrap();
        let id = graph.id();
        let a = rig.alloc_in(&graph, MIB, &s0);
        let at = a.addr();
        drop(graph);
        let again = rig.open_pool(DEV0, id, PoolOptions::new()).unwrap();
        assert_eq!(again.info().references, 1);
        let b = rig.alloc_in(&again, MIB, &s0);
        assert_eq!(rig.segment(&a), rig.segment(&b), "the same pool");
        assert_eq!(rig.locate(at).unwrap().requested, MIB);
        rig.free(a);
        rig.free(b);
        rig.empty_cache().unwrap();
        assert_eq!(count(&rig, id), 1, "it is referred to");
        drop(again);
        rig.empty();
        assert_eq!(rig.reserved(), 0);
        // Once it has ended, the id names a new pool.
        let new = rig.open_pool(DEV0, id, PoolOptions::new().no_split()).unwrap();
        assert!(new.info().no_split);
    }
}

/// One pool, two streams: blocks stay with their stream.
#[test]
fn case_f11_streams_share_nothing_inside_a_pool() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let p = rig.create_capture_pool(DEV0).unwrap();
        let a = rig.alloc_in(&p, 20 * MIB, &rig.s(1));
        let at = a.addr();
        rig.free(a);
        let b = rig.alloc_in(&p, 20 * MIB, &rig.s(2));
        assert_eq!(rig.reserved(), 40 * MIB);
        let c = rig.alloc_in(&p, 20 * MIB, &rig.s(1));
        assert_eq!((c.addr(), rig.reserved()), (at, 40 * MIB));
        rig.free(b);
        rig.free(c);
    }
}

/// Ids: the first half of a user's is 0, and they rise; a capture's have the halves exchanged and
/// are counted apart.
#[test]
fn ids_of_pools() {
    let rig = Rig::new(Policy::Pytorch, "");
    let ids: Vec<_> = (0..3).map(|_| pool(&rig).id()).collect();
    assert_eq!(ids, [PoolId(0, 1), PoolId(0, 2), PoolId(0, 3)]);
    let capture = rig.create_capture_pool(DEV0).unwrap();
    assert_eq!(capture.id(), PoolId(1, 0));
    // One that a front chose is not given out again.
    let chosen = rig.open_pool(DEV0, PoolId(0, 4), PoolOptions::new()).unwrap();
    assert_eq!(pool(&rig).id(), PoolId(0, 5));
    let error = rig.open_pool(DEV0, PoolId::DEFAULT, PoolOptions::new()).unwrap_err();
    assert!(matches!(error, AllocError::InvalidArgument { what: "pool id", .. }));
    drop(chosen);
}

/// A scope takes one reference and gives it back.
#[test]
fn references_are_counted() {
    let rig = Rig::new(Policy::Ours, "");
    let p = pool(&rig);
    let references = || p.info().references;
    assert_eq!(references(), 1);
    let scope = p.enter();
    assert_eq!(references(), 2);
    let clone = p.clone();
    assert_eq!(references(), 3);
    drop(scope);
    let handle = p.stream(&rig.s(0)).unwrap();
    let other = handle.clone();
    assert_eq!(references(), 4);
    drop((handle, other));
    drop(clone);
    assert_eq!(references(), 1);
}

/// Scopes by stream, for all requests, and by anything else; they end in any order.
#[test]
fn filters_of_scopes() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let (p1, p2, p3) = (pool(&rig), pool(&rig), pool(&rig));
        let (s0, s1, s2) = (rig.s(0), rig.s(1), rig.s(2));
        let owner = |stream| {
            let block = rig.alloc(MIB, stream);
            let owner = rig.locate(block.addr()).unwrap().pool;
            rig.free(block);
            owner
        };
        use alloc_core::backend::Stream;
        let all = p1.scope(ScopeFilter::All);
        let one = p2.scope(ScopeFilter::Stream(s1.id()));
        let odd = p3.scope(ScopeFilter::When(std::sync::Arc::new(
            move |s: &mock_backend::MockStream| s.id() == s2.id(),
        )));
        assert_eq!([owner(&s0), owner(&s1), owner(&s2)], [p1.id(), p2.id(), p3.id()]);
        drop(all);
        assert_eq!([owner(&s0), owner(&s1), owner(&s2)], [PoolId::DEFAULT, p2.id(), p3.id()]);
        drop(one);
        assert_eq!([owner(&s1), owner(&s2)], [PoolId::DEFAULT, p3.id()]);
        drop(odd);
        assert_eq!(owner(&s2), PoolId::DEFAULT);
    }
}

/// A handle of a stream follows scopes too, one of a pool does not.
#[test]
fn handles_and_scopes() {
    let rig = Rig::new(Policy::Ours, "");
    let (p1, p2) = (pool(&rig), pool(&rig));
    let s0 = rig.s(0);
    let plain = rig.stream(&s0).unwrap();
    let bound = p2.stream(&s0).unwrap();
    let _scope = p1.enter();
    let a = plain.allocate(MIB).unwrap();
    let b = bound.allocate(MIB).unwrap();
    let of = |block: &alloc_core::Allocation| rig.locate(block.addr()).unwrap().pool;
    assert_eq!([of(&a), of(&b)], [p1.id(), p2.id()]);
    plain.free(a).unwrap();
    plain.free(b).unwrap();
}

/// Without splitting, a block is a segment, charged whole.
#[test]
fn no_split_pools_hand_out_whole_segments() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let s0 = rig.s(0);
        let p = rig.create_pool(DEV0, PoolOptions::new().no_split()).unwrap();
        let q = pool(&rig);
        let whole: Vec<_> = (0..3).map(|_| rig.alloc_in(&p, KIB, &s0)).collect();
        let cut: Vec<_> = (0..3).map(|_| rig.alloc_in(&q, KIB, &s0)).collect();
        assert!(whole.iter().all(|block| block.bytes() == 2 * MIB));
        assert_eq!((count(&rig, p.id()), count(&rig, q.id())), (3, 1));
        let blocks: Vec<_> =
            p.snapshot().segments.iter().map(|segment| segment.blocks.len()).collect();
        assert_eq!(blocks, [1, 1, 1]);
        for block in whole.into_iter().chain(cut) {
            rig.free(block);
        }
    }
}

/// A user's pool is no capture: events are processed, and its blocks come back by them.
#[test]
fn events_go_on_inside_a_scope() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let (s0, s1) = (rig.s(0), rig.s(1));
        let p = pool(&rig);
        let _scope = p.enter();
        let a = rig.alloc(20 * MIB, &s0);
        let at = a.addr();
        rig.busy(&s1);
        rig.record(&a, &s1);
        rig.free(a);
        let b = rig.alloc(20 * MIB, &s0);
        assert_ne!(b.addr(), at, "not before the other stream is done");
        rig.pass(&s1);
        let c = rig.alloc(20 * MIB, &s0);
        assert_eq!(c.addr(), at);
        rig.free(b);
        rig.free(c);
        // The default pool's cache is emptied from inside, this pool's is not.
        rig.empty();
        assert_eq!(rig.reserved(), 40 * MIB);
        assert_eq!(p.empty_cache().unwrap(), 40 * MIB);
    }
}

/// Emptying one pool waits for the events of that pool only.
#[test]
fn emptying_a_pool_waits_for_its_own_events() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let (s0, s1, s2) = (rig.s(0), rig.s(1), rig.s(2));
        let p = pool(&rig);
        let a = rig.alloc_in(&p, 20 * MIB, &s0);
        let b = rig.alloc(20 * MIB, &s0);
        rig.busy(&s1);
        rig.busy(&s2);
        rig.record(&a, &s1);
        rig.record(&b, &s2);
        rig.free(a);
        rig.free(b);
        rig.backend.take_log();
        assert_eq!(p.empty_cache().unwrap(), 20 * MIB);
        use alloc_core::backend::Stream;
        let waits: Vec<_> =
            rig.backend.take_log().into_iter().flat_map(|entry| entry.waited_for).collect();
        assert_eq!(waits.first(), Some(&s1.id()));
        assert_eq!(rig.reserved(), 20 * MIB);
    }
}

/// A pinned pool keeps what it has (I8): through its own trim, a flush, and out of memory, and also
/// when nobody refers to it.
#[test]
fn a_pinned_pool_gives_nothing_away() {
    for policy in BOTH {
        for text in ["", EXPANDABLE, "max_split_size_mb:20"] {
            let rig = Rig::of_size(200 * MIB, policy, text);
            let s0 = rig.s(0);
            let p = rig.create_pool(DEV0, PoolOptions::new().use_on_oom()).unwrap();
            let pin = p.pin();
            let a = rig.alloc_in(&p, 100 * MIB, &s0);
            rig.free(a);
            let held = rig.reserved();
            assert_eq!(p.empty_cache().unwrap(), 0);
            rig.empty_cache().unwrap();
            rig.oom(150 * MIB, &s0);
            rig.oom(150 * MIB, &rig.s(1));
            assert_eq!(rig.reserved(), held);
            drop(p);
            rig.empty_cache().unwrap();
            rig.oom(150 * MIB, &s0);
            assert_eq!(rig.reserved(), held);
            drop(pin);
            let b = rig.alloc(150 * MIB, &s0);
            rig.free(b);
            rig.empty();
            assert_eq!(rig.reserved(), 0);
        }
    }
}

/// Heaps of ended pools are used again (I13), and their share of the statistics stays.
#[test]
fn heaps_are_used_again() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        for n in 1..200 {
            let p = pool(&rig);
            let a = rig.alloc_in(&p, MIB, &rig.s(n % 3));
            rig.free(a);
            drop(p);
            assert_eq!(rig.stat("allocation.all.allocated"), n as i64);
            rig.verify();
        }
        assert_eq!(rig.reserved(), 0);
    }
}

/// A request in a pool ran out of memory although the pool's own cached segment could go back. With policy
/// pytorch it still does: a pool in use keeps what it has.
#[test]
fn case_b4_a_pool_gives_its_own_segment_back() {
    for policy in BOTH {
        let rig = Rig::of_size(80 * MIB, policy, "");
        let p = pool(&rig);
        let a = rig.alloc_in(&p, 60 * MIB, &rig.s(0));
        rig.free(a);
        if policy == Policy::Pytorch {
            let error = p.allocate(70 * MIB, &rig.s(0)).unwrap_err();
            assert!(error.is_out_of_memory(), "{error}");
            continue;
        }
        let b = rig.alloc_in(&p, 70 * MIB, &rig.s(0));
        assert_eq!((rig.reserved(), rig.stat("num_ooms")), (70 * MIB, 0));
        rig.free(b);
    }
}

/// Before a request runs out of memory, policy ours takes what is free in pools that are in use;
/// PyTorch leaves it there.
#[test]
fn pools_in_use_give_memory_back_before_it_runs_out() {
    for text in ["", EXPANDABLE] {
        for policy in BOTH {
            let rig = Rig::of_size(100 * MIB, policy, text);
            let s0 = rig.s(0);
            let p = pool(&rig);
            let a = rig.alloc_in(&p, 60 * MIB, &s0);
            rig.free(a);
            if policy == Policy::Pytorch {
                rig.oom(80 * MIB, &s0);
                continue;
            }
            let b = rig.alloc(80 * MIB, &s0);
            assert_eq!(rig.locate(b.addr()).unwrap().pool, PoolId::DEFAULT);
            rig.free(b);
            // The pool lives on.
            let c = rig.alloc_in(&p, 60 * MIB, &s0);
            rig.free(c);
        }
    }
}

/// Idle pages of a pool serve others, without a driver call, and those of others serve it.
#[test]
fn pages_are_shared_between_pools() {
    let rig =
        Rig::of_size(100 * MIB, Policy::Ours, "expandable_segments:True,ours_margin_min_mb:0");
    let s0 = rig.s(0);
    let p = pool(&rig);
    let a = rig.alloc_in(&p, 60 * MIB, &s0);
    rig.free(a);
    rig.backend.take_log();
    let b = rig.alloc(60 * MIB, &s0);
    let log = rig.backend.take_log();
    assert!(log.iter().all(|entry| entry.info.call != Call::Create), "handles were moved");
    assert_eq!((rig.reserved(), rig.locate(b.addr()).unwrap().pool), (60 * MIB, PoolId::DEFAULT));
    rig.free(b);
    let c = rig.alloc_in(&p, 60 * MIB, &s0);
    assert_eq!(rig.reserved(), 60 * MIB);
    rig.free(c);
    // With a pin, they are not.
    let pin = p.pin();
    let d = rig.alloc(30 * MIB, &s0);
    assert_eq!(rig.reserved(), 90 * MIB);
    rig.free(d);
    drop(pin);
}

/// Threads make pools, enter them, nest scopes, drop them while blocks live and empty caches meanwhile:
/// ids are unique, each thread's requests go to its own pool, and the judge objects to nothing.
#[test]
fn threads_with_pools_of_their_own() {
    for policy in BOTH {
        for text in ["", EXPANDABLE] {
            let backend = MockBackend::builder().device(4 * GIB).build();
            let alloc = Alloc::with_virtual_memory(backend.clone(), config(policy, text)).unwrap();
            let judged = Judged::new(backend.clone(), alloc);
            let ids = Mutex::new(BTreeSet::new());
            std::thread::scope(|threads| {
                for thread in 0..4u64 {
                    let (judged, ids) = (&judged, &ids);
                    let streams = [backend.stream(DEV0), backend.stream(DEV0)];
                    threads.spawn(move || a_thread_with_pools(thread, judged, ids, streams));
                }
            });
            assert_eq!(ids.lock().unwrap().len(), 4 * ROUNDS as usize);
            judged.subject.check().unwrap();
            assert!(judged.backend.violations().is_empty());
            judged.subject.empty_cache().unwrap();
            assert!(judged.subject.pools(DEV0).unwrap().is_empty());
            let stats = judged.subject.stats(DEV0).unwrap();
            assert_eq!(stats.get("reserved_bytes.all.current"), Some(0));
            judged.finish();
        }
    }
}

const ROUNDS: u64 = 30;

fn a_thread_with_pools(
    thread: u64,
    judged: &Judged<Alloc>,
    ids: &Mutex<BTreeSet<PoolId>>,
    [own, other]: [MockStream; 2],
) {
    let mut rng = Rng::new(thread);
    let mut kept = Vec::new();
    let allocate = |bytes: u64| judged.allocate(bytes, &own).unwrap();
    for round in 0..ROUNDS {
        let pool = judged.subject.create_pool(DEV0, PoolOptions::new()).unwrap();
        assert!(ids.lock().unwrap().insert(pool.id()), "an id twice");
        let of = |addr| judged.subject.locate(addr).unwrap().pool;
        let scope = pool.enter();
        let blocks: Vec<_> = (0..8).map(|_| allocate(rng.between(1, 3 * MIB))).collect();
        assert!(blocks.iter().all(|addr| of(*addr) == pool.id()));
        {
            let inner = judged.subject.create_capture_pool(DEV0).unwrap();
            let _inside = inner.enter();
            let block = allocate(KIB);
            assert_eq!(of(block), inner.id());
            judged.use_on(block, &other).unwrap();
            judged.free(block).unwrap();
        }
        if round % 5 == 0 {
            judged.subject.empty_cache().unwrap();
            assert!(blocks.iter().all(|addr| of(*addr) == pool.id()));
        }
        drop(scope);
        let outside = allocate(rng.between(1, MIB));
        assert_eq!(of(outside), PoolId::DEFAULT);
        judged.free(outside).unwrap();
        for (n, block) in blocks.into_iter().enumerate() {
            if n == 3 {
                kept.push(block);
            } else {
                judged.free(block).unwrap();
            }
        }
        if round % 3 == 0 {
            pool.empty_cache().unwrap();
        }
        judged.backend.pass(&own);
        judged.backend.pass(&other);
    }
    kept.into_iter().for_each(|block| judged.free(block).unwrap());
}
