//! Passing 1 MiB batches from one process to another: how many a second, and how long one takes.
//!
//! ```sh
//! cargo bench -p alloc-shm --bench passing -- [seconds of each run] [runs] [python with PyTorch]
//! ```
//!
//! With a Python interpreter that has PyTorch, its `multiprocessing` is measured in the same run,
//! taking turns with ours (`passing.py` beside this file). All do the same: the producer copies a
//! batch out of private memory into shared memory and sends it; the consumer checks the first and
//! the last byte and lets go of it. For latency, the consumer answers each batch and the producer
//! waits for the answer.
//!
//! Prints a table, and every figure as one line of JSON.

use alloc_shm::{ArenaPool, Channel, Draft, Error, Item, PoolConfig, SharedMap, ShmDir};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const BATCH: usize = 1 << 20;
/// Batches on their way at most.
const AHEAD: u64 = 4;
const CONSUMER: &str = "PASSING_CONSUMER";
const STRATEGIES: [&str; 3] = ["arena", "descriptor", "name"];
const PEERS: [&str; 2] = ["file_descriptor", "file_system"];

type Failure = Box<dyn std::error::Error>;

/// One run of one strategy.
#[derive(Clone, Debug)]
struct Run {
    strategy: String,
    per_second: f64,
    latency_median_us: f64,
    latency_worst_us: f64,
}

fn main() -> Result<(), Failure> {
    if let Ok(mode) = std::env::var(CONSUMER) {
        return consume(&mode);
    }
    // Cargo passes `--bench` along.
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let seconds: f64 = arguments.first().map_or(Ok(0.2), |text| text.parse())?;
    let runs: usize = arguments.get(1).map_or(Ok(1), |text| text.parse())?;
    let mut results = Vec::new();
    for _ in 0..runs {
        for strategy in STRATEGIES {
            results.push(measure(strategy, seconds)?);
        }
        for peer in PEERS.iter().filter(|_| arguments.len() > 2) {
            results.push(measure_peer(&arguments[2], peer, seconds)?);
        }
    }
    results.iter().for_each(|run| println!("{}", json(run)));
    table(&results);
    Ok(())
}

fn measure(strategy: &str, seconds: f64) -> Result<Run, Failure> {
    let per_second = throughput(strategy, seconds)?;
    let mut times = latencies(strategy, seconds)?;
    times.sort_by(f64::total_cmp);
    let latency_median_us = times[times.len() / 2];
    let latency_worst_us = times[times.len() - 1];
    let strategy = format!("alloc-shm {strategy}");
    Ok(Run { strategy, per_second, latency_median_us, latency_worst_us })
}

/// Sends batches for a while, with a few on their way at a time.
fn throughput(strategy: &str, seconds: f64) -> Result<f64, Failure> {
    let (channel, mut consumer) = start("free running")?;
    let mut sender = Sender::new(strategy);
    sender.counts_answers = true;
    let source = vec![7u8; BATCH];
    // The first round of batches touches fresh pages; it is not counted, here or in the peers.
    (0..32).try_for_each(|tag| sender.send(&channel, &source, tag))?;
    let begin = Instant::now();
    let mut sent = 0;
    while begin.elapsed().as_secs_f64() < seconds {
        sender.send(&channel, &source, sent)?;
        sent += 1;
    }
    sender.catch_up(&channel, 0)?;
    channel.send_note(b"end", 0)?;
    answer(&channel)?;
    let rate = sent as f64 / begin.elapsed().as_secs_f64();
    consumer.wait()?;
    Ok(rate)
}

