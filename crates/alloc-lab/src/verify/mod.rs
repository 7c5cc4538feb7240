//! Replays recordings of PyTorch and compares address, statistics, history and lists of segments
//! after every operation.

mod cut;

use std::collections::HashMap;
use std::fmt;

use serde::Serialize;

use alloc_core::TraceAction;

use crate::engine::{EngineError, Recorded, SegmentView};
use crate::format::golden::{BlockState, Op, Recording, Segment, Step, TraceRow};
use cut::{Cutter, Facts};

/// The stream on which recordings capture.
const CAPTURE_STREAM: usize = 1;

/// The statistic that tells whether a freed block came back at once.
const ACTIVE: &str = "active.all.current";

/// How far a recording and the allocator agree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Comparison {
    /// Operations executed.
    pub ops: usize,
    /// Entries of the recorded history.
    pub trace_entries: usize,
    /// Operations after which something differed; leftover history counts as one more.
    pub mismatches: usize,
    /// The first difference.
    pub first: Option<Mismatch>,
}

impl Comparison {
    /// Whether everything agreed.
    pub const fn agrees(&self) -> bool {
        self.mismatches == 0
    }
}

/// A difference.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Mismatch {
    /// Number of the operation, counted from 0.
    pub operation: usize,
    /// What differs.
    pub what: String,
    /// What the recording says.
    pub expected: String,
    /// What the allocator did.
    pub got: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mismatch { operation, what, expected, got } = self;
        write!(f, "operation {operation}: {what}: expected {expected}, got {got}")
    }
}

/// Executes `recording` on `engine` and compares. `tick` is called after every operation.
pub fn verify<E: Recorded>(
    engine: &mut E,
    recording: &Recording,
    mut tick: impl FnMut(),
) -> Comparison {
    let mut run = Run::new(engine, recording);
    run.steps(recording.ops.len(), &mut tick);
    run.leftovers();
    run.objections();
    run.comparison
}

/// As [`verify`], but stops after the first `ops` operations, with the engine as it is then.
pub fn verify_to<E: Recorded>(
    engine: &mut E,
    recording: &Recording,
    ops: usize,
    mut tick: impl FnMut(),
) -> Comparison {
    let mut run = Run::new(engine, recording);
    run.steps(ops, &mut tick);
    run.objections();
    run.comparison.ops = ops.min(recording.ops.len());
    run.comparison
}

/// State of a comparison under way.
struct Run<'a, E> {
    engine: &'a mut E,
    recording: &'a Recording,
    cutter: Cutter<'a>,
    /// Slot and requested bytes of every id.
    ids: HashMap<u64, (usize, u64)>,
    /// Index of [`ACTIVE`] in the statistics, and its recorded value after the last operation.
    active: Option<usize>,
    active_before: Option<i64>,
    /// `segment_map` entries of the recording, and how many the engine has produced.
    maps: Vec<u64>,
    maps_done: usize,
    stats: Vec<Option<i64>>,
    trace: Vec<TraceRow>,
    comparison: Comparison,
}

impl<'a, E: Recorded> Run<'a, E> {
    fn new(engine: &'a mut E, recording: &'a Recording) -> Self {
        let maps = recording.trace.iter().filter(|row| row.action == TraceAction::SegmentMap);
        Run {
            engine,
            recording,
            cutter: Cutter::new(&recording.trace),
            ids: HashMap::new(),
            active: recording.stat_keys.iter().position(|key| key == ACTIVE),
            active_before: Some(0),
            maps: maps.map(|row| row.addr).collect(),
            maps_done: 0,
            stats: Vec::new(),
            trace: Vec::new(),
            comparison: Comparison {
                ops: recording.ops.len(),
                trace_entries: recording.trace.len(),
                mismatches: 0,
                first: None,
            },
        }
    }

    fn steps(&mut self, ops: usize, tick: &mut impl FnMut()) {
        for (i, step) in self.recording.ops.iter().enumerate().take(ops) {
            self.step(i, step);
            tick();
        }
    }

    fn step(&mut self, i: usize, step: &Step) {
        let facts = self.facts(step);
        let expected = self.cutter.cut(facts);
        let mut difference = self.execute(step, expected).err();
        self.trace.clear();
        // The list of segments leaves its mark in the history, so it comes before the comparison.
        let listed = step.segments.as_ref().map(|recorded| (recorded, self.engine.segments()));
        self.engine.take_trace(&mut self.trace);
        self.maps_done += count_maps(&self.trace);
        difference = difference.or_else(|| compare_trace(expected, &self.trace));
        if let Some(recorded) = &step.stats {
            self.engine.stats(&self.recording.stat_keys, &mut self.stats);
            let keys = &self.recording.stat_keys;
            difference = difference.or_else(|| compare_stats(keys, recorded, &self.stats));
        }
        if let Some((recorded, listed)) = listed {
            difference = difference.or_else(|| compare_segments(recorded, listed));
        }
        if let Some(difference) = difference {
            self.mismatch(i, difference);
        }
    }

