//! The driver calls: `alloc_core`'s traits for [`MockBackend`].

use alloc_core::backend::{
    Backend, Completion, DeviceMemory, ErrorKind, MemoryInfo, Refused, VirtualMemory,
};
use alloc_core::{Addr, DeviceId};

use crate::costs::FIRST_MAP_NS;
use crate::event::MockEvent;
use crate::memory::{MockPage, MockReservation, MockSegment};
use crate::sim::{Begun, Failure, Sim, on_range, on_stream};
use crate::streams::id_of;
use crate::{Call, CallInfo, Fed, MockBackend, MockError, MockStream, Rule, SpanKind};

/// What sizes of segments are multiples of, at the least.
const SEGMENT_QUANTUM: u64 = 512;

const NO_MEMORY: Failure = (ErrorKind::OutOfMemory, "the device is full");
const NO_ADDRESSES: Failure = (ErrorKind::OutOfMemory, "address space is exhausted");

impl MockBackend {
    /// A driver call from begin to end, in one go under the lock.
    pub(crate) fn call<T>(
        &self,
        info: CallInfo,
        act: impl FnOnce(&mut Sim, &mut Begun) -> Result<T, Failure>,
    ) -> Result<T, MockError> {
        self.run_hook(&info);
        let mut sim = self.sim();
        let mut begun = sim.begin(info)?;
        let result = act(&mut sim, &mut begun);
        sim.finish(begun, result)
    }

    /// As [`call`](Self::call), for a call that consumes `value`.
    pub(crate) fn consuming<T>(
        &self,
        info: CallInfo,
        value: T,
        act: impl FnOnce(&mut Sim, &mut Begun) -> Result<(), Failure>,
    ) -> Result<(), Refused<T, MockError>> {
        self.call(info, act).map_err(|error| Refused { value, error })
    }

    /// A driver call that needs an address: `claim` under the lock, then the feed without it, then
    /// `keep` under it again; `unclaim` if there is no address.
    pub(crate) fn placed(
        &self,
        info: CallInfo,
        kind: SpanKind,
        claim: impl FnOnce(&mut Sim) -> Result<(), Failure>,
        keep: impl FnOnce(&mut Sim, Addr),
        unclaim: impl FnOnce(&mut Sim),
    ) -> Result<Addr, MockError> {
        self.run_hook(&info);
        let mut sim = self.sim();
        let mut begun = sim.begin(info)?;
        if let Err(failure) = claim(&mut sim) {
            return sim.finish(begun, Err(failure));
        }
        drop(sim);
        let fed = self.ask_feed(kind, info.bytes);
        let mut sim = self.sim();
        let placed = place(&mut sim, &mut begun.info, fed);
        match placed {
            Ok(addr) => keep(&mut sim, addr),
            Err(_) => unclaim(&mut sim),
        }
        sim.finish(begun, placed)
    }

    pub(crate) fn check_stream(
        &self,
        sim: &mut Sim,
        s: &MockStream,
        info: &CallInfo,
    ) -> Result<(), Failure> {
        if s.backend == self.shared.id {
            return Ok(());
        }
        Err(sim.refuse(Rule::ForeignHandle, info, "the stream belongs to another backend"))
    }

    pub(crate) fn check_owner(
        &self,
        sim: &mut Sim,
        owner: u32,
        info: &CallInfo,
    ) -> Result<(), Failure> {
        if owner == self.shared.id {
            return Ok(());
        }
        Err(sim.refuse(Rule::ForeignHandle, info, "it belongs to another backend"))
    }

    pub(crate) fn check_size(
        &self,
        sim: &mut Sim,
        quantum: u64,
        info: &CallInfo,
    ) -> Result<(), Failure> {
        let device_exists = info.device.index() < usize::from(self.shared.device_count);
        if info.bytes > 0 && info.bytes.is_multiple_of(quantum) && device_exists {
            return Ok(());
        }
        Err(sim.refuse(Rule::BadRequest, info, "no such size or device"))
    }
}

/// Takes the address range for a call, where the feed or the placement says.
fn place(sim: &mut Sim, info: &mut CallInfo, fed: Option<Fed>) -> Result<Addr, Failure> {
    let at = match fed {
        None => {
            sim.refuse(Rule::FeedExhausted, info, "");
            None
        }
        Some(Fed::Choose) => None,
        Some(Fed::At(at)) => Some(at),
        Some(Fed::Exactly(at, bytes)) => {
            info.addr = at;
            if bytes != info.bytes {
                sim.refuse(Rule::FedWrongSize, info, "");
            }
            Some(at)
        }
    };
    let Some(at) = at else {
        info.addr = sim.space.choose(info.bytes).ok_or(NO_ADDRESSES)?;
        return Ok(info.addr);
    };
    info.addr = at;
    if !sim.space.place(at, info.bytes) {
        return Err(sim.refuse(Rule::FedBadAddress, info, "the fed address cannot be used"));
    }
    Ok(at)
}

