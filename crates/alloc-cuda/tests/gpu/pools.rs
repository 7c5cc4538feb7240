//! Private pools: their own memory, on the driver's terms or a source's, with real data in it.

use crate::Scenario;
use crate::data::configurations;
use crate::rig::{FIRST, MIB, Rig};
use alloc_core::backend::{Backend, Page as _, Refused, Segment, Stream as _, VirtualMemory};
use alloc_core::{
    Addr, Config, DeviceId, PageSource, PoolId, PoolOptions, ScopeFilter, SegmentSource,
    SourceError,
};
use alloc_cuda::{CudaAllocator, CudaBackend, CudaError, CudaStream};
use cuda_driver::fake::Outcome;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub(crate) const SCENARIOS: &[Scenario] = &[
    ("pools::data_stays_apart", data_stays_apart),
    ("pools::segments_of_a_source", segments_of_a_source),
    ("pools::pages_of_a_source", pages_of_a_source),
    ("pools::memory_of_others_at_the_limit", memory_of_others),
    ("pools::checkpoints_keep_data", checkpoints_keep_data),
];

type Page = <CudaBackend as VirtualMemory>::Page;

/// Memory from the backend by another way than the allocator's, counted.
struct Counted {
    backend: CudaBackend,
    held: AtomicU64,
}

impl Counted {
    fn new(rig: &Rig) -> Arc<Counted> {
        Arc::new(Counted { backend: rig.backend.clone(), held: AtomicU64::new(0) })
    }

    fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }
}

/// A source in the manner of C interfaces, which give memory back by its address.
struct ByAddress {
    counted: Arc<Counted>,
    segments: Mutex<Vec<<CudaBackend as Backend>::Segment>>,
}

/// What the allocator holds of such a segment.
struct Named {
    base: Addr,
    bytes: u64,
}

