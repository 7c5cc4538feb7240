//! Sizes that live long have addresses of their own (policy ours): what tells them, where they go and
//! who else does; and the sizes of handles, which follow from it.

use crate::rig::*;
use alloc_core::{Addr, Allocation, Policy};
use mock_backend::Call;

const WEIGHT: u64 = 16 * MIB;

/// Nothing is created ahead, so that any growth shows.
fn rig(options: &str) -> Rig {
    let tight = "expandable_segments:True,ours_margin:0,ours_margin_min_mb:0,ours_margin_calm:0,\
                 ours_ahead:1,ours_waiting_max:0";
    Rig::new(Policy::Ours, &format!("{tight},{options}"))
}

fn segment(rig: &Rig, block: &Allocation) -> Addr {
    rig.locate(block.addr()).unwrap().segment
}

/// Allocates and frees until as much as lives has been allocated `turnovers` times.
fn turn(rig: &Rig, live: u64, turnovers: u64) {
    let rounds = (live * turnovers).div_ceil(40 * MIB);
    (0..rounds).for_each(|_| rig.free(rig.alloc(40 * MIB, &rig.s(0))));
}

fn created(rig: &Rig) -> Vec<u64> {
    let log = rig.backend.take_log();
    let created = log.iter().filter(|entry| entry.info.call == Call::Create);
    created.map(|entry| entry.info.bytes / MIB).collect()
}

struct Trained {
    rig: Rig,
    weights: Vec<Allocation>,
    /// What activations are allocated in; live.
    activations: Allocation,
}

/// Weights have outlived activations for four turnovers.
fn trained(options: &str) -> Trained {
    let rig = rig(options);
    let weights: Vec<_> = (0..2).map(|_| rig.alloc(WEIGHT, &rig.s(0))).collect();
    turn(&rig, 2 * WEIGHT + 40 * MIB, 4);
    let activations = rig.alloc(40 * MIB, &rig.s(0));
    assert_eq!(segment(&rig, &activations), segment(&rig, &weights[0]));
    Trained { rig, weights, activations }
}

impl Trained {
    fn ends(self, others: Vec<Allocation>) {
        let all = self.weights.into_iter().chain([self.activations]).chain(others);
        all.for_each(|block| self.rig.free(block));
        self.rig.empty();
        assert_eq!(self.rig.reserved(), 0);
    }
}

#[test]
fn sizes_that_stay_grow_apart_from_those_that_pass() {
    let trained = trained("");
    let rig = &trained.rig;
    let home = segment(rig, &trained.activations);
    let state = rig.alloc(WEIGHT, &rig.s(0));
    assert_ne!(segment(rig, &state), home, "as large as the weights: it will stay");
    let near = rig.alloc(WEIGHT + WEIGHT / 200, &rig.s(0));
    assert_eq!(segment(rig, &near), segment(rig, &state), "nearly as large");
    let passing = rig.alloc(36 * MIB, &rig.s(0));
    assert_eq!(segment(rig, &passing), home, "of a size that nobody has seen");
    trained.ends(vec![state, near, passing]);
}

/// With a threshold that nothing reaches, and with none, all sizes share their addresses.
#[test]
fn the_threshold_can_be_set_and_0_is_never() {
    for (options, apart) in
        [("ours_lasting:4", true), ("ours_lasting:40", false), ("ours_lasting:0", false)]
    {
        let trained = trained(options);
        let state = trained.rig.alloc(WEIGHT, &trained.rig.s(0));
        let home = segment(&trained.rig, &trained.activations);
        assert_eq!(segment(&trained.rig, &state) != home, apart, "{options}");
        trained.ends(vec![state]);
    }
}

/// What lies free serves whoever fits, wherever it belongs: no driver call for a free block.
#[test]
fn free_memory_serves_both_kinds() {
    let Trained { rig, weights, activations } = trained("");
    let (home, room) = (segment(&rig, &activations), rig.reserved());
    rig.free(activations);
    rig.backend.take_log();
    let state = rig.alloc(WEIGHT, &rig.s(0));
    assert_eq!(segment(&rig, &state), home);
    // No free block is left that holds another two.
    let more: Vec<_> = (0..2).map(|_| rig.alloc(WEIGHT, &rig.s(0))).collect();
    let away = segment(&rig, &more[1]);
    assert_ne!(away, home);
    let grown = rig.reserved();
    assert!(grown > room);
    let [first, last] = <[_; 2]>::try_from(more).unwrap();
    rig.free(last);
    rig.backend.take_log();
    let passing = rig.alloc(12 * MIB, &rig.s(0));
    assert_eq!((segment(&rig, &passing), rig.calls(Call::Map)), (away, vec![]));
    Trained { rig, weights, activations: passing }.ends(vec![state, first]);
}

