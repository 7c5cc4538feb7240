//! Memory that changes place (policy ours): which driver calls a move costs, when old views are used
//! again, when they go, and when they must not (E4).

use crate::rig::*;
use alloc_core::{Addr, AllocError, Policy};
use mock_backend::{Call, CaptureMode, MockStream, Rng, Work};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Handles as large as the requests they are made for, memory moves from the first shortage on.
const MOVING: &str = "expandable_segments:True,ours_margin:0,ours_margin_min_mb:0,\
                      ours_handle_max_mb:64,ours_handle_calm_mb:2,ours_ahead:1,ours_part_min_kb:512";

fn rig(views_max: u32) -> Rig {
    Rig::new(Policy::Ours, &format!("{MOVING},ours_views_max:{views_max}"))
}

/// What the driver was asked for since the last look.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Asked {
    created: Vec<u64>,
    mapped: usize,
    unmapped: Vec<Addr>,
}

fn asked(rig: &Rig) -> Asked {
    let mut asked = Asked::default();
    for entry in rig.backend.take_log() {
        match entry.info.call {
            Call::Create => asked.created.push(entry.info.bytes / MIB),
            Call::Map => asked.mapped += 1,
            Call::Unmap => asked.unmapped.push(entry.info.addr),
            _ => {}
        }
    }
    asked
}

fn nothing() -> Asked {
    Asked::default()
}

/// Allocates, frees, and returns the address.
fn passing(rig: &Rig, bytes: u64, stream: &MockStream) -> Addr {
    let block = rig.alloc(bytes, stream);
    let addr = block.addr();
    rig.free(block);
    addr
}

fn moves(alloc: &Alloc) -> i64 {
    alloc.stats(DEV0).unwrap().counters.num_moves
}

/// A move costs a mapping, the way back nothing: the old view still is there.
#[test]
fn an_old_view_is_used_again_without_a_driver_call() {
    let rig = rig(8);
    let first = passing(&rig, 12 * MIB, &rig.s(0));
    assert_eq!(asked(&rig), Asked { created: vec![12], mapped: 1, ..nothing() });
    let second = passing(&rig, 12 * MIB, &rig.s(1));
    assert_ne!(first, second);
    assert_eq!(asked(&rig), Asked { mapped: 1, ..nothing() });
    for (stream, addr) in [(0, first), (1, second), (0, first)] {
        assert_eq!(passing(&rig, 12 * MIB, &rig.s(stream)), addr);
    }
    assert_eq!((asked(&rig), rig.reserved()), (nothing(), 12 * MIB));
    assert_eq!(moves(&rig), 4);
}

/// Two idle handles that are not side by side serve one request.
#[test]
fn idle_handles_come_together_for_a_larger_request() {
    let rig = rig(8);
    let [a, kept, b, last] = [6, 2, 8, 2].map(|mib| rig.alloc(mib * MIB, &rig.s(0)));
    rig.free(a);
    rig.free(b);
    asked(&rig);
    let both = rig.alloc(14 * MIB, &rig.s(0));
    assert_eq!(asked(&rig), Asked { mapped: 2, ..nothing() });
    assert_eq!(rig.reserved(), 18 * MIB);
    for block in [both, kept, last] {
        rig.free(block);
    }
}

