//! Sending, receiving, giving back.

use crate::pair::*;
use alloc_core::share::ImportError;
use alloc_core::{AllocError, Policy};
use alloc_ipc::{EVENTS_MAX, IpcError, NOTE_BYTES_MAX, Producer, Receiver};
use alloc_shm::Channel;
use mock_backend::{Call, Work};
use std::time::Duration;

#[test]
fn a_block_arrives_with_its_note_and_goes_back() {
    for config in kinds() {
        let pair = Pair::new(config);
        let block = pair.block(50 * MIB);
        pair.send(&block, b"what it is");
        let received = pair.receive();
        assert_eq!(received.block.bytes(), block.bytes());
        assert_eq!(received.note, b"what it is");
        assert_eq!(pair.producer.lent(), 1);
        let addr = block.addr();
        pair.free(block);
        let other = pair.block(50 * MIB);
        assert_ne!(other.addr(), addr, "the consumer has it");
        pair.free(other);
        drop(received);
        assert_eq!(pair.producer.collect(), 1);
        assert_eq!(pair.producer.collect(), 0);
        pair.end();
    }
}

/// The consumer's work waits for the producer's, and the return for the consumer's work.
#[test]
fn work_is_in_order_on_both_sides() {
    for config in kinds() {
        let pair = Pair::new(config);
        let block = pair.block(4 * MIB);
        pair.gpu.busy(&pair.stream);
        pair.gpu.launch(&pair.stream, Work::new().touching(block.addr(), 512));
        pair.send(&block, b"");
        let received = pair.receive();
        let (addr, bytes) = (received.block.addr(), received.block.bytes());
        received.block.use_on(&pair.side).unwrap();
        pair.there.judge().allocated(addr, bytes, &pair.side);
        pair.there.launch(&pair.side, Work::new().touching(addr, bytes));
        pair.there.judge().freed(addr);
        pair.gpu.pass(&pair.stream);
        pair.free(block);
        drop(received);
        assert_eq!((pair.producer.collect(), pair.producer.lent()), (0, 1));
        pair.there.pass(&pair.side);
        assert_eq!(pair.receiver.importer().collect(), 0);
        assert_eq!(pair.producer.collect(), 1);
        pair.end();
    }
}

/// Whoever waits for the next block gives back what is done meanwhile.
#[test]
fn waiting_gives_back_what_is_done() {
    let pair = Pair::new(config(Policy::Ours, true));
    let block = pair.block(4 * MIB);
    pair.send(&block, b"");
    let received = pair.receive();
    received.block.use_on(&pair.side).unwrap();
    pair.there.busy(&pair.side);
    drop(received);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let error = pair.receiver.receive(Some(Duration::from_millis(300))).unwrap_err();
            assert!(matches!(error, IpcError::Channel(alloc_shm::Error::Timeout { .. })));
        });
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(pair.producer.lent(), 1);
        pair.there.pass(&pair.side);
        pair.producer.settle(Duration::from_millis(200)).unwrap();
    });
    pair.free(block);
    pair.end();
}

/// A device that is full of what consumers gave back is not full: the allocator asks.
#[test]
fn memory_that_came_back_serves_a_request_that_would_fail() {
    let pair = Pair::on(config(Policy::Pytorch, false), 64 * MIB);
    let block = pair.block(60 * MIB);
    pair.send(&block, b"");
    let received = pair.receive();
    pair.free(block);
    let full = pair.alloc.allocate(60 * MIB, &pair.stream);
    assert!(full.is_err_and(|error| error.is_out_of_memory()));
    drop(received);
    let block = pair.block(60 * MIB);
    pair.free(block);
    pair.end();
}

/// Without more events the producer waits for its stream; then nobody has to wait for an event.
#[test]
fn events_run_out_without_harm() {
    let pair = Pair::new(config(Policy::Ours, true));
    let block = pair.block(MIB);
    let held: Vec<_> = (0..EVENTS_MAX + 10)
        .map(|_| {
            pair.send(&block, b"");
            pair.receive()
        })
        .collect();
    assert_eq!(pair.gpu.leaks().events, EVENTS_MAX);
    assert_eq!(pair.gpu.costs().calls(Call::Wait), 10);
    held.iter().for_each(|received| received.block.use_on(&pair.side).unwrap());
    drop(held);
    // More returns than the socket takes at once.
    while pair.producer.lent() > 0 {
        assert_eq!(pair.receiver.collect(), 0);
    }
    assert_eq!(pair.gpu.leaks().events, 0);
    pair.free(block);
    pair.end();
}

#[test]
fn many_threads_send_over_one_channel() {
    let pair = Pair::new(config(Policy::Ours, true));
    let blocks: Vec<_> = (0..8u64).map(|n| pair.block((1 + 7 * n) * MIB)).collect();
    std::thread::scope(|scope| {
        for (n, block) in blocks.iter().enumerate() {
            let (sender, stream) = (pair.sender.clone(), pair.stream);
            scope.spawn(move || {
                for _ in 0..50 {
                    sender.send(block, &stream, &[n as u8]).unwrap();
                }
            });
        }
        let mut counts = [0; 8];
        for _ in 0..8 * 50 {
            let received = pair.receive();
            let n = usize::from(received.note[0]);
            assert_eq!(received.block.bytes(), blocks[n].bytes());
            counts[n] += 1;
        }
        assert_eq!(counts, [50; 8]);
    });
    pair.producer.settle(Duration::from_secs(20)).unwrap();
    blocks.into_iter().for_each(|block| pair.free(block));
    pair.end();
}

