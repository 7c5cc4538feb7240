//! One storage passed by descriptor, step by step, with what the kernel counts after each.

use crate::child::{entries, start_with_channel, temporary, test_dir, wait};
use crate::traces::{descriptors, mappings};
use alloc_shm::{Channel, Create, Item, Map, MapOptions, NameKind, ReadWrite};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(20);

/// The receiving process: takes one step for every note that comes.
pub(crate) fn receiver() {
    let channel = Channel::from_stdin().unwrap();
    let mut incoming = None;
    let mut duplicate = None;
    let mut map: Option<Map<ReadWrite, OwnedFd>> = None;
    loop {
        let Ok(received) = channel.receive() else { return };
        match received.item {
            Item::Descriptor(descriptor) => incoming = Some(descriptor),
            Item::Note(step) => match step.as_slice() {
                b"duplicate" => duplicate = Some(incoming.as_ref().unwrap().duplicate().unwrap()),
                b"close" => incoming = None,
                b"map" => map = Some(duplicate.take().unwrap().map().unwrap()),
                b"write" => map.as_ref().unwrap().write_at(3, b"from the receiver").unwrap(),
                b"check" => assert_eq!(&map.as_ref().unwrap().to_vec()[3..7], b"from"),
                b"drop" => map = None,
                other => panic!("no step {:?}", String::from_utf8_lossy(other)),
            },
            other => panic!("{other:?}"),
        }
        channel.send_note(b"done", 0).unwrap();
    }
}

/// What both processes have of the object: descriptors here, maps here, and the same there.
type Count = [usize; 4];

struct Stage {
    channel: Channel,
    here: String,
    there: String,
    path: String,
}

impl Stage {
    fn count(&self) -> Count {
        let ours = |pid| descriptors(pid, |link| link.starts_with(&self.path));
        let mapped = |pid| mappings(pid, &self.path);
        [ours(&self.here), mapped(&self.here), ours(&self.there), mapped(&self.there)]
    }

    fn step(&self, what: &str) -> Count {
        self.channel.send_note(what.as_bytes(), 0).unwrap();
        self.done();
        self.count()
    }

    fn done(&self) {
        let received = self.channel.receive_timeout(SOON).unwrap();
        assert!(matches!(received.item, Item::Note(note) if note == b"done"));
    }
}

fn links(map: &Map<ReadWrite, OwnedFd>) -> u64 {
    nix::sys::stat::fstat(map.as_fd()).unwrap().st_nlink
}

#[test]
fn references_are_what_the_table_says_at_every_step() {
    let place = temporary();
    let dir = test_dir(place.path());
    let (mut child, channel) = start_with_channel("life-cycle", &[], &dir);
    let name = dir.labelled(NameKind::Plain, "table").unwrap();
    let path = dir.path().join(name.as_str()).display().to_string();
    let (here, there) = ("self".to_owned(), child.id().to_string());
    let stage = Stage { channel, here, there, path };

    // Creation as it goes on inside: the name exists, and one inode with one link.
    let named = MapOptions::shared_memory(&dir, &name)
        .create(Create::Exclusive)
        .len(8192)
        .keep_descriptor()
        .map()
        .unwrap();
    assert_eq!((stage.count(), links(&named)), ([1, 1, 0, 0], 1));
    drop(named);
    assert_eq!((stage.count(), entries(dir.path()).len()), ([0, 0, 0, 0], 0));

    // The same with the name removed at once: two references, no link, no name.
    let map = MapOptions::shared_memory(&dir, &name)
        .create(Create::Exclusive)
        .len(8192)
        .keep_descriptor()
        .unlink_at_once()
        .map()
        .unwrap();
    map.write_at(0, b"abc").unwrap();
    assert_eq!((stage.count(), links(&map)), ([1, 1, 0, 0], 0));
    assert_eq!(entries(dir.path()).len(), 0);

    // Sent and received: three. Duplicated: four. The received one closed: three. Mapped: four.
    stage.channel.send_descriptor(&map, 0).unwrap();
    stage.done();
    assert_eq!(stage.count(), [1, 1, 1, 0]);
    assert_eq!(stage.step("duplicate"), [1, 1, 2, 0]);
    assert_eq!(stage.step("close"), [1, 1, 1, 0]);
    assert_eq!(stage.step("map"), [1, 1, 1, 1]);
    assert_eq!(links(&map), 0);
    assert_eq!(stage.step("write"), [1, 1, 1, 1]);
    assert_eq!(&map.to_vec()[..20], b"abcfrom the receiver");

    // The sender closes its descriptor, then unmaps: the receiver has the bytes still.
    let map = map.close_descriptor();
    assert_eq!(stage.count(), [0, 1, 1, 1]);
    drop(map);
    assert_eq!(stage.count(), [0, 0, 1, 1]);
    assert_eq!(stage.step("check"), [0, 0, 1, 1]);
    assert_eq!(stage.step("drop"), [0, 0, 0, 0]);
    drop(stage);
    assert!(wait(&mut child).success());
}

/// A descriptor that is on its way keeps the object alive, though neither process has it.
#[test]
fn an_object_on_its_way_belongs_to_nobody_and_is_not_lost() {
    let (here, there) = Channel::pair().unwrap();
    let label = "on-its-way";
    let map = MapOptions::memfd(label).len(4096).keep_descriptor().map().unwrap();
    map.write_at(0, b"alive").unwrap();
    here.send_descriptor(&map, 0).unwrap();
    drop((map, here));
    assert_eq!((descriptors("self", |link| link.contains(label)), mappings("self", label)), (0, 0));
    let Item::Descriptor(incoming) = there.receive().unwrap().item else { panic!() };
    assert_eq!(&incoming.map().unwrap().to_vec()[..5], b"alive");
    assert_eq!(descriptors("self", |link| link.contains(label)), 0);
}
