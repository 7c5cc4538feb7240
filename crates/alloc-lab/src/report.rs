//! Tables for people, one JSON object a line for programs.

use std::fmt::Write;

use alloc_core::Bytes;
use comfy_table::{Cell, CellAlignment, Table};
use serde::Serialize;

use crate::bench::{BenchRow, Figures, Subject, ThreadFigures};
use crate::configuration::Configuration;
use crate::fit::Fit;
use crate::machine::BackendName;
use crate::pages::{Paging, PagingFigures};
use crate::replay::{Feed, Outcome, Prediction, Repeated};
use crate::units::Thousands;
use crate::verify::{Comparison, Mismatch};
use crate::workload::Workload;

/// Lines above, below and under the header of a table, nothing between cells: a preset in the form
/// that comfy_table's own presets have.
const RULES: &str = "  ──────     ──────";

/// One replay as JSON. Sizes are bytes.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ReplayRow {
    /// File that was replayed.
    pub file: String,
    /// Name of the policy.
    pub policy: &'static str,
    /// Settings string.
    pub conf: String,
    /// What ran the driver calls: `mock` or `cuda`.
    pub backend: &'static str,
    /// Size of the device.
    pub capacity: u64,
    /// Operations that succeeded.
    pub ops: usize,
    /// Most bytes asked for at one time.
    pub requested_peak: u64,
    /// Most bytes in blocks handed out at one time.
    pub allocated_peak: u64,
    /// Most bytes taken from the device at one time.
    pub reserved_peak: u64,
    /// The same by the allocator's own statistics.
    pub statistics_peak: u64,
    /// On a real device: what the simulator takes in the same replay, with addresses
    /// of its own.
    pub predicted_peak: Option<u64>,
    /// On a real device that chose the addresses of segments: what the simulator takes if it hands
    /// out the same ones, in the same order.
    pub predicted_at_addresses: Option<u64>,
    /// Reserved ÷ requested.
    pub reserved_ratio: Option<f64>,
    /// Segments and address ranges obtained over the run.
    pub segments: u64,
    /// Driver calls of any kind.
    pub driver_calls: u64,
    /// Physical handles created.
    pub handles_created: u64,
    /// Handles mapped again at another address.
    pub pages_remapped: u64,
    /// Time in driver calls: modelled, or measured on a real device.
    pub stall_ms: f64,
    /// That time as a part of the recorded run, in percent; null if the file has no times.
    pub stall_percent: Option<f64>,
    /// Length of the recorded run.
    pub wall_ms: f64,
    /// Measured host time per operation; null if the replay stopped.
    pub ns_per_op: Option<f64>,
    /// `exact`, or where the segments first differ from the recorded ones; null without them.
    pub feed: Option<String>,
    /// Why the replay stopped early; null if it did not.
    pub error: Option<String>,
}

impl ReplayRow {
    /// The row of one configuration.
    pub fn new(
        workload: &Workload,
        configuration: &Configuration,
        backend: BackendName,
        capacity: u64,
        outcome: &Outcome,
    ) -> Self {
        let prediction = outcome.prediction.as_ref();
        let repeated = prediction.and_then(|prediction| prediction.at_addresses.as_ref());
        let failure = |stopped: &crate::replay::Stopped| {
            stopped.failure(workload, &configuration.label(), capacity).to_string()
        };
        ReplayRow {
            file: workload.file(),
            policy: configuration.policy.name(),
            conf: configuration.conf.clone(),
            backend: backend.name(),
            capacity,
            ops: outcome.ops,
            requested_peak: outcome.requested_peak,
            allocated_peak: outcome.allocated_peak,
            reserved_peak: outcome.driver.reserved_peak,
            statistics_peak: outcome.statistics_peak,
            predicted_peak: prediction.map(|prediction| prediction.peak),
            predicted_at_addresses: repeated.map(|repeated| repeated.peak),
            reserved_ratio: ratio(outcome.driver.reserved_peak, outcome.requested_peak),
            segments: outcome.driver.segments,
            driver_calls: outcome.driver.calls,
            handles_created: outcome.driver.handles_created,
            pages_remapped: outcome.driver.pages_remapped,
            stall_ms: outcome.driver.stall_ns as f64 / 1e6,
            stall_percent: stall_percent(outcome, workload),
            wall_ms: workload.wall_us as f64 / 1e3,
            ns_per_op: outcome.ns_per_op,
            feed: outcome.feed.text().map(str::to_owned),
            error: outcome.stopped.as_ref().map(failure),
        }
    }
}

