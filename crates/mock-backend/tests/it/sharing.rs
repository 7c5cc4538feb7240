//! The rules between processes: each has a test that breaks it.

use alloc_core::backend::{
    Backend, BackendError, ErrorKind, Reservation, Segment, Share, SharePages, Token, TokenKind,
    VirtualMemory,
};
use mock_backend::*;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;

use crate::rules::{DEV0, DEV1, MIB};

/// Two processes on a machine of two devices.
fn machine() -> (Exchange, [MockBackend; 2]) {
    let exchange = Exchange::new();
    let process = || MockBackend::builder().device(64 * MIB).device(64 * MIB).exchange(&exchange);
    let processes = [process().build(), process().build()];
    (exchange, processes)
}

#[track_caller]
fn expect(backend: &MockBackend, rules: &[Rule]) {
    let found: Vec<Rule> = backend.take_violations().iter().map(|v| v.rule).collect();
    assert_eq!(found, rules);
}

/// A page of the first process, 4 MiB, and its token.
fn exported(from: &MockBackend) -> (MockPage, Token<File>) {
    let page = from.create(DEV0, 4 * MIB).unwrap();
    let token = from.export_page(&page).unwrap();
    (page, token)
}

/// The page mapped and accessible at the start of a reservation.
fn mapped(on: &MockBackend, page: &MockPage) -> MockReservation {
    let range = on.reserve(DEV0, 8 * MIB).unwrap();
    on.map(&range, range.base(), page).unwrap();
    on.set_access(&range, range.base(), 4 * MIB, DEV0).unwrap();
    range
}

#[test]
fn borrowed_memory_may_not_be_handed_out() {
    let (exchange, [producer, consumer]) = machine();
    let (page, token) = exported(&producer);
    let own = mapped(&producer, &page);
    let imported = consumer.import_page(DEV0, 4 * MIB, token).unwrap();
    let there = mapped(&consumer, &imported);
    let (s0, c0) = (producer.default_stream(DEV0), consumer.default_stream(DEV0));
    consumer.judge().borrowed(there.base() + MIB, MIB, &c0, None);
    assert_eq!((exchange.imports(), exchange.borrows()), (1, 1));
    for (offset, bytes) in [(0, MIB), (2 * MIB, 2 * MIB)] {
        producer.judge().allocated(own.base() + offset, bytes, &s0);
        expect(&producer, &[]);
    }
    producer.judge().allocated(own.base() + MIB, 512, &s0);
    expect(&producer, &[Rule::SharedReuse]);
    producer.judge().freed(own.base() + MIB);
    consumer.judge().given_up(there.base() + MIB);
    consumer.judge().returned(there.base() + MIB);
    producer.judge().allocated(own.base() + MIB, MIB, &s0);
    expect(&producer, &[]);
    expect(&consumer, &[]);
}

#[test]
fn borrowed_memory_may_not_be_given_back() {
    let (_exchange, [producer, consumer]) = machine();
    let (page, token) = exported(&producer);
    let imported = consumer.import_page(DEV0, 4 * MIB, token).unwrap();
    let there = mapped(&consumer, &imported);
    let c0 = consumer.default_stream(DEV0);
    consumer.judge().borrowed(there.base(), MIB, &c0, None);
    producer.destroy(page).unwrap();
    expect(&producer, &[Rule::ReleaseOfShared]);

    let s0 = producer.default_stream(DEV0);
    let segment = producer.acquire(DEV0, 4 * MIB, &s0).unwrap();
    let token = producer.export_segment(&segment).unwrap();
    let opened = consumer.open_segment(DEV0, 4 * MIB, token).unwrap();
    consumer.judge().borrowed(opened.base() + MIB, MIB, &c0, None);
    producer.release(segment).unwrap();
    expect(&producer, &[Rule::ReleaseOfShared]);
}

#[test]
fn double_import() {
    let (exchange, [producer, consumer]) = machine();
    let (page, token) = exported(&producer);
    let again = producer.export_page(&page).unwrap();
    assert_eq!(token.bytes, again.bytes, "two exports are worth the same");
    let imported = consumer.import_page(DEV0, 4 * MIB, token).unwrap();
    assert!(consumer.import_page(DEV0, 4 * MIB, again).is_err());
    expect(&consumer, &[Rule::DoubleImport]);
    assert_eq!(consumer.leaks().pages, [4 * MIB], "an import that stays is a leak");
    consumer.destroy(imported).unwrap();
    assert!(consumer.leaks().is_empty());
    assert_eq!(exchange.imports(), 0);
    assert_eq!((producer.used(DEV0), consumer.used(DEV0)), (4 * MIB, 0));
    let later = producer.export_page(&page).unwrap();
    consumer.import_page(DEV0, 4 * MIB, later).unwrap();
    expect(&consumer, &[]);
}

