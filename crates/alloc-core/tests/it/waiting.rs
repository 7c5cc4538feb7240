//! Freed blocks that wait to be asked for again in the same size (policy ours): who gets them, and
//! that nobody is short of memory because of them.

use crate::rig::*;
use alloc_core::{Addr, Allocation, Policy, StreamHandle};
use mock_backend::{Call, MockBackend, Rng};

/// Nothing is created ahead, so that any growth shows.
const TIGHT: &str = "expandable_segments:True,ours_margin:0,ours_margin_min_mb:0,ours_ahead:1";

fn rig(options: &str) -> Rig {
    Rig::new(Policy::Ours, &format!("{TIGHT}{options}"))
}

/// Blocks of `bytes`, one after the other in memory.
fn row(rig: &Rig, bytes: u64, count: usize) -> Vec<Allocation> {
    let row: Vec<_> = (0..count).map(|_| rig.alloc(bytes, &rig.s(0))).collect();
    assert!(row.windows(2).all(|two| two[0].addr() + bytes == two[1].addr()));
    row
}

fn addrs(row: &[Allocation]) -> Vec<Addr> {
    row.iter().map(Allocation::addr).collect()
}

fn free_all(rig: &Rig, row: Vec<Allocation>) {
    row.into_iter().for_each(|block| rig.free(block));
}

/// The block freed last comes first, as it was; a request of another size gets another one.
#[test]
fn a_request_gets_what_was_freed_in_its_size() {
    let rig = rig("");
    let mut blocks = row(&rig, 40 * KIB, 5);
    let was = addrs(&blocks);
    rig.free(blocks.remove(3));
    rig.free(blocks.remove(1));
    let other = rig.alloc(8 * KIB, &rig.s(0));
    assert!(other.addr() > was[4]);
    for expected in [was[1], was[3]] {
        let block = rig.alloc(40 * KIB - 100, &rig.s(0));
        assert_eq!((block.addr(), block.bytes()), (expected, 40 * KIB));
        blocks.push(block);
    }
    free_all(&rig, blocks);
    rig.free(other);
}

/// Neighbours that wait are merged before anybody else is asked for memory.
#[test]
fn what_waits_is_merged_before_memory_grows() {
    let rig = rig("");
    free_all(&rig, row(&rig, 64 * KIB, 32));
    rig.backend.take_log();
    rig.add_free_memory_callback("nobody", |_| panic!("there is memory"));
    let whole = row(&rig, 256 * KIB, 8);
    assert_eq!(rig.calls(Call::Create), []);
    assert_eq!(rig.reserved(), 2 * MIB);
    free_all(&rig, whole);
}

/// Another stream gets handles of which all that is free waits.
#[test]
fn what_waits_goes_to_other_streams() {
    let rig = rig("");
    free_all(&rig, row(&rig, 64 * KIB, 32));
    let elsewhere = rig.alloc(MIB / 4, &rig.s(1));
    assert_eq!(rig.reserved(), 2 * MIB);
    rig.free(elsewhere);
    rig.empty_cache().unwrap();
    assert_eq!(rig.reserved(), 0);
}

/// No more than allowed wait; with one more, all are merged.
#[test]
fn too_many_are_merged() {
    let rig = rig(",ours_waiting_max:4");
    let mut blocks = row(&rig, 8 * KIB, 6);
    let was = addrs(&blocks);
    let last = blocks.pop().unwrap();
    let fifth = blocks.pop().unwrap();
    free_all(&rig, blocks);
    let before = rig.alloc(32 * KIB, &rig.s(0));
    assert!(before.addr() > was[5], "four of them wait");
    rig.free(fifth);
    let merged = rig.alloc(40 * KIB, &rig.s(0));
    assert_eq!(merged.addr(), was[0]);
    free_all(&rig, vec![last, before, merged]);
}

/// Of large blocks the latest waits, until a request of another large size comes.
#[test]
fn one_large_block_waits() {
    let rig = rig("");
    let mut blocks = row(&rig, 4 * MIB, 3);
    let was = addrs(&blocks);
    let last = blocks.pop().unwrap();
    free_all(&rig, blocks);
    let again = rig.alloc(4 * MIB, &rig.s(0));
    assert_eq!(again.addr(), was[1]);
    rig.free(again);
    let both = rig.alloc(8 * MIB, &rig.s(0));
    assert_eq!(both.addr(), was[0]);
    assert_eq!(rig.reserved(), 12 * MIB);
    free_all(&rig, vec![last, both]);
}