/// Ends of partly used handles that fit together are used together, so that nothing is left between
/// bytes in use and the others still fit one another.
#[test]
fn ends_that_fit_are_put_together() {
    let rig = Rig::new(Policy::Ours, &format!("{MOVING},ours_waiting_max:0,ours_lasting:0"));
    // Cuts a handle in two, with a wall above it.
    let halves = |below: u64, above: u64| {
        let whole = rig.alloc((below + above) * MIB, &rig.s(0));
        let wall = rig.alloc(2 * MIB, &rig.s(0));
        rig.free(whole);
        let [below, above] = [below, above].map(|mib| rig.alloc(mib * MIB, &rig.s(0)));
        (below, above, wall)
    };
    let (a, tail_5, wall_a) = halves(5, 5);
    let (b, tail_7, wall_b) = halves(3, 7);
    let (head_11, c, wall_c) = halves(11, 3);
    let (head_13, d, wall_d) = halves(13, 3);
    for block in [tail_5, tail_7, head_11, head_13] {
        rig.free(block);
    }
    asked(&rig);
    // The longest tail would leave 2 MiB between two blocks.
    let first = rig.alloc(16 * MIB, &rig.s(0));
    assert_eq!(asked(&rig), Asked { mapped: 2, ..nothing() });
    let second = rig.alloc(20 * MIB, &rig.s(0));
    assert_eq!(asked(&rig), Asked { mapped: 2, ..nothing() });
    for block in [a, b, c, d, wall_a, wall_b, wall_c, wall_d, first, second] {
        rig.free(block);
    }
}

/// More views than allowed go at the next growth, oldest first, and no more than that.
#[test]
fn surplus_views_are_unmapped_and_no_others() {
    let rig = rig(2);
    let views: Vec<_> = (0..3).map(|n| passing(&rig, 6 * MIB, &rig.s(n))).collect();
    asked(&rig);
    // Growth of a stream that has none of them changes nothing.
    let other = rig.alloc(4 * MIB, &rig.s(3));
    assert_eq!(asked(&rig).unmapped, []);
    // Stream 1 drops its own, and leaves that of stream 0.
    let more = rig.alloc(20 * MIB, &rig.s(1));
    assert_eq!(asked(&rig).unmapped, [views[1]]);
    rig.free(more);
    // Two are left, which is allowed: one more growth drops nothing, and the old layout still is there.
    rig.free(other);
    let more = rig.alloc(40 * MIB, &rig.s(1));
    assert_eq!(asked(&rig).unmapped, []);
    rig.free(more);
    rig.empty();
    assert_eq!(rig.reserved(), 0);
}

/// Of several surplus views as many go as there are too many, the oldest first.
#[test]
fn as_many_views_stay_as_are_allowed() {
    let rig = rig(2);
    let (low, wall) = (rig.alloc(6 * MIB, &rig.s(0)), rig.alloc(2 * MIB, &rig.s(0)));
    let oldest = low.addr();
    rig.free(low);
    // A second view in the same addresses, a third one in others.
    let second = passing(&rig, 8 * MIB, &rig.s(0));
    let home = rig.alloc(6 * MIB, &rig.s(1));
    assert!(![oldest, second].contains(&home.addr()));
    asked(&rig);
    let more = rig.alloc(30 * MIB, &rig.s(0));
    assert_eq!(asked(&rig).unmapped, [oldest]);
    for block in [more, home, wall] {
        rig.free(block);
    }
}

/// The view that the bytes belong to is never surplus.
#[test]
fn the_home_of_a_handle_stays() {
    let rig = rig(1);
    passing(&rig, 6 * MIB, &rig.s(0));
    let home = rig.alloc(6 * MIB, &rig.s(1));
    asked(&rig);
    let more = rig.alloc(10 * MIB, &rig.s(1));
    assert_eq!(asked(&rig).unmapped, [], "the surplus view is stream 0's");
    rig.free(more);
    let more = rig.alloc(16 * MIB, &rig.s(0));
    assert_eq!(asked(&rig).unmapped.len(), 1);
    rig.touch(&home, &rig.s(1));
    rig.free(more);
    rig.free(home);
}

