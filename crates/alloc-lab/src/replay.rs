//! Replays a workload on an allocator and measures memory, driver and host time.

use std::time::{Duration, Instant};

use alloc_core::Bytes;

use crate::engine::{DriverFigures, Engine, EngineError};
use crate::error::Failure;
use crate::workload::{Action, Op, RecordedSegment, Workload};

/// Host time is the best of so many passes, unless [`TIMING_BUDGET`] is spent earlier.
const TIMING_PASSES: usize = 3;

/// Time after which no further timing pass begins.
const TIMING_BUDGET: Duration = Duration::from_secs(1);

/// How to set up an engine for a replay.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Bytes of the device.
    pub capacity: u64,
    /// Number of streams.
    pub streams: usize,
    /// Segments to hand out, as long as the allocator asks for the same sizes.
    pub feed: Vec<RecordedSegment>,
    /// Whether the engine keeps an exact account of driver calls, and the simulated device judges its
    /// allocations. Costs time, so not while time is measured.
    pub watch: bool,
}

/// What to do in a replay besides replaying.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Bytes of the device.
    pub capacity: u64,
    /// Whether recorded segments are handed out and compared.
    pub feed: bool,
    /// Whether host time is measured, in passes of its own.
    pub timing: bool,
}

/// What a replay showed.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// Operations that succeeded.
    pub ops: usize,
    /// Most bytes asked for at one time.
    pub requested_peak: u64,
    /// Most bytes in blocks handed out at one time.
    pub allocated_peak: u64,
    /// Most bytes taken from the driver at one time, by the allocator's statistics.
    pub statistics_peak: u64,
    /// The driver's account; [`DriverFigures::reserved_peak`] is what the workload needs.
    pub driver: DriverFigures,
    /// Host time of allocator calls per operation, simulated driver calls included.
    pub ns_per_op: Option<f64>,
    /// Segments obtained whole, in order.
    pub taken: Vec<RecordedSegment>,
    /// What became of the recorded segments.
    pub feed: Feed,
    /// What the simulator said about this replay, if it was on a real device and somebody asked.
    pub prediction: Option<Prediction>,
    /// Why the replay ended early, if it did.
    pub stopped: Option<Stopped>,
}

/// What the simulator says about a replay on a real device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Prediction {
    /// Most physical bytes held, knowing nothing of the device but its size.
    pub peak: u64,
    /// The same replay with the addresses of segments that the device's driver chose, which decide
    /// between free blocks of one size. `None` where segments are not obtained whole.
    pub at_addresses: Option<Repeated>,
}

/// A replay at addresses taken from another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Repeated {
    /// Most physical bytes held.
    pub peak: u64,
    /// Whether the same segments were taken.
    pub feed: Feed,
}

/// An operation that failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stopped {
    /// Its line in the file.
    pub line: u32,
    /// Operations that succeeded before.
    pub ops: usize,
    /// Bytes asked for, if it was an allocation.
    pub bytes: Option<u64>,
    /// Why.
    pub error: EngineError,
}

impl Stopped {
    /// Whether a larger device could have helped.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self.error, EngineError::OutOfMemory(_))
    }

    /// The failure to report, on a device of `capacity` bytes with the allocator `label`.
    pub fn failure(&self, workload: &Workload, label: &str, capacity: u64) -> Failure {
        let (device, before) = (Bytes(capacity), self.ops);
        let what = match (&self.error, self.bytes) {
            (EngineError::OutOfMemory(report), Some(bytes)) => format!(
                "does not fit: an allocation of {} failed with {label} on a device of {device}, \
                 after {before} operations\n  {report}",
                exactly(bytes)
            ),
            (EngineError::OutOfMemory(report) | EngineError::Refused(report), _) => {
                format!("refused by {label} after {before} operations\n  {report}")
            }
        };
        Failure::Stopped { file: workload.path.clone(), line: self.line.into(), what }
    }
}

/// What became of the recorded segments.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Feed {
    /// There were none, or they were not to be used.
    Unused,
    /// The replay took exactly these segments, addresses and sizes, in order.
    Exact,
    /// It did not; the text says where it first differed.
    Differs(String),
}

