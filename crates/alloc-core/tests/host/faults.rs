//! Every backend call fails once: nothing is lost, nothing leaks, and the state is one that `check`
//! accepts after every operation.

use crate::support::*;
use alloc_core::PoolId;
use alloc_core::backend::{ErrorKind, Stream};
use alloc_core::host::{HostAllocation, HostConfig};
use mock_backend::{Fault, MockBackend, MockStream};
use std::time::Duration;

/// A scenario: what it does may fail at any point, and then goes on.
type Scenario = fn(&mut Script);

struct Script {
    rig: Rig,
    streams: [MockStream; 2],
    held: Vec<HostAllocation>,
}

impl Script {
    fn new(config: HostConfig) -> Self {
        let rig = Rig::new(MockBackend::builder().strict().host_node(96 * MIB).build(), config);
        let streams = [rig.stream(), rig.stream()];
        Script { rig, streams, held: Vec::new() }
    }

    fn allocate(&mut self, bytes: u64) {
        let before = self.live();
        match self.rig.try_allocate(bytes) {
            Ok(block) => self.held.push(block),
            Err(_) => assert_eq!(self.live(), before, "a failed request changes nothing"),
        }
        self.rig.check();
    }

    /// Frees the oldest block, after work on some streams was queued for it.
    fn use_and_free(&mut self, streams: &[usize]) {
        if self.held.is_empty() {
            return;
        }
        let block = self.held.remove(0);
        for &stream in streams {
            self.rig.use_on(&block, &self.streams[stream]);
        }
        let before = self.live();
        if let Err(failed) = self.rig.try_free(block) {
            assert_eq!(self.live(), before, "a failed free changes nothing");
            self.held.push(failed.allocation);
        }
        self.rig.check();
    }

    fn process(&mut self) {
        let _ = self.rig.host.process_events();
        self.rig.check();
    }

    fn empty(&mut self) {
        let _ = self.rig.host.empty_cache();
        self.rig.check();
    }

    fn pass(&mut self, stream: usize) {
        self.rig.backend.pass(&self.streams[stream]);
    }

    /// What clients hold, without what waits for events: that may come free at any time.
    fn live(&self) -> u64 {
        let stats = self.rig.host.stats();
        stats.active_bytes.current as u64 - stats.draining_bytes
    }
}

/// Uses on two streams, frees, events.
fn uses(script: &mut Script) {
    for bytes in [100, 5000, 3 * MIB, 100] {
        script.allocate(bytes);
    }
    script.use_and_free(&[0, 1]);
    script.use_and_free(&[]);
    script.allocate(100);
    script.pass(0);
    script.process();
    script.use_and_free(&[1]);
    script.pass(1);
    script.process();
    for bytes in [3 * MIB, 6000, 90] {
        script.allocate(bytes);
    }
    script.use_and_free(&[0]);
    script.empty();
}

/// A machine too small for all of it: every step of the ladder.
fn ladder(script: &mut Script) {
    script.allocate(30 * MIB);
    script.allocate(30 * MIB);
    script.use_and_free(&[0]);
    script.allocate(20 * MIB);
    script.use_and_free(&[]);
    script.allocate(64 * MIB);
    script.use_and_free(&[1]);
    script.allocate(90 * MIB);
    script.use_and_free(&[0, 1]);
    script.allocate(MIB);
    script.empty();
    script.allocate(80 * MIB);
}

/// One block used over and over, until events cost so much that more is pinned and blocks gather.
fn gathering(script: &mut Script) {
    for _ in 0..32 {
        script.allocate(3 * MIB / 2);
        script.use_and_free(&[0]);
        script.pass(0);
    }
}