/// Unmapping waits for nothing by itself. A view that bytes left after the event was recorded that the
/// stream has reached may still be under work: it stays until a later event is reached.
#[test]
fn a_view_under_work_is_not_unmapped() {
    let rig = rig(1);
    let s0 = rig.s(0);
    // A handle with two views, so that the next growth of this stream records an event.
    passing(&rig, 6 * MIB, &s0);
    let away = rig.alloc(6 * MIB, &rig.s(1));
    rig.backend.launch(&s0, Work::new().lasting(1_000_000_000));
    let block = rig.alloc(6 * MIB, &s0);
    let old_view = block.addr();
    // So that it cannot grow in place.
    let wall = rig.alloc(2 * MIB, &s0);
    assert_eq!(asked(&rig).unmapped, [], "the event is not reached");
    // Work behind the event, that does not end with it.
    rig.backend.launch(&s0, Work::new().touching(old_view, 6 * MIB));
    rig.free(block);
    let block = rig.alloc(8 * MIB, &s0);
    let log = asked(&rig);
    assert_eq!((&log.created[..], log.mapped), (&[2][..], 2), "the handle moved: {log:?}");
    assert_ne!(block.addr(), old_view);
    rig.backend.advance(1_000_000_000);
    assert!(rig.backend.is_busy(&s0));
    let more = rig.alloc(10 * MIB, &s0);
    let unmapped = asked(&rig).unmapped;
    assert_eq!(unmapped.len(), 1, "the first handle's old view: the event was reached");
    assert!(!unmapped.contains(&old_view));
    // Nothing runs any more.
    rig.pass(&s0);
    let last = rig.alloc(12 * MIB, &s0);
    assert_eq!(asked(&rig).unmapped, [old_view]);
    for block in [block, wall, more, last, away] {
        rig.free(block);
    }
}

/// Free memory that moved within its stream is as young as it was: another stream does not get it before
/// the work that used it last is done.
#[test]
fn what_moved_within_a_stream_keeps_its_age() {
    let rig = rig(8);
    let [s0, s1] = [0, 1].map(|n| rig.s(n));
    let (large, wall) = (rig.alloc(12 * MIB, &s0), rig.alloc(2 * MIB, &s0));
    rig.free(large);
    let low = rig.alloc(4 * MIB, &s0);
    // The upper 8 MiB of the handle begin a new range.
    let block = rig.alloc(10 * MIB, &s0);
    rig.free(low);
    rig.backend.launch(&s0, Work::new().lasting(1_000_000));
    // Stream 1 looks for memory: an event is recorded behind that work.
    let other = rig.alloc(2 * MIB, &s1);
    rig.backend.advance(1_000_000);
    rig.backend.launch(&s0, Work::new().touching(block.addr(), 10 * MIB));
    rig.free(block);
    // A miss of stream 0 brings the handle together, and needs none of it.
    asked(&rig);
    let before = moves(&rig);
    let small = rig.alloc(KIB, &s0);
    assert_eq!((asked(&rig).created, moves(&rig) > before), (vec![], true));
    // The event is reached, and the work that came after it is not done.
    let first = rig.alloc(12 * MIB, &s1);
    assert_eq!(asked(&rig), Asked { created: vec![12], mapped: 1, ..nothing() });
    rig.pass(&s0);
    let second = rig.alloc(12 * MIB, &s1);
    assert_eq!(asked(&rig), Asked { mapped: 1, ..nothing() });
    for block in [wall, other, small, first, second] {
        rig.free(block);
    }
}

/// A kept 1 MiB and 5 MiB that nobody can use: from now on reserved is what was ever needed.
fn wasteful(rig: &Rig) -> alloc_core::Allocation {
    let stream = rig.s(2);
    let large = rig.alloc(6 * MIB, &stream);
    rig.free(large);
    rig.alloc(MIB, &stream)
}

/// Leaves two views of one handle of 6 MiB in stream 0's addresses, 2 MiB between them and 2 MiB above,
/// all of it free: 10 MiB of memory in 16 MiB of addresses.
fn twofold(rig: &Rig) {
    let s0 = rig.s(0);
    let (low, wall) = (rig.alloc(6 * MIB, &s0), rig.alloc(2 * MIB, &s0));
    let first = low.addr();
    rig.free(low);
    assert_eq!(passing(rig, 8 * MIB, &s0), first + 8 * MIB);
    rig.free(wall);
    asked(rig);
}

