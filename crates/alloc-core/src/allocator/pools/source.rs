//! Pools whose memory does not come from the allocator's backend.

use super::PoolOptions;
use crate::allocator::{AllocResult, HeapCell, Paging, Shared};
use crate::backend::{
    Backend, BackendError, Completion, ErrorKind, Refused, Segment, VirtualMemory,
};
use crate::config::Policy;
use crate::error::{AllocError, BackendOp};
use crate::handles::HandleTable;
use crate::pager::PageStore;
use crate::units::{Addr, DeviceId, PoolId};
use std::fmt;
use std::sync::Arc;

/// Why a source of segments failed.
pub type SourceError = Box<dyn BackendError>;

/// Where the segments of a pool come from, instead of the allocator's backend: memory that is
/// registered with a library, lies on another device, or is somebody else's.
///
/// Segments are of the sizes that the allocator would ask its backend for, never blocks; blocks are
/// cut from them as everywhere. As with a [`Backend`], calls are made from any thread with no heap
/// locked, an error means that nothing was done, and [`ErrorKind::OutOfMemory`] makes the allocator
/// try to make room and ask again. The source lives for as long as the pool has memory of it.
pub trait SegmentSource<S>: Send + Sync + 'static {
    /// Obtains a segment of `bytes` for `device`, on behalf of `stream`. Its base must be a multiple
    /// of [`SEGMENT_ALIGN`](crate::backend::SEGMENT_ALIGN).
    ///
    /// # Errors
    /// Any.
    fn acquire(
        &self,
        device: DeviceId,
        bytes: u64,
        stream: &S,
    ) -> Result<Box<dyn Segment>, SourceError>;

    /// Takes a segment back. All work that used it is done.
    ///
    /// # Errors
    /// Hands the segment back.
    fn release(
        &self,
        segment: Box<dyn Segment>,
    ) -> Result<(), Refused<Box<dyn Segment>, SourceError>>;
}

/// Where the physical memory behind the expandable segments of a pool comes from, instead of the
/// allocator's backend: pages with other properties, or from elsewhere. Address space and mapping stay
/// the backend's.
pub trait PageSource<B: VirtualMemory>: Send + Sync + 'static {
    /// As [`VirtualMemory::create`].
    ///
    /// # Errors
    /// As there.
    fn create(&self, device: DeviceId, bytes: u64) -> Result<B::Page, B::Error>;

    /// As [`VirtualMemory::destroy`].
    ///
    /// # Errors
    /// Hands the page back.
    fn destroy(&self, page: B::Page) -> Result<(), Refused<B::Page, B::Error>>;
}

/// What a pool of its own source has instead of the backend.
pub(in crate::allocator) enum Source<B: Backend> {
    /// Segments are obtained whole.
    Segments(Arc<dyn SegmentSource<B::Stream>>),
    /// Segments are expandable.
    Pages(Paging<B>),
}

impl<B: Backend> fmt::Debug for Source<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Segments(_) => "Segments(..)",
            Source::Pages(_) => "Pages(..)",
        })
    }
}

/// `None` is the allocator's backend.
pub(in crate::allocator) type OwnSource<B> = Option<Arc<Source<B>>>;

/// Whether two heaps share what they get memory from.
pub(in crate::allocator) fn is_same<B: Backend>(one: &OwnSource<B>, other: &OwnSource<B>) -> bool {
    match (one, other) {
        (None, None) => true,
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        _ => false,
    }
}

/// Makes the source of a new pool.
pub(super) type MakeSource<B> = Arc<dyn Fn(&Arc<B>, Policy) -> Source<B> + Send + Sync>;

impl<B: Backend> PoolOptions<B> {
    /// With segments from `source`. They are obtained whole, whether or not expandable segments are
    /// on.
    #[must_use]
    pub fn segments_from(self, source: Arc<dyn SegmentSource<B::Stream>>) -> Self {
        let make = move |_: &Arc<B>, _| Source::Segments(Arc::clone(&source));
        PoolOptions { source: Some(Arc::new(make)), ..self }
    }
}

