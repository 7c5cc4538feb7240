//! Every recording, address for address, statistic for statistic.

use alloc_lab::engine::CoreEngine;
use alloc_lab::format::golden::{Op, Recording};
use alloc_lab::verify::{Comparison, Mismatch, Verdict, verify};

use crate::golden_dir;

fn recording(name: &str) -> Recording {
    Recording::open(&golden_dir().join(format!("{name}.json.gz"))).expect("a recording")
}

fn compare(recording: &Recording) -> Verdict {
    let mut engine = CoreEngine::for_recording(&golden_dir(), recording).expect("an engine");
    verify(&mut engine, recording, || {})
}

#[track_caller]
fn assert_exact(name: &str, ops: usize, trace_entries: usize) {
    let exact = Comparison { ops, trace_entries, mismatches: 0, first: None };
    assert_eq!(compare(&recording(name)), Verdict::Compared(exact), "{name}");
}

/// The first difference of a recording that `spoil` changed.
fn first_of(name: &str, spoil: impl FnOnce(&mut Recording)) -> Mismatch {
    let mut recording = recording(name);
    spoil(&mut recording);
    match compare(&recording) {
        Verdict::Compared(Comparison { first: Some(first), .. }) => first,
        other => panic!("{other:?}"),
    }
}

#[test]
fn segments_are_exact() {
    for (name, ops, trace_entries) in [
        ("default-one", 3112, 4758),
        ("default-multi", 3531, 4806),
        ("default-large", 1409, 2046),
        ("roundup4", 3601, 4938),
        ("rlist-rest", 1250, 1915),
        ("nonsplit", 2547, 4087),
        ("lseg64", 2120, 3256),
    ] {
        assert_exact(name, ops, trace_entries);
    }
}

#[test]
fn statistics_and_streams_are_exact() {
    assert_exact("stats-full", 2978, 4072);
    assert_exact("streams", 3116, 4006);
}

#[test]
fn limits_are_exact() {
    for (name, ops, trace_entries) in [
        ("tight-default", 3544, 4793),
        ("tight-split", 3497, 4917),
        ("gc", 3515, 4785),
        ("gc5-large", 1530, 2424),
    ] {
        assert_exact(name, ops, trace_entries);
    }
}

#[test]
fn expandable_segments_are_exact() {
    for (name, ops, trace_entries) in [
        ("exp-one", 3115, 4748),
        ("exp-tight", 3502, 4736),
        ("exp-churn0", 3717, 5747),
        ("exp-gc", 2897, 3994),
        ("exp-toggle", 2966, 4067),
    ] {
        assert_exact(name, ops, trace_entries);
    }
}

#[test]
fn recordings_with_pools_are_not_taken_for_exact() {
    for name in ["pools-1", "pools-nosplit", "pools-exp", "graphs-2"] {
        let verdict = compare(&recording(name));
        assert!(matches!(verdict, Verdict::Unsupported(_)), "{name}: {verdict:?}");
    }
}

/// A comparison that cannot fail would prove nothing: each kind of fact, changed by one, is found
/// where it was changed.
#[test]
fn a_changed_fact_is_found() {
    let ptr = first_of("default-one", |r| {
        let ptr = r.ops[500..].iter_mut().find_map(|step| step.ptr.as_mut());
        *ptr.expect("an allocation") += 512;
    });
    assert_eq!(ptr.what, "ptr");
    assert!((500..510).contains(&ptr.operation), "{ptr}");

    let key = "inactive_split_bytes.small_pool.peak";
    let stat = first_of("stats-full", |r| {
        let at = r.stat_keys.iter().position(|name| name == key).expect("the statistic");
        r.ops[1000].stats.as_mut().expect("statistics")[at] -= 1;
    });
    assert_eq!((stat.operation, stat.what.as_str()), (1000, key));

    let entry = first_of("exp-one", |r| r.trace[2000].bytes += 1);
    assert!(entry.what.starts_with("trace entry"), "{entry}");
}

/// The feed follows the recording, so a wrong size would go unnoticed if only addresses were
/// compared.
#[test]
fn another_setting_than_the_recorded_one_is_found() {
    let mismatch = first_of("lseg64", |r| r.conf.clear());
    assert_eq!(mismatch.operation, 0);
    let mismatch = first_of("tight-default", |r| r.ops[0].op = Op::Cap(1 << 30));
    assert_ne!(mismatch.operation, 0);
}
