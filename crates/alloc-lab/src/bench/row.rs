//! What a benchmark found.

use serde::Serialize;

/// One measurement as JSON: the fields of `peers/peer.cpp`, followed by those that tell our own
/// variants apart. Sizes are bytes.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BenchRow {
    /// Always `ours`.
    pub alloc: &'static str,
    /// Settings string.
    pub conf: String,
    /// What was measured.
    #[serde(flatten)]
    pub figures: Figures,
    /// Name of the policy.
    pub policy: &'static str,
    /// Interface of the allocator: `handle` or `raw`.
    pub api: &'static str,
    /// What ran the driver calls: `mock` or `cuda`.
    pub backend: &'static str,
}

/// The figures of one measurement, by mode.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(tag = "mode", rename_all = "lowercase")]
pub enum Figures {
    /// One size allocated and freed again and again.
    Pingpong {
        /// The size.
        bytes: u64,
        /// Time of an allocation and its free.
        ns_per_pair: f64,
    },
    /// Random slots filled anew with random sizes, on one thread.
    Churn {
        /// Blocks that live at once.
        slots: u32,
        /// Logarithm of the largest size.
        maxlog: u32,
        /// Time of a free and an allocation.
        ns_per_step: f64,
        /// Most bytes taken from the device, by the allocator's statistics.
        reserved_peak: i64,
    },
    /// Churn on several threads, each on a stream of its own.
    Threads(ThreadFigures),
    /// Churn on several threads, all on one stream.
    Shared(ThreadFigures),
    /// A recorded program without a clock between its operations.
    Whole {
        /// Name of the trace, without its folders.
        file: String,
        /// Operations.
        ops: usize,
        /// Time of all of them.
        total_ms: f64,
        /// Most bytes asked for at one time.
        requested_peak: u64,
        /// Most bytes taken from the device, by the allocator's statistics.
        reserved_peak: i64,
    },
    /// A recorded program, each of whose operations is timed.
    Replay {
        /// Name of the trace, without its folders.
        file: String,
        /// Operations.
        ops: usize,
        /// Sum of their times, with one reading of the clock for each.
        total_ms: f64,
        /// Median time of an operation.
        p50_ns: f64,
        /// Time that 99 of 100 operations do not exceed.
        p99_ns: f64,
        /// Longest time of an operation.
        max_us: f64,
        /// Most bytes asked for at one time.
        requested_peak: u64,
        /// Most bytes taken from the device, by the allocator's statistics.
        reserved_peak: i64,
        /// Requests that no cached block served; the operations below are the others.
        misses: usize,
        /// Median time of a hit.
        hit_p50_ns: f64,
        /// Time that 99 of 100 hits do not exceed.
        hit_p99_ns: f64,
    },
    /// Pairs while many other blocks are live. The peers' driver lacks this one.
    Live {
        /// The other blocks; as many again are cached between them.
        blocks: u32,
        /// Time of an allocation and its free, always of the same size.
        ns_per_pair: f64,
        /// The same for sizes drawn at random, like those of the live blocks.
        ns_per_drawn_pair: f64,
        /// Most bytes taken from the device, by the allocator's statistics.
        reserved_peak: i64,
    },
}

/// Figures of churn on several threads.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ThreadFigures {
    /// Threads.
    pub threads: u32,
    /// Million steps a second, all threads together.
    pub mega_steps_per_s: f64,
    /// Most bytes taken from the device, by the allocator's statistics.
    pub reserved_peak: i64,
}

impl Figures {
    /// The figure that measurements of the same kind are ordered by.
    pub(super) fn key(&self) -> f64 {
        match self {
            Figures::Pingpong { ns_per_pair, .. } | Figures::Live { ns_per_pair, .. } => {
                *ns_per_pair
            }
            Figures::Churn { ns_per_step, .. } => *ns_per_step,
            Figures::Threads(figures) | Figures::Shared(figures) => figures.mega_steps_per_s,
            Figures::Replay { total_ms, .. } | Figures::Whole { total_ms, .. } => *total_ms,
        }
    }
}

/// `value` with so many digits after the point, as the peers' driver prints it.
pub(super) fn digits(value: f64, digits: i32) -> f64 {
    let factor = 10f64.powi(digits);
    (value * factor).round() / factor
}
