//! Replays of real programs: PyTorch's own figures come out to the byte.

use alloc_lab::configuration::{Configuration, DEFAULT_CAPACITY, PolicyName};
use alloc_lab::engine::CoreEngine;
use alloc_lab::fit::fit;
use alloc_lab::format::read_workload;
use alloc_lab::replay::{Feed, Options, Outcome, replay};

use crate::trace;

fn run(name: &str, policy: PolicyName, conf: &str) -> Outcome {
    let workload = read_workload(&trace(name)).expect("a trace");
    let configuration = Configuration::new(policy, conf);
    let feed = configuration.takes_recorded_segments().expect("settings");
    let options = Options { capacity: DEFAULT_CAPACITY, feed, timing: false };
    let make = |plan: &_| CoreEngine::new(&configuration, plan);
    let outcome = replay(make, &workload, options, |_| {}).expect("an engine");
    assert_eq!(outcome.statistics_peak, outcome.driver.reserved_peak, "{name}");
    assert_eq!((outcome.stopped.as_ref(), outcome.ops), (None, workload.ops.len()), "{name}");
    outcome
}

/// Operations, peak requested, and what PyTorch reserved by default and with expandable segments.
const RECORDED: [(&str, usize, u64, u64, u64); 5] = [
    ("gpt_varlen", 69_287, 13_373_454_504, 23_465_033_728, 14_302_576_640),
    ("resnet", 34_823, 5_940_124_432, 8_501_854_208, 5_976_883_200),
    ("moe", 127_387, 16_218_589_060, 17_280_532_480, 17_630_756_864),
    ("unet_res", 16_074, 8_007_946_696, 13_526_630_400, 8_319_401_984),
    ("rlhf", 543_348, 4_121_508_120, 4_689_231_872, 4_301_258_752),
];

#[track_caller]
fn assert_as_recorded(name: &str) {
    let recorded = RECORDED.iter().find(|row| row.0 == name).expect("a recorded trace");
    let &(_, ops, requested, reserved, expandable) = recorded;
    let default = run(name, PolicyName::Pytorch, "");
    assert_eq!(default.feed, Feed::Exact);
    assert_eq!((default.ops, default.requested_peak), (ops, requested));
    assert_eq!(default.driver.reserved_peak, reserved);
    if name == "rlhf" && cfg!(debug_assertions) {
        return; // Half a million operations once more take too long without optimisation.
    }
    let grown = run(name, PolicyName::Pytorch, "expandable_segments:True");
    assert_eq!((grown.feed, grown.driver.reserved_peak), (Feed::Unused, expandable));
}

#[test]
fn gpt_varlen_is_as_recorded() {
    assert_as_recorded("gpt_varlen");
}

#[test]
fn resnet_is_as_recorded() {
    assert_as_recorded("resnet");
}

#[test]
fn moe_is_as_recorded() {
    assert_as_recorded("moe");
}

#[test]
fn unet_res_is_as_recorded() {
    assert_as_recorded("unet_res");
}

#[test]
fn rlhf_is_as_recorded() {
    assert_as_recorded("rlhf");
}

/// Policy `ours` reserves at most 1 % more than is requested at the peak (1.6 % in `moe`), for at most
/// twice the time in the driver that PyTorch's expandable segments take and 1 % of the program's.
#[track_caller]
fn assert_frugal(name: &str, excess_max: f64) {
    let ours = run(name, PolicyName::Ours, "");
    let excess = ours.driver.reserved_peak as f64 / ours.requested_peak as f64 - 1.0;
    assert!(excess <= excess_max, "{name}: {excess}");
    let wall_ns = read_workload(&trace(name)).expect("a trace").wall_us * 1000;
    assert!(ours.driver.stall_ns * 100 <= wall_ns, "{name}: {:?} of {wall_ns}", ours.driver);
    let expandable = run(name, PolicyName::Pytorch, "expandable_segments:True").driver.stall_ns;
    assert!(ours.driver.stall_ns <= 2 * expandable, "{name}: {:?}, {expandable}", ours.driver);
}

#[test]
fn ours_is_frugal_on_gpt_varlen() {
    assert_frugal("gpt_varlen", 0.01);
}

#[test]
fn ours_is_frugal_on_resnet() {
    assert_frugal("resnet", 0.01);
}

#[test]
fn ours_is_frugal_on_moe() {
    assert_frugal("moe", 0.016);
}

#[test]
fn ours_is_frugal_on_unet_res() {
    assert_frugal("unet_res", 0.01);
}

#[test]
fn ours_is_frugal_on_rlhf() {
    assert_frugal("rlhf", 0.01);
}

/// What `reserved_peak` counts is what the allocator says it holds, and the driver's account adds
/// up.
#[test]
fn the_account_of_the_driver_adds_up() {
    let whole = run("unet_res", PolicyName::Pytorch, "");
    assert_eq!((whole.driver.segments, whole.driver.calls), (59, 59));
    assert_eq!((whole.driver.handles_created, whole.driver.pages_remapped), (0, 0));
    let grown = run("unet_res", PolicyName::Pytorch, "expandable_segments:True").driver;
    assert_eq!((grown.segments, grown.pages_remapped), (2, 0));
    // A page is created and mapped once; access is set over runs of them.
    let handles = grown.handles_created;
    assert!((2 * handles..=3 * handles + 2).contains(&grown.calls), "{grown:?}");
    assert!(grown.stall_ns > 10_000 * handles);
}

#[test]
fn the_smallest_device_is_found_and_one_step_less_fails() {
    let workload = read_workload(&trace("resnet")).expect("a trace");
    let configuration = Configuration::new(PolicyName::Pytorch, "expandable_segments:True");
    let make = |plan: &_| CoreEngine::new(&configuration, plan);
    let found = fit(make, &workload, "x", |_, _| {}).expect("a size");
    assert!(found.capacity >= workload.requested_peak);
    assert!(found.capacity < found.unlimited_peak);
    let completes = |capacity| {
        let options = Options { capacity, feed: false, timing: false };
        replay(make, &workload, options, |_| {}).expect("an engine").stopped.is_none()
    };
    assert!(completes(found.capacity));
    assert!(!completes(found.capacity - alloc_lab::fit::STEP));
}
