//! Random operations under the judge and, with policy pytorch, beside the naive model: addresses,
//! every statistic, the trace and, now and then, all blocks are compared after every operation, and
//! everything is recomputed from scratch (`check()`). A failing sequence shrinks.
//!
//! Machine, options and operations are drawn for each case. `ALLOC_CORE_SEED` (a number) draws
//! others, `ALLOC_CORE_CASES` sets how many cases each test plays; each has a few hundred
//! operations. A long run, which needs optimised code to be quick:
//!
//! ```text
//! ALLOC_CORE_SEED=$RANDOM ALLOC_CORE_CASES=10000 cargo test --release -p alloc-core --test it machine
//! ```

use crate::rig::{GIB, MIB};
use mock_backend::Fault;
use mock_backend::strategy::ops;
use mock_backend::trial::{Failure, Trial, TrialConf};
use mock_backend::workload::{Op, Shape};
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};

/// Operations of one case.
const OPS: std::ops::Range<usize> = 300..400;
/// Cases of each test against the model, unless the environment says otherwise. Two tests make more
/// than 20,000 operations.
const CASES: u32 = 34;

/// Options that the allocator and the model both know, one choice from each line at most.
const OPTIONS: [&[&str]; 6] = [
    &["max_split_size_mb:64", "max_split_size_mb:70", "max_split_size_mb:100"],
    &["max_non_split_rounding_mb:64", "max_non_split_rounding_mb:80"],
    &["garbage_collection_threshold:0.2", "garbage_collection_threshold:0.7"],
    &[
        "roundup_power2_divisions:1",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:[1:2,4:8,>:2]",
        "roundup_power2_divisions:[>:4]",
    ],
    &["large_segment_size_mb:12", "large_segment_size_mb:32", "large_segment_size_mb:64"],
    &["expandable_segments:True"],
];

/// Options of policy ours alone, under which memory moves early, in small handles, and few views of it
/// are kept.
const OURS: [&[&str]; 9] = [
    &["ours_margin:0", "ours_margin:0.05"],
    &["ours_margin_min_mb:0", "ours_margin_min_mb:8"],
    &["ours_handle_max_mb:2", "ours_handle_max_mb:6", "ours_handle_max_mb:32"],
    &["ours_handle_calm_mb:2", "ours_handle_calm_mb:16", "ours_handle_share:4"],
    &["ours_part_min_kb:4", "ours_part_min_kb:4096"],
    &["ours_ahead:1", "ours_ahead:2", "ours_step:0.2"],
    &["ours_views_max:1", "ours_views_max:2"],
    &["ours_waiting_max:0", "ours_waiting_max:1", "ours_waiting_max:5"],
    &["ours_variety:1", "ours_variety:8"],
];

/// What a case is played on.
#[derive(Clone, Debug)]
struct Setting {
    options: String,
    ours: String,
    devices: u16,
    streams: u16,
    capacity: u64,
    /// Seed and probability of work ending by itself.
    chance: Option<(u64, f64)>,
    /// Seed and probability of failures.
    faults: Option<(u64, f64)>,
    shape: Shape,
}

fn options(lines: &'static [&'static [&'static str]]) -> impl Strategy<Value = String> {
    let choices: Vec<_> = lines.iter().map(|line| select(*line).boxed()).collect();
    (subsequence((0..lines.len()).collect::<Vec<_>>(), 0..=lines.len()), choices).prop_map(
        |(used, chosen)| used.into_iter().map(|n| chosen[n]).collect::<Vec<_>>().join(","),
    )
}

/// What a case is compared with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Against {
    /// The model, after every operation.
    Model,
    /// Nothing but the judge and the allocator's own check; so work may end by chance.
    Judge,
    /// The same, with failures injected.
    Faults,
}

fn setting(against: Against) -> impl Strategy<Value = Setting> {
    let machine = (1..=2u16, 1..=4u16, select(vec![96 * MIB, 200 * MIB, 512 * MIB, u64::MAX]));
    let chance = prop::option::weighted(0.3, (any::<u64>(), 0.05..0.5));
    let faults = (any::<u64>(), select(vec![0.002, 0.02, 0.2]));
    let flags = (any::<bool>(), any::<bool>(), prop::bool::weighted(0.6));
    let shape = (flags, select(vec![MIB, 12 * MIB, 64 * MIB]), 5..80u64);
    (options(&OPTIONS), options(&OURS), machine, chance, faults, shape).prop_map(
        move |(options, ours, (devices, streams, capacity), chance, faults, shape)| {
            let ((limited, toggles, pools), bytes_max, live) = shape;
            Setting {
                options,
                ours,
                devices,
                streams,
                capacity,
                chance: chance.filter(|_| against != Against::Model),
                faults: (against == Against::Faults).then_some(faults),
                shape: Shape {
                    streams: usize::from(devices * streams),
                    bytes_max,
                    live,
                    limits: limited.then_some((40 * MIB, 300 * MIB)),
                    toggles,
                    pools,
                },
            }
        },
    )
}

