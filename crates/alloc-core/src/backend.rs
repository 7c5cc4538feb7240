//! What a memory backend must offer, and what it may offer on top.
//!
//! The allocator decides; a backend only acts. Rules that hold for every method:
//!
//! * it is called with **no lock that a hit takes**, so it may block and may call back into the
//!   allocator. Calls that obtain memory or give it back are made under the device's growth lock: the
//!   calling thread may take it again, but must not wait there for another thread's growth;
//! * it may be called from any thread, and from several at once;
//! * an error means that nothing was done.
//!
//! Optional powers are traits of their own ([`VirtualMemory`], [`Capture`], [`MemoryInfo`],
//! [`Share`]); no method fails by default.

use crate::units::{Addr, DeviceId, StreamId};
use std::collections::HashSet;
use std::fmt;

/// An ordered queue of device work. Cheap to clone; clones are the same stream.
pub trait Stream: Clone + Send + Sync + 'static {
    /// Identity; see [`StreamId`] for what must be true of it.
    fn id(&self) -> StreamId;

    /// The device whose work it queues. Two devices' default streams are two streams.
    fn device(&self) -> DeviceId;
}

/// A span of memory obtained from a backend in one act. Owned: whoever holds the value holds the
/// memory.
pub trait Segment: Send + 'static {
    /// First address, a multiple of [`SEGMENT_ALIGN`].
    fn base(&self) -> Addr;

    /// Length in bytes.
    fn bytes(&self) -> u64;
}

/// What base addresses of segments and reservations must be multiples of: the number that indexes
/// the address directory (`docs/adr/0004-address-directory.md`).
pub const SEGMENT_ALIGN: u64 = 2 << 20;

/// Whether the work before an event has finished.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Completion {
    /// Some of it is still running.
    Pending,
    /// All of it is done.
    Reached,
}

/// What a failed backend call means to the allocator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No memory right now; freeing some and asking again may help. Only this climbs the ladder.
    OutOfMemory,
    /// The device or driver cannot do this at all.
    Unsupported,
    /// The device, or the driver itself, is gone. Nothing will work again.
    DeviceLost,
    /// Anything else.
    Other,
}

/// Error of a backend call.
pub trait BackendError: std::error::Error + Send + Sync + 'static {
    /// How the allocator must react.
    fn kind(&self) -> ErrorKind;
}

/// A failed call that would have consumed its argument: the argument comes back.
#[derive(Debug)]
pub struct Refused<T, E> {
    /// What was to be consumed; still owned, still valid.
    pub value: T,
    /// Why it was not.
    pub error: E,
}

/// A source of device memory, streams and events.
pub trait Backend: Send + Sync + 'static {
    /// Its streams.
    type Stream: Stream;
    /// Its events: a point in a stream's work. Dropping one recycles it and must not fail.
    type Event: Send + 'static;
    /// Its segments.
    type Segment: Segment;
    /// Its errors.
    type Error: BackendError;

    /// Number of devices; ids run from 0 up to it.
    fn device_count(&self) -> u16;

    /// Obtains a segment of `bytes` on `device`, on behalf of `stream` (cudaMalloc ignores the
    /// stream). `bytes` is a multiple of 512 (of 2 MiB with the usual settings), never 0.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] if there is no room; the allocator then climbs its ladder.
    fn acquire(
        &self,
        device: DeviceId,
        bytes: u64,
        stream: &Self::Stream,
    ) -> Result<Self::Segment, Self::Error>;

    /// Gives a segment back. May wait for the whole device (cudaFree does), in which case events
    /// recorded before are reached afterwards.
    ///
    /// # Errors
    /// Hands the segment back. After the driver is gone: [`ErrorKind::DeviceLost`].
    fn release(&self, segment: Self::Segment) -> Result<(), Refused<Self::Segment, Self::Error>>;

    /// Records an event after all work queued on `stream` so far.
    ///
    /// # Errors
    /// Any; the stream is unchanged.
    fn record(&self, stream: &Self::Stream) -> Result<Self::Event, Self::Error>;

    /// Asks, without waiting, whether an event is reached. "Not yet" is not an error.
    ///
    /// # Errors
    /// Any but [`ErrorKind::OutOfMemory`].
    fn query(&self, event: &Self::Event) -> Result<Completion, Self::Error>;

    /// Blocks the calling thread until the event is reached.
    ///
    /// # Errors
    /// Any but [`ErrorKind::OutOfMemory`].
    fn wait(&self, event: &Self::Event) -> Result<(), Self::Error>;
}

/// Free and total memory of one device, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceMemory {
    /// Unused by any process.
    pub free: u64,
    /// The whole device.
    pub total: u64,
}

/// Backends that know how large their devices are.
pub trait MemoryInfo: Backend {
    /// Free and total bytes of `device` (cuMemGetInfo).
    ///
    /// # Errors
    /// Any but [`ErrorKind::OutOfMemory`].
    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, Self::Error>;
}