impl Feed {
    /// `exact`, or where the first difference is.
    pub fn text(&self) -> Option<&str> {
        match self {
            Feed::Unused => None,
            Feed::Exact => Some("exact"),
            Feed::Differs(text) => Some(text),
        }
    }
}

/// Memory after an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moment {
    /// Operations so far.
    pub ops: usize,
    /// Time of the operation in microseconds.
    pub time_us: u64,
    /// Bytes asked for by live allocations.
    pub requested: u64,
    /// Physical bytes held.
    pub reserved: u64,
}

/// Replays `workload` on engines that `make` builds: once to observe, then, if asked for, some
/// times without any observation to measure host time. `watch` sees memory after every operation
/// of the first pass.
///
/// # Errors
/// What `make` returns. An operation that fails is no error but [`Outcome::stopped`].
pub fn replay<E: Engine>(
    mut make: impl FnMut(&Plan) -> Result<E, Failure>,
    workload: &Workload,
    options: Options,
    watch: impl FnMut(Moment),
) -> Result<Outcome, Failure> {
    let fed = options.feed && !workload.segments.is_empty();
    let feed = if fed { workload.segments.clone() } else { Vec::new() };
    let mut plan =
        Plan { capacity: options.capacity, streams: workload.streams.len(), feed, watch: true };
    let mut outcome = observe(&mut make(&plan)?, workload, fed, watch);
    if options.timing && outcome.stopped.is_none() && !workload.ops.is_empty() {
        plan.watch = false;
        let best = best_time(|| make(&plan), workload)?;
        outcome.ns_per_op = best.map(|time| time.as_nanos() as f64 / workload.ops.len() as f64);
    }
    Ok(outcome)
}

/// Whether the whole workload fits on a fresh engine.
pub fn completes<E: Engine>(engine: &mut E, workload: &Workload) -> Result<(), Stopped> {
    run(engine, &workload.ops, |_, _, _| {})
}

/// Runs the first `ops` operations.
///
/// # Errors
/// The operation that failed.
pub fn run_to<E: Engine>(engine: &mut E, workload: &Workload, ops: usize) -> Result<(), Stopped> {
    run(engine, &workload.ops[..ops], |_, _, _| {})
}

fn observe<E: Engine>(
    engine: &mut E,
    workload: &Workload,
    fed: bool,
    mut watch: impl FnMut(Moment),
) -> Outcome {
    let mut check = FeedCheck::new(&workload.segments);
    let mut taken = Vec::new();
    let (mut live, mut peak) = (0u128, 0u128);
    let mut done = 0;
    let mut stopped = run(engine, &workload.ops, |engine, i, op| {
        match op.action {
            Action::Alloc { bytes, .. } => live += u128::from(bytes),
            Action::Free { bytes } => live -= u128::from(bytes),
        }
        peak = peak.max(live);
        done = i + 1;
        let before = taken.len();
        engine.take_segments(&mut taken);
        taken[before..].iter().for_each(|segment| check.see(*segment));
        let (requested, reserved) = (saturate(live), engine.reserved());
        watch(Moment { ops: done, time_us: op.time_us, requested, reserved });
    })
    .err();
    if let (None, Some(objection), Some(last)) = (&stopped, engine.objection(), workload.ops.last())
    {
        let error = EngineError::Refused(format!("the simulated device objects: {objection}"));
        stopped = Some(Stopped { line: last.line, ops: done, bytes: None, error });
    }
    Outcome {
        ops: done,
        requested_peak: saturate(peak),
        allocated_peak: stat(engine, "allocated_bytes.all.peak"),
        statistics_peak: stat(engine, "reserved_bytes.all.peak"),
        driver: engine.driver(),
        ns_per_op: None,
        taken,
        feed: if fed { check.finish(stopped.is_some()) } else { Feed::Unused },
        prediction: None,
        stopped,
    }
}

