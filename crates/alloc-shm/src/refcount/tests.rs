use super::*;
use crate::steps;
use crate::traces;
use std::sync::atomic::{AtomicU64, Ordering};

fn place() -> (tempfile::TempDir, ShmDir) {
    let temp = tempfile::tempdir_in("/dev/shm").unwrap();
    let dir = ShmDir::at(temp.path()).unwrap();
    (temp, dir)
}

fn names(dir: &ShmDir) -> usize {
    std::fs::read_dir(dir.path()).unwrap().count()
}

#[test]
fn the_last_one_out_removes_the_name() {
    let (_temp, dir) = place();
    let one = SharedMap::create_unique(&dir, 10_000).unwrap();
    assert_eq!((one.len(), one.holds(), one.owner()), (10_000, 1, ProcessId::current().ok()));
    assert!(one.as_ptr().addr().is_multiple_of(4096));
    let two = SharedMap::attach(&dir, one.name()).unwrap();
    let clone = two.clone();
    assert_eq!((one.holds(), names(&dir)), (2, 1));
    one.write_at(9_990, b"0123456789").unwrap();
    drop(one);
    let mut end = [0; 10];
    two.read_at(9_990, &mut end).unwrap();
    assert_eq!((&end, two.holds()), (b"0123456789", 1));
    drop(two);
    assert_eq!((clone.holds(), names(&dir)), (1, 1));
    drop(clone);
    assert_eq!((names(&dir), traces::own(&dir.path().display().to_string())), (0, (0, 0)));
}

#[test]
fn ranges_end_with_the_data() {
    let (_temp, dir) = place();
    let map = SharedMap::create_unique(&dir, 10).unwrap();
    for (offset, len) in [(0, 11), (10, 1), (u64::MAX, 1), (u64::MAX - 4096, 2)] {
        assert!(matches!(map.write_at(offset, &vec![1; len]), Err(Error::Range { .. })));
        assert!(matches!(map.read_at(offset, &mut vec![1; len]), Err(Error::Range { .. })));
    }
    let huge = SharedMap::create_unique(&dir, u64::MAX - 10);
    assert!(matches!(huge, Err(Error::Range { .. })), "{huge:?}");
    let empty = SharedMap::create_unique(&dir, 0).unwrap();
    assert!(empty.is_empty() && empty.read_at(0, &mut []).is_ok());
}

#[test]
fn attaching_checks_everything_it_can() {
    let (_temp, dir) = place();
    let name = dir.labelled(NameKind::Counted, "checked").unwrap();
    let attach = || SharedMap::attach(&dir, &name);
    assert!(matches!(attach(), Err(Error::NotFound { .. })));
    let map = SharedMap::create(&dir, &name, 100).unwrap();
    let wrong = SharedMap::attach_sized(&dir, &name, 101);
    assert!(matches!(wrong, Err(Error::Header { .. })), "{wrong:?}");
    assert_eq!(map.holds(), 1, "the refused attach holds nothing");
    let again = SharedMap::create(&dir, &name, 100);
    assert!(matches!(again, Err(Error::Exists { .. })), "{again:?}");
    let plain = dir.labelled(NameKind::Plain, "plain").unwrap();
    assert!(matches!(SharedMap::create(&dir, &plain, 1), Err(Error::Name { .. })));

    // Magic, version, length, pid namespace: each altered in turn.
    let region = &map.0.object.region;
    for at in [0, 8, 16, 32] {
        let word: &AtomicU64 = region.word(at).unwrap();
        let right = word.fetch_xor(1, Ordering::Relaxed);
        match attach() {
            Err(Error::Namespace { .. }) if at == 32 => {}
            Err(Error::Header { .. }) if at != 32 => {}
            other => panic!("word {at}: {other:?}"),
        }
        word.store(right, Ordering::Relaxed);
    }
    assert!(attach().is_ok());
    let path = dir.path_of(&name);
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_len(8000).unwrap();
    assert!(matches!(attach(), Err(Error::Header { .. })), "sparse, and not the length it had");
}

#[test]
fn a_name_without_living_holders_is_made_anew_and_a_newer_one_is_left_alone() {
    let (_temp, dir) = place();
    let name = dir.labelled(NameKind::Counted, "again").unwrap();
    let first = SharedMap::create(&dir, &name, 10).unwrap();
    // The only holder becomes a process that is long gone.
    let dead = ProcessId::new(first.0.pid, 1).unwrap();
    first.0.object.region.word(128).unwrap().store(dead.to_word(), Ordering::Relaxed);
    let second = SharedMap::create(&dir, &name, 20).unwrap();
    drop(first);
    assert_eq!(SharedMap::attach(&dir, &name).unwrap().len(), 20);
    drop(second);
    assert_eq!(names(&dir), 0);
}