impl<B: VirtualMemory> PoolOptions<B> {
    /// With expandable segments, whether or not they are on elsewhere, of pages from `source`.
    #[must_use]
    pub fn pages_from(self, source: Arc<dyn PageSource<B>>) -> Self {
        let make = move |backend: &Arc<B>, policy| {
            let pages = Arc::clone(&source);
            let backend = Arc::new(WithPages { backend: Arc::clone(backend), pages });
            Source::Pages(match policy {
                Policy::Pytorch => Paging::Pages(Box::new(PageStore::new(backend))),
                Policy::Ours => Paging::Handles(Box::new(HandleTable::new(backend))),
            })
        };
        PoolOptions { source: Some(Arc::new(make)), ..self }
    }
}

type Error<B> = AllocError<<B as Backend>::Error>;

/// A segment and whom it goes back to.
pub(in crate::allocator) enum Token<B: Backend> {
    Backend(B::Segment),
    Source(Box<dyn Segment>),
}

impl<B: Backend> Token<B> {
    pub(in crate::allocator) fn base(&self) -> Addr {
        match self {
            Token::Backend(segment) => segment.base(),
            Token::Source(segment) => segment.base(),
        }
    }

    pub(in crate::allocator) fn bytes(&self) -> u64 {
        match self {
            Token::Backend(segment) => segment.bytes(),
            Token::Source(segment) => segment.bytes(),
        }
    }
}

impl<B: Backend> Shared<B> {
    /// What backs expandable segments of a pool, if anything.
    pub(in crate::allocator) fn paging_of<'a>(
        &'a self,
        source: &'a OwnSource<B>,
    ) -> Option<&'a Paging<B>> {
        match source.as_deref() {
            None => self.paging.as_ref(),
            Some(Source::Segments(_)) => None,
            Some(Source::Pages(paging)) => Some(paging),
        }
    }

    /// Obtains a segment for a heap; `None` if there is no memory.
    pub(in crate::allocator) fn acquire_segment(
        &self,
        cell: &HeapCell<B>,
        bytes: u64,
    ) -> AllocResult<Option<Token<B>>, B> {
        let (pool, source) = cell.owner();
        let lacks_memory = |kind| kind == ErrorKind::OutOfMemory;
        match source.as_deref() {
            Some(Source::Segments(source)) => {
                match source.acquire(cell.device, bytes, &cell.stream) {
                    Ok(segment) => Ok(Some(Token::Source(segment))),
                    Err(error) if lacks_memory(error.kind()) => Ok(None),
                    Err(error) => Err(source_error(pool.id(), BackendOp::Acquire, error)),
                }
            }
            // Its pages cannot be mapped from inside a call that maps pages.
            Some(Source::Pages(_)) => Ok(None),
            None => match self.backend.acquire(cell.device, bytes, &cell.stream) {
                Ok(segment) => Ok(Some(Token::Backend(segment))),
                Err(error) if lacks_memory(error.kind()) => Ok(None),
                Err(source) => Err(AllocError::Backend { op: BackendOp::Acquire, source }),
            },
        }
    }

    /// Gives a segment of a heap back to where it came from, when nothing uses it any more. A backend
    /// waits for that by itself, as cudaFree does; for other sources it is done here. Refused without
    /// an error if that is not possible now, because the stream is being captured.
    pub(in crate::allocator) fn release_segment(
        &self,
        cell: &HeapCell<B>,
        token: Token<B>,
    ) -> Result<(), Refused<Token<B>, Option<Error<B>>>> {
        if let Token::Source(_) = &token {
            match self.synchronize(&cell.stream) {
                Ok(true) => {}
                Ok(false) => return Err(Refused { value: token, error: None }),
                Err(error) => return Err(Refused { value: token, error: Some(error) }),
            }
        }
        let given = self.give_segment(cell, token);
        given.map_err(|Refused { value, error }| Refused { value, error: Some(error) })
    }

    /// Gives a segment back that nothing uses.
    pub(in crate::allocator) fn give_segment(
        &self,
        cell: &HeapCell<B>,
        token: Token<B>,
    ) -> Result<(), Refused<Token<B>, Error<B>>> {
        match token {
            Token::Backend(segment) => self.backend.release(segment).map_err(|refused| Refused {
                value: Token::Backend(refused.value),
                error: AllocError::Backend { op: BackendOp::Release, source: refused.error },
            }),
            Token::Source(segment) => {
                let (pool, source) = cell.owner();
                let Some(Source::Segments(source)) = source.as_deref() else {
                    unreachable!("I13: a heap keeps its source while it has segments")
                };
                source.release(segment).map_err(|refused| Refused {
                    value: Token::Source(refused.value),
                    error: source_error(pool.id(), BackendOp::Release, refused.error),
                })
            }
        }
    }
}

