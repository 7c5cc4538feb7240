//! Checkpoints of pools: what upstream's tests of them assert, and more.

use crate::rig::*;
use alloc_core::backend::{ErrorKind, Stream};
use alloc_core::{
    AllocError, Allocation, BlockStatus, CheckpointFlaw, Policy, PoolOptions, PoolRef,
    SegmentSnapshot,
};
use mock_backend::{Call, Fault, MockBackend};

const EXPANDABLE: &str = "expandable_segments:True";
const TEXTS: [&str; 2] = ["", EXPANDABLE];

fn pool(rig: &Rig) -> PoolRef<MockBackend> {
    rig.create_capture_pool(DEV0).unwrap()
}

fn segments(pool: &PoolRef<MockBackend>) -> Vec<SegmentSnapshot> {
    pool.snapshot().segments
}

/// Every combination of policy and kind of segment.
fn everywhere(test: impl Fn(&Rig, &PoolRef<MockBackend>)) {
    for policy in BOTH {
        for text in TEXTS {
            let rig = Rig::new(policy, text);
            test(&rig, &pool(&rig));
        }
    }
}

fn free_all(rig: &Rig, blocks: impl IntoIterator<Item = Allocation>) {
    blocks.into_iter().for_each(|block| rig.free(block));
}

/// Restoring must free what came later and revive what was there; upstream left both to chance.
#[test]
fn case_f3_later_blocks_go_and_earlier_ones_return() {
    everywhere(|rig, p| {
        let s0 = rig.s(0);
        let (a, b) = (rig.alloc_in(p, MIB, &s0), rig.alloc_in(p, MIB, &s0));
        let cp = p.checkpoint().unwrap();
        let (at_a, at_b) = (a.addr(), b.addr());
        rig.free(a);
        let c = rig.alloc_in(p, 512 * KIB, &s0);
        let restored = rig.restore(p, &cp);
        let revived: Vec<_> = restored.revived.iter().map(Allocation::addr).collect();
        assert_eq!((revived, &restored.kept), (vec![at_a], &vec![at_b]));
        assert_eq!(restored.stale.len(), 1);
        let stale = restored.stale[0];
        assert_eq!((stale.addr, stale.requested, stale.stream), (c.addr(), 512 * KIB, s0.id()));
        // Its owner is told, not served.
        assert!(matches!(refused_free(rig, c), AllocError::UnknownAddress { .. }));
        assert_eq!(p.live_blocks(), [at_a, at_b]);
        free_all(rig, restored.revived);
        rig.free(b);
    });
}

/// Segments before and after are the same: sizes, states, pool.
fn same_segments(layout: impl Fn(&Rig, &PoolRef<MockBackend>) -> Vec<Allocation>) {
    everywhere(|rig, p| {
        let kept = layout(rig, p);
        let before = segments(p);
        let cp = p.checkpoint().unwrap();
        // The pool is used in another way: everything freed, other sizes, and some of them kept.
        free_all(rig, kept);
        let others: Vec<_> = [3 * KIB, 700 * KIB, 5 * MIB, 2 * KIB, 30 * MIB, 900 * KIB]
            .into_iter()
            .map(|bytes| rig.alloc_in(p, bytes, &rig.s(0)))
            .collect();
        let restored = rig.restore(p, &cp);
        let after = segments(p);
        for segment in &before {
            let now = after.iter().find(|now| now.addr == segment.addr).expect("it is there");
            assert_eq!(
                (now.pool, now.class, now.stream),
                (segment.pool, segment.class, segment.stream)
            );
            // A range that has grown since is free where it was not mapped.
            let blocks = &now.blocks[..segment.blocks.len()];
            let last = segment.blocks.len() - 1;
            assert_eq!(blocks[..last], segment.blocks[..last]);
            assert_eq!(blocks[last].status, segment.blocks[last].status);
            assert!(now.bytes == segment.bytes || now.expandable && now.bytes > segment.bytes);
        }
        let live = |all: &[SegmentSnapshot]| -> Vec<_> {
            let blocks = all.iter().flat_map(|segment| segment.blocks.clone());
            blocks.filter(|block| block.status == BlockStatus::Allocated).collect()
        };
        assert_eq!(live(&before), live(&after));
        // Again, from the restored state itself and after more of the same.
        let again = rig.restore(p, &cp);
        assert!(again.revived.is_empty() && again.stale.is_empty());
        assert_eq!(again.kept.len(), restored.revived.len() + restored.kept.len());
        free_all(rig, restored.revived);
        for block in others {
            // Where a block of the checkpoint is the same, its newer owner kept it.
            let _ = rig.try_free(block);
        }
        let last = rig.restore(p, &cp);
        assert_eq!(live(&before), live(&segments(p)));
        free_all(rig, last.revived);
    });
}