fn case(against: Against) -> impl Strategy<Value = (Setting, Vec<Op>)> {
    setting(against).prop_flat_map(|setting| {
        let ops = ops(setting.shape, OPS);
        (Just(setting), ops)
    })
}

fn play(conf: TrialConf, setting: &Setting, ops: &[Op]) -> Result<(), Failure> {
    let mut conf = conf.devices(setting.devices, setting.streams).capacity(setting.capacity);
    if let Some((seed, p)) = setting.chance {
        conf = conf.ends_by_chance(seed, p);
    }
    let mut trial = match setting.faults {
        Some(_) => Trial::new(&conf.without_model()),
        None => Trial::new(&conf),
    };
    if let Some((seed, p)) = setting.faults {
        trial.backend().set_faults([Fault::chance(seed, p)]);
    }
    ops.iter().try_for_each(|op| trial.play(op))?;
    trial.finish()
}

pub(crate) fn environment(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text}")))
}

/// Plays drawn cases with the settings that `conf` makes of the options.
fn run(against: Against, conf: fn(&Setting) -> TrialConf) {
    let seed = environment("ALLOC_CORE_SEED").unwrap_or(1);
    let cases = environment("ALLOC_CORE_CASES").map_or(CASES, |cases| cases as u32);
    let cases = if against == Against::Model { cases } else { cases.div_ceil(3) };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config =
        Config { cases, failure_persistence: None, max_shrink_iters: 5_000, ..Config::default() };
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let result = runner.run(&case(against), |(setting, ops)| {
        play(conf(&setting), &setting, &ops)
            .map_err(|failure| TestCaseError::fail(failure.to_string()))
    });
    match result {
        Ok(()) => {}
        Err(TestError::Fail(why, (setting, ops))) => {
            let count = ops.len();
            panic!("ALLOC_CORE_SEED={seed}: {why}\n{setting:?}\n{count} operations: {ops:#?}")
        }
        Err(TestError::Abort(why)) => panic!("ALLOC_CORE_SEED={seed}: {why}"),
    }
}

fn pytorch(setting: &Setting) -> TrialConf {
    TrialConf::pytorch(&setting.options)
}

/// With and without expandable segments; with them, memory moves.
fn ours(setting: &Setting) -> TrialConf {
    TrialConf::ours(&joined(&[&setting.options, &setting.ours]))
}

fn joined(options: &[&str]) -> String {
    let given: Vec<_> = options.iter().copied().filter(|options| !options.is_empty()).collect();
    given.join(",")
}

#[test]
fn ordinary_and_expandable_segments_agree_with_the_model() {
    run(Against::Model, pytorch);
}

#[test]
fn expandable_segments_agree_with_the_model() {
    run(Against::Model, |setting| {
        TrialConf::pytorch(&joined(&[&setting.options, "expandable_segments:True"]))
    });
}

/// The judge and the checker, that of views included (E4).
#[test]
fn policy_ours_passes_the_judge() {
    run(Against::Judge, ours);
    run(Against::Judge, |setting| {
        TrialConf::ours(&joined(&[&setting.options, &setting.ours, "expandable_segments:False"]))
    });
}

#[test]
fn injected_failures_change_nothing_else() {
    run(Against::Faults, pytorch);
    run(Against::Faults, ours);
}

/// No draw is wasted on a setting that is refused.
#[test]
fn every_option_is_valid() {
    for option in OPTIONS.into_iter().flatten() {
        let _ = TrialConf::pytorch(option);
    }
    for option in OPTIONS.into_iter().chain(OURS).flatten() {
        let _ = TrialConf::ours(option);
    }
}

/// The harness is awake: a sequence that ends in a use after free is reported, and shrinks to
/// little more than that.
#[test]
fn the_machine_notices() {
    let trial = Trial::new(&TrialConf::ours("").capacity(GIB));
    let stream = trial.backend().default_stream(alloc_core::DeviceId::new(0));
    let addr = trial.allocator().allocate_raw(MIB, &stream).unwrap();
    trial.backend().judge().allocated(addr, MIB, &stream);
    trial.allocator().free_raw(addr).unwrap();
    let mut trial = trial;
    let failure = trial.play(&Op::Allocate { bytes: MIB, stream: 0 }).unwrap_err();
    assert!(failure.what.contains("Overlap"), "{failure}");
}
