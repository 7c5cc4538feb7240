//! Blocks that other processes use: simulated processes of one machine, each with its judge.

use crate::rig::*;
use alloc_core::backend::{DeviceKey, ErrorKind, Token, TokenKind};
use alloc_core::share::{ImportCounts, ImportError, Imported, Importer, PieceKind};
use alloc_core::{
    Addr, AllocError, Allocation, BlockStatus, CachingAllocator, Export, Policy, ShareHold,
};
use mock_backend::{Builder, Call, Exchange, MockBackend, MockError, MockStream, Rng, Work};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

pub(crate) const KINDS: [&str; 2] = ["", "expandable_segments:True"];
/// Handles of few sizes, no margin: memory moves at every occasion.
const MOVING: &str = "expandable_segments:True,ours_margin:0,ours_margin_min_mb:0,\
                      ours_handle_max_mb:6,ours_handle_calm_mb:6,ours_ahead:1";

fn file(bytes: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes).unwrap();
    file
}

fn process(exchange: &Exchange) -> Builder {
    MockBackend::builder().device(GIB).exchange(exchange).payloads(file)
}

pub(crate) fn producer(exchange: &Exchange, policy: Policy, text: &str) -> Rig {
    Rig::on(process(exchange), policy, text)
}

/// A process that opens what it is sent.
pub(crate) struct Consumer {
    pub(crate) backend: MockBackend,
    pub(crate) importer: Importer<MockBackend>,
    pub(crate) stream: MockStream,
}

/// What a block's transport holds for the consumer: tells the judge, then lets the producer go on.
pub(crate) struct Lease {
    backend: MockBackend,
    at: Arc<Mutex<Addr>>,
    hold: Option<ShareHold<MockBackend>>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.backend.judge().returned(*self.at.lock().unwrap());
        drop(self.hold.take());
    }
}

/// A block in the consumer's hands.
pub(crate) struct Held {
    backend: MockBackend,
    pub(crate) block: Option<Imported<MockBackend>>,
}

impl Held {
    pub(crate) fn addr(&self) -> Addr {
        self.block.as_ref().unwrap().addr()
    }

    fn bytes(&self) -> u64 {
        self.block.as_ref().unwrap().bytes()
    }

    /// Queues work on the block that ends when told.
    pub(crate) fn work_on(&self, stream: &MockStream) -> Result<(), ImportError<MockError>> {
        self.block.as_ref().unwrap().use_on(stream)?;
        self.backend.launch(stream, Work::new().touching(self.addr(), self.bytes()));
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.backend.judge().given_up(self.addr());
        self.block = None;
    }
}

impl Consumer {
    pub(crate) fn new(exchange: &Exchange) -> Self {
        let backend = process(exchange).strict().log(100_000).build();
        let stream = backend.default_stream(DEV0);
        Consumer { importer: Importer::new(backend.clone()), backend, stream }
    }

    pub(crate) fn open(
        &self,
        export: Export<MockBackend>,
        ready: Option<Token<File>>,
    ) -> Result<Held, ImportError<MockError>> {
        let Export { block, tokens, hold } = export;
        let at = Arc::new(Mutex::new(Addr::NULL));
        let lease = Lease { backend: self.backend.clone(), at: Arc::clone(&at), hold: Some(hold) };
        let same = ready.as_ref().map(again);
        let imported = self.importer.open(&block, tokens, ready, lease)?;
        *at.lock().unwrap() = imported.addr();
        let (addr, bytes) = (imported.addr(), imported.bytes());
        self.backend.judge().borrowed(addr, bytes, &self.stream, same.as_ref());
        Ok(Held { backend: self.backend.clone(), block: Some(imported) })
    }

    fn calls(&self, call: Call) -> usize {
        self.backend.take_log().iter().filter(|entry| entry.info.call == call).count()
    }

    /// The process ends in good order.
    pub(crate) fn end(self) {
        let Consumer { backend, importer, .. } = self;
        drop(importer);
        backend.assert_clean();
    }
}

fn again(token: &Token<File>) -> Token<File> {
    Token { kind: token.kind, bytes: token.bytes.clone(), descriptor: None }
}

