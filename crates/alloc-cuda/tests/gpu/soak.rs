//! Random work for a long time, with every byte written and checked.

use crate::Scenario;
use crate::data::configurations;
use crate::rig::{FIRST, Rig};
use alloc_core::backend::MemoryInfo;
use alloc_core::{Allocation, Config};
use alloc_cuda::{CudaAllocator, CudaStream};
use cuda_driver::Event;
use cuda_driver::fake::Outcome;

pub(crate) const SCENARIOS: &[Scenario] = &[("soak::streams", streams), ("soak::threads", threads)];

/// Linear congruential, top bits.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    /// From 4 bytes up, every power of two as often as the next.
    fn bytes(&mut self, log2_max: u64) -> u64 {
        let magnitude = 1 << (3 + self.below(log2_max - 2));
        (magnitude + self.below(magnitude)) & !3
    }
}

struct Live {
    block: Allocation,
    bytes: u64,
    seed: u32,
    stream: usize,
}

/// One allocator under random work on several streams.
struct Soak<'a> {
    rig: &'a Rig,
    allocator: &'a CudaAllocator,
    streams: Vec<CudaStream>,
    live: Vec<Live>,
    live_bytes: u64,
    bytes_max: u64,
    random: Random,
    next_seed: u32,
}

impl Soak<'_> {
    const LIVE_MAX: usize = 300;

    fn step(&mut self) {
        match self.random.below(100) {
            0..45 if self.live.len() < Self::LIVE_MAX && self.live_bytes < self.bytes_max => {
                self.allocate();
            }
            0..65 => self.use_aside(),
            _ => self.free_one(),
        }
    }

    fn allocate(&mut self) {
        let log2_max = if self.rig.is_real { 26 } else { 19 };
        let bytes = self.random.bytes(log2_max);
        let stream = self.random.below(self.streams.len() as u64) as usize;
        let block = self.allocator.allocate(bytes, &self.streams[stream]).expect("room");
        let seed = self.next_seed;
        self.next_seed = self.next_seed.wrapping_add(12_345);
        self.rig.fill(&self.streams[stream], block.addr(), bytes, seed);
        self.live_bytes += bytes;
        self.live.push(Live { block, bytes, seed, stream });
    }

    /// Another stream reads a block, after its writer, and is named.
    fn use_aside(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let live = &self.live[self.random.below(self.live.len() as u64) as usize];
        let side = &self.streams[self.random.below(self.streams.len() as u64) as usize];
        let written = Event::create(self.rig.context(FIRST)).expect("event");
        written.record(self.streams[live.stream].driver_stream()).expect("records");
        side.driver_stream().wait_event(&written).expect("waits");
        self.rig.check(side, live.block.addr(), live.bytes, live.seed);
        self.allocator.record_stream(&live.block, side).expect("records");
    }

    fn free_one(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let index = self.random.below(self.live.len() as u64) as usize;
        let live = self.live.swap_remove(index);
        let stream = &self.streams[live.stream];
        self.rig.check(stream, live.block.addr(), live.bytes, live.seed);
        self.live_bytes -= live.bytes;
        self.allocator.free(live.block).expect("frees");
    }

    fn finish(mut self) {
        while !self.live.is_empty() {
            self.free_one();
        }
    }
}

fn steps(rig: &Rig) -> usize {
    let wanted = std::env::var("GPU_SOAK_STEPS").ok().and_then(|text| text.parse().ok());
    if rig.is_real { wanted.unwrap_or(20_000) } else { 6000 }
}

fn soak<'a>(rig: &'a Rig, allocator: &'a CudaAllocator, streams: usize, seed: u64) -> Soak<'a> {
    let streams = (0..streams).map(|_| rig.stream()).collect();
    Soak {
        rig,
        allocator,
        streams,
        live: Vec::new(),
        live_bytes: 0,
        // Little enough for many at once.
        bytes_max: rig.backend.memory(FIRST).expect("memory figures").total / 32,
        random: Random(seed),
        next_seed: seed as u32,
    }
}

fn streams(rig: &Rig) -> Outcome {
    for (index, (name, config)) in configurations().into_iter().enumerate() {
        let allocator = rig.allocator(config);
        let mut soak = soak(rig, &allocator, 5, 77 + index as u64);
        let steps = steps(rig) / 4;
        for step in 1..=steps {
            soak.step();
            if step % 1000 == 0 {
                allocator.check().unwrap_or_else(|wrong| panic!("{name}, step {step}: {wrong:?}"));
            }
            if step % 3000 == 0 {
                allocator.empty_cache().expect("gives cached memory back");
            }
        }
        soak.finish();
        assert_eq!(rig.wrong_words(FIRST), 0, "{name}");
        allocator.empty_cache().expect("gives everything back");
        allocator.check().unwrap_or_else(|wrong| panic!("{name}: {wrong:?}"));
        let stats = allocator.stats(FIRST).expect("stats");
        assert_eq!(stats.get("allocated_bytes.all.current"), Some(0), "{name}");
        assert_eq!(stats.get("reserved_bytes.all.current"), Some(0), "{name}");
    }
    Outcome::Done
}

/// Threads with streams of their own, one allocator.
fn threads(rig: &Rig) -> Outcome {
    let threads = if rig.is_real { 8 } else { 3 };
    let mut whole = Config::ours();
    whole.settings.expandable_segments = Some(false);
    for config in [Config::ours(), whole, Config::pytorch()] {
        let allocator = rig.allocator(config);
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let allocator = &allocator;
                scope.spawn(move || {
                    let mut soak = soak(rig, allocator, 2, 1000 + thread as u64);
                    for _ in 0..steps(rig) / (3 * threads) {
                        soak.step();
                    }
                    soak.finish();
                });
            }
        });
        assert_eq!(rig.wrong_words(FIRST), 0);
        allocator.empty_cache().expect("gives everything back");
        allocator.check().unwrap_or_else(|wrong| panic!("{wrong:?}"));
    }
    Outcome::Done
}
