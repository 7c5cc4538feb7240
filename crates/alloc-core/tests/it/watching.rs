//! Observers of memory: part P of the cases, and what a registration needs besides.

use crate::rig::*;
use alloc_core::backend::ErrorKind;
use alloc_core::share::Importer;
use alloc_core::watch::{MemoryObserver, MemoryRange, Watched};
use alloc_core::{Addr, CachingAllocator};
use mock_backend::{Exchange, Fault, MockBackend, MockStream, Rng};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

const TEXTS: [&str; 3] = [
    "",
    "expandable_segments:True",
    "expandable_segments:True,ours_margin:0,ours_margin_min_mb:0,ours_handle_max_mb:6,\
     ours_handle_calm_mb:6,ours_ahead:1,ours_views_max:1",
];

/// What a library that registers memory would have registered.
struct Registrar {
    backend: MockBackend,
    registered: Mutex<BTreeMap<Addr, MemoryRange>>,
    /// Registrations so far.
    count: Mutex<u64>,
}

impl Registrar {
    fn new(backend: &MockBackend) -> Arc<Self> {
        let registered = Mutex::default();
        Arc::new(Registrar { backend: backend.clone(), registered, count: Mutex::default() })
    }

    fn ranges(&self) -> Vec<MemoryRange> {
        self.registered.lock().unwrap().values().copied().collect()
    }
}

fn is_there(backend: &MockBackend, range: MemoryRange) -> bool {
    let leaks = backend.leaks();
    let own = (range.addr, range.bytes);
    leaks.segments.contains(&own) || leaks.mappings.contains(&own)
}

impl MemoryObserver for Registrar {
    fn added(&self, range: MemoryRange) {
        assert!(is_there(&self.backend, range), "registered before it is there: {range:?}");
        let mut registered = self.registered.lock().unwrap();
        let below = registered.range(..range.addr + range.bytes).next_back();
        let overlaps = below.is_some_and(|(addr, own)| *addr + own.bytes > range.addr);
        assert!(!overlaps, "{range:?} is registered already");
        registered.insert(range.addr, range);
        *self.count.lock().unwrap() += 1;
    }

    fn removed(&self, range: MemoryRange) {
        assert!(is_there(&self.backend, range), "given back before it is deregistered: {range:?}");
        assert_eq!(self.registered.lock().unwrap().remove(&range.addr), Some(range));
    }
}

struct Watching {
    backend: MockBackend,
    watched: Watched<MockBackend>,
    alloc: CachingAllocator<Watched<MockBackend>>,
    streams: Vec<MockStream>,
}

fn watching(policy: alloc_core::Policy, text: &str) -> Watching {
    let backend = MockBackend::builder().device(GIB).strict().build();
    let watched = Watched::new(backend.clone());
    let config = config(policy, text);
    let alloc = CachingAllocator::with_virtual_memory(watched.clone(), config).unwrap();
    let streams = (0..3).map(|_| backend.stream(DEV0)).collect();
    Watching { backend, watched, alloc, streams }
}

impl Watching {
    /// Everything that a block lies in is registered.
    fn covers(&self, registrar: &Registrar, addr: Addr, bytes: u64) {
        let registered = registrar.registered.lock().unwrap();
        let mut at = addr;
        while at < addr + bytes {
            let (start, range) = registered.range(..=at).next_back().expect("registered");
            assert!(*start + range.bytes > at, "{at} is not registered");
            at = *start + range.bytes;
        }
    }
}

