//! Real processes share buffers with checked contents, and are killed at random.

use crate::child;
use crate::pair::{Alloc, DEV0, MIB, config, kinds};
use alloc_core::share::{ImportCounts, Importer};
use alloc_core::{Addr, Policy};
use alloc_ipc::{IpcError, Producer, Received, Receiver, Sender};
use alloc_shm::Channel;
use mock_backend::{MockBackend, Rng};
use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Child;
use std::time::Duration;

/// Buffers that each test sends. `ALLOC_IPC_BUFFERS` asks for others.
const BUFFERS: u64 = 1000;
const KILL: i32 = 9;
/// In place of a buffer's number: the last one.
const LAST: u64 = u64::MAX;

fn buffers() -> u64 {
    std::env::var("ALLOC_IPC_BUFFERS").map_or(BUFFERS, |count| count.parse().unwrap())
}

fn gpu() -> MockBackend {
    let file = |bytes| {
        let file: File = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        file
    };
    MockBackend::builder().device(8 << 30).payloads(file).build()
}

/// Where the contents are looked at: both ends of every quarter.
fn places(bytes: u64) -> impl Iterator<Item = u64> {
    let step = bytes / 4 / 512 * 512;
    (0..4).flat_map(move |n| [n * step, (n + 1) * step - 8])
}

fn write(gpu: &MockBackend, addr: Addr, bytes: u64, seed: u64) {
    for offset in places(bytes) {
        let (file, at) = gpu.payload(addr + offset).expect("it was exported");
        file.write_all_at(&(seed ^ offset).to_le_bytes(), at).unwrap();
    }
}

fn check(gpu: &MockBackend, addr: Addr, bytes: u64, seed: u64) {
    for offset in places(bytes) {
        let (file, at) = gpu.payload(addr + offset).expect("it was imported");
        let mut word = [0; 8];
        file.read_exact_at(&mut word, at).unwrap();
        assert_eq!(u64::from_le_bytes(word), seed ^ offset, "byte {offset} of buffer {seed}");
    }
}

fn seed_of(received: &Received<MockBackend>) -> u64 {
    u64::from_le_bytes(received.note[..8].try_into().unwrap())
}

fn verify(gpu: &MockBackend, received: &Received<MockBackend>) {
    check(gpu, received.block.addr(), received.block.bytes(), seed_of(received));
}

/// Receives until it is told to end, or the producer is gone; looks at each buffer when it comes and when it goes.
pub(crate) fn consumer(channel: Channel, seed: u64) {
    let gpu = gpu();
    let importer = Importer::new(gpu.clone());
    consume(&gpu, &Receiver::new(channel, &importer), seed);
    assert_eq!(importer.counts(), ImportCounts::default());
    gpu.assert_clean();
}

fn consume(gpu: &MockBackend, receiver: &Receiver<MockBackend>, seed: u64) -> u64 {
    let mut rng = Rng::new(seed);
    let mut held = VecDeque::new();
    let mut count = 0;
    loop {
        match receiver.receive(None) {
            Ok(received) => {
                if seed_of(&received) == LAST {
                    break;
                }
                verify(gpu, &received);
                count += 1;
                held.push_back(received);
            }
            Err(IpcError::Channel(alloc_shm::Error::PeerGone)) => break,
            Err(error) => panic!("{error}"),
        }
        while held.len() > 20 || !held.is_empty() && rng.chance(0.3) {
            let at = rng.below(held.len() as u64) as usize;
            let old = held.swap_remove_back(at).unwrap();
            verify(gpu, &old);
        }
    }
    held.iter().for_each(|received| verify(gpu, received));
    count
}

/// Sends buffers until it is killed, or the consumer is gone.
pub(crate) fn producer(channel: Channel, seed: u64) {
    let gpu = gpu();
    let stream = gpu.default_stream(DEV0);
    let alloc = Alloc::with_virtual_memory(gpu.clone(), config(Policy::Ours, true)).unwrap();
    let producer = Producer::new(&alloc);
    let sender = producer.connect(channel);
    let mut rng = Rng::new(seed);
    for number in 0.. {
        if send_one(&gpu, &alloc, &[&sender], &stream, number, &mut rng).is_err() {
            return;
        }
    }
}