impl Segment for Named {
    fn base(&self) -> Addr {
        self.base
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl SegmentSource<CudaStream> for ByAddress {
    fn acquire(
        &self,
        device: DeviceId,
        bytes: u64,
        stream: &CudaStream,
    ) -> Result<Box<dyn Segment>, SourceError> {
        let segment = self.counted.backend.acquire(device, bytes, stream);
        let segment = segment.map_err(|error| Box::new(error) as SourceError)?;
        let named = Named { base: segment.base(), bytes };
        self.counted.held.fetch_add(bytes, Ordering::Relaxed);
        self.segments.lock().expect("no panic inside").push(segment);
        Ok(Box::new(named))
    }

    fn release(
        &self,
        segment: Box<dyn Segment>,
    ) -> Result<(), Refused<Box<dyn Segment>, SourceError>> {
        let mut segments = self.segments.lock().expect("no panic inside");
        let at = segments.iter().position(|known| known.base() == segment.base());
        let known = segments.swap_remove(at.expect("it came from here"));
        match self.counted.backend.release(known) {
            Ok(()) => {
                self.counted.held.fetch_sub(segment.bytes(), Ordering::Relaxed);
                Ok(())
            }
            Err(refused) => {
                segments.push(refused.value);
                Err(Refused { value: segment, error: Box::new(refused.error) })
            }
        }
    }
}

impl PageSource<CudaBackend> for Counted {
    fn create(&self, device: DeviceId, bytes: u64) -> Result<Page, CudaError> {
        let page = self.backend.create(device, bytes)?;
        self.held.fetch_add(bytes, Ordering::Relaxed);
        Ok(page)
    }

    fn destroy(&self, page: Page) -> Result<(), Refused<Page, CudaError>> {
        let bytes = page.bytes();
        self.backend.destroy(page)?;
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        Ok(())
    }
}

fn each_configuration(rig: &Rig, mut test: impl FnMut(&str, &CudaAllocator)) {
    let virtual_memory = rig.backend.has_virtual_memory(FIRST).expect("the device exists");
    for (name, config) in configurations() {
        if config.settings.expandable_segments == Some(true) && !virtual_memory {
            continue;
        }
        let allocator = rig.allocator(config);
        test(name, &allocator);
        allocator.check().expect("sound");
        allocator.empty_cache().expect("empties");
        assert_eq!(reserved(&allocator), 0, "{name}");
    }
}

fn reserved(allocator: &CudaAllocator) -> u64 {
    let stats = allocator.stats(FIRST).expect("the device exists");
    stats.get("reserved_bytes.all.current").expect("it is kept") as u64
}

fn pool_of(allocator: &CudaAllocator, addr: Addr) -> PoolId {
    allocator.locate(addr).expect("it is live").pool
}

/// Requests of nested scopes, of other threads and of no scope at all fill and check their memory in
/// turn, while pools are emptied and one goes.
fn data_stays_apart(rig: &Rig) -> Outcome {
    each_configuration(rig, |name, allocator| {
        let (stream, other) = (rig.stream(), rig.stream());
        let outer = allocator.create_pool(FIRST, PoolOptions::new()).expect("a pool");
        let inner = allocator.create_pool(FIRST, PoolOptions::new()).expect("a pool");
        for round in 0..8u32 {
            let mut blocks = Vec::new();
            let mut make = |pool: PoolId, bytes: u64, stream: &CudaStream| {
                let addr = allocator.allocate_raw(bytes, stream).expect("room");
                assert_eq!(pool_of(allocator, addr), pool, "{name}");
                let seed = round * 100 + blocks.len() as u32;
                rig.fill(stream, addr, bytes, seed);
                blocks.push((addr, bytes, seed, stream.clone()));
            };
            make(PoolId::DEFAULT, 6 * MIB, &stream);
            let scope = outer.enter();
            make(outer.id(), 6 * MIB, &stream);
            let of_stream = inner.scope(ScopeFilter::Stream(other.id()));
            make(inner.id(), 3 * MIB, &other);
            make(outer.id(), 3 * MIB, &stream);
            std::thread::scope(|threads| {
                let elsewhere = threads.spawn(|| {
                    let addr = allocator.allocate_raw(MIB, &stream).expect("room");
                    assert_eq!(pool_of(allocator, addr), PoolId::DEFAULT, "{name}");
                    allocator.free_raw(addr).expect("frees");
                });
                elsewhere.join().expect("no panic");
            });
            drop((of_stream, scope));
            make(PoolId::DEFAULT, 40 * MIB, &other);
            for (addr, bytes, seed, stream) in &blocks {
                rig.check(stream, *addr, *bytes, *seed);
            }
            for (addr, ..) in blocks {
                allocator.free_raw(addr).expect("frees");
            }
            if round % 3 == 2 {
                let before = reserved(allocator);
                let given = outer.empty_cache().expect("empties");
                assert!(given > 0 && reserved(allocator) == before - given, "{name}");
            }
            allocator.check().expect("sound");
        }
        assert_eq!(rig.wrong_words(FIRST), 0, "{name}");
        inner.release().expect("gives its memory back");
        drop(outer);
        assert!(allocator.pools(FIRST).expect("the device exists").is_empty(), "{name}");
    });
    Outcome::Done
}

/// A pool takes whole segments from its source, and the last one goes back to it.
fn segments_of_a_source(rig: &Rig) -> Outcome {
    each_configuration(rig, |name, allocator| {
        let counted = Counted::new(rig);
        let source = ByAddress { counted: Arc::clone(&counted), segments: Default::default() };
        let options = PoolOptions::new().segments_from(Arc::new(source));
        let pool = allocator.create_pool(FIRST, options).expect("a pool");
        use_pool(rig, allocator, &pool);
        assert!(counted.held() >= 60 * MIB, "{name}: {}", counted.held());
        pool.release().expect("gives its memory back");
        assert_eq!(counted.held(), 0, "{name}");
    });
    Outcome::Done
}

/// The same with the physical memory behind expandable segments.
fn pages_of_a_source(rig: &Rig) -> Outcome {
    if !rig.backend.has_virtual_memory(FIRST).expect("the device exists") {
        return Outcome::Skipped("no virtual memory management");
    }
    each_configuration(rig, |name, allocator| {
        let counted = Counted::new(rig);
        let options = PoolOptions::new().pages_from(Arc::clone(&counted) as _);
        let pool = allocator.create_pool(FIRST, options).expect("a pool");
        use_pool(rig, allocator, &pool);
        assert!(counted.held() >= 50 * MIB, "{name}: {}", counted.held());
        pool.release().expect("gives its memory back");
        assert_eq!(counted.held(), 0, "{name}");
    });
    Outcome::Done
}

/// Fills blocks of a pool on two streams, frees some under work, and checks all.
fn use_pool(rig: &Rig, allocator: &CudaAllocator, pool: &alloc_core::PoolRef<CudaBackend>) {
    let streams = [rig.stream(), rig.stream()];
    let mut live = Vec::new();
    for step in 0..24u32 {
        let stream = &streams[step as usize % 2];
        let bytes = u64::from(step % 7 + 1) * MIB;
        let block = pool.allocate(bytes, stream).expect("room");
        rig.fill(stream, block.addr(), bytes, step);
        live.push((block, bytes, step, stream));
        if step % 3 == 2 {
            let (block, bytes, seed, stream) = live.swap_remove(step as usize % live.len());
            rig.check(stream, block.addr(), bytes, seed);
            allocator.free(block).expect("frees");
        }
    }
    for (block, bytes, seed, stream) in live {
        rig.check(stream, block.addr(), bytes, seed);
        allocator.free(block).expect("frees");
    }
    assert_eq!(rig.wrong_words(FIRST), 0);
}

/// At the limit, the free memory of a pool that agreed serves others, and its blocks in use keep
/// their data.
fn memory_of_others(rig: &Rig) -> Outcome {
    for mut config in [Config::ours(), Config::pytorch()] {
        config.apply("expandable_segments:False").expect("valid");
        let allocator = rig.allocator(config);
        let stream = rig.stream();
        allocator.set_memory_limit(FIRST, Some(120 * MIB)).expect("sets");
        let pool = allocator.create_pool(FIRST, PoolOptions::new().use_on_oom()).expect("a pool");
        let kept = pool.allocate(20 * MIB, &stream).expect("room");
        rig.fill(&stream, kept.addr(), 20 * MIB, 1);
        let spare = pool.allocate(60 * MIB, &stream).expect("room");
        let at = spare.addr();
        rig.fill(&stream, at, 60 * MIB, 2);
        allocator.free(spare).expect("frees");
        let own = allocator.allocate(30 * MIB, &stream).expect("room");
        rig.fill(&stream, own.addr(), 30 * MIB, 3);
        let helped = allocator.allocate(60 * MIB, &stream).expect("the pool helps out");
        assert_eq!((helped.addr(), pool_of(&allocator, at)), (at, pool.id()));
        rig.fill(&stream, at, 60 * MIB, 4);
        for (block, bytes, seed) in
            [(&kept, 20 * MIB, 1), (&own, 30 * MIB, 3), (&helped, 60 * MIB, 4)]
        {
            rig.check(&stream, block.addr(), bytes, seed);
        }
        assert_eq!(rig.wrong_words(FIRST), 0);
        for block in [kept, own, helped] {
            allocator.free(block).expect("frees");
        }
        pool.release().expect("gives its memory back");
        allocator.check().expect("sound");
    }
    Outcome::Done
}

/// Blocks that a checkpoint knows are back at their addresses after a restore, and what lives on keeps
/// its data throughout.
fn checkpoints_keep_data(rig: &Rig) -> Outcome {
    each_configuration(rig, |name, allocator| {
        let stream = rig.stream();
        let pool = allocator.create_pool(FIRST, PoolOptions::new()).expect("a pool");
        let kept = pool.allocate(10 * MIB, &stream).expect("room");
        rig.fill(&stream, kept.addr(), 10 * MIB, 1);
        let gone = pool.allocate(6 * MIB, &stream).expect("room");
        let at = gone.addr();
        let checkpoint = pool.checkpoint().expect("nothing pending");
        for round in 0..3 {
            // The block goes, and others take its place, one of them in new memory.
            allocator.free_raw(at).expect("it is live");
            let two = [3 * MIB, 70 * MIB].map(|bytes| pool.allocate(bytes, &stream).expect("room"));
            rig.fill(&stream, two[0].addr(), 3 * MIB, 50 + round);
            rig.check(&stream, two[0].addr(), 3 * MIB, 50 + round);
            stream.synchronize().expect("no failed work");
            let restored = pool.restore(&checkpoint).expect("it is possible");
            assert_eq!((restored.stale.len(), restored.revived.len()), (2, 1), "{name}");
            assert_eq!(restored.revived[0].addr(), at, "{name}");
            rig.fill(&stream, at, 6 * MIB, 90 + round);
            rig.check(&stream, at, 6 * MIB, 90 + round);
            rig.check(&stream, kept.addr(), 10 * MIB, 1);
            allocator.check().expect("sound");
        }
        assert_eq!(rig.wrong_words(FIRST), 0, "{name}");
        allocator.free(kept).expect("frees");
        allocator.free_raw(at).expect("frees");
        drop(checkpoint);
        pool.release().expect("gives its memory back");
    });
    Outcome::Done
}
