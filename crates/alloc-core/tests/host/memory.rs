//! How much is pinned for what is asked: three mixes of requests that users of pinned memory make, and
//! three that are hard on any allocator that does not move blocks.
//!
//! The three: caches of keys and values beside weights and their checkpoints, where rounding to powers
//! of two has cost users 20 GiB to 32; a data loader; and blocks that an inference server keeps on the
//! host. The staging pool of a framework is the small and lumpy kind that many libraries have.
//!
//! Run with `--nocapture` to see the figures.

use crate::support::*;
use alloc_core::host::{HostAllocation, HostConfig, NodeId};
use mock_backend::{MockBackend, MockStream, Rng};

/// How fast copies to a device are.
const BYTES_PER_NS: u64 = 50;

/// Peaks of what was pinned and of what was asked for and in use: held by the program, or by copies
/// that are still running.
#[derive(Default)]
struct Peaks {
    reserved: u64,
    requested: u64,
    /// Bytes that were pinned in the course of it.
    pinned: u64,
}

impl Peaks {
    fn ratio(&self) -> f64 {
        self.reserved as f64 / self.requested as f64
    }
}

struct Load {
    rig: Rig,
    stream: MockStream,
    random: Rng,
    peaks: Peaks,
    live: u64,
    in_flight: u64,
}

impl Load {
    fn new(config: HostConfig, seed: u64) -> Self {
        let rig = Rig::new(MockBackend::builder().strict().build(), config);
        let stream = rig.stream();
        Load { rig, stream, random: Rng::new(seed), peaks: Peaks::default(), live: 0, in_flight: 0 }
    }

    fn allocate(&mut self, bytes: u64) -> HostAllocation {
        let block = self.rig.allocate(bytes);
        self.live += bytes;
        self.peaks.requested = self.peaks.requested.max(self.live + self.in_flight);
        self.peaks.reserved = self.peaks.reserved.max(self.rig.backend.pinned(NodeId::new(0)));
        block
    }

    fn free(&mut self, block: HostAllocation) {
        self.live -= block.requested();
        self.rig.free(block);
    }

    /// Copied to the device, then freed by the host; the copy ends at the next
    /// [`copies_end`](Load::copies_end).
    fn copy_and_free(&mut self, block: HostAllocation) {
        self.rig.use_on(&block, &self.stream);
        self.in_flight += block.requested();
        self.free(block);
    }

    fn copies_end(&mut self) {
        self.rig.backend.advance(self.in_flight / BYTES_PER_NS);
        self.rig.backend.pass(&self.stream);
        self.in_flight = 0;
    }

    fn log_uniform(&mut self, low: u32, high: u32) -> u64 {
        let exponent = self.random.between(u64::from(low), u64::from(high) - 1);
        let base = 1_u64 << exponent;
        base + self.random.below(base)
    }

    fn end(self, blocks: impl IntoIterator<Item = HostAllocation>) -> Peaks {
        let Load { rig, mut peaks, .. } = self;
        peaks.pinned = rig.host.stats().allocated_bytes.allocated as u64;
        blocks.into_iter().for_each(|block| rig.free(block));
        rig.backend.sync();
        rig.finish();
        peaks
    }
}

/// Weights of a model of 8 billion parameters in 16 bits, a quarter of every matrix per rank, and a
/// host cache for keys and values of 5 GiB and one of 8.1 GiB; then checkpoints of it all, staged
/// layer by layer.
fn checkpoint(config: HostConfig, seed: u64) -> Peaks {
    let mut load = Load::new(config, seed);
    let matrix = |rows: u64, columns: u64| rows * columns * 2 / 4;
    let hidden = 4096;
    let layer = [
        matrix(hidden, 6144),
        matrix(hidden, hidden),
        matrix(hidden, 28_672),
        matrix(14_336, hidden),
        hidden * 2,
        hidden * 2,
    ];
    let mut kept = Vec::new();
    kept.push(load.allocate(5 * GIB));
    kept.push(load.allocate(4_347_592_704 * 2));
    kept.push(load.allocate(matrix(128_256, hidden)));
    for _ in 0..32 {
        kept.extend(layer.map(|bytes| load.allocate(bytes)));
    }
    for _ in 0..2 {
        // Optimiser state in 32 bits: three times the weights, in flight for four layers.
        let mut staged = std::collections::VecDeque::new();
        for _ in 0..32 {
            staged.push_back(layer.map(|bytes| load.allocate(bytes * 6)));
            if staged.len() > 4 {
                let oldest = staged.pop_front().expect("five");
                oldest.into_iter().for_each(|block| load.copy_and_free(block));
                load.copies_end();
            }
        }
        staged.into_iter().flatten().for_each(|block| load.copy_and_free(block));
        load.copies_end();
    }
    load.end(kept)
}

