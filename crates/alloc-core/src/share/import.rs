//! The consumer's side: memory of other processes, opened once and closed with its last user.

use super::{MemoryId, PieceKind, SharedBlock};
use crate::backend::{
    Backend, BackendError, Completion, DeviceKey, ErrorKind, Page, Refused, Reservation, Segment,
    SharePages, Stream, Token,
};
use crate::error::BackendOp;
use crate::units::{Addr, DeviceId, StreamId};
use parking_lot::{Mutex, ReentrantMutex};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Why a shared block could not be opened. Nothing stays open of it.
#[derive(Debug)]
#[non_exhaustive]
pub enum ImportError<E> {
    /// The description contradicts itself, or the tokens do not go with it.
    Malformed(&'static str),
    /// No device of the backend is the one that the memory is on. Make it visible to this process.
    NoSuchDevice(DeviceKey),
    /// A backend call failed.
    Backend {
        /// The call.
        op: BackendOp,
        /// What it said.
        source: E,
    },
}

impl<E: fmt::Display> fmt::Display for ImportError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ImportError::Malformed(why) => write!(f, "not a shared block: {why}"),
            ImportError::NoSuchDevice(key) => {
                write!(
                    f,
                    "the memory is on a device that this process does not see: {:02x?}",
                    key.0
                )
            }
            ImportError::Backend { op, source } => write!(f, "cannot {op}: {source}"),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for ImportError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ImportError::Backend { source, .. } => Some(source),
            _ => None,
        }
    }
}

type ImportResult<T, B> = Result<T, ImportError<<B as Backend>::Error>>;

fn fault<E>(op: BackendOp) -> impl FnOnce(E) -> ImportError<E> {
    move |source| ImportError::Backend { op, source }
}

/// Pieces side by side: what is mapped together.
type SpanKey = Arc<[MemoryId]>;

/// Memory of other processes in this one. Clones are the same importer.
///
/// Each piece of memory is opened once, however many blocks in it come, and closed when the last of
/// them has been dropped and the work on it is done. What is mapped takes the address space of the
/// pieces that a block lies in, and no more.
///
/// All methods may be called from any thread. Backend calls are made under a lock that only opening
/// and closing take.
pub struct Importer<B: SharePages> {
    shared: Arc<Shared<B>>,
}

impl<B: SharePages> Clone for Importer<B> {
    fn clone(&self) -> Self {
        Importer { shared: Arc::clone(&self.shared) }
    }
}

impl<B: SharePages> fmt::Debug for Importer<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = self.counts();
        f.debug_struct("Importer")
            .field("pieces", &counts.pieces)
            .field("spans", &counts.spans)
            .field("leaving", &counts.leaving)
            .finish_non_exhaustive()
    }
}

/// What an [`Importer`] has open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ImportCounts {
    /// Pieces of other processes.
    pub pieces: usize,
    /// Ranges that they are mapped in.
    pub spans: usize,
    /// Blocks that were dropped and still have work to wait for.
    pub leaving: usize,
}

struct Shared<B: SharePages> {
    backend: B,
    /// Held by whoever opens or closes. Re-entrant, because a backend may call the importer.
    turn: ReentrantMutex<()>,
    table: Mutex<Table<B>>,
    leaving: Mutex<Vec<Leaving<B>>>,
}

struct Table<B: SharePages> {
    pages: BTreeMap<MemoryId, OpenPage<B>>,
    spans: BTreeMap<SpanKey, Span<B>>,
    /// What is left of spans that could not be closed.
    unclosed: Vec<Backing<B>>,
}

struct OpenPage<B: SharePages> {
    page: Arc<B::Page>,
    bytes: u64,
    device: DeviceId,
    /// How often it occurs in spans.
    users: usize,
}

struct Span<B: SharePages> {
    base: Addr,
    bytes: u64,
    device: DeviceId,
    /// Blocks in it; 0 if it could not be closed.
    users: usize,
    backing: Backing<B>,
}

enum Backing<B: SharePages> {
    Segment(B::Opened),
    Pages {
        reservation: B::Reservation,
        /// What is mapped, by address.
        mapped: Vec<(Addr, MemoryId, u64)>,
    },
}

