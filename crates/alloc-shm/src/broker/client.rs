//! Talking to a broker.

use crate::address::{SocketAddress, connect};
use crate::broker::protocol::{
    Body, Lifetime, NAME_MAX, OPAQUE_MAX, Op, Reason, SESSION, ThingKind,
};
use crate::broker::store::BrokerStats;
use crate::error::{Error, Refusal, Result};
use crate::map::{Map, MapOptions, ReadWrite};
use crate::memfd::Frozen;
use crate::os::{file, socket};
use crate::steps::{Step, reach};
use crate::wire::{Kind, MESSAGE_MAX, Message, decode_numbers};
use nix::errno::Errno;
use parking_lot::Mutex;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a broker may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connection to a broker. Any number of threads may use it, one request at a time.
///
/// When it and its holds are gone, or the process dies, the broker ends what it held.
#[derive(Clone, Debug)]
pub struct BrokerClient(Arc<Connection>);

#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    /// Of the next request. Held while waiting for a reply.
    number: Mutex<u64>,
}

impl BrokerClient {
    /// Connects to the broker at `address`, of the same user.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] if there is none; [`Error::Refused`] if it runs as another user.
    pub fn connect(address: &SocketAddress) -> Result<Self> {
        let connection = Connection { socket: connect(address)?, number: Mutex::new(1) };
        Ok(BrokerClient(Arc::new(connection)))
    }

    /// Puts a thing: `len` bytes behind `fd`, or behind whatever `opaque` describes.
    ///
    /// # Errors
    ///
    /// [`Error::Broker`] with the reason; [`Error::PeerGone`]; [`Error::Timeout`]; [`Error::Name`]
    /// for a name of more than 200 or opaque bytes of more than 824 bytes.
    pub fn put(
        &self,
        name: &str,
        kind: ThingKind,
        lifetime: Lifetime,
        len: u64,
        fd: Option<BorrowedFd<'_>>,
        opaque: &[u8],
    ) -> Result<Hold> {
        let body = Body { kind, lifetime, len, opaque: opaque.to_vec(), ..Body::named(name) };
        let (body, _) = self.ask(Op::Put, &body, fd)?;
        Ok(self.hold(body.generation))
    }

    /// Puts frozen bytes.
    ///
    /// # Errors
    ///
    /// As [`put`](BrokerClient::put).
    pub fn put_frozen(&self, name: &str, frozen: &Frozen, lifetime: Lifetime) -> Result<Hold> {
        if frozen.offset() != 0 {
            let (offset, len) = (frozen.offset(), frozen.len() as u64);
            return Err(Error::Range { offset, len, size: len });
        }
        let len = frozen.len() as u64;
        self.put(name, ThingKind::FROZEN, lifetime, len, Some(frozen.as_fd()), &[])
    }

    /// Puts a map that holders may write.
    ///
    /// # Errors
    ///
    /// As [`put`](BrokerClient::put).
    pub fn put_shared(
        &self,
        name: &str,
        map: &Map<ReadWrite, OwnedFd>,
        lifetime: Lifetime,
    ) -> Result<Hold> {
        let len = map.offset() + map.len();
        self.put(name, ThingKind::SHARED, lifetime, len, Some(map.as_fd()), &[])
    }

    /// Gets the thing of that name.
    ///
    /// # Errors
    ///
    /// [`Error::Broker`] with [`Reason::Unknown`]; [`Error::NoDescriptor`] if there is no room for
    /// its descriptor here; [`Error::PeerGone`]; [`Error::Timeout`].
    pub fn get(&self, name: &str) -> Result<Thing> {
        let (body, fd) = self.ask(Op::Get, &Body::named(name), None)?;
        let hold = self.hold(body.generation);
        let Body { kind, len, opaque, .. } = body;
        Ok(Thing { kind, len, opaque, fd, hold })
    }

