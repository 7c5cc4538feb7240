//! Streams: own ones, foreign ones, and the two kinds of default stream.
//!
//! A raw handle is no identity. Drivers use handles again, the null handle means another stream on
//! every device, and the per-thread handle another one on every thread. So streams get numbers of
//! our own, and what tells two foreign streams apart is the driver's unique id.

mod capture;

use crate::backend::CudaBackend;
use crate::device::DeviceState;
use crate::error::CudaError;
use crate::event::CudaEvent;
use alloc_core::backend::Stream as StreamTrait;
use alloc_core::{DeviceId, StreamId};
use cuda_driver::{CaptureStatus, DriverError, Event, Stream, code};
use parking_lot::Mutex;
use std::any::Any;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::ThreadId;

/// A stream of a CUDA device. Clones are the same stream.
#[derive(Clone, Debug)]
pub struct CudaStream {
    state: Arc<StreamState>,
}

/// What is behind a [`CudaStream`].
pub(crate) struct StreamState {
    id: StreamId,
    device: Arc<DeviceState>,
    stream: Stream,
    /// For a per-thread default stream: whose it is, and the legacy stream.
    thread: Option<(ThreadId, Stream)>,
    /// Set when the owner is about to destroy it: what marks the end of its work.
    last: OnceLock<Arc<Event>>,
    origin: Origin,
}

/// Where a stream is from.
enum Origin {
    /// Made here, or one of the special ones: there for as long as it is held.
    Own,
    /// Adopted. Its owner sees to its life, with the help of what is held here, if anything is.
    Foreign(#[expect(dead_code, reason = "held only")] Option<Keeper>),
}

/// Keeps a foreign stream alive.
type Keeper = Arc<dyn Any + Send + Sync>;

impl std::fmt::Debug for StreamState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamState")
            .field("id", &self.id)
            .field("device", &self.device.id)
            .field("raw", &self.stream.raw())
            .finish_non_exhaustive()
    }
}

impl StreamTrait for CudaStream {
    fn id(&self) -> StreamId {
        self.state.id
    }

    fn device(&self) -> DeviceId {
        self.state.device.id
    }
}

/// For code that takes any stream of CUDA, such as that of pinned memory.
impl AsRef<Stream> for CudaStream {
    fn as_ref(&self) -> &Stream {
        self.driver_stream()
    }
}

impl PartialEq for CudaStream {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.state, &other.state)
    }
}

impl Eq for CudaStream {}

impl CudaStream {
    /// The driver's stream, to queue work on. For a per-thread default stream this is the handle
    /// that means *the calling thread's* stream.
    pub fn driver_stream(&self) -> &Stream {
        &self.state.stream
    }

    /// The raw `CUstream` (the runtime's `cudaStream_t`).
    pub fn raw(&self) -> *mut c_void {
        self.state.stream.raw()
    }

    /// Waits for all work queued so far.
    ///
    /// # Errors
    /// The failure of any of that work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.record()?.wait()
    }

    /// Whether it was adopted, so that somebody else decides when it ends.
    pub fn is_foreign(&self) -> bool {
        matches!(self.state.origin, Origin::Foreign(_))
    }

    /// Where this thread must queue what is to come after the stream's work so far and before its work
    /// to come: the stream, or for another thread's default stream the legacy one.
    pub(crate) fn order(&self) -> &Stream {
        self.state.place_of_record()
    }

    /// Records an event after all work queued so far.
    pub(crate) fn record(&self) -> Result<CudaEvent, CudaError> {
        let state = &*self.state;
        if let Some(last) = state.last.get() {
            return Ok(CudaEvent::last(last));
        }
        let place = self.not_capturing()?;
        CudaEvent::record(&state.device, place)
    }

    /// Records somebody's event after all work queued so far. If the stream has ended, waits for that
    /// work instead and leaves the event as it is.
    pub(crate) fn record_into(&self, event: &Event) -> Result<(), CudaError> {
        if let Some(last) = self.state.last.get() {
            return Ok(last.synchronize()?);
        }
        Ok(event.record(self.not_capturing()?)?)
    }

    /// Where an event is recorded, unless the stream takes part in a capture.
    fn not_capturing(&self) -> Result<&Stream, CudaError> {
        let place = self.state.place_of_record();
        // In a capture it would become part of the graph, and nobody could ask about it.
        if place.capture_status()? != CaptureStatus::None {
            let why = DriverError::new("cuEventRecord", code::STREAM_CAPTURE_UNSUPPORTED);
            return Err(CudaError::Driver(why));
        }
        Ok(place)
    }

    /// Marks the end of a foreign stream's work, just before its owner destroys it: see
    /// [`CudaBackend::retire`](crate::CudaBackend::retire).
    pub(crate) fn retire(&self) -> Result<(), CudaError> {
        let state = &*self.state;
        if state.last.get().is_none() {
            let event = Event::create(state.device.context()?)?;
            event.record(state.place_of_record())?;
            state.last.get_or_init(|| Arc::new(event));
        }
        Ok(())
    }
}