#[test]
fn one_block_is_restored() {
    same_segments(|rig, p| vec![rig.alloc_in(p, MIB, &rig.s(0))]);
    same_segments(|rig, p| vec![rig.alloc_in(p, 15 * MIB, &rig.s(0))]);
}

/// Free memory below, between and above.
#[test]
fn blocks_in_the_middle_are_restored() {
    for bytes in [200 * KIB, 4 * MIB] {
        for keep in [&[1][..], &[1, 3], &[2, 3], &[0, 4]] {
            same_segments(|rig, p| {
                let s0 = rig.s(0);
                let blocks: Vec<_> = (0..5).map(|_| rig.alloc_in(p, bytes, &s0)).collect();
                let mut kept = Vec::new();
                for (at, block) in blocks.into_iter().enumerate() {
                    if keep.contains(&at) { kept.push(block) } else { rig.free(block) }
                }
                kept
            });
        }
    }
}

/// As many sizes as a training step has.
#[test]
fn many_blocks_of_all_sizes_are_restored() {
    same_segments(|rig, p| {
        let s0 = rig.s(0);
        let mut kept = Vec::new();
        let mut bytes = 700;
        for n in 0..120u64 {
            let block = rig.alloc_in(p, bytes, &s0);
            if n % 3 == 0 {
                rig.free(block)
            } else {
                kept.push(block)
            }
            bytes = (bytes * 7 + n * 512) % (14 * MIB) + 1;
        }
        kept
    });
}

/// A block that was live at the checkpoint and dies after the restore is freed like any other, and
/// one that was free then stays free.
#[test]
fn frees_after_a_restore() {
    everywhere(|rig, p| {
        let s0 = rig.s(0);
        let a = rig.alloc_in(p, 300 * KIB, &s0);
        let b = rig.alloc_in(p, 300 * KIB, &s0);
        let cp = p.checkpoint().unwrap();
        rig.free(b);
        let restored = rig.restore(p, &cp);
        assert_eq!((restored.revived.len(), restored.kept.len()), (1, 1));
        rig.free(a);
        free_all(rig, restored.revived);
        assert_eq!(rig.allocated(), 0);
        let restored = rig.restore(p, &cp);
        assert_eq!((restored.revived.len(), restored.kept.len()), (2, 0));
        free_all(rig, restored.revived);
    });
}

/// The live blocks of a pool are told exactly.
#[test]
fn live_blocks_are_told() {
    everywhere(|rig, p| {
        assert!(p.live_blocks().is_empty());
        let elsewhere = rig.alloc(MIB, &rig.s(0));
        let mut blocks: Vec<_> = (0..4).map(|n| rig.alloc_in(p, MIB << n, &rig.s(n % 2))).collect();
        let mut addrs: Vec<_> = blocks.iter().map(Allocation::addr).collect();
        addrs.sort();
        assert_eq!(p.live_blocks(), addrs);
        let gone = blocks.remove(1);
        addrs.retain(|addr| *addr != gone.addr());
        rig.free(gone);
        assert_eq!(p.live_blocks(), addrs);
        free_all(rig, blocks);
        rig.free(elsewhere);
    });
}

/// A stale allocation never frees the block that came to its place.
#[test]
fn a_stale_allocation_names_nothing() {
    everywhere(|rig, p| {
        let s0 = rig.s(0);
        let a = rig.alloc_in(p, 1000, &s0);
        let at = a.addr();
        let cp = p.checkpoint().unwrap();
        rig.free(a);
        // The same place and size, another request.
        let b = rig.alloc_in(p, 900, &s0);
        assert_eq!((b.addr(), b.bytes()), (at, 1024));
        let restored = rig.restore(p, &cp);
        assert_eq!(restored.revived[0].addr(), at);
        assert_eq!(restored.revived[0].requested(), 1000);
        let error = refused_free(rig, b);
        assert!(matches!(error, AllocError::UnknownAddress { .. }), "{error}");
        assert_eq!(rig.locate(at).unwrap().requested, 1000);
        free_all(rig, restored.revived);
    });
}

/// The error of a free of a block that the rig does not take for the one at its address.
fn refused_free(rig: &Rig, block: Allocation) -> Error {
    std::ops::Deref::deref(rig).free(block).unwrap_err().error
}

