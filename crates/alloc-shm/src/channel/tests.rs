use super::*;
use crate::arena::{Arena, ArenaPool, PoolConfig};
use crate::error::Refusal;
use crate::map::MapOptions;
use crate::memfd::Draft;
use crate::traces;
use crate::wire::{Kind, MESSAGE_MAX, Message};
use std::os::fd::AsRawFd;

const SESSION: u64 = 77;
const SOON: Duration = Duration::from_secs(10);

/// A channel whose other end says whatever a test wants.
struct Forger {
    channel: Channel,
    socket: OwnedFd,
    number: u64,
}

impl Forger {
    fn new() -> Self {
        let (channel, socket) = Channel::for_child().unwrap();
        let mut forger = Forger { channel, socket, number: 0 };
        forger.say(Message { object: SESSION, ..Message::new(Kind::Hello) }, None);
        forger
    }

    /// Sends a message of the session, in its turn.
    fn say(&mut self, message: Message, fd: Option<BorrowedFd<'_>>) {
        let descriptors = u8::from(fd.is_some());
        let message = Message { number: self.number, descriptors, ..message };
        self.number += 1;
        self.raw(&message.encode(SESSION), fd);
    }

    fn raw(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) {
        socket::send(self.socket.as_fd(), bytes, fd).unwrap();
    }

    fn refusal(&self) -> Refusal {
        match self.channel.receive_timeout(SOON) {
            Err(Error::Refused(refusal)) => refusal,
            other => panic!("not refused: {other:?}"),
        }
    }

    /// The channel goes on after whatever was refused.
    fn goes_on(&mut self) {
        self.say(Message { tag: 5, ..Message::new(Kind::Note) }, None);
        assert_eq!(self.channel.receive_timeout(SOON).unwrap().tag, 5);
    }

    /// The messages that the channel has sent.
    fn heard(&self) -> Vec<Message> {
        let mut session = None;
        let mut heard = Vec::new();
        let mut buffer = [0; MESSAGE_MAX];
        while let Ok(packet) = socket::receive(self.socket.as_fd(), &mut buffer) {
            let bytes = &buffer[..packet.len];
            let message = Message::decode(bytes, session, packet.descriptors.len()).unwrap();
            session = session.or(Some(message.object));
            heard.push(message);
        }
        heard
    }
}

fn inode(fd: impl AsFd) -> u64 {
    file::info(fd.as_fd()).unwrap().id.inode()
}

#[test]
fn truncated_foreign_replayed_and_altered_messages_are_refused() {
    let mut forger = Forger::new();
    let note = Message { number: 1, ..Message::new(Kind::Note) };
    let good = note.encode(SESSION);

    forger.raw(&good[..20], None);
    assert_eq!(forger.refusal(), Refusal::Truncated { got: 20, needed: 72 });
    forger.raw(&[0; MESSAGE_MAX + 50], None);
    assert!(matches!(forger.refusal(), Refusal::TooLong { .. }));
    forger.raw(&[1; 100], None);
    assert_eq!(forger.refusal(), Refusal::Foreign);
    forger.raw(&note.encode(SESSION + 1), None);
    assert_eq!(forger.refusal(), Refusal::Check, "made for another session");
    let mut altered = good.clone();
    altered[50] ^= 1;
    forger.raw(&altered, None);
    assert_eq!(forger.refusal(), Refusal::Check);
    forger.raw(&Message { number: 2, ..note.clone() }.encode(SESSION), None);
    assert_eq!(forger.refusal(), Refusal::Sequence { got: 2, expected: 1 });
    forger.goes_on();
    forger.raw(&good, None);
    assert_eq!(forger.refusal(), Refusal::Sequence { got: 1, expected: 2 }, "replayed");
    forger.say(Message { object: 3, ..Message::new(Kind::Hello) }, None);
    forger.number -= 1;
    assert_eq!(forger.refusal(), Refusal::Kind(Kind::Hello as u8), "a second hello");
    forger.goes_on();
    forger.say(Message::new(Kind::Request), None);
    assert_eq!(forger.refusal(), Refusal::Kind(Kind::Request as u8));
    forger.goes_on();
}