/// A captured graph.
fn graph(script: &mut Script) {
    let pool = PoolId(1, 0);
    script.allocate(4096);
    let captured = script.streams[0].id();
    let begun = script.rig.host.begin_allocate_to_pool(pool, move |id| id == captured);
    begun.expect("asks no driver");
    for bytes in [4096, 2 * MIB, 4096] {
        let stream = script.streams[0];
        if let Ok(block) = script.rig.host.allocate_for(bytes, Default::default(), &stream) {
            script.rig.backend.judge().allocated_on_host(block.addr(), block.bytes());
            script.held.push(block);
        }
        script.rig.check();
    }
    script.use_and_free(&[0, 1]);
    script.use_and_free(&[0]);
    script.use_and_free(&[]);
    script.rig.host.end_allocate_to_pool(pool).expect("asks no driver");
    script.pass(0);
    script.process();
    script.rig.host.release_pool(pool).expect("errors are put off");
    script.rig.check();
    script.pass(1);
    script.empty();
    script.allocate(4096);
}

/// Runs the scenario with a fault, then without faults to its end. Returns whether the fault struck.
fn run(config: &HostConfig, scenario: Scenario, fault: Fault) -> bool {
    let mut script = Script::new(config.clone());
    script.rig.backend.set_faults([fault]);
    scenario(&mut script);
    let (_, struck) = script.rig.backend.fault_counts();
    script.rig.backend.set_faults([]);
    script.rig.backend.sync();
    script.held.drain(..).for_each(|block| script.rig.free(block));
    script.rig.host.process_events().expect("no faults");
    script.rig.host.empty_cache().expect("no faults");
    assert_eq!(script.rig.pinned(), 0, "nothing is lost");
    assert_eq!(script.rig.host.stats().active_requests.current, 0);
    script.rig.finish();
    struck > 0
}

fn configs() -> [HostConfig; 5] {
    let small = HostConfig { batch_blocks_max: 1, ..HostConfig::ours() };
    // Every block would be given its event at once, if that were not of great concern.
    let keen = HostConfig {
        batch_bytes_max: 0,
        event_interval_min: Duration::from_secs(3600),
        ..HostConfig::ours()
    };
    let mut catch_all = HostConfig::pytorch();
    catch_all.apply("pinned_free_catch_all:True,pinned_max_cached_size_mb:2").expect("valid");
    [HostConfig::pytorch(), HostConfig::ours(), small, keen, catch_all]
}

#[test]
fn every_single_fault_in_four_scenarios() {
    let mut struck = 0;
    for config in configs() {
        for scenario in [uses, ladder, graph, gathering] {
            for kind in [None, Some(ErrorKind::Other), Some(ErrorKind::OutOfMemory)] {
                for n in 1.. {
                    let fault = Fault::nth(n);
                    let fault = kind.into_iter().fold(fault, Fault::kind);
                    if !run(&config, scenario, fault) {
                        break;
                    }
                    struck += 1;
                }
            }
        }
    }
    assert!(struck > 300, "only {struck} faults struck");
}

#[test]
fn everything_fails_from_some_call_on() {
    for config in configs() {
        for scenario in [uses, ladder, graph, gathering] {
            for n in (1..40).step_by(3) {
                run(&config, scenario, Fault::from(n).kind(ErrorKind::Other));
            }
        }
    }
}

/// Drop with failing calls neither panics nor gives memory back that work may still use.
#[test]
fn an_allocator_may_be_dropped_while_the_driver_fails() {
    for config in configs() {
        for n in 1..12 {
            let mut script = Script::new(config.clone());
            uses(&mut script);
            script.held.drain(..).for_each(|block| script.rig.free(block));
            script.rig.backend.set_faults([Fault::from(n).kind(ErrorKind::Other)]);
            // A strict judge: unpinning under work would panic.
            drop(script.rig.host);
        }
    }
}

#[test]
fn an_allocator_may_be_dropped_after_the_driver_is_gone() {
    for config in configs() {
        let mut script = Script::new(config);
        uses(&mut script);
        script.rig.backend.unload();
        drop(script.rig.host);
    }
}
