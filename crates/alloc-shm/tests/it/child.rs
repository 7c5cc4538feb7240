//! Processes that play a part in a test: this same binary, started again with a role.

use crate::{crash, full, life_cycle, limits, mesh, names};
use alloc_shm::{Channel, ShmDir};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const ROLE: &str = "ALLOC_SHM_ROLE";

/// What a process started for a test does.
fn play(role: &str) {
    match role {
        "echo" => {
            let channel = Channel::from_stdin().unwrap();
            let word = argument("WORD");
            channel.send_note(word.as_bytes(), 0).unwrap();
        }
        "life-cycle" => life_cycle::receiver(),
        "survivor" => crash::survivor(),
        "victim" => crash::victim(),
        "full" => full::on_a_small_mount(),
        "steady" => limits::steady_sender(),
        "limited" => limits::limited_receiver(),
        "no-address-space" => limits::without_address_space(),
        "mesh" => mesh::node(),
        "namer" => names::namer(),
        "sleeper" => names::sleeper(),
        other => panic!("no role {other:?}"),
    }
}

/// The way in for processes that have a role. In the test run itself it starts one.
#[test]
fn enter() {
    if let Ok(role) = std::env::var(ROLE) {
        play(&role);
        std::process::exit(0);
    }
    let (channel, other) = Channel::for_child().unwrap();
    let mut child = start("echo", &[("WORD", "played")], other.into());
    let note = channel.receive_timeout(Duration::from_secs(20)).unwrap();
    assert!(matches!(note.item, alloc_shm::Item::Note(word) if word == b"played"));
    assert!(wait(&mut child).success());
}

/// The command that starts a role; the arguments mean something to the test harness only.
pub(crate) fn command(role: &str, arguments: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["child::enter", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).stdout(Stdio::null());
    for (key, value) in arguments {
        command.env(key, value);
    }
    command
}

/// Starts a role.
pub(crate) fn start(role: &str, arguments: &[(&str, &str)], stdin: Stdio) -> Child {
    command(role, arguments).stdin(stdin).spawn().unwrap()
}

/// Starts a role with a channel to it, over which names of `dir` may come.
pub(crate) fn start_with_channel(
    role: &str,
    arguments: &[(&str, &str)],
    dir: &ShmDir,
) -> (Child, Channel) {
    let (channel, other): (Channel, OwnedFd) = Channel::for_child().unwrap();
    let child = start(role, arguments, other.into());
    (child, channel.with_dir(dir.clone()))
}

/// Waits for the end of a process, for a minute at most.
pub(crate) fn wait(child: &mut Child) -> ExitStatus {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("process {} hangs", child.id());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// An argument of a role.
pub(crate) fn argument(key: &str) -> String {
    std::env::var(key).unwrap_or_else(|_| panic!("no argument {key}"))
}

/// An argument that is a directory of shared memory, with the prefix the tests use.
pub(crate) fn dir_argument() -> ShmDir {
    test_dir(Path::new(&argument("DIR")))
}

pub(crate) fn test_dir(path: &Path) -> ShmDir {
    ShmDir::at(path).unwrap().with_prefix("t").unwrap()
}

/// A directory on the system's shared-memory mount, gone with the value.
pub(crate) fn temporary() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// Entries of a directory.
pub(crate) fn entries(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(path).unwrap().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
