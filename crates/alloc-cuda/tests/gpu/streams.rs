//! Which stream is which, and where its work ends.

use crate::Scenario;
use crate::rig::{FIRST, Gate, MIB, Rig};
use alloc_core::backend::{Backend, Completion, Stream as _};
use alloc_core::{Config, DeviceId};
use cuda_driver::Stream;
use cuda_driver::fake::Outcome;
use std::sync::mpsc;

pub(crate) const SCENARIOS: &[Scenario] = &[
    ("streams::default_streams", default_streams),
    ("streams::reused_handle", reused_handle),
    ("streams::per_thread", per_thread),
    ("streams::retired", retired),
];

fn default_streams(rig: &Rig) -> Outcome {
    let null = |device| {
        // SAFETY: the null handle.
        unsafe { rig.backend.adopt(device, std::ptr::null_mut()) }.expect("adopts")
    };
    let own = rig.backend.per_thread_stream(FIRST).expect("stream");
    let theirs = std::thread::scope(|scope| {
        let other = scope.spawn(|| rig.backend.per_thread_stream(FIRST).expect("stream").id());
        other.join().expect("thread")
    });
    let mut ids = vec![own.id(), theirs];
    for index in 0..rig.devices() {
        let device = DeviceId::new(index as u16);
        let legacy = rig.backend.default_stream(device).expect("stream");
        assert_eq!(null(device), legacy);
        ids.push(legacy.id());
    }
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count, "all different");
    Outcome::Done
}

/// A destroyed stream's handle soon belongs to another stream, which must not pass for the old one.
fn reused_handle(rig: &Rig) -> Outcome {
    let context = rig.context(FIRST);
    let allocator = rig.allocator(Config::ours());
    let mut seen = Vec::new();
    let mut reused = false;
    for _ in 0..200 {
        let foreign = Stream::create(context).expect("stream");
        // SAFETY: retired before it is destroyed.
        let stream = unsafe { rig.backend.adopt(FIRST, foreign.raw()) }.expect("adopts");
        let id = stream.id();
        let raw = foreign.raw().addr();
        reused |= seen.iter().any(|&(handle, _)| handle == raw);
        assert!(seen.iter().all(|&(_, known)| known != id), "an id came twice");
        seen.push((raw, id));
        let buffer = allocator.buffer::<u8>(4096, &stream).expect("room");
        drop(buffer);
        rig.backend.retire(&stream).expect("retires");
        drop(foreign);
    }
    allocator.empty_cache().expect("gives everything back");
    if reused {
        Outcome::Done
    } else {
        Outcome::Skipped("the driver did not use a handle again in 200 streams")
    }
}

/// Recording for another thread's default stream: the handle would mean this thread's.
fn per_thread(rig: &Rig) -> Outcome {
    let (done, wait_until_done) = mpsc::channel::<()>();
    let (hand_over, handed_over) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let stream = rig.backend.per_thread_stream(FIRST).expect("stream");
            let gate = Gate::close(&stream);
            hand_over.send((stream, gate)).expect("somebody listens");
            // The stream ends with its thread.
            let _ = wait_until_done.recv();
        });
        let (theirs, gate) = handed_over.recv().expect("sent");
        let own = rig.backend.per_thread_stream(FIRST).expect("stream");
        let here = rig.backend.record(&own).expect("records");
        rig.backend.wait(&here).expect("this thread's stream is not held");
        let event = rig.backend.record(&theirs).expect("records");
        assert_eq!(rig.backend.query(&event).expect("query"), Completion::Pending);
        gate.open();
        rig.backend.wait(&event).expect("waits");
        drop(done);
    });
    Outcome::Done
}

/// Memory used on a stream that is destroyed meanwhile waits for that stream's work.
fn retired(rig: &Rig) -> Outcome {
    let allocator = rig.allocator(Config::ours());
    let main = rig.stream();
    let foreign = Stream::create(rig.context(FIRST)).expect("stream");
    // SAFETY: retired before it is destroyed.
    let side = unsafe { rig.backend.adopt(FIRST, foreign.raw()) }.expect("adopts");
    let buffer = allocator.buffer::<u8>(4 << 20, &main).expect("room");
    let addr = buffer.addr();
    rig.fill(&main, addr, 4 * MIB, 7);
    main.synchronize().expect("no failed work");
    let gate = Gate::close(&side);
    rig.check(&side, addr, 4 * MIB, 7);
    buffer.record_stream(&side).expect("records");
    rig.backend.retire(&side).expect("retires");
    // The stream goes, its work stays.
    drop(foreign);
    drop(buffer);
    let next = allocator.buffer::<u8>(4 << 20, &main).expect("room");
    assert_ne!(next.addr(), addr, "its last reader has not run");
    rig.fill(&main, next.addr(), 4 * MIB, 8);
    gate.open();
    assert_eq!(rig.wrong_words(FIRST), 0, "it read what was there before");
    Outcome::Done
}