/// Allocates a buffer, sends it to all, and frees it at once.
fn send_one(
    gpu: &MockBackend,
    alloc: &Alloc,
    senders: &[&Sender<MockBackend>],
    stream: &mock_backend::MockStream,
    number: u64,
    rng: &mut Rng,
) -> Result<(), IpcError<mock_backend::MockError>> {
    let bytes = if rng.chance(0.7) { 4096 + rng.below(MIB) } else { rng.below(24) * MIB + MIB };
    let block = alloc.allocate(bytes, stream).unwrap();
    // The first export makes the bytes.
    drop(alloc.share(&block).unwrap());
    write(gpu, block.addr(), block.bytes(), number);
    let sent = senders.iter().try_for_each(|to| to.send(&block, stream, &number.to_le_bytes()));
    alloc.free(block).unwrap();
    sent
}

struct Consumer {
    child: Child,
    sender: Sender<MockBackend>,
}

impl Consumer {
    fn start(producer: &Producer<MockBackend>, seed: u64) -> Self {
        let (child, channel) = child::start("consumer", seed);
        Consumer { child, sender: producer.connect(channel) }
    }
}

/// A thousand buffers go to four consumers, which are killed at random and replaced. No survivor ever
/// sees a buffer change, and in the end everything is free.
#[test]
fn consumers_are_killed_at_random() {
    for (kind, config) in kinds().into_iter().enumerate() {
        let mut rng = Rng::new(kind as u64);
        let gpu = gpu();
        let stream = gpu.default_stream(DEV0);
        let alloc = Alloc::with_virtual_memory(gpu.clone(), config).unwrap();
        let producer = Producer::new(&alloc);
        let mut consumers: Vec<_> = (0..4).map(|n| Consumer::start(&producer, n)).collect();
        let mut killed = 0;
        for number in 0..buffers() / 4 {
            let first = rng.below(4) as usize;
            let to = [first, (first + 1) % 4];
            let to = &to[..1 + rng.below(2) as usize];
            let senders: Vec<_> = to.iter().map(|n| &consumers[*n].sender).collect();
            send_one(&gpu, &alloc, &senders, &stream, number, &mut rng).unwrap();
            if rng.chance(0.05) {
                let n = rng.below(4) as usize;
                let mut old =
                    std::mem::replace(&mut consumers[n], Consumer::start(&producer, number));
                old.child.kill().unwrap();
                assert_eq!(child::wait(&mut old.child).signal(), Some(KILL), "it went well");
                killed += 1;
            }
        }
        assert!(killed > 0);
        for Consumer { mut child, sender } in consumers {
            send_one(&gpu, &alloc, &[&sender], &stream, LAST, &mut rng).unwrap();
            let status = child::wait(&mut child);
            assert!(status.success(), "{status}");
        }
        producer.settle(Duration::from_secs(20)).unwrap();
        assert_eq!(producer.lent(), 0);
        alloc.check().unwrap();
        alloc.empty_cache().unwrap();
        let reserved = alloc.stats(DEV0).unwrap().get("reserved_bytes.all.current");
        assert_eq!(reserved, Some(0), "everything is free");
        drop((producer, alloc));
        gpu.assert_clean();
    }
}

/// Producers are killed at random while they send. What arrived stays as it was, and everything is
/// closed in the end.
#[test]
fn producers_are_killed_at_random() {
    let mut rng = Rng::new(5);
    let mut received = 0;
    for round in 0..20 {
        let gpu = gpu();
        let importer = Importer::new(gpu.clone());
        let (mut child, channel) = child::start("producer", round);
        let receiver = Receiver::new(channel, &importer);
        // Dies at some moment after its first buffer.
        let first = receiver.receive(Some(Duration::from_secs(20))).unwrap();
        verify(&gpu, &first);
        let delay = Duration::from_micros(rng.below(20_000));
        let killer = std::thread::spawn(move || {
            std::thread::sleep(delay);
            child.kill().unwrap();
            child::wait(&mut child)
        });
        received += consume(&gpu, &receiver, round);
        assert_eq!(killer.join().unwrap().signal(), Some(KILL));
        verify(&gpu, &first);
        drop((first, receiver));
        assert_eq!(importer.counts(), ImportCounts::default());
        gpu.assert_clean();
    }
    assert!(received > 100, "{received} buffers came");
}
