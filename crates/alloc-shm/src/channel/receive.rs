//! The receiving half.

use super::{
    Answers, Borrowed, INBOX_MAX, Incoming, Item, Loan, Received, ReceivedBlock, Rx, Shared,
};
use crate::arena::{BlockAddr, Import};
use crate::error::{Error, Refusal, Result};
use crate::memfd::{self, Frozen};
use crate::os::{file, socket};
use crate::refcount::SharedMap;
use crate::steps::{Step, reach};
use crate::wire::{Kind, MESSAGE_MAX, Message, decode_numbers};
use nix::errno::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What reading from the socket came to.
enum Read {
    /// Something was read, and nothing of it concerns the user.
    Nothing,
    Message(Received),
    /// There is nothing to read now.
    Empty,
}

impl Shared {
    pub(super) fn receive(
        self: &Arc<Self>,
        until: Option<(Instant, Duration)>,
    ) -> Result<Received> {
        let mut rx = self.rx.lock();
        loop {
            if let Some(received) = self.receive_now(&mut rx)? {
                return Ok(received);
            }
            self.wait_to_receive(until)?;
        }
    }

    /// The next message, if it is here.
    pub(super) fn receive_now(self: &Arc<Self>, rx: &mut Rx) -> Result<Option<Received>> {
        if let Some(received) = rx.inbox.pop_front() {
            return received.map(Some);
        }
        loop {
            match self.read(rx)? {
                Read::Message(received) => return Ok(Some(received)),
                Read::Nothing => {}
                Read::Empty => return Ok(None),
            }
        }
    }

    /// Waits until there is something to read, or room for the answers that are due.
    pub(super) fn wait_to_receive(&self, until: Option<(Instant, Duration)>) -> Result<()> {
        self.flush();
        let answers_due = !self.answers.lock().is_empty();
        let deadline = until.map(|(deadline, _)| deadline);
        let ready = socket::wait(self.socket.as_fd(), answers_due, deadline)
            .map_err(|errno| Error::os("wait for", "a peer", errno))?;
        match (ready, until) {
            (socket::Ready::TimedOut, Some((_, timeout))) => {
                Err(Error::Timeout { millis: timeout.as_millis() as u64 })
            }
            _ => Ok(()),
        }
    }
}

impl Shared {
    /// Reads one packet, if there is one, and does what it says.
    fn read(self: &Arc<Self>, rx: &mut Rx) -> Result<Read> {
        if rx.peer_gone {
            return Err(Error::PeerGone);
        }
        let Some((message, fd)) = self.read_message(rx)? else { return Ok(Read::Empty) };
        let Message { kind, number, tag, object, .. } = message;
        match self.take(rx, message, fd) {
            Ok(Some(item)) => Ok(Read::Message(Received { tag, item })),
            Ok(None) => Ok(Read::Nothing),
            Err(error) => {
                self.decline(kind, number, object);
                Err(error)
            }
        }
    }

    /// Reads one packet and checks that it is the next message of this session.
    fn read_message(&self, rx: &mut Rx) -> Result<Option<(Message, Option<OwnedFd>)>> {
        let mut buffer = [0; MESSAGE_MAX + 1];
        let received =
            reach(Step::Receive).and_then(|()| socket::receive(self.socket.as_fd(), &mut buffer));
        let mut packet = match received {
            Ok(packet) => packet,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            Err(Errno::ECONNRESET) => return Err(self.peer_is_gone(rx)),
            Err(errno) => return Err(Error::os("receive from", "a peer", errno)),
        };
        if packet.len == 0 && packet.descriptors.is_empty() && !packet.descriptors_lost {
            return Err(self.peer_is_gone(rx));
        }
        if packet.truncated {
            let (got, needed) = (packet.len, MESSAGE_MAX);
            return Err(Refusal::TooLong { got, needed }.into());
        }
        // A lost descriptor is one the sender did send: the message itself may be in order.
        let arrived = packet.descriptors.len() + usize::from(packet.descriptors_lost);
        let message = Message::decode(&buffer[..packet.len], rx.session, arrived)?;
        rx.accept(&message)?;
        if packet.descriptors_lost {
            self.decline(message.kind, message.number, message.object);
            return Err(Error::os("receive", "a descriptor", Errno::EMFILE));
        }
        Ok(Some((message, packet.descriptors.pop())))
    }

    /// Lets the peer know that an authentic message came to nothing here, where it would otherwise
    /// wait for ever or go on in vain.
    fn decline(&self, kind: Kind, number: u64, object: u64) {
        match kind {
            Kind::Block | Kind::Named | Kind::Loan => self.give_back(number),
            Kind::Arena => self.answers.lock().missing.push(object),
            _ => {}
        }
    }

    /// The peer is dead or has closed its end: everything it had is given back.
    fn peer_is_gone(&self, rx: &mut Rx) -> Error {
        rx.peer_gone = true;
        *self.answers.lock() = Answers::default();
        let lent = std::mem::take(&mut *self.lent.lock());
        drop(lent);
        Error::PeerGone
    }