/// Writes a mark at each end of every 64 KiB of the block.
fn places(bytes: u64) -> impl Iterator<Item = u64> {
    (0..bytes / (64 * KIB)).flat_map(|n| [n * 64 * KIB, (n + 1) * 64 * KIB - 8])
}

fn write(backend: &MockBackend, addr: Addr, bytes: u64, seed: u64) {
    for offset in places(bytes) {
        let (file, at) = backend.payload(addr + offset).expect("it was exported");
        file.write_all_at(&(seed + offset).to_le_bytes(), at).unwrap();
    }
}

fn verify(backend: &MockBackend, addr: Addr, bytes: u64, seed: u64) {
    for offset in places(bytes) {
        let (file, at) = backend.payload(addr + offset).expect("it was imported");
        let mut word = [0; 8];
        file.read_exact_at(&mut word, at).unwrap();
        assert_eq!(u64::from_le_bytes(word), seed + offset, "{offset} bytes into {addr}");
    }
}

fn status(rig: &Rig, addr: Addr) -> BlockStatus {
    let segments = rig.snapshot(DEV0).unwrap().segments;
    let mut blocks = segments.into_iter().flat_map(|segment| segment.blocks);
    blocks.find(|block| block.addr == addr).expect("a block starts there").status
}

/// L1: two blocks of one segment name the same memory, with their offsets; it is opened once and
/// closed with the last; the producer's memory is not used again before that.
#[test]
fn slices_of_a_segment_are_opened_once() {
    for (policy, text) in [(Policy::Pytorch, ""), (Policy::Ours, ""), (Policy::Pytorch, KINDS[1])] {
        let exchange = Exchange::new();
        let rig = producer(&exchange, policy, text);
        let consumer = Consumer::new(&exchange);
        let s0 = rig.s(0);
        let (a, b) = (rig.alloc(2 * MIB, &s0), rig.alloc(2 * MIB, &s0));
        let (first, second) = (rig.share(&a).unwrap(), rig.share(&b).unwrap());
        assert_eq!(first.block.pieces, second.block.pieces, "{policy:?} {text}");
        assert_eq!(second.block.offset - first.block.offset, b.addr() - a.addr());
        write(&rig.backend, a.addr(), a.bytes(), 1);
        write(&rig.backend, b.addr(), b.bytes(), 1 << 40);
        let (one, two) =
            (consumer.open(first, None).unwrap(), consumer.open(second, None).unwrap());
        verify(&consumer.backend, one.addr(), one.bytes(), 1);
        verify(&consumer.backend, two.addr(), two.bytes(), 1 << 40);
        assert_eq!(two.addr() - one.addr(), b.addr() - a.addr());
        let open = ImportCounts { pieces: 1, spans: 1, leaving: 0 };
        assert_eq!(consumer.importer.counts(), open);

        let addr = a.addr();
        rig.free(a);
        assert_eq!(status(&rig, addr), BlockStatus::PendingFree);
        let other = rig.alloc(2 * MIB, &s0);
        assert_ne!(other.addr(), addr);
        drop(one);
        assert_eq!(consumer.importer.counts(), open, "the second is still used");
        let again = rig.alloc(2 * MIB, &s0);
        assert_eq!(again.addr(), addr);
        drop(two);
        assert_eq!(consumer.importer.counts(), ImportCounts::default());
        rig.free(b);
        assert_eq!((exchange.imports(), exchange.borrows()), (0, 0));
        consumer.end();
    }
}

/// L2: exports of one block are worth the same, and the receiver has one mapping for all.
#[test]
fn exporting_twice_is_opening_once() {
    for policy in BOTH {
        for text in KINDS {
            let exchange = Exchange::new();
            let rig = producer(&exchange, policy, text);
            let consumer = Consumer::new(&exchange);
            let a = rig.alloc(50 * MIB, &rig.s(0));
            let (first, second) = (rig.share(&a).unwrap(), rig.share_raw(a.addr()).unwrap());
            assert_eq!(first.block, second.block);
            let pieces = first.block.pieces.len();
            let one = consumer.open(first, None).unwrap();
            let two = consumer.open(second, None).unwrap();
            assert_eq!(two.addr(), one.addr());
            let kind = if text.is_empty() { Call::OpenSegment } else { Call::ImportPage };
            assert_eq!(consumer.calls(kind), pieces);
            rig.free(a);
            drop(two);
            assert_eq!((exchange.imports(), exchange.borrows() > 0), (pieces, true));
            drop(one);
            assert_eq!(exchange.imports(), 0);
            consumer.end();
        }
    }
}

