//! Memory that somebody else has to know of: a communication library that registers it with a network
//! card, a profiler, a sanitizer.
//!
//! [`Watched`] is a backend around another one. It tells observers of every segment and of every
//! mapped page, those that exist when they come and those to be, and of each again before it goes.

use crate::backend::{
    Backend, Capture, CaptureStatus, CaptureTips, Completion, DeviceKey, DeviceMemory, GraphNodeId,
    MemoryInfo, Page, Refused, Segment, Share, SharePages, Token, VirtualMemory,
};
use crate::units::{Addr, DeviceId};
use parking_lot::{Mutex, ReentrantMutex};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::Arc;

/// A range of memory: a segment, or a page where it is mapped and accessible.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct MemoryRange {
    /// Where it starts.
    pub addr: Addr,
    /// Its length.
    pub bytes: u64,
    /// Whose memory it is.
    pub device: DeviceId,
}

/// Hears of memory as it comes and goes. A range is told of as often as it is taken back, exactly as
/// it was told of, and those that are told of at one time are disjoint.
///
/// Calls are made one at a time, before memory can be used and before it is given back, on the thread that obtains the memory or gives it back, while it may
/// hold the growth lock of an allocator: an observer must not wait for another thread that allocates.
pub trait MemoryObserver: Send + Sync + 'static {
    /// The range can be used from now on, until it is [removed](Self::removed).
    fn added(&self, range: MemoryRange);

    /// The range goes when this returns. No work uses it.
    fn removed(&self, range: MemoryRange);
}

/// A backend whose memory is watched. Clones are the same.
///
/// ```
/// use alloc_core::watch::{MemoryObserver, MemoryRange, Watched};
/// use alloc_core::{CachingAllocator, Config, DeviceId};
/// use mock_backend::MockBackend;
/// use std::sync::Arc;
///
/// struct Registrar;
/// impl MemoryObserver for Registrar {
///     fn added(&self, range: MemoryRange) { /* register it */ }
///     fn removed(&self, range: MemoryRange) { /* and undo that */ }
/// }
///
/// let gpu = MockBackend::new();
/// let stream = gpu.default_stream(DeviceId::new(0));
/// let watched = Watched::new(gpu);
/// let allocator = CachingAllocator::with_virtual_memory(watched.clone(), Config::ours())?;
/// let block = allocator.allocate(1 << 20, &stream)?;
/// let attached = watched.attach(Arc::new(Registrar)); // is told of what there is
/// allocator.free(block)?;
/// drop(attached); // is told that all of it goes
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Watched<B: Backend> {
    backend: Arc<B>,
    watch: Arc<Watch>,
}

impl<B: Backend> Clone for Watched<B> {
    fn clone(&self) -> Self {
        Watched { backend: Arc::clone(&self.backend), watch: Arc::clone(&self.watch) }
    }
}

impl<B: Backend + fmt::Debug> fmt::Debug for Watched<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").field("backend", &self.backend).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Watch {
    /// Held while observers are told, come or go. Re-entrant, because an observer may allocate.
    turn: ReentrantMutex<()>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    present: BTreeMap<Addr, MemoryRange>,
    /// What is mapped, accessible or not, with its length.
    mapped: BTreeMap<Addr, u64>,
    observers: BTreeMap<u64, Arc<dyn MemoryObserver>>,
    next: u64,
}

impl Watch {
    fn observers(&self) -> Vec<Arc<dyn MemoryObserver>> {
        self.state.lock().observers.values().cloned().collect()
    }

    fn present(&self) -> Vec<MemoryRange> {
        self.state.lock().present.values().copied().collect()
    }

    /// Notes memory that is there, unless it is known.
    fn add(&self, range: MemoryRange) {
        let _turn = self.turn.lock();
        let mut state = self.state.lock();
        if state.present.contains_key(&range.addr) {
            return;
        }
        state.present.insert(range.addr, range);
        drop(state);
        self.observers().iter().for_each(|observer| observer.added(range));
    }

    /// Notes that memory is about to go. Returns what there was.
    fn remove(&self, addr: Addr) -> Option<MemoryRange> {
        let _turn = self.turn.lock();
        let range = self.state.lock().present.remove(&addr)?;
        self.observers().iter().for_each(|observer| observer.removed(range));
        Some(range)
    }

    /// Takes memory away around the call that gives it back. If that fails it is there again.
    fn taking<R, E>(&self, addr: Addr, call: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
        let range = self.remove(addr);
        let result = call();
        if let (Err(_), Some(range)) = (&result, range) {
            self.add(range);
        }
        result
    }
}

/// Keeps an observer attached. Dropping it tells the observer that all memory there is goes, and
/// nothing after that.
#[must_use = "the observer is detached when this is dropped"]
pub struct Attachment {
    watch: Arc<Watch>,
    number: u64,
}

impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attachment").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        let _turn = self.watch.turn.lock();
        let observer = self.watch.state.lock().observers.remove(&self.number);
        if let Some(observer) = observer {
            self.watch.present().into_iter().for_each(|range| observer.removed(range));
        }
    }
}

impl<B: Backend> Watched<B> {
    /// Watches `backend` from now on. What it has handed out before is not known.
    pub fn new(backend: B) -> Self {
        Watched { backend: Arc::new(backend), watch: Arc::default() }
    }