/// A large block that is not expected back merges when it is freed. If the next large request is of its
/// size, it gets the block all the same, where it was.
#[test]
fn a_large_block_that_merged_is_served_where_it_was() {
    let rig = rig("");
    let mut blocks = row(&rig, 4 * MIB, 5);
    let was = addrs(&blocks);
    let mut free = |at: usize| {
        let at = blocks.iter().position(|block| block.addr() == was[at]).unwrap();
        rig.free(blocks.swap_remove(at));
    };
    let small = rig.alloc(3 * KIB, &rig.s(0));
    // Not asked for again, so the next ones are not expected back.
    free(0);
    let other = rig.alloc(3 * MIB, &rig.s(0));
    assert_eq!(other.addr(), was[0]);
    rig.free(other);
    free(2);
    free(3);
    // The best fit is the lowest free block of just that size.
    let served = [(); 3].map(|()| rig.alloc(4 * MIB, &rig.s(0)));
    assert_eq!(served.each_ref().map(|block| block.addr()), [was[3], was[0], was[2]]);
    assert_eq!(rig.reserved(), 22 * MIB);
    free_all(&rig, blocks);
    free_all(&rig, served.into());
    rig.free(small);
}

/// One in the middle of what it merged with is cut out on both sides; what is left is free.
#[test]
fn a_large_block_is_taken_back_from_the_middle() {
    let rig = rig("");
    let mut blocks = row(&rig, 4 * MIB, 4);
    let was = addrs(&blocks);
    let wall = blocks.pop().unwrap();
    let [low, middle, high] = <[_; 3]>::try_from(blocks).unwrap();
    rig.free(low);
    let other = rig.alloc(2 * MIB, &rig.s(0));
    rig.free(other);
    rig.free(high);
    rig.free(middle);
    let again = rig.alloc(4 * MIB, &rig.s(0));
    assert_eq!(again.addr(), was[1]);
    let both = [(); 2].map(|()| rig.alloc(4 * MIB, &rig.s(0)));
    assert_eq!(both.each_ref().map(|block| block.addr()), [was[0], was[2]]);
    assert_eq!(rig.reserved(), 16 * MIB);
    free_all(&rig, both.into());
    rig.free(again);
    rig.free(wall);
}

/// Sizes are few only where blocks wait.
#[test]
fn without_waiting_requests_are_rounded_to_512_bytes() {
    for (options, bytes) in [("", 18 * KIB), (",ours_waiting_max:0", 16 * KIB + 512)] {
        let rig = rig(options);
        let block = rig.alloc(16 * KIB + 1, &rig.s(0));
        assert_eq!(block.bytes(), bytes);
        rig.free(block);
    }
    // Nor where a rule keeps requests from blocks.
    for option in ["max_split_size_mb:64", "garbage_collection_threshold:0.5"] {
        let rig = rig(&format!(",{option}"));
        let block = rig.alloc(16 * KIB + 1, &rig.s(0));
        assert_eq!(block.bytes(), 16 * KIB + 512);
        rig.free(block);
    }
}

/// One of two allocators that do the same, which may be looked at after every operation.
struct Side {
    // Before the rig, whose end drops the allocator.
    handles: Vec<StreamHandle<MockBackend>>,
    rig: Rig,
    live: Vec<Allocation>,
    is_watched: bool,
}

impl Side {
    fn new(is_watched: bool) -> Self {
        let rig = Rig::of_size(512 * MIB, Policy::Ours, &format!("{TIGHT},ours_waiting_max:20"));
        let handles = (0..2).map(|n| rig.stream(&rig.s(n)).unwrap()).collect();
        Side { rig, handles, live: Vec::new(), is_watched }
    }

    fn allocate(&mut self, stream: usize, bytes: u64) -> String {
        match self.handles[stream].allocate(bytes) {
            Ok(block) => {
                let told = format!("{} {}", block.addr(), block.bytes());
                self.live.push(block);
                told
            }
            Err(error) => error.to_string(),
        }
    }

    fn free(&mut self, at: usize, by_address: bool) {
        let block = self.live.swap_remove(at);
        if by_address {
            self.rig.free_raw(block.addr()).unwrap();
        } else {
            self.handles[0].free(block).unwrap();
        }
    }

    fn step(&mut self, rng: &mut Rng) -> String {
        let live = self.live.len() as u64;
        let told = match rng.below(100) {
            0 => format!("{:?}", self.rig.empty_cache()),
            1..50 if live > 0 => {
                self.free(rng.below(live) as usize, rng.chance(0.2));
                String::new()
            }
            _ => {
                let unit = if rng.chance(0.8) { 512 } else { 300 * KIB };
                self.allocate(rng.below(2) as usize, (1 + rng.below(6)) * unit)
            }
        };
        if self.is_watched {
            self.rig.check().unwrap();
            self.rig.snapshot(DEV0).unwrap();
            self.rig.stats(DEV0).unwrap();
        }
        told
    }
}

/// Whoever looks at an allocator does not change what it does next.
#[test]
fn looking_changes_nothing() {
    for seed in 1..4 {
        let mut sides = [true, false].map(Side::new);
        let mut rngs = [Rng::new(seed), Rng::new(seed)];
        for n in 0..4_000 {
            let [watched, other] = [0, 1].map(|side: usize| sides[side].step(&mut rngs[side]));
            assert_eq!(watched, other, "step {n}");
        }
        for mut side in sides {
            side.live.drain(..).for_each(|block| side.handles[0].free(block).unwrap());
        }
    }
}
