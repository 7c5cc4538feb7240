//! Processes that play a part in a test: this same binary, started again with a role.

use crate::crash;
use alloc_shm::Channel;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ROLE: &str = "ALLOC_IPC_ROLE";
const SEED: &str = "ALLOC_IPC_ROLE_SEED";

/// The way in for processes that have a role. Without one, a test that a child starts and ends.
#[test]
fn enter() {
    let Ok(role) = std::env::var(ROLE) else {
        let (mut child, channel) = start("echo", 7);
        let note = channel.receive_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(note.tag, 7);
        assert!(wait(&mut child).success());
        return;
    };
    let seed = std::env::var(SEED).unwrap().parse().unwrap();
    let channel = Channel::from_stdin().unwrap();
    match role.as_str() {
        "echo" => channel.send_note(b"", seed).unwrap(),
        "consumer" => crash::consumer(channel, seed),
        "producer" => crash::producer(channel, seed),
        other => panic!("no role {other:?}"),
    }
    std::process::exit(0);
}

/// Starts a role with a channel to it.
pub(crate) fn start(role: &str, seed: u64) -> (Child, Channel) {
    let (channel, other): (Channel, OwnedFd) = Channel::for_child().unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["child::enter", "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(SEED, seed.to_string())
        .stdin(Stdio::from(other))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    (child, channel)
}

/// Waits for the end of a process, for a minute at most.
pub(crate) fn wait(child: &mut Child) -> std::process::ExitStatus {
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
