//! Memory shared with other processes: over a channel within this one, as far as the driver opens its
//! own exports, and with real processes, which are killed at random.

use crate::Scenario;
use crate::child;
use crate::rig::{FIRST, Gate, KIB, MIB, Rig};
use alloc_core::share::{ImportCounts, Importer};
use alloc_core::{Config, Policy};
use alloc_cuda::{CudaAllocator, CudaBackend, CudaError, CudaStream};
use alloc_ipc::{IpcError, Producer, Received, Receiver, Sender};
use alloc_shm::Channel;
use cuda_driver::fake::Outcome;
use cuda_driver::{PhysicalKind, PhysicalMemory};
use mock_backend::Rng;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

pub(crate) const SCENARIOS: &[Scenario] = &[
    ("ipc::over_a_channel", over_a_channel),
    ("ipc::work_waits_for_the_producer", work_waits),
    ("ipc::fabric_handles", fabric_handles),
    ("ipc::consumers_killed_at_random", consumers_killed),
    ("ipc::producers_killed_at_random", producers_killed),
];

/// Buffers that are sent to processes which are killed at random.
const BUFFERS: u64 = 1000;
const SOON: Option<Duration> = Some(Duration::from_secs(60));
const KILL: i32 = 9;
/// In place of a buffer's number: the last one.
const LAST: u64 = u64::MAX;
const MISSING: &str = "the device has no virtual memory";

fn config(policy: Policy, expandable: bool) -> Config {
    let mut config = Config::of(policy);
    config.settings.expandable_segments = Some(expandable);
    config
}

/// Whether this process may open what it exports. The driver does so for pages only.
fn kinds(rig: &Rig) -> Vec<Config> {
    let all = [Policy::Pytorch, Policy::Ours];
    let expandable = all.map(|policy| config(policy, true));
    let whole = all.map(|policy| config(policy, false)).into_iter().filter(|_| !rig.is_real);
    expandable.into_iter().chain(whole).collect()
}

fn has_virtual_memory(rig: &Rig) -> bool {
    rig.backend.has_virtual_memory(FIRST).expect("the device exists")
}

/// A producer and a receiver at the two ends of a channel. On a GPU the end of the producer's work is
/// waited for by the host: the driver may not open events that this process exported.
fn over_a_channel(rig: &Rig) -> Outcome {
    if !has_virtual_memory(rig) {
        return Outcome::Skipped(MISSING);
    }
    for config in kinds(rig) {
        let allocator = rig.allocator(config);
        let (stream, side) = (rig.stream(), rig.stream());
        let producer = Producer::new(&allocator);
        let (one, other) = Channel::pair().expect("sockets");
        let sender = producer.connect(one);
        let importer = Importer::new(rig.backend.clone());
        let receiver = Receiver::new(other, &importer);
        let sizes = [600 * KIB, 50 * MIB, 3 * MIB, 600 * KIB];
        let blocks = sizes.map(|bytes| allocator.allocate(bytes, &stream).expect("room"));
        for (seed, block) in blocks.iter().enumerate() {
            rig.fill(&stream, block.addr(), block.bytes(), seed as u32);
        }
        stream.synchronize().expect("no failed work");
        let mut held = Vec::new();
        for block in &blocks {
            match sender.send(block, &stream, b"") {
                Ok(()) => held.push(receiver.receive(SOON).expect("it was sent")),
                Err(IpcError::Allocator(error)) if rig.is_real => {
                    println!("{error}");
                    return Outcome::Skipped("memory cannot be exported here");
                }
                Err(error) => panic!("{error}"),
            }
        }
        let addrs: Vec<_> = blocks.iter().map(|block| block.addr()).collect();
        for block in blocks {
            allocator.free(block).expect("frees");
        }
        // New blocks lie elsewhere: what is shared is not used again.
        let others = sizes.map(|bytes| allocator.allocate(bytes, &stream).expect("room"));
        for other in &others {
            assert!(!addrs.contains(&other.addr()));
            rig.fill(&stream, other.addr(), other.bytes(), 99);
        }
        stream.synchronize().expect("no failed work");
        for (seed, received) in held.iter().enumerate() {
            if !rig.is_real {
                received.block.use_on(&side).expect("waits");
            }
            rig.check(&side, received.block.addr(), received.block.bytes(), seed as u32);
        }
        assert_eq!(rig.wrong_words(FIRST), 0);
        drop(held);
        while producer.lent() > 0 {
            receiver.collect();
        }
        assert_eq!(importer.counts(), ImportCounts::default());
        for other in others {
            allocator.free(other).expect("frees");
        }
        allocator.check().expect("sound");
        drop((sender, producer, receiver, importer));
        allocator.empty_cache().expect("gives everything back");
        let reserved = allocator.stats(FIRST).expect("stats").get("reserved_bytes.all.current");
        assert_eq!(reserved, Some(0));
    }
    Outcome::Done
}