/// The next request creates what 10 MiB of free memory lack of 16, and no more.
fn gets_what_is_missing(rig: &Rig) {
    let reserved = rig.reserved();
    asked(rig);
    let block = rig.alloc(16 * MIB, &rig.s(0));
    assert_eq!(asked(rig).created, [6]);
    assert_eq!(rig.reserved(), reserved + 6 * MIB);
    assert_eq!(rig.stat("num_alloc_retries"), 0);
    rig.free(block);
}

/// An old layout that shows a handle beside the free memory that its bytes belong to now: they do not
/// count in both places.
#[test]
fn free_memory_does_not_count_beside_its_own_old_view() {
    let rig = rig(8);
    let waste = wasteful(&rig);
    twofold(&rig);
    gets_what_is_missing(&rig);
    rig.free(waste);
}

/// An old layout that shows one handle twice has room for one of them.
#[test]
fn an_old_layout_does_not_count_a_handle_twice() {
    let rig = rig(8);
    let waste = wasteful(&rig);
    twofold(&rig);
    // All of it goes to another stream and leaves views only.
    passing(&rig, 10 * MIB, &rig.s(1));
    assert_eq!(asked(&rig), Asked { mapped: 3, ..nothing() });
    gets_what_is_missing(&rig);
    rig.free(waste);
}

/// Moving stays within the limit to the byte: what just fits is served, what does not is refused, and
/// nothing beyond the limit is created.
#[test]
fn what_moves_keeps_to_the_limit() {
    let rig = rig(8);
    rig.set_memory_limit(DEV0, Some(20 * MIB)).unwrap();
    passing(&rig, 12 * MIB, &rig.s(0));
    let kept = rig.alloc(6 * MIB, &rig.s(1));
    assert_eq!(rig.reserved(), 12 * MIB, "the handle moved");
    rig.free(kept);
    let kept = rig.alloc(6 * MIB, &rig.s(0));
    let block = rig.alloc(8 * MIB, &rig.s(1));
    assert_eq!((rig.reserved(), rig.stat("num_alloc_retries")), (20 * MIB, 0));
    rig.free(block);
    rig.oom(16 * MIB, &rig.s(1));
    assert!(rig.reserved() <= 20 * MIB);
    rig.free(kept);
}

/// Also where there is no time to move memory: then what is missing is created, but only up to the limit.
#[test]
fn haste_keeps_to_the_limit() {
    for (limit, reserved) in [(24, 24), (22, 12)] {
        let rig = Rig::new(Policy::Ours, &format!("{MOVING},ours_hurry_max:0.9"));
        rig.set_memory_limit(DEV0, Some(limit * MIB)).unwrap();
        let time = AtomicU64::new(0);
        // Each look at the clock takes 60 ms, so two moves are more than there is time for.
        rig.set_clock(move || Duration::from_millis(time.fetch_add(60, Ordering::Relaxed)));
        for stream in [0, 1, 2] {
            passing(&rig, 12 * MIB, &rig.s(stream));
        }
        assert_eq!((rig.reserved(), moves(&rig)), (12 * MIB, 2));
        let kept = rig.alloc(8 * MIB, &rig.s(2));
        match rig.try_alloc(12 * MIB, &rig.s(0)) {
            Ok(block) => rig.free(block),
            Err(error) => assert!(matches!(error, AllocError::OutOfMemory(_)), "{error}"),
        }
        assert_eq!(rig.reserved(), reserved * MIB, "with a limit of {limit} MiB");
        rig.free(kept);
    }
}

