//! Another operation in the middle of every backend call.
//!
//! No lock is held during backend calls, so other threads get in between: a slow path must cope with
//! whatever they do. Here they get in between at a chosen call, from a hook of the simulator: each
//! scenario runs once for every call and every kind of intruder. What a second thread could do
//! then, the hook does on the same thread; a deadlock ends the test. Afterwards nothing is left in
//! anybody's hands (I12). The call itself then succeeds, or fails as well.

use crate::cases_threads::in_time;
use crate::rig::*;
use alloc_core::backend::ErrorKind;
use alloc_core::{Addr, AllocError, Allocation, Checkpoint, MemPool, Policy, PoolOptions};
use mock_backend::{Call, Fault, Judged, MockBackend, MockStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Who gets in between.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Intruder {
    /// Frees all blocks that are set aside for it.
    Frees,
    /// Frees one of them after recording a use of it, so that an event becomes pending.
    FreesAcrossStreams,
    /// Is served from the cache of the heap at work, and of another one; keeps the blocks.
    Allocates,
    /// Looks around.
    Looks,
    /// Needs memory of its own, for another heap.
    Grows,
    /// Gives the cache back.
    Empties,
    /// Makes a pool, is served from it and gives it up; pins the pool at work, and empties it.
    UsesPools,
}

const INTRUDERS: [Intruder; 7] = [
    Intruder::Frees,
    Intruder::FreesAcrossStreams,
    Intruder::Allocates,
    Intruder::Looks,
    Intruder::Grows,
    Intruder::Empties,
    Intruder::UsesPools,
];

/// An allocator with some blocks set aside for the intruder.
struct Stage {
    judged: Judged<Alloc>,
    streams: Vec<MockStream>,
    pool: MemPool<MockBackend>,
    aside: Mutex<Vec<Addr>>,
    /// What the intruder holds.
    taken: Mutex<Vec<Addr>>,
}

impl Stage {
    fn new(policy: Policy, text: &str) -> Self {
        let backend = MockBackend::builder().device(GIB).strict().build();
        let alloc = Alloc::with_virtual_memory(backend.clone(), config(policy, text)).unwrap();
        let streams = (0..4).map(|_| backend.stream(DEV0)).collect();
        let stage = Stage {
            pool: alloc.create_pool(DEV0, PoolOptions::new()).unwrap(),
            judged: Judged::new(backend, alloc),
            streams,
            aside: Mutex::default(),
            taken: Mutex::default(),
        };
        // Something cached everywhere, so that the intruder can be served.
        for n in 0..2 {
            let warm = stage.alloc(512, n);
            let keeps = stage.alloc(512, n);
            stage.free(warm);
            stage.set_aside(keeps);
        }
        stage
    }

    /// `None` if the call that the intruder met has failed.
    fn alloc(&self, bytes: u64, n: usize) -> Option<Addr> {
        let result = self.judged.allocate(bytes, &self.streams[n]);
        self.settled();
        self.unless_failed(result)
    }

    fn free(&self, addr: Option<Addr>) {
        let Some(addr) = addr else { return };
        let result = self.judged.free(addr);
        self.settled();
        if self.unless_failed(result).is_none() {
            self.taken.lock().unwrap().push(addr);
        }
    }

    fn use_on(&self, addr: Option<Addr>, n: usize) {
        if let Some(addr) = addr {
            self.judged.use_on(addr, &self.streams[n]).unwrap();
        }
    }

    fn empty(&self) {
        let result = self.judged.subject.empty_cache();
        self.settled();
        self.unless_failed(result);
    }

    fn unless_failed<T>(&self, result: Result<T, Error>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(AllocError::Backend { source, .. }) if source.is_injected() => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn set_aside(&self, addr: Option<Addr>) {
        self.aside.lock().unwrap().extend(addr);
    }

    fn settled(&self) {
        self.judged.subject.check().unwrap();
    }

    /// What the intruder does, in the middle of a call.
    fn intrude(&self, intruder: Intruder) {
        match intruder {
            Intruder::Frees => {
                for addr in std::mem::take(&mut *self.aside.lock().unwrap()) {
                    self.judged.free(addr).unwrap();
                }
            }
            Intruder::FreesAcrossStreams => {
                let Some(addr) = self.aside.lock().unwrap().pop() else { return };
                self.judged.use_on(addr, &self.streams[3]).unwrap();
                self.judged.free(addr).unwrap();
            }
            Intruder::Allocates => {
                for n in 0..2 {
                    self.keep(512, n);
                }
            }
            Intruder::Looks => {
                let alloc = &self.judged.subject;
                alloc.stats(DEV0).unwrap();
                alloc.snapshot(DEV0).unwrap();
                for addr in self.aside.lock().unwrap().iter() {
                    assert!(alloc.locate(*addr).is_some());
                }
            }
            Intruder::Grows => self.keep(33 * MIB, 2),
            Intruder::Empties => self.judged.subject.empty_cache().unwrap(),
            Intruder::UsesPools => {
                let own = self.judged.subject.create_pool(DEV0, PoolOptions::new()).unwrap();
                let scope = own.enter();
                self.keep(512, 2);
                drop((scope, own));
                let pin = self.pool.pin();
                assert_eq!(self.pool.empty_cache().unwrap(), 0);
                drop(pin);
                self.pool.empty_cache().unwrap();
            }
        }
    }

    fn keep(&self, bytes: u64, n: usize) {
        let addr = self.judged.allocate(bytes, &self.streams[n]).unwrap();
        self.taken.lock().unwrap().push(addr);
    }

    /// From the pool, on stream 0.
    fn alloc_in_pool(&self, bytes: u64) -> Option<Addr> {
        let stream = &self.streams[0];
        let result = self.pool.allocate(bytes, stream);
        if let Ok(block) = &result {
            self.judged.backend.judge().allocated(block.addr(), block.bytes(), stream);
        }
        self.settled();
        self.unless_failed(result).map(|block| block.addr())
    }

    /// Restores a checkpoint; the stale and the revived blocks.
    fn restore(&self, checkpoint: &Checkpoint) -> [Vec<Addr>; 2] {
        let result = self.pool.restore(checkpoint);
        self.settled();
        let Some(restored) = self.unless_failed(result) else { return [vec![], vec![]] };
        let judge = self.judged.backend.judge();
        for stale in &restored.stale {
            judge.freed(stale.addr);
        }
        for block in &restored.revived {
            judge.allocated(block.addr(), block.bytes(), &self.streams[0]);
        }
        let stale = restored.stale.iter().map(|stale| stale.addr).collect();
        [stale, restored.revived.iter().map(Allocation::addr).collect()]
    }

    fn empty_pool(&self) {
        let result = self.pool.empty_cache();
        self.settled();
        self.unless_failed(result);
    }

    fn finish(self) {
        drop(self.pool);
        let rest = [&self.aside, &self.taken];
        for addr in rest.into_iter().flat_map(|list| std::mem::take(&mut *list.lock().unwrap())) {
            self.judged.free(addr).unwrap();
        }
        self.judged.backend.sync();
        self.judged.subject.empty_cache().unwrap();
        let stats = self.judged.subject.stats(DEV0).unwrap();
        assert_eq!(stats.get("reserved_bytes.all.current"), Some(0));
        assert_eq!(self.judged.backend.used(DEV0), 0);
        self.judged.finish();
    }
}

/// Growth, frees with events, their processing, flushes, with neighbours set aside.
fn scenario(stage: &Stage) {
    // Below and above the blocks at work, and one of another heap.
    let low = stage.alloc(10 * MIB, 0);
    let middle = stage.alloc(57 * MIB, 0);
    let high = stage.alloc(3 * MIB, 0);
    let other = stage.alloc(4 * MIB, 1);
    for addr in [low, high, other] {
        stage.set_aside(addr);
    }
    stage.use_on(middle, 1);
    stage.use_on(middle, 2);
    stage.free(middle);
    // Growth while the events above are pending.
    let second = stage.alloc(30 * MIB, 0);
    stage.judged.backend.pass(&stage.streams[1]);
    stage.free(second);
    stage.empty();
    // Growth into the hole, behind a free block.
    let third = stage.alloc(5 * MIB, 0);
    stage.free(third);
    let fourth = stage.alloc(90 * MIB, 0);
    stage.use_on(fourth, 3);
    stage.free(fourth);
    stage.empty();
}

/// A pool: its blocks across streams, a checkpoint, a restore, its cache.
fn pool_scenario(stage: &Stage) {
    let (a, b) = (stage.alloc_in_pool(20 * MIB), stage.alloc_in_pool(700));
    stage.use_on(a, 1);
    let checkpoint = stage.unless_failed(stage.pool.checkpoint());
    stage.settled();
    stage.free(a);
    let c = stage.alloc_in_pool(9 * MIB);
    stage.use_on(c, 2);
    let mut c = c;
    if let Some(checkpoint) = &checkpoint {
        let [stale, revived] = stage.restore(checkpoint);
        c = c.filter(|c| !stale.contains(c));
        revived.into_iter().for_each(|addr| stage.free(Some(addr)));
    }
    stage.free(c);
    drop(checkpoint);
    stage.empty_pool();
    let elsewhere = stage.alloc(60 * MIB, 1);
    stage.free(elsewhere);
    stage.free(b);
    let last = stage.alloc_in_pool(40 * MIB);
    stage.free(last);
    stage.empty_pool();
    stage.empty();
}

/// Runs the scenario with the intruder at the `n`-th call, which then fails if `fails`. Returns
/// whether there was such a call.
fn with_intruder(
    scenario: fn(&Stage),
    policy: Policy,
    text: &str,
    intruder: Intruder,
    n: u64,
    fails: bool,
) -> bool {
    let stage = Arc::new(Stage::new(policy, text));
    let calls = Arc::new(AtomicU64::new(0));
    for call in Call::ALL {
        let (watched, calls) = (Arc::downgrade(&stage), Arc::clone(&calls));
        stage.judged.backend.set_hook(call, move |_| {
            if calls.fetch_add(1, Ordering::Relaxed) + 1 == n
                && let Some(stage) = watched.upgrade()
            {
                stage.intrude(intruder);
                if fails {
                    // The call that is about to begin.
                    let fault = Fault::nth(1).kind(ErrorKind::Other);
                    stage.judged.backend.set_faults([fault]);
                }
            }
        });
    }
    scenario(&stage);
    Call::ALL.iter().for_each(|call| stage.judged.backend.clear_hook(*call));
    let Ok(stage) = Arc::try_unwrap(stage) else { panic!("the hooks are gone") };
    stage.finish();
    calls.load(Ordering::Relaxed) >= n
}

fn at_every_call(policies: &'static [Policy], text: &'static str, fails: bool) {
    at_every_call_of(scenario, policies, text, fails);
}

fn at_every_call_of(
    scenario: fn(&Stage),
    policies: &'static [Policy],
    text: &'static str,
    fails: bool,
) {
    in_time(move || {
        for policy in policies.iter().copied() {
            for intruder in INTRUDERS {
                let mut n = 1;
                while with_intruder(scenario, policy, text, intruder, n, fails) {
                    n += 1;
                }
                assert!(n > 10);
            }
        }
    });
}

#[test]
fn ordinary_segments_at_every_call() {
    at_every_call(&BOTH, "", false);
}

#[test]
fn expandable_segments_at_every_call() {
    at_every_call(&BOTH, "expandable_segments:True", false);
}

#[test]
fn pools_at_every_call() {
    at_every_call_of(pool_scenario, &BOTH, "", false);
    at_every_call_of(pool_scenario, &BOTH, "expandable_segments:True", false);
}

#[test]
fn pools_at_every_call_that_fails() {
    at_every_call_of(pool_scenario, &BOTH, "", true);
    at_every_call_of(pool_scenario, &BOTH, "expandable_segments:True", true);
}

/// Options under which memory moves from the first miss on.
const MOVING: &str = "expandable_segments:True,ours_margin:0,ours_margin_min_mb:0,\
                      ours_handle_max_mb:6,ours_handle_calm_mb:6,ours_ahead:1,ours_views_max:1";

#[test]
fn moving_memory_at_every_call() {
    at_every_call(&[Policy::Ours], MOVING, false);
}

#[test]
fn moving_memory_at_every_call_that_fails() {
    at_every_call(&[Policy::Ours], MOVING, true);
}

#[test]
fn ordinary_segments_at_every_call_that_fails() {
    at_every_call(&BOTH, "", true);
}

#[test]
fn expandable_segments_at_every_call_that_fails() {
    at_every_call(&BOTH, "expandable_segments:True", true);
}

/// Somebody else is asking about an event while this request has to wait for it: the wait must not
/// pass it over, or the request fails although the memory is about to come back.
#[test]
fn a_flush_waits_for_an_event_that_another_thread_asks_about() {
    in_time(|| {
        for policy in BOTH {
            let rig = Rig::of_size(22 * MIB, policy, "");
            let s0 = rig.s(0);
            let warm = rig.alloc(512, &rig.s(2));
            rig.free(warm);
            let a = rig.alloc(20 * MIB, &s0);
            rig.busy(&rig.s(1));
            rig.record(&a, &rig.s(1));
            rig.free(a);
            let (entered, inside) = std::sync::mpsc::channel();
            let (leave, left) = std::sync::mpsc::channel::<()>();
            let gate = Mutex::new(Some((entered, left)));
            rig.backend.set_hook(Call::Query, move |_| {
                if let Some((entered, left)) = gate.lock().unwrap().take() {
                    entered.send(()).unwrap();
                    left.recv().unwrap();
                }
            });
            let (alloc, s2) = (Alloc::clone(&rig), rig.s(2));
            std::thread::scope(|scope| {
                let asking = scope.spawn(|| {
                    let addr = alloc.allocate_raw(512, &s2).unwrap();
                    alloc.free_raw(addr).unwrap();
                });
                inside.recv().unwrap();
                let needing = scope.spawn(|| alloc.allocate_raw(20 * MIB, &s0));
                // The request has come to its wait when this is counted.
                while alloc.stats(DEV0).unwrap().get("num_sync_all_streams") == Some(0) {
                    std::thread::yield_now();
                }
                leave.send(()).unwrap();
                asking.join().unwrap();
                match needing.join().unwrap() {
                    Ok(addr) => alloc.free_raw(addr).unwrap(),
                    Err(AllocError::OutOfMemory(report)) => panic!("{report}"),
                    Err(error) => panic!("{error}"),
                }
            });
            rig.backend.clear_hook(Call::Query);
            assert_eq!(rig.stat("num_ooms"), 0);
            rig.verify();
        }
    });
}
