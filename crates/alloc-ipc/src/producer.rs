//! The owner's side: blocks are lent to consumers and come back by themselves.

use crate::Portable;
use crate::error::{IpcError, Result};
use crate::message::{Head, NOTE_BYTES_MAX, encode_piece};
use alloc_core::backend::{BackendError, ErrorKind, Token};
use alloc_core::{Addr, Allocation, BackendOp, CachingAllocator, Export};
use alloc_shm::Channel;
use parking_lot::Mutex;
use std::fmt;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Events between processes that one producer uses at once, at most. Beyond that it waits for its
/// stream before it sends.
pub const EVENTS_MAX: usize = 1000;

/// Lends blocks of one allocator to other processes.
///
/// It looks for what consumers have given back whenever it sends, when [`collect`](Self::collect) is
/// called, and as a free-memory callback of the allocator, which thus finds the memory when it needs
/// it. What is lent when the producer is dropped stays lent: the callback goes on until everything is
/// back.
pub struct Producer<B: Portable> {
    allocator: CachingAllocator<B>,
    desk: Arc<Desk>,
    callback: String,
}

impl<B: Portable> fmt::Debug for Producer<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer").field("lent", &self.desk.lent()).finish_non_exhaustive()
    }
}

/// All connections of a producer.
#[derive(Default)]
struct Desk {
    links: Mutex<Vec<Arc<Link>>>,
    events: Arc<AtomicUsize>,
}

/// One connection. Kept until nothing is lent over it, whether or not anybody can still send.
struct Link {
    channel: Channel,
    /// The number of the next block. Held while one is sent, so that its messages follow each other.
    turn: Mutex<u64>,
}

/// The sending end to one consumer. Clones send to the same one.
pub struct Sender<B: Portable> {
    allocator: CachingAllocator<B>,
    desk: Arc<Desk>,
    link: Arc<Link>,
}

impl<B: Portable> Clone for Sender<B> {
    fn clone(&self) -> Self {
        Sender {
            allocator: self.allocator.clone(),
            desk: Arc::clone(&self.desk),
            link: Arc::clone(&self.link),
        }
    }
}

impl<B: Portable> fmt::Debug for Sender<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").field("channel", &self.link.channel).finish_non_exhaustive()
    }
}

/// An event between processes, counted while it exists.
struct CountedEvent<E> {
    _event: E,
    _count: Count,
}

/// One of the events that a desk may have at once.
struct Count(Arc<AtomicUsize>);