/// One comparison as JSON.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct VerifyRow {
    /// File that was compared.
    pub file: String,
    /// Whether everything was compared and agreed.
    pub exact: bool,
    /// Operations executed.
    pub ops: usize,
    /// Entries of the recorded history.
    pub trace_entries: usize,
    /// Operations after which something differed.
    pub mismatches: usize,
    /// The first difference.
    pub first: Option<Mismatch>,
}

impl VerifyRow {
    /// The row of one file.
    pub fn new(file: String, comparison: &Comparison) -> Self {
        VerifyRow {
            file,
            exact: comparison.agrees(),
            ops: comparison.ops,
            trace_entries: comparison.trace_entries,
            mismatches: comparison.mismatches,
            first: comparison.first.clone(),
        }
    }

    /// The row as a line of a table.
    fn cells(&self) -> Vec<Cell> {
        let verdict = if self.exact { "exact" } else { "DIFFERS" };
        let count = |n: usize| number(Thousands(n as u64));
        vec![
            Cell::new(&self.file),
            count(self.ops),
            count(self.trace_entries),
            count(self.mismatches),
            Cell::new(verdict),
        ]
    }

    /// What a reader must know beyond the table.
    fn note(&self) -> Option<String> {
        self.first.as_ref().map(|first| format!("{}: first difference: {first}", self.file))
    }
}

/// A search for the smallest device as JSON. Sizes are bytes.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct FitRow {
    /// File that was replayed.
    pub file: String,
    /// Name of the policy.
    pub policy: &'static str,
    /// Settings string.
    pub conf: String,
    /// Smallest device.
    pub capacity: u64,
    /// Most bytes asked for at one time.
    pub requested_peak: u64,
    /// Smallest device ÷ requested.
    pub ratio: Option<f64>,
    /// Most bytes held at one time where there is no shortage.
    pub unlimited_peak: u64,
    /// Replays that the search took.
    pub runs: u32,
}

impl FitRow {
    /// The row of one search.
    pub fn new(file: String, configuration: &Configuration, fit: &Fit) -> Self {
        FitRow {
            file,
            policy: configuration.policy.name(),
            conf: configuration.conf.clone(),
            capacity: fit.capacity,
            requested_peak: fit.requested_peak,
            ratio: ratio(fit.capacity, fit.requested_peak),
            unlimited_peak: fit.unlimited_peak,
            runs: fit.runs,
        }
    }
}

/// A row as one line of JSON.
pub fn json(row: &impl Serialize) -> String {
    // Plain structs of numbers and text always serialise.
    serde_json::to_string(row).unwrap_or_default()
}

/// The table of one file's replays, with what there is to note below it.
pub fn replay_table(workload: &Workload, rows: &[(Configuration, Outcome)]) -> String {
    let mut table = new_table(&[
        "configuration",
        "allocated",
        "reserved",
        "÷ requested",
        "segments",
        "driver calls",
        "handles",
        "remapped",
        "stall ms",
        "% of run",
        "ns/op",
    ]);
    for (configuration, outcome) in rows {
        table.add_row(replay_cells(workload, configuration, outcome));
    }
    let mut text = heading(workload);
    let _ = write!(text, "\n{}", table.trim_fmt());
    for (configuration, outcome) in rows {
        for note in notes(&configuration.label(), outcome, workload) {
            let _ = write!(text, "\n{note}");
        }
    }
    text
}

/// The table of compared recordings, with the first differences below it.
pub fn verify_table(rows: &[VerifyRow]) -> String {
    let mut table = new_table(&["file", "operations", "trace entries", "mismatches", "verdict"]);
    for row in rows {
        table.add_row(row.cells());
    }
    let exact = rows.iter().filter(|row| row.exact).count();
    let ops: usize = rows.iter().map(|row| row.ops).sum();
    let mut text = table.trim_fmt();
    for note in rows.iter().filter_map(VerifyRow::note) {
        let _ = write!(text, "\n{note}");
    }
    let (all, ops) = (rows.len(), Thousands(ops as u64));
    let _ = write!(text, "\n{exact} of {all} files exact, {ops} operations compared");
    text
}

/// The table of searches for the smallest device.
pub fn fit_table(rows: &[FitRow]) -> String {
    let mut table = new_table(&[
        "file",
        "configuration",
        "smallest device",
        "bytes",
        "÷ requested",
        "unlimited",
        "runs",
    ]);
    for row in rows {
        let label = format!("{} {}", row.policy, row.conf);
        table.add_row(vec![
            Cell::new(&row.file),
            Cell::new(label.trim_end()),
            number(memory(row.capacity)),
            number(Thousands(row.capacity)),
            number(row.ratio.map_or("–".to_owned(), |r| format!("{r:.4}"))),
            number(memory(row.unlimited_peak)),
            number(row.runs),
        ]);
    }
    table.trim_fmt()
}