/// A part of a handle that moved returns when it is free: the handle becomes whole and can go back.
#[test]
fn a_handle_in_pieces_becomes_whole() {
    let rig = rig(8);
    let s0 = rig.s(0);
    let (large, wall) = (rig.alloc(12 * MIB, &s0), rig.alloc(2 * MIB, &s0));
    rig.free(large);
    let low = rig.alloc(4 * MIB, &s0);
    let other = rig.alloc(6 * MIB, &rig.s(1));
    asked(&rig);
    // The upper 8 MiB of the handle begin a new range.
    let block = rig.alloc(10 * MIB, &s0);
    assert_eq!(asked(&rig), Asked { created: vec![2], mapped: 2, ..nothing() });
    assert_eq!(rig.reserved(), 22 * MIB);
    rig.free(block);
    rig.free(low);
    rig.empty();
    assert_eq!(rig.reserved(), 8 * MIB, "both handles went back");
    rig.free(other);
    rig.free(wall);
}

/// No part of a handle moves that has as many views as allowed: it would have one more.
#[test]
fn parts_of_handles_with_all_their_views_stay() {
    for (views_max, created) in [(1, 10), (2, 2)] {
        let rig = rig(views_max);
        let s0 = rig.s(0);
        let [large, _wall] = [12, 2].map(|mib| rig.alloc(mib * MIB, &s0));
        rig.free(large);
        let _low = rig.alloc(4 * MIB, &s0);
        let _other = rig.alloc(6 * MIB, &rig.s(1));
        asked(&rig);
        let _block = rig.alloc(10 * MIB, &s0);
        assert_eq!(asked(&rig).created, [created], "{views_max} views");
    }
}

/// Of twelve handles that are to come together, another thread takes one at the last moment. Those that
/// were taken out of their places by then go back.
#[test]
fn a_move_that_comes_too_late_is_undone() {
    for _ in 0..100 {
        let rig = Rig::new(Policy::Ours, &format!("{MOVING},ours_handle_max_mb:2"));
        let s0 = rig.s(0);
        let blocks: Vec<_> = (0..24).map(|_| rig.alloc(2 * MIB, &s0)).collect();
        let mut kept = Vec::new();
        for (n, block) in blocks.into_iter().enumerate() {
            if n % 2 == 0 { rig.free(block) } else { kept.push(block) }
        }
        let (alloc, done) = (Alloc::clone(&rig), AtomicBool::new(false));
        let large = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    // The lowest of the twelve, which is moved last.
                    let addr = alloc.allocate_raw(2 * MIB, &s0).unwrap();
                    alloc.free_raw(addr).unwrap();
                }
            });
            let large = alloc.allocate_raw(24 * MIB, &s0).unwrap();
            done.store(true, Ordering::Relaxed);
            large
        });
        alloc.free_raw(large).unwrap();
        rig.verify();
        assert!(rig.reserved() <= 24 * 3 * MIB);
        kept.into_iter().for_each(|block| rig.free(block));
        rig.empty();
        assert_eq!(rig.reserved(), 0);
    }
}

/// Threads of one stream take blocks that another one is about to move. What had moved by then returns,
/// and nothing gets lost.
#[test]
fn memory_that_others_take_while_it_is_to_move_is_left_alone() {
    let rig = rig(4);
    rig.set_memory_limit(DEV0, Some(120 * MIB)).unwrap();
    let (alloc, s0) = (Alloc::clone(&rig), rig.s(0));
    let deadline = Instant::now() + Duration::from_secs(20);
    let goes_on = || moves(&alloc) < 2_000 && Instant::now() < deadline;
    // Holds a few blocks at a time; running out of memory is no failure here.
    let churn = |seed: u64, bytes_max: u64, few: usize| {
        let (mut rng, mut held) = (Rng::new(seed), VecDeque::new());
        while goes_on() {
            held.extend(alloc.allocate_raw(rng.between(MIB, bytes_max), &s0).ok());
            if held.len() > few {
                alloc.free_raw(held.pop_front().unwrap()).unwrap();
            }
        }
        held.into_iter().for_each(|addr| alloc.free_raw(addr).unwrap());
    };
    std::thread::scope(|scope| {
        scope.spawn(|| churn(1, 6 * MIB, 5));
        scope.spawn(|| churn(2, 6 * MIB, 5));
        churn(3, 40 * MIB, 1);
    });
    rig.verify();
    assert!(moves(&rig) >= 2_000, "{} moves", moves(&rig));
    drop(alloc);
    rig.empty();
    assert_eq!(rig.reserved(), 0);
}

