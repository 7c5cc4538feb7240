//! Simulated memory: segments, reservations, pages, mappings, and the physical memory behind them.

use std::collections::BTreeMap;

use alloc_core::backend::{Page, Reservation, Segment};
use alloc_core::{Addr, DeviceId};

use crate::violation::Rule;

/// A segment of a [`MockBackend`](crate::MockBackend). Dropping it does not release it: a segment
/// that is dropped stays taken and shows up as a leak.
#[derive(PartialEq, Eq, Debug)]
pub struct MockSegment {
    pub(crate) backend: u32,
    pub(crate) device: DeviceId,
    pub(crate) base: Addr,
    pub(crate) bytes: u64,
}

impl MockSegment {
    /// The device it is on.
    pub fn device(&self) -> DeviceId {
        self.device
    }
}

impl Segment for MockSegment {
    fn base(&self) -> Addr {
        self.base
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A reservation of a [`MockBackend`](crate::MockBackend). A dropped one shows up as a leak.
#[derive(PartialEq, Eq, Debug)]
pub struct MockReservation {
    pub(crate) backend: u32,
    pub(crate) device: DeviceId,
    pub(crate) base: Addr,
    pub(crate) bytes: u64,
}

impl MockReservation {
    /// The device it was made for.
    pub fn device(&self) -> DeviceId {
        self.device
    }
}

impl Reservation for MockReservation {
    fn base(&self) -> Addr {
        self.base
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// A page of a [`MockBackend`](crate::MockBackend). A dropped one shows up as a leak.
#[derive(PartialEq, Eq, Debug)]
pub struct MockPage {
    pub(crate) backend: u32,
    pub(crate) device: DeviceId,
    /// First byte in the physical memory of the backend: its identity.
    pub(crate) physical: u64,
    pub(crate) bytes: u64,
}

impl MockPage {
    /// The device whose memory it is.
    pub fn device(&self) -> DeviceId {
        self.device
    }
}

impl Page for MockPage {
    fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[derive(Debug)]
pub(crate) struct Device {
    /// What acquire and create may take in all.
    pub(crate) capacity: u64,
    /// What the device claims to have.
    pub(crate) total: u64,
    pub(crate) used: u64,
    /// What names it among processes.
    pub(crate) key: u8,
}

/// Where a segment, or a mapped page, lies in physical memory.
#[derive(Debug)]
struct SegmentState {
    bytes: u64,
    physical: u64,
}

#[derive(Debug)]
struct ReservationState {
    bytes: u64,
    mappings: BTreeMap<u64, Mapping>,
}

#[derive(Debug)]
struct Mapping {
    bytes: u64,
    physical: u64,
    access: Vec<DeviceId>,
}

#[derive(Debug)]
struct PageState {
    bytes: u64,
    mapped: u32,
    ever_mapped: bool,
}

/// A run of physical memory: start and end.
pub(crate) type Piece = (u64, u64);

/// All memory of a backend.
///
/// Physical memory has an address space of its own in which nothing is ever used twice, so that
/// two mappings of one page are seen to be the same memory.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) devices: Vec<Device>,
    segments: BTreeMap<u64, SegmentState>,
    reservations: BTreeMap<u64, ReservationState>,
    pages: BTreeMap<u64, PageState>,
    next_physical: u64,
}

impl Memory {
    pub(crate) fn new(devices: Vec<Device>) -> Self {
        Memory { devices, ..Memory::default() }
    }

    /// Takes `bytes` of the device's memory; `false` if there is no room.
    pub(crate) fn take(&mut self, device: DeviceId, bytes: u64) -> bool {
        let device = &mut self.devices[device.index()];
        let room = device.used.checked_add(bytes).is_some_and(|used| used <= device.capacity);
        if room {
            device.used += bytes;
        }
        room
    }

    /// Undoes [`take`](Memory::take).
    pub(crate) fn put_back(&mut self, device: DeviceId, bytes: u64) {
        self.devices[device.index()].used -= bytes;
    }

    fn new_physical(&mut self, bytes: u64) -> u64 {
        let physical = self.next_physical;
        self.next_physical += bytes;
        physical
    }

    pub(crate) fn add_segment(&mut self, base: Addr, bytes: u64) {
        let physical = self.new_physical(bytes);
        self.segments.insert(base.get(), SegmentState { bytes, physical });
    }

    /// First byte of a segment in physical memory.
    pub(crate) fn physical_of(&self, base: Addr) -> Option<u64> {
        self.segments.get(&base.get()).map(|segment| segment.physical)
    }

    /// Forgets a segment; its physical run, or `None` if it is not live.
    pub(crate) fn remove_segment(&mut self, base: Addr) -> Option<Piece> {
        let state = self.segments.remove(&base.get())?;
        Some((state.physical, state.physical + state.bytes))
    }

    pub(crate) fn add_reservation(&mut self, base: Addr, bytes: u64) {
        let state = ReservationState { bytes, mappings: BTreeMap::new() };
        self.reservations.insert(base.get(), state);
    }

    pub(crate) fn remove_reservation(&mut self, base: Addr) -> Result<(), Rule> {
        let state = self.reservations.get(&base.get()).ok_or(Rule::ForeignHandle)?;
        if !state.mappings.is_empty() {
            return Err(Rule::UnreserveMapped);
        }
        self.reservations.remove(&base.get());
        Ok(())
    }

    pub(crate) fn add_page(&mut self, bytes: u64) -> u64 {
        let physical = self.new_physical(bytes);
        self.pages.insert(physical, PageState { bytes, mapped: 0, ever_mapped: false });
        physical
    }

    pub(crate) fn remove_page(&mut self, physical: u64) -> Result<(), Rule> {
        match self.pages.get(&physical) {
            None => Err(Rule::ForeignHandle),
            Some(page) if page.mapped > 0 => Err(Rule::DestroyMapped),
            Some(_) => {
                self.pages.remove(&physical);
                Ok(())
            }
        }
    }

    /// Maps a page. Returns whether it had never been mapped before.
    pub(crate) fn map(
        &mut self,
        base: Addr,
        at: Addr,
        physical: u64,
        granularity: u64,
    ) -> Result<bool, Rule> {
        let reservation = self.reservations.get_mut(&base.get()).ok_or(Rule::ForeignHandle)?;
        let page = self.pages.get_mut(&physical).ok_or(Rule::ForeignHandle)?;
        let end = reservation.end_within(base, at, page.bytes).ok_or(Rule::BadRange)?;
        if !at.is_aligned(granularity) {
            return Err(Rule::BadRange);
        }
        let lower = reservation.mappings.range(..end).next_back();
        if lower.is_some_and(|(start, mapping)| start + mapping.bytes > at.get()) {
            return Err(Rule::MapOverMapping);
        }
        page.mapped += 1;
        let mapping = Mapping { bytes: page.bytes, physical, access: Vec::new() };
        reservation.mappings.insert(at.get(), mapping);
        Ok(!std::mem::replace(&mut page.ever_mapped, true))
    }

    /// Sizes of the mappings that start in a range.
    pub(crate) fn mappings_in(&self, at: Addr, bytes: u64) -> impl Iterator<Item = u64> + '_ {
        let range = at.get()..at.get().saturating_add(bytes);
        let reserved = self.reservations.range(..range.end).next_back();
        let mappings = reserved.into_iter().flat_map(|(_, reservation)| &reservation.mappings);
        mappings.filter(move |(start, _)| range.contains(start)).map(|(_, mapping)| mapping.bytes)
    }

    pub(crate) fn set_access(
        &mut self,
        base: Addr,
        at: Addr,
        bytes: u64,
        device: DeviceId,
    ) -> Result<(), Rule> {
        let reservation = self.reservations.get_mut(&base.get()).ok_or(Rule::ForeignHandle)?;
        let end = reservation.end_within(base, at, bytes).ok_or(Rule::BadRange)?;
        // Whole mappings only, without a hole between them.
        let mut next = at.get();
        for (start, mapping) in reservation.mappings.range(at.get()..end) {
            if *start != next {
                return Err(Rule::BadRange);
            }
            next = start + mapping.bytes;
        }
        if next != end {
            return Err(Rule::BadRange);
        }
        for (_, mapping) in reservation.mappings.range_mut(at.get()..end) {
            if !mapping.access.contains(&device) {
                mapping.access.push(device);
            }
        }
        Ok(())
    }

    pub(crate) fn unmap(&mut self, base: Addr, at: Addr, bytes: u64) -> Result<(), Rule> {
        let reservation = self.reservations.get_mut(&base.get()).ok_or(Rule::ForeignHandle)?;
        match reservation.mappings.get(&at.get()) {
            Some(mapping) if mapping.bytes == bytes => {}
            _ => return Err(Rule::PartialUnmap),
        }
        if let Some(mapping) = reservation.mappings.remove(&at.get())
            && let Some(page) = self.pages.get_mut(&mapping.physical)
        {
            page.mapped -= 1;
        }
        Ok(())
    }

    /// The physical runs behind `bytes` from `addr` on, neighbours joined, if a live segment or
    /// mappings that `device` may access hold all of it.
    pub(crate) fn translate(
        &self,
        addr: Addr,
        bytes: u64,
        device: DeviceId,
    ) -> Result<Vec<Piece>, Rule> {
        self.look_up(addr, bytes, Some(device))
    }

    /// The physical runs behind the range, whoever may access it.
    pub(crate) fn pieces(&self, addr: Addr, bytes: u64) -> Result<Vec<Piece>, Rule> {
        self.look_up(addr, bytes, None)
    }

    fn look_up(
        &self,
        addr: Addr,
        bytes: u64,
        device: Option<DeviceId>,
    ) -> Result<Vec<Piece>, Rule> {
        let end = addr.checked_add(bytes).ok_or(Rule::OutsideMemory)?.get();
        let at = addr.get();
        if let Some((start, segment)) = self.segments.range(..=at).next_back()
            && end <= start + segment.bytes
        {
            let physical = segment.physical + (at - start);
            return Ok(vec![(physical, physical + bytes)]);
        }
        let (start, reservation) =
            self.reservations.range(..=at).next_back().ok_or(Rule::OutsideMemory)?;
        if end > start + reservation.bytes {
            return Err(Rule::OutsideMemory);
        }
        reservation.look_up(at, end, device)
    }

    /// Live segments as (address, bytes), ascending.
    pub(crate) fn live_segments(&self) -> Vec<(Addr, u64)> {
        self.segments.iter().map(|(&base, s)| (Addr::new(base), s.bytes)).collect()
    }

    /// Live reservations as (address, bytes), ascending.
    pub(crate) fn live_reservations(&self) -> Vec<(Addr, u64)> {
        self.reservations.iter().map(|(&base, r)| (Addr::new(base), r.bytes)).collect()
    }

    /// Live mappings as (address, bytes), ascending.
    pub(crate) fn live_mappings(&self) -> Vec<(Addr, u64)> {
        let all = self.reservations.values().flat_map(|r| &r.mappings);
        all.map(|(&at, mapping)| (Addr::new(at), mapping.bytes)).collect()
    }

    /// Sizes of live pages.
    pub(crate) fn live_pages(&self) -> Vec<u64> {
        self.pages.values().map(|page| page.bytes).collect()
    }
}

impl ReservationState {
    /// The end of the range if it is not empty and inside the reservation at `base`.
    fn end_within(&self, base: Addr, at: Addr, bytes: u64) -> Option<u64> {
        let end = at.checked_add(bytes)?.get();
        let inside = at >= base && end <= base.get() + self.bytes && bytes > 0;
        inside.then_some(end)
    }

    fn look_up(&self, mut at: u64, end: u64, device: Option<DeviceId>) -> Result<Vec<Piece>, Rule> {
        let mut pieces: Vec<Piece> = Vec::new();
        while at < end {
            let (start, mapping) = self
                .mappings
                .range(..=at)
                .next_back()
                .filter(|(start, mapping)| *start + mapping.bytes > at)
                .ok_or(Rule::OutsideMemory)?;
            if device.is_some_and(|device| !mapping.access.contains(&device)) {
                return Err(Rule::NoAccess);
            }
            let stop = end.min(start + mapping.bytes);
            let from = mapping.physical + (at - start);
            let to = from + (stop - at);
            match pieces.last_mut() {
                Some(last) if last.1 == from => last.1 = to,
                _ => pieces.push((from, to)),
            }
            at = stop;
        }
        Ok(pieces)
    }
}
