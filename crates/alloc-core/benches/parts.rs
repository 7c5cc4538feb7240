//! Times of the parts, each through the public interface on the request that exercises it: the hit
//! path, split and merge, frees that wait for another stream, the address directory, and the free
//! index under many sizes. `cargo bench -p alloc-core`.

use alloc_core::{Allocation, CachingAllocator, Config, DeviceId, StreamHandle};
use criterion::{BatchSize, Criterion};
use mock_backend::{MockBackend, MockStream};

const DEVICE: DeviceId = DeviceId::new(0);
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// An allocator on a simulated device, with a stream and its handle.
struct Rig {
    backend: MockBackend,
    allocator: CachingAllocator<MockBackend>,
    stream: MockStream,
    handle: StreamHandle<MockBackend>,
}

impl Rig {
    fn new(config: Config) -> Self {
        let backend = MockBackend::new();
        let allocator = CachingAllocator::with_virtual_memory(backend.clone(), config);
        let allocator = allocator.expect("a device");
        let stream = backend.stream(DEVICE);
        let handle = allocator.stream(&stream).expect("a stream of the device");
        Rig { backend, allocator, stream, handle }
    }

    fn allocate(&self, bytes: u64) -> Allocation {
        self.handle.allocate(bytes).expect("room")
    }

    fn free(&self, allocation: Allocation) {
        self.handle.free(allocation).expect("a live block");
    }
}

/// A cached block of just the right size goes out and comes back.
fn hit(c: &mut Criterion) {
    for (name, config) in [("ours", Config::ours()), ("pytorch", Config::pytorch())] {
        let rig = Rig::new(config);
        // Neighbours that live on keep the block apart.
        let blocks = [KIB, KIB, KIB].map(|bytes| rig.allocate(bytes));
        let [below, hole, above] = blocks;
        rig.free(hole);
        c.bench_function(&format!("hit/{name}"), |b| b.iter(|| rig.free(rig.allocate(KIB))));
        rig.free(below);
        rig.free(above);
    }
}

/// A small part is cut from a large block and merged back.
fn split_and_merge(c: &mut Criterion) {
    let rig = Rig::new(Config::ours());
    rig.free(rig.allocate(64 * MIB));
    c.bench_function("split and merge", |b| b.iter(|| rig.free(rig.allocate(2 * MIB))));
}

/// A block that another stream used: an event is recorded at the free, and asked for at the next
/// request.
fn across_streams(c: &mut Criterion) {
    let rig = Rig::new(Config::ours());
    let other = rig.backend.stream(DEVICE);
    c.bench_function("free after use on another stream", |b| {
        b.iter(|| {
            let block = rig.allocate(KIB);
            rig.allocator.record_stream(&block, &other).expect("a live block");
            rig.free(block);
        });
    });
}

/// The heap of an address is looked up, on top of a hit.
fn directory(c: &mut Criterion) {
    let rig = Rig::new(Config::ours());
    c.bench_function("hit by address", |b| {
        b.iter(|| {
            let addr = rig.allocator.allocate_raw(KIB, &rig.stream).expect("room");
            rig.allocator.free_raw(addr).expect("a live block");
        });
    });
}

/// A free block is found among as many as are given, all of different sizes and between live ones.
fn free_index(c: &mut Criterion) {
    for count in [10, 100, 1_000] {
        let rig = Rig::new(Config::ours());
        // Large ones, so that sizes can differ.
        let bytes = |i: u64| MIB + (i + 1) * 512;
        let pair = |i| (rig.allocate(bytes(i)), rig.allocate(2 * MIB));
        let (holes, walls): (Vec<_>, Vec<_>) = (0..count).map(pair).unzip();
        holes.into_iter().for_each(|hole| rig.free(hole));
        let mut next = 0;
        let mut size = || {
            next = (next + 7) % count;
            bytes(next)
        };
        c.bench_function(&format!("best fit among {count}"), |b| {
            b.iter_batched(&mut size, |bytes| rig.free(rig.allocate(bytes)), BatchSize::SmallInput);
        });
        walls.into_iter().for_each(|wall| rig.free(wall));
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    for bench in [hit, split_and_merge, across_streams, directory, free_index] {
        bench(&mut criterion);
    }
    criterion.final_summary();
}
