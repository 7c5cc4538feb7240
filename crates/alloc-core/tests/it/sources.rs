//! Pools whose memory comes from a source of their own.

use crate::rig::*;
use alloc_core::backend::{Backend, BackendError, ErrorKind, Refused, Segment, VirtualMemory};
use alloc_core::{
    Addr, AllocError, BackendOp, DeviceId, MemPool, PageSource, Policy, PoolId, PoolOptions,
    SegmentSource, SourceError,
};
use mock_backend::{Fault, MockBackend, MockStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

type Page = <MockBackend as VirtualMemory>::Page;
type Error = <MockBackend as Backend>::Error;

/// Segments from the simulated driver, counted, of a source that has no more than `left` bytes.
struct Counted {
    backend: MockBackend,
    left: AtomicU64,
    broken: AtomicBool,
    /// Sizes of what was acquired, and how much went back.
    acquired: Mutex<Vec<u64>>,
    released: AtomicU64,
    dropped: Arc<AtomicBool>,
}

#[derive(Debug)]
struct SourceFault(ErrorKind);

impl std::fmt::Display for SourceFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the source has {:?}", self.0)
    }
}

impl std::error::Error for SourceFault {}

impl BackendError for SourceFault {
    fn kind(&self) -> ErrorKind {
        self.0
    }
}

/// A segment that goes back by its base, as in the C interfaces of other allocators.
type Tokens = Mutex<Vec<<MockBackend as Backend>::Segment>>;

struct ByBase {
    base: Addr,
    bytes: u64,
}

impl Segment for ByBase {
    fn base(&self) -> Addr {
        self.base
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

struct Held(Counted, Tokens);

impl SegmentSource<MockStream> for Held {
    fn acquire(
        &self,
        device: DeviceId,
        bytes: u64,
        stream: &MockStream,
    ) -> Result<Box<dyn Segment>, SourceError> {
        let source = &self.0;
        if source.broken.load(Ordering::Relaxed) {
            return Err(Box::new(SourceFault(ErrorKind::Other)));
        }
        let left = source.left.load(Ordering::Relaxed);
        let Some(rest) = left.checked_sub(bytes) else {
            return Err(Box::new(SourceFault(ErrorKind::OutOfMemory)));
        };
        let token = source.backend.acquire(device, bytes, stream);
        let token = token.map_err(|error| Box::new(error) as SourceError)?;
        source.left.store(rest, Ordering::Relaxed);
        source.acquired.lock().unwrap().push(bytes);
        let segment = ByBase { base: token.base(), bytes };
        self.1.lock().unwrap().push(token);
        Ok(Box::new(segment))
    }

    fn release(
        &self,
        segment: Box<dyn Segment>,
    ) -> Result<(), Refused<Box<dyn Segment>, SourceError>> {
        if self.0.broken.load(Ordering::Relaxed) {
            let error = Box::new(SourceFault(ErrorKind::Other));
            return Err(Refused { value: segment, error });
        }
        let mut tokens = self.1.lock().unwrap();
        let at = tokens.iter().position(|token| token.base() == segment.base()).expect("ours");
        let token = tokens.swap_remove(at);
        let bytes = token.bytes();
        self.0.backend.release(token).expect("a release");
        self.0.left.fetch_add(bytes, Ordering::Relaxed);
        self.0.released.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::Relaxed);
    }
}

impl PageSource<MockBackend> for Counted {
    fn create(&self, device: DeviceId, bytes: u64) -> Result<Page, Error> {
        let page = self.backend.create(device, bytes)?;
        self.acquired.lock().unwrap().push(bytes);
        Ok(page)
    }

