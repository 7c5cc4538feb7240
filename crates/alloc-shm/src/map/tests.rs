use super::*;
use crate::steps::{self, Step};
use crate::traces;
use nix::errno::Errno;
use proptest::prelude::*;
use std::cell::{Cell, RefCell};
use std::io::{Seek, Write};
use std::os::fd::AsRawFd;
use std::rc::Rc;

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Place { dir: tempfile::tempdir_in("/dev/shm").unwrap() }
    }

    fn shm(&self) -> ShmDir {
        ShmDir::at(self.dir.path()).unwrap()
    }

    fn name(&self) -> Name {
        self.shm().labelled(NameKind::Plain, "x").unwrap()
    }

    fn path(&self) -> std::path::PathBuf {
        self.shm().path_of(&self.name())
    }

    /// Puts an object of `len` bytes there, all 7.
    fn put(&self, len: usize) {
        std::fs::write(self.path(), vec![7; len]).unwrap();
    }

    fn names(&self) -> usize {
        std::fs::read_dir(self.dir.path()).unwrap().count()
    }

    /// Descriptors and mappings of this process in this place.
    fn traces(&self) -> (usize, usize) {
        traces::own(&self.dir.path().display().to_string())
    }
}

use crate::name::{Name, NameKind, ShmDir};

/// Fails the n-th step of this thread, counted from 0.
fn fail_step(n: usize) -> Rc<Cell<usize>> {
    let seen = Rc::new(Cell::new(0));
    let count = Rc::clone(&seen);
    steps::on_step(move |_| {
        count.set(count.get() + 1);
        if count.get() == n + 1 { Err(Errno::EIO) } else { Ok(()) }
    });
    seen
}

#[test]
fn the_steps_come_in_the_order_promised() {
    let place = Place::new();
    let seen = Rc::new(RefCell::new(Vec::new()));
    let steps_seen = Rc::clone(&seen);
    steps::on_step(move |step| {
        steps_seen.borrow_mut().push(step);
        Ok(())
    });
    let map = MapOptions::shared_memory(&place.shm(), &place.name())
        .create(Create::Exclusive)
        .unlink_at_once()
        .sequential()
        .len(100)
        .map()
        .unwrap();
    steps::clear();
    use Step::*;
    assert_eq!(*seen.borrow(), [Open, Stat, Size, Reserve, Map, Close, Unlink, Advise]);
    assert_eq!((place.names(), place.traces()), (0, (0, 1)));
    drop(map);
    assert_eq!(place.traces(), (0, 0));
}

/// Runs `make` with every single step failing in turn, and checks with `undone` each time.
fn at_every_step<T: std::fmt::Debug>(make: impl Fn() -> Result<T>, undone: impl Fn(usize)) {
    for n in 0.. {
        let seen = fail_step(n);
        let result = make();
        steps::clear();
        if seen.get() <= n {
            assert!(n >= 4, "too few steps: {n}");
            return result.map(drop).unwrap();
        }
        // Advice may fail without harm; everything else is an error.
        drop(result);
        undone(n);
    }
}

#[test]
fn a_failure_at_any_step_of_creating_leaves_nothing() {
    let place = Place::new();
    let undone = |n| assert_eq!((place.names(), place.traces()), (0, (0, 0)), "step {n}");
    at_every_step(
        || {
            let options = MapOptions::shared_memory(&place.shm(), &place.name());
            options.create(Create::Exclusive).len(9000).unlink_at_once().sequential().map()
        },
        undone,
    );
    at_every_step(
        || MapOptions::unique(&place.shm()).len(9000).keep_descriptor().sequential().map(),
        undone,
    );
    let memfd = || traces::own("memfd:undone-at-every-step");
    at_every_step(
        || MapOptions::memfd("undone-at-every-step").len(9000).keep_descriptor().map(),
        |n| assert_eq!(memfd(), (0, 0), "step {n}"),
    );
}

#[test]
fn a_failure_at_any_step_of_growing_restores_the_length() {
    let place = Place::new();
    place.put(10);
    let undone = |n| {
        assert_eq!(std::fs::read(place.path()).unwrap(), [7; 10], "step {n}");
        assert_eq!(place.traces(), (0, 0), "step {n}");
    };
    let grow = || MapOptions::file(place.path()).len(9000);
    at_every_step(
        || {
            let map = grow().unlink_at_once().map();
            // Only the last run gets here with a map: put back what it removed.
            map.inspect(|_| place.put(10))
        },
        undone,
    );
    at_every_step(
        || {
            let file = std::fs::File::options().read(true).write(true).open(place.path());
            let map = MapOptions::descriptor(file.unwrap().into()).may_grow().len(9000).map();
            map.inspect(|_| place.put(10))
        },
        undone,
    );
}