/// A segment in a place where another was is another segment.
#[test]
fn a_new_segment_in_an_old_place_is_opened_anew() {
    for text in KINDS {
        let exchange = Exchange::new();
        let rig = producer(&exchange, Policy::Pytorch, text);
        let mut ids = Vec::new();
        for _ in 0..3 {
            let block = rig.alloc(20 * MIB, &rig.s(0));
            let export = rig.share(&block).unwrap();
            ids.push((block.addr(), export.block.pieces[0].id));
            drop(export);
            rig.free(block);
            rig.empty();
        }
        assert!(ids.iter().all(|(addr, _)| *addr == ids[0].0), "the simulator reuses addresses");
        assert!(ids[0].1 != ids[1].1 && ids[1].1 != ids[2].1 && ids[0].1 != ids[2].1);
    }
}

/// Every order in which the client frees, a side stream finishes and two consumers end leaves the
/// block free in the end, and not before.
#[test]
fn a_block_is_free_when_everyone_is_done_in_any_order() {
    const ENDS: [&str; 4] = ["free", "pass", "one", "two"];
    let orders = (0..256).map(|n| [n & 3, n >> 2 & 3, n >> 4 & 3, n >> 6]);
    let orders = orders.filter(|order| (0..4).all(|end| order.contains(&end)));
    for order in orders {
        for policy in BOTH {
            let exchange = Exchange::new();
            let rig = producer(&exchange, policy, "expandable_segments:True");
            let (s0, s1) = (rig.s(0), rig.s(1));
            let block = rig.alloc(20 * MIB, &s0);
            let addr = block.addr();
            let (one, two) = (rig.share(&block).unwrap(), rig.share(&block).unwrap());
            rig.busy(&s1);
            rig.record(&block, &s1);
            let (mut block, mut holds) = (Some(block), [Some(one.hold), Some(two.hold)]);
            for (done, end) in order.into_iter().enumerate() {
                match ENDS[end] {
                    "free" => rig.free(block.take().unwrap()),
                    "pass" => rig.pass(&s1),
                    "one" => holds[0] = None,
                    _ => holds[1] = None,
                }
                rig.verify();
                if block.is_none() {
                    // Looks at the events, too.
                    let next = rig.alloc(20 * MIB, &s0);
                    assert_eq!(next.addr() == addr, done == 3, "{order:?} at {done}");
                    rig.free(next);
                }
            }
        }
    }
}

/// A share that ends before the block is freed leaves no trace.
#[test]
fn a_share_that_ended_does_not_delay_the_free() {
    let exchange = Exchange::new();
    let rig = producer(&exchange, Policy::Ours, "");
    let block = rig.alloc(4 * MIB, &rig.s(0));
    let addr = block.addr();
    drop(rig.share(&block).unwrap());
    rig.verify();
    rig.free(block);
    assert_eq!(status(&rig, addr), BlockStatus::Inactive);
}

