//! A two-way connection between two processes that share memory.
//!
//! | strategy | in a message | descriptors | whose memory |
//! |--|--|--|--|
//! | descriptor | one descriptor | one per storage and process | nobody's: lives as long as anyone has it |
//! | name | a name | none | the holders', counted in its header |
//! | arena | four numbers, after the arena came once | one per arena in the sender, none in the receiver | the sender's, lent until given back |
//!
//! What is lent (names until they are attached to, blocks until their last clone is dropped, and
//! whatever else is to be kept for the peer) is given back by number. When the peer dies, the kernel closes its socket, and everything it had
//! is given back at once. A receiver whose sender dies keeps what it has: its mappings stay.

mod receive;
mod send;

use crate::address::{Bound, SocketAddress, check_peer, connect};
use crate::arena::{ArenaInner, BlockAddr, Import, SharedBlock};
use crate::error::{Error, Result};
use crate::map::{Map, MapOptions, ReadWrite};
use crate::memfd::Frozen;
use crate::name::ShmDir;
use crate::os::{file, socket};
use crate::refcount::SharedMap;
use crate::wire::random;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Messages that wait to be received at most, before sending fails instead of reading more.
const INBOX_MAX: usize = 65_536;

/// One end of a connection.
///
/// All methods take `&self`; any number of threads may send and receive. While a send waits for a
/// slow peer it reads what the peer sends meanwhile, so two ends that both send do not block.
///
/// Both ends trust each other to follow the protocol once they run as the same user: a peer that
/// does not can change bytes of a block under a reader. It cannot make one read outside of a
/// mapping or take a `SIGBUS`, and cannot change a [`Frozen`] at all.
///
/// ```
/// use alloc_shm::{Arena, Channel, Item};
///
/// let (here, there) = Channel::pair()?; // `there` usually goes to another process
/// let arena = Arena::new(1 << 20)?;
/// let mut block = arena.allocate(4)?;
/// block.copy_from_slice(b"data");
/// here.send_block(&block.share(), 1)?;
///
/// let received = there.receive()?;
/// assert_eq!(received.tag, 1);
/// let Item::Block(block) = received.item else { panic!("a block was sent") };
/// assert_eq!(&block[..], b"data");
/// # Ok::<(), alloc_shm::Error>(())
/// ```
pub struct Channel {
    shared: Arc<Shared>,
}

/// What a channel and the blocks received on it have in common.
///
/// Locks, never two at a time but in this order: `rx`, `tx`, then one of the others. Nothing waits
/// for the peer under `rx` and then takes `tx`: giving back only tries it.
struct Shared {
    socket: OwnedFd,
    dir: ShmDir,
    patience: Option<Duration>,
    tx: Mutex<Tx>,
    rx: Mutex<Rx>,
    /// What this end has lent, by the number of the message that lent it.
    lent: Mutex<BTreeMap<u64, Lent>>,
    /// What the peer is to be told as soon as that needs no waiting.
    answers: Mutex<Answers>,
    /// Arenas that did not reach the peer.
    lost: Mutex<Vec<u64>>,
}

/// Short messages that arise while receiving and in destructors.
#[derive(Default)]
struct Answers {
    /// Numbers of messages of the peer that are given back.
    given_back: Vec<u64>,
    /// Arenas of the peer whose descriptor did not get here.
    missing: Vec<u64>,
}

impl Answers {
    fn is_empty(&self) -> bool {
        self.given_back.is_empty() && self.missing.is_empty()
    }
}

struct Tx {
    session: u64,
    /// Of the next message; 0 until the hello is out.
    number: u64,
    /// Arenas that the peer has.
    arenas: HashMap<u64, std::sync::Weak<ArenaInner>>,
}

struct Rx {
    session: Option<u64>,
    number: u64,
    arenas: HashMap<u64, Arc<Import>>,
    /// What was read while sending.
    inbox: VecDeque<Result<Received>>,
    peer_gone: bool,
}