#[test]
fn unready_use() {
    let (_exchange, [producer, consumer]) = machine();
    let (_page, token) = exported(&producer);
    let s0 = producer.default_stream(DEV0);
    producer.busy(&s0);
    let (event, ready) = producer.export_event(&s0).unwrap();
    let imported = consumer.import_page(DEV0, 4 * MIB, token).unwrap();
    let there = mapped(&consumer, &imported);
    let (c0, c1) = (consumer.default_stream(DEV0), consumer.stream(DEV0));
    consumer.judge().borrowed(there.base(), MIB, &c0, Some(&ready));
    consumer.await_event(&c0, &ready).unwrap();
    consumer.launch(&c0, Work::new().touching(there.base(), 512));
    expect(&consumer, &[]);
    consumer.launch(&c1, Work::new().touching(there.base(), 512));
    expect(&consumer, &[Rule::UnreadyUse]);
    drop(event);
    assert!(consumer.await_event(&c1, &ready).is_err(), "the event is gone");
}

#[test]
fn early_return() {
    let (_exchange, [producer, consumer]) = machine();
    let (_page, token) = exported(&producer);
    let imported = consumer.import_page(DEV0, 4 * MIB, token).unwrap();
    let there = mapped(&consumer, &imported);
    let c0 = consumer.default_stream(DEV0);
    consumer.judge().borrowed(there.base(), MIB, &c0, None);
    consumer.judge().borrowed(there.base(), MIB, &c0, None);
    consumer.launch(&c0, Work::new().touching(there.base(), 512));
    consumer.judge().given_up(there.base());
    consumer.judge().returned(there.base());
    expect(&consumer, &[]);
    consumer.judge().given_up(there.base());
    consumer.judge().returned(there.base());
    expect(&consumer, &[Rule::EarlyReturn]);
}

#[test]
fn tokens_of_another_kind_size_or_device_are_refused() {
    let (_exchange, [producer, consumer]) = machine();
    let (page, token) = exported(&producer);
    let error = consumer.open_segment(DEV0, 4 * MIB, token).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let strange = Token { kind: TokenKind(99), ..producer.export_page(&page).unwrap() };
    let error = consumer.import_page(DEV0, 4 * MIB, strange).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    expect(&consumer, &[]);
    let export = || producer.export_page(&page).unwrap();
    assert!(consumer.import_page(DEV0, 2 * MIB, export()).is_err());
    assert!(consumer.import_page(DEV1, 4 * MIB, export()).is_err());
    expect(&consumer, &[Rule::BadRequest, Rule::BadRequest]);
    let stale = export();
    producer.destroy(page).unwrap();
    assert!(consumer.import_page(DEV0, 4 * MIB, stale).is_err(), "it is gone");
    let s0 = producer.default_stream(DEV0);
    let segment = producer.acquire(DEV0, 4 * MIB, &s0).unwrap();
    let token = producer.export_segment(&segment).unwrap();
    assert!(producer.open_segment(DEV0, 4 * MIB, token).is_err(), "its own");
    expect(&producer, &[]);
}

#[test]
fn payloads_travel_with_the_memory() {
    let make = |bytes| {
        let path = std::env::temp_dir().join(format!("mock-payload-{}", std::process::id()));
        let options = File::options().read(true).write(true).create(true).clone();
        let mut file = options.open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.write_all(b"made").unwrap();
        file.set_len(bytes).unwrap();
        file
    };
    // Two machines: nobody judges between them, as between real processes.
    let [producer, consumer] = [(); 2].map(|()| MockBackend::builder().payloads(make).build());
    let page = producer.create(DEV0, 4 * MIB).unwrap();
    let own = mapped(&producer, &page);
    assert!(producer.payload(own.base()).is_none(), "not exported yet");
    let token = producer.export_page(&page).unwrap();
    let imported = consumer.import_page(DEV0, 4 * MIB, token).unwrap();
    let there = mapped(&consumer, &imported);
    let (file, at) = producer.payload(own.base() + 100).unwrap();
    file.write_all_at(b"word", at).unwrap();
    let (file, at) = consumer.payload(there.base() + 100).unwrap();
    let mut word = [0; 4];
    file.read_exact_at(&mut word, at).unwrap();
    assert_eq!((&word, at), (b"word", 100));
}
