//! Long runs of random operations in which memory moves all the time (policy ours), under the judge,
//! with everything recomputed from scratch after each operation. Machine, options and sizes change every
//! thousand operations or so; on some machines calls of the driver fail.
//!
//! `ALLOC_CORE_SEED` draws other runs, `ALLOC_CORE_CASES` sets their length: a case is 300 operations.
//! A million:
//!
//! ```text
//! ALLOC_CORE_CASES=3334 cargo test --release -p alloc-core --test it machine_moving -- --nocapture
//! ```

use crate::machine::environment;
use crate::rig::{DEV0, GIB, KIB, MIB};
use mock_backend::trial::{Trial, TrialConf};
use mock_backend::workload::{Op, Shape, Workload};
use mock_backend::{Call, Fault, Rng};
use std::sync::Mutex;
use std::time::Duration;

/// Operations of one machine.
const ROUND: u64 = 1_500;
/// Operations of one case.
const CASE: u64 = 300;
/// Cases, unless the environment says otherwise.
const CASES: u64 = 67;

/// What a run was made of.
#[derive(Clone, Copy, Default, Debug)]
struct Tally {
    operations: u64,
    creates: u64,
    /// Handles mapped once more.
    remaps: u64,
    unmaps: u64,
    /// Pieces of free memory that changed their address, by a mapping or back to an old view; those
    /// since the last operation that reset the counters.
    moves: u64,
    faults: u64,
    ooms: u64,
}

impl Tally {
    fn add(&mut self, trial: &Trial) {
        let costs = trial.backend().costs();
        let creates = costs.calls(Call::Create);
        self.creates += creates;
        self.remaps += costs.calls(Call::Map).saturating_sub(creates);
        self.unmaps += costs.calls(Call::Unmap);
        self.faults += trial.backend().fault_counts().1;
        let stats = trial.allocator().stats(DEV0).unwrap();
        self.moves += stats.counters.num_moves as u64;
        self.ooms += stats.counters.num_ooms as u64;
    }
}

/// Settings under which memory moves early, and views go now and then.
fn options(rng: &mut Rng) -> String {
    let mut choose = |choices: &[u64]| choices[rng.below(choices.len() as u64) as usize];
    format!(
        "ours_margin:0,ours_margin_min_mb:{},ours_handle_max_mb:{},ours_handle_calm_mb:{},\
         ours_part_min_kb:{},ours_ahead:{},ours_views_max:{},ours_collisions:{},\
         ours_shard_max_kb:{},ours_lasting:{},ours_margin_calm:{},ours_variety:{}",
        choose(&[0, 8]),
        choose(&[2, 6, 14]),
        choose(&[2, 32]),
        choose(&[4, 1024]),
        choose(&[1, 4]),
        choose(&[1, 2, 8]),
        // The thread has a shard from the start, or none.
        choose(&[0, 64]),
        choose(&[64, 512, 2048]),
        choose(&[0, 1, 3]),
        ["0", "0.05"][choose(&[0, 0, 0, 1]) as usize],
        choose(&[0, 1, 4, 32]),
    )
}

fn round(rng: &mut Rng, operations: u64, tally: &mut Tally) -> Result<(), String> {
    let capacity = [96 * MIB, 256 * MIB, 768 * MIB, GIB][rng.below(4) as usize];
    let streams = 1 + rng.below(3) as u16;
    let options = options(rng);
    let mut conf = TrialConf::ours(&options).devices(1, streams).capacity(capacity);
    if rng.chance(0.5) {
        conf = conf.ends_by_chance(rng.next_u64(), 0.2);
    }
    let mut trial = Trial::new(&conf);
    if rng.chance(0.25) {
        trial.backend().set_faults([Fault::chance(rng.next_u64(), 0.01)]);
    }
    if rng.chance(0.4) {
        trial.allocator().set_clock(uneven_clock(rng.next_u64()));
    }
    let live = 10 + rng.below(50);
    let bytes_max = [12 * MIB, 64 * MIB][rng.below(2) as usize];
    let shape = Shape { streams: streams.into(), bytes_max, live, ..Shape::default() };
    let mut work = Workload::new(rng.next_u64(), shape);
    let result = (|| {
        for _ in 0..operations {
            let op = work.next().map(|op| mostly_large(op, rng, bytes_max));
            op.map_or(Ok(()), |op| trial.play(&op))?;
        }
        tally.add(&trial);
        tally.operations += operations;
        trial.finish()
    })();
    result.map_err(|failure| format!("{failure}\non {capacity} bytes, {shape:?}, {options}"))
}

/// Time that passes in hops, from look to look: mostly short ones, in which many frees can come fast.
fn uneven_clock(seed: u64) -> impl Fn() -> Duration + Send + Sync {
    let state = Mutex::new((Rng::new(seed), Duration::ZERO));
    move || {
        let (rng, now) = &mut *state.lock().unwrap();
        let hops = [0, 1, 10, 100, 20_000].map(Duration::from_micros);
        *now += hops[rng.below(5) as usize];
        *now
    }
}

/// Memory moves when requests are large and what was cached stays.
fn mostly_large(op: Op, rng: &mut Rng, bytes_max: u64) -> Op {
    match op {
        Op::Allocate { bytes, stream } if bytes < 256 * KIB && rng.chance(0.8) => {
            Op::Allocate { bytes: rng.between(256 * KIB, bytes_max), stream }
        }
        Op::EmptyCache | Op::FreeAll if rng.chance(0.95) => {
            Op::Free { pick: rng.next_u64() as u32 }
        }
        op => op,
    }
}

#[test]
fn memory_moves_and_the_judge_finds_nothing() {
    let operations = CASE * environment("ALLOC_CORE_CASES").unwrap_or(CASES);
    let seed = environment("ALLOC_CORE_SEED").unwrap_or(1);
    let mut tally = Tally::default();
    let mut number = 0;
    while tally.operations < operations {
        let mut rng = Rng::new(seed.wrapping_mul(1_000_003).wrapping_add(number));
        let now = ROUND.min(operations - tally.operations);
        if let Err(why) = round(&mut rng, now, &mut tally) {
            panic!("ALLOC_CORE_SEED={seed}, round {number}: {why}");
        }
        number += 1;
    }
    println!("{tally:?}");
    // It was about something.
    let moved_often = tally.moves > operations / 200 && tally.remaps > operations / 200;
    assert!(moved_often && tally.unmaps > 0, "{tally:?}");
}
