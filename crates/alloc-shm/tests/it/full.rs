//! A file system that is full: an error that helps, and nothing else.

use crate::child::{argument, command, entries, temporary, test_dir, wait};
use alloc_shm::{Create, Error, MapOptions, NameKind, SharedMap};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use std::path::Path;
use std::process::{Command, Stdio};

/// Mounts a tmpfs of `bytes` on `path`, seen by this process and its children only.
///
/// Mounting needs privileges, or a user namespace that grants them (see [`may_mount`]).
pub(crate) fn mount_small(path: &Path, bytes: u64) -> nix::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS)?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    let options = format!("size={bytes},mode=700");
    mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::empty(), Some(options.as_str()))
}

/// Lets a command mount: as it is for root, otherwise inside a user namespace.
pub(crate) fn may_mount(command: Command) -> Command {
    if nix::unistd::geteuid().is_root() {
        return command;
    }
    let mut wrapped = Command::new("unshare");
    wrapped.args(["--user", "--map-root-user", "--mount", "--"]);
    wrapped.arg(command.get_program()).args(command.get_args());
    for (key, value) in command.get_envs() {
        wrapped.env(key, value.unwrap_or_default());
    }
    wrapped
}

/// What a process ends with that was not allowed to mount.
pub(crate) const MOUNT_REFUSED: i32 = 77;

const SIZE: u64 = 256 << 10;

/// The role: everything that takes space, on a mount that has little.
pub(crate) fn on_a_small_mount() {
    let place = argument("DIR");
    let place = Path::new(&place);
    if let Err(errno) = mount_small(place, SIZE) {
        eprintln!("mounting is refused here ({errno})");
        std::process::exit(MOUNT_REFUSED);
    }
    let dir = test_dir(place);
    let mount = place.display().to_string();
    let full = |error: Error, bytes: u64, left: u64| match &error {
        Error::NoSpace { wanted, free, mount: at, .. } => {
            assert_eq!((*wanted, *free, at.as_str()), (bytes, left, mount.as_str()), "{error}");
            let text = error.to_string();
            assert!(text.contains(&bytes.to_string()) && text.contains(&mount), "{text}");
        }
        other => panic!("{other}"),
    };
    let mib = 1 << 20;
    full(MapOptions::unique(&dir).len(mib).map().unwrap_err(), mib, SIZE);
    full(MapOptions::file(place.join("file")).len(mib).map().unwrap_err(), mib, SIZE);
    full(SharedMap::create_unique(&dir, mib).unwrap_err(), mib + 4096, SIZE);
    assert_eq!(entries(place), [""; 0], "nothing is left behind");

    // Three quarters taken: what fits still fits, what does not changes nothing.
    let name = dir.labelled(NameKind::Plain, "big").unwrap();
    let big = MapOptions::shared_memory(&dir, &name).create(Create::Exclusive);
    let big = big.len(SIZE * 3 / 4).map().unwrap();
    big.write_at(0, &vec![5; SIZE as usize * 3 / 4]).unwrap();
    let grow = MapOptions::shared_memory(&dir, &name).len(mib).map().unwrap_err();
    full(grow, mib, SIZE / 4);
    let path = place.join(name.as_str());
    assert_eq!(std::fs::metadata(&path).unwrap().len(), SIZE * 3 / 4, "not grown");
    full(MapOptions::unique(&dir).len(SIZE / 2).map().unwrap_err(), SIZE / 2, SIZE / 4);
    // A hole that cannot be filled is an error too, for whoever maps it.
    let sparse = place.join("sparse");
    std::fs::File::create(&sparse).unwrap().set_len(mib).unwrap();
    full(MapOptions::file(&sparse).map().unwrap_err(), mib, SIZE / 4);
    std::fs::remove_file(&sparse).unwrap();
    let rest = MapOptions::unique(&dir).len(SIZE / 4).map().unwrap();
    rest.write_at(0, &vec![6; SIZE as usize / 4]).unwrap();
    assert!(big.to_vec().iter().all(|&byte| byte == 5));
    drop((big, rest));
    assert_eq!(entries(place), [""; 0]);
    // No space that anything took is still taken.
    let free = nix::sys::statvfs::statvfs(place).unwrap();
    assert_eq!(free.blocks_available() * free.fragment_size(), SIZE);
}

#[test]
fn a_full_mount_is_an_error_that_says_what_was_wanted_and_what_is_left() {
    let place = temporary();
    let dir = place.path().to_str().unwrap();
    let mut command = may_mount(command("full", &[("DIR", dir)]));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let status = match command.spawn() {
        Ok(mut child) => wait(&mut child),
        Err(error) => return eprintln!("a full mount is not tested: no namespaces ({error})"),
    };
    if status.code() == Some(MOUNT_REFUSED) {
        return eprintln!("a full mount is not tested: this user may not mount");
    }
    assert!(status.success(), "{status}");
}