/// P2, P4: what exists when an observer comes, and what is to be, is registered once each and
/// deregistered before it goes, whatever is given back in between.
#[test]
fn everything_is_registered_once_and_deregistered_before_it_goes() {
    for policy in BOTH {
        for text in TEXTS {
            let w = watching(policy, text);
            let registrar = Registrar::new(&w.backend);
            let mut rng = Rng::new(3);
            let mut live = Vec::new();
            let mut attached = None;
            for step in 0..400 {
                if step == 50 {
                    attached = Some(w.watched.attach(Arc::clone(&registrar) as _));
                }
                let stream = &w.streams[rng.below(3) as usize];
                if rng.chance(0.55) && live.len() < 30 {
                    let large = rng.chance(0.4);
                    let bytes = if large { rng.below(30) * MIB + MIB } else { rng.below(MIB) + 1 };
                    if let Ok(block) = w.alloc.allocate(bytes, stream) {
                        live.push(block);
                    }
                } else if !live.is_empty() && rng.chance(0.9) {
                    let block = live.swap_remove(rng.below(live.len() as u64) as usize);
                    w.alloc.free(block).unwrap();
                } else {
                    w.alloc.empty_cache().unwrap();
                }
                if attached.is_some() {
                    assert_eq!(registrar.ranges(), w.watched.memory_ranges());
                    live.iter().for_each(|block| w.covers(&registrar, block.addr(), block.bytes()));
                }
            }
            let late = Registrar::new(&w.backend);
            let second = w.watched.attach(Arc::clone(&late) as _);
            assert_eq!(late.ranges(), registrar.ranges());
            assert_eq!(*late.count.lock().unwrap(), late.ranges().len() as u64);
            drop(second);
            assert!(late.ranges().is_empty(), "P1: each was deregistered once");
            live.into_iter().for_each(|block| w.alloc.free(block).unwrap());
            let Watching { backend, watched, alloc, .. } = w;
            drop(alloc);
            assert!(registrar.ranges().is_empty() && watched.memory_ranges().is_empty());
            assert!(*registrar.count.lock().unwrap() > 10);
            drop(attached);
            backend.assert_clean();
        }
    }
}

/// A call that fails leaves registered what is there, and nothing else.
#[test]
fn failures_leave_what_is_there_registered() {
    for policy in BOTH {
        for text in TEXTS {
            for kind in [ErrorKind::OutOfMemory, ErrorKind::Other] {
                for n in 1.. {
                    let w = watching(policy, text);
                    let registrar = Registrar::new(&w.backend);
                    let attached = w.watched.attach(Arc::clone(&registrar) as _);
                    w.backend.set_faults([Fault::nth(n).kind(kind)]);
                    let stream = &w.streams[0];
                    let mut live = Vec::new();
                    for mib in [30, 50, 1, 20] {
                        live.extend(w.alloc.allocate(mib * MIB, stream).ok());
                    }
                    live.drain(..).for_each(|block| drop(w.alloc.free(block)));
                    let _ = w.alloc.empty_cache();
                    live.extend(w.alloc.allocate(70 * MIB, stream).ok());
                    let struck = w.backend.fault_counts().1 > 0;
                    w.backend.set_faults([]);
                    live.iter().for_each(|block| w.covers(&registrar, block.addr(), block.bytes()));
                    assert!(registrar.ranges().into_iter().all(|r| is_there(&w.backend, r)));
                    live.into_iter().for_each(|block| w.alloc.free(block).unwrap());
                    w.alloc.empty_cache().unwrap();
                    let Watching { backend, alloc, .. } = w;
                    drop(alloc);
                    assert!(registrar.ranges().is_empty());
                    drop(attached);
                    backend.assert_clean();
                    if !struck {
                        break;
                    }
                }
            }
        }
    }
}

/// Memory of other processes is memory.
#[test]
fn imports_are_registered_too() {
    for text in ["", "expandable_segments:True"] {
        let exchange = Exchange::new();
        let process = || MockBackend::builder().device(GIB).exchange(&exchange).strict().build();
        let producer = process();
        let alloc =
            Alloc::with_virtual_memory(producer.clone(), config(alloc_core::Policy::Ours, text));
        let alloc = alloc.unwrap();
        let block = alloc.allocate(50 * MIB, &producer.default_stream(DEV0)).unwrap();
        let consumer = process();
        let watched = Watched::new(consumer.clone());
        let registrar = Registrar::new(&consumer);
        let attached = watched.attach(Arc::clone(&registrar) as _);
        let importer = Importer::new(watched);
        let export = alloc.share(&block).unwrap();
        let imported = importer.open(&export.block, export.tokens, None, export.hold).unwrap();
        let bytes: u64 = registrar.ranges().iter().map(|range| range.bytes).sum();
        assert!(bytes >= 50 * MIB);
        drop(imported);
        assert!(registrar.ranges().is_empty());
        drop((attached, importer));
        consumer.assert_clean();
        alloc.free(block).unwrap();
    }
}