#[test]
fn a_conversation_begins_with_a_hello() {
    let (channel, socket) = Channel::for_child().unwrap();
    let note = Message { object: SESSION, ..Message::new(Kind::Note) };
    socket::send(socket.as_fd(), &note.encode(SESSION), None).unwrap();
    let refused = channel.receive_timeout(SOON);
    let kind = Refusal::Kind(Kind::Note as u8);
    assert!(matches!(refused, Err(Error::Refused(r)) if r == kind), "{refused:?}");
}

#[test]
fn descriptors_that_do_not_belong_are_refused_and_closed() {
    let mut forger = Forger::new();
    let label = "does-not-belong";
    let map = MapOptions::memfd(label).len(4096).keep_descriptor().map().unwrap();
    let generation = inode(&map);
    let here = || traces::own(label).0;
    assert_eq!(here(), 1);
    let claim = |kind, len| Message { len, total: len, generation, ..Message::new(kind) };

    forger.say(claim(Kind::Descriptor, 4097), Some(map.as_fd()));
    assert_eq!(forger.refusal(), Refusal::Unbacked { actual: 4096, claimed: 4097 });
    forger.say(Message { generation: 1, ..claim(Kind::Descriptor, 10) }, Some(map.as_fd()));
    assert!(matches!(forger.refusal(), Refusal::Field(_)), "another object");
    forger.say(Message { offset: u64::MAX, ..claim(Kind::Descriptor, 10) }, Some(map.as_fd()));
    assert!(matches!(forger.refusal(), Refusal::Field(_)), "wraps");
    forger.say(claim(Kind::Frozen, 10), Some(map.as_fd()));
    assert_eq!(forger.refusal(), Refusal::Unsealed);
    forger.say(claim(Kind::Arena, 4096), Some(map.as_fd()));
    assert_eq!(forger.refusal(), Refusal::Unsealed);

    // Kinds that carry none, and a message that lies about how many it carries.
    forger.say(Message::new(Kind::Note), Some(map.as_fd()));
    forger.number -= 1;
    assert_eq!(forger.refusal(), Refusal::Descriptors { got: 1, expected: 0 });
    forger.say(claim(Kind::Descriptor, 10), None);
    forger.number -= 1;
    assert_eq!(forger.refusal(), Refusal::Descriptors { got: 0, expected: 1 });
    let raw = map.as_fd().as_raw_fd();
    let two = [raw, raw];
    let message = Message { descriptors: 1, number: forger.number, ..claim(Kind::Frozen, 1) };
    nix::sys::socket::sendmsg::<()>(
        forger.socket.as_raw_fd(),
        &[std::io::IoSlice::new(&message.encode(SESSION))],
        &[nix::sys::socket::ControlMessage::ScmRights(&two)],
        nix::sys::socket::MsgFlags::empty(),
        None,
    )
    .unwrap();
    assert_eq!(forger.refusal(), Refusal::Descriptors { got: 2, expected: 1 });
    assert_eq!(here(), 1, "every refused descriptor is closed");
    forger.goes_on();
}

#[test]
fn blocks_that_are_stale_or_were_never_there_are_refused_and_given_back() {
    let mut forger = Forger::new();
    let arena = Arena::new(1 << 16).unwrap();
    let block = arena.allocate(100).unwrap().share();
    let addr = block.addr();
    let claim = Message {
        object: addr.arena,
        offset: addr.offset,
        len: addr.len,
        generation: addr.generation,
        ..Message::new(Kind::Block)
    };
    forger.say(claim.clone(), None);
    assert_eq!(forger.refusal(), Refusal::UnknownArena(addr.arena));
    let announce = Message {
        object: arena.id(),
        total: arena.len(),
        generation: inode(&arena),
        ..Message::new(Kind::Arena)
    };
    forger.say(announce.clone(), Some(arena.as_fd()));
    forger.say(claim.clone(), None);
    let received = forger.channel.receive_timeout(SOON).unwrap();
    assert!(matches!(&received.item, Item::Block(got) if got.addr() == addr));
    for wrong in [
        Message { offset: addr.offset + 64, ..claim.clone() },
        Message { offset: addr.offset + 1, ..claim.clone() },
        Message { offset: 0, ..claim.clone() },
        Message { offset: u64::MAX - 7, ..claim.clone() },
        Message { len: 1 << 16, ..claim.clone() },
        Message { len: 99, ..claim.clone() },
        Message { generation: addr.generation + 1, ..claim.clone() },
        Message { generation: 0, ..claim.clone() },
    ] {
        forger.say(wrong, None);
        let refusal = forger.refusal();
        assert!(matches!(refusal, Refusal::Field(_) | Refusal::Stale { .. }), "{refusal}");
    }
    forger.say(announce, Some(arena.as_fd()));
    assert!(matches!(forger.refusal(), Refusal::Field(_)), "announced twice");
    drop(block);
    forger.say(claim.clone(), None);
    assert_eq!(forger.refusal(), Refusal::Stale { got: addr.generation, found: 0 });
    // Its place is taken by another block: the old address stays stale.
    let _newer = arena.allocate(100).unwrap().share();
    forger.say(claim, None);
    assert!(matches!(forger.refusal(), Refusal::Stale { .. }));
    drop(received);
    let heard = forger.heard();
    let given_back: usize = heard
        .iter()
        .filter(|message| message.kind == Kind::Release)
        .map(|message| message.payload.len() / 8)
        .sum();
    assert_eq!(given_back, 12, "one received, eleven refused");
}