    fn destroy(&self, page: Page) -> Result<(), Refused<Page, Error>> {
        use alloc_core::backend::Page as _;
        let bytes = page.bytes();
        self.backend.destroy(page)?;
        self.released.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }
}

fn counted(rig: &Rig) -> (Counted, Arc<AtomicBool>) {
    let dropped = Arc::new(AtomicBool::new(false));
    let source = Counted {
        backend: rig.backend.clone(),
        left: AtomicU64::new(200 * MIB),
        broken: AtomicBool::new(false),
        acquired: Mutex::default(),
        released: AtomicU64::new(0),
        dropped: Arc::clone(&dropped),
    };
    (source, dropped)
}

fn held(rig: &Rig) -> (Arc<Held>, MemPool<MockBackend>, Arc<AtomicBool>) {
    let (source, dropped) = counted(rig);
    let source = Arc::new(Held(source, Mutex::default()));
    let options = PoolOptions::new().segments_from(Arc::clone(&source) as _);
    let pool = rig.create_pool(DEV0, options).unwrap();
    (source, pool, dropped)
}

/// The source is asked for segments, never for blocks; it lives until its last segment is back, and
/// goes then.
#[test]
fn a_source_is_asked_for_segments_and_goes_with_the_last_one() {
    for policy in BOTH {
        for text in ["", "expandable_segments:True"] {
            let rig = Rig::new(policy, text);
            let s0 = rig.s(0);
            let (source, p, dropped) = held(&rig);
            let small: Vec<_> = (0..3).map(|_| rig.alloc_in(&p, KIB, &s0)).collect();
            let large = rig.alloc_in(&p, 5 * MIB, &s0);
            let huge = rig.alloc_in(&p, 31 * MIB, &s0);
            assert_eq!(*source.0.acquired.lock().unwrap(), [2 * MIB, 20 * MIB, 32 * MIB]);
            assert!(p.snapshot().segments.iter().all(|segment| !segment.expandable));
            drop(source);
            drop(p);
            small.into_iter().chain([large]).for_each(|block| rig.free(block));
            rig.empty();
            assert!(!dropped.load(Ordering::Relaxed), "a block is left");
            assert_eq!(rig.reserved(), 32 * MIB);
            rig.free(huge);
            rig.empty();
            assert!(dropped.load(Ordering::Relaxed));
            assert_eq!((rig.reserved(), rig.backend.used(DEV0)), (0, 0));
        }
    }
}

/// Pages from a source, with expandable segments off elsewhere: what is idle stays in the pool.
#[test]
fn a_source_of_pages_backs_expandable_segments() {
    for policy in BOTH {
        for text in ["", "expandable_segments:True,ours_margin_min_mb:0"] {
            let rig = Rig::of_size(400 * MIB, policy, text);
            let s0 = rig.s(0);
            let (source, dropped) = counted(&rig);
            let source = Arc::new(source);
            let options = PoolOptions::new().pages_from(Arc::clone(&source) as _);
            let p = rig.create_pool(DEV0, options).unwrap();
            let a = rig.alloc_in(&p, 60 * MIB, &s0);
            assert!(p.snapshot().segments.iter().all(|segment| segment.expandable));
            let got = |source: &Counted| source.acquired.lock().unwrap().iter().sum::<u64>();
            assert!(got(&source) >= 60 * MIB);
            rig.free(a);
            // Nobody else gets these pages, nor this pool others'.
            let b = rig.alloc(60 * MIB, &s0);
            assert!(rig.reserved() >= got(&source) + 60 * MIB);
            rig.free(b);
            let c = rig.alloc_in(&p, 90 * MIB, &s0);
            assert!(got(&source) >= 90 * MIB);
            rig.free(c);
            assert!(p.empty_cache().unwrap() >= 90 * MIB);
            assert_eq!(source.released.load(Ordering::Relaxed), got(&source));
            let d = rig.alloc_in(&p, MIB, &s0);
            drop((p, source));
            rig.free(d);
            rig.empty();
            assert!(dropped.load(Ordering::Relaxed));
            assert_eq!((rig.reserved(), rig.backend.used(DEV0)), (0, 0));
        }
    }
}

/// A source without memory makes the request climb the ladder; any other failure is the caller's, and
/// says whose it is. Either way nothing is lost.
#[test]
fn a_source_that_fails() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let s0 = rig.s(0);
        let (source, p, _) = held(&rig);
        let a = rig.alloc_in(&p, 150 * MIB, &s0);
        let error = p.allocate(100 * MIB, &s0).unwrap_err();
        let AllocError::OutOfMemory(report) = &error else { panic!("{error}") };
        assert_eq!(report.pool, p.id());
        // What is free elsewhere in the pool makes room.
        rig.free(a);
        if policy == Policy::Ours {
            let b = rig.alloc_in(&p, 180 * MIB, &s0);
            rig.free(b);
        }
        source.0.broken.store(true, Ordering::Relaxed);
        let error = p.allocate(190 * MIB, &s0).unwrap_err();
        assert!(
            matches!(&error, AllocError::PoolSource { op: BackendOp::Acquire, pool, .. } if *pool == p.id()),
            "{error}"
        );
        assert!(error.to_string().contains("the source of pool"), "{error}");
        let before = rig.reserved();
        let error = p.empty_cache().unwrap_err();
        assert!(matches!(error, AllocError::PoolSource { op: BackendOp::Release, .. }), "{error}");
        assert_eq!(rig.reserved(), before);
        rig.verify();
        source.0.broken.store(false, Ordering::Relaxed);
        assert_eq!(p.empty_cache().unwrap(), before);
    }
}

