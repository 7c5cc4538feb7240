//! Graphs under the judge: each rule about them broken once, and kept where that is not obvious; what
//! the backend says of the order inside a capture.

use crate::rules::{DEV0, MIB};
use alloc_core::backend::{Backend, Capture, CaptureStatus, GraphNodeId};
use alloc_core::backend::{Reservation, Segment, VirtualMemory};
use alloc_core::{Addr, DeviceId};
use mock_backend::*;
use std::collections::HashSet;

const DEV: DeviceId = DEV0;

struct Rig {
    backend: MockBackend,
    main: MockStream,
    side: MockStream,
    other: MockStream,
    segment: Option<MockSegment>,
    at: Addr,
}

/// A device with a segment of 2 MiB at `at` and three streams.
fn rig() -> Rig {
    let backend = MockBackend::builder().device(64 * MIB).build();
    let [main, side, other] = [0; 3].map(|_| backend.stream(DEV));
    let segment = backend.acquire(DEV, 2 * MIB, &main).unwrap();
    let at = segment.base();
    Rig { backend, main, side, other, segment: Some(segment), at }
}

impl Rig {
    fn begin(&self, stream: &MockStream) {
        self.backend.begin_capture(stream, CaptureMode::Global).unwrap();
    }

    fn touch(&self, stream: &MockStream, at: Addr) {
        self.backend.launch(stream, Work::new().touching(at, 512));
    }

    /// A graph captured on `main` that allocates `at`, uses it and frees it.
    fn graph(&self, at: Addr) -> Graph {
        self.begin(&self.main);
        self.captured(at)
    }

    /// The same for a pool that is shared.
    fn graph_in(&self, pool: u64, at: Addr) -> Graph {
        self.begin(&self.main);
        self.backend.judge().capture_shares(&self.main, pool);
        self.captured(at)
    }

    fn captured(&self, at: Addr) -> Graph {
        self.backend.judge().allocated(at, 512, &self.main);
        self.touch(&self.main, at);
        self.backend.judge().freed(at);
        self.backend.end_capture(&self.main).unwrap()
    }

    #[track_caller]
    fn expect(&self, rules: &[Rule]) {
        let found: Vec<Rule> = self.backend.take_violations().iter().map(|v| v.rule).collect();
        assert_eq!(found, rules);
    }
}

#[test]
fn a_graph_replays_on_any_stream_as_often_as_one_likes() {
    let rig = rig();
    let graph = rig.graph(rig.at);
    assert_eq!(graph.touches(), [(rig.at, 512)]);
    assert_eq!(graph.streams().len(), 1);
    for stream in [&rig.main, &rig.side, &rig.other, &rig.side] {
        rig.backend.replay(stream, &graph);
    }
    rig.expect(&[]);
    assert!(rig.backend.is_busy(&rig.main) && rig.backend.is_busy(&rig.side));
    // A graph does not run twice at once: the second run waits for the first.
    assert!(!rig.backend.finish_next(&rig.other));
    rig.backend.pass(&rig.side);
    assert!(!rig.backend.is_busy(&rig.main) && !rig.backend.is_busy(&rig.other));
}

#[test]
fn eager_work_must_not_get_the_memory_of_a_graph() {
    let rig = rig();
    let graph = rig.graph(rig.at);
    rig.backend.judge().allocated(rig.at + 512, 512, &rig.main);
    rig.expect(&[]);
    rig.backend.judge().allocated(rig.at, 512, &rig.main);
    rig.expect(&[Rule::GraphAliased]);
    rig.backend.judge().freed(rig.at);
    drop(graph);
    rig.backend.judge().allocated(rig.at, 512, &rig.main);
    rig.expect(&[]);
}

#[test]
fn captures_alias_only_if_they_share() {
    for (first, second, broken) in
        [(None, None, true), (Some(1), Some(2), true), (Some(1), Some(1), false)]
    {
        let rig = rig();
        let make = |pool: Option<u64>| match pool {
            None => rig.graph(rig.at),
            Some(pool) => rig.graph_in(pool, rig.at),
        };
        let _graphs = [make(first), make(second)];
        rig.expect(if broken { &[Rule::GraphAliased] } else { &[] });
        let told = |pool| {
            rig.backend.judge().allocated_in(rig.at, 512, &rig.other, pool);
            rig.backend.judge().freed(rig.at);
        };
        told(9);
        rig.expect(&[Rule::GraphAliased]);
        told(1);
        rig.expect(if broken { &[Rule::GraphAliased] } else { &[] });
    }
}

