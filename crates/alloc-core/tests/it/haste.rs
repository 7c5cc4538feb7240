//! Programs whose large requests come fast and in ever new sizes (policy ours): these are rounded to few
//! sizes, so that freed blocks serve them as they are, for as long as that is so and memory suffices.

use crate::rig::*;
use alloc_core::{Policy, PoolOptions};
use mock_backend::MockBackend;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Nothing is created ahead, so that any growth shows.
const TIGHT: &str = "expandable_segments:True,ours_margin:0,ours_margin_min_mb:0,ours_ahead:1,\
                     ours_variety:32";
/// A request, what it is rounded to, and what it is rounded to where sizes are few.
const REQUEST: (u64, u64, u64) = (3_000_000, 3_000_320, 3 * MIB);

/// A program, and the time that passes for it.
struct Program {
    rig: Rig,
    nanos: Arc<AtomicU64>,
}

impl Program {
    fn new(options: &str) -> Self {
        Program::on(Rig::new(Policy::Ours, &format!("{TIGHT}{options}")))
    }

    fn on(rig: Rig) -> Self {
        let nanos = Arc::new(AtomicU64::new(0));
        let clock = nanos.clone();
        rig.set_clock(move || Duration::from_nanos(clock.load(Ordering::Relaxed)));
        Program { rig, nanos }
    }

