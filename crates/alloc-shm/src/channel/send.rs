//! The sending half.

use super::{Answers, Channel, INBOX_MAX, Lent, Shared, Tx};
use crate::arena::{Arena, SharedBlock};
use crate::error::{Error, Result};
use crate::map::{Access, Map};
use crate::memfd::Frozen;
use crate::os::{file, socket};
use crate::refcount::SharedMap;
use crate::steps::{Step, pass, reach};
use crate::wire::{Kind, Message, NUMBERS_MAX, PAYLOAD_MAX, encode_numbers};
use nix::errno::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// All sends wait while the peer is behind, as long as [`with_patience`](Channel::with_patience)
/// allows. Their errors: [`Error::PeerGone`]; [`Error::Timeout`] when patience ends, with nothing
/// sent; [`Error::Limit`] if the peer does not read and its own messages fill the memory set aside
/// for them.
impl Channel {
    /// Sends the descriptor of a map: the peer gets its own descriptor of the same object.
    ///
    /// # Errors
    ///
    /// See above.
    pub fn send_descriptor<A: Access>(&self, map: &Map<A, OwnedFd>, tag: u64) -> Result<()> {
        let message = Message { len: map.len(), ..Message::new(Kind::Descriptor) };
        self.send_object(message, map.offset(), map.as_fd(), tag)
    }

    /// Sends frozen bytes.
    ///
    /// # Errors
    ///
    /// See above.
    pub fn send_frozen(&self, frozen: &Frozen, tag: u64) -> Result<()> {
        let message = Message { len: frozen.len() as u64, ..Message::new(Kind::Frozen) };
        self.send_object(message, frozen.offset(), frozen.as_fd(), tag)
    }

    fn send_object(
        &self,
        message: Message,
        offset: u64,
        fd: BorrowedFd<'_>,
        tag: u64,
    ) -> Result<()> {
        let generation = generation_of(fd)?;
        let message = Message { offset, generation, tag, descriptors: 1, ..message };
        self.shared.send(message, Some(fd), None)
    }

    /// Sends the name of a reference-counted map. This end holds the map until the peer has
    /// attached to it, so it may drop its own hold at once.
    ///
    /// # Errors
    ///
    /// See above.
    pub fn send_named(&self, map: &SharedMap, tag: u64) -> Result<()> {
        let message = Message {
            tag,
            len: map.len(),
            payload: map.name().as_str().as_bytes().to_vec(),
            ..Message::new(Kind::Named)
        };
        self.shared.send(message, None, Some(Lent::Named(map.clone())))
    }

    /// Sends a block's address, and the arena's descriptor before the first of its blocks. This end
    /// keeps the block unwritten until the peer has given it back.
    ///
    /// # Errors
    ///
    /// See above.
    pub fn send_block(&self, block: &SharedBlock, tag: u64) -> Result<()> {
        let addr = block.addr();
        let message = Message {
            tag,
            object: addr.arena,
            offset: addr.offset,
            len: addr.len,
            generation: addr.generation,
            ..Message::new(Kind::Block)
        };
        self.shared.send(message, None, Some(Lent::Block(block.clone())))
    }

    /// Sends up to 1024 bytes as they are.
    ///
    /// # Errors
    ///
    /// [`Error::Range`] for more; otherwise see above.
    pub fn send_note(&self, bytes: &[u8], tag: u64) -> Result<()> {
        let message = with_descriptor(Kind::Note, bytes, None, tag)?;
        self.shared.send(message, None, None)
    }

    /// Sends up to 1024 bytes as they are, and a descriptor of any kind of memory or file, which is
    /// not looked at.
    ///
    /// # Errors
    ///
    /// [`Error::Range`] for more bytes; otherwise see above.
    pub fn send_token(
        &self,
        bytes: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
        tag: u64,
    ) -> Result<()> {
        let message = with_descriptor(Kind::Token, bytes, descriptor, tag)?;
        self.shared.send(message, descriptor, None)
    }