#[test]
fn growing_keeps_the_bytes_and_zeroes_the_rest() {
    let place = Place::new();
    place.put(10);
    let map = MapOptions::file(place.path()).len(5000).map().unwrap();
    assert_eq!(map.to_vec(), [vec![7; 10], vec![0; 4990]].concat());
    let attach = || MapOptions::file(place.path()).create(Create::Never).len(6000);
    let short = attach().map();
    assert!(matches!(short, Err(Error::TooShort { actual: 5000, needed: 6000, .. })), "{short:?}");
    assert_eq!(attach().may_grow().map().unwrap().len(), 6000);
    assert_eq!(std::fs::metadata(place.path()).unwrap().len(), 6000);
}

#[test]
fn what_is_only_read_or_private_never_grows_and_never_writes() {
    let place = Place::new();
    place.put(10);
    let path = place.path();
    let short = [
        MapOptions::file_read_only(&path).len(11).map().map(drop),
        MapOptions::file_private(&path).len(11).map().map(drop),
        MapOptions::shared_memory_read_only(&place.shm(), &place.name()).len(11).map().map(drop),
    ];
    assert!(short.iter().all(|result| matches!(result, Err(Error::TooShort { .. }))), "{short:?}");
    let private = MapOptions::file_private(&path).map().unwrap();
    private.write_at(0, b"mine").unwrap();
    assert_eq!(&private.to_vec()[..5], b"mine\x07");
    assert_eq!(std::fs::read(&path).unwrap(), [7; 10]);
}

#[test]
fn ranges_need_no_alignment() {
    let place = Place::new();
    let bytes: Vec<u8> = (0..20_000).map(|i| (i % 251) as u8).collect();
    std::fs::write(place.path(), &bytes).unwrap();
    for (offset, len) in [(0, 1), (1, 4096), (4095, 2), (4096, 4096), (5000, 10_001), (19_999, 1)] {
        let map = MapOptions::file_read_only(place.path()).offset(offset).len(len).map().unwrap();
        assert_eq!(map.to_vec(), bytes[offset as usize..(offset + len) as usize]);
        assert_eq!((map.offset(), map.len()), (offset, len));
    }
    let rest = MapOptions::file_read_only(place.path()).offset(15_000).map().unwrap();
    assert_eq!(rest.to_vec(), bytes[15_000..]);
    let beyond = MapOptions::file_read_only(place.path()).offset(20_001).map();
    assert!(matches!(beyond, Err(Error::Range { .. })), "{beyond:?}");
    for len in [u64::MAX, i64::MAX as u64] {
        let wraps = MapOptions::file(place.path()).offset(1).len(len).map();
        assert!(matches!(wraps, Err(Error::Range { .. })), "{wraps:?}");
    }
    assert_eq!(std::fs::metadata(place.path()).unwrap().len(), 20_000);
}

#[test]
fn no_bytes_are_an_empty_map() {
    let place = Place::new();
    let map = MapOptions::shared_memory(&place.shm(), &place.name()).len(0).map().unwrap();
    assert!(map.is_empty() && map.to_vec().is_empty());
    assert_eq!((place.names(), place.traces()), (1, (0, 0)));
    assert!(map.write_at(0, b"").is_ok());
    assert!(matches!(map.write_at(0, b"x"), Err(Error::Range { .. })));
    let whole = MapOptions::shared_memory_read_only(&place.shm(), &place.name()).map().unwrap();
    assert!(whole.is_empty());
    let end = MapOptions::file(place.path()).offset(10).len(0).map().unwrap();
    assert!(end.is_empty(), "sized for its offset, and empty");
    assert_eq!(std::fs::metadata(place.path()).unwrap().len(), 10);
}