impl Count {
    fn take(events: &Arc<AtomicUsize>) -> Option<Self> {
        let count = Count(Arc::clone(events));
        (events.fetch_add(1, Ordering::Relaxed) < EVENTS_MAX).then_some(count)
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Desk {
    /// Reads what consumers gave back; how many loans have ended since the last look.
    fn collect(&self) -> usize {
        let before = self.lent_unread();
        let after = self.lent();
        // What nobody can send over and nothing is lent over is done with.
        let is_used =
            |link: &Arc<Link>| Arc::strong_count(link) > 1 || link.channel.lent_unread() > 0;
        self.links.lock().retain(is_used);
        before.saturating_sub(after)
    }

    /// Loans, after reading what was given back; what ends is dropped with nothing locked here.
    fn lent(&self) -> usize {
        let links: Vec<_> = self.links.lock().clone();
        links.iter().map(|link| link.channel.lent()).sum()
    }

    fn lent_unread(&self) -> usize {
        self.links.lock().iter().map(|link| link.channel.lent_unread()).sum()
    }
}

impl<B: Portable> Producer<B> {
    /// A producer of blocks of `allocator`, without consumers.
    pub fn new(allocator: &CachingAllocator<B>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let desk = Arc::new(Desk::default());
        let callback = format!("alloc-ipc {}", NEXT.fetch_add(1, Ordering::Relaxed));
        let watched = Arc::clone(&desk);
        allocator.add_free_memory_callback(&callback, move |_| watched.collect() > 0);
        Producer { allocator: allocator.clone(), desk, callback }
    }

    /// Begins to lend to the process at the other end of `channel`, whose
    /// [`Receiver`](crate::Receiver) must be all that uses it there.
    pub fn connect(&self, channel: Channel) -> Sender<B> {
        let link = Arc::new(Link { channel, turn: Mutex::new(0) });
        self.desk.links.lock().push(Arc::clone(&link));
        Sender { allocator: self.allocator.clone(), desk: Arc::clone(&self.desk), link }
    }

    /// Looks for what consumers have given back, or lost by dying. Returns how many loans have ended
    /// since the last look. Blocks that were freed meanwhile are free with their last loan.
    pub fn collect(&self) -> usize {
        self.desk.collect()
    }

    /// Blocks that consumers have, counted once for each time that they were sent.
    pub fn lent(&self) -> usize {
        self.desk.lent()
    }

    /// Waits until consumers have given everything back or are gone.
    ///
    /// # Errors
    /// [`alloc_shm::Error::Timeout`] in [`IpcError::Channel`].
    pub fn settle(&self, timeout: Duration) -> Result<(), B::Error> {
        let deadline = Instant::now() + timeout;
        let links: Vec<_> = self.desk.links.lock().clone();
        for link in links {
            match link.channel.settle(deadline.saturating_duration_since(Instant::now())) {
                // Whoever is gone has given everything back.
                Ok(()) | Err(alloc_shm::Error::PeerGone) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.collect();
        Ok(())
    }
}

impl<B: Portable> Drop for Producer<B> {
    fn drop(&mut self) {
        self.desk.collect();
        if self.desk.lent_unread() == 0 {
            self.allocator.remove_free_memory_callback(&self.callback);
        }
    }
}

impl<B: Portable> Sender<B> {
    /// Lends a block to the consumer, with up to [`NOTE_BYTES_MAX`] bytes that say what it is. The
    /// consumer's work on it waits for what is queued on `stream` by now. The block may be freed at
    /// once; it may be sent again, here or elsewhere.
    ///
    /// Waits while the consumer is behind in reading, as long as the channel's patience allows.
    ///
    /// # Errors
    /// [`IpcError::Note`]; [`IpcError::Allocator`] if the block cannot be shared;
    /// [`IpcError::Backend`] if there is no event and the stream cannot be waited for;
    /// [`IpcError::Channel`]. Nothing is lent then.
    pub fn send(
        &self,
        block: &Allocation,
        stream: &B::Stream,
        note: &[u8],
    ) -> Result<(), B::Error> {
        check_note(note)?;
        self.send_export(self.allocator.share(block)?, stream, note)
    }

    /// [`send`](Self::send) by address.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_raw(&self, addr: Addr, stream: &B::Stream, note: &[u8]) -> Result<(), B::Error> {
        check_note(note)?;
        self.send_export(self.allocator.share_raw(addr)?, stream, note)
    }

    fn send_export(
        &self,
        export: Export<B>,
        stream: &B::Stream,
        note: &[u8],
    ) -> Result<(), B::Error> {
        let (event, ready) = self.ready(stream)?.unzip();
        let Export { block, tokens, hold } = export;
        let channel = &self.link.channel;
        let mut turn = self.link.turn.lock();
        let number = *turn;
        *turn += 1;
        for (piece, token) in block.pieces.iter().zip(&tokens) {
            channel.send_token(&encode_piece(piece, token), descriptor(token), number)?;
        }
        let head = Head::of(&block, ready.as_ref(), note).encode();
        channel.lend(&head, ready.as_ref().and_then(descriptor), (event, hold), number)?;
        Ok(())
    }

    /// An event at the end of what is queued on `stream`, with its token; `None` after waiting for the
    /// stream, where there are no events or no more of them.
    #[expect(clippy::type_complexity, reason = "an event and what stands for it")]
    fn ready(
        &self,
        stream: &B::Stream,
    ) -> Result<Option<(CountedEvent<B::SharedEvent>, Token<B::Descriptor>)>, B::Error> {
        let backend = self.allocator.backend();
        if let Some(count) = Count::take(&self.desk.events) {
            match backend.export_event(stream) {
                Ok((event, token)) => {
                    return Ok(Some((CountedEvent { _event: event, _count: count }, token)));
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::OutOfMemory) => {}
                Err(source) => return Err(fault(BackendOp::ExportEvent)(source)),
            }
        }
        let event = backend.record(stream).map_err(fault(BackendOp::Record))?;
        backend.wait(&event).map_err(fault(BackendOp::Wait))?;
        Ok(None)
    }
}

fn fault<E: std::error::Error>(op: BackendOp) -> impl FnOnce(E) -> IpcError<E> {
    move |source| IpcError::Backend { op, source }
}

fn descriptor<D: AsFd>(token: &Token<D>) -> Option<std::os::fd::BorrowedFd<'_>> {
    token.descriptor.as_ref().map(AsFd::as_fd)
}

fn check_note<E: std::error::Error>(note: &[u8]) -> Result<(), E> {
    if note.len() > NOTE_BYTES_MAX { Err(IpcError::Note { bytes: note.len() }) } else { Ok(()) }
}