const STEPS: &str = "expandable_segments:True,ours_margin_min_mb:0,ours_handle_max_mb:64,\
                     ours_handle_calm_mb:2,ours_ahead:1,ours_step:0.5";

/// Within the margin, growth takes half of what was ever needed at once, in one handle; where memory is
/// tight a seventh of that, and half of what lies free.
#[test]
fn growth_takes_a_step_at_once() {
    let rig = Rig::new(Policy::Ours, &format!("{STEPS},ours_margin:0.5"));
    let first = rig.alloc(32 * MIB, &rig.s(0));
    let _second = rig.alloc(4 * MIB, &rig.s(0));
    assert_eq!(asked(&rig).created, [32, 4], "a seventh of 18 MiB is less");
    rig.free(first);
    let _third = rig.alloc(2 * MIB, &rig.s(1));
    assert_eq!(asked(&rig).created, [18], "a seventh of 18 MiB, half of 32 MiB, and 18 at most");
    let _fourth = rig.alloc(16 * MIB, &rig.s(1));
    assert_eq!((asked(&rig), rig.reserved()), (nothing(), 54 * MIB));
}

/// Also where memory moves and does not suffice; but not if the device has no more than is needed.
#[test]
fn a_step_is_left_out_where_memory_is_short() {
    for (device, created, reserved) in [(200, 18, 54), (50, 8, 44)] {
        let rig = Rig::of_size(device * MIB, Policy::Ours, &format!("{STEPS},ours_margin:0"));
        let [first, _second] = [32, 4].map(|mib| rig.alloc(mib * MIB, &rig.s(0)));
        rig.free(first);
        asked(&rig);
        let _third = rig.alloc(40 * MIB, &rig.s(0));
        assert_eq!(asked(&rig).created.last(), Some(&created), "{device} MiB");
        assert_eq!(rig.reserved(), reserved * MIB, "{device} MiB");
    }
}

/// While a graph is captured, any other stream may join the capture at any moment, so none is asked
/// for a new event (I9). What was idle when the capture was announced moves all the same.
#[test]
fn captures_find_out_beforehand_what_is_idle() {
    let rig = rig(8);
    let [s0, s1, s2] = [0, 1, 2].map(|n| rig.s(n));
    let [early, between, late] = [40, 2, 40].map(|mib| rig.alloc(mib * MIB, &s0));
    rig.free(early);
    let mut memory = rig.graph_memory();
    memory.expect().unwrap();
    rig.backend.take_log();
    rig.free(late);
    // A thread that captures may be between its two steps now; this one grows.
    let moved = rig.alloc(40 * MIB, &s1);
    assert_eq!(rig.reserved(), 82 * MIB, "what was idle has moved");
    let new = rig.alloc(40 * MIB, &s1);
    assert_eq!(rig.reserved(), 122 * MIB, "of what is idle since then nothing can be told");
    let asked: Vec<_> =
        rig.calls(Call::Record).into_iter().map(|entry| entry.info.stream).collect();
    assert!(asked.is_empty(), "{asked:?}");
    rig.backend.begin_capture(&s2, CaptureMode::Global).unwrap();
    rig.backend.judge().capture_shares(&s2, number(memory.pool()));
    memory.begin(&s2).unwrap();
    let graph = rig.end(&mut memory, &s2);
    for block in [between, moved, new] {
        rig.free(block);
    }
    drop(graph);
    memory.reset().unwrap();
}
