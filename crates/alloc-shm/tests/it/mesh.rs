//! Very many buffers among several processes that have few descriptors.

use crate::child::{argument, start, wait};
use crate::traces::{descriptors, mappings};
use alloc_shm::{
    ArenaPool, Channel, Error, Item, Listener, PoolConfig, ReceivedBlock, SocketAddress,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const NODES: usize = 8;
const DESCRIPTORS: u64 = 256;
const SOON: Duration = Duration::from_secs(60);
/// Tag of the note that says how many buffers were sent.
const DONE: u64 = u64::MAX;

fn address(mesh: &str, node: usize) -> SocketAddress {
    SocketAddress::Abstract(format!("alloc-shm-mesh-{mesh}-{node}"))
}

/// Connects this node with every other.
fn connect(mesh: &str, me: usize) -> Vec<Channel> {
    let listener = Listener::bind(&address(mesh, me)).unwrap();
    let mut peers: Vec<Channel> = (0..me)
        .map(|peer| {
            let deadline = Instant::now() + SOON;
            loop {
                match Channel::connect(&address(mesh, peer)) {
                    Ok(channel) => return channel,
                    Err(Error::NotFound { .. }) if Instant::now() < deadline => {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        })
        .collect();
    peers.extend((me + 1..NODES).map(|_| listener.accept(SOON).unwrap()));
    peers.into_iter().map(|peer| peer.with_patience(Duration::from_millis(1))).collect()
}

/// The content of the buffer with this tag: its length and every byte follow from the tag.
struct Pattern(Vec<u8>);

impl Pattern {
    fn new() -> Self {
        Pattern((0..4096).map(|i| (i % 251) as u8).collect())
    }

    fn of(&self, tag: u64) -> &[u8] {
        let mixed = tag.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.0[(mixed >> 32) as usize % 1000..][..1 + (mixed >> 50) as usize % 600]
    }
}

/// What one node has got so far.
#[derive(Default)]
struct Inbox {
    blocks: Vec<(u64, ReceivedBlock)>,
    announced: u64,
    done: usize,
}

impl Inbox {
    /// Takes everything that is here; answers how much that was. A peer that has everything it
    /// wanted may be gone already.
    fn read(&mut self, peers: &[Channel]) -> usize {
        let mut count = 0;
        for peer in peers {
            while let Some(received) = match peer.try_receive() {
                Err(Error::PeerGone) => None,
                result => result.unwrap(),
            } {
                self.take(received.tag, received.item);
                count += 1;
            }
        }
        count
    }

    fn take(&mut self, tag: u64, item: Item) {
        match item {
            Item::Block(block) => self.blocks.push((tag, block)),
            Item::Note(count) if tag == DONE => {
                self.announced += u64::from_le_bytes(count.try_into().unwrap());
                self.done += 1;
            }
            other => panic!("{other:?}"),
        }
    }
}

/// The role: sends its share, receives everyone's, keeps all of it at once, checks it, gives it
/// back.
pub(crate) fn node() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, DESCRIPTORS, hard).unwrap();
    let me: usize = argument("NODE").parse().unwrap();
    let share: u64 = argument("SHARE").parse().unwrap();
    let peers = connect(&argument("MESH"), me);
    let pool = ArenaPool::new(PoolConfig { arena_bytes: 1 << 20, arenas_max: 16 });
    let pattern = Pattern::new();
    let mut inbox = Inbox::default();
    let mut sent = vec![0u64; peers.len()];
    for i in 0..share {
        let tag = (me as u64) << 32 | i;
        let content = pattern.of(tag);
        let mut block = pool.allocate(content.len() as u64).unwrap();
        block.copy_from_slice(content);
        let to = i as usize % peers.len();
        let block = block.share();
        while let Err(error) = peers[to].send_block(&block, tag) {
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
            inbox.read(&peers);
        }
        sent[to] += 1;
        if i.is_multiple_of(16) {
            inbox.read(&peers);
        }
    }
    for (peer, count) in peers.iter().zip(&sent) {
        while let Err(error) = peer.send_note(&count.to_le_bytes(), DONE) {
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
            inbox.read(&peers);
        }
    }
    let deadline = Instant::now() + SOON;
    while inbox.done < peers.len() {
        assert!(Instant::now() < deadline, "{} of {} peers are done", inbox.done, peers.len());
        if inbox.read(&peers) == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    assert_eq!(inbox.blocks.len() as u64, inbox.announced);
    for (tag, block) in &inbox.blocks {
        assert_eq!(&block[..], pattern.of(*tag), "buffer {tag:#x}");
    }
    // All of this node's buffers are alive in its peers, or were, and all of theirs are here.
    let mine = descriptors("self", |_| true);
    let arenas = pool.arenas();
    let expected = arenas + peers.len() + 8;
    assert!(mine <= expected, "{mine} descriptors for {share} buffers in {arenas} arenas");
    assert!(mappings("self", "memfd:arena") <= NODES * 16);
    inbox.blocks.clear();
    // All at once, not one after the other: each waits for all.
    while peers.iter().map(Channel::lent).sum::<usize>() > 0 {
        assert!(Instant::now() < deadline, "not everything came back");
        std::thread::sleep(Duration::from_micros(200));
    }
    assert_eq!(pool.stats().live_blocks, 0);
    pool.trim();
    assert_eq!(descriptors("self", |link| link.contains("memfd:arena")), 0);
    if me == 0 && std::env::var("SAY").is_ok() {
        eprintln!(
            "node 0: {share} buffers sent, {} received, {arenas} arenas, {mine} descriptors",
            inbox.announced
        );
    }
}

#[test]
fn a_hundred_thousand_buffers_pass_among_eight_processes_with_256_descriptors() {
    let mesh = std::process::id().to_string();
    let share = (100_000 / NODES).to_string();
    let mut nodes: Vec<Child> = (0..NODES)
        .map(|node| {
            let node = node.to_string();
            let arguments = [("MESH", mesh.as_str()), ("NODE", &node), ("SHARE", &share)];
            start("mesh", &arguments, Stdio::null())
        })
        .collect();
    let ends: Vec<bool> = nodes.iter_mut().map(|node| wait(node).success()).collect();
    assert_eq!(ends, [true; NODES]);
}
