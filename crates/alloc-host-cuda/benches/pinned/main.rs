//! Pinned memory on a GPU: hits, buffers, recorded uses, threads, first pins, copies. Prints one JSON line a
//! measurement; without a GPU it says so and does nothing.
//!
//! `cargo bench -p alloc-host-cuda --bench pinned [-- WORD...]`, where words select measurements by
//! what their names begin with, and a policy if they are its name. `benches/peer_host.cpp` does the same
//! with PyTorch's allocator, but for `parts`, the parts of a first pin, and `fresh`, first pins of
//! processes. `beside PEER [ROUNDS]` runs both in turn and prints a table.

mod beside;
mod fresh;
mod parts;
mod table;

use alloc_core::DeviceId;
use alloc_core::host::{HostAllocation, HostConfig, Place};
use alloc_host_cuda::driver::DeviceMemory;
use alloc_host_cuda::{HostStream, InFlight, PinOptions, PinnedAllocator, PinnedBuffer, Streams};
use std::collections::VecDeque;
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Barrier;
use std::time::Instant;

const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;
const DEVICE: DeviceId = DeviceId::new(0);

type Pinned = PinnedAllocator<Streams>;
type Buffer = PinnedBuffer<Streams>;

/// Knuth's MMIX generator, top 31 bits: the same as in the drivers for other allocators.
struct Lcg(u64);

impl Lcg {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}

/// A size from 512 bytes to 2^`max_log`, uniform in its logarithm.
fn draw(random: &mut Lcg, max_log: u64) -> u64 {
    let log = 9 + random.next() % (max_log - 9);
    (1 << log) + random.next() % (1 << log)
}

fn pinned(config: HostConfig) -> Pinned {
    pinned_with(config, PinOptions::default())
}

fn pinned_with(config: HostConfig, options: PinOptions) -> Pinned {
    PinnedAllocator::new(&[DEVICE], config, options).expect("a GPU")
}

fn nanos_per_round(rounds: u32, mut round: impl FnMut()) -> f64 {
    (0..rounds / 10 + 1).for_each(|_| round());
    let start = Instant::now();
    (0..rounds).for_each(|_| round());
    start.elapsed().as_nanos() as f64 / f64::from(rounds)
}

fn hit(pinned: &Pinned, bytes: usize) -> f64 {
    nanos_per_round(1_000_000, || {
        let block = pinned.allocate(black_box(bytes as u64), Place::Anywhere).expect("memory");
        pinned.free(black_box(block)).expect("freed");
    })
}

fn buffer(pinned: &Pinned, bytes: usize) -> f64 {
    nanos_per_round(1_000_000, || drop(black_box(pinned.buffer(bytes).expect("memory"))))
}

fn recorded(pinned: &Pinned, bytes: usize) -> f64 {
    let stream = pinned.streams().create(DEVICE).expect("a stream");
    nanos_per_round(200_000, || {
        let block = pinned.allocate(black_box(bytes as u64), Place::Anywhere).expect("memory");
        pinned.record_use(&block, &stream).expect("live");
        pinned.free(block).expect("freed");
    })
}

/// Nanoseconds a step: a random one of `slots` blocks is freed and replaced by one of random size.
fn churn(pinned: &Pinned, slots: usize, steps: u32, max_log: u64, seed: u64) -> f64 {
    let mut random = Lcg(seed);
    let mut blocks: Vec<Option<HostAllocation>> = (0..slots).map(|_| None).collect();
    let mut run = |steps: u32| {
        for _ in 0..steps {
            let slot = random.next() as usize % slots;
            if let Some(block) = blocks[slot].take() {
                pinned.free(block).expect("freed");
            }
            let bytes = draw(&mut random, max_log);
            blocks[slot] = Some(pinned.allocate(bytes, Place::Anywhere).expect("memory"));
        }
    };
    run(steps / 2);
    let start = Instant::now();
    run(steps);
    let nanos = start.elapsed().as_nanos() as f64 / f64::from(steps);
    blocks.into_iter().flatten().for_each(|block| pinned.free(block).expect("freed"));
    nanos
}

/// Million steps a second of all threads together.
fn threads(pinned: &Pinned, count: u64, max_log: u64) -> f64 {
    let barrier = Barrier::new(count as usize);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..count)
            .map(|seed| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    churn(pinned, 64, 1_000_000, max_log, 7 + seed)
                })
            })
            .collect();
        workers.into_iter().map(|worker| 1e3 / worker.join().expect("no panic")).sum()
    })
}

/// Has the system provide as much ordinary memory as is going to be pinned, and takes it back: on a
/// fresh virtual machine the first use of memory is a matter of the hypervisor, which takes ten times
/// as long as everything that is measured here.
fn wake_memory() {
    let mut memory = vec![0_u8; 5 * GIB];
    let share = memory.len() / 16;
    std::thread::scope(|scope| {
        for part in memory.chunks_mut(share) {
            scope.spawn(|| part.iter_mut().step_by(4096).for_each(|byte| *byte = 1));
        }
    });
    black_box(memory);
}

/// Milliseconds of the first request of an allocator.
fn first_pin(config: &HostConfig, bytes: usize) -> f64 {
    let pinned = pinned(config.clone());
    // Starts what is started once.
    drop(pinned.buffer(MIB).expect("memory"));
    pinned.empty_cache().expect("given back");
    let start = Instant::now();
    let buffer = pinned.buffer(bytes).expect("memory");
    let millis = start.elapsed().as_secs_f64() * 1e3;
    drop(buffer);
    millis
}

