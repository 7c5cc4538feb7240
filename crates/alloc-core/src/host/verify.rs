//! The checks that span the parts of an allocator.

use super::backend::{HostBackend, NodeId};
use super::check::{HostViolation, ensure};
use super::engine::{Engine, PoolOf};
use super::home::{BlockRef, Span};
use super::store::Store;
use crate::units::Addr;
use std::collections::BTreeMap;

type Checked = Result<(), HostViolation>;

/// What all pools hold.
#[derive(Default)]
struct Holdings {
    /// Heap spans, by pool.
    spans: Vec<(u32, NodeId, Span)>,
    /// Blocks of classes.
    blocks: Vec<Span>,
    /// Draining blocks, and for how many conditions each waits.
    draining: BTreeMap<BlockRef, u32>,
}

impl<B: HostBackend> Engine<B> {
    pub(crate) fn check(&self) -> Checked {
        let mut holdings = Holdings::default();
        let mut outcome = Ok(());
        self.each_pool(|pool| {
            if outcome.is_ok() {
                outcome = check_pool::<B>(pool, &mut holdings);
            }
        });
        outcome?;
        self.check_conditions(&holdings)?;
        if self.is_ours() { self.check_spans(holdings) } else { self.check_blocks(holdings) }
    }

    /// H5: every draining block is referred to as often as it says.
    fn check_conditions(&self, holdings: &Holdings) -> Checked {
        let mut counted = BTreeMap::<BlockRef, u32>::new();
        let mut count = |block: BlockRef| *counted.entry(block).or_default() += 1;
        self.queue.each(|pending| pending.blocks.iter().for_each(|&block| count(block)));
        self.streams.all().iter().for_each(|stream| stream.each_waiting(|&block| count(block)));
        self.each_pool(|pool| pool.each_held(&mut count));
        ensure(counted == holdings.draining, "H5", || {
            format!("blocks wait for {:?}, they are waited for {counted:?}", holdings.draining)
        })
    }

    /// H8 for policy `ours`.
    fn check_spans(&self, holdings: Holdings) -> Checked {
        let mut spans = holdings.spans;
        spans.sort_by_key(|(_, _, span)| span.base);
        let pins = self.pins.all();
        let pinned: Vec<_> = pins.iter().map(|pin| (pin.pool, pin.node, pin.span)).collect();
        ensure(spans == pinned, "H8", || format!("heaps hold {spans:?}, pinned is {pinned:?}"))
    }

    /// H8 for policy `pytorch`.
    fn check_blocks(&self, holdings: Holdings) -> Checked {
        let (reserve, pieces) =
            self.reserve.pieces().map_or((None, Vec::new()), |(span, pieces)| (Some(span), pieces));
        let in_reserve = |addr: Addr| {
            reserve.is_some_and(|span| addr >= span.base && addr - span.base < span.bytes)
        };
        let (mut inside, mut own): (Vec<_>, Vec<_>) =
            holdings.blocks.into_iter().partition(|block| in_reserve(block.base));
        inside.sort();
        own.extend(reserve);
        own.sort();
        let pinned: Vec<_> = self.pins.all().iter().map(|pin| pin.span).collect();
        ensure(own == pinned, "H8", || format!("blocks are {own:?}, pinned is {pinned:?}"))?;
        let inside: Vec<_> = inside.iter().map(|block| block.base).collect();
        ensure(inside == pieces, "H8", || {
            format!("blocks in the reserve are at {inside:?}, its pieces at {pieces:?}")
        })
    }
}