#[test]
fn names_that_are_not_names_and_returns_of_what_was_not_lent_are_refused() {
    let mut forger = Forger::new();
    for name in ["", "../etc/passwd", "gsm-mn1", "other-rnx"] {
        forger.say(Message { payload: name.into(), ..Message::new(Kind::Named) }, None);
        let refused = forger.channel.receive_timeout(SOON);
        assert!(matches!(refused, Err(Error::Refused(_) | Error::Name { .. })), "{refused:?}");
    }
    forger.say(Message { payload: vec![9; 8], ..Message::new(Kind::Release) }, None);
    assert!(matches!(forger.refusal(), Refusal::NotLent(_)));
    forger.say(Message { payload: vec![9; 7], ..Message::new(Kind::Release) }, None);
    assert!(matches!(forger.refusal(), Refusal::Field(_)));
    forger.goes_on();
}

#[test]
fn everything_arrives_as_it_was_sent() {
    let (here, there) = Channel::pair().unwrap();
    let map = MapOptions::memfd("all").offset(100).len(500).keep_descriptor().map().unwrap();
    map.write_at(0, b"shared").unwrap();
    let mut draft = Draft::new(10).unwrap();
    draft.fill(3);
    let frozen = draft.freeze().unwrap();
    let named = SharedMap::create_unique(&ShmDir::system(), 10).unwrap();
    named.write_at(0, b"named").unwrap();
    let arena = Arena::new(1 << 16).unwrap();
    let mut block = arena.allocate(5).unwrap();
    block.copy_from_slice(b"block");

    here.send_descriptor(&map, 1).unwrap();
    here.send_frozen(&frozen, 2).unwrap();
    here.send_named(&named, 3).unwrap();
    here.send_block(&block.share(), 4).unwrap();
    here.send_note(b"note", 5).unwrap();
    assert_eq!(here.lent(), 2);
    drop(named);

    let mut items = (1..=5).map(|tag| {
        let received = there.receive_timeout(SOON).unwrap();
        assert_eq!(received.tag, tag);
        received.item
    });
    let Some(Item::Descriptor(incoming)) = items.next() else { panic!() };
    assert_eq!((incoming.offset(), incoming.len(), incoming.generation()), (100, 500, inode(&map)));
    let other = incoming.map().unwrap();
    other.write_at(6, b" both ways").unwrap();
    assert_eq!(&map.to_vec()[..16], b"shared both ways");
    let Some(Item::Frozen(got)) = items.next() else { panic!() };
    assert_eq!(&got[..], [3; 10]);
    let Some(Item::Named(named)) = items.next() else { panic!() };
    let Some(Item::Block(block)) = items.next() else { panic!() };
    assert_eq!(&block[..], b"block");
    let Some(Item::Note(note)) = items.next() else { panic!() };
    assert_eq!(note, b"note");
    drop(items);

    // The name was attached to, so the sender holds it no more; the block is still out.
    assert_eq!((here.lent(), named.holds()), (1, 1));
    assert_eq!(arena.stats().live_blocks, 1);
    let again = block.clone();
    drop(block);
    assert_eq!(here.lent(), 1);
    drop(again);
    here.settle(SOON).unwrap();
    assert_eq!(arena.stats().live_blocks, 0);
    assert!(there.try_receive().unwrap().is_none());
    let timeout = there.receive_timeout(Duration::from_millis(5));
    assert!(matches!(timeout, Err(Error::Timeout { millis: 5 })), "{timeout:?}");
    drop(here);
    assert!(matches!(there.receive(), Err(Error::PeerGone)));
    assert!(matches!(there.send_note(b"", 0), Err(Error::PeerGone)));
}