/// With policy ours a block may lie over parts of several handles. The consumer sees its bytes in
/// their order, and nothing moves while it does.
#[test]
fn a_block_over_several_handles_arrives_in_order() {
    let mut most = 0;
    for seed in 0..20 {
        let exchange = Exchange::new();
        let rig = producer(&exchange, Policy::Ours, MOVING);
        let consumer = Consumer::new(&exchange);
        let mut rng = Rng::new(seed);
        let mut blocks: Vec<Allocation> = Vec::new();
        let mut lent: Vec<(Addr, u64, u64, Held)> = Vec::new();
        for step in 0..60u64 {
            let bytes = (1 + rng.below(25)) * MIB + rng.below(2) * 512 * KIB;
            if blocks.len() > 12 || rng.chance(0.3) && !blocks.is_empty() {
                let at = rng.below(blocks.len() as u64) as usize;
                rig.free(blocks.swap_remove(at));
            } else if rig.reserved() + bytes < GIB / 2 {
                let block = rig.alloc(bytes, &rig.s(0));
                if rng.chance(0.5) {
                    let export = rig.share(&block).unwrap();
                    most = most.max(export.block.pieces.len());
                    write(&rig.backend, block.addr(), block.bytes(), step << 32);
                    let held = consumer.open(export, None).unwrap();
                    lent.push((block.addr(), block.bytes(), step << 32, held));
                }
                blocks.push(block);
            }
            if lent.len() > 6 {
                let (_, bytes, seed, held) = lent.remove(0);
                verify(&consumer.backend, held.addr(), bytes, seed);
            }
        }
        for (addr, bytes, seed, held) in lent {
            verify(&rig.backend, addr, bytes, seed);
            verify(&consumer.backend, held.addr(), bytes, seed);
        }
        blocks.into_iter().for_each(|block| rig.free(block));
        rig.empty();
        assert_eq!((rig.reserved(), exchange.imports()), (0, 0));
        consumer.end();
    }
    assert!(most >= 5, "blocks of {most} pieces at most");
}

/// Opening many small blocks takes the address space of their pages, no more.
#[test]
fn imports_reserve_only_what_they_span() {
    let exchange = Exchange::new();
    let rig = producer(&exchange, Policy::Pytorch, "expandable_segments:True");
    let consumer = Consumer::new(&exchange);
    // Small blocks, of pages of 2 MiB.
    let blocks: Vec<_> = (0..200).map(|_| rig.alloc(MIB, &rig.s(0))).collect();
    let held: Vec<_> =
        blocks.iter().map(|b| consumer.open(rig.share(b).unwrap(), None).unwrap()).collect();
    let log = consumer.backend.take_log();
    let reserved = log.iter().filter(|entry| entry.info.call == Call::Reserve);
    let reserved: u64 = reserved.map(|entry| entry.info.bytes).sum();
    assert_eq!(reserved, 200 * MIB, "two blocks lie in each page");
    drop(held);
    blocks.into_iter().for_each(|block| rig.free(block));
    consumer.end();

    // The upstream test: four pages shared, four to five reserved.
    let consumer = Consumer::new(&exchange);
    let large = rig.alloc(80 * MIB, &rig.s(1));
    let export = rig.share(&large).unwrap();
    assert_eq!(export.block.pieces.len(), 4);
    let held = consumer.open(export, None).unwrap();
    let reserved: u64 =
        consumer.backend.leaks().reservations.into_iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(reserved, 80 * MIB);
    drop(held);
    rig.free(large);
    consumer.end();
}

/// Dropping an import waits for nothing; the producer hears of it when the work is done.
#[test]
fn work_on_an_import_delays_its_return() {
    for text in KINDS {
        let exchange = Exchange::new();
        let rig = producer(&exchange, Policy::Ours, text);
        let consumer = Consumer::new(&exchange);
        let side = consumer.backend.stream(DEV0);
        let block = rig.alloc(20 * MIB, &rig.s(0));
        let addr = block.addr();
        let held = consumer.open(rig.share(&block).unwrap(), None).unwrap();
        held.work_on(&consumer.stream).unwrap();
        held.work_on(&side).unwrap();
        rig.free(block);
        drop(held);
        assert_eq!(consumer.importer.counts().leaving, 1);
        assert_eq!(consumer.importer.collect(), 1);
        consumer.backend.pass(&consumer.stream);
        assert_eq!(consumer.importer.collect(), 1);
        assert_eq!(status(&rig, addr), BlockStatus::PendingFree);
        consumer.backend.pass(&side);
        assert_eq!(consumer.importer.collect(), 0);
        assert_eq!(status(&rig, addr), BlockStatus::Inactive);
        consumer.end();
    }
}

/// The last handle of an importer waits for the work and gives everything back.
#[test]
fn an_importer_ends_in_good_order() {
    let exchange = Exchange::new();
    let rig = producer(&exchange, Policy::Ours, "expandable_segments:True");
    let consumer = Consumer::new(&exchange);
    let block = rig.alloc(20 * MIB, &rig.s(0));
    let held = consumer.open(rig.share(&block).unwrap(), None).unwrap();
    held.work_on(&consumer.stream).unwrap();
    drop(held);
    consumer.end();
    assert_eq!((exchange.imports(), exchange.borrows()), (0, 0));
    rig.free(block);
}

