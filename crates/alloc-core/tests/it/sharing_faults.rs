//! Sharing with failures at every call, and at random.

use crate::rig::*;
use crate::sharing::{Consumer, Held, KINDS, producer};
use alloc_core::backend::{BackendError, ErrorKind, Share, Token};
use alloc_core::share::{ImportCounts, ImportError};
use alloc_core::{AllocError, Allocation, Policy};
use mock_backend::{Exchange, Fault, MockError, MockSharedEvent, MockStream, Rng};
use std::fs::File;

/// Two processes that share; either may meet failures.
struct Pair {
    exchange: Exchange,
    rig: Rig,
    consumer: Consumer,
}

impl Pair {
    fn new(policy: Policy, text: &str) -> Self {
        let exchange = Exchange::new();
        let (rig, consumer) = (producer(&exchange, policy, text), Consumer::new(&exchange));
        Pair { exchange, rig, consumer }
    }

    /// Shares a block and opens it; `None` if an injected failure was in the way.
    fn send(&self, block: &Allocation) -> Option<Held> {
        let export = match self.rig.share(block) {
            Ok(export) => export,
            Err(AllocError::Backend { source, .. }) => return refused(&source),
            Err(error) => panic!("{error}"),
        };
        self.rig.verify();
        match self.consumer.open(export, None) {
            Ok(held) => Some(held),
            Err(ImportError::Backend { source, .. }) => refused(&source),
            Err(error) => panic!("{error}"),
        }
    }

    /// Blocks of two segments or of several pages, some shared twice, some used, in and out of order.
    fn play(&self) {
        let s0 = self.rig.s(0);
        let blocks = [3 * MIB, 50 * MIB, 3 * MIB].map(|bytes| self.rig.try_alloc(bytes, &s0).ok());
        let held: Vec<Option<Held>> =
            blocks.iter().flatten().map(|block| self.send(block)).collect();
        for one in held.iter().flatten().take(2) {
            // A stream that cannot wait does not use the block.
            let _ = one.work_on(&self.consumer.stream);
        }
        for block in blocks.into_iter().flatten() {
            let _ = self.rig.try_free(block);
        }
        let mut held = held.into_iter();
        drop(held.next());
        self.consumer.backend.pass(&self.consumer.stream);
        self.consumer.importer.collect();
        drop(held);
        let _ = self.rig.empty_cache();
        self.rig.verify();
    }

    /// With both drivers well again everything can be given back.
    fn settle(self) {
        let Pair { exchange, rig, consumer } = self;
        rig.backend.set_faults([]);
        consumer.backend.set_faults([]);
        consumer.importer.collect();
        assert_eq!(consumer.importer.collect(), 0);
        assert_eq!(consumer.importer.counts(), ImportCounts::default());
        assert_eq!((exchange.imports(), exchange.borrows()), (0, 0));
        rig.free_all();
        rig.empty();
        assert_eq!(rig.reserved(), 0, "nothing is pending");
        consumer.end();
    }
}

fn refused<T>(source: &MockError) -> Option<T> {
    assert!(source.is_injected(), "{source}");
    None
}

/// Each call of the producer, and each of the consumer, fails once, and from then on.
#[test]
fn every_call_fails() {
    for policy in BOTH {
        for text in KINDS {
            for kind in [ErrorKind::OutOfMemory, ErrorKind::Other] {
                for consumer_fails in [false, true] {
                    for lasting in [false, true] {
                        let sweep = (1..).take_while(|n| {
                            let pair = Pair::new(policy, text);
                            let fault =
                                if lasting { Fault::from(*n) } else { Fault::nth(*n) }.kind(kind);
                            let victim = if consumer_fails {
                                &pair.consumer.backend
                            } else {
                                &pair.rig.backend
                            };
                            victim.set_faults([fault]);
                            pair.play();
                            let struck = victim.fault_counts().1 > 0;
                            pair.settle();
                            struck
                        });
                        assert!(sweep.count() > 6, "{policy:?} {text} {consumer_fails}");
                    }
                }
            }
        }
    }
}

/// The driver of the consumer goes away in the middle: nothing panics, the producer hears of it.
#[test]
fn a_lost_device_ends_all_work() {
    for text in KINDS {
        let pair = Pair::new(Policy::Ours, text);
        let block = pair.rig.alloc(20 * MIB, &pair.rig.s(0));
        let held = pair.send(&block).unwrap();
        held.work_on(&pair.consumer.stream).unwrap();
        pair.rig.free(block);
        pair.consumer.backend.unload();
        drop(held);
        assert_eq!(pair.consumer.importer.collect(), 0);
        pair.consumer.backend.kill();
        pair.rig.empty();
        assert_eq!(pair.rig.reserved(), 0);
    }
}

