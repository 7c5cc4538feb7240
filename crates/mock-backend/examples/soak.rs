//! Long trials of the caching allocator: `soak [FIRST_SEED] [SEEDS] [OPERATIONS]`.
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
    let (Some(first), Some(seeds), Some(operations)) = (next(0), next(20), next(1000)) else {
        eprintln!("usage: soak [FIRST_SEED] [SEEDS] [OPERATIONS]");
        return ExitCode::from(2);
    };
    for seed in first..first + seeds {
        for settings in SETTINGS {
            if let Err(failure) = trials(seed, settings, operations as usize) {
                println!("seed {seed}, settings `{settings}`: {failure}");
                return ExitCode::FAILURE;
            }
        }
    }
    println!("{seeds} seeds, {} operations: clean", seeds * SETTINGS.len() as u64 * 4 * operations);
    ExitCode::SUCCESS
}

/// Against the model; with another device beside; by the own rules; with failures and work that ends
/// by chance.
fn trials(seed: u64, settings: &str, operations: usize) -> Result<(), Failure> {
    let shape = Shape { toggles: true, limits: Some((64 * MIB, 512 * MIB)), ..Shape::default() };
    let pytorch = TrialConf::pytorch(settings).capacity(768 * MIB);
    play(&pytorch, seed, shape, operations, 0.0)?;
    let two = pytorch.clone().devices(2, 3);
    play(&two, seed, Shape { streams: 6, ..shape }, operations, 0.0)?;
    let ours = TrialConf::ours(settings).capacity(768 * MIB);
    play(&ours, seed, shape, operations, 0.0)?;
    play(&ours.ends_by_chance(seed, 0.1), seed, shape, operations, 0.02)
}

fn play(
    conf: &TrialConf,
    seed: u64,
    shape: Shape,
    operations: usize,
    faults: f64,
) -> Result<(), Failure> {
    let mut trial = Trial::new(conf);
    if faults > 0.0 {
        trial.backend().set_faults([Fault::chance(seed, faults)]);
    }
    let mut ops = Workload::new(seed, shape).take(operations);
    ops.try_for_each(|op| trial.play(&op))?;
    trial.finish()
}
