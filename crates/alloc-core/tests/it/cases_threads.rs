//! Reports about locks and threads. Whatever could deadlock runs under a timeout.

use crate::rig::*;
use alloc_core::{Policy, TraceEntry, TraceSink};
use mock_backend::{Call, MockBackend};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Much longer than any of these takes on a busy machine, which is a matter of seconds: what is late
/// must not look like what never ends. Deadlocks are looked for by shuttle, which needs no clock.
const PATIENCE: Duration = Duration::from_secs(300);

/// Runs `body` on a thread of its own; panics if it does not come back.
#[track_caller]
pub(crate) fn in_time(body: impl FnOnce() + Send + 'static) {
    let (done, wait) = channel();
    let worker = thread::spawn(move || {
        body();
        // The receiver may be gone after a timeout.
        let _ = done.send(());
    });
    if wait.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
        panic!("deadlock: no end after {PATIENCE:?}");
    }
    if let Err(panic) = worker.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Many short-lived blocks on three threads, one of which empties the cache all the time: blocks
/// were said to belong to no pool.
#[test]
fn case_d4_blocks_never_fall_out_of_their_pool() {
    in_time(|| {
        for policy in BOTH {
            let backend = MockBackend::builder().device(GIB).build();
            let alloc = Alloc::with_virtual_memory(backend.clone(), config(policy, "")).unwrap();
            let stream = backend.default_stream(DEV0);
            let running = AtomicUsize::new(2);
            thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        for _ in 0..100_000 {
                            let addr = alloc.allocate_raw(1, &stream).unwrap();
                            alloc.free_raw(addr).unwrap();
                        }
                        running.fetch_sub(1, Ordering::Relaxed);
                    });
                }
                scope.spawn(|| {
                    while running.load(Ordering::Relaxed) > 0 {
                        alloc.empty_cache().unwrap();
                    }
                });
            });
            alloc.empty_cache().unwrap();
            alloc.check().unwrap();
            let stats = alloc.stats(DEV0).unwrap();
            assert_eq!(stats.get("active.all.current"), Some(0));
            assert_eq!(stats.get("reserved_bytes.all.current"), Some(0));
            assert_eq!(stats.get("allocation.all.allocated"), Some(200_000));
            drop(alloc);
            backend.assert_clean();
        }
    });
}

/// A sink that needs a lock which others hold while they call the allocator, as a stack recorder
/// needs the interpreter's. Says so before it waits for it.
struct LockingSink(Arc<Mutex<()>>, Mutex<Sender<()>>);

impl TraceSink for LockingSink {
    fn record(&self, _: &TraceEntry) {
        // Nobody listens any more once the first one has come.
        let _ = self.1.lock().unwrap().send(());
        let _interpreter = self.0.lock().unwrap();
    }
}

/// The recorder takes the interpreter's lock; another thread holds that lock and frees. With the
/// recorder called under the allocator's lock this is a deadlock. Observers and callbacks are the
/// same story.
#[test]
fn case_n1_hooks_run_without_the_allocators_locks() {
    in_time(|| {
        let rig = Rig::of_size(4 * MIB, Policy::Ours, "");
        let interpreter = Arc::new(Mutex::new(()));
        let (waits, waiting) = channel();
        let sink = LockingSink(Arc::clone(&interpreter), Mutex::new(waits));
        let observed = Arc::new(AtomicUsize::new(0));
        let (count, lock) = (Arc::clone(&observed), Arc::clone(&interpreter));
        rig.add_oom_observer(move |_| {
            let _interpreter = lock.lock().unwrap();
            count.fetch_add(1, Ordering::Relaxed);
        });
        let lock = Arc::clone(&interpreter);
        rig.add_free_memory_callback("interpreter", move |_| {
            let _interpreter = lock.lock().unwrap();
            false
        });
        let (alloc, stream) = (Alloc::clone(&rig), rig.s(0));
        let mine = alloc.allocate_raw(512, &stream).unwrap();
        thread::scope(|scope| {
            let held = interpreter.lock().unwrap();
            alloc.set_trace_sink(Some(Arc::new(sink)));
            let alloc = &alloc;
            scope.spawn(move || {
                let hit = alloc.allocate_raw(512, &stream).unwrap();
                alloc.free_raw(hit).unwrap();
                alloc.allocate_raw(3 * MIB, &stream).unwrap_err();
            });
            // The other thread is in the sink now. Nothing it holds may stop this one, whose own
            // operations leave no trace: they would wait for the lock that it holds itself.
            waiting.recv().unwrap();
            alloc.set_trace_sink(None);
            alloc.free_raw(mine).unwrap();
            let again = alloc.allocate_raw(512, &stream).unwrap();
            alloc.free_raw(again).unwrap();
            alloc.stats(DEV0).unwrap();
            drop(held);
        });
        assert_eq!(observed.load(Ordering::Relaxed), 1);
        rig.remove_free_memory_callback("interpreter");
    });
}