#[test]
fn data_whose_holders_died_is_kept_by_whoever_comes_before_the_sweep() {
    let (_temp, dir) = place();
    let map = SharedMap::create_unique(&dir, 10).unwrap();
    map.write_at(0, b"left").unwrap();
    let dead = ProcessId::new(map.0.pid, 1).unwrap();
    let holder = map.0.object.region.word(128).unwrap();
    holder.store(dead.to_word(), Ordering::Relaxed);
    let heir = SharedMap::attach(&dir, map.name()).unwrap();
    let swept = crate::sweep(&dir).unwrap();
    assert_eq!((swept.live, swept.removed.len()), (1, 0));
    let mut bytes = [0; 4];
    heir.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"left");
    drop((heir, map));
    assert_eq!(names(&dir), 0);
}

#[test]
fn the_lock_of_a_dead_process_is_taken_over() {
    let (_temp, dir) = place();
    let map = SharedMap::create_unique(&dir, 10).unwrap();
    let dead = ProcessId::new(map.0.pid, 1).unwrap();
    map.0.object.region.word(40).unwrap().store(dead.to_word(), Ordering::Relaxed);
    drop(SharedMap::attach(&dir, map.name()).unwrap());
    assert_eq!(map.holds(), 1);
}

#[test]
fn a_full_table_is_an_error_and_the_dead_make_room() {
    let (_temp, dir) = place();
    let map = SharedMap::create_unique(&dir, 10).unwrap();
    let region = &map.0.object.region;
    // Every other entry is taken by a process that lives: the parent of this one.
    let parent = ProcessId::of(nix::unistd::getppid().as_raw() as u32).unwrap().unwrap();
    for index in 0..248 {
        region.word(128 + index * 16).unwrap().store(parent.to_word(), Ordering::Relaxed);
    }
    let full = SharedMap::attach(&dir, map.name());
    assert!(matches!(full, Err(Error::Holders { max: 248, .. })), "{full:?}");
    for index in 0..248 {
        region.word(128 + index * 16).unwrap().store(0, Ordering::Relaxed);
    }
    drop(map);
    assert_eq!(names(&dir), 0);
}

#[test]
fn many_threads_come_and_go_and_the_count_is_exact() {
    let (_temp, dir) = place();
    let map = SharedMap::create_unique(&dir, 64).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    drop(SharedMap::attach(&dir, map.name()).unwrap());
                }
            });
        }
    });
    assert_eq!(map.holds(), 1);
}

/// Creators, attachers and leavers of one label at once: an attacher sees a whole object or none,
/// and in the end there is nothing.
#[test]
fn a_label_that_dies_and_is_born_again_is_never_half_there() {
    let (_temp, dir) = place();
    let name = dir.labelled(NameKind::Counted, "phoenix").unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..300 {
                    let flags = Flags::SHAREDMEM;
                    match SharedMap::with_flags(&dir, &name, flags, 8) {
                        Ok(map) => assert_eq!(map.len(), 8),
                        Err(Error::Exists { .. } | Error::NotFound { .. } | Error::Gone { .. }) => {
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    assert_eq!(names(&dir), 0);
}

#[test]
fn a_failure_at_any_step_of_creating_leaves_nothing() {
    let (_temp, dir) = place();
    let here = dir.path().display().to_string();
    for n in 0.. {
        let mut steps_left = n;
        steps::on_step(move |_| {
            if steps_left == 0 {
                steps_left = usize::MAX;
                return Err(Errno::EIO);
            }
            steps_left -= 1;
            Ok(())
        });
        let result = SharedMap::create_unique(&dir, 5000);
        steps::clear();
        let done = result.is_ok();
        drop(result);
        assert_eq!((names(&dir), traces::own(&here)), (0, (0, 0)), "step {n}");
        if done && n > 10 {
            return;
        }
    }
}

#[test]
fn counted_flags_are_pytorchs() {
    let (_temp, dir) = place();
    let name = dir.labelled(NameKind::Counted, "flags").unwrap();
    let with = |bits| SharedMap::with_flags(&dir, &name, Flags::from_bits(bits), 8);
    for extra in [Flags::FROMFD, Flags::KEEPFD, Flags::UNLINK] {
        assert!(matches!(with(2 | extra.bits()), Err(Error::Flags { .. })));
    }
    assert!(matches!(with(0), Err(Error::Flags { .. })));
    assert!(matches!(with(1), Err(Error::Flags { .. })));
    assert!(matches!(with(10), Err(Error::NotFound { .. })));
    let created = with(6).unwrap();
    assert!(matches!(with(6), Err(Error::Exists { .. })));
    let (attached, either) = (with(10).unwrap(), with(2).unwrap());
    assert_eq!(created.holds(), 3);
    drop((created, attached, either));
}