    /// Like [`send_token`](Channel::send_token), on loan: `held` is kept until the peer drops what it
    /// received or is gone, and dropped at once if nothing could be sent. What it says is dropped
    /// in whichever call on this channel learns of it, with none of its locks but that on receiving
    /// held.
    ///
    /// If this end is dropped first, `held` is dropped as well: keep the channel while
    /// [`lent`](Channel::lent) is not 0.
    ///
    /// # Errors
    ///
    /// As [`send_token`](Channel::send_token).
    pub fn lend(
        &self,
        bytes: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
        held: impl Send + 'static,
        tag: u64,
    ) -> Result<()> {
        let message = with_descriptor(Kind::Loan, bytes, descriptor, tag)?;
        self.shared.send(message, descriptor, Some(Lent::Held(Box::new(held))))
    }
}

/// A message of bytes and perhaps a descriptor.
fn with_descriptor(
    kind: Kind,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
    tag: u64,
) -> Result<Message> {
    if bytes.len() > PAYLOAD_MAX {
        let (len, size) = (bytes.len() as u64, PAYLOAD_MAX as u64);
        return Err(Error::Range { offset: 0, len, size });
    }
    let descriptors = u8::from(descriptor.is_some());
    Ok(Message { tag, descriptors, payload: bytes.to_vec(), ..Message::new(kind) })
}

impl Shared {
    /// Sends one message of the user's, after whatever must go before it.
    fn send(
        self: &Arc<Self>,
        message: Message,
        fd: Option<BorrowedFd<'_>>,
        lent: Option<Lent>,
    ) -> Result<()> {
        // Takes in what the peer gave back, so that a loop that only sends gets its memory again.
        self.read_ahead();
        {
            let mut tx = self.tx.lock();
            let deadline = self.patience.map(|patience| Instant::now() + patience);
            let wait = &mut || self.wait_to_send(deadline);
            self.answer(&mut tx, wait)?;
            self.forget_arenas(&mut tx, wait)?;
            if let Some(Lent::Block(block)) = &lent {
                self.introduce(&mut tx, block.arena(), wait)?;
            }
            self.lend(&mut tx, message, fd, lent, wait)?;
        }
        self.flush();
        Ok(())
    }

    /// Tells the peer which of its arenas are gone here.
    fn forget_arenas(&self, tx: &mut Tx, wait: Wait<'_>) -> Result<()> {
        for id in std::mem::take(&mut *self.lost.lock()) {
            tx.arenas.remove(&id);
        }
        while let Some(object) = tx.dead_arena() {
            self.push(tx, &Message { object, ..Message::new(Kind::Retire) }, None, wait)?;
            tx.arenas.remove(&object);
        }
        Ok(())
    }

    /// Makes sure that the peer has the arena.
    fn introduce(&self, tx: &mut Tx, arena: &Arena, wait: Wait<'_>) -> Result<()> {
        if tx.arenas.contains_key(&arena.id()) {
            return Ok(());
        }
        let message = Message {
            descriptors: 1,
            object: arena.id(),
            total: arena.len(),
            generation: generation_of(arena.as_fd())?,
            ..Message::new(Kind::Arena)
        };
        self.push(tx, &message, Some(arena.as_fd()), wait)?;
        tx.arenas.insert(arena.id(), Arc::downgrade(arena.inner()));
        Ok(())
    }

    /// Sends a message and books what it lends.
    fn lend(
        &self,
        tx: &mut Tx,
        message: Message,
        fd: Option<BorrowedFd<'_>>,
        lent: Option<Lent>,
        wait: Wait<'_>,
    ) -> Result<()> {
        let number = tx.next_number();
        // Booked before it is sent: the peer may give it back before the send returns.
        if let Some(lent) = lent {
            self.lent.lock().insert(number, lent);
        }
        let sent = self.push(tx, &message, fd, wait);
        if sent.is_err() {
            let unsent = self.lent.lock().remove(&number);
            drop(unsent);
        }
        sent
    }

    /// Encodes and sends; `wait` is called while the peer is behind.
    fn push(
        &self,
        tx: &mut Tx,
        message: &Message,
        fd: Option<BorrowedFd<'_>>,
        wait: Wait<'_>,
    ) -> Result<()> {
        if tx.number == 0 {
            let hello = Message { object: tx.session, ..Message::new(Kind::Hello) };
            self.push_bytes(&hello.encode(tx.session), None, wait)?;
            tx.number = 1;
        }
        let bytes = Message { number: tx.number, ..message.clone() }.encode(tx.session);
        self.push_bytes(&bytes, fd, wait)?;
        tx.number += 1;
        Ok(())
    }