#[test]
fn names_are_removed_by_their_creator_and_only_while_they_mean_its_object() {
    let place = Place::new();
    let (dir, name) = (place.shm(), place.name());
    let creator = MapOptions::shared_memory(&dir, &name).len(10).map().unwrap();
    let exists = MapOptions::shared_memory(&dir, &name).create(Create::Exclusive).len(1).map();
    assert!(matches!(exists, Err(Error::Exists { .. })), "{exists:?}");
    let other = MapOptions::shared_memory(&dir, &name).map().unwrap();
    creator.write_at(3, b"seen").unwrap();
    assert_eq!(&other.to_vec()[3..7], b"seen");
    drop(other);
    assert_eq!(place.names(), 1);
    assert_eq!(creator.owned_name(), Some(&*place.path()));

    std::fs::remove_file(place.path()).unwrap();
    place.put(3);
    drop(creator);
    assert_eq!(std::fs::read(place.path()).unwrap(), [7; 3], "a newer object stays");
    std::fs::remove_file(place.path()).unwrap();

    let mut left = MapOptions::shared_memory(&dir, &name).len(10).map().unwrap();
    left.leave_name();
    drop(left);
    assert_eq!(place.names(), 1);
    let missing = place.shm().labelled(NameKind::Plain, "missing").unwrap();
    let none = MapOptions::shared_memory(&dir, &missing).create(Create::Never).map();
    assert!(matches!(none, Err(Error::NotFound { .. })), "{none:?}");
}

#[test]
fn holes_of_a_writable_map_are_filled_before_it_is_mapped() {
    let place = Place::new();
    let sparse = std::fs::File::create(place.path()).unwrap();
    sparse.set_len(1 << 20).unwrap();
    let blocks = || std::os::unix::fs::MetadataExt::blocks(&sparse.metadata().unwrap());
    drop(MapOptions::file(place.path()).sparse().map().unwrap());
    assert_eq!(blocks(), 0);
    drop(MapOptions::shared_memory(&place.shm(), &place.name()).map().unwrap());
    assert_eq!(blocks(), (1 << 20) / 512);
}

#[test]
fn what_is_no_file_is_refused_without_hanging() {
    let place = Place::new();
    nix::unistd::mkfifo(&place.path(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let fifo = MapOptions::file(place.path()).create(Create::Never).map();
    assert!(matches!(fifo, Err(Error::Os { source: Errno::ENODEV, .. })), "{fifo:?}");
    std::fs::remove_file(place.path()).unwrap();
    std::os::unix::fs::symlink("/dev/shm", place.path()).unwrap();
    let link = MapOptions::shared_memory(&place.shm(), &place.name()).len(1).map();
    assert!(matches!(link, Err(Error::Os { source: Errno::ELOOP, .. })), "{link:?}");
}

#[test]
fn descriptors_are_neither_moved_nor_grown() {
    let place = Place::new();
    place.put(10);
    let mut file = std::fs::File::options().read(true).write(true).open(place.path()).unwrap();
    file.seek(std::io::SeekFrom::Start(4)).unwrap();
    let copy = || file.try_clone().unwrap().into();
    let short = MapOptions::descriptor(copy()).len(11).map();
    assert!(matches!(short, Err(Error::TooShort { .. })), "{short:?}");
    let grown = MapOptions::descriptor(copy()).may_grow().len(11).keep_descriptor().map().unwrap();
    assert_eq!(file.stream_position().unwrap(), 4);
    assert_eq!(grown.to_vec(), [[7; 10].as_slice(), &[0]].concat());
    let sent = grown.duplicate().unwrap();
    assert_ne!(sent.as_raw_fd(), grown.as_fd().as_raw_fd());
    drop(grown.close_descriptor());
    file.write_all(b"x").unwrap();
    assert_eq!(place.traces(), (2, 0), "the file and the duplicate");
}

#[test]
fn unique_names_do_not_collide_among_threads() {
    let place = Place::new();
    let dir = place.shm();
    let names = std::sync::Mutex::new(std::collections::HashSet::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let map = MapOptions::unique(&dir).len(1).map().unwrap();
                    assert!(names.lock().unwrap().insert(map.object().to_owned()));
                }
            });
        }
    });
    assert_eq!((names.lock().unwrap().len(), place.names()), (2000, 0));
}

