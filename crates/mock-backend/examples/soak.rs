//! Long trials of the caching allocator: `soak [FIRST_SEED] [SEEDS] [OPERATIONS] [FAULTS]`,
//! the last one in thousandths of the driver calls.
//!
//! Every seed plays its workload under each configuration. Ends with status 1 at the first failure
//! and prints what repeats it.

use std::process::ExitCode;

use mock_backend::Fault;
use mock_backend::trial::{Failure, Trial, TrialConf};
use mock_backend::workload::{Shape, Workload};

const MIB: u64 = 1 << 20;

const SETTINGS: [&str; 6] = [
    "",
    "max_split_size_mb:24,garbage_collection_threshold:0.6",
    "roundup_power2_divisions:[1:4,2:2,>:8]",
    "expandable_segments:True",
    "expandable_segments:True,garbage_collection_threshold:0.7",
    "expandable_segments:True,max_split_size_mb:40,large_segment_size_mb:32",
];

fn main() -> ExitCode {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<u64>().ok());
    let mut next = |usual| numbers.next().map_or(Some(usual), |number| number);
    let (Some(first), Some(seeds), Some(operations), Some(faults)) =
        (next(0), next(20), next(1000), next(20))
    else {
        eprintln!("usage: soak [FIRST_SEED] [SEEDS] [OPERATIONS] [FAULTS]");
        return ExitCode::from(2);
    };
    let faults = faults as f64 / 1000.0;
    for seed in first..first + seeds {
        for settings in SETTINGS {
            for (what, conf, streams, faults) in trials(seed, settings, faults) {
                if let Err(failure) = play(&conf, seed, streams, operations as usize, faults) {
                    println!("seed {seed}, settings `{settings}`, {what}: {failure}");
                    return ExitCode::FAILURE;
                }
            }
        }
    }
    println!("{seeds} seeds, {} operations: clean", seeds * SETTINGS.len() as u64 * 4 * operations);
    ExitCode::SUCCESS
}

/// What it is, its configuration, number of streams, probability of failures.
fn trials(seed: u64, settings: &str, faults: f64) -> [(&'static str, TrialConf, usize, f64); 4] {
    let pytorch = TrialConf::pytorch(settings).capacity(768 * MIB);
    let ours = TrialConf::ours(settings).capacity(768 * MIB);
    let by_chance = ours.clone().ends_by_chance(seed, 0.1);
    [
        ("against the model", pytorch.clone(), 3, 0.0),
        ("two devices against the model", pytorch.devices(2, 3), 6, 0.0),
        ("own rules", ours, 3, 0.0),
        ("own rules, failures, work ending by chance", by_chance, 3, faults),
    ]
}

fn play(
    conf: &TrialConf,
    seed: u64,
    streams: usize,
    operations: usize,
    faults: f64,
) -> Result<(), Failure> {
    let limits = Some((64 * MIB, 512 * MIB));
    let shape = Shape { streams, toggles: true, limits, pools: true, ..Shape::default() };
    let mut trial = Trial::new(conf);
    if faults > 0.0 {
        trial.backend().set_faults([Fault::chance(seed, faults)]);
    }
    let mut ops = Workload::new(seed, shape).take(operations);
    ops.try_for_each(|op| trial.play(&op))?;
    trial.finish()
}
