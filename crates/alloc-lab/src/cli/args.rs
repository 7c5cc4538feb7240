//! Arguments, and the help that teaches them.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::bench::Api;
use crate::configuration::{Configuration, DEFAULT_CAPACITY, PolicyName};
use crate::error::Failure;
use crate::machine::BackendName;
use crate::units::parse_size;
use crate::vary::Variation;
use crate::workload::Workload;

const EXIT_CODES: &str = "\
Exit codes:
  0  everything agreed, everything fitted
  1  a recording differs or needs what the allocator lacks; a workload does not fit
  2  wrong usage, or a file that is broken or cannot be read
  77 `--backend cuda` on a machine without a GPU";

/// Laboratory for caching GPU memory allocators, on machines without a GPU and with one.
///
/// Replays the memory operations of real GPU programs on the allocators of this workspace, over a
/// simulated device that judges every step and knows what driver calls cost. Shows how much memory
/// they take, how long they stall, and whether a policy decides exactly as PyTorch does.
#[derive(Debug, Parser)]
#[command(name = "alloc-lab", version, after_help = EXIT_CODES, after_long_help = GENERAL_EXAMPLES)]
pub(super) struct Cli {
    #[command(subcommand)]
    pub(super) command: Command,
}

const GENERAL_EXAMPLES: &str = "\
Examples:
  How much memory would PyTorch reserve for this program, and how much would we?
      alloc-lab replay traces/gpt_varlen.csv.gz
  Does the policy `pytorch` decide as PyTorch did, operation by operation?
      alloc-lab verify crates/alloc-lab/tests/golden
  How small may the device be?
      alloc-lab fit traces/resnet.csv.gz --policy ours
  How much of that is paging, whoever allocates?
      alloc-lab pages traces/resnet.csv.gz
  What is where when most memory is in use?
      alloc-lab segments traces/moe.csv.gz --at peak --svg map.svg
  How long does an allocation take?
      alloc-lab bench all

Exit codes:
  0  everything agreed, everything fitted
  1  a recording differs or needs what the allocator lacks; a workload does not fit
  2  wrong usage, or a file that is broken or cannot be read
  77 `--backend cuda` on a machine without a GPU";

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    Replay(ReplayArgs),
    Verify(VerifyArgs),
    Fit(FitArgs),
    Pages(PagesArgs),
    Segments(SegmentsArgs),
    Bench(BenchArgs),
}

/// Which allocator, on which device.
#[derive(Debug, Args)]
pub(super) struct Setting {
    /// How the allocator decides
    #[arg(long, value_enum)]
    pub(super) policy: Option<PolicyName>,

    /// Settings as in PYTORCH_ALLOC_CONF, such as `max_split_size_mb:64`
    #[arg(long, value_name = "STR")]
    pub(super) conf: Option<String>,
}

impl Setting {
    /// The one configuration asked for; policy `ours` if none is.
    pub(super) fn one(&self) -> Configuration {
        let policy = self.policy.unwrap_or(PolicyName::Ours);
        Configuration::new(policy, self.conf.clone().unwrap_or_default())
    }

    /// Whether one was asked for.
    pub(super) fn is_given(&self) -> bool {
        self.policy.is_some() || self.conf.is_some()
    }

    /// All configurations to compare.
    pub(super) fn all(&self) -> Vec<Configuration> {
        Configuration::choose(self.policy, self.conf.as_deref())
    }
}

/// What is done to the recorded workloads.
#[derive(Debug, Args)]
pub(super) struct Varying {
    /// Do the same with changed workloads: `scale:PERCENT` multiplies all sizes; `jitter:SEED`
    /// changes those above 64 KiB by up to 3 %, differently in each twentieth of the run;
    /// `without:FROM-TO` leaves out what is allocated and freed in that part of the run, in percent;
    /// `all` stands for ten such changes. May be given several times
    #[arg(long = "vary", value_name = "CHANGE", value_parser = changes)]
    changes: Vec<Changes>,
}

/// What one `--vary` stands for.
#[derive(Clone, Debug)]
struct Changes(Vec<Variation>);

fn changes(text: &str) -> Result<Changes, String> {
    match text {
        "all" => Ok(Changes(Variation::standard())),
        _ => Ok(Changes(vec![text.parse()?])),
    }
}

impl Varying {
    /// The workload as it is and with every change that was asked for.
    pub(super) fn of(&self, workload: Workload) -> Result<Vec<Workload>, Failure> {
        let changes = self.changes.iter().flat_map(|changes| &changes.0);
        let varied: Vec<_> =
            changes.map(|change| change.apply(&workload)).collect::<Result<_, _>>()?;
        Ok(std::iter::once(workload).chain(varied).collect())
    }
}