/// One run on pages as JSON. Sizes are bytes.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PagesRow {
    /// File, and what was changed in it.
    pub file: String,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Turnovers from which on lives were told, if they were.
    pub told: Option<f64>,
    /// Most bytes asked for at one time.
    pub requested_peak: u64,
    /// Bytes of all pages.
    pub reserved: u64,
    /// Reserved ÷ requested.
    pub reserved_ratio: Option<f64>,
    /// Pages created.
    pub created: u64,
    /// Pages that moved.
    pub moved: u64,
    /// What that would cost.
    pub stall_ms: f64,
}

impl PagesRow {
    /// The row of one run.
    pub fn new(workload: &Workload, paging: &Paging, figures: &PagingFigures) -> Self {
        let requested_peak = workload.requested_peak;
        let ratio = figures.reserved as f64 / requested_peak as f64;
        PagesRow {
            file: workload.file(),
            page_bytes: paging.page_bytes,
            told: paging.told,
            requested_peak,
            reserved: figures.reserved,
            reserved_ratio: (requested_peak > 0).then_some(ratio),
            created: figures.created,
            moved: figures.moved,
            stall_ms: figures.stall_ns as f64 / 1e6,
        }
    }
}

/// The table of runs on pages.
pub fn pages_table(rows: &[PagesRow]) -> String {
    let mut table =
        new_table(&["file", "page", "reserved", "÷ requested", "created", "moved", "stall ms"]);
    for row in rows {
        table.add_row(vec![
            Cell::new(&row.file),
            number(memory(row.page_bytes)),
            number(memory(row.reserved)),
            number(row.reserved_ratio.map_or("–".to_owned(), |r| format!("{r:.4}"))),
            number(Thousands(row.created)),
            number(Thousands(row.moved)),
            number(format!("{:.2}", row.stall_ms)),
        ]);
    }
    table.trim_fmt()
}

/// The table of benchmarks, each row the median of its rounds.
pub fn bench_table(subject: &Subject, rows: &[BenchRow]) -> String {
    let mut table = new_table(&[
        "measured", "result", "p50 ns", "p99 ns", "max µs", "misses", "hit p50", "hit p99",
        "reserved",
    ]);
    for row in rows {
        table.add_row(bench_cells(&row.figures));
    }
    let (label, api) = (subject.configuration.label(), subject.api.name());
    format!("{label}, {api} interface, {} device\n{}", subject.backend.name(), table.trim_fmt())
}

fn bench_cells(figures: &Figures) -> Vec<Cell> {
    let threads = |name: &str, figures: &ThreadFigures| {
        let what = format!("{name}: {}", figures.threads);
        (what, format!("{:.2} M steps/s", figures.mega_steps_per_s), Some(figures.reserved_peak))
    };
    let mut times = [const { String::new() }; 6];
    let (what, result, reserved) = match figures {
        Figures::Pingpong { bytes, ns_per_pair } => {
            (format!("pingpong: {}", Bytes(*bytes)), format!("{ns_per_pair:.1} ns/pair"), None)
        }
        Figures::Churn { slots, maxlog, ns_per_step, reserved_peak } => {
            let (slots, to) = (Thousands((*slots).into()), Bytes(1 << maxlog));
            let what = format!("churn: {slots} slots to {to}");
            (what, format!("{ns_per_step:.1} ns/step"), Some(*reserved_peak))
        }
        Figures::Threads(figures) => threads("threads", figures),
        Figures::Shared(figures) => threads("shared", figures),
        Figures::Live { blocks, ns_per_pair, ns_per_drawn_pair, reserved_peak } => {
            let what = format!("live: {} others", Thousands((*blocks).into()));
            let result = format!("{ns_per_pair:.1} ns/pair, drawn {ns_per_drawn_pair:.1}");
            (what, result, Some(*reserved_peak))
        }
        Figures::Whole { file, total_ms, reserved_peak, .. } => {
            (format!("whole: {file}"), format!("{total_ms:.2} ms"), Some(*reserved_peak))
        }
        Figures::Replay {
            file,
            total_ms,
            p50_ns,
            p99_ns,
            max_us,
            reserved_peak,
            misses,
            hit_p50_ns,
            hit_p99_ns,
            ..
        } => {
            times = [
                format!("{p50_ns:.0}"),
                format!("{p99_ns:.0}"),
                format!("{max_us:.1}"),
                Thousands(*misses as u64).to_string(),
                format!("{hit_p50_ns:.0}"),
                format!("{hit_p99_ns:.0}"),
            ];
            (format!("replay: {file}"), format!("{total_ms:.2} ms"), Some(*reserved_peak))
        }
    };
    let reserved = reserved.and_then(|bytes| u64::try_from(bytes).ok());
    let mut cells = vec![Cell::new(what), number(result)];
    cells.extend(times.map(number));
    cells.push(number(reserved.map(memory).unwrap_or_default()));
    cells
}