fn check_pool<B: HostBackend>(pool: &PoolOf<B>, holdings: &mut Holdings) -> Checked {
    let mut draining = Vec::new();
    match &pool.store {
        Store::Classes(classes) => classes.check(&mut holdings.blocks, &mut draining)?,
        Store::Slabs(slabs) => {
            let mut spans = Vec::new();
            slabs.check(&mut spans, &mut draining)?;
            let spans = spans.into_iter().map(|(node, span)| (pool.slot, node, span));
            holdings.spans.extend(spans);
        }
    }
    for (home, id, pending) in draining {
        holdings.draining.insert(BlockRef { pool: pool.slot, home, id }, pending);
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::heap::Cut;
    use super::*;
    use crate::backend::{BackendError, Completion, ErrorKind, Refused, Stream};
    use crate::host::{
        HostAllocation, HostAllocator, HostConfig, HostError, PinRequest, PinnedSegment,
    };
    use crate::units::{DeviceId, StreamId};
    use std::fmt;
    use std::sync::Mutex;
    use std::time::Duration;

    /// Pins where it is told to; no event is ever reached.
    #[derive(Debug, Default)]
    struct Told(Mutex<Vec<(u64, u64)>>);

    #[derive(Clone, Debug)]
    struct One;

    #[derive(Debug)]
    struct Pinned(Addr, u64);

    #[derive(Debug)]
    struct Failed;

    impl fmt::Display for Failed {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("failed")
        }
    }

    impl std::error::Error for Failed {}

    impl BackendError for Failed {
        fn kind(&self) -> ErrorKind {
            ErrorKind::Other
        }
    }

    impl Stream for One {
        fn id(&self) -> StreamId {
            StreamId::new(1)
        }

        fn device(&self) -> DeviceId {
            DeviceId::new(0)
        }
    }

    impl PinnedSegment for Pinned {
        fn base(&self) -> Addr {
            self.0
        }

        fn bytes(&self) -> u64 {
            self.1
        }
    }

    impl HostBackend for Told {
        type Stream = One;
        type Event = ();
        type Pinned = Pinned;
        type Error = Failed;

        fn node_count(&self) -> u16 {
            1
        }

        fn node_of(&self, _: DeviceId) -> Option<NodeId> {
            Some(NodeId::new(0))
        }

        fn pin(&self, _: &PinRequest) -> Result<Pinned, Failed> {
            let (base, bytes) = self.0.lock().expect("not poisoned").pop().ok_or(Failed)?;
            Ok(Pinned(Addr::new(base), bytes))
        }

        fn unpin(&self, _: Pinned) -> Result<(), Refused<Pinned, Failed>> {
            Ok(())
        }

        fn record(&self, _: &One) -> Result<(), Failed> {
            Ok(())
        }

        fn query(&self, _: &()) -> Result<Completion, Failed> {
            Ok(Completion::Pending)
        }

        fn wait(&self, _: &()) -> Result<(), Failed> {
            Ok(())
        }

        fn now(&self) -> Duration {
            Duration::ZERO
        }
    }

    const MIB: u64 = 1 << 20;

    type Host = HostAllocator<Told>;

    fn host(config: HostConfig, pins: &[(u64, u64)]) -> Host {
        let pins = pins.iter().rev().copied().collect();
        HostAllocator::new(Told(Mutex::new(pins)), config).expect("valid")
    }

    /// A small live block, a used and freed one, and a free one, in one segment each way.
    fn busy(config: HostConfig) -> (Host, Vec<HostAllocation>) {
        let pins = [(64 * MIB, 2 * MIB), (80 * MIB, 2 * MIB), (96 * MIB, 2 * MIB)];
        let host = host(config, &pins);
        let [live, used, free] = [(); 3].map(|()| host.allocate(4096).expect("memory"));
        host.record_use(&used, &One).expect("live");
        host.free(used).expect("freed");
        host.free(free).expect("freed");
        assert_eq!(host.check(), Ok(()));
        (host, vec![live])
    }

    fn configs() -> [HostConfig; 2] {
        [HostConfig::pytorch(), HostConfig { batch_blocks_max: 1, ..HostConfig::ours() }]
    }

    /// Every kept fact is compared: breaking one is noticed, under its name.
    #[test]
    fn check_names_what_is_broken() {
        type Break = fn(&Engine<Told>);
        let broken: [(&str, Break); 4] = [
            ("H5", |engine| drop(engine.queue.pop())),
            ("H5", |engine| {
                let pending = engine.queue.pop().expect("one");
                let twice = pending.blocks[0];
                engine.queue.put_back(pending);
                engine.streams.all()[0].add(twice, 4096);
            }),
            ("H6", |engine| {
                engine.each_pool(|pool| pool.store.each_ledger(|ledger| ledger.start(64, 64)));
            }),
            ("H8", |engine| {
                let base = engine.pins.all()[0].span.base;
                engine.pins.unpin(&engine.backend, base).expect("never fails");
            }),
        ];
        for config in configs() {
            for (name, break_it) in broken {
                let (host, live) = busy(config.clone());
                break_it(host.engine());
                assert_eq!(host.check().expect_err(name).invariant, name);
                // Neither can be put right again, nor given back.
                std::mem::forget((host, live));
            }
        }
    }

    /// H7: a run that a shard no longer holds is still lent.
    #[test]
    fn a_lost_run_is_noticed() {
        let (host, live) = busy(configs()[1].clone());
        live.into_iter().for_each(|block| host.free(block).expect("freed"));
        let Store::Slabs(slabs) = &host.engine().pools.default_pool().store else {
            panic!("policy ours has slabs")
        };
        let pending = host.engine().queue.pop().expect("one");
        assert_eq!(host.engine().reached(pending.into_inner()), 1);
        let shard = 1;
        slabs.heap(shard).consolidate();
        assert_eq!(slabs.heap(shard).remove_idle_beyond(0).len(), 1);
        assert_eq!(host.check().expect_err("lost").invariant, "H7");
        std::mem::forget(host);
    }

    /// A miss takes what the shard of another thread has free, but not every miss.
    #[test]
    fn shards_are_searched_once_for_a_share_of_the_memory() {
        let host = host(HostConfig::ours(), &[(512 * MIB, 2 * MIB)]);
        let Store::Slabs(slabs) = &host.engine().pools.default_pool().store else {
            panic!("policy ours has slabs")
        };
        let (node, other_shard) = (NodeId::new(0), 2);
        slabs.restore(node, Span { base: Addr::new(64 * MIB), bytes: 128 * MIB });
        let run = slabs.borrow_run(other_shard, 128 * MIB, MIB, Cut::Freely).expect("free");
        slabs.heap(other_shard).add_run(run);
        let found = host.allocate(4096).expect("another shard has it");
        assert_eq!((found.context().block.home, host.engine().pins.bytes()), (other_shard, 0));
        let pinned = host.allocate(4096).expect("memory");
        assert_ne!(pinned.context().block.home, other_shard);
        assert_eq!(host.engine().pins.bytes(), 2 * MIB);
        // The memory that the test made up was never pinned.
        std::mem::forget((host, found, pinned));
    }

    /// H2 and alignment: a backend that breaks its contract is refused, and nothing has changed.
    #[test]
    fn impossible_segments_are_refused() {
        let ours = HostConfig::ours();
        let impossible = [
            (65 * MIB, 2 * MIB, "overlaps"),
            (63 * MIB, 2 * MIB, "overlaps"),
            (80 * MIB + 8, 2 * MIB, "does not start"),
            (0, 2 * MIB, "does not start"),
            (u64::MAX - 4095, 2 * MIB, "does not start"),
            (80 * MIB, MIB, "shorter"),
        ];
        for (base, bytes, expected) in impossible {
            let pins = [(64 * MIB, 2 * MIB), (base, bytes), (96 * MIB, 2 * MIB)];
            let host = host(ours.clone(), &pins);
            let first = host.allocate(2 * MIB).expect("memory");
            match host.allocate(2 * MIB) {
                Err(HostError::BadSegment { why, .. }) => assert!(why.contains(expected), "{why}"),
                other => panic!("{other:?}"),
            }
            assert_eq!(host.check(), Ok(()));
            let second = host.allocate(2 * MIB).expect("a good one");
            host.free(first).expect("freed");
            host.free(second).expect("freed");
        }
    }
}
