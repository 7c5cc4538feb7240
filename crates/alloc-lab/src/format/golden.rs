//! Recordings of PyTorch's own allocator: what it was asked, what it answered, every statistic
//! after every operation, and its trace of actions.
//!
//! A recording is one JSON object, usually gzipped. Operations are arrays that begin with a name
//! ([`Op`] lists them); statistics are arrays in the order of `stat_keys`; trace entries are
//! `[action, address, bytes, stream]`.

use std::fmt;
use std::io::Read;
use std::path::Path;

use alloc_core::TraceAction;
use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Visitor};

use crate::error::Failure;
use crate::workload::RecordedSegment;

/// A whole recording.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct Recording {
    /// Its label.
    pub name: String,
    /// The text of `PYTORCH_CUDA_ALLOC_CONF` it was made with; empty for the defaults.
    pub conf: String,
    /// Number of streams; 0 is the null stream.
    pub streams: u32,
    /// Bytes of the device it was made on.
    pub device_total: u64,
    /// Names of the statistics.
    pub stat_keys: Vec<String>,
    /// The operations, in order.
    pub ops: Vec<Step>,
    /// The allocator's own history, oldest entry first.
    pub trace: Vec<TraceRow>,
}

/// One operation and what was seen after it.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct Step {
    /// What was done.
    pub op: Op,
    /// Address that an allocation got; 0 for out of memory and for 0 bytes.
    pub ptr: Option<u64>,
    /// The statistics, in the order of [`Recording::stat_keys`], unless they were not read here.
    pub stats: Option<Vec<i64>>,
    /// All segments, where they were listed.
    #[serde(default)]
    pub segments: Option<Vec<Segment>>,
}

/// What a [`Step`] does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Op {
    /// Limits the memory to so many bytes.
    Cap(u64),
    /// Allocates.
    Alloc {
        /// Name of the allocation from now on.
        id: u64,
        /// Bytes asked for.
        bytes: u64,
        /// Current stream.
        stream: u32,
        /// User pool whose scope is open.
        pool: Option<u32>,
        /// User pool whose scope is open inside that one.
        inner: Option<u32>,
    },
    /// Frees an allocation.
    Free(u64),
    /// Tells that an allocation was used on another stream.
    RecordStream {
        /// The allocation.
        id: u64,
        /// The other stream.
        stream: u32,
    },
    /// Queues a long kernel on a stream.
    Busy(u32),
    /// Waits for the whole device.
    Sync,
    /// Empties the cache.
    EmptyCache,
    /// Resets peak statistics.
    ResetPeak,
    /// Resets accumulated statistics.
    ResetAccumulated,
    /// Switches `expandable_segments`.
    Expandable(bool),
    /// Creates user pool number `n`.
    PoolNew {
        /// Its number.
        n: u32,
        /// Its id.
        id: (u64, u64),
        /// Whether its blocks are never split.
        no_split: bool,
    },
    /// The owner of a user pool lets it go.
    PoolDelete(u32),
    /// A graph begins to capture.
    CaptureBegin {
        /// Number of the graph.
        graph: u32,
        /// Id of its pool.
        id: (u64, u64),
        /// Graph whose pool it shares.
        shared: Option<u32>,
    },
    /// A graph's capture ends.
    CaptureEnd(u32),
    /// A graph gives its pool back.
    GraphDelete(u32),
}

/// One entry of the history: `[action, address, bytes, stream]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub struct TraceRow {
    /// What happened.
    #[serde(deserialize_with = "action")]
    pub action: TraceAction,
    /// Address of block, segment or page.
    pub addr: u64,
    /// Size of it.
    pub bytes: u64,
    /// Its stream.
    pub stream: u32,
}

impl fmt::Display for TraceRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TraceRow { action, addr, bytes, stream } = self;
        write!(f, "{} {addr:#x} {bytes} bytes stream {stream}", action.name())
    }
}