/// A sink, an observer and a callback may call the allocator themselves.
#[test]
fn case_n1_hooks_may_call_the_allocator() {
    struct Curious(Mutex<Option<Alloc>>, AtomicUsize);
    impl TraceSink for Curious {
        fn record(&self, _: &TraceEntry) {
            let alloc = self.0.lock().unwrap().clone();
            if let Some(alloc) = alloc {
                alloc.stats(DEV0).unwrap();
                alloc.check().unwrap();
                self.1.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    in_time(|| {
        let rig = Rig::of_size(4 * MIB, Policy::Ours, "");
        let sink = Arc::new(Curious(Mutex::new(Some(rig.clone())), AtomicUsize::new(0)));
        rig.set_trace_sink(Some(Arc::clone(&sink) as Arc<dyn TraceSink>));
        let a = rig.alloc(512, &rig.s(0));
        rig.oom(3 * MIB, &rig.s(0));
        rig.free(a);
        rig.empty();
        assert_eq!(sink.1.load(Ordering::Relaxed), 6);
        *sink.0.lock().unwrap() = None;
    });
}

/// While one thread is inside the driver, others are served: on its own stream and on another one,
/// and frees go through as well.
#[test]
fn case_n2_a_slow_driver_call_stops_nobody() {
    in_time(|| {
        for policy in BOTH {
            let rig = Rig::new(policy, "release_lock_on_cudamalloc:True");
            for n in [0, 1] {
                let warm = rig.alloc(512, &rig.s(n));
                rig.free(warm);
            }
            let (entered, inside) = channel();
            let (leave, left) = channel::<()>();
            let left = Mutex::new(left);
            rig.backend.set_hook(Call::Acquire, move |_| {
                entered.send(()).unwrap();
                left.lock().unwrap().recv().unwrap();
            });
            let (s0, s1) = (rig.s(0), rig.s(1));
            let alloc = Alloc::clone(&rig);
            thread::scope(|scope| {
                let slow = scope.spawn(|| alloc.allocate_raw(20 * MIB, &s0).unwrap());
                inside.recv().unwrap();
                for stream in [s0, s1] {
                    let addr = alloc.allocate_raw(512, &stream).unwrap();
                    alloc.free_raw(addr).unwrap();
                }
                assert_eq!(alloc.stats(DEV0).unwrap().get("segment.all.current"), Some(2));
                leave.send(()).unwrap();
                let addr = slow.join().unwrap();
                alloc.free_raw(addr).unwrap();
            });
            rig.backend.clear_hook(Call::Acquire);
            rig.verify();
        }
    });
}

/// A driver call that panics leaves the allocator as it was, with no lock held by nobody: others are
/// served, the same request is served later.
#[test]
fn case_n2_a_panic_in_the_driver_leaves_no_lock_behind() {
    in_time(|| {
        for policy in BOTH {
            for text in ["", "expandable_segments:True"] {
                for call in [Call::Acquire, Call::Reserve, Call::Record, Call::Query] {
                    panicking_driver(policy, text, call);
                }
            }
        }
    });
}

fn panicking_driver(policy: Policy, text: &str, call: Call) {
    let rig = Rig::new(policy, text);
    let s0 = rig.s(0);
    let a = rig.alloc(4 * MIB, &s0);
    let b = rig.alloc(4 * MIB, &s0);
    rig.record(&a, &rig.s(1));
    rig.free(a);
    rig.record(&b, &rig.s(1));
    let armed = Arc::new(AtomicBool::new(true));
    let fuse = Arc::clone(&armed);
    rig.backend.set_hook(call, move |_| {
        assert!(!fuse.swap(false, Ordering::Relaxed), "the driver panics");
    });
    let addr = b.addr();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        rig.allocate_raw(30 * MIB, &rig.s(2)).map(|addr| rig.free_raw(addr).unwrap()).unwrap();
        rig.free_raw(addr).unwrap();
    }));
    assert_eq!(outcome.is_err(), !armed.load(Ordering::Relaxed));
    if rig.locate(addr).is_none() {
        rig.forget(addr);
    }
    rig.verify();
    let alloc = Alloc::clone(&rig);
    thread::spawn(move || {
        for stream in [s0, alloc.backend().default_stream(DEV0)] {
            let addr = alloc.allocate_raw(30 * MIB, &stream).unwrap();
            alloc.free_raw(addr).unwrap();
            alloc.empty_cache().unwrap();
        }
    })
    .join()
    .unwrap();
}

/// Allocators come and go on eight threads while others allocate: a destructor changed the map that
/// all of them share without its lock. Here they share nothing but the backend.
#[test]
fn case_n4_allocators_come_and_go_while_others_work() {
    in_time(|| {
        for policy in BOTH {
            let backend = MockBackend::builder().device(4 * GIB).build();
            let long_lived =
                Alloc::with_virtual_memory(backend.clone(), config(policy, "")).unwrap();
            thread::scope(|scope| {
                for n in 0..8 {
                    let (backend, long_lived) = (&backend, &long_lived);
                    scope.spawn(move || {
                        let text = if n % 2 == 0 { "" } else { "expandable_segments:True" };
                        let stream = backend.stream(DEV0);
                        for round in 0..20 {
                            let config = config(policy, text);
                            let alloc =
                                Alloc::with_virtual_memory(backend.clone(), config).unwrap();
                            let handle = alloc.stream(&stream).unwrap();
                            let mine = handle.allocate((round + 1) * 300 * KIB).unwrap();
                            let theirs = long_lived.allocate_raw(5 * MIB, &stream).unwrap();
                            if round % 2 == 0 {
                                handle.free(mine).unwrap();
                            } else {
                                // Stays allocated; its memory goes with the allocator.
                                let _ = mine.addr();
                            }
                            long_lived.free_raw(theirs).unwrap();
                            alloc.check().unwrap();
                        }
                    });
                }
            });
            long_lived.check().unwrap();
            drop(long_lived);
            backend.assert_clean();
        }
    });
}