#[test]
fn what_was_lent_comes_back_when_the_peer_is_gone() {
    let (here, there) = Channel::pair().unwrap();
    let arena = Arena::new(1 << 16).unwrap();
    for tag in 0..10 {
        here.send_block(&arena.allocate(100).unwrap().share(), tag).unwrap();
    }
    let kept = there.receive().unwrap();
    assert_eq!((here.lent(), arena.stats().live_blocks), (10, 10));
    // Nobody reads the other nine, but the one that was received is still being read.
    drop(there);
    assert!(matches!(here.settle(Duration::from_millis(20)), Err(Error::Timeout { .. })));
    assert_eq!((here.lent(), arena.stats().live_blocks), (10, 10));
    drop(kept);
    here.settle(SOON).unwrap();
    assert_eq!((here.lent(), arena.stats().live_blocks), (0, 0));
}

#[test]
fn a_block_whose_reader_can_no_longer_be_heard_is_never_used_again() {
    let (here, there) = Channel::pair().unwrap();
    let arena = Arena::new(1 << 16).unwrap();
    let mut block = arena.allocate(1000).unwrap();
    block.fill(9);
    here.send_block(&block.share(), 0).unwrap();
    here.send_block(&arena.allocate(1000).unwrap().share(), 1).unwrap();
    let Item::Block(read) = there.receive().unwrap().item else { panic!() };
    drop(there.receive().unwrap());
    drop(here);
    assert_eq!(arena.stats().live_blocks, 1, "the one given back is free, the other retired");
    while let Ok(mut other) = arena.allocate(1000) {
        other.fill(1);
        std::mem::forget(other);
    }
    assert!(read.iter().all(|&byte| byte == 9));
}

#[test]
fn two_ends_that_only_send_do_not_block_each_other() {
    let (here, there) = Channel::pair().unwrap();
    let send_and_then_receive = |channel: &Channel| {
        for tag in 0..5000 {
            channel.send_note(&[0; 512], tag).unwrap();
        }
        for tag in 0..5000 {
            assert_eq!(channel.receive_timeout(SOON).unwrap().tag, tag);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| send_and_then_receive(&here));
        send_and_then_receive(&there);
    });
}

