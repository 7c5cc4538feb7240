//! Random operations with captures, replays, pools that graphs share and pools of the user, under the
//! judge. The program that they make up is a correct one: it joins what it forks, replays graphs one
//! after the other, and only while what they read is there. A failing sequence shrinks.
//!
//! `ALLOC_CORE_SEED` and `ALLOC_CORE_CASES` as for `machine`; a million operations:
//!
//! ```text
//! ALLOC_CORE_CASES=2900 cargo test --release -p alloc-core --test it machine_graphs -- --nocapture
//! ```

use crate::machine::environment;
use crate::rig::*;
use alloc_core::backend::Stream;
use alloc_core::{
    Allocation, CaptureError, GraphMemory, MemPool, Policy, PoolId, PoolOptions, PoolScope,
    ScopeFilter,
};
use mock_backend::{CaptureMode, Fault, Graph, MockBackend, MockError, MockStream};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Operations of one case.
const OPS: std::ops::Range<usize> = 300..400;
/// Cases, unless the environment says otherwise.
const CASES: u32 = 40;
const STREAMS: usize = 5;
/// Failed steps of a memory are tried again so often, which injected failures do not outlast.
const TRIES: usize = 1000;

#[derive(Clone, Debug)]
enum Op {
    Allocate {
        bytes: u64,
        stream: usize,
    },
    Free {
        block: usize,
    },
    Use {
        block: usize,
        stream: usize,
    },
    Order {
        before: usize,
        after: usize,
    },
    Pass {
        stream: usize,
    },
    Sync,
    Empty,
    /// Into a pool of an earlier graph, or a new one.
    Begin {
        stream: usize,
        share: Option<usize>,
    },
    End {
        capture: usize,
    },
    Fail {
        capture: usize,
        dropped: bool,
    },
    Replay {
        graph: usize,
        stream: usize,
    },
    Destroy {
        graph: usize,
    },
    NewPool {
        no_split: bool,
        use_on_oom: bool,
    },
    DropPool {
        pool: usize,
    },
    EmptyPool {
        pool: usize,
    },
    /// Sends requests to a pool: those of a stream, or all of this thread.
    Enter {
        pool: usize,
        stream: Option<usize>,
    },
    Leave {
        scope: usize,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let index = 0..64usize;
    let stream = 0..STREAMS;
    let bytes = prop_oneof![1..2 * KIB, 1..MIB, MIB..12 * MIB, select(vec![20 * MIB, 33 * MIB])];
    prop_oneof![
        12 => (bytes, stream.clone()).prop_map(|(bytes, stream)| Op::Allocate { bytes, stream }),
        10 => index.clone().prop_map(|block| Op::Free { block }),
        8 => (index.clone(), stream.clone()).prop_map(|(block, stream)| Op::Use { block, stream }),
        8 => (stream.clone(), stream.clone())
            .prop_map(|(before, after)| Op::Order { before, after }),
        2 => stream.clone().prop_map(|stream| Op::Pass { stream }),
        1 => Just(Op::Sync),
        1 => Just(Op::Empty),
        3 => (stream.clone(), prop::option::of(index.clone()))
            .prop_map(|(stream, share)| Op::Begin { stream, share }),
        2 => index.clone().prop_map(|capture| Op::End { capture }),
        1 => (index.clone(), any::<bool>())
            .prop_map(|(capture, dropped)| Op::Fail { capture, dropped }),
        3 => (index.clone(), stream).prop_map(|(graph, stream)| Op::Replay { graph, stream }),
        2 => index.clone().prop_map(|graph| Op::Destroy { graph }),
        1 => (prop::bool::weighted(0.2), any::<bool>())
            .prop_map(|(no_split, use_on_oom)| Op::NewPool { no_split, use_on_oom }),
        1 => index.clone().prop_map(|pool| Op::DropPool { pool }),
        1 => index.clone().prop_map(|pool| Op::EmptyPool { pool }),
        2 => (index.clone(), prop::option::of(0..STREAMS))
            .prop_map(|(pool, stream)| Op::Enter { pool, stream }),
        2 => index.prop_map(|scope| Op::Leave { scope }),
    ]
}

#[derive(Clone, Debug)]
struct Setting {
    policy: Policy,
    options: String,
    capacity: u64,
    /// Seed and probability of failures.
    faults: Option<(u64, f64)>,
}

fn setting(faulty: bool) -> impl Strategy<Value = Setting> {
    let kinds = select(vec!["expandable_segments:False", "expandable_segments:True"]);
    let more = select(vec![
        "",
        ",graph_capture_record_stream_reuse:True",
        ",max_split_size_mb:20",
        ",ours_margin:0,ours_margin_min_mb:0,ours_handle_max_mb:6,ours_handle_calm_mb:6",
    ]);
    let capacity = select(vec![120 * MIB, 300 * MIB, GIB]);
    let faults = (any::<u64>(), select(vec![0.005, 0.05]));
    (select(BOTH.to_vec()), kinds, more, capacity, faults).prop_map(
        move |(policy, kind, more, capacity, faults)| {
            // Options of one policy mean nothing to the other.
            let more = if more.contains("ours") && policy == Policy::Pytorch { "" } else { more };
            let faults = faulty.then_some(faults);
            Setting { policy, options: format!("{kind}{more}"), capacity, faults }
        },
    )
}

/// What was played, so that a test can tell that it was about something.
#[derive(Clone, Copy, Default, Debug)]
struct Tally {
    operations: u64,
    graphs: u64,
    replays: u64,
    failed_captures: u64,
    captured_blocks: u64,
    /// Of those, made while a scope of the user was in force further out.
    in_scopes: u64,
    /// Blocks of the user's pools.
    user_blocks: u64,
}

impl Tally {
    fn plus(self, other: Self) -> Self {
        Tally {
            operations: self.operations + other.operations,
            graphs: self.graphs + other.graphs,
            replays: self.replays + other.replays,
            failed_captures: self.failed_captures + other.failed_captures,
            captured_blocks: self.captured_blocks + other.captured_blocks,
            in_scopes: self.in_scopes + other.in_scopes,
            user_blocks: self.user_blocks + other.user_blocks,
        }
    }