    /// Takes a thing's name away: it goes with its last hold, and the name is free.
    ///
    /// # Errors
    ///
    /// [`Error::Broker`] with [`Reason::Unknown`]; [`Error::PeerGone`]; [`Error::Timeout`].
    pub fn remove(&self, name: &str) -> Result<()> {
        self.ask(Op::Remove, &Body::named(name), None).map(drop)
    }

    /// The broker's counters.
    ///
    /// # Errors
    ///
    /// [`Error::PeerGone`]; [`Error::Timeout`].
    pub fn stats(&self) -> Result<BrokerStats> {
        let (body, _) = self.ask(Op::Stats, &Body::named(""), None)?;
        match decode_numbers(&body.opaque)?[..] {
            [clients, things, bytes, holds] => Ok(BrokerStats { clients, things, bytes, holds }),
            _ => Err(Refusal::Field("counters of another version").into()),
        }
    }

    fn hold(&self, generation: u64) -> Hold {
        Hold { connection: Arc::clone(&self.0), generation }
    }

    /// Sends a request and waits for its reply.
    fn ask(
        &self,
        op: Op,
        body: &Body,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(Body, Option<OwnedFd>)> {
        if body.name.len() > NAME_MAX || body.opaque.len() > OPAQUE_MAX {
            let why = "at most 200 bytes of name and 824 opaque bytes";
            return Err(Error::Name { name: body.name.clone(), why });
        }
        let mut number = self.0.number.lock();
        let mine = *number;
        *number += 1;
        let deadline = Instant::now() + PATIENCE;
        self.0.send(mine, op, body, fd, Some(deadline))?;
        self.0.reply(mine, body, deadline)
    }
}

impl Connection {
    fn send(
        &self,
        number: u64,
        op: Op,
        body: &Body,
        fd: Option<BorrowedFd<'_>>,
        deadline: Option<Instant>,
    ) -> Result<()> {
        let descriptors = u8::from(fd.is_some());
        let message = body.to_message(Kind::Request, number, op as u64, descriptors);
        let bytes = message.encode(SESSION);
        loop {
            let sent =
                reach(Step::Send).and_then(|()| socket::send(self.socket.as_fd(), &bytes, fd));
            match (sent, deadline) {
                (Ok(()), _) => return Ok(()),
                (Err(Errno::EINTR), _) => {}
                (Err(Errno::EAGAIN), Some(deadline)) if Instant::now() < deadline => {
                    // The broker reads everything at once; there is no need to be clever.
                    std::thread::sleep(Duration::from_millis(1));
                }
                (Err(Errno::EAGAIN), _) => return Err(too_slow()),
                (Err(Errno::EPIPE | Errno::ECONNRESET), _) => return Err(self.why_gone(body)),
                (Err(errno), _) => return Err(Error::os("send to", "a broker", errno)),
            }
        }
    }

    /// The reply to that request; older ones, whose askers gave up, are passed over.
    fn reply(
        &self,
        number: u64,
        asked: &Body,
        deadline: Instant,
    ) -> Result<(Body, Option<OwnedFd>)> {
        loop {
            if let Some(Answer { number: got, tag, body, fd }) = self.read()? {
                match Reason::of_code(tag)? {
                    _ if got != number && got != 0 => {}
                    Some(reason) => {
                        return Err(Error::Broker { name: asked.name.clone(), reason });
                    }
                    None if got == number => return Ok((body, fd)),
                    None => return Err(Refusal::Sequence { got, expected: number }.into()),
                }
                continue;
            }
            let ready = socket::wait(self.socket.as_fd(), false, Some(deadline))
                .map_err(|errno| Error::os("wait for", "a broker", errno))?;
            if ready == socket::Ready::TimedOut {
                return Err(too_slow());
            }
        }
    }

