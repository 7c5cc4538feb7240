//! Random operations on the allocator and on the naive model, compared after each.

use crate::naive::{BlockNo, Classes, Rules, Slabs, World};
use crate::support::*;
use alloc_core::host::{HostAllocation, HostConfig};
use mock_backend::{MockBackend, MockStream, Placement};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::time::Duration;

const STREAMS: usize = 3;

#[derive(Clone, Debug)]
enum Op {
    Allocate(u64),
    /// Of the block held so-manieth, modulo their number.
    Free(usize),
    Use(usize, usize),
    Pass(usize),
    Process,
    Empty,
}

fn op() -> impl Strategy<Value = Op> {
    let bytes = prop_oneof![
        4 => 1..4096_u64,
        2 => 4096..65_536_u64,
        1 => 65_536..400_000_u64,
        // The same few sizes again and again.
        3 => prop::sample::select(vec![64, 700, 4096, 9000, 70_000]),
    ];
    prop_oneof![
        8 => bytes.prop_map(Op::Allocate),
        7 => any::<usize>().prop_map(Op::Free),
        4 => (any::<usize>(), 0..STREAMS).prop_map(|(block, stream)| Op::Use(block, stream)),
        2 => (0..STREAMS).prop_map(Op::Pass),
        1 => Just(Op::Process),
        1 => Just(Op::Empty),
    ]
}

/// Limits that a few operations reach.
fn rules() -> impl Strategy<Value = Rules> {
    (6..=12_u32, 1..=4_usize, 1..=3_u64, prop::bool::ANY, prop::bool::ANY).prop_map(
        |(granule, batch_blocks, growth, bounded, gathers)| Rules {
            granule: 1 << granule,
            small_max: 8192,
            growth_min: growth * 65_536,
            growth_max: growth * 4 * 65_536,
            batch_blocks,
            batch_bytes: 100_000,
            draining_max: if bounded { 0 } else { 150_000 },
            gathers,
            cached_max: if bounded { 300_000 } else { u64::MAX },
        },
    )
}

fn config(rules: &Rules) -> HostConfig {
    HostConfig {
        granule_bytes: rules.granule,
        small_bytes_max: rules.small_max,
        growth_bytes_min: rules.growth_min,
        growth_bytes_max: rules.growth_max,
        batch_blocks_max: rules.batch_blocks as u16,
        batch_bytes_max: rules.batch_bytes,
        draining_bytes_max: rules.draining_max,
        // So long that no time to speak of passes meanwhile.
        event_interval_min: Duration::from_secs(u64::from(rules.gathers) * 3600),
        cached_bytes_max: Some(rules.cached_max),
        cached_age_max: None,
        ..HostConfig::ours()
    }
}

/// The simulated machine as the model sees it, after the allocator has acted: new segments are
/// where the machine put them, and must have the length that the model expects.
struct Seen {
    /// Pinned by the allocator, unknown to the model yet.
    new: BTreeMap<u64, u64>,
    /// Given back by the model.
    unpinned: Vec<u64>,
    queued: [u64; STREAMS],
    done: [u64; STREAMS],
}

impl World for Seen {
    fn pin(&mut self, bytes: u64) -> u64 {
        let found = self.new.iter().find(|(_, pinned)| **pinned == bytes).map(|(addr, _)| *addr);
        let addr = found.unwrap_or_else(|| panic!("no segment of {bytes} in {:?}", self.new));
        self.new.remove(&addr);
        addr
    }

    fn unpin(&mut self, addr: u64) {
        self.unpinned.push(addr);
    }

    fn queued(&self, stream: usize) -> u64 {
        self.queued[stream]
    }

    fn done(&self, stream: usize) -> u64 {
        self.done[stream]
    }
}

/// Either model.
enum Model {
    Classes(Classes),
    Slabs(Box<Slabs>),
}

macro_rules! model {
    ($model:expr, $m:ident => $act:expr) => {
        match $model {
            Model::Classes($m) => $act,
            Model::Slabs($m) => $act,
        }
    };
}

struct Run {
    rig: Rig,
    streams: [MockStream; STREAMS],
    model: Model,
    seen: Seen,
    pinned: BTreeMap<u64, u64>,
    held: Vec<(HostAllocation, BlockNo)>,
}

