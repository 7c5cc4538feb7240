//! The consumer's side: memory of other processes, opened once and closed with its last user.

mod close;
mod error;
mod imported;

pub use error::ImportError;
pub use imported::Imported;

use super::{MemoryId, PieceKind, SharedBlock};
use crate::backend::{Backend, DeviceKey, Page, Reservation, Segment, SharePages, Token};
use crate::error::BackendOp;
use crate::units::{Addr, DeviceId};
use parking_lot::{Mutex, ReentrantMutex};
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

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