/// Idle memory of the one moves to the other rather than that memory grows.
#[test]
fn memory_moves_between_them() {
    let Trained { rig, weights, activations } = trained("ours_handle_max_mb:8");
    let state = rig.alloc(WEIGHT, &rig.s(0));
    let peak = rig.reserved();
    rig.free(activations);
    rig.backend.take_log();
    // More than lies free at home, less than is idle in all.
    rig.free(state);
    let large = rig.alloc(48 * MIB, &rig.s(0));
    assert_eq!(created(&rig), []);
    assert_eq!(rig.reserved(), peak);
    Trained { rig, weights, activations: large }.ends(vec![]);
}

/// What lasts is not moved, so that it may have handles as large as itself.
#[test]
fn what_lasts_has_larger_handles() {
    let trained = trained("ours_handle_max_mb:12");
    created(&trained.rig);
    let state = trained.rig.alloc(WEIGHT, &trained.rig.s(0));
    assert_eq!(created(&trained.rig), [16]);
    let passing = trained.rig.alloc(36 * MIB, &trained.rig.s(0));
    assert_eq!(created(&trained.rig), [12, 12, 12]);
    trained.ends(vec![state, passing]);
}

/// What is freed and asked for again at once has stayed: waiting for it is no death.
#[test]
fn a_block_that_is_asked_for_again_lives_on() {
    let rig = rig("ours_waiting_max:8");
    let weight = rig.alloc(WEIGHT, &rig.s(0));
    for _ in 0..40 {
        rig.free(rig.alloc(40 * MIB, &rig.s(0)));
    }
    // One block of 40 MiB was taken from memory, and no time has passed since.
    let activations = rig.alloc(40 * MIB, &rig.s(0));
    let state = rig.alloc(WEIGHT, &rig.s(0));
    assert_eq!(segment(&rig, &state), segment(&rig, &weight));
    [weight, activations, state].into_iter().for_each(|block| rig.free(block));
}

/// Where memory only grows its handles become larger, and a little more of it is reserved; where it
/// does not, no more than is needed.
#[test]
fn loading_weights_takes_few_handles() {
    let load = |calm: &str| {
        let rig = Rig::new(
            Policy::Ours,
            &format!(
                "expandable_segments:True,ours_margin_calm:{calm},ours_margin:0.002,\
                 ours_margin_min_mb:8,ours_lasting:0"
            ),
        );
        let weights: Vec<_> = (0..600).map(|_| rig.alloc(9 * MIB, &rig.s(0))).collect();
        let beyond = rig.reserved() - 600 * 9 * MIB;
        let handles = created(&rig);
        weights.into_iter().for_each(|block| rig.free(block));
        (handles.len(), beyond)
    };
    let [(usual, _), (calm, beyond)] = ["0", "0.05"].map(load);
    assert!(calm * 6 < usual * 5, "{calm} handles instead of {usual}");
    assert!(beyond <= 64 * MIB, "{beyond}");
}

/// A large request ends in a small handle, of new ones and of old ones.
#[test]
fn the_last_handles_of_a_range_are_the_smallest() {
    let rig = rig("ours_lasting:0,ours_handle_max_mb:12,ours_handle_parts:14");
    let large = rig.alloc(210 * MIB, &rig.s(0));
    let handles = created(&rig);
    assert_eq!(handles[..14], [14; 14]);
    assert_eq!(handles[14..], [8, 4, 2]);
    let few = rig.alloc(22 * MIB, &rig.s(0));
    assert_eq!(created(&rig), [12, 10], "of few handles nothing is gained");
    // The small one became free first.
    let [small, wall] = [4, 2].map(|mib| rig.alloc(mib * MIB, &rig.s(0)));
    rig.free(small);
    rig.free(few);
    rig.backend.take_log();
    let both = rig.alloc(26 * MIB, &rig.s(1));
    let mapped = rig.backend.take_log();
    let mapped = mapped.iter().filter(|entry| entry.info.call == Call::Map);
    let mapped: Vec<_> = mapped.map(|entry| entry.info.bytes / MIB).collect();
    assert_eq!(mapped, [12, 10, 4]);
    [large, wall, both].into_iter().for_each(|block| rig.free(block));
}