/// Segments of several streams, and segments that came later.
#[test]
fn every_stream_of_the_pool_is_restored() {
    everywhere(|rig, p| {
        let (s0, s1, s2) = (rig.s(0), rig.s(1), rig.s(2));
        let a = rig.alloc_in(p, 3 * MIB, &s0);
        let b = rig.alloc_in(p, 3 * MIB, &s1);
        let cp = p.checkpoint().unwrap();
        let expected = [a.addr(), b.addr()];
        assert_eq!(cp.blocks().iter().map(|block| block.0).collect::<Vec<_>>(), {
            let mut sorted = expected.to_vec();
            sorted.sort();
            sorted
        });
        rig.free(a);
        rig.free(b);
        let later = rig.alloc_in(p, 50 * MIB, &s2);
        let larger = rig.alloc_in(p, 3 * MIB + 512, &s0);
        let restored = rig.restore(p, &cp);
        let stale: Vec<_> = restored.stale.iter().map(|block| block.stream).collect();
        assert_eq!(stale, [s0.id(), s2.id()]);
        let revived: Vec<_> =
            restored.revived.iter().map(|block| (block.addr(), block.stream())).collect();
        assert_eq!(revived, [(expected[0], s0.id()), (expected[1], s1.id())]);
        drop((later, larger));
        free_all(rig, restored.revived);
    });
}

/// An expandable pool that has grown since keeps what it got, as free memory; and grows again.
#[test]
fn a_pool_that_has_grown_is_restored() {
    for policy in BOTH {
        let rig = Rig::new(policy, EXPANDABLE);
        let (p, s0) = (pool(&rig), rig.s(0));
        let a = rig.alloc_in(&p, 30 * MIB, &s0);
        let cp = p.checkpoint().unwrap();
        for round in 1..4 {
            let more: Vec<_> = (0..round).map(|_| rig.alloc_in(&p, 45 * MIB, &s0)).collect();
            let reserved = rig.reserved();
            let restored = rig.restore(&p, &cp);
            assert_eq!(restored.stale.len(), more.len());
            assert_eq!((restored.kept.len(), p.live_blocks()), (1, vec![a.addr()]));
            assert_eq!(rig.reserved(), reserved, "it stays");
        }
        rig.free(a);
    }
}

/// While a checkpoint exists its pool keeps its memory (I8); afterwards it can be emptied.
#[test]
fn a_checkpoint_keeps_the_memory() {
    for policy in BOTH {
        for text in TEXTS {
            let rig = Rig::of_size(256 * MIB, policy, text);
            let (p, s0) = (pool(&rig), rig.s(0));
            let a = rig.alloc_in(&p, 100 * MIB, &s0);
            let at = a.addr();
            let cp = p.checkpoint().unwrap();
            rig.free(a);
            assert_eq!(p.empty_cache().unwrap(), 0);
            rig.empty();
            rig.oom(200 * MIB, &s0);
            let restored = rig.restore(&p, &cp);
            assert_eq!(restored.revived[0].addr(), at);
            free_all(&rig, restored.revived);
            drop(cp);
            assert!(p.empty_cache().unwrap() >= 100 * MIB);
            assert_eq!(rig.reserved(), 0);
        }
    }
}

/// A checkpoint waits for what is pending, and a restore for the streams that a block was used on
/// before it goes.
#[test]
fn other_streams_are_waited_for() {
    everywhere(|rig, p| {
        let (s0, s1) = (rig.s(0), rig.s(1));
        let a = rig.alloc_in(p, 4 * MIB, &s0);
        rig.busy(&s1);
        rig.record(&a, &s1);
        rig.free(a);
        let cp = p.checkpoint().unwrap();
        assert!(cp.blocks().is_empty());
        let b = rig.alloc_in(p, 4 * MIB, &s0);
        rig.busy(&s1);
        rig.record(&b, &s1);
        // The judge objects if the block is reused before the kernel on the other stream is done.
        let restored = rig.restore(p, &cp);
        assert_eq!(restored.stale.len(), 1);
        let c = rig.alloc_in(p, 4 * MIB, &s0);
        assert_eq!(c.addr(), b.addr());
        rig.free(c);
    });
}

fn flaw<T: std::fmt::Debug>(result: Result<T, Error>) -> CheckpointFlaw {
    match result {
        Err(AllocError::Checkpoint { why, .. }) => why,
        other => panic!("{other:?}"),
    }
}