/// The simulated device.
#[derive(Debug, Args)]
pub(super) struct Device {
    /// Memory of the simulated device: bytes, or a number with K, M, G, T (or KiB, MiB, GiB, TiB)
    /// for powers of 1024, with KB, MB, GB, TB for powers of 1000. The default is that of an NVIDIA
    /// H200, 150109880320
    #[arg(long, value_name = "SIZE", value_parser = parse_capacity)]
    capacity: Option<u64>,

    /// Let the simulated driver choose addresses even if the trace has recorded ones
    #[arg(long)]
    pub(super) no_feed: bool,
}

impl Device {
    /// Its memory in bytes.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity.unwrap_or(DEFAULT_CAPACITY)
    }

    /// Whether options were given that only a simulated device has.
    pub(super) fn is_described(&self) -> bool {
        self.capacity.is_some() || self.no_feed
    }
}

/// Replay workloads and show what allocators make of them
///
/// A FILE is a trace of memory operations: CSV with the header `time_us,op,id,bytes,stream`, plain
/// or gzipped. `op` is `alloc`, `free`, or `segment_alloc`, a segment that the recorded allocator
/// took from its driver (`id` is the address).
///
/// Without --policy and --conf the standard configurations are compared: pytorch with its defaults,
/// pytorch with expandable segments, and ours. With --conf alone, both policies are compared.
///
/// Recorded segment addresses are handed out by the simulated driver in order, to policy `pytorch`
/// without expandable segments, until the allocator asks for another size than was recorded. The
/// report says whether it took exactly the recorded segments.
///
/// `stall` is the time that the program would wait in driver calls, by the costs measured on an
/// NVIDIA H200. `ns/op` is the host time of an allocator call on this machine, simulated driver
/// included, measured in passes of their own.
///
/// With `--backend cuda` the first GPU does the work: nobody judges, `stall` is measured, and what
/// the simulator would have said about the reserved peak stands beside what it was. Segments lie
/// where the driver puts them, which decides between free blocks of one size; so the simulator is
/// also asked with those addresses.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Compare the standard configurations and draw memory over time:
      alloc-lab replay traces/resnet.csv.gz --timeline resnet.svg
  Would PyTorch with this setting get through on a device of 16 GiB?
      alloc-lab replay traces/gpt_varlen.csv.gz --policy pytorch \\
          --conf max_split_size_mb:128 --capacity 16GiB
  All traces, for a program to read:
      alloc-lab replay traces/*.csv.gz --json | jq '{file, policy, reserved_ratio}'
  Was that luck? The same with ten changes of the workload:
      alloc-lab replay traces/moe.csv.gz --vary all")]
pub(super) struct ReplayArgs {
    /// Traces to replay
    #[arg(required = true, value_name = "FILE")]
    pub(super) files: Vec<PathBuf>,

    #[command(flatten)]
    pub(super) setting: Setting,

    #[command(flatten)]
    pub(super) device: Device,

    #[command(flatten)]
    pub(super) varying: Varying,

    /// What runs the driver calls
    #[arg(long, value_enum, default_value_t = BackendName::Mock)]
    pub(super) backend: BackendName,

    /// Draw requested and reserved memory over the run, one panel for each FILE
    #[arg(long, value_name = "FILE.svg")]
    pub(super) timeline: Option<PathBuf>,

    /// Print one JSON object a line, for each file and configuration, instead of tables
    #[arg(long)]
    pub(super) json: bool,
}

/// Compare with recordings of PyTorch's own allocator, operation by operation
///
/// A FILE is a recording: JSON, plain or gzipped, that holds what PyTorch was asked, which address
/// it returned, all its statistics after every operation, and its history of actions. A directory
/// stands for all recordings in it.
///
/// The operations are replayed with policy `pytorch` and the recorded settings, over a simulated
/// device that hands out the recorded addresses. After every operation address, statistics, history
/// and, where recorded, the list of segments are compared. Nothing is skipped: a recording that
/// needs what the allocator lacks counts as a failure.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  All recordings of the repository:
      alloc-lab verify crates/alloc-lab/tests/golden
  The first difference of one recording, for a program to read:
      alloc-lab verify mine.json.gz --json | jq .first")]
pub(super) struct VerifyArgs {
    /// Recordings, or directories of them
    #[arg(required = true, value_name = "FILE")]
    pub(super) files: Vec<PathBuf>,

    /// Print one JSON object a line, for each file, instead of a table
    #[arg(long)]
    pub(super) json: bool,
}

/// Find the smallest device on which a workload completes
///
/// Searches between the most bytes that the workload asks for at one time, below which nothing can
/// fit, and what the allocator holds when there is no shortage, by halving the interval, in steps of
/// 2 MiB. This supposes that a larger device never fails where a smaller one succeeds. The answer
/// does not rest on that alone: the workload was seen to complete on the device found, and to run
/// out of memory on one that is 2 MiB smaller.
///
/// Recorded segment addresses are not used, because on a smaller device an allocator asks for other
/// segments.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  The smallest device for policy `ours`, which is the default:
      alloc-lab fit traces/moe.csv.gz
  What PyTorch needs:
      alloc-lab fit traces/moe.csv.gz --policy pytorch --conf expandable_segments:True")]
pub(super) struct FitArgs {
    /// Traces to search for
    #[arg(required = true, value_name = "FILE")]
    pub(super) files: Vec<PathBuf>,

    #[command(flatten)]
    pub(super) setting: Setting,

    #[command(flatten)]
    pub(super) varying: Varying,

    /// Print one JSON object a line, for each file, instead of a table
    #[arg(long)]
    pub(super) json: bool,
}

/// Show what pages of one size would take, if memory could be anywhere
///
/// A model of paging, to compare allocators with: every request is placed by the best fit in unlimited
/// address space, where memory is if it fits there, and any page that holds nothing can move to where
/// one is missing. Requests up to 256 KiB have pages of 2 MiB of their own. Nothing is given back, and
/// streams are not told apart.
///
/// `stall` is what creating, mapping and moving pages would cost, by the costs measured on an NVIDIA
/// H200; a page that moves is mapped once more, and what unmapping it would cost is not in it.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  How small need pages be, and at what price?
      alloc-lab pages traces/rlhf.csv.gz
  What if one knew beforehand which blocks stay?
      alloc-lab pages traces/rlhf.csv.gz --told 3 --page 4MiB --page 8MiB --vary all")]
pub(super) struct PagesArgs {
    /// Traces to run
    #[arg(required = true, value_name = "FILE")]
    pub(super) files: Vec<PathBuf>,

    /// Bytes of a page: a number, or one with K, M, G (or KiB, MiB, GiB). May be given several times
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
        default_values = ["2MiB", "4MiB", "6MiB", "8MiB", "12MiB", "16MiB", "20MiB"])]
    pub(super) page: Vec<u64>,

    /// The model knows how long each block will live: what lives for so many turnovers or more has
    /// addresses of its own. A turnover is the time in which as much is asked for as ever lives at
    /// once
    #[arg(long, value_name = "TURNOVERS", value_parser = turnovers)]
    pub(super) told: Option<f64>,

    #[command(flatten)]
    pub(super) varying: Varying,

    /// Print one JSON object a line, for each file and size, instead of a table
    #[arg(long)]
    pub(super) json: bool,
}

fn turnovers(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| *number >= 0.0 && number.is_finite());
    number.ok_or_else(|| {
        format!("{text:?} is not a number of turnovers: 0 or more, such as 3 or 0.5")
    })
}

/// Draw the map of segments, blocks and pages at one moment of a run
///
/// Prints the map as text: for each segment its blocks, cell by cell, and for expandable ones the
/// physical pages under them. With --svg it is drawn as a picture instead.
///
/// A FILE is a trace, as for `replay`, or a recording, as for `verify`. A recording brings its own
/// settings and device; what is drawn was compared with it up to that operation.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Fragmentation of PyTorch's segments when the program needs most memory:
      alloc-lab segments traces/gpt_varlen.csv.gz --policy pytorch
  Policy `ours` after 40,000 operations, as a picture:
      alloc-lab segments traces/gpt_varlen.csv.gz --at 40000 --svg map.svg
  Expandable segments of PyTorch, as recorded:
      alloc-lab segments crates/alloc-lab/tests/golden/exp-one.json.gz --at 200")]
pub(super) struct SegmentsArgs {
    /// Trace or recording to replay
    #[arg(value_name = "FILE")]
    pub(super) file: PathBuf,

    /// When: a number of operations, `peak` (when most bytes are asked for) or `end`
    #[arg(long, value_name = "N", default_value = "peak", value_parser = At::parse)]
    pub(super) at: At,

    /// Draw an SVG file instead of printing text
    #[arg(long, value_name = "FILE.svg")]
    pub(super) svg: Option<PathBuf>,

    #[command(flatten)]
    pub(super) setting: Setting,

    #[command(flatten)]
    pub(super) device: Device,
}

/// Measure the host time of the allocator
///
/// The modes, their arguments, the random numbers and what is done between two readings of the clock
/// are those of `peers/peer.cpp`, which measures other allocators on a GPU. Every measurement has a
/// fresh allocator.
///
/// On the simulated device, driver calls take as long as simulating them takes; what is measured is
/// the allocator on requests that it serves from its cache.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Everything at a glance, the median of three measurements each:
      alloc-lab bench all traces/*.csv.gz --rounds 3
  One measurement, as the peers' driver prints it:
      alloc-lab bench churn 1024 1000000 22 7 --json
  A recorded program on a real GPU:
      alloc-lab bench replay traces/resnet.csv.gz --backend cuda
      alloc-lab bench whole traces/resnet.csv.gz --backend cuda")]
pub(super) struct BenchArgs {
    #[command(subcommand)]
    pub(super) mode: BenchMode,

    /// How the allocator decides
    #[arg(long, value_enum, default_value_t = PolicyName::Ours, global = true)]
    pub(super) policy: PolicyName,

    /// Settings as in PYTORCH_ALLOC_CONF, such as `max_split_size_mb:64`
    #[arg(long, value_name = "STR", default_value = "", hide_default_value = true, global = true)]
    pub(super) conf: String,

    /// The interface that is used
    #[arg(long, value_enum, default_value_t = Api::Handle, global = true)]
    pub(super) api: Api,

    /// The device
    #[arg(long, value_enum, default_value_t = BackendName::Mock, global = true)]
    pub(super) backend: BackendName,

    /// How often to measure; the table shows the medians
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = counts(), global = true)]
    pub(super) rounds: u32,

    /// Print one JSON object a line, for each measurement, instead of a table
    #[arg(long, global = true)]
    pub(super) json: bool,
}

/// What to measure, as in `peers/peer.cpp`.
#[derive(Debug, Subcommand)]
pub(super) enum BenchMode {
    /// Allocate and free one size, N times: ns per pair
    Pingpong {
        /// Size: bytes, or a number with KiB, MiB, …
        #[arg(value_name = "BYTES", value_parser = parse_size)]
        bytes: u64,
        /// How often
        #[arg(value_name = "N", value_parser = counts())]
        pairs: u32,
    },
    /// Free and fill random slots, with sizes from 2^9 to 2^MAXLOG: ns per step
    Churn {
        #[command(flatten)]
        churn: ChurnArgs,
        /// Seed of the random numbers
        #[arg(value_name = "SEED")]
        seed: u64,
    },
    /// Churn on T threads, each on a stream of its own: million steps a second in all
    Threads {
        /// Threads
        #[arg(value_name = "T", value_parser = threads())]
        threads: u32,
        #[command(flatten)]
        churn: ChurnArgs,
    },
    /// Churn on T threads, all on one stream: million steps a second in all
    Shared {
        /// Threads
        #[arg(value_name = "T", value_parser = threads())]
        threads: u32,
        #[command(flatten)]
        churn: ChurnArgs,
    },
    /// Run a recorded program and time each operation: median, p99 and longest time, and their sum
    Replay {
        /// Trace, as for `alloc-lab replay`
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Run a recorded program with the clock read at its two ends only: total time
    Whole {
        /// Trace, as for `alloc-lab replay`
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Allocate and free STEPS times while BLOCKS others are live, and as many are cached between
    /// them: ns per pair
    Live {
        /// Others
        #[arg(value_name = "BLOCKS", value_parser = counts())]
        blocks: u32,
        /// How often, with one size and again with random ones
        #[arg(value_name = "STEPS", value_parser = counts())]
        steps: u32,
    },
    /// All of these with usual arguments
    All {
        /// Traces to run
        #[arg(value_name = "FILE")]
        files: Vec<PathBuf>,
    },
}

/// What all kinds of churn take.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct ChurnArgs {
    /// Slots, each of which holds one block
    #[arg(value_name = "SLOTS", value_parser = counts())]
    pub(super) slots: u32,
    /// Steps that are measured, on each thread; half as many more come before
    #[arg(value_name = "STEPS", value_parser = counts())]
    pub(super) steps: u32,
    /// Logarithm of the largest size
    #[arg(value_name = "MAXLOG", value_parser = clap::value_parser!(u32).range(10..=32))]
    pub(super) max_log: u32,
}

/// Numbers from 1 on.
fn counts() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

/// Numbers of threads that one process may start.
fn threads() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=1024)
}

/// Simulated devices are at most this large, so that expandable segments find address space.
const CAPACITY_MAX: u64 = 32 << 40;

fn parse_capacity(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    if bytes > CAPACITY_MAX {
        return Err("the simulated device can have at most 32 TiB".to_owned());
    }
    Ok(bytes)
}

/// A moment of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum At {
    /// After so many operations.
    Operation(usize),
    /// When most bytes are asked for.
    Peak,
    /// At the end.
    End,
}

impl At {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "peak" => Ok(At::Peak),
            "end" => Ok(At::End),
            _ => text
                .parse()
                .map(At::Operation)
                .map_err(|_| "expected a number of operations, `peak` or `end`".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn moments_are_parsed() {
        assert_eq!(At::parse("12"), Ok(At::Operation(12)));
        assert_eq!(At::parse("peak"), Ok(At::Peak));
        assert_eq!(At::parse("end"), Ok(At::End));
        assert!(At::parse("-1").is_err());
    }
}