#[test]
fn captures_that_go_on_own_their_memory_too() {
    let rig = rig();
    rig.begin(&rig.main);
    rig.backend.judge().allocated(rig.at, 512, &rig.main);
    rig.touch(&rig.main, rig.at);
    rig.backend.judge().freed(rig.at);
    rig.begin(&rig.side);
    rig.backend.judge().allocated(rig.at, 512, &rig.side);
    rig.expect(&[Rule::GraphAliased]);
    rig.backend.judge().freed(rig.at);
    rig.backend.judge().allocated(rig.at, 512, &rig.main);
    rig.expect(&[]);
    rig.backend.judge().freed(rig.at);
    // A capture that fails leaves nothing that anybody owns.
    rig.backend.invalidate_capture(&rig.main);
    assert_eq!(rig.backend.end_capture(&rig.main), Err(CaptureError::Invalidated));
    rig.backend.judge().allocated(rig.at, 512, &rig.side);
    rig.expect(&[]);
    rig.backend.end_capture(&rig.side).unwrap();
}

#[test]
fn returning_the_memory_of_a_graph() {
    let mut rig = rig();
    let graph = rig.graph(rig.at);
    let segment = rig.segment.take().unwrap();
    rig.backend.release(segment).unwrap();
    rig.expect(&[Rule::ReturnedUnderGraph]);
    rig.backend.replay(&rig.main, &graph);
    rig.expect(&[Rule::ReplayWithoutMemory]);
    // The addresses come back with other memory behind them.
    let again = rig.backend.acquire(DEV, 2 * MIB, &rig.main).unwrap();
    assert_eq!(again.base(), rig.at);
    rig.backend.replay(&rig.main, &graph);
    rig.expect(&[Rule::ReplayWithoutMemory]);
}

#[test]
fn memory_of_a_destroyed_graph_may_be_returned() {
    let mut rig = rig();
    let graph = rig.graph(rig.at);
    rig.backend.replay(&rig.side, &graph);
    drop(graph);
    let segment = rig.segment.take().unwrap();
    rig.backend.release(segment).unwrap();
    rig.expect(&[]);
}

#[test]
fn pages_of_a_graph_must_stay_and_must_not_change() {
    let rig = rig();
    let range = rig.backend.reserve(DEV, 4 * MIB).unwrap();
    let pages = [0; 2].map(|_| rig.backend.create(DEV, 2 * MIB).unwrap());
    let map = |page| {
        rig.backend.map(&range, range.base(), page).unwrap();
        rig.backend.set_access(&range, range.base(), 2 * MIB, DEV).unwrap();
    };
    map(&pages[0]);
    let graph = rig.graph(range.base());
    rig.backend.replay(&rig.side, &graph);
    rig.expect(&[]);
    rig.backend.unmap(&range, range.base(), 2 * MIB).unwrap();
    rig.expect(&[Rule::UnmapUnderWork, Rule::ReturnedUnderGraph]);
    map(&pages[1]);
    rig.backend.replay(&rig.side, &graph);
    rig.expect(&[Rule::ReplayWithoutMemory]);
    rig.backend.unmap(&range, range.base(), 2 * MIB).unwrap();
    rig.backend.take_violations();
    map(&pages[0]);
    rig.backend.replay(&rig.side, &graph);
    rig.expect(&[]);
}

#[test]
fn reuse_must_wait_for_a_replay_that_the_host_has_not_seen_end() {
    let rig = rig();
    let graph = rig.graph(rig.at);
    rig.backend.replay(&rig.side, &graph);
    drop(graph);
    rig.backend.judge().allocated(rig.at, 512, &rig.other);
    rig.expect(&[Rule::EarlyReuse]);
    rig.backend.judge().freed(rig.at);
    rig.backend.sync_stream(&rig.side);
    rig.backend.judge().allocated(rig.at, 512, &rig.other);
    rig.expect(&[]);
}

#[test]
fn graphs_that_share_memory_must_not_run_at_once() {
    let rig = rig();
    let graphs = [rig.graph_in(1, rig.at), rig.graph_in(1, rig.at)];
    rig.backend.replay(&rig.main, &graphs[0]);
    rig.backend.replay(&rig.main, &graphs[1]);
    rig.expect(&[]);
    rig.backend.replay(&rig.side, &graphs[0]);
    rig.expect(&[Rule::ReplayRace]);
    rig.backend.sync();
    rig.backend.order(&rig.main, &rig.side);
    rig.backend.replay(&rig.side, &graphs[1]);
    rig.expect(&[]);
    // A capture may reuse memory while a graph runs that shares it: it runs later.
    rig.backend.begin_capture(&rig.main, CaptureMode::Global).unwrap();
    rig.backend.judge().capture_shares(&rig.main, 1);
    rig.backend.judge().allocated(rig.at, 512, &rig.main);
    rig.expect(&[]);
    rig.backend.end_capture(&rig.main).unwrap();
}

