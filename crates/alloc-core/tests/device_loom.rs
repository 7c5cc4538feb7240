//! Interleavings of the device allocator, explored by loom: `cargo xtask loom`.
#![cfg(loom)]

use alloc_core::backend::{
    Backend, BackendError, Completion, DeviceMemory, ErrorKind, MemoryInfo, Refused, Segment,
    Stream,
};
use alloc_core::config::{PeakMode, Policy};
use alloc_core::{Addr, AllocError, CachingAllocator, Config, DeviceId, StreamId};
use loom::sync::atomic::{AtomicU64 as AtomicHint, Ordering::Relaxed};
use loom::thread;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

const MIB: u64 = 1 << 20;
const DEV: DeviceId = DeviceId::new(0);
const S0: TinyStream = TinyStream(1);
const S1: TinyStream = TinyStream(2);

/// A device of a few segments whose streams finish when told. Its own state is no part of the model:
/// it is touched in single steps only.
#[derive(Debug)]
struct Machine {
    /// One bit for each span of 2 MiB that is handed out.
    spans: AtomicU64,
    /// How many there are.
    capacity: u32,
    finished: AtomicBool,
    gone: AtomicBool,
}

#[derive(Clone, Debug)]
struct Tiny(Arc<Machine>);

#[derive(Clone, Copy, Debug)]
struct TinyStream(u64);

#[derive(Debug)]
struct Span(u32);

#[derive(Debug)]
struct Full;

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no span left")
    }
}

impl std::error::Error for Full {}

impl BackendError for Full {
    fn kind(&self) -> ErrorKind {
        ErrorKind::OutOfMemory
    }
}

impl Stream for TinyStream {
    fn id(&self) -> StreamId {
        StreamId::new(self.0)
    }

    fn device(&self) -> DeviceId {
        DEV
    }
}

impl Segment for Span {
    fn base(&self) -> Addr {
        Addr::new(2 * MIB * u64::from(self.0))
    }

    fn bytes(&self) -> u64 {
        2 * MIB
    }
}

impl Tiny {
    fn in_use(&self) {
        assert!(!self.0.gone.load(SeqCst), "a backend call after the allocator is gone");
    }
}

impl Backend for Tiny {
    type Stream = TinyStream;
    type Event = ();
    type Segment = Span;
    type Error = Full;

    fn device_count(&self) -> u16 {
        1
    }

    fn acquire(&self, _: DeviceId, bytes: u64, _: &TinyStream) -> Result<Span, Full> {
        self.in_use();
        assert_eq!(bytes, 2 * MIB);
        // The first is not given out: null is no memory.
        let free = (1..=self.0.capacity).find(|n| self.0.spans.load(SeqCst) & (1 << n) == 0);
        let span = free.ok_or(Full)?;
        self.0.spans.fetch_or(1 << span, SeqCst);
        Ok(Span(span))
    }

    fn release(&self, span: Span) -> Result<(), Refused<Span, Full>> {
        self.in_use();
        let before = self.0.spans.fetch_and(!(1 << span.0), SeqCst);
        assert_ne!(before & (1 << span.0), 0, "given back twice");
        Ok(())
    }

    fn record(&self, _: &TinyStream) -> Result<(), Full> {
        self.in_use();
        Ok(())
    }

    fn query(&self, _: &()) -> Result<Completion, Full> {
        self.in_use();
        let finished = self.0.finished.load(SeqCst);
        Ok(if finished { Completion::Reached } else { Completion::Pending })
    }

    fn wait(&self, _: &()) -> Result<(), Full> {
        self.in_use();
        Ok(())
    }
}

impl MemoryInfo for Tiny {
    fn memory(&self, _: DeviceId) -> Result<DeviceMemory, Full> {
        let total = 2 * MIB * u64::from(self.0.capacity);
        Ok(DeviceMemory { free: total, total })
    }
}

type Alloc = CachingAllocator<Tiny>;

/// Explores `body` on a new allocator over so many spans, with each way to keep peaks; afterwards it
/// is consistent, and everything goes back to the device.
fn explore(capacity: u32, body: fn(&Alloc, &Machine)) {
    for peaks in [PeakMode::PerHeap, PeakMode::Exact] {
        explore_with(capacity, peaks, body);
    }
}

fn explore_with(capacity: u32, peaks: PeakMode, body: fn(&Alloc, &Machine)) {
    loom::model(move || {
        let machine = Arc::new(Machine {
            spans: AtomicU64::new(0),
            capacity,
            finished: AtomicBool::new(false),
            gone: AtomicBool::new(false),
        });
        let config = Config { peaks, ..Config::of(Policy::Pytorch) };
        let alloc = CachingAllocator::new(Tiny(machine.clone()), config).expect("a device");
        body(&alloc, &machine);
        if let Err(violation) = alloc.check() {
            panic!("{violation}");
        }
        drop(alloc);
        machine.gone.store(true, SeqCst);
        assert_eq!(machine.spans.load(SeqCst), 0, "leaked");
    });
}

/// Runs `act` on a second thread.
fn meanwhile<T: 'static>(
    alloc: &Alloc,
    act: impl FnOnce(&Alloc) -> T + 'static,
) -> thread::JoinHandle<T> {
    let alloc = alloc.clone();
    thread::spawn(move || act(&alloc))
}

fn join<T>(thread: thread::JoinHandle<T>) -> T {
    thread.join().expect("no panic")
}

fn allocate(alloc: &Alloc, stream: TinyStream) -> Addr {
    alloc.allocate_raw(1024, &stream).expect("memory")
}