/// A listed segment: `[pool id or null, address, bytes, stream, class, blocks]`.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct Segment {
    /// Its pool, if the recording knows it.
    pub pool: Option<(u64, u64)>,
    /// Its address.
    pub addr: u64,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its stream.
    pub stream: u32,
    /// Its class.
    pub class: Class,
    /// Its blocks, in order of address.
    pub blocks: Vec<Block>,
}

/// Size class of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Requests of up to 1 MiB.
    Small,
    /// The others.
    Large,
}

impl Class {
    /// PyTorch's name of the class.
    pub const fn name(self) -> &'static str {
        match self {
            Class::Small => "small",
            Class::Large => "large",
        }
    }
}

/// A block of a listed segment: `[address, bytes, requested bytes, state]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub struct Block {
    /// Its address.
    pub addr: u64,
    /// Its size in bytes.
    pub bytes: u64,
    /// Bytes asked for; a leftover of earlier use if the block is free.
    pub requested: u64,
    /// Its state.
    pub state: BlockState,
}

/// State of a [`Block`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockState {
    /// In use.
    ActiveAllocated,
    /// Freed, but some stream may still work with it.
    ActivePendingFree,
    /// Free.
    Inactive,
}

impl Recording {
    /// Reads a recording, plain or gzipped.
    ///
    /// # Errors
    /// [`Failure::Input`] if it is not one, or contradicts itself.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let mut text = Vec::new();
        let read = super::open(path)?.read_to_end(&mut text);
        read.map_err(|e| Failure::input(path, format!("cannot read: {e}")))?;
        Recording::parse(&text).map_err(|what| Failure::input(path, what))
    }

    /// Parses the text of a recording.
    ///
    /// # Errors
    /// Text that says what is wrong.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        let recording: Recording =
            serde_json::from_slice(text).map_err(|e| format!("not a recording: {e}"))?;
        recording.check()?;
        Ok(recording)
    }

    /// The segments that were taken from the driver, in order.
    pub fn segments(&self) -> impl Iterator<Item = RecordedSegment> + '_ {
        let taken = self.trace.iter().filter(|row| row.action == TraceAction::SegmentAlloc);
        taken.map(|row| RecordedSegment { addr: row.addr, bytes: row.bytes })
    }

    /// Number of operations up to and including the one after which the bytes asked for are at their
    /// peak for the first time. Requests that failed do not count.
    pub fn ops_to_peak(&self) -> usize {
        let mut sizes = std::collections::HashMap::new();
        let (mut live, mut peak) = (0u128, (0, 0));
        for (i, step) in self.ops.iter().enumerate() {
            match step.op {
                Op::Alloc { id, bytes, .. } if step.ptr.is_some_and(|ptr| ptr != 0) => {
                    sizes.insert(id, bytes);
                    live += u128::from(bytes);
                }
                Op::Free(id) => live -= u128::from(sizes.remove(&id).unwrap_or(0)),
                _ => {}
            }
            if live > peak.0 {
                peak = (live, i + 1);
            }
        }
        peak.1
    }

    /// Contradictions that would make a comparison meaningless.
    fn check(&self) -> Result<(), String> {
        for (i, step) in self.ops.iter().enumerate() {
            let fail = |what: String| Err(format!("operation {i}: {what}"));
            if let Some(stats) = &step.stats
                && stats.len() != self.stat_keys.len()
            {
                let (have, want) = (stats.len(), self.stat_keys.len());
                return fail(format!("{have} statistics instead of {want}"));
            }
            if let Op::Alloc { .. } = step.op
                && step.ptr.is_none()
            {
                return fail("an allocation without ptr".to_owned());
            }
            match step.op {
                Op::Alloc { stream, .. } | Op::RecordStream { stream, .. } | Op::Busy(stream)
                    if stream >= self.streams =>
                {
                    return fail(format!("stream {stream} of {}", self.streams));
                }
                Op::CaptureBegin { .. } if self.streams < 2 => {
                    return fail("a capture without a side stream".to_owned());
                }
                _ => {}
            }
        }
        let wraps = |segment: RecordedSegment| segment.addr.checked_add(segment.bytes).is_none();
        if self.segments().any(wraps) {
            return Err("a segment beyond the end of the address space".to_owned());
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for Op {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        input.deserialize_seq(OpVisitor)
    }
}

/// A [`TraceAction`] by PyTorch's name for it.
fn action<'de, D: Deserializer<'de>>(input: D) -> Result<TraceAction, D::Error> {
    use TraceAction::{
        Alloc, FreeCompleted, FreeRequested, Oom, SegmentAlloc, SegmentFree, SegmentMap,
        SegmentUnmap, Snapshot,
    };
    const ALL: [TraceAction; 9] = [
        Alloc,
        FreeRequested,
        FreeCompleted,
        SegmentAlloc,
        SegmentFree,
        SegmentMap,
        SegmentUnmap,
        Snapshot,
        Oom,
    ];
    let name = String::deserialize(input)?;
    let found = ALL.into_iter().find(|action| action.name() == name);
    found.ok_or_else(|| de::Error::custom(format!("unknown trace action {name:?}")))
}

struct OpVisitor;

/// Options of a `pool_new`.
#[derive(Deserialize)]
struct PoolOptions {
    #[serde(default)]
    no_split: bool,
}

impl<'de> Visitor<'de> for OpVisitor {
    type Value = Op;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an operation: an array that begins with its name")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut args: A) -> Result<Op, A::Error> {
        let name: String = next(&mut args)?;
        Ok(match name.as_str() {
            "cap" => Op::Cap(next(&mut args)?),
            "alloc" => Op::Alloc {
                id: next(&mut args)?,
                bytes: next(&mut args)?,
                stream: next(&mut args)?,
                pool: args.next_element()?.flatten(),
                inner: args.next_element()?.flatten(),
            },
            "free" => Op::Free(next(&mut args)?),
            "record_stream" => Op::RecordStream { id: next(&mut args)?, stream: next(&mut args)? },
            "busy" => Op::Busy(next(&mut args)?),
            "sync" => Op::Sync,
            "empty_cache" => Op::EmptyCache,
            "reset_peak" => Op::ResetPeak,
            "reset_accumulated" => Op::ResetAccumulated,
            "expandable" => Op::Expandable(next(&mut args)?),
            "pool_new" => Op::PoolNew {
                n: next(&mut args)?,
                id: next(&mut args)?,
                no_split: next::<PoolOptions, A>(&mut args)?.no_split,
            },
            "pool_delete" => Op::PoolDelete(next(&mut args)?),
            "capture_begin" => Op::CaptureBegin {
                graph: next(&mut args)?,
                id: next(&mut args)?,
                shared: next(&mut args)?,
            },
            "capture_end" => Op::CaptureEnd(next(&mut args)?),
            "graph_delete" => Op::GraphDelete(next(&mut args)?),
            other => return Err(de::Error::custom(format!("unknown operation {other:?}"))),
        })
    }
}