/// The consumer's work comes after what the producer had queued, though the host waits for nothing.
fn work_waits(rig: &Rig) -> Outcome {
    if rig.is_real {
        return Outcome::Skipped(
            "a process need not open its own events; see the tests with children",
        );
    }
    let allocator = rig.allocator(config(Policy::Ours, true));
    let (stream, side) = (rig.stream(), rig.stream());
    let producer = Producer::new(&allocator);
    let (one, other) = Channel::pair().expect("sockets");
    let sender = producer.connect(one);
    let receiver = Receiver::new(other, &Importer::new(rig.backend.clone()));
    let block = allocator.allocate(4 * MIB, &stream).expect("room");
    let gate = Gate::close(&stream);
    rig.fill(&stream, block.addr(), block.bytes(), 3);
    sender.send(&block, &stream, b"").expect("sends");
    let received = receiver.receive(SOON).expect("it was sent");
    received.block.use_on(&side).expect("waits");
    rig.check(&side, received.block.addr(), received.block.bytes(), 3);
    drop(received);
    receiver.collect();
    assert_eq!(producer.lent(), 1, "the work on it is not done");
    gate.open();
    assert_eq!(rig.wrong_words(FIRST), 0);
    assert_eq!(receiver.collect(), 0);
    assert_eq!(producer.collect(), 1);
    allocator.free(block).expect("frees");
    Outcome::Done
}

/// Pages that travel as 64 bytes, where the device has such handles.
fn fabric_handles(rig: &Rig) -> Outcome {
    use alloc_core::backend::{SharePages, VirtualMemory};
    if !has_virtual_memory(rig) {
        return Outcome::Skipped(MISSING);
    }
    let backend = CudaBackend::with_driver(rig.backend.driver()).expect("backend");
    if !backend.ask_for_fabric_handles(FIRST).expect("asks") {
        return Outcome::Skipped("the device has no fabric handles");
    }
    let unit = backend.granularity(FIRST);
    let page = backend.create(FIRST, unit).expect("room");
    let token = backend.export_page(&page).expect("exports");
    let by_fabric = token.descriptor.is_none();
    let imported = backend.import_page(FIRST, unit, token).expect("imports");
    backend.destroy(page).expect("destroys");
    backend.destroy(imported).expect("destroys");
    if by_fabric {
        return Outcome::Done;
    }
    // In no combination, and what the driver says to it.
    for (exportable, gpu_direct) in [(false, false), (true, false), (false, true), (true, true)] {
        let kind = PhysicalKind { fabric: true, exportable, gpu_direct };
        match PhysicalMemory::create(rig.context(FIRST), unit, kind) {
            Ok(_) => panic!("{kind:?} is possible, and was not used"),
            Err(error) => println!("{kind:?}: {error}"),
        }
    }
    Outcome::Skipped("the driver refuses such handles here")
}

/// A process that plays a part, with a channel to it.
struct Process {
    child: Child,
}

impl Process {
    fn start(part: &str, seed: u64) -> (Self, Channel) {
        let (channel, other): (Channel, OwnedFd) = Channel::for_child().expect("sockets");
        let program = std::env::current_exe().expect("this program has a path");
        let child = Command::new(program)
            .arg(format!("{}{part}:{seed}", child::OPTION))
            .stdin(Stdio::from(other))
            .stdout(Stdio::null())
            .spawn()
            .expect("starts");
        (Process { child }, channel)
    }

    fn kill(mut self) {
        self.child.kill().expect("kills");
        let status = self.wait();
        assert_eq!(status.signal(), Some(KILL), "it did not go well before: {status}");
    }

    fn end(mut self) {
        let status = self.wait();
        assert!(status.success(), "{status}");
    }

    fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + Duration::from_secs(90);
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            if Instant::now() > deadline {
                self.child.kill().expect("kills");
                panic!("process {} hangs", self.child.id());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn number_of(received: &Received<CudaBackend>) -> u64 {
    u64::from_le_bytes(received.note[..8].try_into().expect("a number"))
}

/// Looks at a buffer on the GPU, after what its producer did.
fn verify(rig: &Rig, stream: &CudaStream, received: &Received<CudaBackend>) {
    received.block.use_on(stream).expect("waits for the producer");
    let number = number_of(received);
    rig.check(stream, received.block.addr(), received.block.bytes(), number as u32);
    assert_eq!(rig.wrong_words(FIRST), 0, "buffer {number}");
}

/// Receives until it is told to end, or the producer is gone; looks at each buffer when it comes and
/// when it goes.
fn consume(rig: &Rig, receiver: &Receiver<CudaBackend>, seed: u64) -> u64 {
    let stream = rig.stream();
    let mut rng = Rng::new(seed);
    let mut held: VecDeque<Received<CudaBackend>> = VecDeque::new();
    let mut count = 0;
    loop {
        match receiver.receive(None) {
            Ok(received) if number_of(&received) == LAST => break,
            Ok(received) => {
                // Of a producer that is gone, the event may be gone as well.
                verify(rig, &stream, &received);
                count += 1;
                held.push_back(received);
            }
            Err(IpcError::Channel(alloc_shm::Error::PeerGone)) => break,
            Err(error) => panic!("{error}"),
        }
        while held.len() > 20 || !held.is_empty() && rng.chance(0.3) {
            let at = rng.below(held.len() as u64) as usize;
            let old = held.swap_remove_back(at).expect("there");
            verify(rig, &stream, &old);
        }
    }
    held.iter().for_each(|received| verify(rig, &stream, received));
    count
}

/// The part of a consumer.
pub(crate) fn consumer(seed: u64) {
    let rig = Rig::on_gpu().expect("a GPU");
    let importer = Importer::new(rig.backend.clone());
    let channel = Channel::from_stdin().expect("a channel");
    consume(&rig, &Receiver::new(channel, &importer), seed);
    importer.collect();
    assert_eq!(importer.counts(), ImportCounts::default());
}

/// The part of a producer: sends until it is killed.
pub(crate) fn producer(seed: u64) {
    let rig = Rig::on_gpu().expect("a GPU");
    let allocator = rig.allocator(config(Policy::Ours, true));
    let producer = Producer::new(&allocator);
    let sender = producer.connect(Channel::from_stdin().expect("a channel"));
    let stream = rig.stream();
    let mut rng = Rng::new(seed);
    for number in 0.. {
        if send_one(&rig, &allocator, &[&sender], &stream, number, &mut rng).is_err() {
            return;
        }
    }
}

/// Fills a buffer, sends it to all without waiting for the GPU, and frees it at once.
fn send_one(
    rig: &Rig,
    allocator: &CudaAllocator,
    senders: &[&Sender<CudaBackend>],
    stream: &CudaStream,
    number: u64,
    rng: &mut Rng,
) -> Result<(), IpcError<CudaError>> {
    let small = rng.chance(0.7);
    let bytes = if small { 4096 + rng.below(MIB) } else { rng.below(24) * MIB + MIB };
    let block = allocator.allocate(bytes, stream).expect("room");
    rig.fill(stream, block.addr(), block.bytes(), number as u32);
    let sent = senders.iter().try_for_each(|to| to.send(&block, stream, &number.to_le_bytes()));
    allocator.free(block).expect("frees");
    sent
}

/// A thousand buffers go to two consumers, which are killed at random and replaced.
fn consumers_killed(rig: &Rig) -> Outcome {
    if !rig.is_real || !has_virtual_memory(rig) {
        return Outcome::Skipped("needs processes with a real driver");
    }
    let all = [Policy::Pytorch, Policy::Ours];
    let kinds = all.map(|policy| [config(policy, true), config(policy, false)]).concat();
    for (kind, config) in kinds.into_iter().enumerate() {
        let allocator = rig.allocator(config);
        let stream = rig.stream();
        let producer = Producer::new(&allocator);
        let start = |seed| {
            let (process, channel) = Process::start("consumer", seed);
            (process, producer.connect(channel))
        };
        let mut rng = Rng::new(kind as u64);
        let mut consumers = vec![start(1), start(2)];
        let mut killed = 0;
        for number in 0..BUFFERS / 4 {
            let both = rng.chance(0.5);
            let first = rng.below(2) as usize;
            let senders: Vec<_> = consumers
                .iter()
                .enumerate()
                .filter(|(n, _)| both || *n == first)
                .map(|(_, (_, sender))| sender)
                .collect();
            let sent = send_one(rig, &allocator, &senders, &stream, number, &mut rng);
            if let Err(error) = sent {
                println!("{error}");
                return Outcome::Skipped("memory cannot be shared here");
            }
            if rng.chance(0.02) {
                let (old, _) = std::mem::replace(&mut consumers[first], start(number));
                old.kill();
                killed += 1;
            }
        }
        for (process, sender) in consumers {
            send_one(rig, &allocator, &[&sender], &stream, LAST, &mut rng).expect("sends");
            process.end();
        }
        producer.settle(Duration::from_secs(60)).expect("everything comes back");
        println!("{kind}: {killed} consumers killed");
        allocator.check().expect("sound");
        drop(producer);
        allocator.empty_cache().expect("gives everything back");
        let reserved = allocator.stats(FIRST).expect("stats").get("reserved_bytes.all.current");
        assert_eq!(reserved, Some(0), "everything is free");
    }
    Outcome::Done
}

/// Producers are killed while they send; what arrived from them stays as it was.
fn producers_killed(rig: &Rig) -> Outcome {
    if !rig.is_real || !has_virtual_memory(rig) {
        return Outcome::Skipped("needs processes with a real driver");
    }
    let importer = Importer::new(rig.backend.clone());
    let stream = rig.stream();
    let mut rng = Rng::new(9);
    for round in 0..5 {
        let (process, channel) = Process::start("producer", round);
        let receiver = Receiver::new(channel, &importer);
        let mut held = Vec::new();
        for _ in 0..10 + rng.below(40) {
            let received = receiver.receive(SOON).expect("it sends for ever");
            verify(rig, &stream, &received);
            held.push(received);
        }
        process.kill();
        for received in &held {
            verify(rig, &stream, received);
        }
        drop((held, receiver));
        importer.collect();
        assert_eq!(importer.counts(), ImportCounts::default());
    }
    Outcome::Done
}