/// A data loader: batches of 256 images of 3 x 224 x 224 floats with labels, and batches of 32 to 64
/// texts of varying length, eight batches ahead; the two batches before are still being copied.
fn loader(config: HostConfig, seed: u64) -> Peaks {
    let mut load = Load::new(config, seed);
    let mut ahead = std::collections::VecDeque::new();
    for batch in 0..400 {
        let texts = load.random.between(32, 64);
        let tokens = load.random.between(200, 4096);
        let images = 256;
        let sizes = [
            images * 3 * 224 * 224 * 4,
            images * 8,
            texts * tokens * 8,
            texts * tokens * 8,
            texts * tokens,
            texts * 8,
        ];
        ahead.push_back(sizes.map(|bytes| load.allocate(bytes)));
        if ahead.len() > 8 {
            let oldest = ahead.pop_front().expect("nine");
            oldest.into_iter().for_each(|block| load.copy_and_free(block));
            if batch % 2 == 0 {
                load.copies_end();
            }
        }
    }
    load.end(ahead.into_iter().flatten())
}

/// Cache blocks of an inference server that do not fit on its device: sixteen tokens each, of two
/// models with blocks of 1.25 and 2.5 MiB, up to 4 GiB, the least recently used evicted first. Each
/// block comes with a small header.
fn offload(config: HostConfig, seed: u64) -> Peaks {
    evicting_cache(config, seed, 5 * MIB / 4)
}

/// The same, but then the first model is exchanged for one with blocks of 5 MiB.
fn exchange(config: HostConfig, seed: u64) -> Peaks {
    evicting_cache(config, seed, 5 * MIB)
}

fn evicting_cache(config: HostConfig, seed: u64, later_bytes: u64) -> Peaks {
    let mut load = Load::new(config, seed);
    let mut cached = std::collections::VecDeque::new();
    for step in 0..4000 {
        let first = if step < 2500 { 5 * MIB / 4 } else { later_bytes };
        let bytes = if load.random.chance(0.5) { first } else { 5 * MIB / 2 };
        while load.live + bytes > 4 * GIB {
            let (block, header): (HostAllocation, HostAllocation) =
                cached.pop_front().expect("4 GiB");
            load.copy_and_free(block);
            load.free(header);
            load.copies_end();
        }
        cached.push_back((load.allocate(bytes), load.allocate(320)));
    }
    load.end(cached.into_iter().flat_map(|(block, header)| [block, header]))
}

/// A hard one, as single blocks are a third of all there is: the staging pool of a framework. Three
/// models of 300 tensors of 256 bytes to 32 MiB are uploaded in turn, one tensor after the other, each
/// through a buffer of its own; sixteen copies are in flight. Results of each pass, one small buffer
/// per tensor, are kept until the next.
fn staging(config: HostConfig, seed: u64) -> Peaks {
    let mut load = Load::new(config, seed);
    let models: Vec<Vec<u64>> =
        (0..3).map(|_| (0..300).map(|_| load.log_uniform(8, 25)).collect()).collect();
    let mut results = Vec::new();
    for pass in 0..9 {
        let mut in_flight = std::collections::VecDeque::new();
        let before = std::mem::take(&mut results);
        for &bytes in &models[pass % 3] {
            in_flight.push_back(load.allocate(bytes));
            if in_flight.len() > 16 {
                let oldest = in_flight.pop_front().expect("seventeen");
                load.copy_and_free(oldest);
                load.copies_end();
            }
            results.push(load.allocate(256 + bytes / 1000));
        }
        in_flight.into_iter().for_each(|block| load.copy_and_free(block));
        load.copies_end();
        before.into_iter().for_each(|block| load.free(block));
    }
    load.end(results)
}

