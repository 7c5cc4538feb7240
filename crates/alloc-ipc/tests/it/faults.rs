//! Every call of either process fails once, and from then on, while blocks go to and fro.

use crate::pair::*;
use alloc_core::AllocError;
use alloc_core::backend::ErrorKind;
use alloc_core::share::ImportError;
use alloc_ipc::IpcError;
use mock_backend::{Fault, MockError};
use std::time::Duration;

#[track_caller]
fn acceptable(error: &IpcError<MockError>) {
    let source = match error {
        IpcError::Backend { source, .. }
        | IpcError::Allocator(AllocError::Backend { source, .. })
        | IpcError::Import(ImportError::Backend { source, .. }) => source,
        error => panic!("{error}"),
    };
    assert!(source.is_injected(), "{error}");
}

fn play(pair: &Pair) {
    let blocks: Vec<_> = [3, 50, 3]
        .iter()
        .filter_map(|n| {
            let block = pair.alloc.allocate(n * MIB, &pair.stream).ok()?;
            pair.gpu.judge().allocated(block.addr(), block.bytes(), &pair.stream);
            Some(block)
        })
        .collect();
    let mut held = Vec::new();
    for block in &blocks {
        match pair.sender.send(block, &pair.stream, b"") {
            Ok(()) => match pair.receiver.receive(SOON) {
                Ok(received) => held.push(received),
                Err(error) => acceptable(&error),
            },
            Err(error) => acceptable(&error),
        }
    }
    for received in &held {
        let _ = received.block.use_on(&pair.side);
    }
    for block in blocks {
        let addr = block.addr();
        let bytes = pair.gpu.judge().freed(addr);
        if let Err(refused) = pair.alloc.free(block) {
            pair.gpu.judge().still_live(addr, bytes.unwrap());
            std::mem::forget(refused);
        }
    }
    drop(held);
    pair.receiver.importer().collect();
}

#[test]
fn every_call_fails() {
    for config in kinds() {
        for consumer_fails in [false, true] {
            for lasting in [false, true] {
                for kind in [ErrorKind::OutOfMemory, ErrorKind::Other] {
                    let sweep = (1..).take_while(|n| {
                        let pair = Pair::new(config.clone());
                        let fault = if lasting { Fault::from(*n) } else { Fault::nth(*n) };
                        let victim = if consumer_fails { &pair.there } else { &pair.gpu };
                        victim.set_faults([fault.kind(kind)]);
                        play(&pair);
                        let struck = victim.fault_counts().1 > 0;
                        pair.gpu.set_faults([]);
                        pair.there.set_faults([]);
                        pair.receiver.importer().collect();
                        pair.producer.settle(Duration::from_secs(20)).unwrap();
                        for (addr, _) in pair.gpu.leaks().allocations {
                            pair.gpu.judge().freed(addr);
                            pair.alloc.free_raw(addr).unwrap();
                        }
                        pair.end();
                        struck
                    });
                    assert!(sweep.count() > 4);
                }
            }
        }
    }
}