fn heading(workload: &Workload) -> String {
    let (ops, peak) = (Thousands(workload.ops.len() as u64), workload.requested_peak);
    let mut text = format!("{}: {ops} operations", workload.file());
    if workload.wall_us > 0 {
        let _ = write!(text, " in {:.3} s", workload.wall_us as f64 / 1e6);
    }
    let _ = write!(text, ", peak requested {} ({} bytes)", memory(peak), Thousands(peak));
    text
}

fn replay_cells(workload: &Workload, who: &Configuration, outcome: &Outcome) -> Vec<Cell> {
    let driver = &outcome.driver;
    let dash = || "–".to_owned();
    let reserved_ratio = ratio(driver.reserved_peak, outcome.requested_peak);
    vec![
        Cell::new(who.label()),
        number(memory(outcome.allocated_peak)),
        number(memory(driver.reserved_peak)),
        number(reserved_ratio.map_or_else(dash, |ratio| format!("{ratio:.4}"))),
        number(Thousands(driver.segments)),
        number(Thousands(driver.calls)),
        number(Thousands(driver.handles_created)),
        number(Thousands(driver.pages_remapped)),
        number(format!("{:.2}", driver.stall_ns as f64 / 1e6)),
        number(stall_percent(outcome, workload).map_or_else(dash, |p| format!("{p:.3}"))),
        number(outcome.ns_per_op.map_or_else(dash, |ns| format!("{ns:.0}"))),
    ]
}

fn notes(label: &str, outcome: &Outcome, workload: &Workload) -> Vec<String> {
    let mut notes = Vec::new();
    match &outcome.feed {
        Feed::Unused => {}
        Feed::Exact => {
            let n = Thousands(workload.segments.len() as u64);
            notes.push(format!("{label}: took exactly the {n} recorded segments"));
        }
        Feed::Differs(what) => {
            notes.push(format!("{label}: differs from the recorded segments: {what}"));
        }
    }
    if let Some(prediction) = &outcome.prediction {
        notes.push(format!("{label}: {}", foresight(prediction, outcome.driver.reserved_peak)));
    }
    if let Some(stopped) = &outcome.stopped {
        let (line, ops) = (stopped.line, Thousands(stopped.ops as u64));
        notes.push(format!("{label}: STOPPED at line {line}; figures are for {ops} operations"));
    }
    notes
}

/// What the simulator knew of a replay that reserved `peak` bytes on a real device.
fn foresight(prediction: &Prediction, peak: u64) -> String {
    let compare = |predicted: u64| match predicted == peak {
        true => "predicts this peak to the byte".to_owned(),
        false => format!("predicts {} bytes, not {}", Thousands(predicted), Thousands(peak)),
    };
    let mut text = format!("the simulator {}", compare(prediction.peak));
    if let Some(Repeated { peak, feed }) = &prediction.at_addresses {
        let _ = write!(text, "; at the driver's addresses it {}", compare(*peak));
        if let Feed::Differs(what) = feed {
            let _ = write!(text, ", but {what}");
        }
    }
    text
}

fn stall_percent(outcome: &Outcome, workload: &Workload) -> Option<f64> {
    let wall_ns = workload.wall_us as f64 * 1e3;
    (wall_ns > 0.0).then(|| outcome.driver.stall_ns as f64 / wall_ns * 100.0)
}

fn ratio(a: u64, b: u64) -> Option<f64> {
    (b > 0).then(|| a as f64 / b as f64)
}

/// Bytes with three decimals, so that differences of a page show in sums of gigabytes.
fn memory(bytes: u64) -> String {
    if bytes >= 1 << 30 {
        format!("{:.3} GiB", bytes as f64 / (1u64 << 30) as f64)
    } else {
        Bytes(bytes).to_string()
    }
}

fn new_table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(RULES).set_header(header.iter().copied());
    table
}