/// Kept for the peer until it gives it back or dies.
enum Lent {
    Block(SharedBlock),
    Named(#[expect(dead_code, reason = "held, not read")] SharedMap),
    Held(#[expect(dead_code, reason = "held, not read")] Box<dyn Send>),
}

/// One message.
#[derive(Debug)]
pub struct Received {
    /// The number the sender put on it.
    pub tag: u64,
    /// What it brought.
    pub item: Item,
}

/// What a message brings.
#[derive(Debug)]
#[non_exhaustive]
pub enum Item {
    /// A descriptor of memory that both sides may write.
    Descriptor(Incoming),
    /// Memory that nobody can write.
    Frozen(Frozen),
    /// A reference-counted map, held already.
    Named(SharedMap),
    /// A block of one of the sender's arenas.
    Block(ReceivedBlock),
    /// Plain bytes.
    Note(Vec<u8>),
    /// Bytes, and a descriptor if one was sent with them.
    Token(Vec<u8>, Option<OwnedFd>),
    /// The same, on loan.
    Borrowed(Borrowed),
}

impl Channel {
    /// Two connected ends in this process.
    ///
    /// # Errors
    ///
    /// [`Error::NoDescriptor`].
    pub fn pair() -> Result<(Channel, Channel)> {
        let (one, other) = new_pair()?;
        Ok((Self::from_socket(one)?, Self::from_socket(other)?))
    }

    /// One end for this process and the other as a descriptor: a child process that is given it as
    /// its standard input calls [`from_stdin`](Channel::from_stdin).
    ///
    /// # Errors
    ///
    /// [`Error::NoDescriptor`].
    pub fn for_child() -> Result<(Channel, OwnedFd)> {
        let (one, other) = new_pair()?;
        Ok((Self::from_socket(one)?, other))
    }

    /// The end that the parent process put into standard input, which is empty from then on.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if standard input is no such socket.
    pub fn from_stdin() -> Result<Channel> {
        let socket = socket::take_standard_input()
            .map_err(|errno| Error::os("take over", "standard input", errno))?;
        Self::from_socket(socket)
    }

    /// Connects to a [`Listener`] of the same user.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] if nobody listens; [`Error::Refused`] if it runs as another user.
    pub fn connect(address: &SocketAddress) -> Result<Channel> {
        Self::from_socket(connect(address)?)
    }

    /// The end of a connected Unix socket of type `SOCK_SEQPACKET`.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] for another kind of socket; [`Error::Refused`] if the peer runs as another
    /// user.
    pub fn from_socket(socket: OwnedFd) -> Result<Channel> {
        socket::adopt(socket.as_fd())
            .map_err(|errno| Error::os("make a channel of", "a descriptor", errno))?;
        check_peer(socket.as_fd())?;
        let tx = Tx { session: random(), number: 0, arenas: HashMap::new() };
        let rx = Rx {
            session: None,
            number: 0,
            arenas: HashMap::new(),
            inbox: VecDeque::new(),
            peer_gone: false,
        };
        let shared = Shared {
            socket,
            dir: ShmDir::system(),
            patience: None,
            tx: Mutex::new(tx),
            rx: Mutex::new(rx),
            lent: Mutex::default(),
            answers: Mutex::default(),
            lost: Mutex::default(),
        };
        Ok(Channel { shared: Arc::new(shared) })
    }

    /// Where the names that arrive on this channel live. Without this, [`ShmDir::system`]. To be
    /// called before anything is received.
    ///
    /// # Panics
    ///
    /// If a block received on this channel is still around.
    pub fn with_dir(mut self, dir: ShmDir) -> Channel {
        self.not_shared_yet().dir = dir;
        self
    }

    /// How long a send may wait for a peer that is behind. Without this, for ever.
    ///
    /// In a ring or a mesh of processes that all send, each must receive from all others while it
    /// waits for one: give sends little patience, and receive from everyone when it ends.
    ///
    /// # Panics
    ///
    /// If a block received on this channel is still around.
    pub fn with_patience(mut self, patience: Duration) -> Channel {
        self.not_shared_yet().patience = Some(patience);
        self
    }

    fn not_shared_yet(&mut self) -> &mut Shared {
        Arc::get_mut(&mut self.shared).expect("nothing received yet")
    }

    /// The next message; waits for it.
    ///
    /// # Errors
    ///
    /// [`Error::PeerGone`] once the peer is gone and everything it sent has been received;
    /// [`Error::Refused`] for a message that this protocol does not accept, after which the channel
    /// goes on; [`Error::NoDescriptor`] if a descriptor came and there is no room for it: it is
    /// lost, and the channel goes on. What cannot be mapped or attached to is an error likewise.
    pub fn receive(&self) -> Result<Received> {
        self.shared.receive(None)
    }

    /// The next message, if it comes in time.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; otherwise as [`receive`](Channel::receive).
    pub fn receive_timeout(&self, timeout: Duration) -> Result<Received> {
        self.shared.receive(Some((Instant::now() + timeout, timeout)))
    }

    /// The next message, if it is here already.
    ///
    /// # Errors
    ///
    /// As [`receive`](Channel::receive).
    pub fn try_receive(&self) -> Result<Option<Received>> {
        self.shared.flush();
        self.shared.receive_now(&mut self.shared.rx.lock())
    }

    /// Blocks, names and other loans that the peer still has of this end.
    ///
    /// Counts what has been given back in messages that were read; reading happens in every send
    /// and receive, and here. Also sends what this end has to give back, as far as the peer takes
    /// it.
    pub fn lent(&self) -> usize {
        self.shared.flush();
        self.shared.read_ahead();
        self.shared.lent.lock().len()
    }

    /// [`lent`](Channel::lent) as of the last time that anything was read: reads and sends nothing.
    pub fn lent_unread(&self) -> usize {
        self.shared.lent.lock().len()
    }

    /// Waits until the peer has given everything back.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]. A peer that is gone has given everything back.
    pub fn settle(&self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        while self.lent() > 0 {
            if Instant::now() >= deadline {
                return Err(Error::Timeout { millis: timeout.as_millis() as u64 });
            }
            self.shared.wait_to_receive(Some((deadline, timeout)))?;
        }
        Ok(())
    }
}

fn new_pair() -> Result<(OwnedFd, OwnedFd)> {
    socket::pair().map_err(|errno| Error::os("make", "a pair of sockets", errno))
}

/// For waiting on several channels at once. A readable channel has something to receive, or the
/// peer is gone; before waiting, receive until there is nothing, since messages may have been read
/// while sending.
impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.socket.as_fd()
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("socket", &self.shared.socket).finish_non_exhaustive()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // Messages that nobody will receive give back what they lent; dropping them takes locks.
        let unread = std::mem::take(&mut self.shared.rx.lock().inbox);
        drop(unread);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.hear_last_words();
        // The peer lives and will not be heard of again: its blocks cannot be used anew.
        for lent in self.lent.get_mut().values() {
            if let Lent::Block(block) = lent {
                block.retire();
            }
        }
    }
}