    /// What the recording tells about `step`, for cutting the history.
    fn facts(&mut self, step: &Step) -> Facts {
        let freed_bytes = match step.op {
            Op::Free(id) => self.ids.get(&id).map_or(0, |&(_, bytes)| bytes),
            _ => 0,
        };
        let active = self.active.and_then(|at| step.stats.as_ref().map(|stats| stats[at]));
        // Where the statistic is missing there are no events either: every free completes at once.
        let both = active.zip(self.active_before);
        let completed = both.is_none_or(|(now, before)| now < before);
        self.active_before = active;
        Facts { op: step.op, freed_bytes, completed, listed: step.segments.is_some() }
    }

    /// Does what `step` says; a difference if the engine refuses or returns another address. `expected`
    /// is what it should leave in the history.
    fn execute(&mut self, step: &Step, expected: &[TraceRow]) -> Result<(), Difference> {
        let engine = &mut *self.engine;
        let done = match step.op {
            Op::Alloc { id, bytes, stream, pool, inner } => {
                return self.allocate(step, id, bytes, stream, [pool, inner]);
            }
            Op::Free(id) => {
                let slot = self.slot(id)?;
                self.engine.free(slot)
            }
            Op::RecordStream { id, stream } => {
                let slot = self.slot(id)?;
                self.engine.record_stream(slot, stream as usize)
            }
            Op::EmptyCache => {
                let releases: Vec<u64> = expected.iter().filter_map(released).collect();
                engine.feed_releases(&releases).and_then(|()| engine.empty_cache())
            }
            Op::Busy(stream) => {
                engine.busy(stream as usize);
                Ok(())
            }
            Op::Sync => {
                engine.sync();
                Ok(())
            }
            Op::Cap(bytes) => engine.set_limit(bytes),
            Op::ResetPeak => engine.reset_peak(),
            Op::ResetAccumulated => engine.reset_accumulated(),
            Op::Expandable(on) => engine.set_expandable(on),
            Op::PoolNew { n, id, no_split } => engine.new_pool(n, id, no_split),
            Op::PoolDelete(n) => engine.delete_pool(n),
            Op::CaptureBegin { graph, id, shared } => {
                engine.begin_capture(graph, id, shared, CAPTURE_STREAM)
            }
            Op::CaptureEnd(graph) => engine.end_capture(graph),
            Op::GraphDelete(graph) => engine.delete_graph(graph),
        };
        done.map_err(refused)
    }

    fn allocate(
        &mut self,
        step: &Step,
        id: u64,
        bytes: u64,
        stream: u32,
        scopes: [Option<u32>; 2],
    ) -> Result<(), Difference> {
        if let Some(&base) = self.maps.get(self.maps_done) {
            self.engine.feed_reservation(base);
        }
        let slot = self.ids.len();
        self.ids.insert(id, (slot, bytes));
        let mut entered = Ok(());
        let mut open = 0;
        for pool in scopes.into_iter().flatten() {
            entered = entered.and_then(|()| self.engine.enter(pool));
            open += usize::from(entered.is_ok());
        }
        let result = entered.and_then(|()| self.engine.allocate(slot, bytes, stream as usize));
        (0..open).for_each(|_| self.engine.leave());
        let addr = match result {
            Ok(addr) => addr,
            Err(EngineError::OutOfMemory(_)) => 0,
            Err(error) => return Err(refused(error)),
        };
        let expected = step.ptr.unwrap_or_default();
        if addr == expected {
            return Ok(());
        }
        let show = |ptr| if ptr == 0 { "out of memory".to_owned() } else { format!("{ptr:#x}") };
        Err(Difference::new("ptr", show(expected), show(addr)))
    }

    fn slot(&self, id: u64) -> Result<usize, Difference> {
        let slot = self.ids.get(&id).map(|&(slot, _)| slot);
        slot.ok_or_else(|| Difference::new("id", format!("{id} to exist"), "never allocated"))
    }

    /// At the end nothing of the history may be left over.
    fn leftovers(&mut self) {
        if let Some(row) = self.cutter.rest().first() {
            let what = format!("{} trace entries left over", self.cutter.rest().len());
            let difference = Difference::new(what, row.to_string(), "nothing");
            self.mismatch(self.recording.ops.len(), difference);
        }
    }

    /// A simulated device that found a fault is a difference, even if all answers agree.
    fn objections(&mut self) {
        if let Some(objection) = self.engine.objection() {
            let difference = Difference::new("simulated device", "no objection", objection);
            self.mismatch(self.recording.ops.len(), difference);
        }
    }