/// A range of address space without memory behind it. Owned like a [`Segment`].
pub trait Reservation: Send + Sync + 'static {
    /// First address, a multiple of [`SEGMENT_ALIGN`].
    fn base(&self) -> Addr;

    /// Length in bytes.
    fn bytes(&self) -> u64;
}

/// Physical memory that can be mapped into a reservation. Owned; mapped in whole only.
pub trait Page: Send + Sync + 'static {
    /// Length in bytes, a multiple of the granularity.
    fn bytes(&self) -> u64;
}

/// Backends that keep address space and physical memory apart (CUDA's cuMem* family).
///
/// Unlike [`Backend::release`], [`unmap`](VirtualMemory::unmap) waits for nothing: the allocator
/// makes sure that no work still uses the range.
pub trait VirtualMemory: Backend {
    /// Its reservations.
    type Reservation: Reservation;
    /// Its physical pages.
    type Page: Page;

    /// What sizes of pages on `device` must be multiples of, in bytes (2 MiB on current GPUs).
    fn granularity(&self, device: DeviceId) -> u64;

    /// Reserves `bytes` of address space (cuMemAddressReserve).
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] if address space is exhausted.
    fn reserve(&self, device: DeviceId, bytes: u64) -> Result<Self::Reservation, Self::Error>;

    /// Gives address space back (cuMemAddressFree). Nothing may be mapped in it.
    ///
    /// # Errors
    /// Hands the reservation back.
    fn unreserve(
        &self,
        reservation: Self::Reservation,
    ) -> Result<(), Refused<Self::Reservation, Self::Error>>;

    /// Creates physical memory of `bytes` on `device` (cuMemCreate).
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] if there is no room.
    fn create(&self, device: DeviceId, bytes: u64) -> Result<Self::Page, Self::Error>;

    /// Gives physical memory back (cuMemRelease). It may not be mapped any more.
    ///
    /// # Errors
    /// Hands the page back.
    fn destroy(&self, page: Self::Page) -> Result<(), Refused<Self::Page, Self::Error>>;

    /// Maps the whole of `page` at `at`, inside `reservation` (cuMemMap). Not yet accessible. A page
    /// may be mapped at several addresses at once.
    ///
    /// # Errors
    /// Any; nothing is mapped.
    fn map(
        &self,
        reservation: &Self::Reservation,
        at: Addr,
        page: &Self::Page,
    ) -> Result<(), Self::Error>;

    /// Makes mapped `bytes` from `at` on readable and writable by `device` (cuMemSetAccess). May
    /// span several pages; costs about the same for one as for a run of them.
    ///
    /// # Errors
    /// Any; access is as before.
    fn set_access(
        &self,
        reservation: &Self::Reservation,
        at: Addr,
        bytes: u64,
        device: DeviceId,
    ) -> Result<(), Self::Error>;

    /// Unmaps the one page of `bytes` that is mapped at `at` (cuMemUnmap). The page itself stays.
    ///
    /// # Errors
    /// Any; it is still mapped.
    fn unmap(
        &self,
        reservation: &Self::Reservation,
        at: Addr,
        bytes: u64,
    ) -> Result<(), Self::Error>;
}

/// What stands for memory, or for an event, on its way to another process: plain bytes, and a
/// descriptor where the kind has one.
#[derive(Debug)]
pub struct Token<D> {
    /// How the bytes are to be read. The receiver goes by this, never by what it would send itself.
    pub kind: TokenKind,
    /// At most [`TOKEN_BYTES_MAX`] of them.
    pub bytes: Vec<u8>,
    /// What has to be passed as an open descriptor.
    pub descriptor: Option<D>,
}

/// A kind of [`Token`]; the numbers are each backend's own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TokenKind(pub u32);

/// The most bytes of a [`Token`].
pub const TOKEN_BYTES_MAX: usize = 256;

/// Names a device in all processes of a machine, whatever number each has for it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DeviceKey(pub [u8; 16]);

/// Backends whose memory other processes can use.
///
/// What is exported must outlive its use by others; the allocator sees to that
/// ([`CachingAllocator::share`](crate::CachingAllocator::share)).
pub trait Share: Backend {
    /// Descriptors in tokens.
    type Descriptor: Send + 'static;
    /// A segment of another process, opened here. It is closed, never released.
    type Opened: Segment + Sync;
    /// An event that another process may wait for, as long as it exists here.
    type SharedEvent: Send + 'static;

    /// Which device this is, for other processes.
    ///
    /// # Errors
    /// Any but [`ErrorKind::OutOfMemory`].
    fn device_key(&self, device: DeviceId) -> Result<DeviceKey, Self::Error>;

    /// A token of a segment (cudaIpcGetMemHandle). Two exports of one segment are worth the same.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if such memory cannot be shared.
    fn export_segment(
        &self,
        segment: &Self::Segment,
    ) -> Result<Token<Self::Descriptor>, Self::Error>;