#[test]
fn many_threads_share_one_channel() {
    let (here, there) = Channel::pair().unwrap();
    let pool = ArenaPool::new(PoolConfig { arena_bytes: 1 << 16, arenas_max: 64 });
    let sum = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        for sender in 0..3u8 {
            let (here, pool) = (&here, &pool);
            scope.spawn(move || {
                for tag in 0..300 {
                    let mut block = pool.allocate(200).unwrap();
                    block.fill(sender);
                    here.send_block(&block.share(), tag).unwrap();
                }
            });
        }
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..300 {
                    let Item::Block(block) = there.receive_timeout(SOON).unwrap().item else {
                        panic!()
                    };
                    assert!(block.iter().all(|&byte| byte == block[0]));
                    sum.fetch_add(block[0].into(), std::sync::atomic::Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(sum.into_inner(), 900);
    here.settle(SOON).unwrap();
    assert_eq!(pool.stats().live_blocks, 0);
    pool.trim();
    assert_eq!(pool.arenas(), 0);
}

#[test]
fn peers_forget_arenas_that_are_gone() {
    let (here, there) = Channel::pair().unwrap();
    let imports = || there.shared.rx.lock().arenas.len();
    for round in 0..5 {
        let arena = Arena::new(1 << 16).unwrap();
        here.send_block(&arena.allocate(10).unwrap().share(), round).unwrap();
        drop(there.receive().unwrap());
        here.settle(SOON).unwrap();
        assert_eq!(imports(), 1);
    }
    here.send_note(b"", 0).unwrap();
    drop(there.receive().unwrap());
    assert_eq!(imports(), 0);
}

#[test]
fn long_notes_and_sockets_of_another_kind_are_refused() {
    let (here, _there) = Channel::pair().unwrap();
    assert!(matches!(here.send_note(&[0; 1025], 0), Err(Error::Range { .. })));
    let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let refused = Channel::from_socket(stream.into());
    assert!(matches!(refused, Err(Error::Os { .. })), "{refused:?}");
}

/// The kernel tells of unread messages at a dead peer before it hands out what the peer had sent.
#[test]
fn what_a_peer_sent_is_received_though_it_died_without_reading() {
    let (here, there) = Channel::pair().unwrap();
    here.send_note(b"never read", 0).unwrap();
    there.shared.rx.lock().peer_gone = true; // it reads nothing while it sends
    for tag in 0..3 {
        there.send_note(b"last words", tag).unwrap();
    }
    drop(there);
    for tag in 0..3 {
        assert_eq!(here.receive().unwrap().tag, tag);
    }
    assert!(matches!(here.receive(), Err(Error::PeerGone)));
}

#[test]
fn patience_ends_with_nothing_sent() {
    let (here, there) = Channel::pair().unwrap();
    let here = here.with_patience(Duration::from_millis(2));
    let arena = Arena::new(1 << 16).unwrap();
    let block = arena.allocate(1).unwrap().share();
    let mut sent = 0;
    let error = loop {
        match here.send_block(&block, sent) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Timeout { millis: 2 }), "{error}");
    assert_eq!(here.lent() as u64, sent);
    for tag in 0..sent {
        assert_eq!(there.receive().unwrap().tag, tag);
    }
    here.send_block(&block, sent).unwrap();
    assert_eq!(there.receive().unwrap().tag, sent);
    here.settle(SOON).unwrap();
}

#[test]
fn tokens_and_loans_bring_bytes_and_any_descriptor() {
    let (here, there) = Channel::pair().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    here.send_token(b"plain", None, 1).unwrap();
    here.send_token(b"pipe", Some(reader.as_fd()), 2).unwrap();
    let kept = Arc::new(());
    here.lend(b"loan", Some(reader.as_fd()), Arc::clone(&kept), 3).unwrap();
    let next = || there.receive_timeout(SOON).unwrap();
    assert!(matches!(next().item, Item::Token(bytes, None) if bytes == b"plain"));
    let Item::Token(bytes, Some(pipe)) = next().item else { panic!("a token was sent") };
    assert_eq!((&bytes[..], inode(&pipe)), (&b"pipe"[..], inode(&writer)));
    let Received { tag: 3, item: Item::Borrowed(mut loan) } = next() else {
        panic!("a loan was sent")
    };
    assert_eq!(inode(loan.take_descriptor().unwrap()), inode(&writer));
    assert_eq!((loan.bytes(), here.lent(), Arc::strong_count(&kept)), (&b"loan"[..], 1, 2));
    drop(loan);
    here.settle(SOON).unwrap();
    assert_eq!(Arc::strong_count(&kept), 1);
    assert!(matches!(here.lend(&[0; 1025], None, Arc::clone(&kept), 0), Err(Error::Range { .. })));
    assert_eq!(Arc::strong_count(&kept), 1, "nothing was sent, nothing is kept");
}

#[test]
fn loans_end_with_the_peer() {
    let (here, there) = Channel::pair().unwrap();
    let kept = Arc::new(());
    for _ in 0..3 {
        here.lend(b"", None, Arc::clone(&kept), 0).unwrap();
    }
    let Item::Borrowed(held) = there.receive_timeout(SOON).unwrap().item else {
        panic!("a loan was sent")
    };
    drop(there);
    assert_eq!((here.lent(), Arc::strong_count(&kept)), (3, 4), "a loan keeps the connection");
    drop(held);
    assert_eq!((here.lent(), Arc::strong_count(&kept)), (0, 1));
    assert!(matches!(here.lend(b"", None, Arc::clone(&kept), 0), Err(Error::PeerGone)));
    assert_eq!(Arc::strong_count(&kept), 1);
}