impl CudaBackend {
    /// The device that a stream of somebody else's is of; for the special handles, the device whose
    /// context is current on this thread.
    ///
    /// # Safety
    /// `raw` must be null, 1, 2 or a stream that is alive.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub unsafe fn device_of_stream(&self, raw: *mut c_void) -> Result<DeviceId, CudaError> {
        // SAFETY: passed on from the caller.
        Ok(DeviceId::new(unsafe { self.driver().device_of_stream(raw) }?))
    }

    /// Adopts a stream that somebody else made: the special handles, or one of the device's primary
    /// context. The same stream gives the same [`StreamId`](alloc_core::StreamId) for as long as any
    /// clone of it exists, whatever streams had or will have its handle.
    ///
    /// # Safety
    /// `raw` must be null, 1, 2 or a stream that is alive. It must stay so until its last clone is
    /// gone, allocators' clones included, or until [`retire`](CudaBackend::retire).
    ///
    /// # Errors
    /// [`CudaError::WrongContext`] if it is of another device; [`CudaError::NoSuchDevice`]; or
    /// whatever the driver reports.
    pub unsafe fn adopt(
        &self,
        device: DeviceId,
        raw: *mut c_void,
    ) -> Result<CudaStream, CudaError> {
        let _relaxed = self.relaxed()?;
        let (streams, state) = self.streams(device)?;
        // SAFETY: passed on from the caller.
        unsafe { streams.adopt(state, raw, None) }
    }

    /// [`adopt`](Self::adopt), holding on to `keeper`, which keeps the stream alive, for as long as
    /// any clone of the stream exists. If the stream is known already, `keeper` is not needed and
    /// dropped.
    ///
    /// # Safety
    /// As [`adopt`](Self::adopt), except that `keeper` may be what keeps it alive.
    ///
    /// # Errors
    /// As [`adopt`](Self::adopt).
    pub unsafe fn adopt_kept(
        &self,
        device: DeviceId,
        raw: *mut c_void,
        keeper: Arc<dyn Any + Send + Sync>,
    ) -> Result<CudaStream, CudaError> {
        let _relaxed = self.relaxed()?;
        let (streams, state) = self.streams(device)?;
        // SAFETY: passed on from the caller.
        unsafe { streams.adopt(state, raw, Some(keeper)) }
    }
}

impl StreamState {
    /// A stream with a number of its own.
    fn fresh(device: &Arc<DeviceState>, stream: Stream) -> Self {
        StreamState {
            id: next_id(),
            device: device.clone(),
            stream,
            thread: None,
            last: OnceLock::new(),
            origin: Origin::Own,
        }
    }

    /// Where an event must be recorded to come after this stream's work. No handle names another
    /// thread's default stream; but the legacy stream waits for all of them before it does anything,
    /// so an event there is late enough.
    fn place_of_record(&self) -> &Stream {
        match &self.thread {
            Some((owner, legacy)) if *owner != std::thread::current().id() => legacy,
            _ => &self.stream,
        }
    }
}

