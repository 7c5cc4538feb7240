//! Short scripts, drawn as maps of their segments: a change of placement shows as a change of the
//! picture.
//!
//! One line for each segment, or mapped range of an expandable one (`+`), by address: its stream and
//! size, then its blocks. A live block has its name, `~` waits for events, `.` is free.

use crate::rig::*;
use alloc_core::{Allocation, BlockStatus, Policy};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Named live blocks.
#[derive(Default)]
struct Names(BTreeMap<&'static str, Allocation>);

impl Names {
    fn alloc(&mut self, rig: &Rig, name: &'static str, bytes: u64, n: usize) {
        let block = rig.alloc(bytes, &rig.s(n));
        assert!(self.0.insert(name, block).is_none(), "{name} is taken");
    }

    fn free(&mut self, rig: &Rig, name: &str) {
        rig.free(self.0.remove(name).unwrap());
    }
}

fn size(bytes: u64) -> String {
    match bytes {
        0..KIB => format!("{bytes}"),
        _ if bytes.is_multiple_of(MIB) => format!("{}M", bytes / MIB),
        _ => format!("{}K", bytes as f64 / KIB as f64),
    }
}

fn picture(rig: &Rig, names: &Names) -> String {
    let mut text = String::new();
    for segment in rig.snapshot(DEV0).unwrap().segments {
        let kind = if segment.expandable { "+" } else { "" };
        write!(text, "s{}{kind} {}", segment.stream.get(), size(segment.bytes)).unwrap();
        for block in segment.blocks {
            let named = names.0.iter().find(|(_, live)| live.addr() == block.addr);
            let name = match block.status {
                BlockStatus::Allocated => named.map_or("?", |(name, _)| name),
                BlockStatus::PendingFree => "~",
                BlockStatus::Inactive => ".",
            };
            write!(text, " |{name} {}", size(block.bytes)).unwrap();
        }
        text.push('\n');
    }
    text
}

#[track_caller]
fn shows(rig: &Rig, names: &Names, expected: &[&str]) {
    let lines: Vec<String> = picture(rig, names).lines().map(str::to_owned).collect();
    assert_eq!(lines, expected);
}

/// The low part of a split is handed out; what comes back merges with what is free beside it (I3).
#[test]
fn blocks_split_low_and_merge_both_ways() {
    for policy in BOTH {
        let (rig, mut names) = (Rig::new(policy, ""), Names::default());
        names.alloc(&rig, "a", 3 * MIB, 0);
        names.alloc(&rig, "b", 4 * MIB, 0);
        names.alloc(&rig, "c", 5 * MIB, 0);
        shows(&rig, &names, &["s0 20M |a 3M |b 4M |c 5M |. 8M"]);
        names.free(&rig, "b");
        shows(&rig, &names, &["s0 20M |a 3M |. 4M |c 5M |. 8M"]);
        names.free(&rig, "a");
        shows(&rig, &names, &["s0 20M |. 7M |c 5M |. 8M"]);
        names.free(&rig, "c");
        shows(&rig, &names, &["s0 20M |. 20M"]);
    }
}

/// The smallest block that fits, among equals the lowest, out of all that are free (I4); a rest of at
/// most 1 MiB stays on.
#[test]
fn best_fit_takes_the_smallest_then_the_lowest() {
    for policy in BOTH {
        let (rig, mut names) = (Rig::new(policy, ""), Names::default());
        for (name, bytes) in [("a", 4), ("p", 2), ("b", 3), ("q", 2), ("c", 3), ("r", 2)] {
            names.alloc(&rig, name, bytes * MIB, 0);
        }
        for name in ["a", "b", "c"] {
            names.free(&rig, name);
        }
        shows(&rig, &names, &["s0 20M |. 4M |p 2M |. 3M |q 2M |. 3M |r 2M |. 4M"]);
        names.alloc(&rig, "d", 2 * MIB + 512 * KIB, 0);
        names.alloc(&rig, "e", 3 * MIB, 0);
        names.alloc(&rig, "f", 2 * MIB, 0);
        shows(&rig, &names, &["s0 20M |f 2M |. 2M |p 2M |d 3M |q 2M |e 3M |r 2M |. 4M"]);
    }
}

/// Requests up to 1 MiB live in segments of 2 MiB, apart from the larger ones; the rounding is to
/// 512 bytes and every rest is split off.
#[test]
fn small_requests_have_segments_of_their_own() {
    for policy in BOTH {
        let (rig, mut names) = (Rig::new(policy, ""), Names::default());
        names.alloc(&rig, "a", 1, 0);
        names.alloc(&rig, "b", 513, 0);
        names.alloc(&rig, "c", MIB, 0);
        names.alloc(&rig, "d", MIB + 1, 0);
        names.alloc(&rig, "e", MIB, 0);
        shows(
            &rig,
            &names,
            &[
                "s0 2M |a 512 |b 1K |c 1M |. 1022.5K",
                "s0 20M |d 1024.5K |. 19455.5K",
                "s0 2M |e 1M |. 1M",
            ],
        );
    }
}

/// From 10 MiB on, a request has its own segment in steps of 2 MiB; a rest of more than 1 MiB is for
/// others.
#[test]
fn large_requests_take_segments_of_their_size() {
    for policy in BOTH {
        let (rig, mut names) = (Rig::new(policy, ""), Names::default());
        names.alloc(&rig, "a", 10 * MIB, 0);
        names.alloc(&rig, "b", 11 * MIB, 0);
        names.alloc(&rig, "c", 12 * MIB + 512, 0);
        names.alloc(&rig, "d", MIB + 512 * KIB, 0);
        shows(&rig, &names, &["s0 10M |a 10M", "s0 12M |b 12M", "s0 14M |c 12288.5K |d 2047.5K"]);
    }
}

/// Nothing that one stream freed serves another one; what waits for events serves nobody.
#[test]
fn streams_keep_to_themselves() {
    for policy in BOTH {
        let (rig, mut names) = (Rig::new(policy, ""), Names::default());
        names.alloc(&rig, "a", 2 * MIB, 0);
        names.alloc(&rig, "b", 2 * MIB, 0);
        names.alloc(&rig, "c", 2 * MIB, 1);
        rig.busy(&rig.s(2));
        rig.record(&names.0["b"], &rig.s(2));
        names.free(&rig, "b");
        names.free(&rig, "c");
        names.alloc(&rig, "d", 5 * MIB, 0);
        shows(&rig, &names, &["s0 20M |a 2M |~ 2M |d 5M |. 11M", "s1 20M |. 20M"]);
        rig.pass(&rig.s(2));
        names.alloc(&rig, "e", 2 * MIB, 0);
        shows(&rig, &names, &["s0 20M |a 2M |e 2M |d 5M |. 11M", "s1 20M |. 20M"]);
        rig.empty();
        shows(&rig, &names, &["s0 20M |a 2M |e 2M |d 5M |. 11M"]);
    }
}

/// With `max_split_size_mb`, oversize segments stay whole and are kept for their like.
#[test]
fn oversize_segments_stay_whole() {
    for policy in BOTH {
        let (rig, mut names) = (Rig::new(policy, "max_split_size_mb:50"), Names::default());
        names.alloc(&rig, "a", 100 * MIB, 0);
        names.alloc(&rig, "b", 40 * MIB, 0);
        names.free(&rig, "a");
        names.free(&rig, "b");
        names.alloc(&rig, "c", 9 * MIB, 0);
        names.alloc(&rig, "d", 35 * MIB, 0);
        names.alloc(&rig, "e", 90 * MIB, 0);
        shows(&rig, &names, &["s0 100M |e 100M", "s0 40M |c 9M |. 31M", "s0 36M |d 36M"]);
    }
}

/// Expandable segments grow in pages of 20 MiB (2 MiB for the small class), place blocks tightly, and
/// give whole pages back from the middle; the hole is filled from below.
#[test]
fn expandable_segments_grow_shrink_and_fill_their_holes() {
    let (rig, mut names) =
        (Rig::new(Policy::Pytorch, "expandable_segments:True"), Names::default());
    names.alloc(&rig, "a", 15 * MIB, 0);
    names.alloc(&rig, "b", 30 * MIB, 0);
    names.alloc(&rig, "c", 10 * MIB, 0);
    names.alloc(&rig, "s", 3 * KIB, 0);
    shows(&rig, &names, &["s0+ 60M |a 15M |b 30M |c 10M |. 5M", "s0+ 2M |s 3K |. 2045K"]);
    names.free(&rig, "b");
    rig.empty();
    shows(
        &rig,
        &names,
        &["s0+ 20M |a 15M |. 5M", "s0+ 20M |. 5M |c 10M |. 5M", "s0+ 2M |s 3K |. 2045K"],
    );
    names.alloc(&rig, "d", 27 * MIB, 0);
    names.alloc(&rig, "e", 8 * MIB, 0);
    shows(
        &rig,
        &names,
        &["s0+ 80M |a 15M |d 27M |. 3M |c 10M |e 8M |. 17M", "s0+ 2M |s 3K |. 2045K"],
    );
}

/// Switched off and on again: requests take the kind that is on, blocks go back where they came
/// from.
#[test]
fn switching_expandable_segments_keeps_both_kinds_apart() {
    let (rig, mut names) =
        (Rig::new(Policy::Pytorch, "expandable_segments:True"), Names::default());
    names.alloc(&rig, "a", 15 * MIB, 0);
    rig.set_expandable_segments(false).unwrap();
    names.alloc(&rig, "b", 4 * MIB, 0);
    names.free(&rig, "a");
    names.alloc(&rig, "c", 12 * MIB, 0);
    rig.set_expandable_segments(true).unwrap();
    names.alloc(&rig, "d", 3 * MIB, 0);
    names.alloc(&rig, "e", 18 * MIB, 0);
    shows(&rig, &names, &["s0+ 20M |e 18M |. 2M", "s0 20M |b 4M |c 12M |d 3M |. 1M"]);
}