    /// Opens a segment of `bytes` that another process exported from `device`
    /// (cudaIpcOpenMemHandle), once at a time.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a kind of token that is not known here; any other if it means
    /// no memory, or none any more.
    fn open_segment(
        &self,
        device: DeviceId,
        bytes: u64,
        token: Token<Self::Descriptor>,
    ) -> Result<Self::Opened, Self::Error>;

    /// Closes an opened segment. No work may be using it any more.
    ///
    /// # Errors
    /// Hands the segment back.
    fn close_segment(&self, opened: Self::Opened)
    -> Result<(), Refused<Self::Opened, Self::Error>>;

    /// An event after all work queued on `stream` so far, and its token.
    ///
    /// # Errors
    /// Any; [`ErrorKind::Unsupported`] or [`ErrorKind::OutOfMemory`] if there are no (more) such
    /// events: the caller then waits for the stream instead.
    #[expect(clippy::type_complexity, reason = "a value and what stands for it")]
    fn export_event(
        &self,
        stream: &Self::Stream,
    ) -> Result<(Self::SharedEvent, Token<Self::Descriptor>), Self::Error>;

    /// Lets work queued on `stream` from now on wait for an event of another process. The host does
    /// not wait.
    ///
    /// # Errors
    /// Any; for instance if that process is gone.
    fn await_event(
        &self,
        stream: &Self::Stream,
        token: &Token<Self::Descriptor>,
    ) -> Result<(), Self::Error>;
}

/// Backends with virtual memory whose pages other processes can map.
pub trait SharePages: Share + VirtualMemory {
    /// A token of a page (cuMemExportToShareableHandle).
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if such memory cannot be shared.
    fn export_page(&self, page: &Self::Page) -> Result<Token<Self::Descriptor>, Self::Error>;

    /// A page of `bytes` that another process exported from `device`
    /// (cuMemImportFromShareableHandle). It is mapped and [destroyed](VirtualMemory::destroy) like
    /// one's own; the memory is gone when every process has done so.
    ///
    /// # Errors
    /// As [`open_segment`](Share::open_segment).
    fn import_page(
        &self,
        device: DeviceId,
        bytes: u64,
        token: Token<Self::Descriptor>,
    ) -> Result<Self::Page, Self::Error>;
}

/// Identity of a capture: never that of another one in the life of the process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CaptureId(u64);

impl CaptureId {
    /// Wraps an id chosen by the backend.
    pub const fn new(raw: u64) -> Self {
        CaptureId(raw)
    }

    /// The raw id.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for CaptureId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "capture {}", self.0)
    }
}

/// Identity of a piece of captured work: never that of another one of the same capture while the
/// capture goes on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GraphNodeId(u64);

impl GraphNodeId {
    /// Wraps an id chosen by the backend.
    pub const fn new(raw: u64) -> Self {
        GraphNodeId(raw)
    }

    /// The raw id.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// What becomes of the work that is queued on a stream now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CaptureStatus {
    /// It runs.
    None,
    /// It goes into the graph of this capture, to run whenever that is replayed.
    Active(CaptureId),
    /// It is lost: the capture that the stream takes part in has failed and must still be ended.
    Invalidated,
}

/// Where a stream stands in the graph of a capture.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CaptureTips {
    /// The capture.
    pub capture: CaptureId,
    /// The captured work that the stream's next work comes right after; empty if it comes after
    /// none.
    pub nodes: Vec<GraphNodeId>,
}

/// Backends whose streams can be captured into graphs (CUDA's stream capture).
///
/// A capture is begun and ended by whoever queues the work; the allocator only asks about it. So
/// that others can go on meanwhile, [`Backend::acquire`], [`record`](Backend::record),
/// [`query`](Backend::query), [`wait`](Backend::wait) and the calls of [`VirtualMemory`] must not
/// disturb a capture, as long as no event of a capturing stream is involved.
/// [`Backend::release`] may: the allocator does not call it while it knows of a capture.
pub trait Capture: Backend {
    /// Whether `stream` takes part in a capture. Called on every allocation while the allocator
    /// knows of a capture, so it should be quick.
    ///
    /// # Errors
    /// Any but [`ErrorKind::OutOfMemory`].
    fn capture_status(&self, stream: &Self::Stream) -> Result<CaptureStatus, Self::Error>;

    /// Where `stream` stands in the graph; `None` if it does not capture, or if the backend cannot
    /// tell.
    ///
    /// # Errors
    /// Any but [`ErrorKind::OutOfMemory`].
    fn capture_tips(&self, stream: &Self::Stream) -> Result<Option<CaptureTips>, Self::Error>;

    /// Adds to `past` all captured work that the next work of `stream` comes after in every replay,
    /// at however many removes. `past` holds what earlier calls for the same stream and capture put
    /// there, or nothing, and what is in it need not be walked again. Adds nothing if the stream does
    /// not capture.
    ///
    /// # Errors
    /// Any but [`ErrorKind::OutOfMemory`]; what was added until then is right.
    fn extend_past(
        &self,
        stream: &Self::Stream,
        past: &mut HashSet<GraphNodeId>,
    ) -> Result<(), Self::Error>;
}