/// A dropped block with work to wait for.
struct Leaving<B: SharePages> {
    key: SpanKey,
    events: Vec<B::Event>,
    /// Streams on which an event could not be recorded so far.
    unrecorded: Vec<B::Stream>,
    lease: Box<dyn Any + Send>,
}

/// A block of another process, open here. Dropping it waits for nothing: the memory is closed, and
/// its producer told, when the work on it is done and the [`Importer`] looks.
pub struct Imported<B: SharePages> {
    shared: Arc<Shared<B>>,
    key: SpanKey,
    device: DeviceId,
    addr: Addr,
    bytes: u64,
    /// What the producer queued before it sent the block.
    ready: Option<Token<B::Descriptor>>,
    uses: Mutex<Vec<B::Stream>>,
    lease: Option<Box<dyn Any + Send>>,
}

impl<B: SharePages> fmt::Debug for Imported<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Imported")
            .field("device", &self.device)
            .field("addr", &self.addr)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl<B: SharePages> Imported<B> {
    /// Where it begins here.
    pub fn addr(&self) -> Addr {
        self.addr
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where its memory is, by the number it has here.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// To be called before the first work that uses the block is queued on `stream`: that work will
    /// wait for what the producer did before it sent the block, and the block for that work.
    ///
    /// # Errors
    /// [`ImportError::Backend`] if the producer's event cannot be waited for. The stream must not use
    /// the block then.
    pub fn use_on(&self, stream: &B::Stream) -> ImportResult<(), B> {
        let mut uses = self.uses.lock();
        if uses.iter().any(|used| used.id() == stream.id()) {
            return Ok(());
        }
        if let Some(ready) = &self.ready {
            let awaited = self.shared.backend.await_event(stream, ready);
            awaited.map_err(fault(BackendOp::AwaitEvent))?;
        }
        uses.push(stream.clone());
        Ok(())
    }

    /// The streams that [`use_on`](Self::use_on) was called for.
    pub fn used_on(&self) -> Vec<StreamId> {
        self.uses.lock().iter().map(Stream::id).collect()
    }
}

impl<B: SharePages> Drop for Imported<B> {
    fn drop(&mut self) {
        let unrecorded = std::mem::take(self.uses.get_mut());
        let Some(lease) = self.lease.take() else { return };
        let key = Arc::clone(&self.key);
        let leaving = Leaving { key, events: Vec::new(), unrecorded, lease };
        self.shared.leaving.lock().push(leaving);
        self.shared.collect();
    }
}

impl<B: SharePages> Importer<B> {
    /// An importer without any memory.
    pub fn new(backend: B) -> Self {
        let table = Table { pages: BTreeMap::new(), spans: BTreeMap::new(), unclosed: Vec::new() };
        Importer {
            shared: Arc::new(Shared {
                backend,
                turn: ReentrantMutex::new(()),
                table: Mutex::new(table),
                leaving: Mutex::new(Vec::new()),
            }),
        }
    }

    /// Opens a block. `tokens` are those of its pieces, in their order; those of pieces that are open
    /// already are not looked at. `ready` is the event that says when the producer is done with it, if
    /// it is not already. `lease` is dropped when this process is done with the block.
    ///
    /// # Errors
    /// See [`ImportError`]; `lease` is dropped then.
    pub fn open(
        &self,
        block: &SharedBlock,
        tokens: Vec<Token<B::Descriptor>>,
        ready: Option<Token<B::Descriptor>>,
        lease: impl Any + Send,
    ) -> ImportResult<Imported<B>, B> {
        let span_bytes = block.span_bytes().map_err(ImportError::Malformed)?;
        if tokens.len() != block.pieces.len() {
            return Err(ImportError::Malformed("not one token for each piece"));
        }
        let shared = &self.shared;
        shared.collect();
        let device = shared.device(block.device)?;
        let key: SpanKey = block.pieces.iter().map(|piece| piece.id).collect();
        let base = shared.open_span(&key, device, block, span_bytes, tokens)?;
        Ok(Imported {
            shared: Arc::clone(shared),
            key,
            device,
            addr: base + block.offset,
            bytes: block.bytes,
            ready,
            uses: Mutex::new(Vec::new()),
            lease: Some(Box::new(lease)),
        })
    }

    /// Closes what is not used any more and whose work is done. Opening and dropping do the same.
    /// Returns how many blocks are still to wait for.
    pub fn collect(&self) -> usize {
        self.shared.collect();
        self.shared.leaving.lock().len()
    }

    /// What is open.
    pub fn counts(&self) -> ImportCounts {
        let table = self.shared.table.lock();
        let (pages, spans) = (table.pages.len(), table.spans.len());
        let is_segment = |span: &&Span<B>| matches!(span.backing, Backing::Segment(_));
        let segments = table.spans.values().filter(is_segment).count();
        drop(table);
        let leaving = self.shared.leaving.lock().len();
        ImportCounts { pieces: pages + segments, spans, leaving }
    }
}

impl<B: SharePages> Shared<B> {
    fn device(&self, key: DeviceKey) -> ImportResult<DeviceId, B> {
        for device in (0..self.backend.device_count()).map(DeviceId::new) {
            let own = self.backend.device_key(device).map_err(fault(BackendOp::DeviceKey))?;
            if own == key {
                return Ok(device);
            }
        }
        Err(ImportError::NoSuchDevice(key))
    }

    /// Counts one more user of a span, after making it if there is none. Returns where it begins.
    fn open_span(
        &self,
        key: &SpanKey,
        device: DeviceId,
        block: &SharedBlock,
        span_bytes: u64,
        tokens: Vec<Token<B::Descriptor>>,
    ) -> ImportResult<Addr, B> {
        let _turn = self.turn.lock();
        if let Some(span) = self.table.lock().spans.get_mut(key) {
            if (span.bytes, span.device) != (span_bytes, device) {
                return Err(ImportError::Malformed("a piece that is known by another size"));
            }
            span.users += 1;
            return Ok(span.base);
        }
        let (base, backing) = match block.pieces[0].kind {
            PieceKind::Segment => self.open_segment(device, span_bytes, tokens)?,
            PieceKind::Page => self.open_pages(device, block, span_bytes, tokens)?,
        };
        let span = Span { base, bytes: span_bytes, device, users: 1, backing };
        self.table.lock().spans.insert(Arc::clone(key), span);
        Ok(base)
    }

    fn open_segment(
        &self,
        device: DeviceId,
        bytes: u64,
        tokens: Vec<Token<B::Descriptor>>,
    ) -> ImportResult<(Addr, Backing<B>), B> {
        let token = tokens.into_iter().next();
        let token = token.ok_or(ImportError::Malformed("not one token for each piece"))?;
        let opened = self.backend.open_segment(device, bytes, token);
        let opened = opened.map_err(fault(BackendOp::OpenSegment))?;
        Ok((opened.base(), Backing::Segment(opened)))
    }

    fn open_pages(
        &self,
        device: DeviceId,
        block: &SharedBlock,
        span_bytes: u64,
        tokens: Vec<Token<B::Descriptor>>,
    ) -> ImportResult<(Addr, Backing<B>), B> {
        let granularity = self.backend.granularity(device);
        if block.pieces.iter().any(|piece| !piece.bytes.is_multiple_of(granularity)) {
            return Err(ImportError::Malformed("a piece that is not whole pages"));
        }
        let mut pages: Vec<(MemoryId, Arc<B::Page>)> = Vec::new();
        for (piece, token) in block.pieces.iter().zip(tokens) {
            match self.take_page(piece.id, device, piece.bytes, token) {
                Ok(page) => pages.push((piece.id, page)),
                Err(error) => {
                    self.leave_pages(pages);
                    return Err(error);
                }
            }
        }
        self.map_pages(device, span_bytes, pages)
    }

    /// One more use of a page, imported now if it is not here.
    fn take_page(
        &self,
        id: MemoryId,
        device: DeviceId,
        bytes: u64,
        token: Token<B::Descriptor>,
    ) -> ImportResult<Arc<B::Page>, B> {
        if let Some(known) = self.table.lock().pages.get_mut(&id) {
            if (known.bytes, known.device) != (bytes, device) {
                return Err(ImportError::Malformed("a piece that is known by another size"));
            }
            known.users += 1;
            return Ok(Arc::clone(&known.page));
        }
        let page = self.backend.import_page(device, bytes, token);
        let page = Arc::new(page.map_err(fault(BackendOp::ImportPage))?);
        let open = OpenPage { page: Arc::clone(&page), bytes, device, users: 1 };
        self.table.lock().pages.insert(id, open);
        Ok(page)
    }

    /// Maps pages side by side, or does nothing.
    fn map_pages(
        &self,
        device: DeviceId,
        span_bytes: u64,
        pages: Vec<(MemoryId, Arc<B::Page>)>,
    ) -> ImportResult<(Addr, Backing<B>), B> {
        let reservation = match self.backend.reserve(device, span_bytes) {
            Ok(reservation) => reservation,
            Err(source) => {
                self.leave_pages(pages);
                return Err(ImportError::Backend { op: BackendOp::Reserve, source });
            }
        };
        let base = reservation.base();
        let mut mapped = Vec::new();
        let mut cursor = base;
        let mut result = Ok(());
        let mut pages = pages.into_iter();
        while let Some((id, page)) = pages.next() {
            result = self.backend.map(&reservation, cursor, &page).map_err(fault(BackendOp::Map));
            if result.is_err() {
                self.leave_pages([(id, page)].into_iter().chain(pages));
                break;
            }
            mapped.push((cursor, id, page.bytes()));
            cursor = cursor + page.bytes();
        }
        let result = result.and_then(|()| {
            let access = self.backend.set_access(&reservation, base, span_bytes, device);
            access.map_err(fault(BackendOp::SetAccess))
        });
        let backing = Backing::Pages { reservation, mapped };
        match result {
            Ok(()) => Ok((base, backing)),
            Err(error) => {
                if let Err(rest) = self.close(backing) {
                    self.table.lock().unclosed.push(rest);
                }
                Err(error)
            }
        }
    }
}

/// Closing.
impl<B: SharePages> Shared<B> {
    /// Ends one use of each page; those without a use are given back.
    fn leave_pages(&self, pages: impl IntoIterator<Item = (MemoryId, Arc<B::Page>)>) {
        let ids: Vec<MemoryId> = pages.into_iter().map(|(id, _)| id).collect();
        ids.into_iter().for_each(|id| self.leave_page(id));
    }

    fn leave_page(&self, id: MemoryId) {
        let mut table = self.table.lock();
        let Some(open) = table.pages.get_mut(&id) else { return };
        open.users -= 1;
        if open.users == 0 {
            drop(table);
            self.discard_page(id);
        }
    }

    /// Gives an unused page back. One that is refused stays, to be used or given back later.
    fn discard_page(&self, id: MemoryId) {
        let Some(OpenPage { page, bytes, device, .. }) = self.table.lock().pages.remove(&id) else {
            return;
        };
        let Some(page) = Arc::into_inner(page) else { return };
        if let Err(Refused { value, .. }) = self.backend.destroy(page) {
            let open = OpenPage { page: Arc::new(value), bytes, device, users: 0 };
            self.table.lock().pages.insert(id, open);
        }
    }

    /// Unmaps and closes; returns what is left if that fails half-way.
    fn close(&self, backing: Backing<B>) -> Result<(), Backing<B>> {
        match backing {
            Backing::Segment(opened) => {
                let closed = self.backend.close_segment(opened);
                closed.map_err(|refused| Backing::Segment(refused.value))
            }
            Backing::Pages { reservation, mut mapped } => {
                while let Some((at, id, bytes)) = mapped.pop() {
                    if self.backend.unmap(&reservation, at, bytes).is_err() {
                        mapped.push((at, id, bytes));
                        return Err(Backing::Pages { reservation, mapped });
                    }
                    self.leave_page(id);
                }
                let unreserved = self.backend.unreserve(reservation);
                unreserved.map_err(|refused| Backing::Pages { reservation: refused.value, mapped })
            }
        }
    }

    /// Ends one use of a span.
    fn leave_span(&self, key: &SpanKey) {
        let mut table = self.table.lock();
        let Some(span) = table.spans.get_mut(key) else { return };
        span.users = span.users.saturating_sub(1);
        if span.users == 0 {
            drop(table);
            self.close_span(key);
        }
    }

    /// Closes an unused span. A segment that cannot be closed may be used again; of pages, some may
    /// be unmapped by then.
    fn close_span(&self, key: &SpanKey) {
        let Some(span) = self.table.lock().spans.remove(key) else { return };
        let Span { base, bytes, device, backing, .. } = span;
        match self.close(backing) {
            Ok(()) => {}
            Err(backing @ Backing::Segment(_)) => {
                let span = Span { base, bytes, device, users: 0, backing };
                self.table.lock().spans.insert(Arc::clone(key), span);
            }
            Err(rest) => self.table.lock().unclosed.push(rest),
        }
    }

    /// Closes what has no user and whose work is done. Waits for nothing.
    fn collect(&self) {
        let mut done = Vec::new();
        {
            let _turn = self.turn.lock();
            self.retry();
            let leaving = std::mem::take(&mut *self.leaving.lock());
            let mut waiting = Vec::new();
            for mut entry in leaving {
                if self.is_done(&mut entry) {
                    self.leave_span(&entry.key);
                    done.push(entry.lease);
                } else {
                    waiting.push(entry);
                }
            }
            self.leaving.lock().extend(waiting);
        }
        // With nothing locked: the lease may tell somebody.
        drop(done);
    }

    /// Tries once more to close what could not be closed.
    fn retry(&self) {
        let (unclosed, spans, pages) = {
            let mut table = self.table.lock();
            let unclosed = std::mem::take(&mut table.unclosed);
            let spans = table.spans.iter().filter(|(_, span)| span.users == 0);
            let spans: Vec<SpanKey> = spans.map(|(key, _)| Arc::clone(key)).collect();
            let pages = table.pages.iter().filter(|(_, page)| page.users == 0);
            let pages: Vec<MemoryId> = pages.map(|(id, _)| *id).collect();
            (unclosed, spans, pages)
        };
        for backing in unclosed {
            if let Err(rest) = self.close(backing) {
                self.table.lock().unclosed.push(rest);
            }
        }
        spans.iter().for_each(|key| self.close_span(key));
        pages.into_iter().for_each(|id| self.discard_page(id));
    }

    /// Whether all work on a dropped block is done.
    fn is_done(&self, entry: &mut Leaving<B>) -> bool {
        let Leaving { events, unrecorded, .. } = entry;
        unrecorded.retain(|stream| match self.backend.record(stream) {
            Ok(event) => {
                events.push(event);
                false
            }
            // Nothing runs on a lost device.
            Err(error) => error.kind() != ErrorKind::DeviceLost,
        });
        events.retain(|event| match self.backend.query(event) {
            Ok(completion) => completion == Completion::Pending,
            Err(error) => error.kind() != ErrorKind::DeviceLost,
        });
        events.is_empty() && unrecorded.is_empty()
    }

    /// Waits for all work on a dropped block. Returns whether that worked.
    fn wait(&self, entry: &mut Leaving<B>) -> bool {
        self.is_done(entry);
        entry.events.iter().for_each(|event| {
            let _ = self.backend.wait(event);
        });
        self.is_done(entry)
    }
}

impl<B: SharePages> Drop for Shared<B> {
    /// Waits for the work on what was dropped, then closes everything. Memory under work that cannot
    /// be waited for stays open, and its producer is not told.
    fn drop(&mut self) {
        let mut leases = Vec::new();
        for mut entry in std::mem::take(self.leaving.get_mut()) {
            if self.wait(&mut entry) {
                self.leave_span(&entry.key);
                leases.push(entry.lease);
            } else {
                std::mem::forget(entry);
            }
        }
        self.retry();
    }
}