    /// Reads one reply, if there is one.
    fn read(&self) -> Result<Option<Answer>> {
        let mut buffer = [0; MESSAGE_MAX + 1];
        let received =
            reach(Step::Receive).and_then(|()| socket::receive(self.socket.as_fd(), &mut buffer));
        let mut packet = match received {
            Ok(packet) => packet,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            Err(_) => return Err(Error::PeerGone),
        };
        if packet.len == 0 {
            return Err(Error::PeerGone);
        }
        let arrived = packet.descriptors.len() + usize::from(packet.descriptors_lost);
        let message = Message::decode(&buffer[..packet.len], Some(SESSION), arrived)?;
        if message.kind != Kind::Reply {
            return Err(Refusal::Kind(message.kind as u8).into());
        }
        let body = Body::of_message(&message)?;
        if packet.descriptors_lost {
            self.release(body.generation);
            return Err(Error::os("receive", "a thing's descriptor", Errno::EMFILE));
        }
        let Message { number, tag, .. } = message;
        Ok(Some(Answer { number, tag, body, fd: packet.descriptors.pop() }))
    }

    /// A broker that is full says so before it hangs up.
    fn why_gone(&self, asked: &Body) -> Error {
        match self.read() {
            Ok(Some(Answer { number: 0, tag, .. })) => match Reason::of_code(tag) {
                Ok(Some(reason)) => Error::Broker { name: asked.name.clone(), reason },
                _ => Error::PeerGone,
            },
            _ => Error::PeerGone,
        }
    }

    fn release(&self, generation: u64) {
        let body = Body { generation, ..Body::named("") };
        // From destructors: a broker that is gone, or behind, ends all holds with the connection.
        let _ = self.send(0, Op::Release, &body, None, None);
    }
}

/// One reply, as it came.
struct Answer {
    number: u64,
    tag: u64,
    body: Body,
    fd: Option<OwnedFd>,
}

fn too_slow() -> Error {
    Error::Timeout { millis: PATIENCE.as_millis() as u64 }
}

/// A client's hold on a thing; ends when dropped.
pub struct Hold {
    connection: Arc<Connection>,
    generation: u64,
}

impl Hold {
    /// Differs between any two things that one broker ever held.
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.connection.release(self.generation);
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").field("generation", &self.generation).finish_non_exhaustive()
    }
}

/// A thing that a broker gave.
#[derive(Debug)]
pub struct Thing {
    /// What it is.
    pub kind: ThingKind,
    /// Its bytes.
    pub len: u64,
    /// What its maker said about it.
    pub opaque: Vec<u8>,
    /// A descriptor of this process's own.
    pub fd: Option<OwnedFd>,
    /// Keeps the thing at the broker. Memory behind the descriptor stays without it too.
    pub hold: Hold,
}

impl Thing {
    /// Maps a thing of kind [`ThingKind::FROZEN`]. The hold ends: the bytes stay.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] for another kind, or what is not frozen after all; [`Error::Mapping`].
    pub fn into_frozen(self) -> Result<Frozen> {
        match (self.kind, self.fd) {
            (ThingKind::FROZEN, Some(fd)) => Frozen::receive(fd, 0, self.len),
            _ => Err(Refusal::Field("not a frozen thing").into()),
        }
    }

    /// Maps a thing of kind [`ThingKind::SHARED`]. The hold ends: the bytes stay.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] for another kind; otherwise as [`MapOptions::map`].
    pub fn into_map(self) -> Result<Map<ReadWrite, OwnedFd>> {
        match (self.kind, self.fd) {
            (ThingKind::SHARED, Some(fd)) => {
                crate::memfd::require_len(fd.as_fd(), 0, self.len)?;
                MapOptions::descriptor(fd).len(self.len).keep_descriptor().map()
            }
            _ => Err(Refusal::Field("not a shared thing").into()),
        }
    }

    /// A second descriptor, to send on.
    ///
    /// # Errors
    ///
    /// [`Error::NoDescriptor`]; [`Error::Refused`] if the thing has none.
    pub fn duplicate(&self) -> Result<OwnedFd> {
        let fd = self.fd.as_ref().ok_or(Refusal::Field("a thing without a descriptor"))?;
        file::duplicate(fd.as_fd())
            .map_err(|errno| Error::os("duplicate", "a thing's descriptor", errno))
    }
}