/// Sends one batch at a time; microseconds from the copy to the answer.
fn latencies(strategy: &str, seconds: f64) -> Result<Vec<f64>, Failure> {
    let (channel, mut consumer) = start("one by one")?;
    let mut sender = Sender::new(strategy);
    let source = vec![7u8; BATCH];
    let mut times = Vec::new();
    let begin = Instant::now();
    for tag in 0.. {
        let start = Instant::now();
        sender.send(&channel, &source, tag)?;
        answer(&channel)?;
        if tag >= 32 {
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        if begin.elapsed().as_secs_f64() > seconds && times.len() > 10 {
            break;
        }
    }
    channel.send_note(b"end", 0)?;
    answer(&channel)?;
    consumer.wait()?;
    Ok(times)
}

fn start(mode: &str) -> Result<(Channel, Child), Failure> {
    let (channel, end) = Channel::for_child()?;
    let mut command = Command::new(std::env::current_exe()?);
    let child = command.env(CONSUMER, mode).stdin(end).stdout(Stdio::null()).spawn()?;
    Ok((channel, child))
}

fn answer(channel: &Channel) -> Result<(), Error> {
    channel.receive_timeout(Duration::from_secs(20)).map(drop)
}

/// Copies a batch into shared memory and sends it.
struct Sender {
    strategy: String,
    pool: ArenaPool,
    dir: ShmDir,
    /// For the strategy that lends nothing: the consumer's answers tell how far it is.
    counts_answers: bool,
    unanswered: u64,
}

impl Sender {
    fn new(strategy: &str) -> Self {
        let pool = ArenaPool::new(PoolConfig { arena_bytes: 16 << 20, arenas_max: 4 });
        let (strategy, dir) = (strategy.to_owned(), ShmDir::system());
        Sender { strategy, pool, dir, counts_answers: false, unanswered: 0 }
    }

    /// Waits until at most `most` batches are unanswered.
    fn catch_up(&mut self, channel: &Channel, most: u64) -> Result<(), Error> {
        while self.unanswered > most {
            answer(channel)?;
            self.unanswered -= 1;
        }
        Ok(())
    }

    fn send(&mut self, channel: &Channel, source: &[u8], tag: u64) -> Result<(), Error> {
        match self.strategy.as_str() {
            "arena" => {
                while channel.lent() as u64 >= AHEAD {
                    std::thread::yield_now();
                }
                let mut block = self.pool.allocate(BATCH as u64)?;
                block.copy_from_slice(source);
                channel.send_block(&block.share(), tag)
            }
            "descriptor" => {
                self.catch_up(channel, AHEAD - 1)?;
                self.unanswered += u64::from(self.counts_answers);
                let mut draft = Draft::new(BATCH as u64)?;
                draft.copy_from_slice(source);
                channel.send_frozen(&draft.freeze()?, tag)
            }
            _ => {
                while channel.lent() as u64 >= AHEAD {
                    std::thread::yield_now();
                }
                let map = SharedMap::create_unique(&self.dir, BATCH as u64)?;
                map.write_at(0, source)?;
                channel.send_named(&map, tag)
            }
        }
    }
}

/// The other process.
fn consume(mode: &str) -> Result<(), Failure> {
    let channel = Channel::from_stdin()?;
    loop {
        let received = channel.receive()?;
        let ends = match &received.item {
            Item::Block(block) => [block[0], block[BATCH - 1]],
            Item::Frozen(frozen) => [frozen[0], frozen[BATCH - 1]],
            Item::Named(map) => {
                let mut ends = [[0]; 2];
                map.read_at(0, &mut ends[0])?;
                map.read_at(BATCH as u64 - 1, &mut ends[1])?;
                [ends[0][0], ends[1][0]]
            }
            _ => {
                channel.send_note(b"", 0)?;
                return Ok(());
            }
        };
        assert_eq!(ends, [7, 7]);
        let answers = mode == "one by one" || matches!(received.item, Item::Frozen(_));
        drop(received);
        if answers {
            channel.send_note(b"", 0)?;
        }
    }
}

/// Runs `passing.py`, which prints three figures.
fn measure_peer(python: &str, strategy: &str, seconds: f64) -> Result<Run, Failure> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/passing.py");
    let output = Command::new(python)
        .args(["-W", "ignore", script, strategy, &seconds.to_string()])
        .stderr(Stdio::inherit())
        .output()?;
    let text = String::from_utf8(output.stdout)?;
    let figures: Vec<f64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let [per_second, latency_median_us, latency_worst_us] = figures[..] else {
        return Err(format!("{script} said {text:?}").into());
    };
    let strategy = format!("PyTorch {strategy}");
    Ok(Run { strategy, per_second, latency_median_us, latency_worst_us })
}

fn json(run: &Run) -> String {
    let Run { strategy, per_second, latency_median_us, latency_worst_us } = run;
    format!(
        "{{\"strategy\":\"{strategy}\",\"batches_per_second\":{per_second:.1},\
         \"latency_median_us\":{latency_median_us:.1},\"latency_worst_us\":{latency_worst_us:.1}}}"
    )
}

/// Median and worst over the runs.
fn table(results: &[Run]) {
    println!("\n| strategy | batches/s, median | worst run | latency µs, median | worst batch |");
    println!("|--|--:|--:|--:|--:|");
    let mut strategies: Vec<&str> = results.iter().map(|run| run.strategy.as_str()).collect();
    strategies.sort_unstable();
    strategies.dedup();
    for strategy in strategies {
        let of = |figure: fn(&Run) -> f64| {
            let runs = results.iter().filter(|run| run.strategy == strategy);
            let mut figures: Vec<f64> = runs.map(figure).collect();
            figures.sort_by(f64::total_cmp);
            figures
        };
        let rates = of(|run| run.per_second);
        let medians = of(|run| run.latency_median_us);
        let worsts = of(|run| run.latency_worst_us);
        println!(
            "| {strategy} | {:.0} | {:.0} | {:.0} | {:.0} |",
            rates[rates.len() / 2],
            rates[0],
            medians[medians.len() / 2],
            worsts[worsts.len() - 1],
        );
    }
}
