//! A broker as a process of its own: `shm-broker (--path PATH | --label LABEL) [limits]`.
//!
//! Prints `ready ADDRESS` once clients can connect, and serves until it is told to stop (SIGTERM,
//! SIGINT). Its socket goes with it.

use alloc_shm::broker::{Broker, Limits};
use alloc_shm::{ShmDir, SocketAddress};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::SignalFd;
use std::error::Error;
use std::os::fd::AsFd;
use std::process::ExitCode;

const USAGE: &str = "\
usage: shm-broker (--path PATH | --label LABEL) [option N]...
  --path PATH             listen at this path
  --label LABEL           listen at this label of the abstract namespace
  --clients N             clients at a time
  --things N              things at a time
  --things-per-client N   things that one client has put
  --bytes N               bytes of all things together
  --sweep DIRECTORY       remove names of dead processes there whenever a client has gone
  --prefix PREFIX         of the names to sweep (default: gsm)";

struct Arguments {
    address: SocketAddress,
    limits: Limits,
    sweep: Option<ShmDir>,
}

fn main() -> ExitCode {
    let result = parse(std::env::args().skip(1)).and_then(serve);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("shm-broker: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Arguments, Box<dyn Error>> {
    let mut address = None;
    let mut limits = Limits::default();
    let (mut directory, mut prefix) = (None, "gsm".to_owned());
    while let Some(option) = arguments.next() {
        let value = arguments.next().ok_or(USAGE)?;
        match option.as_str() {
            "--path" => address = Some(SocketAddress::Path(value.into())),
            "--label" => address = Some(SocketAddress::Abstract(value)),
            "--clients" => limits.clients = value.parse()?,
            "--things" => limits.things = value.parse()?,
            "--things-per-client" => limits.things_per_client = value.parse()?,
            "--bytes" => limits.bytes = value.parse()?,
            "--sweep" => directory = Some(value),
            "--prefix" => prefix = value,
            _ => return Err(USAGE.into()),
        }
    }
    let sweep = directory.map(|path| ShmDir::at(path)?.with_prefix(&prefix)).transpose()?;
    Ok(Arguments { address: address.ok_or(USAGE)?, limits, sweep })
}

fn serve(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block()?;
    let stop = SignalFd::new(&signals)?;
    let mut broker = Broker::bind(&arguments.address, arguments.limits)?;
    if let Some(dir) = arguments.sweep {
        broker = broker.sweeping(dir);
    }
    println!("ready {}", arguments.address);
    broker.run(stop.as_fd())?;
    Ok(())
}