/// A segment goes back to its source only when work on its stream is done: the judge objects
/// otherwise, for unlike cudaFree a source need not wait.
#[test]
fn a_source_gets_idle_memory_back() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let s0 = rig.s(0);
        let (_source, p, _) = held(&rig);
        let a = rig.alloc_in(&p, 10 * MIB, &s0);
        rig.busy(&s0);
        rig.touch(&a, &s0);
        rig.free(a);
        rig.backend.take_log();
        assert_eq!(p.empty_cache().unwrap(), 10 * MIB);
        use alloc_core::backend::Stream;
        let log = rig.backend.take_log();
        let waited = log.iter().position(|entry| entry.waited_for == [s0.id()]);
        let released = log.iter().position(|e| e.info.call == mock_backend::Call::Release);
        assert!(waited.unwrap() < released.unwrap());
        // If waiting fails, the segment stays.
        let b = rig.alloc_in(&p, 10 * MIB, &s0);
        rig.free(b);
        rig.backend
            .set_faults([Fault::nth(1).of(mock_backend::Call::Record).kind(ErrorKind::Other)]);
        let error = p.empty_cache().unwrap_err();
        assert!(matches!(error, AllocError::Backend { op: BackendOp::Record, .. }), "{error}");
        rig.backend.set_faults([]);
        assert_eq!(rig.reserved(), 10 * MIB);
        rig.verify();
    }
}

/// Every call of a source of pages fails once: nothing is lost, and everything works afterwards.
#[test]
fn every_call_of_a_pool_with_pages_fails_once() {
    for policy in BOTH {
        for kind in [ErrorKind::OutOfMemory, ErrorKind::Other] {
            for n in 1.. {
                let rig = Rig::of_size(GIB, policy, "");
                let s0 = rig.s(0);
                let (source, _) = counted(&rig);
                let options = PoolOptions::new().pages_from(Arc::new(source));
                let p = rig.create_pool(DEV0, options).unwrap();
                rig.backend.set_faults([Fault::nth(n).kind(kind)]);
                for bytes in [30 * MIB, KIB, 70 * MIB] {
                    if let Ok(block) = p.allocate(bytes, &s0) {
                        rig.free_raw(block.addr()).unwrap();
                    }
                    rig.verify();
                    let _ = p.empty_cache();
                    rig.verify();
                }
                let struck = rig.backend.fault_counts().1;
                rig.backend.set_faults([]);
                drop(p);
                rig.empty();
                assert_eq!((rig.reserved(), rig.backend.used(DEV0)), (0, 0));
                if struck == 0 {
                    assert!(n > 10, "only {n} calls");
                    break;
                }
            }
        }
    }
}

/// Requests of the default pool are served by a pool of another source too, if it is open to them.
#[test]
fn a_source_helps_out() {
    for policy in BOTH {
        let rig = Rig::of_size(100 * MIB, policy, "");
        let s0 = rig.s(0);
        let (source, _) = counted(&rig);
        let source = Arc::new(Held(source, Mutex::default()));
        let options = PoolOptions::new().use_on_oom().segments_from(source);
        let p = rig.create_pool(DEV0, options).unwrap();
        let a = rig.alloc_in(&p, 40 * MIB, &s0);
        let at = a.addr();
        rig.free(a);
        let fill = rig.alloc(60 * MIB, &s0);
        let b = rig.alloc(40 * MIB, &s0);
        assert_eq!(b.addr(), at);
        assert_ne!(rig.locate(at).unwrap().pool, PoolId::DEFAULT);
        rig.free(b);
        rig.free(fill);
    }
}

/// Pages of a pool's own source are named apart from all others when they are shared; segments of one
/// cannot be shared at all.
#[test]
fn memory_of_sources_is_shared_under_names_of_its_own() {
    for policy in BOTH {
        let rig = Rig::new(policy, "expandable_segments:True");
        let s0 = rig.s(0);
        let options = PoolOptions::new().pages_from(Arc::new(counted(&rig).0));
        let pool = rig.create_pool(DEV0, options).unwrap();
        let own = rig.alloc_in(&pool, 60 * MIB, &s0);
        let other = rig.alloc(60 * MIB, &s0);
        let ids = [&own, &other].map(|block| {
            let pieces = rig.share(block).unwrap().block.pieces;
            pieces.into_iter().map(|piece| piece.id).collect::<Vec<_>>()
        });
        assert!(ids[0].iter().all(|id| !ids[1].contains(id)), "{ids:?}");
        let (_, whole, _) = held(&rig);
        let block = rig.alloc_in(&whole, MIB, &s0);
        let error = rig.share(&block).unwrap_err();
        assert!(matches!(error, AllocError::InvalidArgument { .. }), "{error}");
        rig.verify();
        for block in [own, other, block] {
            rig.free(block);
        }
        drop(pool);
        drop(whole);
        rig.empty();
    }
}
