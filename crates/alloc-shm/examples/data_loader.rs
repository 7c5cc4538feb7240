//! A trainer and its data loaders: worker processes fill batches in shared memory, the trainer
//! reads them in place.
//!
//! ```sh
//! cargo run --release -p alloc-shm --example data_loader -- [workers] [batches of each]
//! ```
//!
//! Each worker owns a pool of arenas and sends the addresses of its batches. A batch goes back to
//! its worker when the trainer drops it, so a worker that is ahead waits for the trainer, and a
//! worker that dies costs the trainer nothing but the batches it had not sent.

use alloc_shm::{ArenaPool, Channel, Error, Item, PoolConfig, Received, ReceivedBlock};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const BATCH_BYTES: u64 = 1 << 20;
/// Batches of one worker that may be on their way or in use.
const AHEAD: usize = 4;
const WORKER: &str = "DATA_LOADER_WORKER";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<u64>());
    let workers = arguments.next().transpose()?.unwrap_or(2);
    let batches = arguments.next().transpose()?.unwrap_or(500);
    match std::env::var(WORKER) {
        Ok(worker) => load(worker.parse()?, batches)?,
        Err(_) => train(workers, batches)?,
    }
    Ok(())
}

/// A worker: makes batches until it has made all of them or the trainer is gone.
fn load(worker: u64, batches: u64) -> Result<(), Error> {
    let trainer = Channel::from_stdin()?;
    let pool = ArenaPool::new(PoolConfig { arena_bytes: 8 << 20, arenas_max: 2 });
    for step in 0..batches {
        while trainer.lent() >= AHEAD {
            std::thread::sleep(Duration::from_micros(50));
        }
        let mut batch = pool.allocate(BATCH_BYTES)?;
        batch.fill((worker + step) as u8);
        match trainer.send_block(&batch.share(), step) {
            Err(Error::PeerGone) => return Ok(()),
            result => result?,
        }
    }
    trainer.send_note(b"that was all", worker)?;
    trainer.settle(Duration::from_secs(10))
}

/// The trainer: takes batches from whichever worker has one.
fn train(workers: u64, batches: u64) -> Result<(), Box<dyn std::error::Error>> {
    let mut loaders = (0..workers)
        .map(|worker| Loader::start(worker, batches))
        .collect::<Result<Vec<_>, Box<dyn std::error::Error>>>()?;
    let begin = Instant::now();
    let (mut taken, mut sum) = (0u64, 0u64);
    while loaders.iter().any(|loader| !loader.done) {
        for (worker, loader) in loaders.iter_mut().enumerate().filter(|(_, loader)| !loader.done) {
            match loader.channel.receive_timeout(Duration::from_millis(20)) {
                Ok(Received { tag, item: Item::Block(batch) }) => {
                    sum += step(&batch, worker as u64 + tag);
                    taken += 1;
                }
                Ok(_) | Err(Error::PeerGone) => loader.done = true,
                Err(Error::Timeout { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    for mut loader in loaders {
        loader.process.wait()?;
    }
    let rate = taken as f64 / seconds;
    println!("{workers} workers, {taken} batches of 1 MiB in {seconds:.3} s: {rate:.0} a second");
    println!("checksum {sum}");
    if taken == workers * batches { Ok(()) } else { Err("batches are missing".into()) }
}

/// A worker, seen from the trainer.
struct Loader {
    channel: Channel,
    process: Child,
    done: bool,
}

impl Loader {
    fn start(worker: u64, batches: u64) -> Result<Self, Box<dyn std::error::Error>> {
        let (channel, end) = Channel::for_child()?;
        let process = Command::new(std::env::current_exe()?)
            .args(["0".to_owned(), batches.to_string()])
            .env(WORKER, worker.to_string())
            .stdin(end)
            .spawn()?;
        Ok(Loader { channel, process, done: false })
    }
}

/// A training step: reads every byte of the batch where it lies.
fn step(batch: &ReceivedBlock, expected: u64) -> u64 {
    let sum: u64 = batch.iter().map(|&byte| u64::from(byte)).sum();
    assert_eq!(sum, BATCH_BYTES * u64::from(expected as u8), "a batch arrived changed");
    sum
}