/// A block that is lent out, with what the producer's transport keeps for it.
struct Lent {
    held: Held,
    _ready: Option<MockSharedEvent>,
}

/// Several producers and consumers at random, with failures at random, killed consumers included.
fn random(seed: u64, steps: u64, faults: f64) {
    let mut rng = Rng::new(seed);
    let exchange = Exchange::new();
    let texts = ["", "expandable_segments:True"];
    let rigs: Vec<Rig> = (0..4).map(|n| producer(&exchange, BOTH[n % 2], texts[n / 2])).collect();
    let mut consumers: Vec<Consumer> = (0..3).map(|_| Consumer::new(&exchange)).collect();
    if faults > 0.0 {
        let all = rigs.iter().map(|rig| &rig.backend);
        for (n, backend) in all.chain(consumers.iter().map(|c| &c.backend)).enumerate() {
            backend.set_faults([Fault::chance(seed * 31 + n as u64, faults)]);
        }
    }
    let mut blocks: Vec<Vec<Allocation>> = rigs.iter().map(|_| Vec::new()).collect();
    let mut lent: Vec<Vec<Lent>> = consumers.iter().map(|_| Vec::new()).collect();
    let pick = |rng: &mut Rng, len: usize| rng.below(len as u64) as usize;
    for _ in 0..steps {
        let p = pick(&mut rng, rigs.len());
        let c = pick(&mut rng, consumers.len());
        let (rig, stream) = (&rigs[p], rigs[p].s(pick(&mut rng, 3)));
        match rng.below(100) {
            0..35 => {
                let large = rng.chance(0.4);
                let bytes = if large { rng.below(40) * MIB + KIB } else { rng.below(MIB) + 1 };
                if blocks[p].len() < 40
                    && let Ok(block) = rig.try_alloc(bytes, &stream)
                {
                    blocks[p].push(block);
                }
            }
            35..60 if !blocks[p].is_empty() => {
                let at = pick(&mut rng, blocks[p].len());
                let block = blocks[p].swap_remove(at);
                if let Err((block, _)) = rig.try_free(block) {
                    blocks[p].push(block);
                }
            }
            60..80 if !blocks[p].is_empty() && lent[c].len() < 30 => {
                let block = &blocks[p][pick(&mut rng, blocks[p].len())];
                lend(rig, &consumers[c], block, &stream, &mut lent[c]);
            }
            80..85 if !lent[c].is_empty() => {
                let at = pick(&mut rng, lent[c].len());
                let _ = lent[c][at].held.work_on(&consumers[c].stream);
            }
            85..95 if !lent[c].is_empty() => {
                let at = pick(&mut rng, lent[c].len());
                drop(lent[c].swap_remove(at));
            }
            95 => consumers[c].backend.pass(&consumers[c].stream),
            96 => drop(rig.empty_cache()),
            97 if rng.chance(0.2) => {
                consumers[c].backend.kill();
                lent[c].clear();
                consumers[c] = Consumer::new(&exchange);
            }
            _ => {
                consumers[c].importer.collect();
            }
        }
    }
    for (consumer, lent) in consumers.into_iter().zip(lent) {
        consumer.backend.set_faults([]);
        drop(lent);
        consumer.backend.pass(&consumer.stream);
        consumer.importer.collect();
        assert_eq!(consumer.importer.collect(), 0);
        consumer.end();
    }
    assert_eq!((exchange.imports(), exchange.borrows()), (0, 0));
    for rig in &rigs {
        rig.backend.set_faults([]);
        rig.free_all();
        rig.empty();
        assert_eq!(rig.reserved(), 0);
    }
}

fn lend(
    rig: &Rig,
    consumer: &Consumer,
    block: &Allocation,
    stream: &MockStream,
    lent: &mut Vec<Lent>,
) {
    let ready: Option<(MockSharedEvent, Token<File>)> = rig.backend.export_event(stream).ok();
    let Ok(export) = rig.share(block) else { return };
    let (event, token) = ready.unzip();
    match consumer.open(export, token) {
        Ok(held) => lent.push(Lent { held, _ready: event }),
        Err(ImportError::Backend { source, .. }) => {
            assert!(source.is_injected() || source.kind() == ErrorKind::OutOfMemory, "{source}");
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn random_sharing_is_clean() {
    for seed in 0..12 {
        random(seed, 1500, 0.0);
    }
}

#[test]
fn random_sharing_with_failures_is_clean() {
    for seed in 100..112 {
        random(seed, 1500, 0.02);
    }
}