#[test]
fn what_a_graph_reads_must_still_be_the_clients() {
    let rig = rig();
    rig.backend.judge().allocated(rig.at, 512, &rig.main);
    rig.begin(&rig.main);
    rig.touch(&rig.main, rig.at);
    let graph = rig.backend.end_capture(&rig.main).unwrap();
    rig.backend.replay(&rig.main, &graph);
    rig.expect(&[]);
    rig.backend.judge().freed(rig.at);
    rig.backend.replay(&rig.main, &graph);
    rig.expect(&[Rule::UnallocatedUse]);
    rig.backend.judge().still_live(rig.at, 512);
    rig.backend.replay(&rig.main, &graph);
    rig.expect(&[]);
    rig.backend.judge().freed(rig.at);
    rig.backend.judge().allocated(rig.at, 512, &rig.main);
    rig.backend.replay(&rig.main, &graph);
    rig.expect(&[Rule::UnallocatedUse]);
}

#[test]
fn a_replay_comes_after_other_work_on_its_memory() {
    let rig = rig();
    rig.backend.judge().allocated(rig.at, 512, &rig.main);
    rig.begin(&rig.main);
    rig.touch(&rig.main, rig.at);
    let graph = rig.backend.end_capture(&rig.main).unwrap();
    rig.touch(&rig.side, rig.at);
    rig.backend.replay(&rig.main, &graph);
    rig.expect(&[Rule::ReplayRace]);
    rig.backend.sync();
    rig.touch(&rig.side, rig.at);
    rig.backend.order(&rig.side, &rig.main);
    rig.backend.replay(&rig.main, &graph);
    rig.expect(&[]);
}

/// The backend's account of the order inside a capture, which an allocator builds on.
#[test]
fn tips_and_pasts_follow_forks_and_joins() {
    let rig = rig();
    let past = |stream: &MockStream| {
        let mut past = HashSet::new();
        rig.backend.extend_past(stream, &mut past).unwrap();
        past
    };
    let tips = |stream: &MockStream| -> HashSet<GraphNodeId> {
        rig.backend.capture_tips(stream).unwrap().unwrap().nodes.into_iter().collect()
    };
    assert_eq!(rig.backend.capture_status(&rig.main).unwrap(), CaptureStatus::None);
    assert_eq!(rig.backend.capture_tips(&rig.main).unwrap(), None);
    rig.begin(&rig.main);
    let CaptureStatus::Active(id) = rig.backend.capture_status(&rig.main).unwrap() else {
        panic!("it captures")
    };
    assert!(tips(&rig.main).is_empty() && past(&rig.main).is_empty());
    rig.backend.launch(&rig.main, Work::new());
    rig.backend.order(&rig.main, &rig.side);
    assert_eq!(rig.backend.capture_status(&rig.side).unwrap(), CaptureStatus::Active(id));
    assert_eq!(tips(&rig.side), tips(&rig.main));
    rig.backend.launch(&rig.side, Work::new());
    let used = tips(&rig.side);
    assert!(past(&rig.side).is_superset(&past(&rig.main)));
    assert!(!past(&rig.main).is_superset(&used));
    rig.backend.launch(&rig.main, Work::new());
    rig.backend.order(&rig.side, &rig.main);
    assert!(past(&rig.main).is_superset(&used));
    assert_eq!(past(&rig.main).len(), 3);
    // What is known need not be walked again, and stays.
    let mut known = past(&rig.main);
    rig.backend.launch(&rig.main, Work::new());
    rig.backend.extend_past(&rig.main, &mut known).unwrap();
    assert_eq!(known, past(&rig.main));
    rig.backend.invalidate_capture(&rig.side);
    assert_eq!(rig.backend.capture_status(&rig.main).unwrap(), CaptureStatus::Invalidated);
    assert_eq!(rig.backend.capture_tips(&rig.main).unwrap(), None);
    rig.backend.end_capture(&rig.main).unwrap_err();
    assert_eq!(rig.backend.capture_status(&rig.side).unwrap(), CaptureStatus::None);
    rig.begin(&rig.main);
    let again = rig.backend.capture_status(&rig.main).unwrap();
    assert_ne!(again, CaptureStatus::Active(id), "an id is not used twice");
    rig.backend.end_capture(&rig.main).unwrap();
}