/// Accepts connections.
#[derive(Debug)]
pub struct Listener {
    bound: Bound,
}

impl Listener {
    /// Listens at `address`. The path of a listener that is dead is taken over.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`] if someone listens there, [`Error::Name`] for an address that is too long.
    pub fn bind(address: &SocketAddress) -> Result<Self> {
        Ok(Listener { bound: Bound::new(address)? })
    }

    /// The next connection of this user; waits for it.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; [`Error::Refused`] for a peer of another user, after which others are
    /// accepted.
    pub fn accept(&self, timeout: Duration) -> Result<Channel> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(socket) = self.bound.accept()? {
                return Channel::from_socket(socket);
            }
            let ready = socket::wait(self.bound.as_fd(), false, Some(deadline))
                .map_err(|errno| Error::os("wait on", "a listening socket", errno))?;
            if ready == socket::Ready::TimedOut {
                return Err(Error::Timeout { millis: timeout.as_millis() as u64 });
            }
        }
    }
}

/// A descriptor that came in a message, and the range of it that is meant.
#[derive(Debug)]
pub struct Incoming {
    fd: OwnedFd,
    offset: u64,
    len: u64,
    generation: u64,
}

impl Incoming {
    /// Where the range begins, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes in the range.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the range has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Which object it is: its inode number, which differs between any two that exist at once. The
    /// sender's claim has been compared with the descriptor.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The same with another descriptor.
    ///
    /// # Errors
    ///
    /// [`Error::NoDescriptor`].
    pub fn duplicate(&self) -> Result<Incoming> {
        let fd = file::duplicate(self.fd.as_fd())
            .map_err(|errno| Error::os("duplicate", "a received descriptor", errno))?;
        Ok(Incoming { fd, ..*self })
    }

    /// Maps the range, and keeps the descriptor.
    ///
    /// # Errors
    ///
    /// As [`MapOptions::map`](MapOptions).
    pub fn map(self) -> Result<Map<ReadWrite, OwnedFd>> {
        let Incoming { fd, offset, len, .. } = self;
        MapOptions::descriptor(fd).offset(offset).len(len).keep_descriptor().map()
    }
}

impl AsFd for Incoming {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A block of a peer's arena, on loan until the last clone is dropped. Outlives the peer.
///
/// Only the arena's owner can send it on: a loan that passed through a third process would end
/// when that one died.
#[derive(Clone)]
pub struct ReceivedBlock(Arc<Loan>);

struct Loan {
    shared: Arc<Shared>,
    number: u64,
    import: Arc<Import>,
    addr: BlockAddr,
}

impl ReceivedBlock {
    /// The block's address.
    pub fn addr(&self) -> BlockAddr {
        self.0.addr
    }
}

impl Deref for ReceivedBlock {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.import.bytes(self.0.addr)
    }
}

impl fmt::Debug for ReceivedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ReceivedBlock").field(&self.0.addr).finish()
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.shared.give_back(self.number);
    }
}

/// Bytes, and a descriptor if one was sent with them, that the peer keeps something for until this is
/// dropped. See [`Channel::lend`].
pub struct Borrowed {
    shared: Arc<Shared>,
    number: u64,
    bytes: Vec<u8>,
    descriptor: Option<OwnedFd>,
}

impl Borrowed {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Takes the descriptor, which lives on its own from then on.
    pub fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.descriptor.take()
    }
}

impl fmt::Debug for Borrowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Borrowed").field("bytes", &self.bytes.len()).finish_non_exhaustive()
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        self.shared.give_back(self.number);
    }
}

#[cfg(test)]
mod tests;
