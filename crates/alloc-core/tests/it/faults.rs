//! Every backend call of six scenarios fails once, and from then on for good, with each kind of
//! error. The allocator must stay consistent throughout (the rig checks it after every operation),
//! work as soon as the backend does, and leave nothing behind.

use crate::rig::*;
use alloc_core::backend::ErrorKind;
use alloc_core::{AllocError, Allocation, Checkpoint, Policy, PoolOptions, PoolRef};
use mock_backend::{Builder, Call, Fault, MockBackend, MockStream};
use std::collections::BTreeMap;

/// Plays operations on named blocks and takes failures as they come.
struct Play<'a> {
    rig: &'a Rig,
    blocks: BTreeMap<&'static str, Allocation>,
}

impl<'a> Play<'a> {
    fn new(rig: &'a Rig) -> Self {
        Play { rig, blocks: BTreeMap::new() }
    }

    /// Failures must be the injected ones, or the lack of memory that they led to.
    fn acceptable(&self, error: &Error) {
        let struck = self.rig.backend.fault_counts().1 > 0;
        let good = match error {
            AllocError::OutOfMemory(_) => struck,
            AllocError::Backend { source, .. } => source.is_injected(),
            _ => false,
        };
        assert!(good, "{error}");
    }

    fn alloc(&mut self, name: &'static str, bytes: u64, stream: &MockStream) {
        match self.rig.try_alloc(bytes, stream) {
            Ok(block) => assert!(self.blocks.insert(name, block).is_none(), "{name} is taken"),
            Err(error) => self.acceptable(&error),
        }
    }

    /// Expected to run out of memory, unless a fault has spared some.
    fn starve(&mut self, bytes: u64, stream: &MockStream) {
        match self.rig.try_alloc(bytes, stream) {
            Ok(block) => {
                assert!(self.rig.backend.fault_counts().1 > 0, "{bytes} bytes were served");
                self.rig.free(block);
            }
            Err(AllocError::OutOfMemory(_)) => {}
            Err(error) => self.acceptable(&error),
        }
    }

    fn record(&self, name: &str, stream: &MockStream) {
        if let Some(block) = self.blocks.get(name) {
            self.rig.record(block, stream);
        }
    }

    fn free(&mut self, name: &'static str) {
        let Some(block) = self.blocks.remove(name) else { return };
        if let Err((block, error)) = self.rig.try_free(block) {
            self.acceptable(&error);
            self.blocks.insert(name, block);
        }
    }

    fn trim(&self, pool: &PoolRef<MockBackend>) {
        if let Err(error) = pool.empty_cache() {
            self.acceptable(&error);
        }
        self.rig.verify();
    }

    fn checkpoint(&self, pool: &PoolRef<MockBackend>) -> Option<Checkpoint> {
        let taken = pool.checkpoint();
        self.rig.verify();
        taken.inspect_err(|error| self.acceptable(error)).ok()
    }

    /// A restore that fails changes nothing; blocks that it revives are freed.
    fn restore(&mut self, pool: &PoolRef<MockBackend>, checkpoint: Option<&Checkpoint>) {
        let Some(checkpoint) = checkpoint else { return };
        let before = pool.live_blocks();
        let restored = match self.rig.try_restore(pool, checkpoint) {
            Ok(restored) => restored,
            Err(error) => {
                self.acceptable(&error);
                return assert_eq!(pool.live_blocks(), before);
            }
        };
        let was: Vec<_> = checkpoint.blocks().iter().map(|block| block.0).collect();
        assert_eq!(pool.live_blocks(), was);
        self.blocks
            .retain(|_, block| restored.stale.iter().all(|stale| stale.addr != block.addr()));
        for block in restored.revived {
            if let Err((_, error)) = self.rig.try_free(block) {
                self.acceptable(&error);
            }
        }
    }

    fn empty(&self) {
        if let Err(error) = self.rig.empty_cache() {
            self.acceptable(&error);
        }
        self.rig.verify();
    }
}

/// Ordinary segments of both classes, uses on side streams, pending events, flushes.
fn ordinary(rig: &Rig, play: &mut Play<'_>) {
    let (s0, s1, s2) = (rig.s(0), rig.s(1), rig.s(2));
    play.alloc("small", 700, &s0);
    play.alloc("a", 3 * MIB, &s0);
    play.alloc("b", 4 * MIB, &s0);
    play.alloc("own", 30 * MIB, &s1);
    rig.busy(&s2);
    play.record("a", &s1);
    play.record("a", &s2);
    play.record("own", &s2);
    play.free("a");
    play.free("own");
    play.alloc("c", 3 * MIB, &s0);
    play.record("b", &s1);
    play.free("b");
    play.alloc("d", 2 * MIB, &s0);
    play.free("d");
    play.empty();
    play.alloc("e", 12 * MIB, &s1);
    rig.busy(&s1);
    play.record("e", &s0);
    play.free("e");
    play.free("small");
    play.free("c");
    play.alloc("f", 12 * MIB, &s1);
    play.free("f");
    play.empty();
}