fn source_error<E>(pool: PoolId, op: BackendOp, source: SourceError) -> AllocError<E> {
    AllocError::PoolSource { pool, op, source }
}

/// A backend whose pages come from elsewhere.
struct WithPages<B: VirtualMemory> {
    backend: Arc<B>,
    pages: Arc<dyn PageSource<B>>,
}

impl<B: VirtualMemory> Backend for WithPages<B> {
    type Stream = B::Stream;
    type Event = B::Event;
    type Segment = B::Segment;
    type Error = B::Error;

    fn device_count(&self) -> u16 {
        self.backend.device_count()
    }

    fn acquire(
        &self,
        device: DeviceId,
        bytes: u64,
        stream: &B::Stream,
    ) -> Result<B::Segment, B::Error> {
        self.backend.acquire(device, bytes, stream)
    }

    fn release(&self, segment: B::Segment) -> Result<(), Refused<B::Segment, B::Error>> {
        self.backend.release(segment)
    }

    fn record(&self, stream: &B::Stream) -> Result<B::Event, B::Error> {
        self.backend.record(stream)
    }

    fn query(&self, event: &B::Event) -> Result<Completion, B::Error> {
        self.backend.query(event)
    }

    fn wait(&self, event: &B::Event) -> Result<(), B::Error> {
        self.backend.wait(event)
    }
}

impl<B: VirtualMemory> VirtualMemory for WithPages<B> {
    type Reservation = B::Reservation;
    type Page = B::Page;

    fn granularity(&self, device: DeviceId) -> u64 {
        self.backend.granularity(device)
    }

    fn reserve(&self, device: DeviceId, bytes: u64) -> Result<B::Reservation, B::Error> {
        self.backend.reserve(device, bytes)
    }

    fn unreserve(
        &self,
        reservation: B::Reservation,
    ) -> Result<(), Refused<B::Reservation, B::Error>> {
        self.backend.unreserve(reservation)
    }

    fn create(&self, device: DeviceId, bytes: u64) -> Result<B::Page, B::Error> {
        self.pages.create(device, bytes)
    }

    fn destroy(&self, page: B::Page) -> Result<(), Refused<B::Page, B::Error>> {
        self.pages.destroy(page)
    }

    fn map(&self, reservation: &B::Reservation, at: Addr, page: &B::Page) -> Result<(), B::Error> {
        self.backend.map(reservation, at, page)
    }

    fn set_access(
        &self,
        reservation: &B::Reservation,
        at: Addr,
        bytes: u64,
        device: DeviceId,
    ) -> Result<(), B::Error> {
        self.backend.set_access(reservation, at, bytes, device)
    }

    fn unmap(&self, reservation: &B::Reservation, at: Addr, bytes: u64) -> Result<(), B::Error> {
        self.backend.unmap(reservation, at, bytes)
    }
}
