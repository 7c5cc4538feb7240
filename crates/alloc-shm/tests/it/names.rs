//! Names from several processes at once, and the sweeping of names that nobody owns any more.

use crate::child::{argument, dir_argument, entries, start, temporary, test_dir, wait};
use alloc_shm::{Create, Error, MapOptions, NameKind, ProcessId, SharedMap, ShmDir, Swept, sweep};
use std::collections::HashSet;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Makes names, keeps them all, and writes them down.
pub(crate) fn namer() {
    let dir = dir_argument();
    let count: usize = argument("COUNT").parse().unwrap();
    let maps: Vec<_> = (0..count).map(|_| MapOptions::unique(&dir).len(1).map().unwrap()).collect();
    let names: Vec<&str> = maps.iter().map(|map| map.object()).collect();
    std::fs::write(argument("LIST"), names.join("\n")).unwrap();
}

/// Two processes make `count` names in all at once; every one is new.
fn no_two_alike(count: usize) {
    let place = temporary();
    let lists = tempfile::tempdir().unwrap();
    let list = |i: usize| lists.path().join(i.to_string()).display().to_string();
    let half = (count / 2).to_string();
    let dir = place.path().to_str().unwrap();
    let mut children: Vec<Child> = (0..2)
        .map(|i| {
            let arguments = [("DIR", dir), ("COUNT", &half), ("LIST", &list(i))];
            start("namer", &arguments, Stdio::null())
        })
        .collect();
    assert!(children.iter_mut().all(|child| wait(child).success()));
    let lists = [0, 1].map(|i| std::fs::read_to_string(list(i)).unwrap());
    let names: HashSet<&str> = lists.iter().flat_map(|list| list.lines()).collect();
    assert_eq!(names.len(), count);
    assert_eq!(entries(place.path()).len(), 0);
}

/// `ALLOC_SHM_NAMES` makes more of them than fit into an ordinary test run.
#[test]
fn names_made_in_two_processes_at_once_are_all_different() {
    no_two_alike(std::env::var("ALLOC_SHM_NAMES").map_or(4000, |names| names.parse().unwrap()));
}

/// Holds one object of each kind until it is killed.
pub(crate) fn sleeper() {
    let dir = dir_argument();
    let label = |kind| dir.labelled(kind, &argument("LABEL")).unwrap();
    let _plain = MapOptions::unique(&dir).len(10).map().unwrap();
    let _labelled = MapOptions::shared_memory(&dir, &label(NameKind::Plain)).len(10).map().unwrap();
    let _counted = SharedMap::create_unique(&dir, 10).unwrap();
    let shared = label(NameKind::Counted);
    let _shared =
        SharedMap::attach(&dir, &shared).or_else(|_| SharedMap::create(&dir, &shared, 10)).unwrap();
    std::fs::write(argument("READY"), "").unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

fn sleeper_in(dir: &ShmDir, label: &str) -> Child {
    let flags = tempfile::tempdir().unwrap();
    let ready = flags.path().join("ready");
    let arguments = [
        ("DIR", dir.path().to_str().unwrap()),
        ("LABEL", label),
        ("READY", ready.to_str().unwrap()),
    ];
    let child = start("sleeper", &arguments, Stdio::null());
    let deadline = Instant::now() + Duration::from_secs(20);
    while !ready.exists() {
        assert!(Instant::now() < deadline, "the sleeper is not ready");
        std::thread::sleep(Duration::from_millis(1));
    }
    child
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn counts(swept: &Swept) -> [usize; 4] {
    assert!(swept.failed.is_empty(), "{:?}", swept.failed);
    [swept.removed.len(), swept.live, swept.foreign, swept.unowned]
}

#[test]
fn the_sweeper_takes_what_the_dead_left_and_nothing_else() {
    let place = temporary();
    let dir = test_dir(place.path());
    let first = sleeper_in(&dir, "a");
    let second = sleeper_in(&dir, "a");
    std::fs::write(dir.path().join("somebody-elses"), "").unwrap();
    std::fs::write(dir.path().join("t-mu1.1.1.0"), "").unwrap();
    // Each: a plain and a counted map of its own. Both: one counted map, one labelled plain map.
    assert_eq!(counts(&sweep(&dir).unwrap()), [0, 5, 1, 1]);
    kill(first);
    assert_eq!(counts(&sweep(&dir).unwrap()), [2, 3, 1, 1]);
    let shared = dir.labelled(NameKind::Counted, "a").unwrap();
    assert!(SharedMap::attach(&dir, &shared).is_ok(), "the second still holds it");
    kill(second);
    assert_eq!(counts(&sweep(&dir).unwrap()), [3, 0, 1, 1]);
    let mut left = entries(dir.path());
    left.sort();
    assert_eq!(left, ["somebody-elses", "t-mna", "t-mu1.1.1.0"], "not ours to judge");
}

#[test]
fn sweepers_at_the_same_time_do_not_hinder_each_other() {
    let place = temporary();
    let dir = test_dir(place.path());
    let dead = ProcessId::of(1).unwrap().map(|init| init.start_ticks()).unwrap_or(0) + 1;
    // Names of a process that never was: pid 1 with another start.
    let own = dir.unique(NameKind::Plain).unwrap();
    let namespace = own.as_str().split('.').nth(2).unwrap().to_owned();
    for i in 0..200 {
        let name = format!("t-mu1.{dead}.{namespace}.{i}");
        assert!(dir.parse(&name).is_some(), "{name}");
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    let removed: usize = std::thread::scope(|scope| {
        let sweeps: Vec<_> = (0..4).map(|_| scope.spawn(|| sweep(&dir).unwrap())).collect();
        sweeps.into_iter().map(|sweep| counts(&sweep.join().unwrap())[0]).sum()
    });
    assert!(removed >= 200, "each name is removed by one sweep at least");
    assert_eq!(entries(dir.path()).len(), 0);
}

/// An object between `open` and `ftruncate` is empty: attaching fails, and removes nothing.
#[test]
fn a_name_that_is_not_sized_yet_is_refused_and_left_alone() {
    let place = temporary();
    let dir = test_dir(place.path());
    let name = dir.labelled(NameKind::Plain, "half").unwrap();
    std::fs::write(dir.path().join(name.as_str()), "").unwrap();
    let attach = MapOptions::shared_memory(&dir, &name).create(Create::Never).len(100).map();
    assert!(matches!(attach, Err(Error::TooShort { actual: 0, .. })), "{attach:?}");
    let counted = dir.labelled(NameKind::Counted, "half").unwrap();
    std::fs::write(dir.path().join(counted.as_str()), "").unwrap();
    let attach = SharedMap::attach(&dir, &counted);
    assert!(matches!(attach, Err(Error::Header { .. })), "{attach:?}");
    assert_eq!(entries(dir.path()).len(), 2);
}