/// Growth of several pages, holes in the middle, unmapping, switching the option.
fn expandable(rig: &Rig, play: &mut Play<'_>) {
    let (s0, s1) = (rig.s(0), rig.s(1));
    play.alloc("low", 10 * MIB, &s0);
    play.alloc("middle", 60 * MIB, &s0);
    play.alloc("high", 15 * MIB, &s0);
    play.alloc("small", 100 * KIB, &s0);
    play.alloc("side", 50 * MIB, &s1);
    rig.busy(&s1);
    play.record("middle", &s1);
    play.free("middle");
    play.free("side");
    play.empty();
    play.alloc("again", 70 * MIB, &s0);
    play.free("low");
    play.empty();
    if rig.set_expandable_segments(false).is_ok() {
        play.alloc("ordinary", 25 * MIB, &s0);
    }
    rig.set_expandable_segments(true).expect("virtual memory");
    play.free("high");
    play.free("again");
    play.alloc("grown", 130 * MIB, &s0);
    play.free("ordinary");
    play.free("grown");
    play.free("small");
    play.empty();
    play.alloc("last", 45 * MIB, &s1);
    play.free("last");
    play.empty();
}

/// A small device with limits: every step of the ladder, up to running out.
fn tight(rig: &Rig, play: &mut Play<'_>) {
    let (s0, s1) = (rig.s(0), rig.s(1));
    play.alloc("a", 24 * MIB, &s0);
    play.alloc("b", 30 * MIB, &s0);
    play.alloc("c", 20 * MIB, &s1);
    play.free("a");
    // The limit is reached: an oversize block goes back.
    play.alloc("d", 40 * MIB, &s0);
    rig.busy(&s1);
    play.record("b", &s1);
    play.free("b");
    play.free("c");
    // Pending memory is waited for.
    play.alloc("e", 44 * MIB, &s1);
    play.starve(90 * MIB, &s0);
    play.free("d");
    for name in ["f", "g", "h"] {
        play.alloc(name, 11 * MIB, &s0);
    }
    for name in ["f", "g", "h"] {
        play.free(name);
    }
    // Collection, then a flush.
    play.alloc("i", 50 * MIB, &s0);
    play.starve(100 * MIB, &s1);
    play.free("e");
    play.free("i");
    play.empty();
}

/// With policy ours: memory goes from stream to stream, old layouts come back, views are dropped.
fn moving(rig: &Rig, play: &mut Play<'_>) {
    let (s0, s1) = (rig.s(0), rig.s(1));
    play.alloc("a", 40 * MIB, &s0);
    play.alloc("b", 34 * MIB, &s1);
    play.alloc("c", 11 * MIB, &s0);
    play.free("a");
    play.alloc("d", 30 * MIB, &s1);
    play.free("b");
    rig.busy(&s1);
    play.alloc("e", 50 * MIB, &s0);
    rig.pass(&s1);
    play.free("c");
    play.free("d");
    play.alloc("f", 60 * MIB, &s0);
    play.free("e");
    play.alloc("g", 38 * MIB, &s0);
    play.free("g");
    play.alloc("h", 45 * MIB, &s1);
    play.free("f");
    play.free("h");
    play.alloc("i", 90 * MIB, &s1);
    play.free("i");
    play.empty();
}

/// Scopes, a pool that helps out, trims, a checkpoint with repeated restores, the end of a pool.
fn pools(rig: &Rig, play: &mut Play<'_>) {
    let (s0, s1) = (rig.s(0), rig.s(1));
    let p = rig.create_pool(DEV0, PoolOptions::new().use_on_oom()).expect("a device");
    let q = rig.create_pool(DEV0, PoolOptions::new().no_split()).expect("a device");
    let scope = p.enter();
    play.alloc("a", 24 * MIB, &s0);
    play.alloc("b", 700, &s0);
    play.alloc("c", 12 * MIB, &s1);
    {
        let _inner = q.enter();
        play.alloc("q", 3 * MIB, &s0);
    }
    rig.busy(&s1);
    play.record("c", &s0);
    play.free("c");
    let checkpoint = play.checkpoint(&p);
    play.free("a");
    play.alloc("d", 18 * MIB, &s0);
    rig.busy(&s1);
    play.record("d", &s1);
    play.trim(&p);
    play.restore(&p, checkpoint.as_ref());
    play.alloc("e", 30 * MIB, &s0);
    play.free("b");
    play.restore(&p, checkpoint.as_ref());
    drop((checkpoint, scope));
    play.free("q");
    play.trim(&p);
    play.alloc("f", 40 * MIB, &s0);
    play.free("f");
    play.alloc("g", 60 * MIB, &s1);
    drop(p);
    play.empty();
    play.alloc("h", 40 * MIB, &s0);
    play.free("h");
    play.free("g");
    drop(q);
    play.empty();
}

