//! Few descriptors, little address space.

use crate::child::{dir_argument, start, start_with_channel, temporary, test_dir, wait};
use crate::traces::descriptors;
use alloc_shm::{Arena, Channel, Draft, Error, Item, Map, MapOptions, ReadWrite, SharedMap};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::time::Duration;

fn limit(resource: Resource, to: u64) {
    let (_, hard) = getrlimit(resource).unwrap();
    setrlimit(resource, to.min(hard), hard).unwrap();
}

fn all_descriptors() -> usize {
    descriptors("self", |_| true)
}

/// A thousand storages passed by descriptor with at most 64 of them: the count stays the same.
pub(crate) fn steady_sender() {
    limit(Resource::RLIMIT_NOFILE, 64);
    let dir = dir_argument();
    let (here, there) = Channel::pair().unwrap();
    let before = all_descriptors();
    for tag in 0..1000 {
        let map = MapOptions::unique(&dir).len(64).keep_descriptor().unlink_at_once().map();
        let map = map.unwrap();
        map.write_at(0, &[tag as u8]).unwrap();
        here.send_descriptor(&map, tag).unwrap();
        drop(map);
        let Item::Descriptor(incoming) = there.receive().unwrap().item else { panic!() };
        assert_eq!(incoming.map().unwrap().to_vec()[0], tag as u8);
        assert_eq!(all_descriptors(), before);
    }
    // At the limit: an error each, whatever needs one; then everything works again.
    let mut held: Vec<Map<ReadWrite, OwnedFd>> = Vec::new();
    let full = loop {
        match MapOptions::unique(&dir).len(64).keep_descriptor().map() {
            Ok(map) => held.push(map),
            Err(error) => break error,
        }
    };
    assert!(matches!(full, Error::NoDescriptor { limit: 64, .. }), "{full}");
    assert!(full.to_string().contains("arena"), "says what helps: {full}");
    let none = [
        Draft::new(1).map(drop),
        Arena::new(4096).map(drop),
        SharedMap::create_unique(&dir, 1).map(drop),
        Channel::pair().map(drop),
        held[0].duplicate().map(drop),
    ];
    assert!(none.iter().all(|r| matches!(r, Err(Error::NoDescriptor { .. }))), "{none:?}");

    // Names need none to be held, and one for a moment to attach. Five hundred are no trouble.
    held.pop();
    let maps: Vec<SharedMap> =
        (0..500).map(|_| SharedMap::create_unique(&dir, 16).unwrap()).collect();
    let there = there.with_dir(dir.clone());
    let attached: Vec<SharedMap> = maps
        .iter()
        .map(|map| {
            here.send_named(map, 0).unwrap();
            match there.receive().unwrap().item {
                Item::Named(map) => map,
                other => panic!("{other:?}"),
            }
        })
        .collect();
    assert_eq!((attached[499].holds(), here.lent()), (2, 0));
    drop((maps, attached, held));
    assert_eq!(all_descriptors(), before);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_thousand_storages_pass_under_a_limit_of_64_descriptors() {
    let place = temporary();
    let dir = place.path().to_str().unwrap();
    let mut child = start("steady", &[("DIR", dir)], Stdio::null());
    assert!(wait(&mut child).success());
}

/// A receiver that has no descriptor left loses what came, says so, and goes on.
pub(crate) fn limited_receiver() {
    let channel = Channel::from_stdin().unwrap();
    let before = all_descriptors();
    limit(Resource::RLIMIT_NOFILE, before as u64 + 2);
    let mut kept = Vec::new();
    let mut lost = 0;
    for _ in 0..6 {
        match channel.receive() {
            Ok(received) => match received.item {
                Item::Descriptor(incoming) => kept.push(incoming),
                other => panic!("{other:?}"),
            },
            Err(Error::NoDescriptor { .. }) => lost += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(!kept.is_empty() && lost > 0 && kept.len() + lost == 6);
    // An arena whose descriptor is lost takes its block along; the next block brings it again.
    let block = channel.receive();
    assert!(matches!(block, Err(Error::NoDescriptor { .. })), "{block:?}");
    let block = channel.receive();
    assert!(matches!(block, Err(Error::Refused(_))), "{block:?}");
    kept.clear();
    channel.send_note(b"room again", 0).unwrap();
    for tag in 0..3 {
        let received = channel.receive().unwrap();
        assert_eq!(received.tag, tag);
        let Item::Block(block) = received.item else { panic!() };
        assert_eq!(&block[..], b"arena");
    }
    assert_eq!(all_descriptors(), before, "a mapped arena needs none");
}

#[test]
fn a_receiver_at_its_limit_loses_only_what_does_not_fit() {
    let place = temporary();
    let dir = test_dir(place.path());
    let (mut child, channel) = start_with_channel("limited", &[], &dir);
    let map = MapOptions::memfd("limited").len(10).keep_descriptor().map().unwrap();
    for tag in 0..6 {
        channel.send_descriptor(&map, tag).unwrap();
    }
    let arena = Arena::new(1 << 16).unwrap();
    let mut block = arena.allocate(5).unwrap();
    block.copy_from_slice(b"arena");
    let block = block.share();
    channel.send_block(&block, 0).unwrap();
    channel.receive_timeout(Duration::from_secs(20)).unwrap();
    for tag in 0..3 {
        channel.send_block(&block, tag).unwrap();
    }
    assert!(wait(&mut child).success());
    channel.settle(Duration::from_secs(5)).unwrap();
    drop(block);
    assert_eq!(arena.stats().live_blocks, 0);
}

/// A mapping that does not fit is an error with its size, and nothing is left.
pub(crate) fn without_address_space() {
    let dir = dir_argument();
    let before = all_descriptors();
    limit(Resource::RLIMIT_AS, 2 << 30);
    let bytes = 4 << 30;
    let file = dir.path().join("file");
    std::fs::File::create(&file).unwrap().set_len(bytes).unwrap();
    let error = MapOptions::file(&file).sparse().len(bytes).map().unwrap_err();
    let is_it = matches!(error, Error::Mapping { bytes: b, source: nix::errno::Errno::ENOMEM, .. }
        if b == bytes);
    assert!(is_it, "{error}");
    assert_eq!(all_descriptors(), before);
    std::fs::remove_file(&file).unwrap();
    let small = Draft::new(4096).unwrap().freeze().unwrap();
    assert_eq!(small.len(), 4096);
}

#[test]
fn a_mapping_that_does_not_fit_is_an_error_with_its_size() {
    let place = temporary();
    let dir = place.path().to_str().unwrap();
    let mut child = start("no-address-space", &[("DIR", dir)], Stdio::null());
    assert!(wait(&mut child).success());
}