impl Run {
    fn new(config: HostConfig, model: Model) -> Self {
        // No address twice: what is pinned where an unpinned segment was can be told apart.
        let placement = Placement::Fresh { gap: 0 };
        let rig = Rig::new(MockBackend::builder().strict().placement(placement).build(), config);
        let streams = [(); STREAMS].map(|()| rig.stream());
        let seen = Seen {
            new: BTreeMap::new(),
            unpinned: Vec::new(),
            queued: [0; STREAMS],
            done: [0; STREAMS],
        };
        Run { rig, streams, model, seen, pinned: BTreeMap::new(), held: Vec::new() }
    }

    /// Lets the allocator act, and the model see what was pinned meanwhile.
    fn act<T>(&mut self, act: impl FnOnce(&Rig) -> T) -> T {
        let result = act(&self.rig);
        let pins = self.rig.backend.pins();
        let now: BTreeMap<_, _> =
            pins.iter().map(|(a, request)| (a.get(), request.bytes)).collect();
        let is_new = |entry: &(&u64, &u64)| self.pinned.get(entry.0) != Some(entry.1);
        self.seen.new = now.iter().filter(is_new).map(|(&addr, &bytes)| (addr, bytes)).collect();
        self.pinned = now;
        result
    }

    fn step(&mut self, op: Op) {
        match op {
            Op::Allocate(bytes) => {
                let block = self.act(|rig| rig.allocate(bytes));
                let no = model!(&mut self.model, m => m.allocate(&mut self.seen, bytes));
                let expected = model!(&self.model, m => &m.blocks.all[&no]);
                let got = (block.addr().get(), block.bytes());
                assert_eq!(got, (expected.addr, expected.bytes), "{bytes} bytes");
                self.held.push((block, no));
            }
            Op::Free(_) | Op::Use(..) if self.held.is_empty() => {}
            Op::Free(at) => {
                let (block, no) = self.held.swap_remove(at % self.held.len());
                self.act(|rig| rig.free(block));
                model!(&mut self.model, m => m.free(&mut self.seen, no));
            }
            Op::Use(at, stream) => {
                let (block, no) = &self.held[at % self.held.len()];
                self.rig.use_on(block, &self.streams[stream]);
                self.seen.queued[stream] += 1;
                model!(&mut self.model, m => m.blocks.note_use(*no, stream));
            }
            Op::Pass(stream) => {
                self.rig.backend.pass(&self.streams[stream]);
                self.seen.done[stream] = self.seen.queued[stream];
            }
            Op::Process => {
                self.act(|rig| rig.host.process_events().expect("asked"));
                model!(&mut self.model, m => m.process(&mut self.seen));
            }
            Op::Empty => {
                self.act(|rig| rig.host.empty_cache().expect("emptied"));
                model!(&mut self.model, m => m.empty(&mut self.seen));
            }
        }
        self.compare();
    }

    fn compare(&mut self) {
        self.rig.check();
        assert!(self.seen.new.is_empty(), "pinned, but not by the model: {:?}", self.seen.new);
        for addr in self.seen.unpinned.drain(..) {
            assert!(!self.pinned.contains_key(&addr), "{addr:#x} is still pinned");
        }
        let stats = self.rig.host.stats();
        let blocks = model!(&self.model, m => &m.blocks);
        assert_eq!(stats.active_bytes.current as u64, blocks.active_bytes());
        assert_eq!(stats.active_requests.current as usize, blocks.all.len());
        assert_eq!(stats.draining_bytes, blocks.draining_bytes());
        assert_eq!(stats.allocated_bytes.current as u64, self.pinned.values().sum::<u64>());
        let requested: u64 = self.held.iter().map(|(block, _)| block.requested()).sum();
        assert!(stats.requested_bytes.current as u64 >= requested);
    }

    fn finish(self) {
        for (block, _) in self.held {
            self.rig.free(block);
        }
        self.rig.backend.sync();
        self.rig.finish();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..Default::default() })]

    #[test]
    fn policy_pytorch_behaves_like_the_model(ops in prop::collection::vec(op(), 1..150)) {
        let mut run = Run::new(HostConfig::pytorch(), Model::Classes(Classes::default()));
        ops.into_iter().for_each(|op| run.step(op));
        run.finish();
    }

    #[test]
    fn policy_ours_behaves_like_the_model(
        rules in rules(),
        ops in prop::collection::vec(op(), 1..200),
    ) {
        let model = Model::Slabs(Box::new(Slabs::new(rules.clone())));
        let mut run = Run::new(config(&rules), model);
        ops.into_iter().for_each(|op| run.step(op));
        run.finish();
    }
}
