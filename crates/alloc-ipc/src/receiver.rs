//! The consumer's side.

use crate::Portable;
use crate::error::{IpcError, Result};
use crate::message::{Head, decode_piece};
use alloc_core::backend::Token;
use alloc_core::share::{Imported, Importer, SharedBlock, SharedPiece};
use alloc_shm::{Borrowed, Channel, Item};
use parking_lot::Mutex;
use std::fmt;
use std::time::{Duration, Instant};

/// How often somebody who waits looks whether work on dropped blocks is done.
const LOOK: Duration = Duration::from_millis(2);

/// The receiving end from one producer.
///
/// While it waits for a block it gives back what was dropped and whose work is done; so do dropping
/// and [`Importer::collect`].
pub struct Receiver<B: Portable> {
    channel: Channel,
    importer: Importer<B>,
    parts: Mutex<Parts<B>>,
}

/// The pieces of a block whose own message has not come yet.
struct Parts<B: Portable> {
    number: u64,
    pieces: Vec<SharedPiece>,
    tokens: Vec<Token<B::Descriptor>>,
}

impl<B: Portable> Parts<B> {
    const fn of(number: u64) -> Self {
        Parts { number, pieces: Vec::new(), tokens: Vec::new() }
    }
}

/// A block of another process.
#[derive(Debug)]
pub struct Received<B: Portable> {
    /// The memory. Call [`use_on`](Imported::use_on) before work on it is queued.
    pub block: Imported<B>,
    /// What the producer said about it.
    pub note: Vec<u8>,
}

impl<B: Portable> fmt::Debug for Receiver<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver")
            .field("channel", &self.channel)
            .field("importer", &self.importer)
            .finish_non_exhaustive()
    }
}

impl<B: Portable> Receiver<B> {
    /// Receives what the [`Sender`](crate::Sender) at the other end of `channel` lends. Receivers of
    /// one process should have one importer: what it has open it opens once.
    pub fn new(channel: Channel, importer: &Importer<B>) -> Self {
        Receiver { channel, importer: importer.clone(), parts: Mutex::new(Parts::of(0)) }
    }

    /// What opens the blocks.
    pub fn importer(&self) -> &Importer<B> {
        &self.importer
    }

    /// Gives back what was dropped and whose work is done, without waiting. Returns how many blocks
    /// are still to wait for. To be called now and then by a consumer that receives nothing: a return
    /// that the producer is too far behind to take is sent on the next occasion.
    pub fn collect(&self) -> usize {
        let leaving = self.importer.collect();
        // Sends what is due.
        self.channel.lent();
        leaving
    }

    /// The next block; waits for it, as long as `timeout` allows.
    ///
    /// # Errors
    /// [`IpcError::Channel`]: [`PeerGone`](alloc_shm::Error::PeerGone) once the producer is gone and
    /// everything that it sent has been received, [`Timeout`](alloc_shm::Error::Timeout).
    /// [`IpcError::Message`] and [`IpcError::Import`] for a block that could not be opened; it has
    /// been given back, and the next one may be received.
    pub fn receive(&self, timeout: Option<Duration>) -> Result<Received<B>, B::Error> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut parts = self.parts.lock();
        loop {
            let message = match self.wait(deadline)? {
                Some(message) => message,
                None => {
                    let millis = timeout.unwrap_or_default().as_millis() as u64;
                    return Err(alloc_shm::Error::Timeout { millis }.into());
                }
            };
            let number = message.tag;
            if parts.number != number {
                *parts = Parts::of(number);
            }
            match message.item {
                Item::Token(bytes, descriptor) => {
                    let descriptor = descriptor.map(B::Descriptor::from);
                    let part = decode_piece(&bytes, descriptor).map_err(IpcError::Message)?;
                    parts.pieces.push(part.0);
                    parts.tokens.push(part.1);
                }
                Item::Borrowed(loan) => {
                    let complete = std::mem::replace(&mut *parts, Parts::of(number));
                    return self.open(complete, loan);
                }
                _ => return Err(IpcError::Message("a channel carries blocks or something else")),
            }
        }
    }

    /// The next message, or `None` if it does not come in time.
    fn wait(&self, deadline: Option<Instant>) -> Result<Option<alloc_shm::Received>, B::Error> {
        loop {
            let is_idle = self.importer.collect() == 0;
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let wait = match left {
                None if is_idle => return Ok(Some(self.channel.receive()?)),
                None => LOOK,
                Some(left) if is_idle => left,
                Some(left) => left.min(LOOK),
            };
            match self.channel.receive_timeout(wait) {
                Ok(message) => return Ok(Some(message)),
                Err(alloc_shm::Error::Timeout { .. }) if left == Some(wait) => return Ok(None),
                Err(alloc_shm::Error::Timeout { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn open(&self, parts: Parts<B>, mut loan: Borrowed) -> Result<Received<B>, B::Error> {
        let head = Head::decode(loan.bytes()).map_err(IpcError::Message)?;
        if head.pieces as usize != parts.pieces.len() {
            return Err(IpcError::Message("pieces of it are missing"));
        }
        let descriptor = loan.take_descriptor().map(B::Descriptor::from);
        let ready = head.ready.map(|(kind, bytes)| Token { kind, bytes, descriptor });
        let Parts { pieces, tokens, .. } = parts;
        let Head { device, offset, bytes, note, .. } = head;
        let block = SharedBlock { device, offset, bytes, pieces };
        let block = self.importer.open(&block, tokens, ready, loan)?;
        Ok(Received { block, note })
    }
}