/// Runs `ops`; `after` is called after each.
fn run<E: Engine>(
    engine: &mut E,
    ops: &[Op],
    mut after: impl FnMut(&mut E, usize, &Op),
) -> Result<(), Stopped> {
    for (i, op) in ops.iter().enumerate() {
        let result = match op.action {
            Action::Alloc { bytes, stream } => {
                engine.allocate(op.slot as usize, bytes, stream as usize).map(|_| ())
            }
            Action::Free { .. } => engine.free(op.slot as usize),
        };
        if let Err(error) = result {
            let bytes = match op.action {
                Action::Alloc { bytes, .. } => Some(bytes),
                Action::Free { .. } => None,
            };
            return Err(Stopped { line: op.line, ops: i, bytes, error });
        }
        after(engine, i, op);
    }
    Ok(())
}

/// Shortest time of a whole pass; nothing if one fails that did not fail before.
fn best_time<E: Engine>(
    mut make: impl FnMut() -> Result<E, Failure>,
    workload: &Workload,
) -> Result<Option<Duration>, Failure> {
    let begin = Instant::now();
    let mut best = None;
    for _ in 0..TIMING_PASSES {
        let mut engine = make()?;
        let start = Instant::now();
        if completes(&mut engine, workload).is_err() {
            return Ok(None);
        }
        let time = start.elapsed();
        best = Some(best.map_or(time, |best: Duration| best.min(time)));
        if begin.elapsed() > TIMING_BUDGET {
            break;
        }
    }
    Ok(best)
}

fn stat<E: Engine>(engine: &mut E, key: &str) -> u64 {
    let mut out = Vec::new();
    engine.stats(&[key], &mut out);
    out[0].and_then(|value| u64::try_from(value).ok()).unwrap_or(0)
}

/// A size in a unit that fits it, and in bytes.
fn exactly(bytes: u64) -> String {
    if bytes < 1 << 10 {
        Bytes(bytes).to_string()
    } else {
        format!("{} ({bytes} bytes)", Bytes(bytes))
    }
}

fn saturate(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Compares the segments that an allocator takes with the recorded ones.
struct FeedCheck<'a> {
    recorded: &'a [RecordedSegment],
    seen: usize,
    difference: Option<String>,
}

impl<'a> FeedCheck<'a> {
    fn new(recorded: &'a [RecordedSegment]) -> Self {
        FeedCheck { recorded, seen: 0, difference: None }
    }

    fn see(&mut self, taken: RecordedSegment) {
        let (n, recorded) = (self.seen + 1, self.recorded.get(self.seen).copied());
        self.seen = n;
        let RecordedSegment { addr, bytes } = taken;
        let difference = match recorded {
            None => Some(format!(
                "segment {n} of {bytes} bytes was taken after the {} recorded ones",
                self.recorded.len()
            )),
            Some(r) if r.bytes != bytes => {
                Some(format!("segment {n} has {bytes} bytes, the recorded one {}", r.bytes))
            }
            Some(r) if r.addr != addr => {
                Some(format!("segment {n} lies at {addr:#x}, the recorded one at {:#x}", r.addr))
            }
            Some(_) => None,
        };
        if self.difference.is_none() {
            self.difference = difference;
        }
    }