/// Errors are typed and change nothing.
#[test]
fn impossible_checkpoints_are_refused() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let (s0, s1) = (rig.s(0), rig.s(1));
        let (p, q) = (pool(&rig), pool(&rig));
        let a = rig.alloc_in(&p, MIB, &s0);
        let cp = p.checkpoint().unwrap();
        let before = rig.snapshot(DEV0).unwrap();
        assert_eq!(flaw(rig.try_restore(&q, &cp)), CheckpointFlaw::OtherPool { of: p.id() });
        let error = rig.try_restore(&q, &cp).unwrap_err().to_string();
        assert!(error.contains("the checkpoint is of pool"), "{error}");

        // Something is being captured: nothing is waited for.
        rig.busy(&s1);
        let b = rig.alloc_in(&p, MIB, &s0);
        let at = b.addr();
        rig.record(&b, &s1);
        let mut memory = rig.graph_memory();
        memory.expect().unwrap();
        assert_eq!(flaw(rig.try_restore(&p, &cp)), CheckpointFlaw::Pending { addr: at });
        rig.free(b);
        assert_eq!(flaw(p.checkpoint()), CheckpointFlaw::Pending { addr: at });
        memory.abort().unwrap();
        let _ = p.checkpoint().unwrap();
        assert_eq!(rig.snapshot(DEV0).unwrap(), before);

        // A pool that ended and was made again under its id is another one.
        let id = p.id();
        rig.free(a);
        drop(p);
        drop(cp);
        rig.empty();
        let first = rig.open_pool(DEV0, id, PoolOptions::new()).unwrap();
        let old = first.checkpoint().unwrap();
        drop(first);
        let new = rig.open_pool(DEV0, id, PoolOptions::new()).unwrap();
        assert_eq!(flaw(rig.try_restore(&new, &old)), CheckpointFlaw::OtherPool { of: id });
    }
}

/// A failed wait leaves everything as it was.
#[test]
fn a_failed_wait_changes_nothing() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let (p, s0, s1) = (pool(&rig), rig.s(0), rig.s(1));
        let a = rig.alloc_in(&p, MIB, &s0);
        let cp = p.checkpoint().unwrap();
        rig.free(a);
        let b = rig.alloc_in(&p, 3 * MIB, &s0);
        rig.record(&b, &s1);
        let before = rig.snapshot(DEV0).unwrap();
        for call in [Call::Record, Call::Wait] {
            rig.backend.set_faults([Fault::nth(1).of(call).kind(ErrorKind::Other)]);
            let error = rig.try_restore(&p, &cp).unwrap_err();
            assert!(matches!(error, AllocError::Backend { .. }), "{error}");
            rig.backend.set_faults([]);
            assert_eq!(rig.snapshot(DEV0).unwrap(), before);
        }
        let restored = rig.restore(&p, &cp);
        free_all(&rig, restored.revived);
        drop(b);
    }
}

/// Without splitting, blocks are whole segments before and after.
#[test]
fn pools_without_splitting_are_restored() {
    let rig = Rig::new(Policy::Pytorch, "");
    let s0 = rig.s(0);
    let p = rig.create_pool(DEV0, PoolOptions::new().no_split()).unwrap();
    let a = rig.alloc_in(&p, KIB, &s0);
    let cp = p.checkpoint().unwrap();
    rig.free(a);
    let b = rig.alloc_in(&p, 2 * KIB, &s0);
    let restored = rig.restore(&p, &cp);
    assert_eq!((restored.stale[0].bytes, restored.revived[0].bytes()), (2 * MIB, 2 * MIB));
    drop(b);
    free_all(&rig, restored.revived);
}

/// A block that another process uses cannot be freed by a restore; nothing is changed, and it works
/// when that process is done.
#[test]
fn a_shared_block_stands_in_the_way_of_a_restore() {
    everywhere(|rig, p| {
        let s0 = rig.s(0);
        let cp = p.checkpoint().unwrap();
        let later = rig.alloc_in(p, MIB, &s0);
        let addr = later.addr();
        let export = rig.share(&later).unwrap();
        let error = p.restore(&cp).unwrap_err();
        let AllocError::Checkpoint { why, .. } = error else { panic!("{error}") };
        assert_eq!(why, CheckpointFlaw::Pending { addr });
        rig.verify();
        rig.free(later);
        assert!(p.checkpoint().is_err(), "it drains");
        drop(export);
        assert!(rig.restore(p, &cp).revived.is_empty());
        assert!(p.live_blocks().is_empty());
    });
}