#[test]
fn a_consumer_that_is_gone_has_given_everything_back() {
    for config in kinds() {
        let pair = Pair::new(config);
        let block = pair.block(30 * MIB);
        pair.send(&block, b"received");
        let received = pair.receive();
        pair.send(&block, b"on its way");
        pair.free(block);
        let Pair { alloc, gpu, producer, sender, there, receiver, stream, exchange, .. } = pair;
        there.kill();
        drop((received, receiver));
        assert_eq!((producer.collect(), producer.lent()), (2, 0));
        let block = alloc.allocate(30 * MIB, &stream).unwrap();
        let error = sender.send(&block, &stream, b"").unwrap_err();
        assert!(matches!(error, IpcError::Channel(alloc_shm::Error::PeerGone)), "{error}");
        alloc.free(block).unwrap();
        alloc.check().unwrap();
        drop((sender, producer, alloc));
        gpu.assert_clean();
        assert_eq!(exchange.imports(), 0);
    }
}

/// What is lent stays lent when the producer is dropped, and the allocator still finds it (L6, N5).
#[test]
fn loans_outlive_the_producer() {
    let pair = Pair::on(config(Policy::Pytorch, false), 64 * MIB);
    let block = pair.block(60 * MIB);
    pair.send(&block, b"");
    let received = pair.receive();
    pair.free(block);
    let Pair { alloc, gpu, producer, sender, stream, receiver, .. } = pair;
    drop((producer, sender));
    assert!(alloc.allocate(60 * MIB, &stream).is_err());
    drop(received);
    let block = alloc.allocate(60 * MIB, &stream).unwrap();
    alloc.free(block).unwrap();
    drop(receiver);
    drop(alloc);
    gpu.assert_clean();
}

#[test]
fn mistakes_are_errors_and_lend_nothing() {
    let pair = Pair::new(config(Policy::Ours, false));
    let block = pair.block(MIB);
    let long = pair.sender.send(&block, &pair.stream, &[0; NOTE_BYTES_MAX + 1]).unwrap_err();
    assert!(matches!(long, IpcError::Note { .. }), "{long}");
    let inside = block.addr() + 512;
    let unknown = pair.sender.send_raw(inside, &pair.stream, b"").unwrap_err();
    assert!(matches!(unknown, IpcError::Allocator(AllocError::UnknownAddress { .. })), "{unknown}");
    assert_eq!(pair.producer.lent(), 0);
    pair.sender.send_raw(block.addr(), &pair.stream, &[1; NOTE_BYTES_MAX]).unwrap();
    assert_eq!(pair.receive().note, [1; NOTE_BYTES_MAX]);
    pair.producer.settle(Duration::from_secs(20)).unwrap();
    pair.free(block);
    pair.end();
}

/// A peer that sends something else is refused, message by message.
#[test]
fn nonsense_from_the_peer_is_refused() {
    let pair = Pair::new(config(Policy::Ours, true));
    let (forger, channel) = Channel::pair().unwrap();
    let receiver = Receiver::new(channel, pair.receiver.importer());
    let refused = || match receiver.receive(SOON).unwrap_err() {
        IpcError::Message(why) => why,
        error => panic!("{error}"),
    };
    forger.send_note(b"hello", 0).unwrap();
    refused();
    forger.send_token(b"\x01nonsense", None, 1).unwrap();
    refused();
    forger.lend(b"\x02", None, (), 2).unwrap();
    assert_eq!(refused(), "it is of another version");
    forger.lend(&[1; 60], None, (), 3).unwrap();
    refused();
    assert_eq!(forger.lent(), 0, "what was refused was given back");
    drop(receiver);
    pair.end();
}

/// A device that the consumer does not see: an error, and the block goes back.
#[test]
fn what_cannot_be_opened_goes_back() {
    let pair = Pair::new(config(Policy::Ours, true));
    let elsewhere = mock_backend::MockBackend::builder().device(MIB).device_key(9).build();
    let (one, other) = Channel::pair().unwrap();
    let producer = Producer::new(&pair.alloc);
    let sender = producer.connect(one);
    let importer = alloc_core::share::Importer::new(elsewhere);
    let receiver = Receiver::new(other, &importer);
    let block = pair.block(MIB);
    sender.send(&block, &pair.stream, b"").unwrap();
    let error = receiver.receive(SOON).unwrap_err();
    assert!(matches!(error, IpcError::Import(ImportError::NoSuchDevice(_))), "{error}");
    assert_eq!((producer.collect(), producer.lent()), (1, 0));
    drop((sender, producer));
    pair.free(block);
    pair.end();
}