    fn finish(self, stopped: bool) -> Feed {
        let (seen, recorded) = (self.seen, self.recorded.len());
        match self.difference {
            Some(text) => Feed::Differs(text),
            None if stopped => Feed::Differs(format!(
                "took exactly the first {seen} of {recorded}, until the replay stopped"
            )),
            None if seen < recorded => {
                Feed::Differs(format!("only {seen} of the {recorded} recorded segments were taken"))
            }
            None => Feed::Exact,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::fake::Fake;
    use crate::format::trace_csv;
    use std::path::Path;

    const MIB: u64 = 1 << 20;

    /// Allocates 3 MiB and 2 MiB, frees the first, allocates 4 MiB and 2 MiB.
    const TRACE: &str = "time_us,op,id,bytes,stream\n\
        0,segment_alloc,16777216,4194304,0\n\
        1,alloc,1,3145728,0\n\
        2,segment_alloc,8388608,2097152,0\n\
        3,alloc,2,2097152,0\n\
        4,free,1,,\n\
        5,alloc,3,4194304,0\n\
        6,alloc,4,2097152,0\n";

    fn workload(text: &str) -> Workload {
        trace_csv::read(Path::new("w.csv"), text.as_bytes()).unwrap()
    }

    fn make(plan: &Plan) -> Result<Fake, Failure> {
        Ok(Fake::new(plan.capacity, plan.feed.iter().map(|segment| segment.addr)))
    }

    fn options(capacity: u64) -> Options {
        Options { capacity, feed: true, timing: false }
    }

    #[test]
    fn figures_and_moments_are_what_the_engine_did() {
        let mut moments = Vec::new();
        let w = workload(TRACE);
        let outcome = replay(make, &w, options(64 * MIB), |m| moments.push(m)).unwrap();
        assert_eq!((outcome.ops, outcome.stopped), (5, None));
        assert_eq!((outcome.requested_peak, outcome.allocated_peak), (8 * MIB, 8 * MIB));
        assert_eq!((outcome.driver.reserved_peak, outcome.driver.segments), (8 * MIB, 3));
        let memory: Vec<_> = moments.iter().map(|m| (m.requested, m.reserved)).collect();
        let mib = |a, b| (a * MIB, b * MIB);
        assert_eq!(memory, [mib(3, 4), mib(5, 6), mib(2, 6), mib(6, 6), mib(8, 8)]);
        assert_eq!((moments[2].ops, moments[2].time_us), (3, 4));
    }

    #[test]
    fn the_feed_is_judged() {
        let feed = |w: &Workload| replay(make, w, options(64 * MIB), |_| {}).unwrap().feed;
        let w = workload(TRACE);
        let differs = |text: &str| Feed::Differs(text.to_owned());
        assert_eq!(
            feed(&w),
            differs("segment 3 of 2097152 bytes was taken after the 2 recorded ones")
        );
        let exact =
            workload(&TRACE.replace("5,alloc", "5,segment_alloc,2097152,2097152,0\n5,alloc"));
        assert_eq!(feed(&exact), Feed::Exact);
        let mut more = exact.clone();
        more.segments.push(RecordedSegment { addr: 64 * MIB, bytes: 2 * MIB });
        assert_eq!(feed(&more), differs("only 3 of the 4 recorded segments were taken"));
        let mut wrong = exact.clone();
        wrong.segments[1].bytes = 4 * MIB;
        assert_eq!(feed(&wrong), differs("segment 2 has 2097152 bytes, the recorded one 4194304"));
        let without = Options { feed: false, ..options(64 * MIB) };
        assert_eq!(replay(make, &exact, without, |_| {}).unwrap().feed, Feed::Unused);
        let none = Workload { segments: Vec::new(), ..exact };
        assert_eq!(feed(&none), Feed::Unused);
    }

    #[test]
    fn a_workload_that_does_not_fit_stops_at_its_line() {
        let w = workload(TRACE);
        let outcome = replay(make, &w, options(7 * MIB), |_| {}).unwrap();
        let stopped = outcome.stopped.unwrap();
        assert_eq!((outcome.ops, stopped.line, stopped.bytes), (4, 8, Some(2 * MIB)));
        let Feed::Differs(feed) = outcome.feed else { panic!("{:?}", outcome.feed) };
        assert_eq!(feed, "took exactly the first 2 of 2, until the replay stopped");
        let text = stopped.failure(&w, "ours", 7 * MIB).to_string();
        assert_eq!(
            text,
            "w.csv:8: does not fit: an allocation of 2.00 MiB (2097152 bytes) failed with ours on \
             a device of 7.00 MiB, after 4 operations\n  6291456 bytes held"
        );
    }

    #[test]
    fn host_time_is_measured_when_asked_for() {
        let timed = Options { timing: true, ..options(64 * MIB) };
        let outcome = replay(make, &workload(TRACE), timed, |_| {}).unwrap();
        assert!(outcome.ns_per_op.unwrap() > 0.0);
    }
}