/// The next argument, which must be there.
fn next<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(args: &mut A) -> Result<T, A::Error> {
    args.next_element()?.ok_or_else(|| de::Error::custom("operation with too few arguments"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A recording with these operations and this trace.
    fn recording(ops: &str, trace: &str) -> Result<Recording, String> {
        let text = format!(
            r#"{{"name": "t", "source": "s", "gpu": "g", "seed": 1, "conf": "", "streams": 2,
            "device_total": 1024, "stat_keys": ["num_ooms"], "ops": [{ops}], "trace": [{trace}]}}"#
        );
        Recording::parse(text.as_bytes())
    }

    fn op(text: &str) -> Op {
        let step = format!(r#"{{"op": {text}, "ptr": 0, "stats": [0]}}"#);
        recording(&step, "").unwrap().ops[0].op
    }

    #[test]
    fn every_operation_is_read() {
        let alloc = Op::Alloc { id: 7, bytes: 9, stream: 1, pool: None, inner: None };
        assert_eq!(op(r#"["alloc", 7, 9, 1]"#), alloc);
        assert_eq!(op(r#"["alloc", 7, 9, 1, null, null]"#), alloc);
        let scoped = Op::Alloc { id: 7, bytes: 9, stream: 1, pool: Some(3), inner: Some(4) };
        assert_eq!(op(r#"["alloc", 7, 9, 1, 3, 4]"#), scoped);
        assert_eq!(op(r#"["cap", 5]"#), Op::Cap(5));
        assert_eq!(op(r#"["free", 5]"#), Op::Free(5));
        assert_eq!(op(r#"["record_stream", 5, 1]"#), Op::RecordStream { id: 5, stream: 1 });
        assert_eq!(op(r#"["busy", 1]"#), Op::Busy(1));
        assert_eq!(op(r#"["sync"]"#), Op::Sync);
        assert_eq!(op(r#"["empty_cache"]"#), Op::EmptyCache);
        assert_eq!(op(r#"["reset_peak"]"#), Op::ResetPeak);
        assert_eq!(op(r#"["reset_accumulated"]"#), Op::ResetAccumulated);
        assert_eq!(op(r#"["expandable", true]"#), Op::Expandable(true));
        let pool = |no_split| Op::PoolNew { n: 2, id: (0, 2), no_split };
        assert_eq!(op(r#"["pool_new", 2, [0, 2], {}]"#), pool(false));
        assert_eq!(op(r#"["pool_new", 2, [0, 2], {"no_split": true}]"#), pool(true));
        assert_eq!(op(r#"["pool_delete", 2]"#), Op::PoolDelete(2));
        let begin = |shared| Op::CaptureBegin { graph: 3, id: (1, 0), shared };
        assert_eq!(op(r#"["capture_begin", 3, [1, 0], null]"#), begin(None));
        assert_eq!(op(r#"["capture_begin", 3, [1, 0], 2]"#), begin(Some(2)));
        assert_eq!(op(r#"["capture_end", 3]"#), Op::CaptureEnd(3));
        assert_eq!(op(r#"["graph_delete", 3]"#), Op::GraphDelete(3));
    }

    #[test]
    fn trace_and_segments_are_read() {
        let step = r#"{"op": ["sync"], "ptr": null, "stats": null, "segments":
            [[null, 4096, 512, 1, "small", [[4096, 512, 500, "active_pending_free"]]]]}"#;
        let r = recording(step, r#"["segment_map", 2097152, 20971520, 1]"#).unwrap();
        let segments = r.ops[0].segments.as_ref().unwrap();
        assert_eq!((segments[0].pool, segments[0].class), (None, Class::Small));
        assert_eq!(segments[0].blocks[0].state, BlockState::ActivePendingFree);
        assert_eq!(r.trace[0].to_string(), "segment_map 0x200000 20971520 bytes stream 1");
    }

    #[test]
    fn broken_recordings_say_what_is_wrong() {
        let fails = |step: &str, message: &str| {
            let error = recording(step, "").unwrap_err();
            assert!(error.starts_with(message), "{error}");
        };
        let step = |op: &str| format!(r#"{{"op": {op}, "ptr": null, "stats": [0]}}"#);
        fails(&step(r#"["explode"]"#), "not a recording: unknown operation \"explode\" at line 2");
        fails(&step(r#"["busy"]"#), "not a recording: operation with too few arguments at line");
        fails(&step(r#"["busy", 1, 2]"#), "not a recording: trailing characters");
        fails(&step(r#"["busy", 2]"#), "operation 0: stream 2 of 2");
        fails(&step(r#"["alloc", 1, 1, 0]"#), "operation 0: an allocation without ptr");
        let short = r#"{"op": ["sync"], "ptr": null, "stats": []}"#;
        fails(short, "operation 0: 0 statistics instead of 1");
        assert!(Recording::parse(b"time_us,op").unwrap_err().starts_with("not a recording: "));
    }
}