    fn mismatch(&mut self, operation: usize, difference: Difference) {
        let Difference { what, expected, got } = difference;
        self.comparison.mismatches += 1;
        let first = || Mismatch { operation, what, expected, got };
        self.comparison.first.get_or_insert_with(first);
    }
}

/// A difference that is not yet attributed to an operation.
struct Difference {
    what: String,
    expected: String,
    got: String,
}

impl Difference {
    fn new(what: impl Into<String>, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Difference { what: what.into(), expected: expected.into(), got: got.into() }
    }
}

fn refused(error: EngineError) -> Difference {
    let (EngineError::OutOfMemory(text) | EngineError::Refused(text)) = error;
    Difference::new("operation", "success", text)
}

/// Where memory went back, if it did.
fn released(row: &TraceRow) -> Option<u64> {
    use TraceAction::{SegmentFree, SegmentUnmap};
    matches!(row.action, SegmentFree | SegmentUnmap).then_some(row.addr)
}

fn count_maps(trace: &[TraceRow]) -> usize {
    trace.iter().filter(|row| row.action == TraceAction::SegmentMap).count()
}

/// Compares entry by entry; the address of `oom` is the free memory of another machine.
fn compare_trace(expected: &[TraceRow], got: &[TraceRow]) -> Option<Difference> {
    let same = |a: &TraceRow, b: &TraceRow| {
        let ignored = a.action == TraceAction::Oom && b.action == TraceAction::Oom;
        (a.action, a.bytes, a.stream) == (b.action, b.bytes, b.stream)
            && (ignored || a.addr == b.addr)
    };
    let show = |row: Option<&TraceRow>| row.map_or("nothing".to_owned(), TraceRow::to_string);
    (0..expected.len().max(got.len())).find_map(|i| {
        let (a, b) = (expected.get(i), got.get(i));
        let agree = matches!((a, b), (Some(a), Some(b)) if same(a, b));
        (!agree).then(|| Difference::new(format!("trace entry {i}"), show(a), show(b)))
    })
}

fn compare_stats(keys: &[String], expected: &[i64], got: &[Option<i64>]) -> Option<Difference> {
    let at = expected.iter().zip(got).position(|(&a, &b)| b != Some(a))?;
    let got = got[at].map_or("no such statistic".to_owned(), |value| value.to_string());
    Some(Difference::new(keys[at].as_str(), expected[at].to_string(), got))
}

/// Compares lists of segments. Left out: pool ids that the recording does not know, and what was
/// once asked for in blocks that are free now.
fn compare_segments(
    expected: &[Segment],
    got: Result<Vec<SegmentView>, EngineError>,
) -> Option<Difference> {
    let got = match got {
        Ok(got) => got,
        Err(error) => return Some(refused(error)),
    };
    (0..expected.len().max(got.len())).find_map(|i| {
        let (a, b) = (expected.get(i), got.get(i));
        let agree = matches!((a, b), (Some(a), Some(b)) if same_segment(a, b));
        let show_a = a.map_or("nothing".to_owned(), |a| describe(a.pool, a));
        let show_b = b.map_or("nothing".to_owned(), |b| describe(Some(b.pool), &as_recorded(b)));
        (!agree).then(|| Difference::new(format!("segment {i}"), show_a, show_b))
    })
}

fn same_segment(a: &Segment, b: &SegmentView) -> bool {
    let blocks = a.blocks.len() == b.blocks.len()
        && a.blocks.iter().zip(&b.blocks).all(|(a, b)| {
            (a.addr, a.bytes, a.state) == (b.addr, b.bytes, b.state)
                && (a.state == BlockState::Inactive || a.requested == b.requested)
        });
    a.pool.is_none_or(|pool| pool == b.pool)
        && (a.addr, a.bytes, a.stream, a.class) == (b.addr, b.bytes, b.stream, b.class)
        && blocks
}

fn as_recorded(b: &SegmentView) -> Segment {
    Segment {
        pool: Some(b.pool),
        addr: b.addr,
        bytes: b.bytes,
        stream: b.stream,
        class: b.class,
        blocks: b.blocks.clone(),
    }
}

fn describe(pool: Option<(u64, u64)>, s: &Segment) -> String {
    let pool = pool.map_or("unknown pool".to_owned(), |(a, b)| format!("pool {a},{b}"));
    let blocks: Vec<String> = s
        .blocks
        .iter()
        .map(|block| match block.state {
            BlockState::ActiveAllocated => format!("{}/{}", block.requested, block.bytes),
            BlockState::ActivePendingFree => format!("({}/{})", block.requested, block.bytes),
            BlockState::Inactive => format!("-/{}", block.bytes),
        })
        .collect();
    let (addr, bytes, class) = (s.addr, s.bytes, s.class.name());
    format!("{addr:#x} {bytes} bytes {class} stream {} {pool} [{}]", s.stream, blocks.join(" "))
}

#[cfg(test)]
mod tests;