    fn is_about_something(&self) -> bool {
        let Tally { operations, graphs, replays, captured_blocks, in_scopes, user_blocks, .. } =
            *self;
        let often = [graphs, replays, captured_blocks, user_blocks];
        often.iter().all(|count| count * 200 > operations)
            && in_scopes > 0
            && self.failed_captures > 0
    }
}

struct Block {
    allocation: Allocation,
    stream: usize,
    /// The capture that it was made in, by number.
    capture: Option<usize>,
    number: usize,
}

struct Going {
    memory: GraphMemory<MockBackend>,
    origin: usize,
    streams: Vec<usize>,
    /// Blocks of others that its work uses, by number.
    inputs: Vec<usize>,
    number: usize,
}

struct Captured {
    memory: GraphMemory<MockBackend>,
    graph: Option<Graph>,
    inputs: Vec<usize>,
}

struct Program {
    rig: Rig,
    blocks: Vec<Block>,
    going: Vec<Going>,
    graphs: Vec<Captured>,
    /// Pools of graphs.
    pools: Vec<PoolId>,
    user_pools: Vec<MemPool<MockBackend>>,
    scopes: Vec<PoolScope<MockBackend>>,
    next: usize,
    tally: Tally,
}

/// One of a list, if there is one.
fn pick(len: usize, choice: usize) -> Option<usize> {
    (len > 0).then(|| choice % len.max(1))
}

impl Program {
    fn new(setting: &Setting) -> Self {
        let rig = Rig::of_size(setting.capacity, setting.policy, &setting.options);
        if let Some((seed, p)) = setting.faults {
            rig.backend.set_faults([Fault::chance(seed, p)]);
        }
        Program {
            rig,
            blocks: Vec::new(),
            going: Vec::new(),
            graphs: Vec::new(),
            pools: Vec::new(),
            user_pools: Vec::new(),
            scopes: Vec::new(),
            next: 0,
            tally: Tally::default(),
        }
    }

