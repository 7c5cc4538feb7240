//! A backend that does not always tell the truth about what it hands out.

use alloc_core::backend::{
    Backend, Completion, DeviceMemory, MemoryInfo, Refused, Reservation, Segment, VirtualMemory,
};
use alloc_core::{Addr, DeviceId};
use mock_backend::{
    MockBackend, MockError, MockEvent, MockPage, MockReservation, MockSegment, MockStream,
};
use std::sync::{Arc, Mutex};

/// What is said about a range: another base, another length.
pub(crate) type Lie = fn(Addr, u64) -> (Addr, u64);

/// The simulator behind a layer that lies about the next segment or reservation when told to.
#[derive(Clone)]
pub(crate) struct Liar {
    pub(crate) honest: MockBackend,
    next: Arc<Mutex<Option<Lie>>>,
}

impl Liar {
    pub(crate) fn new(honest: MockBackend) -> Self {
        Liar { honest, next: Arc::default() }
    }

    /// Lies about the next range that is handed out.
    pub(crate) fn lie(&self, lie: Lie) {
        *self.next.lock().expect("nobody panics here") = Some(lie);
    }

    fn claim<T>(&self, token: T, base: Addr, bytes: u64) -> Claimed<T> {
        let lie = self.next.lock().expect("nobody panics here").take();
        let (base, bytes) = lie.map_or((base, bytes), |lie| lie(base, bytes));
        Claimed { token, base, bytes }
    }
}

/// A range with what is claimed about it.
#[derive(Debug)]
pub(crate) struct Claimed<T> {
    token: T,
    base: Addr,
    bytes: u64,
}

impl<T> Claimed<T> {
    fn give<E>(
        self,
        take: impl FnOnce(T) -> Result<(), Refused<T, E>>,
    ) -> Result<(), Refused<Self, E>> {
        let Claimed { token, base, bytes } = self;
        take(token).map_err(|Refused { value, error }| Refused {
            value: Claimed { token: value, base, bytes },
            error,
        })
    }
}

impl Segment for Claimed<MockSegment> {
    fn base(&self) -> Addr {
        self.base
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Reservation for Claimed<MockReservation> {
    fn base(&self) -> Addr {
        self.base
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Backend for Liar {
    type Stream = MockStream;
    type Event = MockEvent;
    type Segment = Claimed<MockSegment>;
    type Error = MockError;

    fn device_count(&self) -> u16 {
        self.honest.device_count()
    }

    fn acquire(
        &self,
        device: DeviceId,
        bytes: u64,
        stream: &MockStream,
    ) -> Result<Self::Segment, MockError> {
        let segment = self.honest.acquire(device, bytes, stream)?;
        let (base, bytes) = (segment.base(), segment.bytes());
        Ok(self.claim(segment, base, bytes))
    }

    fn release(&self, segment: Self::Segment) -> Result<(), Refused<Self::Segment, MockError>> {
        segment.give(|token| self.honest.release(token))
    }

    fn record(&self, stream: &MockStream) -> Result<MockEvent, MockError> {
        self.honest.record(stream)
    }

    fn query(&self, event: &MockEvent) -> Result<Completion, MockError> {
        self.honest.query(event)
    }

    fn wait(&self, event: &MockEvent) -> Result<(), MockError> {
        self.honest.wait(event)
    }
}

impl MemoryInfo for Liar {
    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, MockError> {
        self.honest.memory(device)
    }
}

impl VirtualMemory for Liar {
    type Reservation = Claimed<MockReservation>;
    type Page = MockPage;

    fn granularity(&self, device: DeviceId) -> u64 {
        self.honest.granularity(device)
    }

    fn reserve(&self, device: DeviceId, bytes: u64) -> Result<Self::Reservation, MockError> {
        let range = self.honest.reserve(device, bytes)?;
        let (base, bytes) = (range.base(), range.bytes());
        Ok(self.claim(range, base, bytes))
    }

    fn unreserve(
        &self,
        reservation: Self::Reservation,
    ) -> Result<(), Refused<Self::Reservation, MockError>> {
        reservation.give(|token| self.honest.unreserve(token))
    }

    fn create(&self, device: DeviceId, bytes: u64) -> Result<MockPage, MockError> {
        self.honest.create(device, bytes)
    }

    fn destroy(&self, page: MockPage) -> Result<(), Refused<MockPage, MockError>> {
        self.honest.destroy(page)
    }

    fn map(
        &self,
        reservation: &Self::Reservation,
        at: Addr,
        page: &MockPage,
    ) -> Result<(), MockError> {
        self.honest.map(&reservation.token, at, page)
    }

    fn set_access(
        &self,
        reservation: &Self::Reservation,
        at: Addr,
        bytes: u64,
        device: DeviceId,
    ) -> Result<(), MockError> {
        self.honest.set_access(&reservation.token, at, bytes, device)
    }

    fn unmap(
        &self,
        reservation: &Self::Reservation,
        at: Addr,
        bytes: u64,
    ) -> Result<(), MockError> {
        self.honest.unmap(&reservation.token, at, bytes)
    }
}
