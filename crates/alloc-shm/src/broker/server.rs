//! The broker itself: one thread, one loop, no waiting on any client.

use crate::address::{Bound, SocketAddress};
use crate::broker::protocol::{Body, Op, Reason, SESSION, ThingKind, request};
use crate::broker::store::{BrokerStats, ClientId, Limits, Store};
use crate::error::{Error, Refusal, Result};
use crate::memfd;
use crate::name::ShmDir;
use crate::os::{file, socket};
use crate::sweep::sweep;
use crate::wire::{Kind, MESSAGE_MAX, Message};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::JoinHandle;

/// Requests of one client that are served before the others get their turn.
const TURN: usize = 64;

/// A broker that listens.
///
/// Serves clients of its own user only. A client that sends what is no request, or does not read
/// its replies, is disconnected.
#[derive(Debug)]
pub struct Broker {
    bound: Bound,
    limits: Limits,
    store: Store<OwnedFd>,
    clients: BTreeMap<ClientId, OwnedFd>,
    clients_ever: u64,
    sweep: Option<ShmDir>,
}

impl Broker {
    /// Listens at `address`. The path of a broker that is dead is taken over.
    ///
    /// # Errors
    ///
    /// [`Error::Exists`] if someone listens there, [`Error::Name`] for an address that is too long.
    pub fn bind(address: &SocketAddress, limits: Limits) -> Result<Self> {
        Ok(Broker {
            bound: Bound::new(address)?,
            limits,
            store: Store::new(limits),
            clients: BTreeMap::new(),
            clients_ever: 0,
            sweep: None,
        })
    }

    /// [Sweeps](crate::sweep) `dir` now and whenever a client has gone, so that what it left there
    /// goes too.
    pub fn sweeping(mut self, dir: ShmDir) -> Self {
        self.sweep = Some(dir);
        self.sweep_now();
        self
    }

    /// Serves until `stop` becomes readable (or its other end is closed).
    ///
    /// # Errors
    ///
    /// [`Error::Os`] if waiting fails; trouble with single clients ends only them.
    pub fn run(mut self, stop: BorrowedFd<'_>) -> Result<()> {
        loop {
            let (stopping, arrivals, ready) = self.wait(stop)?;
            if stopping {
                return Ok(());
            }
            ready.into_iter().for_each(|client| self.serve(client));
            if arrivals {
                self.admit();
            }
        }
    }

    /// Serves in a thread of this process, until the value returned is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::NoDescriptor`], or [`Error::Os`] if there can be no more threads.
    pub fn spawn(self) -> Result<BrokerThread> {
        let (stop, stopped) =
            socket::pair().map_err(|errno| Error::os("make", "a pair of sockets", errno))?;
        let thread = std::thread::Builder::new()
            .name("shm-broker".to_owned())
            .spawn(move || self.run(stopped.as_fd()))
            .map_err(|error| Error::os("start", "a thread", file::errno(error)))?;
        Ok(BrokerThread { stop: Some(stop), thread: Some(thread) })
    }

    /// Waits for whatever comes next: the end, new clients, requests.
    fn wait(&self, stop: BorrowedFd<'_>) -> Result<(bool, bool, Vec<ClientId>)> {
        let poll_in = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut fds = vec![poll_in(stop), poll_in(self.bound.as_fd())];
        fds.extend(self.clients.values().map(|socket| poll_in(socket.as_fd())));
        loop {
            match nix::poll::poll(&mut fds, PollTimeout::NONE) {
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(Error::os("wait for", "clients", errno)),
                Ok(_) => break,
            }
        }
        let ready = |fd: &PollFd<'_>| fd.any().unwrap_or(true);
        let clients = self.clients.keys().zip(&fds[2..]);
        let clients = clients.filter(|(_, fd)| ready(fd)).map(|(&client, _)| client).collect();
        Ok((ready(&fds[0]), ready(&fds[1]), clients))
    }

    /// Lets waiting clients in, as far as the limit allows.
    fn admit(&mut self) {
        // A peer of another user, or a want of descriptors, concerns only whoever connects.
        while let Ok(Some(socket)) = self.bound.accept() {
            if self.clients.len() >= self.limits.clients {
                let no = reply(0, Reason::TooManyClients.code(), &Body::named(""), false);
                let _ = socket::send(socket.as_fd(), &no.encode(SESSION), None);
                continue;
            }
            self.clients_ever += 1;
            self.clients.insert(ClientId(self.clients_ever), socket);
        }
    }

    fn serve(&mut self, client: ClientId) {
        for _ in 0..TURN {
            match self.serve_one(client) {
                Ok(true) => {}
                Ok(false) => return,
                Err(_) => {
                    // Gone, or not one of ours.
                    self.clients.remove(&client);
                    self.store.client_gone(client);
                    self.sweep_now();
                    return;
                }
            }
        }
    }

