//! The loops that are measured. Between two readings of the clock nothing is done but what
//! `peers/peer.cpp` does there.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use alloc_core::backend::{MemoryInfo, VirtualMemory};

use super::client::Client;
use super::generator::Lcg;
use super::program;
use super::row::digits;
use super::{Churn, Figures, Measurement, Rig, ThreadFigures};
use crate::engine::EngineError;

/// Sizes of the blocks that are live in [`Measurement::Live`] end at 2^14.
const LIVE_MAX_LOG: u32 = 14;

/// The size of its pairs of one size.
const LIVE_PAIR_BYTES: u64 = 1 << 10;

/// Seed of the first of several threads.
const FIRST_SEED: u64 = 7;

/// Measures through clients of type `C`.
pub(super) fn measure<B: VirtualMemory + MemoryInfo, C: Client<B>>(
    rig: &Rig<B>,
    measurement: &Measurement,
) -> Result<Figures, EngineError> {
    match *measurement {
        Measurement::Pingpong { bytes, pairs } => {
            let client: C = rig.client()?;
            pairs_of(&client, pairs / 10 + 1, || bytes)?;
            let time = pairs_of(&client, pairs, || bytes)?;
            Ok(Figures::Pingpong { bytes, ns_per_pair: digits(ns_each(time, pairs), 1) })
        }
        Measurement::Churn(args) => {
            let client: C = rig.client()?;
            let (begin, end) = churn(&client, args, || {})?;
            let ns_per_step = digits(ns_each(end - begin, args.steps), 1);
            let Churn { slots, max_log: maxlog, .. } = args;
            Ok(Figures::Churn { slots, maxlog, ns_per_step, reserved_peak: rig.reserved_peak()? })
        }
        Measurement::Threads(threads, args) => {
            let rate = on_threads(threads, args, || rig.client::<C>())?;
            Ok(Figures::Threads(thread_figures(rig, threads, rate)?))
        }
        Measurement::Shared(threads, args) => {
            let client: C = rig.client()?;
            let rate = on_threads(threads, args, || Ok(client.clone()))?;
            Ok(Figures::Shared(thread_figures(rig, threads, rate)?))
        }
        Measurement::Live { blocks, steps } => live::<B, C>(rig, blocks, steps),
        Measurement::Replay(ref program) => program::replay::<B, C>(rig, program),
        Measurement::Whole(ref program) => program::whole::<B, C>(rig, program),
    }
}

/// Allocates and frees `count` times, of the size that `bytes` says, and returns the time.
#[inline]
fn pairs_of<B: VirtualMemory, C: Client<B>>(
    client: &C,
    count: u32,
    mut bytes: impl FnMut() -> u64,
) -> Result<Duration, EngineError> {
    let begin = Instant::now();
    for _ in 0..count {
        client.free(client.allocate(bytes())?)?;
    }
    Ok(begin.elapsed())
}

/// Churns, and returns when the steps that are measured began and ended. `warm` is called before
/// them, even if a step before them has failed.
fn churn<B: VirtualMemory, C: Client<B>>(
    client: &C,
    args: Churn,
    warm: impl FnOnce(),
) -> Result<(Instant, Instant), EngineError> {
    let mut slots: Vec<Option<C::Block>> = Vec::new();
    slots.resize_with(args.slots as usize, || None);
    let mut lcg = Lcg(args.seed);
    let mut run = |steps: u32| -> Result<(), EngineError> {
        for _ in 0..steps {
            let slot = &mut slots[lcg.below(args.slots) as usize];
            if let Some(block) = slot.take() {
                client.free(block)?;
            }
            *slot = Some(client.allocate(lcg.size(args.max_log))?);
        }
        Ok(())
    };
    let warmed = run(args.steps / 2);
    warm();
    warmed?;
    let begin = Instant::now();
    run(args.steps)?;
    let end = Instant::now();
    for block in slots.into_iter().flatten() {
        client.free(block)?;
    }
    Ok((begin, end))
}

/// Churns on `threads` threads at once, with clients that each of them makes; million steps a second
/// of all together, from when the first begins to measure until the last is done. (The sum of what
/// each thread reaches would be too much if some waited while others ran.)
fn on_threads<B: VirtualMemory, C: Client<B>>(
    threads: u32,
    args: Churn,
    client: impl Fn() -> Result<C, EngineError> + Sync,
) -> Result<f64, EngineError> {
    // Until all threads have come here, the first time before and the second time after warming up.
    let arrived = AtomicU32::new(0);
    let meet = |times: u32| {
        arrived.fetch_add(1, Ordering::AcqRel);
        while arrived.load(Ordering::Acquire) < times * threads {
            thread::yield_now();
        }
    };
    let one = |seed| {
        let client = client();
        meet(1);
        match client {
            Ok(client) => churn(&client, Churn { seed, ..args }, || meet(2)),
            Err(error) => {
                meet(2);
                Err(error)
            }
        }
    };
    let spans = thread::scope(|scope| {
        let start = |i| scope.spawn(move || one(FIRST_SEED + u64::from(i)));
        let running: Vec<_> = (0..threads).map(start).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        running.into_iter().map(join).collect::<Result<Vec<_>, EngineError>>()
    })?;
    let begin = spans.iter().map(|span| span.0).min();
    let end = spans.iter().map(|span| span.1).max();
    let time = end.zip(begin).map_or(Duration::ZERO, |(end, begin)| end - begin);
    Ok(f64::from(threads) * f64::from(args.steps) / time.as_secs_f64() / 1e6)
}

fn thread_figures<B: VirtualMemory + MemoryInfo>(
    rig: &Rig<B>,
    threads: u32,
    rate: f64,
) -> Result<ThreadFigures, EngineError> {
    let mega_steps_per_s = digits(rate, 3);
    Ok(ThreadFigures { threads, mega_steps_per_s, reserved_peak: rig.reserved_peak()? })
}

fn live<B: VirtualMemory + MemoryInfo, C: Client<B>>(
    rig: &Rig<B>,
    blocks: u32,
    steps: u32,
) -> Result<Figures, EngineError> {
    let client: C = rig.client()?;
    let mut lcg = Lcg(FIRST_SEED);
    let (mut live, mut between) = (Vec::new(), Vec::new());
    for _ in 0..blocks {
        live.push(client.allocate(lcg.size(LIVE_MAX_LOG))?);
        between.push(client.allocate(lcg.size(LIVE_MAX_LOG))?);
    }
    for block in between {
        client.free(block)?;
    }
    pairs_of(&client, steps / 10 + 1, || LIVE_PAIR_BYTES)?;
    let same = pairs_of(&client, steps, || LIVE_PAIR_BYTES)?;
    pairs_of(&client, steps / 10 + 1, || lcg.size(LIVE_MAX_LOG))?;
    let drawn = pairs_of(&client, steps, || lcg.size(LIVE_MAX_LOG))?;
    let reserved_peak = rig.reserved_peak()?;
    for block in live {
        client.free(block)?;
    }
    Ok(Figures::Live {
        blocks,
        ns_per_pair: digits(ns_each(same, steps), 1),
        ns_per_drawn_pair: digits(ns_each(drawn, steps), 1),
        reserved_peak,
    })
}

fn ns_each(time: Duration, count: u32) -> f64 {
    time.as_nanos() as f64 / f64::from(count)
}