    fn push_bytes(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>, wait: Wait<'_>) -> Result<()> {
        loop {
            let sent =
                reach(Step::Send).and_then(|()| socket::send(self.socket.as_fd(), bytes, fd));
            match sent {
                Ok(()) => return Ok(()),
                Err(Errno::EAGAIN) => wait()?,
                Err(Errno::EINTR) => {}
                Err(Errno::EPIPE | Errno::ECONNRESET) => return Err(Error::PeerGone),
                // Too many of this user's descriptors are on their way and not received.
                Err(Errno::ETOOMANYREFS) => {
                    return Err(Error::os("send", "a descriptor", Errno::EMFILE));
                }
                Err(errno) => return Err(Error::os("send to", "a peer", errno)),
            }
        }
    }

    /// Waits until the peer has taken something, reading meanwhile what it sends: it may be waiting
    /// for us in just the same way.
    fn wait_to_send(self: &Arc<Self>, deadline: Option<Instant>) -> Result<()> {
        if self.read_ahead() >= INBOX_MAX {
            return Err(Error::Limit { what: "messages not received", limit: INBOX_MAX as u64 });
        }
        let now = Instant::now();
        if deadline.is_some_and(|deadline| now >= deadline) {
            let millis = self.patience.map_or(0, |patience| patience.as_millis() as u64);
            return Err(Error::Timeout { millis });
        }
        // Another thread may be the one who reads: look again soon in any case.
        let soon = now + Duration::from_millis(10);
        let until = deadline.map_or(soon, |deadline| deadline.min(soon));
        socket::wait(self.socket.as_fd(), true, Some(until))
            .map(drop)
            .map_err(|errno| Error::os("wait for", "a peer", errno))
    }

    /// Gives a block or a name of the peer's back: now if that needs no waiting, or with the next
    /// message. Called from destructors: never waits, never fails.
    pub(super) fn give_back(&self, number: u64) {
        pass(Step::Release);
        self.answers.lock().given_back.push(number);
        self.flush();
    }

    /// Sends the answers that are due, unless that would wait. Whoever has the sending half at the
    /// moment does it when done.
    pub(super) fn flush(&self) {
        while !self.answers.lock().is_empty() {
            let Some(mut tx) = self.tx.try_lock() else { return };
            let busy = &mut || Err(Error::Timeout { millis: 0 });
            if self.answer(&mut tx, busy).is_err() {
                return;
            }
        }
    }

    /// Sends the answers that are due. What could not be sent stays due.
    fn answer(&self, tx: &mut Tx, wait: Wait<'_>) -> Result<()> {
        loop {
            let Answers { given_back, missing } = self.answers.lock().part();
            if let Some(&object) = missing.first() {
                let message = Message { object, ..Message::new(Kind::Missing) };
                self.push(tx, &message, None, wait)
                    .inspect_err(|_| self.answers.lock().missing.push(object))?;
            } else if !given_back.is_empty() {
                let payload = encode_numbers(&given_back);
                let message = Message { payload, ..Message::new(Kind::Release) };
                self.push(tx, &message, None, wait)
                    .inspect_err(|_| self.answers.lock().given_back.extend(given_back))?;
            } else {
                return Ok(());
            }
        }
    }
}

impl Answers {
    /// Takes out what fits into one message.
    fn part(&mut self) -> Answers {
        let mut part = Answers::default();
        if let Some(missing) = self.missing.pop() {
            part.missing.push(missing);
        } else {
            let keep = self.given_back.len().saturating_sub(NUMBERS_MAX);
            part.given_back = self.given_back.split_off(keep);
        }
        part
    }
}

impl Tx {
    /// The number that the next message will have: number 0 is the hello.
    fn next_number(&self) -> u64 {
        self.number.max(1)
    }

    /// An arena that the peer has, and that no longer exists here.
    fn dead_arena(&self) -> Option<u64> {
        let mut arenas = self.arenas.iter();
        arenas.find(|(_, arena)| arena.strong_count() == 0).map(|(&id, _)| id)
    }
}

/// What to do while the peer is behind.
type Wait<'a> = &'a mut dyn FnMut() -> Result<()>;

/// The inode number: what tells objects that exist at the same time apart.
fn generation_of(fd: BorrowedFd<'_>) -> Result<u64> {
    let info = file::info(fd).map_err(|errno| Error::os("stat", "what is to be sent", errno))?;
    Ok(info.id.inode())
}