fn number(value: impl ToString) -> Cell {
    Cell::new(value).set_alignment(CellAlignment::Right)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::configuration::PolicyName;
    use crate::engine::{DriverFigures, EngineError};
    use crate::replay::Stopped;
    use crate::verify::Comparison;
    use std::path::PathBuf;

    fn workload() -> Workload {
        Workload {
            path: PathBuf::from("a.csv"),
            variation: None,
            ops: Vec::new(),
            segments: Vec::new(),
            streams: vec![0],
            slots: 0,
            requested_peak: 1 << 30,
            wall_us: 2_000_000,
        }
    }

    fn outcome() -> Outcome {
        Outcome {
            ops: 1234,
            requested_peak: 1 << 30,
            allocated_peak: 3 << 29,
            statistics_peak: 2 << 30,
            driver: DriverFigures {
                calls: 99,
                stall_ns: 20_000_000,
                segments: 7,
                handles_created: 5,
                pages_remapped: 2,
                reserved_peak: 2 << 30,
            },
            ns_per_op: Some(81.25),
            taken: Vec::new(),
            feed: Feed::Exact,
            prediction: None,
            stopped: None,
        }
    }

    #[test]
    fn a_replay_is_one_line_of_json() {
        let who = Configuration::new(PolicyName::Pytorch, "a:1");
        let line = json(&ReplayRow::new(&workload(), &who, BackendName::Mock, 8 << 30, &outcome()));
        assert_eq!(
            line,
            "{\"file\":\"a.csv\",\"policy\":\"pytorch\",\"conf\":\"a:1\",\"backend\":\"mock\",\
             \"capacity\":8589934592,\"ops\":1234,\"requested_peak\":1073741824,\"allocated_peak\":1610612736,\
             \"reserved_peak\":2147483648,\"statistics_peak\":2147483648,\"predicted_peak\":null,\
             \"predicted_at_addresses\":null,\"reserved_ratio\":2.0,\"segments\":7,\
             \"driver_calls\":99,\"handles_created\":5,\"pages_remapped\":2,\"stall_ms\":20.0,\
             \"stall_percent\":1.0,\"wall_ms\":2000.0,\"ns_per_op\":81.25,\"feed\":\"exact\",\
             \"error\":null}"
        );
    }

    #[test]
    fn the_table_says_what_a_reader_needs() {
        let mut bad = outcome();
        bad.feed = Feed::Differs("segment 2".to_owned());
        bad.ns_per_op = None;
        let error = EngineError::OutOfMemory("report".to_owned());
        bad.stopped = Some(Stopped { line: 70, ops: 1234, bytes: Some(5), error });
        let rows = [
            (Configuration::new(PolicyName::Pytorch, ""), outcome()),
            (Configuration::new(PolicyName::Ours, ""), bad),
        ];
        let text = replay_table(&workload(), &rows);
        assert!(text.starts_with(
            "a.csv: 0 operations in 2.000 s, peak requested 1.000 GiB (1,073,741,824 bytes)\n"
        ));
        for part in [
            "2.000 GiB",
            "2.0000",
            "20.00",
            "1.000",
            "pytorch: took exactly the 0 recorded segments",
            "ours: differs from the recorded segments: segment 2",
            "ours: STOPPED at line 70; figures are for 1,234 operations",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }

    #[test]
    fn predictions_are_compared_to_the_byte() {
        let (peak, feed) = (2000, Feed::Exact);
        let mut prediction = Prediction { peak, at_addresses: None };
        assert_eq!(foresight(&prediction, 2000), "the simulator predicts this peak to the byte");
        prediction.at_addresses = Some(Repeated { peak: 2001, feed });
        assert_eq!(
            foresight(&prediction, 2001),
            "the simulator predicts 2,000 bytes, not 2,001; at the driver's addresses it predicts \
             this peak to the byte"
        );
        let feed = Feed::Differs("segment 3".to_owned());
        prediction.at_addresses = Some(Repeated { peak: 2001, feed });
        assert!(foresight(&prediction, 2001).ends_with("to the byte, but segment 3"));
    }

    #[test]
    fn verdicts_are_counted_and_explained() {
        let first = Mismatch {
            operation: 3,
            what: "ptr".to_owned(),
            expected: "0x1".to_owned(),
            got: "0x2".to_owned(),
        };
        let compared =
            |mismatches, first| Comparison { ops: 1000, trace_entries: 2, mismatches, first };
        let rows = [
            VerifyRow::new("a".to_owned(), &compared(0, None)),
            VerifyRow::new("b".to_owned(), &compared(9, Some(first))),
        ];
        let text = verify_table(&rows);
        for part in [
            "b: first difference: operation 3: ptr: expected 0x1, got 0x2",
            "1 of 2 files exact, 2,000 operations compared",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(json(&rows[1]).contains("\"first\":{\"operation\":3,\"what\":\"ptr\""));
        assert!(json(&rows[1]).starts_with("{\"file\":\"b\",\"exact\":false,"));
    }
}
