//! Every backend call of a scenario with captures fails once, and from then on for good. The program
//! takes failures as they come: a capture that cannot begin is given up, and what cannot be freed or
//! reset now is tried again at the end.

use crate::rig::*;
use alloc_core::backend::ErrorKind;
use alloc_core::{Allocation, GraphMemory, Policy};
use mock_backend::{CaptureMode, Fault, Graph, MockBackend, MockStream};
use std::cell::RefCell;

type Memory = GraphMemory<MockBackend>;

const OPTIONS: [&str; 2] = ["", "expandable_segments:True"];
const REUSE: &str = "graph_capture_record_stream_reuse:True,max_split_size_mb:30";

/// What a program holds, and could not give back yet.
struct Play<'a> {
    rig: &'a Rig,
    blocks: RefCell<Vec<Allocation>>,
    memories: RefCell<Vec<Memory>>,
}

impl Play<'_> {
    fn alloc(&self, bytes: u64, stream: &MockStream) -> Option<Allocation> {
        self.rig.try_alloc(bytes, stream).ok()
    }

    fn free(&self, block: Option<Allocation>) {
        if let Some(Err((block, _))) = block.map(|block| self.rig.try_free(block)) {
            self.blocks.borrow_mut().push(block);
        }
    }

    /// Queues work on a block on another stream, if that can be declared.
    fn use_on(&self, block: &Option<Allocation>, stream: &MockStream) {
        let Some(block) = block else { return };
        if self.rig.record_stream(block, stream).is_ok() {
            self.rig.touch(block, stream);
        }
        self.rig.verify();
    }

    /// Captures `work` on a stream. If the capture cannot get memory, the work is done all the same.
    fn capture(
        &self,
        mut memory: Memory,
        s: &MockStream,
        work: impl FnOnce(),
    ) -> (Memory, Option<Graph>) {
        let backend = &self.rig.backend;
        memory.expect().unwrap();
        backend.begin_capture(s, CaptureMode::Global).unwrap();
        backend.judge().capture_shares(s, number(memory.pool()));
        if memory.begin(s).is_err() {
            backend.end_capture(s).unwrap();
            memory.abort().unwrap();
            work();
            return (memory, None);
        }
        work();
        let graph = backend.end_capture(s).unwrap();
        if memory.end().is_err() && memory.end().is_err() {
            // It keeps failing: the graph is given up.
            drop(graph);
            memory.abort().unwrap();
            return (memory, None);
        }
        self.rig.verify();
        (memory, Some(graph))
    }

    fn destroy(&self, (mut memory, graph): (Memory, Option<Graph>)) {
        drop(graph);
        if memory.reset().is_err() {
            self.memories.borrow_mut().push(memory);
        }
        self.rig.verify();
    }
}

/// Two graphs of one pool and one of its own; uses on side streams before, inside and after captures;
/// a full device beside a capture.
fn scenario(play: &Play<'_>) {
    let rig = play.rig;
    let [main, side, eager] = [1, 2, 0].map(|n| rig.s(n));
    let earlier = play.alloc(3 * MIB, &eager);
    play.use_on(&earlier, &side);
    let first = rig.graph_memory();
    let pool = first.pool();
    let work = || {
        let a = play.alloc(12 * MIB, &main);
        rig.backend.order(&main, &side);
        play.use_on(&a, &side);
        play.free(a);
        let b = play.alloc(MIB, &side);
        rig.backend.order(&side, &main);
        let c = play.alloc(12 * MIB, &main);
        play.free(c);
        play.free(b);
    };
    let first = play.capture(first, &main, || {
        work();
        play.free(earlier);
    });
    let second = play.capture(rig.graph_memory_in(pool).unwrap(), &main, work);
    if let (_, Some(graph)) = &first {
        rig.backend.replay(&side, graph);
    }
    rig.backend.sync();
    let own = play.capture(rig.graph_memory(), &main, || {
        let large = play.alloc(60 * MIB, &eager);
        let more = play.alloc(60 * MIB, &eager);
        play.use_on(&large, &side);
        play.free(large);
        let again = play.alloc(50 * MIB, &eager);
        play.free(again);
        play.free(more);
        let _ = rig.empty_cache();
    });
    play.destroy(first);
    let _ = rig.empty_cache();
    play.destroy(own);
    play.destroy(second);
    let _ = rig.empty_cache();
}

/// Plays it with these faults; how many calls they struck.
fn under(faults: Vec<Fault>, policy: Policy, options: &str) -> u64 {
    let given: Vec<_> = [REUSE, options].into_iter().filter(|o| !o.is_empty()).collect();
    let rig = Rig::of_size(160 * MIB, policy, &given.join(","));
    rig.backend.set_faults(faults);
    let play = Play { rig: &rig, blocks: RefCell::default(), memories: RefCell::default() };
    scenario(&play);
    let struck = rig.backend.fault_counts().1;
    rig.backend.set_faults([]);
    for mut memory in play.memories.take() {
        memory.reset().unwrap();
    }
    play.blocks.take().into_iter().for_each(|block| rig.free(block));
    rig.empty();
    assert_eq!((rig.reserved(), rig.backend.used(DEV0)), (0, 0));
    assert!(rig.pools(DEV0).unwrap().is_empty());
    struck
}

fn sweep(fault: impl Fn(u64) -> Vec<Fault>) {
    for policy in BOTH {
        for options in OPTIONS {
            let mut n = 1;
            while under(fault(n), policy, options) > 0 {
                n += 1;
            }
            assert!(n > 40, "the scenario makes only {n} calls");
        }
    }
}

#[test]
fn every_call_around_captures_fails_once() {
    for kind in [ErrorKind::OutOfMemory, ErrorKind::Other] {
        sweep(|n| vec![Fault::nth(n).kind(kind)]);
    }
}

#[test]
fn every_call_around_captures_fails_from_some_point_on() {
    sweep(|n| vec![Fault::from(n)]);
}

#[test]
fn the_scenario_itself() {
    for policy in BOTH {
        for options in OPTIONS {
            assert_eq!(under(vec![], policy, options), 0);
        }
    }
}