/// GB/s of copies that follow one another, eight in flight, each with a buffer of its own.
fn copies(pinned: &Pinned, bytes: usize, to_device: bool) -> f64 {
    let stream = pinned.streams().create(DEVICE).expect("a stream");
    let context = stream.driver_stream().context();
    let memory = DeviceMemory::allocate(context, bytes as u64).expect("device memory");
    let ring = if bytes > 256 * MIB { 2 } else { 8 };
    let mut idle: Vec<Buffer> = (0..ring).map(|_| pinned.buffer(bytes).expect("memory")).collect();
    let count = (8 * GIB / bytes).clamp(8, 4096);
    let mut in_flight = VecDeque::new();
    let mut run = |count: usize| {
        for _ in 0..count {
            let buffer = idle.pop().unwrap_or_else(|| finish(&mut in_flight));
            in_flight.push_back(queue(buffer, &memory, to_device, &stream));
        }
        while !in_flight.is_empty() {
            let buffer = finish(&mut in_flight);
            idle.push(buffer);
        }
    };
    run(ring);
    let start = Instant::now();
    run(count);
    let seconds = start.elapsed().as_secs_f64();
    drop((idle, in_flight));
    memory.free().expect("given back");
    (count * bytes) as f64 / seconds / 1e9
}

fn queue(
    buffer: Buffer,
    memory: &DeviceMemory,
    to_device: bool,
    stream: &HostStream,
) -> InFlight<Streams> {
    let copy = match to_device {
        true => buffer.copy_to_device(memory, 0, stream),
        false => buffer.copy_from_device(memory, 0, stream),
    };
    copy.expect("queued")
}

fn finish(in_flight: &mut VecDeque<InFlight<Streams>>) -> Buffer {
    in_flight.pop_front().expect("some are in flight").wait().expect("copied")
}

struct Run<'a> {
    words: &'a [String],
    policy: &'static str,
}

/// Whether a measurement is selected. A word selects what begins with it; so does the beginning of a
/// word, for groups.
fn is_wanted(words: &[String], name: &str) -> bool {
    let selects = |word: &String| name.starts_with(word.as_str()) || word.starts_with(name);
    words.is_empty() || words.iter().any(selects)
}

impl Run<'_> {
    fn measure(&self, name: &str, unit: &str, measure: impl FnOnce() -> f64) {
        if is_wanted(self.words, name) {
            let (policy, value) = (self.policy, measure());
            println!("{{\"policy\":\"{policy}\",\"name\":\"{name}\",\"{unit}\":{value:.2}}}");
        }
    }

    /// Everything that the peer measures, too.
    fn measure_all(&self, config: &HostConfig) {
        for bytes in [4096, 65_536, MIB, 16 * MIB, 64 * MIB] {
            let made = pinned(config.clone());
            self.measure(&format!("hit_{bytes}"), "ns_per_pair", || hit(&made, bytes));
            self.measure(&format!("buffer_{bytes}"), "ns_per_pair", || buffer(&made, bytes));
            self.measure(&format!("recorded_{bytes}"), "ns_per_pair", || recorded(&made, bytes));
        }
        for count in [1, 4, 16] {
            let made = pinned(config.clone());
            let name = format!("threads_{count}");
            self.measure(&name, "mega_steps_per_s", || threads(&made, count, 20));
        }
        for gib in [1, 4] {
            let pin = || first_pin(config, gib * GIB);
            self.measure(&format!("first_pin_{gib}_gib"), "ms", pin);
        }
        for mib in [1, 4, 16, 64, 256, 1024] {
            let made = pinned(config.clone());
            for (way, to_device) in [("h2d", true), ("d2h", false)] {
                let name = format!("copy_{way}_{mib}_mib");
                self.measure(&name, "gb_per_s", || copies(&made, mib * MIB, to_device));
            }
        }
    }
}

/// The exit code of [`beside`] where there is no GPU.
const NO_GPU: u8 = 77;

fn main() -> ExitCode {
    // The options are those of `cargo bench`.
    let words: Vec<_> = std::env::args().skip(1).filter(|word| !is_option(word)).collect();
    let (first, rest) = words.split_first().map_or(("", &[][..]), |(word, rest)| (word, rest));
    if first == fresh::CHILD {
        fresh::child(rest);
        return ExitCode::SUCCESS;
    }
    let made = PinnedAllocator::new(&[DEVICE], HostConfig::ours(), PinOptions::default());
    if let Err(reason) = made.map(drop) {
        println!("skipped: no CUDA device ({reason})");
        return if first == beside::BESIDE { NO_GPU.into() } else { ExitCode::SUCCESS };
    }
    if first == beside::BESIDE {
        return beside::run(rest);
    }
    measure(words);
    ExitCode::SUCCESS
}

fn is_option(word: &str) -> bool {
    word.starts_with("--")
}

fn measure(mut words: Vec<String>) {
    let policies = [("ours", HostConfig::ours()), ("pytorch", HostConfig::pytorch())];
    let named: Vec<_> =
        words.extract_if(.., |word| policies.iter().any(|(p, _)| p == word)).collect();
    wake_memory();
    let is_named = |policy: &str| named.is_empty() || named.iter().any(|name| name == policy);
    for (policy, config) in policies.iter().filter(|(policy, _)| is_named(policy)) {
        Run { words: &words, policy }.measure_all(config);
    }
    parts::measure(&|name| is_wanted(&words, name));
    fresh::measure(&words);
}