    fn pass(&self, nanos: u64) {
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    /// Allocates and frees so many blocks, of the sizes that `size` says, each of which takes so long.
    fn churn(&self, blocks: u64, nanos: u64, size: impl Fn(u64) -> u64) {
        for n in 0..blocks {
            let block = self.rig.alloc(size(n), &self.rig.s(0));
            self.rig.free(block);
            self.pass(nanos);
        }
    }

    /// Many fast requests of ever new sizes.
    fn hurry(&self) {
        self.churn(200, 1_000, varied);
    }

    /// What a request of that size gets, in bytes.
    fn bytes_for(&self, bytes: u64) -> u64 {
        let block = self.rig.alloc(bytes, &self.rig.s(0));
        let got = block.bytes();
        self.rig.free(block);
        got
    }
}

/// Sizes of which none is like the one before among those near it.
fn varied(n: u64) -> u64 {
    MIB + (n * 7 % 200) * 8 * KIB + n * 512
}

#[test]
fn fast_requests_of_ever_new_sizes_are_rounded() {
    let program = Program::new("");
    let (bytes, exact, few) = REQUEST;
    assert_eq!(program.bytes_for(bytes), exact);
    program.hurry();
    assert_eq!(program.bytes_for(bytes), few);
    // Small ones are anyway; very large ones never.
    assert_eq!(program.bytes_for(33 * KIB), 36 * KIB);
    assert_eq!(program.bytes_for(16 * MIB - 100), 16 * MIB);
    assert_eq!(program.bytes_for(16 * MIB + 100), 16 * MIB + 512);
}

/// Freed blocks of few sizes wait, however many come between.
#[test]
fn their_blocks_wait() {
    let program = Program::new("");
    program.hurry();
    let s0 = program.rig.s(0);
    let sizes = [MIB, 3 * MIB, 2 * MIB, 10 * MIB];
    let blocks = sizes.map(|bytes| program.rig.alloc(bytes, &s0));
    let was = blocks.each_ref().map(|block| block.addr());
    blocks.into_iter().for_each(|block| program.rig.free(block));
    let again = sizes.map(|bytes| program.rig.alloc(bytes - 1000, &s0));
    assert_eq!(again.each_ref().map(|block| block.addr()), was);
    again.into_iter().for_each(|block| program.rig.free(block));
}

/// A request that no block of its size waits for gets part of a larger one, then what all others are
/// when they merge; those of the small class stay as they are.
#[test]
fn what_waits_serves_other_sizes_before_memory_grows() {
    let program = Program::new("");
    program.hurry();
    program.rig.empty_cache().unwrap();
    program.hurry();
    let s0 = program.rig.s(0);
    let small = [0; 8].map(|_| program.rig.alloc(64 * KIB, &s0));
    let was = small.each_ref().map(|block| block.addr());
    let blocks = [2, 4, 3].map(|mib| program.rig.alloc(mib * MIB, &s0));
    small.into_iter().for_each(|block| program.rig.free(block));
    blocks.into_iter().for_each(|block| program.rig.free(block));
    let reserved = program.rig.reserved();
    let whole = program.rig.alloc(9 * MIB, &s0);
    assert_eq!(program.rig.reserved(), reserved);
    let mut again = [0; 8].map(|_| program.rig.alloc(64 * KIB, &s0));
    again.reverse();
    assert_eq!(again.each_ref().map(|block| block.addr()), was);
    again.into_iter().for_each(|block| program.rig.free(block));
    program.rig.free(whole);
}

/// One that is too large to wait gets what all that wait are when they merge.
#[test]
fn what_waits_serves_very_large_requests() {
    let program = Program::new("");
    program.hurry();
    let s0 = program.rig.s(0);
    let blocks = [8, 8, 4].map(|mib| program.rig.alloc(mib * MIB, &s0));
    blocks.into_iter().for_each(|block| program.rig.free(block));
    let reserved = program.rig.reserved();
    let whole = program.rig.alloc(20 * MIB, &s0);
    assert_eq!(program.rig.reserved(), reserved);
    program.rig.free(whole);
}

/// Growth creates what it would have moved, up to half of `ours_hurry_max`.
#[test]
fn memory_is_taken_where_it_would_be_moved() {
    for (options, creates) in [("", true), (",ours_hurry_max:0.07", false)] {
        let program = Program::new(options);
        program.churn(1, 0, |_| 80 * MIB);
        program.hurry();
        let s0 = program.rig.s(0);
        let mut blocks = [0; 8].map(|_| program.rig.alloc(10 * MIB, &s0)).map(Some);
        for at in [1, 5] {
            program.rig.free(blocks[at].take().unwrap());
        }
        assert_eq!(program.rig.reserved(), 80 * MIB);
        // 20 MiB lie free, but not side by side.
        let block = program.rig.alloc(12 * MIB, &s0);
        assert_eq!(program.rig.reserved() > 80 * MIB, creates);
        blocks.into_iter().flatten().chain([block]).for_each(|block| program.rig.free(block));
    }
}

#[test]
fn requests_that_come_slowly_or_again_are_not() {
    let (bytes, exact, _) = REQUEST;
    let same = |n: u64| [MIB, 2 * MIB, 3 * MIB][n as usize % 3];
    let slow = Program::new("");
    slow.churn(200, 10_000, varied);
    assert_eq!(slow.bytes_for(bytes), exact);
    let again = Program::new("");
    again.churn(200, 1_000, same);
    assert_eq!(again.bytes_for(bytes), exact);
    for options in
        [",ours_variety:0", ",ours_variety:1000", ",ours_hurry_max:0", ",ours_waiting_max:0"]
    {
        let off = Program::new(options);
        off.hurry();
        assert_eq!(off.bytes_for(bytes), exact, "{options}");
    }
}

#[test]
fn nor_are_they_where_there_is_no_clock() {
    let rig = Rig::new(Policy::Ours, TIGHT);
    for n in 0..200 {
        let block = rig.alloc(varied(n), &rig.s(0));
        rig.free(block);
    }
    let block = rig.alloc(REQUEST.0, &rig.s(0));
    assert_eq!(block.bytes(), REQUEST.1);
    rig.free(block);
}

/// At the end of the next window, or when memory would grow.
#[test]
fn sizes_are_exact_again_when_the_hurry_is_over() {
    let (bytes, exact, few) = REQUEST;
    let program = Program::new("");
    program.hurry();
    program.pass(1_000_000_000);
    assert_eq!(program.bytes_for(bytes), few, "nobody looked at the time");
    program.churn(1, 0, |_| 64 * MIB);
    assert_eq!(program.bytes_for(bytes), exact);
    program.hurry();
    assert_eq!(program.bytes_for(bytes), few);
    // Too large to wait, so each searches.
    program.churn(100, 100_000, |n| (20 + n % 3) * MIB);
    assert_eq!(program.bytes_for(bytes), exact);
}

/// The first miss of a window is not the time of the program.
#[test]
fn a_miss_alone_ends_no_hurry() {
    let (bytes, _, few) = REQUEST;
    let program = Program::new("");
    program.hurry();
    program.pass(9_000_000);
    program.churn(1, 0, |_| 64 * MIB);
    assert_eq!(program.bytes_for(bytes), few);
}

/// Memory of private pools may be kept for good.
#[test]
fn private_pools_give_what_is_asked_for() {
    let program = Program::new("");
    let pool = program.rig.create_pool(DEV0, PoolOptions::default()).unwrap();
    for n in 0..200 {
        let block = program.rig.alloc_in(&pool, varied(n), &program.rig.s(0));
        program.rig.free(block);
        program.pass(1_000);
    }
    let block = program.rig.alloc_in(&pool, REQUEST.0, &program.rig.s(0));
    assert_eq!(block.bytes(), REQUEST.1);
    program.rig.free(block);
}

/// There must be a quarter more than was needed.
#[test]
fn memory_that_is_short_is_not_rounded_away() {
    let (bytes, exact, few) = REQUEST;
    for (limit, got) in [(50, few), (49, exact)] {
        let program = Program::new("");
        program.rig.set_memory_limit(DEV0, Some(limit * MIB)).unwrap();
        program.churn(1, 0, |_| 40 * MIB);
        program.hurry();
        assert_eq!(program.bytes_for(bytes), got, "of {limit} MiB");
    }
}

/// Where the device has less than it says, a request is tried as it was made before anything is given up.
#[test]
fn a_request_that_does_not_fit_rounded_is_served_exactly() {
    let machine = MockBackend::builder().device_with(18 * MIB, 80 * GIB);
    let program = Program::on(Rig::on(machine, Policy::Ours, TIGHT));
    let s0 = program.rig.s(0);
    let first = program.rig.alloc(10 * MIB - 300 * KIB, &s0);
    program.hurry();
    program.rig.empty_cache().unwrap();
    let bytes = 8 * MIB + 200 * KIB;
    let block = program.rig.alloc(bytes, &s0);
    assert_eq!((block.bytes(), program.rig.reserved()), (bytes, 18 * MIB));
    program.rig.free(first);
    program.rig.free(block);
    assert_eq!(program.bytes_for(REQUEST.0), REQUEST.1, "memory is short");
}