    /// Does what an authentic message says.
    fn take(
        self: &Arc<Self>,
        rx: &mut Rx,
        message: Message,
        fd: Option<OwnedFd>,
    ) -> Result<Option<Item>> {
        match (message.kind, fd) {
            (Kind::Hello, None) => Ok(None),
            (Kind::Descriptor, Some(fd)) => incoming(&message, fd).map(Item::Descriptor).map(Some),
            (Kind::Frozen, Some(fd)) => {
                check_generation(&message, &fd)?;
                Frozen::receive(fd, message.offset, message.len).map(Item::Frozen).map(Some)
            }
            (Kind::Named, None) => self.attach(&message).map(Item::Named).map(Some),
            (Kind::Arena, Some(fd)) => import(rx, &message, fd).map(|()| None),
            (Kind::Block, None) => self.borrow_block(rx, &message).map(Item::Block).map(Some),
            (Kind::Retire, None) => {
                rx.arenas.remove(&message.object);
                Ok(None)
            }
            (Kind::Release, None) => self.take_back(&message).map(|()| None),
            (Kind::Note, None) => Ok(Some(Item::Note(message.payload))),
            (Kind::Token, fd) => Ok(Some(Item::Token(message.payload, fd))),
            (Kind::Loan, descriptor) => Ok(Some(Item::Borrowed(Borrowed {
                shared: Arc::clone(self),
                number: message.number,
                bytes: message.payload,
                descriptor,
            }))),
            (Kind::Missing, None) => {
                self.lost.lock().push(message.object);
                Ok(None)
            }
            (kind, _) => Err(Refusal::Kind(kind as u8).into()),
        }
    }

    /// Holds the map of a name, and tells the sender that it need not any more.
    fn attach(&self, message: &Message) -> Result<SharedMap> {
        let text = std::str::from_utf8(&message.payload).unwrap_or_default();
        let name = self.dir.parse(text).ok_or(Refusal::Field("not a name of this directory"))?;
        let map = SharedMap::attach_sized(&self.dir, &name, message.len)?;
        self.give_back(message.number);
        Ok(map)
    }

    fn borrow_block(self: &Arc<Self>, rx: &Rx, message: &Message) -> Result<ReceivedBlock> {
        let arena = message.object;
        let import = rx.arenas.get(&arena).ok_or(Refusal::UnknownArena(arena))?;
        let Message { offset, len, generation, number, .. } = *message;
        let addr = BlockAddr { arena, offset, len, generation };
        import.check(addr)?;
        let (shared, import) = (Arc::clone(self), Arc::clone(import));
        Ok(ReceivedBlock(Arc::new(Loan { shared, number, import, addr })))
    }

    /// The peer gives blocks and names back.
    fn take_back(&self, message: &Message) -> Result<()> {
        let mut unknown = None;
        for number in decode_numbers(&message.payload)? {
            // Dropped after the lock is let go: it may be the last owner of a whole arena.
            let back = self.lent.lock().remove(&number);
            if back.is_none() {
                unknown = Some(number);
            }
        }
        unknown.map_or(Ok(()), |number| Err(Refusal::NotLent(number).into()))
    }
}

impl Shared {
    /// Reads what is there without waiting; answers how many messages wait to be received.
    pub(super) fn read_ahead(self: &Arc<Self>) -> usize {
        // Another thread that receives reads everything anyway.
        let Some(mut rx) = self.rx.try_lock() else { return 0 };
        while rx.inbox.len() < INBOX_MAX {
            match self.read(&mut rx) {
                Ok(Read::Message(received)) => rx.inbox.push_back(Ok(received)),
                Ok(Read::Nothing) => {}
                Ok(Read::Empty) | Err(Error::PeerGone) => break,
                Err(error) => rx.inbox.push_back(Err(error)),
            }
        }
        rx.inbox.len()
    }

    /// Reads what the peer has given back, when nobody will receive any more.
    pub(super) fn hear_last_words(&self) {
        let mut rx = self.rx.lock();
        while !rx.peer_gone {
            match self.read_message(&mut rx) {
                Ok(Some((message, _))) if message.kind == Kind::Release => {
                    // A number that was not lent is the peer's mistake; there is no one to tell.
                    let _ = self.take_back(&message);
                }
                Ok(Some(_)) | Err(Error::Refused(_) | Error::NoDescriptor { .. }) => {}
                Ok(None) | Err(_) => break,
            }
        }
    }
}

impl Rx {
    /// Accepts the next message of the session, and nothing else.
    fn accept(&mut self, message: &Message) -> Result<()> {
        let (got, expected) = (message.number, self.number);
        if got != expected {
            return Err(Refusal::Sequence { got, expected }.into());
        }
        match (self.session, message.kind) {
            (None, Kind::Hello) => self.session = Some(message.object),
            (None, kind) | (Some(_), kind @ Kind::Hello) => {
                return Err(Refusal::Kind(kind as u8).into());
            }
            (Some(_), _) => {}
        }
        self.number += 1;
        Ok(())
    }
}

fn incoming(message: &Message, fd: OwnedFd) -> Result<Incoming> {
    check_generation(message, &fd)?;
    let Message { offset, len, generation, .. } = *message;
    memfd::require_len(fd.as_fd(), offset, len)?;
    Ok(Incoming { fd, offset, len, generation })
}

fn import(rx: &mut Rx, message: &Message, fd: OwnedFd) -> Result<()> {
    check_generation(message, &fd)?;
    if rx.arenas.contains_key(&message.object) {
        return Err(Refusal::Field("an arena that is here already").into());
    }
    let import = Import::new(fd, message.total)?;
    rx.arenas.insert(message.object, Arc::new(import));
    Ok(())
}

/// Refuses a descriptor of another object than the sender meant.
fn check_generation(message: &Message, fd: &OwnedFd) -> Result<()> {
    let info = file::info(fd.as_fd())
        .map_err(|errno| Error::os("stat", "a received descriptor", errno))?;
    if info.id.inode() != message.generation {
        return Err(Refusal::Field("descriptor is not the object it is said to be").into());
    }
    Ok(())
}
