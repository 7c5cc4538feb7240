//! A backend that keeps an account of what it is made to do.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use alloc_core::backend::{
    Backend, Completion, DeviceMemory, MemoryInfo, Page, Refused, Segment, VirtualMemory,
};
use alloc_core::{Addr, DeviceId};

use super::DriverFigures;
use crate::workload::RecordedSegment;

/// Passes every call on to the backend inside, measures how long it takes and adds it up. Clones
/// share the account.
#[derive(Debug)]
pub struct Metered<B> {
    inner: B,
    account: Arc<Mutex<Account>>,
}

#[derive(Default, Debug)]
struct Account {
    figures: DriverFigures,
    maps: u64,
    /// Physical bytes held.
    held: u64,
    /// Segments obtained whole that nobody has asked for yet.
    taken: Vec<RecordedSegment>,
    /// Pages that are mapped: address → bytes.
    mapped: BTreeMap<u64, u64>,
}

impl Account {
    fn hold(&mut self, bytes: u64) {
        self.held += bytes;
        self.figures.reserved_peak = self.figures.reserved_peak.max(self.held);
    }
}

impl<B: Clone> Clone for Metered<B> {
    fn clone(&self) -> Self {
        Metered { inner: self.inner.clone(), account: Arc::clone(&self.account) }
    }
}

impl<B> Metered<B> {
    /// A backend over `inner`, with an empty account.
    pub fn new(inner: B) -> Self {
        Metered { inner, account: Arc::default() }
    }

    /// The backend inside.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    /// The account so far.
    pub fn figures(&self) -> DriverFigures {
        let account = self.account();
        let created = account.figures.handles_created;
        DriverFigures { pages_remapped: account.maps.saturating_sub(created), ..account.figures }
    }

    /// Physical bytes held now.
    pub fn held(&self) -> u64 {
        self.account().held
    }

    /// Moves the segments obtained whole since the last call to `out`, in order.
    pub fn take_segments(&self, out: &mut Vec<RecordedSegment>) {
        out.append(&mut self.account().taken);
    }

    /// The pages that are mapped: addresses, ascending, and sizes.
    pub fn mappings(&self) -> Vec<(u64, u64)> {
        self.account().mapped.iter().map(|(&addr, &bytes)| (addr, bytes)).collect()
    }

    /// A panic while the lock is held leaves nothing half done here.
    fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call, and enters it into the account with `enter` if it succeeded.
    fn call<T, E>(
        &self,
        call: impl FnOnce(&B) -> Result<T, E>,
        enter: impl FnOnce(&mut Account, &T),
    ) -> Result<T, E> {
        let begin = Instant::now();
        let result = call(&self.inner);
        let ns = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let mut account = self.account();
        account.figures.calls += 1;
        account.figures.stall_ns += ns;
        if let Ok(value) = &result {
            enter(&mut account, value);
        }
        result
    }
}

impl<B: Backend> Backend for Metered<B> {
    type Stream = B::Stream;
    type Event = B::Event;
    type Segment = B::Segment;
    type Error = B::Error;

    fn device_count(&self) -> u16 {
        self.inner.device_count()
    }

    fn acquire(
        &self,
        device: DeviceId,
        bytes: u64,
        stream: &B::Stream,
    ) -> Result<B::Segment, B::Error> {
        self.call(
            |inner| inner.acquire(device, bytes, stream),
            |account, segment| {
                account.figures.segments += 1;
                account.taken.push(RecordedSegment { addr: segment.base().get(), bytes });
                account.hold(bytes);
            },
        )
    }

    fn release(&self, segment: B::Segment) -> Result<(), Refused<B::Segment, B::Error>> {
        let bytes = segment.bytes();
        self.call(|inner| inner.release(segment), |account, _| account.held -= bytes)
    }

    fn record(&self, stream: &B::Stream) -> Result<B::Event, B::Error> {
        self.call(|inner| inner.record(stream), |_, _| {})
    }

    fn query(&self, event: &B::Event) -> Result<Completion, B::Error> {
        self.call(|inner| inner.query(event), |_, _| {})
    }

    fn wait(&self, event: &B::Event) -> Result<(), B::Error> {
        self.call(|inner| inner.wait(event), |_, _| {})
    }
}

impl<B: MemoryInfo> MemoryInfo for Metered<B> {
    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, B::Error> {
        self.inner.memory(device)
    }
}

impl<B: VirtualMemory> VirtualMemory for Metered<B> {
    type Reservation = B::Reservation;
    type Page = B::Page;

    fn granularity(&self, device: DeviceId) -> u64 {
        self.inner.granularity(device)
    }

    fn reserve(&self, device: DeviceId, bytes: u64) -> Result<B::Reservation, B::Error> {
        self.call(|inner| inner.reserve(device, bytes), |account, _| account.figures.segments += 1)
    }

    fn unreserve(&self, range: B::Reservation) -> Result<(), Refused<B::Reservation, B::Error>> {
        self.call(|inner| inner.unreserve(range), |_, _| {})
    }

    fn create(&self, device: DeviceId, bytes: u64) -> Result<B::Page, B::Error> {
        self.call(
            |inner| inner.create(device, bytes),
            |account, _| {
                account.figures.handles_created += 1;
                account.hold(bytes);
            },
        )
    }

    fn destroy(&self, page: B::Page) -> Result<(), Refused<B::Page, B::Error>> {
        let bytes = page.bytes();
        self.call(|inner| inner.destroy(page), |account, _| account.held -= bytes)
    }

    fn map(&self, range: &B::Reservation, at: Addr, page: &B::Page) -> Result<(), B::Error> {
        self.call(
            |inner| inner.map(range, at, page),
            |account, _| {
                account.maps += 1;
                account.mapped.insert(at.get(), page.bytes());
            },
        )
    }

    fn set_access(
        &self,
        range: &B::Reservation,
        at: Addr,
        bytes: u64,
        device: DeviceId,
    ) -> Result<(), B::Error> {
        self.call(|inner| inner.set_access(range, at, bytes, device), |_, _| {})
    }

    fn unmap(&self, range: &B::Reservation, at: Addr, bytes: u64) -> Result<(), B::Error> {
        self.call(
            |inner| inner.unmap(range, at, bytes),
            |account, _| {
                account.mapped.remove(&at.get());
            },
        )
    }
}