/// Work on an import waits for what the producer did before it shared the block.
#[test]
fn uses_wait_for_the_producer() {
    use alloc_core::backend::Share;
    let exchange = Exchange::new();
    let rig = producer(&exchange, Policy::Ours, "");
    let consumer = Consumer::new(&exchange);
    let block = rig.alloc(20 * MIB, &rig.s(0));
    rig.busy(&rig.s(0));
    rig.touch(&block, &rig.s(0));
    let (event, ready) = rig.backend.export_event(&rig.s(0)).unwrap();
    let held = consumer.open(rig.share(&block).unwrap(), Some(ready)).unwrap();
    held.work_on(&consumer.stream).unwrap();
    assert_eq!(consumer.calls(Call::AwaitEvent), 1);
    held.work_on(&consumer.stream).unwrap();
    assert_eq!(consumer.calls(Call::AwaitEvent), 0, "once a stream is enough");
    drop(event);
    let side = consumer.backend.stream(DEV0);
    assert!(held.work_on(&side).is_err(), "the producer's event is gone");
    rig.pass(&rig.s(0));
    consumer.backend.pass(&consumer.stream);
    drop(held);
    rig.free(block);
    consumer.end();
}

/// A consumer is killed: its transport drops what it held. A producer is killed: the consumer goes on
/// with what it has.
#[test]
fn killed_processes_take_nobody_along() {
    for text in KINDS {
        let exchange = Exchange::new();
        let rig = producer(&exchange, Policy::Ours, text);
        let victim = Consumer::new(&exchange);
        let block = rig.alloc(20 * MIB, &rig.s(0));
        let addr = block.addr();
        let held = victim.open(rig.share(&block).unwrap(), None).unwrap();
        held.work_on(&victim.stream).unwrap();
        rig.free(block);
        victim.backend.kill();
        drop(held);
        drop(victim);
        assert_eq!((exchange.imports(), exchange.borrows()), (0, 0));
        let next = rig.alloc(20 * MIB, &rig.s(0));
        assert_eq!(next.addr(), addr);

        let survivor = Consumer::new(&exchange);
        let held = survivor.open(rig.share(&next).unwrap(), None).unwrap();
        write(&rig.backend, addr, next.bytes(), 9);
        rig.backend.kill();
        verify(&survivor.backend, held.addr(), held.bytes(), 9);
        held.work_on(&survivor.stream).unwrap();
        survivor.backend.pass(&survivor.stream);
        drop(held);
        survivor.end();
    }
}

/// Something that goes wrong with a description on its way.
type Change<'a> = &'a dyn Fn(&mut Export<MockBackend>);

/// Cases L4 and L8, and what else a consumer must not believe.
#[test]
fn what_cannot_be_opened_is_refused_and_leaves_nothing() {
    let exchange = Exchange::new();
    let rig = producer(&exchange, Policy::Pytorch, "expandable_segments:True");
    let consumer = Consumer::new(&exchange);
    let block = rig.alloc(60 * MIB, &rig.s(0));
    let open = |change: Change<'_>| {
        let mut export = rig.share(&block).unwrap();
        change(&mut export);
        let Err(error) = consumer.open(export, None) else { panic!("it was opened") };
        assert_eq!(consumer.importer.counts(), ImportCounts::default(), "{error}");
        error
    };
    let kind = open(&|export| export.tokens[2].kind = TokenKind(77));
    let ImportError::Backend { source, .. } = kind else { panic!("{kind}") };
    assert_eq!(alloc_core::backend::BackendError::kind(&source), ErrorKind::Unsupported);
    let device = open(&|export| export.block.device = DeviceKey([9; 16]));
    assert!(matches!(device, ImportError::NoSuchDevice(_)), "{device}");
    let changes: [Change<'_>; 4] = [
        &|export| export.block.offset += 1,
        &|export| export.block.pieces[0].bytes += 512,
        &|export| export.block.pieces[1].kind = PieceKind::Segment,
        &|export| drop(export.tokens.pop()),
    ];
    for change in changes {
        let error = open(change);
        assert!(matches!(error, ImportError::Malformed(_)), "{error}");
    }
    let garbled = open(&|export| export.tokens[1].bytes.truncate(23));
    assert!(matches!(garbled, ImportError::Backend { .. }), "{garbled}");

    // A piece that is known by another size.
    let held = consumer.open(rig.share(&block).unwrap(), None).unwrap();
    let mut export = rig.share(&block).unwrap();
    export.block.pieces[2].bytes += 2 * MIB;
    assert!(matches!(consumer.open(export, None), Err(ImportError::Malformed(_))));
    drop(held);
    assert!(matches!(rig.share_raw(block.addr() + 512), Err(AllocError::UnknownAddress { .. })));
    rig.free(block);
    consumer.end();
}