proptest! {
    #[test]
    fn copies_agree_with_a_vector(writes in proptest::collection::vec(
        (0u64..300, proptest::collection::vec(any::<u8>(), 0..64)), 1..20), skew in 0u64..9
    ) {
        let map = MapOptions::memfd("copies").offset(skew).len(300).map().unwrap();
        let mut model = vec![0; 300];
        for (at, bytes) in writes {
            let fits = at as usize + bytes.len() <= model.len();
            prop_assert_eq!(map.write_at(at, &bytes).is_ok(), fits);
            if fits {
                model[at as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
            prop_assert_eq!(&map.to_vec(), &model);
            let mut back = vec![0; bytes.len()];
            prop_assert_eq!(map.read_at(at, &mut back).is_ok(), fits);
            if fits {
                prop_assert_eq!(back, bytes);
            }
        }
    }
}

/// One cell of the table: what flags do to an object of `have` bytes when `want` are asked for.
fn outcome(flags: Flags, have: Option<usize>, want: u64) -> String {
    let place = Place::new();
    have.into_iter().for_each(|len| place.put(len));
    let (dir, name) = (place.shm(), place.name());
    let target = if flags.contains(Flags::FROMFD) {
        let file = std::fs::File::options().read(true).write(true).open(place.path());
        let Ok(file) = file else { return "-".to_owned() };
        FlagTarget::Descriptor(file.into())
    } else if flags.contains(Flags::SHAREDMEM) {
        FlagTarget::Name(&dir, &name)
    } else {
        FlagTarget::Path(place.path())
    };
    let result = flags.map(target, want);
    let text = match &result {
        Ok(map) => {
            let kept = if place.traces().0 > 0 { " fd" } else { "" };
            let gone = if place.path().exists() { "" } else { " unlinked" };
            format!("{}{kept}{gone}", map.len())
        }
        Err(Error::Flags { .. }) => "refused".to_owned(),
        Err(Error::TooShort { .. }) => "too short".to_owned(),
        Err(Error::NotFound { .. }) => "not found".to_owned(),
        Err(Error::Exists { .. }) => "exists".to_owned(),
        Err(error) => error.to_string(),
    };
    if result.is_err() {
        let len = std::fs::metadata(place.path()).ok().map(|meta| meta.len() as usize);
        assert_eq!(len, have, "{flags:?} changed something on failure");
    }
    drop(result);
    assert_eq!(place.traces(), (0, 0), "{flags:?} left something behind");
    text
}

/// Every shared mode, with each other flag alone and in pairs, over objects of every length.
#[test]
fn flags_do_what_the_table_says() {
    let extras = [Flags::EXCLUSIVE, Flags::NOCREATE, Flags::KEEPFD, Flags::FROMFD, Flags::UNLINK];
    let mut combinations = vec![Flags::NONE];
    for (i, &one) in extras.iter().enumerate() {
        combinations.push(one);
        combinations.extend(extras[i + 1..].iter().map(|&other| one | other));
    }
    let modes = [Flags::NONE, Flags::SHARED, Flags::SHAREDMEM];
    let mut table = String::from("flags | absent | 10 < 20 | 20 = 20 | 30 > 20 | 10, size 0\n");
    for mode in modes {
        for flags in combinations.iter().map(|&extra| mode | extra) {
            let objects = [(None, 20), (Some(10), 20), (Some(20), 20), (Some(30), 20)];
            let cells = objects.into_iter().chain([(Some(10), 0)]);
            let cells: Vec<String> = cells.map(|(have, want)| outcome(flags, have, want)).collect();
            table += &format!("{flags:?} | {}\n", cells.join(" | "));
        }
    }
    // PyTorch's own four combinations.
    for bits in [86, 58, 6, 10] {
        let flags = Flags::from_bits(bits);
        let cells = [outcome(flags, None, 20), outcome(flags, Some(20), 20)];
        table += &format!("{flags:?} | {}\n", cells.join(" | "));
    }
    let expected = include_str!("flag-table.txt");
    if table != expected {
        let found = std::env::temp_dir().join("alloc-shm-flag-table.txt");
        std::fs::write(&found, &table).unwrap();
        panic!("the table differs from flag-table.txt: see {}", found.display());
    }
}

#[test]
fn flags_outside_of_the_table_are_refused() {
    let refused = |flags: Flags, target| matches!(flags.map(target, 1), Err(Error::Flags { .. }));
    let place = Place::new();
    let (dir, name) = (place.shm(), place.name());
    assert!(refused(Flags::from_bits(128), FlagTarget::Path(place.path())));
    assert!(refused(Flags::SHARED | Flags::SHAREDMEM, FlagTarget::Name(&dir, &name)));
    assert!(refused(Flags::SHARED, FlagTarget::Name(&dir, &name)));
    assert!(refused(Flags::SHAREDMEM, FlagTarget::Path(place.path())));
    assert!(refused(Flags::SHARED | Flags::FROMFD, FlagTarget::Path(place.path())));
    let memfd = crate::os::file::memfd("x").unwrap();
    assert!(refused(Flags::SHARED, FlagTarget::Descriptor(memfd)));
    assert_eq!(format!("{:?}", Flags::from_bits(86)), "86[SHAREDMEM|EXCLUSIVE|KEEPFD|UNLINK]");
}