fn broken(sim: &mut Sim, info: &CallInfo, why: &'static str) -> impl FnOnce(Rule) -> Failure {
    move |rule| sim.refuse(rule, info, why)
}

impl Backend for MockBackend {
    type Stream = MockStream;
    type Event = MockEvent;
    type Segment = MockSegment;
    type Error = MockError;

    fn device_count(&self) -> u16 {
        self.shared.device_count
    }

    fn acquire(
        &self,
        device: DeviceId,
        bytes: u64,
        stream: &MockStream,
    ) -> Result<MockSegment, MockError> {
        let info = CallInfo { bytes, ..on_stream(Call::Acquire, stream) };
        let info = CallInfo { device, ..info };
        let claim = |sim: &mut Sim| {
            self.check_stream(sim, stream, &info)?;
            self.check_size(sim, SEGMENT_QUANTUM, &info)?;
            if stream.device != device {
                return Err(sim.refuse(Rule::BadRequest, &info, "a stream of another device"));
            }
            sim.memory.take(device, bytes).then_some(()).ok_or(NO_MEMORY)
        };
        let base = self.placed(
            info,
            SpanKind::Segment,
            claim,
            |sim, base| sim.memory.add_segment(base, bytes),
            |sim| sim.memory.put_back(device, bytes),
        )?;
        Ok(MockSegment { backend: self.shared.id, device, base, bytes })
    }

    fn release(&self, segment: MockSegment) -> Result<(), Refused<MockSegment, MockError>> {
        let MockSegment { backend, device, base, bytes } = segment;
        let info = on_range(Call::Release, device, base, bytes);
        self.consuming(info, segment, |sim, begun| {
            self.check_owner(sim, backend, &info)?;
            if sim.captures.strike_all() {
                return Err(sim.refuse(Rule::CallDuringCapture, &info, "a capture forbids it"));
            }
            let physical = sim.memory.physical_of(base);
            begun.waited_for = sim.release(base, bytes, device);
            if let Some(from) = physical {
                self.end_export(sim, (from, from + bytes));
            }
            Ok(())
        })
    }

    fn record(&self, stream: &MockStream) -> Result<MockEvent, MockError> {
        let info = on_stream(Call::Record, stream);
        self.call(info, |sim, _| {
            self.check_stream(sim, stream, &info)?;
            if sim.captures.of(stream.index).is_some() {
                // The driver allows it: the event becomes part of the graph, and asking about it
                // is what fails later.
                sim.refuse(Rule::CapturedEvent, &info, "");
            }
            Ok(self.event_on(sim, stream.index))
        })
    }

    fn query(&self, event: &MockEvent) -> Result<Completion, MockError> {
        let info = self.about(Call::Query, event);
        self.call(info, |sim, _| {
            self.check_owner(sim, event.backend, &info)?;
            sim.may_ask(event, &info)?;
            if !sim.streams.reached(event.stream, event.items) {
                return Ok(Completion::Pending);
            }
            sim.streams.observe(&event.clock);
            Ok(Completion::Reached)
        })
    }

    fn wait(&self, event: &MockEvent) -> Result<(), MockError> {
        let info = self.about(Call::Wait, event);
        self.call(info, |sim, begun| {
            self.check_owner(sim, event.backend, &info)?;
            sim.may_ask(event, &info)?;
            begun.waited_for = sim.host_waits(event.stream, event.items);
            sim.streams.observe(&event.clock);
            sim.after_sync();
            Ok(())
        })
    }
}

impl MockBackend {
    pub(crate) fn about(&self, call: Call, event: &MockEvent) -> CallInfo {
        let device = match event.backend == self.shared.id {
            true => self.sim().streams.all[event.stream].device,
            false => DeviceId::new(0),
        };
        let stream = Some(id_of(event.stream));
        CallInfo { call, device, stream, addr: Addr::NULL, bytes: 0 }
    }
}

