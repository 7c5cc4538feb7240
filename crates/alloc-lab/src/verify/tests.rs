//! Comparison against recordings of the fake engine, each spoilt in one place.

use super::*;
use crate::engine::fake::Fake;

const MIB: u64 = 1 << 20;
const A: u64 = 0x7f00_0000_0000;
const B: u64 = 0x7e00_0000_0000;

/// What the fake engine does with a limit of 4 MiB and segments at `A`, `B` and `A` again.
fn recording() -> Recording {
    let text = format!(
        r#"{{"name": "t", "conf": "", "streams": 1, "device_total": {total},
        "stat_keys": ["active.all.current", "num_ooms", "reserved_bytes.all.current"],
        "ops": [
            {{"op": ["cap", {cap}], "ptr": null, "stats": [0, 0, 0]}},
            {{"op": ["alloc", 1, 1000, 0], "ptr": {A}, "stats": [1, 0, {two}]}},
            {{"op": ["alloc", 2, 0, 0], "ptr": 0, "stats": [1, 0, {two}]}},
            {{"op": ["free", 2], "ptr": null, "stats": [1, 0, {two}]}},
            {{"op": ["free", 1], "ptr": null, "stats": [0, 0, {two}],
              "segments": [[null, {A}, {two}, 0, "large", [[{A}, {two}, 77, "inactive"]]]]}},
            {{"op": ["alloc", 3, {four}, 0], "ptr": {B}, "stats": [1, 0, {four}]}},
            {{"op": ["alloc", 4, 9, 0], "ptr": 0, "stats": [1, 1, {four}]}},
            {{"op": ["free", 3], "ptr": null, "stats": [0, 1, {four}]}},
            {{"op": ["empty_cache"], "ptr": null, "stats": [0, 1, 0]}}
        ],
        "trace": [
            ["segment_alloc", {A}, {two}, 0], ["alloc", {A}, 1000, 0],
            ["free_requested", {A}, 1000, 0], ["free_completed", {A}, 1000, 0],
            ["snapshot", 0, 0, 0],
            ["segment_free", {A}, {two}, 0], ["segment_alloc", {B}, {four}, 0],
            ["alloc", {B}, {four}, 0], ["oom", 4711, {two}, 0],
            ["free_requested", {B}, {four}, 0], ["free_completed", {B}, {four}, 0],
            ["segment_free", {B}, {four}, 0]
        ]}}"#,
        total = 64 * MIB,
        cap = 4 * MIB,
        two = 2 * MIB,
        four = 4 * MIB,
    );
    Recording::parse(text.as_bytes()).unwrap()
}

fn compare(recording: &Recording) -> Comparison {
    let mut ticks = 0;
    let comparison = verify(&mut Fake::new(64 * MIB, [A, B]), recording, || ticks += 1);
    assert_eq!(ticks, recording.ops.len());
    comparison
}

/// The first difference of a recording that `spoil` changed.
fn first(spoil: impl FnOnce(&mut Recording)) -> String {
    let mut recording = recording();
    spoil(&mut recording);
    let comparison = compare(&recording);
    assert!(comparison.mismatches > 0);
    comparison.first.unwrap().to_string()
}

#[test]
fn a_true_recording_agrees() {
    let comparison = compare(&recording());
    assert_eq!(comparison, Comparison { ops: 9, trace_entries: 12, mismatches: 0, first: None });
    assert!(comparison.agrees());
}

#[test]
fn every_kind_of_difference_is_found_and_named() {
    assert_eq!(
        first(|r| r.ops[1].ptr = Some(A + 512)),
        "operation 1: ptr: expected 0x7f0000000200, got 0x7f0000000000"
    );
    assert_eq!(
        first(|r| r.ops[6].ptr = Some(A)),
        "operation 6: ptr: expected 0x7f0000000000, got out of memory"
    );
    assert_eq!(
        first(|r| r.ops[7].stats.as_mut().unwrap()[1] = 2),
        "operation 7: num_ooms: expected 2, got 1"
    );
    assert_eq!(
        first(|r| r.trace[1].bytes = 1001),
        "operation 1: trace entry 1: expected alloc 0x7f0000000000 1001 bytes stream 0, \
         got alloc 0x7f0000000000 1000 bytes stream 0"
    );
    assert_eq!(
        first(|r| {
            r.trace.remove(5);
        }),
        "operation 5: trace entry 0: expected segment_alloc 0x7e0000000000 4194304 bytes stream 0, \
         got segment_free 0x7f0000000000 2097152 bytes stream 0"
    );
    assert_eq!(
        first(|r| r.stat_keys[1] = "num_oom".to_owned()),
        "operation 0: num_oom: expected 0, got no such statistic"
    );
}

#[test]
fn leftover_history_is_a_difference() {
    let row = TraceRow { action: TraceAction::SegmentMap, addr: A, bytes: 1, stream: 0 };
    assert_eq!(
        first(|r| r.trace.push(row)),
        "operation 9: 1 trace entries left over: expected segment_map 0x7f0000000000 1 bytes \
         stream 0, got nothing"
    );
}

#[test]
fn lists_of_segments_are_compared_but_not_leftover_requests() {
    let segment = |r: &mut Recording, change: fn(&mut Segment)| {
        change(&mut r.ops[4].segments.as_mut().unwrap()[0]);
    };
    let mut harmless = recording();
    segment(&mut harmless, |s| s.blocks[0].requested = 5);
    segment(&mut harmless, |s| s.pool = Some((0, 0)));
    assert_eq!(compare(&harmless).first, None);
    assert_eq!(
        first(|r| segment(r, |s| s.pool = Some((0, 3)))),
        "operation 4: segment 0: expected 0x7f0000000000 2097152 bytes large stream 0 pool 0,3 \
         [-/2097152], got 0x7f0000000000 2097152 bytes large stream 0 pool 0,0 [-/2097152]"
    );
    let missing = first(|r| r.ops[4].segments.as_mut().unwrap().clear());
    assert!(missing.starts_with("operation 4: segment 0: expected nothing, got 0x7f"), "{missing}");
}

#[test]
fn an_unknown_id_is_a_difference_and_not_a_crash() {
    let unknown = first(|r| r.ops[7].op = Op::Free(99));
    assert!(unknown.starts_with("operation 7: id: expected 99 to exist, got never allocated"));
}

#[test]
fn all_mismatching_operations_are_counted() {
    let mut r = recording();
    for step in &mut r.ops[6..] {
        step.stats.as_mut().unwrap()[1] = 5;
    }
    let comparison = compare(&r);
    assert_eq!((comparison.mismatches, comparison.first.unwrap().operation), (3, 6));
}
