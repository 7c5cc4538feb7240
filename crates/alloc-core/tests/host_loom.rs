//! Interleavings of the host allocator, explored by loom:
//! `RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=2 cargo test -p alloc-core --release --test host_loom`.
#![cfg(loom)]

use alloc_core::backend::{BackendError, Completion, ErrorKind, Refused, Stream};
use alloc_core::host::{
    HostAllocation, HostAllocator, HostBackend, HostConfig, NodeId, PinRequest, PinnedSegment,
};
use alloc_core::{Addr, DeviceId, StreamId};
use loom::thread;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

/// A machine whose streams finish when told. Its own state is no part of the model: it is touched
/// in single steps only.
#[derive(Debug, Default)]
struct Machine {
    next: AtomicU64,
    pinned: AtomicU64,
    unpinned: AtomicU64,
    finished: AtomicBool,
    gone: AtomicBool,
}

#[derive(Clone, Debug)]
struct Tiny(Arc<Machine>);

#[derive(Clone, Debug)]
struct TinyStream;

#[derive(Debug)]
struct Pinned(Addr, u64);

#[derive(Debug)]
struct Never;

impl fmt::Display for Never {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("never")
    }
}

impl std::error::Error for Never {}

impl BackendError for Never {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Other
    }
}

impl Stream for TinyStream {
    fn id(&self) -> StreamId {
        StreamId::new(1)
    }

    fn device(&self) -> DeviceId {
        DeviceId::new(0)
    }
}

impl PinnedSegment for Pinned {
    fn base(&self) -> Addr {
        self.0
    }

    fn bytes(&self) -> u64 {
        self.1
    }
}

impl Tiny {
    fn in_use(&self) {
        assert!(!self.0.gone.load(SeqCst), "a backend call after the allocator is gone");
    }
}

impl HostBackend for Tiny {
    type Stream = TinyStream;
    type Event = ();
    type Pinned = Pinned;
    type Error = Never;

    fn node_count(&self) -> u16 {
        1
    }

    fn node_of(&self, _: DeviceId) -> Option<NodeId> {
        Some(NodeId::new(0))
    }

    fn pin(&self, request: &PinRequest) -> Result<Pinned, Never> {
        self.in_use();
        self.0.pinned.fetch_add(1, SeqCst);
        let at = self.0.next.fetch_add(1 << 30, SeqCst);
        Ok(Pinned(Addr::new((1 << 40) + at), request.bytes))
    }

    fn unpin(&self, _: Pinned) -> Result<(), Refused<Pinned, Never>> {
        self.in_use();
        self.0.unpinned.fetch_add(1, SeqCst);
        Ok(())
    }

    fn record(&self, _: &TinyStream) -> Result<(), Never> {
        self.in_use();
        Ok(())
    }

    fn query(&self, _: &()) -> Result<Completion, Never> {
        self.in_use();
        let finished = self.0.finished.load(SeqCst);
        Ok(if finished { Completion::Reached } else { Completion::Pending })
    }

    fn wait(&self, _: &()) -> Result<(), Never> {
        self.in_use();
        Ok(())
    }

    fn now(&self) -> Duration {
        Duration::ZERO
    }
}

type Host = HostAllocator<Tiny>;

fn configs() -> [HostConfig; 2] {
    let ours =
        HostConfig { shards: 1, batch_blocks_max: 1, cached_age_max: None, ..HostConfig::ours() };
    [HostConfig::pytorch(), ours]
}

/// Explores `body` on a new allocator of every policy; afterwards nothing may be pinned.
fn explore(body: fn(&Host, &Machine)) {
    for config in configs() {
        loom::model(move || {
            let machine = Arc::new(Machine::default());
            let host = HostAllocator::new(Tiny(machine.clone()), config.clone()).expect("valid");
            body(&host, &machine);
            if let Err(violation) = host.check() {
                panic!("{violation}");
            }
            drop(host);
            machine.gone.store(true, SeqCst);
            assert_eq!(machine.pinned.load(SeqCst), machine.unpinned.load(SeqCst), "leaked");
        });
    }
}