/// A number for a stream other than a legacy one, never used twice in a process. Legacy streams have
/// the numbers of their devices, below: they come first, in order of devices, and are the same
/// streams in every backend.
fn next_id() -> StreamId {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 16);
    StreamId::new(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The streams of a backend that are in use, so that adopting one twice gives the same.
#[derive(Debug)]
pub(crate) struct StreamTable {
    /// Each device's legacy default stream, once used.
    legacy: Vec<OnceLock<Arc<StreamState>>>,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// By the driver's unique id.
    by_unique_id: HashMap<(DeviceId, u64), Weak<StreamState>>,
    /// The stream last seen with a raw handle: while a stream is being captured the driver does not
    /// tell its unique id, and asking would end the capture.
    by_handle: HashMap<(DeviceId, usize), Weak<StreamState>>,
    /// Default streams of threads.
    by_thread: HashMap<(DeviceId, ThreadId), Weak<StreamState>>,
    /// How many entries there may be before those whose stream is gone are looked for.
    sweep_at: usize,
}

impl StreamTable {
    pub(crate) fn new(devices: usize) -> Self {
        let legacy = (0..devices).map(|_| OnceLock::new()).collect();
        StreamTable { legacy, known: Mutex::default() }
    }

    /// A device's legacy default stream.
    pub(crate) fn legacy(&self, device: &Arc<DeviceState>) -> Result<CudaStream, CudaError> {
        let stream = Stream::legacy(device.context()?);
        let index = device.id.index();
        let id = StreamId::new(index as u64);
        let state = self.legacy[index]
            .get_or_init(|| Arc::new(StreamState { id, ..StreamState::fresh(device, stream) }));
        Ok(CudaStream { state: state.clone() })
    }

    /// Makes a stream.
    pub(crate) fn create(&self, device: &Arc<DeviceState>) -> Result<CudaStream, CudaError> {
        let stream = Stream::create(device.context()?)?;
        let unique = stream.unique_id()?;
        let state = Arc::new(StreamState::fresh(device, stream));
        Ok(self.known.lock().enter(Some(unique), state))
    }

    /// The default stream of this thread.
    pub(crate) fn per_thread(&self, device: &Arc<DeviceState>) -> Result<CudaStream, CudaError> {
        let (stream, legacy) =
            (Stream::per_thread(device.context()?), Stream::legacy(device.context()?));
        let thread = std::thread::current().id();
        let mut known = self.known.lock();
        let key = (device.id, thread);
        if let Some(state) = known.by_thread.get(&key).and_then(Weak::upgrade) {
            return Ok(CudaStream { state });
        }
        let thread = Some((thread, legacy));
        let state = StreamState { thread, ..StreamState::fresh(device, stream) };
        let state = Arc::new(state);
        known.sweep();
        known.by_thread.insert(key, Arc::downgrade(&state));
        Ok(CudaStream { state })
    }

    /// Somebody else's stream.
    ///
    /// # Safety
    /// `raw` must be a stream that is alive now, and stay alive for as long as its work matters: see
    /// [`CudaBackend::adopt`](crate::CudaBackend::adopt).
    pub(crate) unsafe fn adopt(
        &self,
        device: &Arc<DeviceState>,
        raw: *mut c_void,
        keeper: Option<Keeper>,
    ) -> Result<CudaStream, CudaError> {
        match raw.addr() {
            0 | Stream::LEGACY => return self.legacy(device),
            Stream::PER_THREAD => return self.per_thread(device),
            _ => {}
        }
        // SAFETY: the caller vouches that it is alive; whether it is of this context is asked below.
        let stream = unsafe { Stream::from_raw(device.context()?, raw) };
        let unique = match stream.capture_status()? {
            CaptureStatus::None => Some(stream.unique_id()?),
            CaptureStatus::Active(_) | CaptureStatus::Invalidated => None,
        };
        if let Some(state) = self.known.lock().find(device.id, unique, raw) {
            return Ok(CudaStream { state });
        }
        if !stream.is_of_its_context()? {
            return Err(CudaError::WrongContext { device: device.id });
        }
        let origin = Origin::Foreign(keeper);
        let state = Arc::new(StreamState { origin, ..StreamState::fresh(device, stream) });
        Ok(self.known.lock().enter(unique, state))
    }

    /// Forgets a stream: the next adoption of its handle gets a new id.
    pub(crate) fn forget(&self, stream: &CudaStream) {
        let mut known = self.known.lock();
        let is_other = |state: &Weak<StreamState>| state.as_ptr() != Arc::as_ptr(&stream.state);
        known.by_unique_id.retain(|_, state| is_other(state));
        known.by_handle.retain(|_, state| is_other(state));
        known.by_thread.retain(|_, state| is_other(state));
    }
}

impl Known {
    /// The known stream with a unique id; without one, the stream last seen with the handle.
    fn find(
        &self,
        device: DeviceId,
        unique: Option<u64>,
        raw: *mut c_void,
    ) -> Option<Arc<StreamState>> {
        match unique {
            Some(unique) => self.by_unique_id.get(&(device, unique))?.upgrade(),
            None => self.by_handle.get(&(device, raw.addr()))?.upgrade(),
        }
    }

    /// Enters a stream, unless another thread has meanwhile.
    fn enter(&mut self, unique: Option<u64>, state: Arc<StreamState>) -> CudaStream {
        let (device, raw) = (state.device.id, state.stream.raw());
        if let Some(state) = self.find(device, unique, raw) {
            return CudaStream { state };
        }
        self.sweep();
        if let Some(unique) = unique {
            self.by_unique_id.insert((device, unique), Arc::downgrade(&state));
        }
        self.by_handle.insert((device, raw.addr()), Arc::downgrade(&state));
        CudaStream { state }
    }

    /// Drops the entries of streams that are gone, once they may be half of all.
    fn sweep(&mut self) {
        let entries =
            |known: &Self| known.by_unique_id.len() + known.by_handle.len() + known.by_thread.len();
        if entries(self) < self.sweep_at {
            return;
        }
        self.by_unique_id.retain(|_, state| state.strong_count() > 0);
        self.by_handle.retain(|_, state| state.strong_count() > 0);
        self.by_thread.retain(|_, state| state.strong_count() > 0);
        self.sweep_at = 64 + 2 * entries(self);
    }
}