/// L8: the block is on the producer's device, whatever number that has here.
#[test]
fn memory_is_opened_on_its_device() {
    let exchange = Exchange::new();
    let two = || MockBackend::builder().exchange(&exchange).device(GIB);
    let rig = Rig::on(two().device_key(4).device(GIB).device_key(5), Policy::Ours, "");
    let consumer = two().device_key(5).device(GIB).device_key(4).strict().build();
    let importer = Importer::new(consumer.clone());
    for (stream, device) in [(rig.s(0), DEV1), (rig.s1(0), DEV0)] {
        let block = rig.alloc(4 * MIB, &stream);
        let Export { block: shared, tokens, hold } = rig.share(&block).unwrap();
        let held = importer.open(&shared, tokens, None, hold).unwrap();
        assert_eq!(held.device(), device);
        drop(held);
        rig.free(block);
    }
    drop(importer);
    consumer.assert_clean();
}

/// The allocator outlives its handles while anyone holds a share; what is held ends it without
/// harm (L6, N5).
#[test]
fn holds_keep_the_allocator() {
    for text in KINDS {
        let exchange = Exchange::new();
        let consumer = Consumer::new(&exchange);
        let mut rig = producer(&exchange, Policy::Ours, text);
        let block = rig.alloc(4 * MIB, &rig.s(0));
        let held = consumer.open(rig.share(&block).unwrap(), None).unwrap();
        let backend = rig.backend.clone();
        rig.drop_allocator();
        assert!(!backend.leaks().is_empty(), "the memory is there");
        held.work_on(&consumer.stream).unwrap();
        consumer.backend.pass(&consumer.stream);
        drop(held);
        backend.assert_clean();
        consumer.end();
        drop(block);
    }
}

/// An allocator's free-memory callback that lets consumers go finds the memory it freed.
#[test]
fn a_callback_collects_what_consumers_returned() {
    let exchange = Exchange::new();
    let rig =
        Rig::on(MockBackend::builder().device(40 * MIB).exchange(&exchange), Policy::Pytorch, "");
    let block = rig.alloc(40 * MIB, &rig.s(0));
    let hold = Mutex::new(Some(rig.share(&block).unwrap().hold));
    rig.free(block);
    rig.oom(40 * MIB, &rig.s(0));
    rig.add_free_memory_callback("returns", move |_| hold.lock().unwrap().take().is_some());
    let next = rig.alloc(40 * MIB, &rig.s(0));
    rig.free(next);
}

/// A block freed by address while it is shared is unknown from then on.
#[test]
fn a_freed_block_cannot_be_shared() {
    let exchange = Exchange::new();
    let rig = producer(&exchange, Policy::Ours, "");
    let block = rig.alloc(4 * MIB, &rig.s(0));
    let export = rig.share(&block).unwrap();
    let addr = block.addr();
    rig.free_raw(addr).unwrap();
    rig.forget(addr);
    assert!(matches!(rig.share(&block), Err(AllocError::UnknownAddress { .. })));
    assert!(matches!(rig.free_raw(addr), Err(AllocError::UnknownAddress { .. })));
    drop(export);
    rig.verify();
    let other = CachingAllocator::new(rig.backend.clone(), config(Policy::Ours, "")).unwrap();
    assert!(matches!(other.share(&block), Err(AllocError::ForeignAllocation { .. })));
}