/// The hardest, and no program's pattern: two thousand buffers of 64 bytes to 32 MiB, replaced at
/// random.
fn random(config: HostConfig, seed: u64) -> Peaks {
    let mut load = Load::new(config, seed);
    let mut held: Vec<_> = (0..2000)
        .map(|_| {
            let bytes = load.log_uniform(6, 25);
            load.allocate(bytes)
        })
        .collect();
    for step in 0..5000 {
        let at = load.random.below(held.len() as u64) as usize;
        let old = held.swap_remove(at);
        if load.random.chance(0.3) {
            load.copy_and_free(old);
        } else {
            load.free(old);
        }
        if step % 16 == 0 {
            load.copies_end();
        }
        let bytes = load.log_uniform(6, 25);
        held.push(load.allocate(bytes));
    }
    load.end(held)
}

/// Name, mix, and the most that policy `ours` may pin for a byte asked for.
type Mix = (&'static str, fn(HostConfig, u64) -> Peaks, f64);

const MIXES: [Mix; 6] = [
    ("checkpoint", checkpoint, 1.05),
    ("loader", loader, 1.05),
    ("offload", offload, 1.05),
    ("exchange", exchange, 1.05),
    ("staging", staging, 1.65),
    ("random", random, 1.15),
];

#[test]
fn ours_pins_hardly_more_than_is_asked_for() {
    // One thread for each, as the judge takes its time.
    let peaks = MIXES.map(|(_, mix, _)| {
        [HostConfig::pytorch(), HostConfig::ours()]
            .map(|config| std::thread::spawn(move || mix(config, 1)))
    });
    let mut worst_rounded = 0.0_f64;
    for ((name, _, bound), both) in MIXES.into_iter().zip(peaks) {
        let [rounded, ours] = both.map(|peaks| peaks.join().expect("no violation"));
        println!(
            "{name}: {} MiB asked for at most; pinned / asked for: powers of two {:.3}, ours {:.3}; \
             {} MiB pinned in all",
            ours.requested / MIB,
            rounded.ratio(),
            ours.ratio(),
            ours.pinned / MIB,
        );
        assert!(ours.ratio() <= bound, "{name}: {:.3}", ours.ratio());
        worst_rounded = worst_rounded.max(rounded.ratio());
    }
    assert!(worst_rounded > 1.5, "the mixes are of the kind that suffers");
}

/// Not only with those random numbers.
#[test]
fn real_mixes_pin_hardly_more_whatever_their_numbers() {
    let runs = (2..=4).flat_map(|seed| MIXES[1..3].iter().map(move |mix| (seed, mix)));
    let threads = runs.map(|(seed, &(name, mix, bound))| {
        (name, bound, std::thread::spawn(move || mix(HostConfig::ours(), seed)))
    });
    for (name, bound, peaks) in threads.collect::<Vec<_>>() {
        let ratio = peaks.join().expect("no violation").ratio();
        assert!(ratio <= bound, "{name}: {ratio:.3}");
    }
}

/// What the staging pool is above that is the price of keeping memory: it gets close to what is asked
/// for only if hardly anything is kept, and then nearly every buffer is pinned anew.
#[test]
fn a_small_lumpy_pool_is_either_large_or_slow() {
    let keep = |cached_bytes_max| {
        let config = HostConfig { cached_bytes_max: Some(cached_bytes_max), ..HostConfig::ours() };
        let peaks = staging(config, 1);
        println!("{cached_bytes_max}: {:.3}, {} MiB pinned", peaks.ratio(), peaks.pinned / MIB);
        peaks
    };
    let (all, some, none) = (keep(32 * GIB), keep(32 * MIB), keep(0));
    assert!(none.ratio() < 1.15, "{:.3}", none.ratio());
    assert!(none.pinned > 20 * all.pinned, "{} MiB", none.pinned / MIB);
    assert!(some.ratio() < all.ratio() && some.pinned < none.pinned);
}