fn used_block(host: &Host) -> HostAllocation {
    let block = host.allocate(4096).expect("memory");
    host.record_use(&block, &TinyStream).expect("live");
    block
}

fn join<T>(thread: thread::JoinHandle<T>) -> T {
    thread.join().expect("no panic")
}

/// Two threads take the one free block: only one gets it.
#[test]
fn a_block_is_handed_out_once() {
    explore(|host, _| {
        let block = host.allocate(4096).expect("memory");
        host.free(block).expect("freed");
        let other = {
            let host = host.clone();
            thread::spawn(move || host.allocate(4096).expect("memory"))
        };
        let mine = host.allocate(4096).expect("memory");
        let theirs = join(other);
        assert_ne!(mine.addr(), theirs.addr());
        host.free(mine).expect("freed");
        host.free(theirs).expect("freed");
    });
}

/// One thread frees used blocks while another works the events off: every block becomes free once.
#[test]
fn the_event_queue_loses_and_doubles_nothing() {
    explore(|host, machine| {
        let (a, b) = (used_block(host), used_block(host));
        host.free(a).expect("freed");
        machine.finished.store(true, SeqCst);
        let freer = {
            let host = host.clone();
            thread::spawn(move || host.free(b).expect("freed"))
        };
        host.process_events().expect("asked");
        join(freer);
        host.process_events().expect("asked");
        assert_eq!(host.stats().active_requests.current, 0);
    });
}

/// Two threads work the same events off.
#[test]
fn an_event_is_reached_once() {
    explore(|host, machine| {
        let block = used_block(host);
        host.free(block).expect("freed");
        let other = {
            let host = host.clone();
            thread::spawn(move || host.process_events().expect("asked"))
        };
        machine.finished.store(true, SeqCst);
        host.process_events().expect("asked");
        join(other);
        host.process_events().expect("asked");
        assert_eq!(host.stats().draining_bytes, 0);
    });
}

/// Blocks join the open batch of a stream while another thread takes it.
#[test]
fn an_open_batch_is_handed_over_whole() {
    for batch_blocks_max in [1, 2] {
        loom::model(move || {
            let machine = Arc::new(Machine::default());
            let config = HostConfig { batch_blocks_max, ..configs()[1].clone() };
            let host = HostAllocator::new(Tiny(machine.clone()), config).expect("valid");
            let (a, b) = (used_block(&host), used_block(&host));
            let other = {
                let host = host.clone();
                thread::spawn(move || host.free(a).expect("freed"))
            };
            host.free(b).expect("freed");
            join(other);
            assert!(host.check().is_ok(), "H5");
            machine.finished.store(true, SeqCst);
            host.process_events().expect("asked");
            assert_eq!(host.stats().draining_bytes, 0);
        });
    }
}

/// The cache is emptied while another thread allocates and frees.
#[test]
fn emptying_the_cache_takes_nothing_that_is_in_use() {
    explore(|host, _| {
        let block = host.allocate(4096).expect("memory");
        host.free(block).expect("freed");
        let other = {
            let host = host.clone();
            thread::spawn(move || host.allocate(4096).expect("memory"))
        };
        host.empty_cache().expect("emptied");
        let block = join(other);
        assert!(host.is_pinned(block.addr()));
        host.free(block).expect("freed");
    });
}

/// The thread starts once, works beside others and is joined before the memory goes.
#[test]
fn the_background_thread_is_joined_on_drop() {
    for config in configs() {
        loom::model(move || {
            let machine = Arc::new(Machine::default());
            let config = HostConfig { background: true, ..config.clone() };
            let host = HostAllocator::new(Tiny(machine.clone()), config).expect("valid");
            let block = host.allocate(4096).expect("memory");
            host.record_use(&block, &TinyStream).expect("live");
            machine.finished.store(true, SeqCst);
            host.free(block).expect("freed");
            drop(host);
            machine.gone.store(true, SeqCst);
            assert_eq!(machine.pinned.load(SeqCst), machine.unpinned.load(SeqCst), "leaked");
        });
    }
}