/// A block that is cached on a stream.
fn warm(alloc: &Alloc, stream: TinyStream) -> Addr {
    let addr = allocate(alloc, stream);
    alloc.free_raw(addr).expect("live");
    addr
}

/// Two threads make the first request of a stream: it gets one heap, and both are served from it.
#[test]
fn a_stream_gets_one_heap() {
    explore(1, |alloc, _| {
        let other = meanwhile(alloc, |alloc| allocate(alloc, S0));
        let mine = allocate(alloc, S0);
        let theirs = join(other);
        assert_ne!(mine, theirs);
        alloc.free_raw(mine).expect("live");
        alloc.free_raw(theirs).expect("live");
    });
}

/// The one free block of a heap goes to one of two threads.
#[test]
fn a_block_is_handed_out_once() {
    explore(1, |alloc, _| {
        let block = warm(alloc, S0);
        let other = meanwhile(alloc, |alloc| allocate(alloc, S0));
        let mine = allocate(alloc, S0);
        let theirs = join(other);
        assert_ne!(mine, theirs);
        assert!(mine == block || theirs == block);
    });
}

/// Who looks an address up while its segment is entered finds nothing or everything that leads from
/// it: heap, segment and block. The table that it is entered in was there before.
#[test]
fn an_address_leads_to_its_heap_or_nowhere() {
    explore(2, |alloc, _| {
        let address = Addr::new(2 * MIB) + 2 * MIB;
        warm(alloc, S0);
        // Orders nothing. loom remembers one access of each atomic, so the other thread's look at the
        // entry before it writes it hides ours; this makes it try both orders.
        let (hint, done) = (Arc::new(AtomicHint::new(0)), Relaxed);
        let theirs = Arc::clone(&hint);
        let other = meanwhile(alloc, move |alloc| {
            let addr = allocate(alloc, S1);
            theirs.store(1, done);
            addr
        });
        hint.load(done);
        if let Some(found) = alloc.locate(address) {
            assert_eq!((found.stream, found.bytes, found.segment), (S1.id(), 1024, address));
        }
        assert_eq!(join(other), address);
    });
}

/// A block is freed by another thread than the one that uses its heap.
#[test]
fn a_foreign_free_and_an_allocation() {
    explore(1, |alloc, _| {
        let block = allocate(alloc, S0);
        let other = meanwhile(alloc, move |alloc| alloc.free_raw(block).expect("live"));
        let mine = allocate(alloc, S0);
        join(other);
        alloc.free_raw(mine).expect("live");
        assert_eq!(allocate(alloc, S0), block, "what was freed can be had again");
    });
}

/// Two threads free one address: one of them does.
#[test]
fn one_of_two_frees_wins() {
    explore(1, |alloc, _| {
        let block = allocate(alloc, S0);
        let other = meanwhile(alloc, move |alloc| alloc.free_raw(block).is_ok());
        let mine = alloc.free_raw(block).is_ok();
        assert!(mine ^ join(other));
    });
}

/// A thread gives the cache back while another takes memory from it, or grows.
#[test]
fn growth_against_release() {
    explore(2, |alloc, _| {
        warm(alloc, S0);
        let other = meanwhile(alloc, |alloc| alloc.empty_cache().expect("emptied"));
        let mine = allocate(alloc, S0);
        join(other);
        assert!(alloc.locate(mine).is_some());
    });
}

/// Two streams and memory for one: whoever comes second takes what is cached from the other, or fails
/// if it is in use.
#[test]
fn growth_against_reclaim() {
    explore(1, |alloc, _| {
        warm(alloc, S0);
        let other = meanwhile(alloc, |alloc| alloc.allocate_raw(1024, &S1));
        let mine = alloc.allocate_raw(1024, &S0);
        let results = [mine, join(other)];
        let served = results.iter().filter(|result| result.is_ok()).count();
        assert_eq!(served, 1, "{results:?}");
        let failed = |result: &Result<_, _>| matches!(result, Err(AllocError::OutOfMemory(_)));
        assert!(results.iter().any(failed));
    });
}

/// A block that another stream used is freed while the events of others are processed: it becomes
/// free once.
#[test]
fn an_event_is_reached_once() {
    explore_with(2, PeakMode::PerHeap, |alloc, machine| {
        let block = allocate(alloc, S0);
        alloc.record_stream_raw(block, &S1).expect("live");
        alloc.free_raw(block).expect("live");
        machine.finished.store(true, SeqCst);
        let other = meanwhile(alloc, |alloc| allocate(alloc, S1));
        let mine = allocate(alloc, S0);
        assert_ne!(join(other), mine);
        let stats = alloc.stats(DEV).expect("a device");
        assert_eq!(stats.get("active.all.current"), Some(2));
    });
}

/// Two heaps rise at once: the exact peak is what both held together at some moment.
#[test]
fn a_peak_over_two_heaps() {
    explore_with(2, PeakMode::Exact, |alloc, _| {
        warm(alloc, S0);
        warm(alloc, S1);
        alloc.reset_peak_stats(DEV).expect("a device");
        let other = meanwhile(alloc, |alloc| allocate(alloc, S1));
        let mine = allocate(alloc, S0);
        alloc.free_raw(mine).expect("live");
        join(other);
        let stats = alloc.stats(DEV).expect("a device");
        let peak = stats.get("allocation.all.peak");
        assert!(peak == Some(1) || peak == Some(2), "{peak:?}");
        let mine = allocate(alloc, S0);
        let stats = alloc.stats(DEV).expect("a device");
        assert_eq!(stats.get("allocation.all.peak"), Some(2));
        alloc.free_raw(mine).expect("live");
    });
}