    /// Serves one request; answers whether there was one.
    fn serve_one(&mut self, client: ClientId) -> Result<bool> {
        let Some(socket) = self.clients.get(&client) else { return Ok(false) };
        let Some(Request { number, op, body, fd }) = read(socket.as_fd())? else {
            return Ok(false);
        };
        let name = Body::named(&body.name);
        let (answer, handle) = match op {
            Op::Put => (put(&mut self.store, client, body, fd), None),
            Op::Get => match self.store.get(client, &body.name) {
                Ok(entry) => (Ok(entry.body.clone()), entry.handle.as_ref()),
                Err(reason) => (Err(reason), None),
            },
            Op::Release => {
                // A hold that is not there is the client's mistake, and its own loss.
                let _ = self.store.release(client, body.generation);
                return Ok(true);
            }
            Op::Remove => (self.store.remove(&body.name).map(|()| name.clone()), None),
            Op::Stats => {
                let clients = self.clients.len() as u64;
                (Ok(stats_body(BrokerStats { clients, ..self.store.stats() })), None)
            }
        };
        let message = match &answer {
            Ok(body) => reply(number, 0, body, handle.is_some()),
            Err(reason) => reply(number, reason.code(), &name, false),
        };
        // A client that has not read what it asked for is not waited for.
        socket::send(socket.as_fd(), &message.encode(SESSION), handle.map(AsFd::as_fd))
            .map_err(|_| Error::PeerGone)?;
        Ok(true)
    }

    fn sweep_now(&self) {
        if let Some(dir) = &self.sweep {
            // What could not be swept now is found again the next time.
            let _ = sweep(dir);
        }
    }
}

/// One request, as it came.
struct Request {
    number: u64,
    op: Op,
    body: Body,
    /// A descriptor, or the news that the broker had no room for it.
    fd: Result<Option<OwnedFd>, Reason>,
}

/// Reads one request, if there is one.
fn read(socket: BorrowedFd<'_>) -> Result<Option<Request>> {
    let mut buffer = [0; MESSAGE_MAX + 1];
    let mut packet = match socket::receive(socket, &mut buffer) {
        Ok(packet) => packet,
        Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
        Err(_) => return Err(Error::PeerGone),
    };
    if packet.len == 0 {
        return Err(Error::PeerGone);
    }
    let arrived = packet.descriptors.len() + usize::from(packet.descriptors_lost);
    let message = Message::decode(&buffer[..packet.len], Some(SESSION), arrived)?;
    let (op, body) = request(&message)?;
    let lost = packet.descriptors_lost;
    let fd = if lost { Err(Reason::NoDescriptor) } else { Ok(packet.descriptors.pop()) };
    Ok(Some(Request { number: message.number, op, body, fd }))
}

/// Takes a thing, if it is what it claims to be.
fn put(
    store: &mut Store<OwnedFd>,
    client: ClientId,
    body: Body,
    fd: Result<Option<OwnedFd>, Reason>,
) -> Result<Body, Reason> {
    let fd = fd?;
    let charged = check(&body, fd.as_ref().map(AsFd::as_fd)).map_err(|_| Reason::Invalid)?;
    let name = Body::named(&body.name);
    let generation = store.put(client, body, fd, charged)?;
    Ok(Body { generation, ..name })
}

/// Checks that the descriptor is what the kind promises; answers the bytes it stands for.
fn check(body: &Body, fd: Option<BorrowedFd<'_>>) -> Result<u64> {
    if body.kind.0 >= ThingKind::OPAQUE.0 {
        return Ok(body.len);
    }
    let fd = fd.ok_or(Refusal::Descriptors { got: 0, expected: 1 })?;
    match body.kind {
        ThingKind::FROZEN => memfd::require_frozen(fd, body.len)?,
        ThingKind::ARENA => memfd::require_published(fd, body.len)?,
        ThingKind::SHARED => memfd::require_len(fd, 0, body.len)?,
        _ => return Err(Refusal::Field("unknown kind of thing").into()),
    }
    let info = file::info(fd).map_err(|errno| Error::os("stat", "a thing", errno))?;
    Ok(info.len)
}

fn reply(number: u64, tag: u64, body: &Body, descriptor: bool) -> Message {
    body.to_message(Kind::Reply, number, tag, descriptor.into())
}

fn stats_body(stats: BrokerStats) -> Body {
    let BrokerStats { clients, things, bytes, holds } = stats;
    let opaque = crate::wire::encode_numbers(&[clients, things, bytes, holds]);
    Body { opaque, ..Body::named("") }
}

/// A broker that runs in a thread. Dropping it stops the broker and waits for it; things that
/// clients have got stay with them.
#[derive(Debug)]
pub struct BrokerThread {
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl BrokerThread {
    /// Stops the broker.
    ///
    /// # Errors
    ///
    /// What the broker ended with, if it had ended by itself.
    pub fn stop(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        self.stop = None;
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(Error::os("run", "a broker", Errno::ECANCELED)),
            None => Ok(()),
        }
    }
}

impl Drop for BrokerThread {
    fn drop(&mut self) {
        // Whoever wants to know calls `stop`.
        let _ = self.finish();
    }
}