    /// The backend inside.
    pub fn inner(&self) -> &B {
        &self.backend
    }

    /// Tells `observer` of all memory there is, and of all to come.
    pub fn attach(&self, observer: Arc<dyn MemoryObserver>) -> Attachment {
        let _turn = self.watch.turn.lock();
        let number = {
            let mut state = self.watch.state.lock();
            state.next += 1;
            let number = state.next;
            state.observers.insert(number, Arc::clone(&observer));
            number
        };
        self.watch.present().into_iter().for_each(|range| observer.added(range));
        Attachment { watch: Arc::clone(&self.watch), number }
    }

    /// All memory there is, by address.
    pub fn memory_ranges(&self) -> Vec<MemoryRange> {
        self.watch.present()
    }
}

impl<B: Backend> Backend for Watched<B> {
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
        let segment = self.backend.acquire(device, bytes, stream)?;
        self.watch.add(MemoryRange { addr: segment.base(), bytes: segment.bytes(), device });
        Ok(segment)
    }

    fn release(&self, segment: B::Segment) -> Result<(), Refused<B::Segment, B::Error>> {
        self.watch.taking(segment.base(), || self.backend.release(segment))
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

impl<B: MemoryInfo> MemoryInfo for Watched<B> {
    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, B::Error> {
        self.backend.memory(device)
    }
}

impl<B: VirtualMemory> VirtualMemory for Watched<B> {
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
        self.backend.create(device, bytes)
    }

    fn destroy(&self, page: B::Page) -> Result<(), Refused<B::Page, B::Error>> {
        self.backend.destroy(page)
    }

    fn map(&self, reservation: &B::Reservation, at: Addr, page: &B::Page) -> Result<(), B::Error> {
        self.backend.map(reservation, at, page)?;
        self.watch.state.lock().mapped.insert(at, page.bytes());
        Ok(())
    }

    /// Pages are told of when their device is first let in.
    fn set_access(
        &self,
        reservation: &B::Reservation,
        at: Addr,
        bytes: u64,
        device: DeviceId,
    ) -> Result<(), B::Error> {
        self.backend.set_access(reservation, at, bytes, device)?;
        let range = at..at + bytes;
        let new: Vec<MemoryRange> = {
            let state = self.watch.state.lock();
            let mapped = state.mapped.range(range);
            mapped.map(|(addr, bytes)| MemoryRange { addr: *addr, bytes: *bytes, device }).collect()
        };
        new.into_iter().for_each(|range| self.watch.add(range));
        Ok(())
    }

    fn unmap(&self, reservation: &B::Reservation, at: Addr, bytes: u64) -> Result<(), B::Error> {
        self.watch.taking(at, || self.backend.unmap(reservation, at, bytes))?;
        // Whoever maps there next does so with the right to the addresses, after this returned.
        self.watch.state.lock().mapped.remove(&at);
        Ok(())
    }
}

impl<B: Capture> Capture for Watched<B> {
    fn capture_status(&self, stream: &B::Stream) -> Result<CaptureStatus, B::Error> {
        self.backend.capture_status(stream)
    }

    fn capture_tips(&self, stream: &B::Stream) -> Result<Option<CaptureTips>, B::Error> {
        self.backend.capture_tips(stream)
    }

    fn extend_past(
        &self,
        stream: &B::Stream,
        past: &mut HashSet<GraphNodeId>,
    ) -> Result<(), B::Error> {
        self.backend.extend_past(stream, past)
    }
}

impl<B: Share> Share for Watched<B> {
    type Descriptor = B::Descriptor;
    type Opened = B::Opened;
    type SharedEvent = B::SharedEvent;

    fn device_key(&self, device: DeviceId) -> Result<DeviceKey, B::Error> {
        self.backend.device_key(device)
    }

    fn export_segment(&self, segment: &B::Segment) -> Result<Token<B::Descriptor>, B::Error> {
        self.backend.export_segment(segment)
    }

    fn open_segment(
        &self,
        device: DeviceId,
        bytes: u64,
        token: Token<B::Descriptor>,
    ) -> Result<B::Opened, B::Error> {
        let opened = self.backend.open_segment(device, bytes, token)?;
        self.watch.add(MemoryRange { addr: opened.base(), bytes: opened.bytes(), device });
        Ok(opened)
    }

    fn close_segment(&self, opened: B::Opened) -> Result<(), Refused<B::Opened, B::Error>> {
        self.watch.taking(opened.base(), || self.backend.close_segment(opened))
    }

    fn export_event(
        &self,
        stream: &B::Stream,
    ) -> Result<(B::SharedEvent, Token<B::Descriptor>), B::Error> {
        self.backend.export_event(stream)
    }

    fn await_event(
        &self,
        stream: &B::Stream,
        token: &Token<B::Descriptor>,
    ) -> Result<(), B::Error> {
        self.backend.await_event(stream, token)
    }
}

impl<B: SharePages> SharePages for Watched<B> {
    fn export_page(&self, page: &B::Page) -> Result<Token<B::Descriptor>, B::Error> {
        self.backend.export_page(page)
    }

    fn import_page(
        &self,
        device: DeviceId,
        bytes: u64,
        token: Token<B::Descriptor>,
    ) -> Result<B::Page, B::Error> {
        self.backend.import_page(device, bytes, token)
    }
}
