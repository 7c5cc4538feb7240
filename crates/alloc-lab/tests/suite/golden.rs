//! Every recording, address for address, statistic for statistic.

use alloc_core::TraceAction;
use alloc_lab::engine::{CoreEngine, Engine, Recorded};
use alloc_lab::format::golden::{Op, Recording, Segment};
use alloc_lab::verify::{Comparison, Mismatch, verify};

use crate::golden_dir;

fn recording(name: &str) -> Recording {
    Recording::open(&golden_dir().join(format!("{name}.json.gz"))).expect("a recording")
}

fn compare(recording: &Recording) -> Comparison {
    let mut engine = CoreEngine::for_recording(&golden_dir(), recording).expect("an engine");
    verify(&mut engine, recording, || {})
}

#[track_caller]
fn assert_exact(name: &str, ops: usize, trace_entries: usize) {
    let exact = Comparison { ops, trace_entries, mismatches: 0, first: None };
    assert_eq!(compare(&recording(name)), exact, "{name}");
}

/// The first difference of a recording that `spoil` changed.
fn first_of(name: &str, spoil: impl FnOnce(&mut Recording)) -> Mismatch {
    let mut recording = recording(name);
    spoil(&mut recording);
    compare(&recording).first.expect("a difference")
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
fn pools_and_captures_are_exact() {
    for (name, ops, trace_entries) in [
        ("pools-1", 1599, 2701),
        ("pools-nosplit", 1252, 2201),
        ("pools-exp", 1630, 2690),
        ("graphs-2", 2786, 4208),
    ] {
        assert_exact(name, ops, trace_entries);
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

/// The same for what only recordings with pools have.
#[test]
fn a_changed_fact_about_pools_is_found() {
    let mut listed = 0;
    let owner = first_of("pools-1", |r| {
        let later = r.ops.iter_mut().enumerate().skip(800);
        let mut lists = later.filter_map(|(i, step)| Some((i, step.segments.as_mut()?)));
        let private = |(_, list): &(usize, &mut Vec<Segment>)| {
            list.iter().any(|segment| segment.pool.is_some_and(|pool| pool != (0, 0)))
        };
        let (at, list) = lists.find(private).expect("a list with a pool");
        let segment = list.iter_mut().find(|segment| segment.pool != Some((0, 0)));
        segment.expect("a segment of a pool").pool = Some((0, 999));
        listed = at;
    });
    assert_eq!(owner.operation, listed);
    assert!(owner.what.starts_with("segment"), "{owner}");

    // Scopes are what sends requests to pools.
    let mut scoped = 0;
    let scope = first_of("pools-1", |r| {
        let steps = r.ops.iter_mut().enumerate();
        for (at, step) in steps {
            if let Op::Alloc { inner: inner @ Some(_), .. } = &mut step.op {
                *inner = None;
                scoped = at;
                return;
            }
        }
    });
    assert!(scope.operation >= scoped && scoped > 0, "{scope}");

    // A reference that is not given back keeps the memory of a pool from the flush.
    let reference = first_of("graphs-2", |r| {
        let deleted = r.ops.iter_mut().find(|step| matches!(step.op, Op::GraphDelete(_)));
        deleted.expect("a graph is deleted").op = Op::Sync;
    });
    assert!(reference.to_string().contains("reserved") || reference.what.starts_with("trace"));

    let blocks = first_of("pools-nosplit", |r| {
        let unsplit = |op: &Op| matches!(op, Op::PoolNew { no_split: true, .. });
        let step = r.ops.iter_mut().find(|step| unsplit(&step.op)).expect("such a pool");
        if let Op::PoolNew { no_split, .. } = &mut step.op {
            *no_split = false;
        }
    });
    assert_ne!(blocks.operation, 0);
}

/// PyTorch's order of pools comes from a hash table: without being told, another one shows.
#[test]
fn the_order_of_pools_in_a_flush_is_fed() {
    let recording = recording("graphs-2");
    let order = |releases: &[u64]| {
        let mut engine = CoreEngine::for_recording(&golden_dir(), &recording).expect("an engine");
        let mut addrs = Vec::new();
        for n in 1..=2 {
            engine.begin_capture(n, (u64::from(n), 0), None, 1).expect("a capture");
            addrs.push(engine.allocate(n as usize, 1 << 20, 1).expect("memory"));
            engine.end_capture(n).expect("its end");
            engine.free(n as usize).expect("a free");
            engine.delete_graph(n).expect("a graph");
        }
        let fed: Vec<u64> = releases.iter().map(|n| addrs[*n as usize]).collect();
        engine.feed_releases(&fed).expect("a feed");
        engine.empty_cache().expect("a flush");
        let mut trace = Vec::new();
        engine.take_trace(&mut trace);
        let freed = trace.iter().filter(|row| row.action == TraceAction::SegmentFree);
        freed.map(|row| addrs.iter().position(|addr| *addr == row.addr)).collect::<Vec<_>>()
    };
    assert_eq!(order(&[]), [Some(0), Some(1)]);
    assert_eq!(order(&[1, 0]), [Some(1), Some(0)]);
    assert_eq!(order(&[1]), [Some(1), Some(0)]);
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