impl MemoryInfo for MockBackend {
    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, MockError> {
        let info = on_range(Call::Memory, device, Addr::NULL, 0);
        self.call(info, |sim, _| match sim.memory.devices.get(device.index()) {
            Some(d) => {
                let free = d.capacity.saturating_sub(d.used).min(d.total.saturating_sub(d.used));
                Ok(DeviceMemory { free, total: d.total })
            }
            None => Err(sim.refuse(Rule::BadRequest, &info, "no such device")),
        })
    }
}

impl VirtualMemory for MockBackend {
    type Reservation = MockReservation;
    type Page = MockPage;

    fn granularity(&self, _device: DeviceId) -> u64 {
        self.shared.granularity
    }

    fn reserve(&self, device: DeviceId, bytes: u64) -> Result<MockReservation, MockError> {
        let info = on_range(Call::Reserve, device, Addr::NULL, bytes);
        let base = self.placed(
            info,
            SpanKind::Reservation,
            |sim| self.check_size(sim, self.shared.granularity, &info),
            |sim, base| sim.memory.add_reservation(base, bytes),
            |_| {},
        )?;
        Ok(MockReservation { backend: self.shared.id, device, base, bytes })
    }

    fn unreserve(
        &self,
        reservation: MockReservation,
    ) -> Result<(), Refused<MockReservation, MockError>> {
        let MockReservation { backend, device, base, bytes } = reservation;
        let info = on_range(Call::Unreserve, device, base, bytes);
        self.consuming(info, reservation, |sim, _| {
            self.check_owner(sim, backend, &info)?;
            let removed = sim.memory.remove_reservation(base);
            removed.map_err(broken(sim, &info, "pages are mapped in it"))?;
            sim.space.give_back(base);
            Ok(())
        })
    }

    fn create(&self, device: DeviceId, bytes: u64) -> Result<MockPage, MockError> {
        let info = on_range(Call::Create, device, Addr::NULL, bytes);
        self.call(info, |sim, _| {
            self.check_size(sim, self.shared.granularity, &info)?;
            sim.memory.take(device, bytes).then_some(()).ok_or(NO_MEMORY)?;
            let physical = sim.memory.add_page(bytes);
            Ok(MockPage { backend: self.shared.id, device, physical, bytes })
        })
    }

    fn destroy(&self, page: MockPage) -> Result<(), Refused<MockPage, MockError>> {
        let MockPage { backend, device, physical, bytes } = page;
        let info = on_range(Call::Destroy, device, Addr::NULL, bytes);
        self.consuming(info, page, |sim, _| {
            self.check_owner(sim, backend, &info)?;
            let removed = sim.memory.remove_page(physical);
            removed.map_err(broken(sim, &info, "it is mapped"))?;
            let piece = (physical, physical + bytes);
            sim.streams.forget_physical(piece);
            if !self.end_import(sim, physical) {
                self.end_export(sim, piece);
                sim.memory.put_back(device, bytes);
            }
            Ok(())
        })
    }

    fn map(
        &self,
        reservation: &MockReservation,
        at: Addr,
        page: &MockPage,
    ) -> Result<(), MockError> {
        let info = on_range(Call::Map, reservation.device, at, page.bytes);
        self.call(info, |sim, _| {
            self.check_owner(sim, reservation.backend, &info)?;
            self.check_owner(sim, page.backend, &info)?;
            let granularity = self.shared.granularity;
            let mapped = sim.memory.map(reservation.base, at, page.physical, granularity);
            let is_first = mapped.map_err(broken(sim, &info, "it cannot be mapped there"))?;
            if is_first {
                sim.spend(FIRST_MAP_NS);
            }
            Ok(())
        })
    }

    fn set_access(
        &self,
        reservation: &MockReservation,
        at: Addr,
        bytes: u64,
        device: DeviceId,
    ) -> Result<(), MockError> {
        let info = on_range(Call::SetAccess, device, at, bytes);
        self.call(info, |sim, _| {
            self.check_owner(sim, reservation.backend, &info)?;
            let set = sim.memory.set_access(reservation.base, at, bytes, device);
            set.map_err(broken(sim, &info, "not whole mapped pages"))
        })
    }

    fn unmap(&self, reservation: &MockReservation, at: Addr, bytes: u64) -> Result<(), MockError> {
        let info = on_range(Call::Unmap, reservation.device, at, bytes);
        self.call(info, |sim, _| {
            self.check_owner(sim, reservation.backend, &info)?;
            let unmapped = sim.memory.unmap(reservation.base, at, bytes);
            unmapped.map_err(broken(sim, &info, "not exactly one mapping"))?;
            sim.vanishes(Rule::UnmapUnderWork, at, bytes);
            Ok(())
        })
    }
}