    fn number(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    fn s(&self, n: usize) -> MockStream {
        self.rig.s(n)
    }

    /// The capture that a stream takes part in, as a place in the list.
    fn capture_of(&self, stream: usize) -> Option<usize> {
        self.going.iter().position(|going| going.streams.contains(&stream))
    }

    fn order(&mut self, before: usize, after: usize) {
        if before == after {
            return;
        }
        match (self.capture_of(before), self.capture_of(after)) {
            (Some(from), None) => self.going[from].streams.push(after),
            (from, to) if from == to => {}
            _ => return,
        }
        self.rig.backend.order(&self.s(before), &self.s(after));
    }

    fn play(&mut self, op: &Op) {
        match *op {
            Op::Allocate { bytes, stream } => self.allocate(bytes, stream),
            Op::Free { block } => self.free(block),
            Op::Use { block, stream } => self.use_on(block, stream),
            Op::Order { before, after } => self.order(before, after),
            Op::Pass { stream } => self.rig.pass(&self.s(stream)),
            Op::Sync => self.rig.backend.sync(),
            Op::Empty => drop(self.rig.empty_cache()),
            Op::Begin { stream, share } => self.begin(stream, share),
            Op::End { capture } => self.end(capture),
            Op::Fail { capture, dropped } => self.fail(capture, dropped),
            Op::Replay { graph, stream } => self.replay(graph, stream),
            Op::Destroy { graph } => self.destroy(graph),
            Op::NewPool { no_split, use_on_oom } => self.new_pool(no_split, use_on_oom),
            Op::DropPool { pool } => {
                pick(self.user_pools.len(), pool).map(|at| self.user_pools.swap_remove(at));
            }
            Op::EmptyPool { pool } => {
                pick(self.user_pools.len(), pool).map(|at| self.user_pools[at].empty_cache());
            }
            Op::Enter { pool, stream } => self.enter(pool, stream),
            Op::Leave { scope } => {
                pick(self.scopes.len(), scope).map(|at| self.scopes.swap_remove(at));
            }
        }
        self.tally.operations += 1;
        self.rig.verify();
    }

    fn allocate(&mut self, bytes: u64, stream: usize) {
        if let Ok(allocation) = self.rig.try_alloc(bytes, &self.s(stream)) {
            let capture = self.capture_of(stream).map(|at| self.going[at].number);
            let pool = self.rig.pool_of(&allocation);
            self.tally.captured_blocks += u64::from(capture.is_some());
            self.tally.in_scopes += u64::from(capture.is_some() && !self.scopes.is_empty());
            self.tally.user_blocks += u64::from(self.user_pools.iter().any(|p| p.id() == pool));
            let number = self.number();
            self.blocks.push(Block { allocation, stream, capture, number });
        }
    }

    fn free(&mut self, choice: usize) {
        let Some(at) = pick(self.blocks.len(), choice) else { return };
        let block = self.blocks.remove(at);
        if let Err((allocation, error)) = self.rig.try_free(block.allocation) {
            assert!(self.rig.backend.fault_counts().1 > 0, "{error}");
            self.blocks.push(Block { allocation, ..block });
        }
    }

    /// Work on a block on another stream, after the one it belongs to.
    fn use_on(&mut self, choice: usize, stream: usize) {
        let Some(at) = pick(self.blocks.len(), choice) else { return };
        let (owner, capture, number) =
            (self.blocks[at].stream, self.blocks[at].capture, self.blocks[at].number);
        let made_in = self.going.iter().position(|going| Some(going.number) == capture);
        if made_in.is_some() {
            self.order(owner, stream);
        }
        let user = self.capture_of(stream);
        // What a capture makes is for that capture until it is over.
        if made_in.is_some() && made_in != user {
            return;
        }
        let block = &self.blocks[at].allocation;
        if let Err(error) = self.rig.record_stream(block, &self.s(stream)) {
            return assert!(self.rig.backend.fault_counts().1 > 0, "{error}");
        }
        self.rig.touch(block, &self.s(stream));
        if let Some(user) = user.filter(|_| made_in.is_none()) {
            self.going[user].inputs.push(number);
        }
    }

    fn begin(&mut self, stream: usize, share: Option<usize>) {
        if self.capture_of(stream).is_some() || self.graphs.len() > 6 {
            return;
        }
        let pool = share.and_then(|choice| Some(self.pools[pick(self.pools.len(), choice)?]));
        let mut memory = match pool {
            Some(pool) => self.rig.graph_memory_in(pool).unwrap(),
            None => self.rig.graph_memory(),
        };
        let s = self.s(stream);
        memory.expect().unwrap();
        self.rig.backend.begin_capture(&s, CaptureMode::Global).unwrap();
        self.rig.backend.judge().capture_shares(&s, number(memory.pool()));
        if let Err(error) = memory.begin(&s) {
            let busy = matches!(error, CaptureError::BusyPool { .. });
            assert!(busy || self.rig.backend.fault_counts().1 > 0, "{error}");
            self.rig.backend.end_capture(&s).unwrap();
            return memory.abort().unwrap();
        }
        let number = self.number();
        self.pools.push(memory.pool());
        self.going.push(Going {
            memory,
            origin: stream,
            streams: vec![stream],
            inputs: vec![],
            number,
        });
    }

    fn end(&mut self, choice: usize) {
        let Some(at) = pick(self.going.len(), choice) else { return };
        for side in self.going[at].streams.clone() {
            self.order(side, self.going[at].origin);
        }
        let Going { mut memory, origin, inputs, .. } = self.going.remove(at);
        let graph = self.rig.backend.end_capture(&self.s(origin)).unwrap();
        insist(|| memory.end());
        self.tally.graphs += 1;
        self.graphs.push(Captured { memory, graph: Some(graph), inputs });
    }

    fn fail(&mut self, choice: usize, dropped: bool) {
        let Some(at) = pick(self.going.len(), choice) else { return };
        let Going { mut memory, origin, .. } = self.going.remove(at);
        self.tally.failed_captures += 1;
        self.rig.backend.invalidate_capture(&self.s(origin));
        self.rig.backend.end_capture(&self.s(origin)).unwrap_err();
        if !dropped {
            memory.abort().unwrap();
        }
    }

    fn replay(&mut self, choice: usize, stream: usize) {
        let Some(at) = pick(self.graphs.len(), choice) else { return };
        if self.capture_of(stream).is_some() {
            return;
        }
        let live = |number: &usize| self.blocks.iter().any(|block| block.number == *number);
        if self.graphs[at].graph.is_none() || !self.graphs[at].inputs.iter().all(live) {
            return;
        }
        if self.going.is_empty() {
            (0..STREAMS).for_each(|other| self.order(other, stream));
        } else {
            self.rig.backend.sync();
        }
        let (rig, s) = (&self.rig, self.rig.s(stream));
        // A replay is work on what the graph reads, as any other.
        let inputs = self.blocks.iter().filter(|b| self.graphs[at].inputs.contains(&b.number));
        for block in inputs {
            if let Err(error) = rig.record_stream(&block.allocation, &s) {
                return assert!(rig.backend.fault_counts().1 > 0, "{error}");
            }
        }
        let Captured { memory, graph, .. } = &mut self.graphs[at];
        if let Some(graph) = graph {
            rig.replay(memory, graph, &s);
            self.tally.replays += 1;
        }
    }

    fn destroy(&mut self, choice: usize) {
        let Some(at) = pick(self.graphs.len(), choice) else { return };
        self.graphs[at].graph = None;
        match self.graphs[at].memory.reset() {
            Ok(()) => drop(self.graphs.swap_remove(at)),
            // Tried again later.
            Err(CaptureError::StillCapturing { .. }) => {}
            Err(error) => assert!(self.rig.backend.fault_counts().1 > 0, "{error}"),
        }
    }

    fn new_pool(&mut self, no_split: bool, use_on_oom: bool) {
        if self.user_pools.len() >= 4 {
            return;
        }
        let mut options = PoolOptions::new();
        options.no_split = no_split;
        options.use_on_oom = use_on_oom;
        self.user_pools.push(self.rig.create_pool(DEV0, options).unwrap());
    }

    /// Scopes open while nothing is captured, so that those of captures are further in: what a capture
    /// makes has to come from its graph's pool.
    fn enter(&mut self, choice: usize, stream: Option<usize>) {
        let Some(at) = pick(self.user_pools.len(), choice) else { return };
        if !self.going.is_empty() || self.scopes.len() >= 4 {
            return;
        }
        let filter = match stream {
            Some(stream) => ScopeFilter::Stream(self.s(stream).id()),
            None => ScopeFilter::CurrentThread,
        };
        self.scopes.push(self.user_pools[at].scope(filter));
    }

    /// Ends everything; nothing is left.
    fn finish(mut self) -> Tally {
        self.rig.backend.set_faults([]);
        self.scopes.clear();
        while !self.going.is_empty() {
            self.end(0);
        }
        while !self.graphs.is_empty() {
            self.destroy(0);
        }
        while !self.blocks.is_empty() {
            self.free(0);
        }
        self.user_pools.clear();
        self.rig.empty();
        assert_eq!((self.rig.reserved(), self.rig.backend.used(DEV0)), (0, 0));
        assert!(self.rig.pools(DEV0).unwrap().is_empty());
        self.tally
    }
}

/// Repeats a step that injected failures may stop.
fn insist(mut step: impl FnMut() -> Result<(), CaptureError<MockError>>) {
    let done = (0..TRIES).any(|_| step().is_ok());
    assert!(done, "{:?}", step());
}

fn play(setting: &Setting, ops: &[Op]) -> Result<Tally, String> {
    let played = catch_unwind(AssertUnwindSafe(|| {
        let mut program = Program::new(setting);
        ops.iter().for_each(|op| program.play(op));
        program.finish()
    }));
    played.map_err(|panic| {
        let literal = panic.downcast_ref::<&str>().copied();
        let text = literal.or(panic.downcast_ref::<String>().map(String::as_str));
        text.unwrap_or("a panic").to_owned()
    })
}

fn run(faulty: bool) {
    let seed = environment("ALLOC_CORE_SEED").unwrap_or(1);
    let cases = environment("ALLOC_CORE_CASES").map_or(CASES, |cases| cases as u32);
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config =
        Config { cases, failure_persistence: None, max_shrink_iters: 2_000, ..Config::default() };
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let case = (setting(faulty), prop::collection::vec(op(), OPS));
    let total = Cell::new(Tally::default());
    let result = runner.run(&case, |(setting, ops)| {
        total.set(total.get().plus(play(&setting, &ops).map_err(TestCaseError::fail)?));
        Ok(())
    });
    match result {
        Ok(()) => {
            let total = total.get();
            println!("{total:?}");
            assert!(total.is_about_something(), "{total:?}");
        }
        Err(TestError::Fail(why, (setting, ops))) => {
            panic!("ALLOC_CORE_SEED={seed}: {why}\n{setting:?}\n{} operations: {ops:#?}", ops.len())
        }
        Err(TestError::Abort(why)) => panic!("ALLOC_CORE_SEED={seed}: {why}"),
    }
}

#[test]
fn captures_and_replays_pass_the_judge() {
    run(false);
}

#[test]
fn injected_failures_during_captures_change_nothing_else() {
    run(true);
}