/// All scenarios with the machine and settings that they are about.
type Scenario = fn(&Rig, &mut Play<'_>);
const SCENARIOS: [(&str, Scenario, u64, &str); 6] = [
    ("ordinary", ordinary, GIB, ""),
    ("expandable", expandable, GIB, "expandable_segments:True"),
    (
        "moving",
        moving,
        GIB,
        "expandable_segments:True,ours_margin:0,ours_margin_min_mb:0,ours_handle_max_mb:6,\
         ours_handle_calm_mb:6,ours_ahead:1,ours_views_max:1",
    ),
    (
        "tight",
        tight,
        110 * MIB,
        "max_split_size_mb:20,garbage_collection_threshold:0.6,per_process_memory_fraction:0.95",
    ),
    ("pools", pools, 130 * MIB, ""),
    (
        "pools with expandable segments",
        pools,
        130 * MIB,
        "expandable_segments:True,ours_margin:0,ours_margin_min_mb:0,ours_handle_max_mb:6,\
         ours_handle_calm_mb:6,ours_ahead:1",
    ),
];

fn machine(bytes: u64) -> Builder {
    MockBackend::builder().device(bytes)
}

/// Plays a scenario with these faults; how many calls they struck.
fn under(
    faults: Vec<Fault>,
    policy: Policy,
    (_, play, bytes, text): (&str, Scenario, u64, &str),
) -> u64 {
    let rig = Rig::on(machine(bytes), policy, text);
    rig.backend.set_faults(faults);
    play(&rig, &mut Play::new(&rig));
    let struck = rig.backend.fault_counts().1;
    rig.backend.set_faults([]);
    recovers(&rig);
    struck
}

/// With the backend well again, everything works and everything adds up.
fn recovers(rig: &Rig) {
    rig.free_all();
    rig.empty();
    assert_eq!((rig.reserved(), rig.backend.used(DEV0)), (0, 0));
    for n in 0..3 {
        let small = rig.alloc(MIB, &rig.s(n));
        let large = rig.alloc(25 * MIB, &rig.s(n));
        rig.record(&large, &rig.s((n + 1) % 3));
        rig.free(large);
        rig.free(small);
    }
    assert_eq!(rig.reserved(), rig.backend.used(DEV0));
}

/// Strikes the first call, the second one, … until there are no more.
fn sweep(policy: Policy, scenario: (&str, Scenario, u64, &str), fault: impl Fn(u64) -> Vec<Fault>) {
    let mut n = 1;
    while under(fault(n), policy, scenario) > 0 {
        n += 1;
    }
    assert!(n > 20, "{} makes only {n} calls", scenario.0);
}

#[test]
fn every_call_fails_once() {
    for policy in BOTH {
        for scenario in SCENARIOS {
            // To the allocator, these two are all the kinds there are.
            for kind in [ErrorKind::OutOfMemory, ErrorKind::Other] {
                sweep(policy, scenario, |n| vec![Fault::nth(n).kind(kind)]);
            }
        }
    }
}

#[test]
fn every_call_fails_once_with_the_rarer_kinds() {
    for scenario in SCENARIOS {
        for kind in [ErrorKind::Unsupported, ErrorKind::DeviceLost] {
            sweep(Policy::Ours, scenario, |n| vec![Fault::nth(n).kind(kind)]);
        }
    }
}

#[test]
fn every_call_fails_from_some_point_on() {
    for policy in BOTH {
        for scenario in SCENARIOS {
            sweep(policy, scenario, |n| vec![Fault::from(n)]);
        }
    }
}

/// Two faults close to each other strike the handling of the first one.
#[test]
fn the_handling_of_a_failure_fails_too() {
    for scenario in SCENARIOS {
        for gap in 1..=3 {
            let other = |n| Fault::nth(n).kind(ErrorKind::Other);
            sweep(Policy::Ours, scenario, |n| vec![other(n), other(n + gap)]);
        }
    }
}

/// Without a fault the scenarios run through, and do what they are there for.
#[test]
fn the_scenarios_themselves() {
    for policy in BOTH {
        for scenario in SCENARIOS {
            assert_eq!(under(vec![], policy, scenario), 0);
        }
        let (_, play, bytes, text) = SCENARIOS[3];
        let rig = Rig::on(machine(bytes), policy, text);
        play(&rig, &mut Play::new(&rig));
        assert_eq!(rig.stat("num_ooms"), 2);
        assert!(rig.stat("num_alloc_retries") >= 3);
        assert!(rig.stat("num_device_free") >= 6);
    }
    let (_, play, bytes, text) = SCENARIOS[2];
    let rig = Rig::on(machine(bytes), Policy::Ours, text);
    play(&rig, &mut Play::new(&rig));
    let log = rig.backend.take_log();
    let count = |call| log.iter().filter(|entry| entry.info.call == call).count();
    assert!(count(Call::Map) > count(Call::Create) + 10, "handles are mapped more than once");
}
