//! Pinned host memory: `alloc_core`'s host traits for [`MockBackend`].
//!
//! Pinned segments live in the same address space as everything else, and work of any device may
//! touch them. The host is a party of its own: it may write to memory the moment it gets it, so
//! memory handed to it must not be touched by any work that it has not seen finish.

use std::time::Duration;

use alloc_core::backend::{Backend, Completion, ErrorKind, Refused};
use alloc_core::host::{CopyData, CopyRequest, HostBackend, NodeId, PinRequest, PinnedSegment};
use alloc_core::{Addr, DeviceId};

use crate::judge::unordered;
use crate::memory::Device;
use crate::sim::{Failure, Sim, on_range};
use crate::streams::Lane;
use crate::{Call, CallInfo, Judge, MockBackend, MockError, MockEvent, MockStream, Rule};

const NO_MEMORY: Failure = (ErrorKind::OutOfMemory, "no more memory can be pinned");
const NO_ADDRESSES: Failure = (ErrorKind::OutOfMemory, "address space is exhausted");

/// Pinned memory of a [`MockBackend`]. A dropped one shows up as a leaked segment.
#[derive(PartialEq, Eq, Debug)]
pub struct MockPinned {
    backend: u32,
    request: PinRequest,
    base: Addr,
}

impl MockPinned {
    /// How it was asked for.
    pub fn request(&self) -> &PinRequest {
        &self.request
    }
}

impl PinnedSegment for MockPinned {
    fn base(&self) -> Addr {
        self.base
    }

    fn bytes(&self) -> u64 {
        self.request.bytes
    }
}

fn node_index(request: &PinRequest) -> usize {
    request.node.map_or(0, NodeId::index)
}

impl HostBackend for MockBackend {
    type Stream = MockStream;
    type Event = MockEvent;
    type Pinned = MockPinned;
    type Error = MockError;

    fn node_count(&self) -> u16 {
        self.sim().host.len() as u16
    }

    /// Device `d` is nearest to node `d` modulo their number.
    fn node_of(&self, device: DeviceId) -> Option<NodeId> {
        let exists = device.index() < usize::from(Backend::device_count(self));
        let node = device.index() % self.sim().host.len();
        exists.then_some(NodeId::new(node as u16))
    }

    fn pin(&self, request: &PinRequest) -> Result<MockPinned, MockError> {
        let bytes = request.bytes;
        let info = on_range(Call::Pin, DeviceId::new(0), Addr::NULL, bytes);
        let base = self.call(info, |sim, begun| {
            let node = node_index(request);
            if bytes == 0 || node >= sim.host.len() || request.piece_bytes_max == 0 {
                return Err(sim.refuse(Rule::BadRequest, &info, "no such size or node"));
            }
            if !sim.host[node].take(bytes) {
                return Err(NO_MEMORY);
            }
            let Some(base) = sim.space.choose(bytes) else {
                sim.host[node].used -= bytes;
                return Err(NO_ADDRESSES);
            };
            begun.info.addr = base;
            sim.memory.add_segment(base, bytes);
            sim.pins.insert(base, *request);
            Ok(base)
        })?;
        Ok(MockPinned { backend: self.shared.id, request: *request, base })
    }

    fn unpin(&self, segment: MockPinned) -> Result<(), Refused<MockPinned, MockError>> {
        let MockPinned { backend, request, base } = segment;
        let info = on_range(Call::Unpin, DeviceId::new(0), base, request.bytes);
        self.consuming(info, segment, |sim, _| {
            self.check_owner(sim, backend, &info)?;
            // Unlike giving device memory back, this waits for nothing.
            sim.vanishes(Rule::ReleaseUnderWork, base, request.bytes);
            if let Some(piece) = sim.memory.remove_segment(base) {
                sim.streams.forget_physical(piece);
            }
            sim.pins.remove(&base);
            sim.host[node_index(&request)].used -= request.bytes;
            sim.space.give_back(base);
            Ok(())
        })
    }

    fn record(&self, stream: &MockStream) -> Result<MockEvent, MockError> {
        Backend::record(self, stream)
    }

    fn query(&self, event: &MockEvent) -> Result<Completion, MockError> {
        let info = self.about(Call::Query, event);
        self.call(info, |sim, _| {
            self.check_owner(sim, event.backend, &info)?;
            may_ask_relaxed(sim, event, &info)?;
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
            may_ask_relaxed(sim, event, &info)?;
            begun.waited_for = sim.host_waits(event.stream, event.items);
            sim.streams.observe(&event.clock);
            sim.after_sync();
            Ok(())
        })
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.now_ns())
    }
}

/// Host backends relax the capture mode of the calling thread around their calls, so a capture
/// elsewhere forbids them nothing; asking about a captured event stays wrong.
fn may_ask_relaxed(sim: &mut Sim, event: &MockEvent, info: &CallInfo) -> Result<(), Failure> {
    let Some(capture) = event.capture else { return Ok(()) };
    sim.captures.strike(capture);
    Err(sim.refuse(Rule::CapturedEvent, info, "the event was captured"))
}

impl CopyData for MockBackend {
    fn copy(&self, request: &CopyRequest) -> Result<(), MockError> {
        self.copy_on_host(request.to(), request.from(), request.bytes())
    }
}

impl MockBackend {
    /// A copy by the host. Contents are not simulated; the ranges are judged.
    ///
    /// # Errors
    /// Injected ones; [`ErrorKind::Other`] if a range is not inside one allocation.
    pub fn copy_on_host(&self, to: Addr, from: Addr, bytes: u64) -> Result<(), MockError> {
        let info = on_range(Call::Copy, DeviceId::new(0), to, bytes);
        self.call(info, |sim, _| {
            for at in [to, from] {
                if sim.memory.pieces(at, bytes).is_err() || sim.book.holding(at, bytes).is_none() {
                    return Err(sim.refuse(Rule::UnallocatedUse, &info, "not one allocation"));
                }
            }
            Ok(())
        })
    }
}

impl Device {
    fn take(&mut self, bytes: u64) -> bool {
        let room = self.used.checked_add(bytes).is_some_and(|used| used <= self.capacity);
        if room {
            self.used += bytes;
        }
        room
    }
}

impl MockBackend {
    /// The pinned segments, by address, and how each was asked for.
    pub fn pins(&self) -> Vec<(Addr, PinRequest)> {
        self.sim().pins.iter().map(|(&base, &request)| (base, request)).collect()
    }

    /// Bytes pinned on a NUMA node.
    pub fn pinned(&self, node: NodeId) -> u64 {
        self.sim().host[node.index()].used
    }

    /// Changes how much can be pinned on a node in all.
    pub fn set_host_capacity(&self, node: NodeId, bytes: u64) {
        self.sim().host[node.index()].capacity = bytes;
    }
}

impl Judge<'_> {
    /// The allocator has handed out `bytes` of host memory at `addr`: the host may write there from
    /// now on.
    pub fn allocated_on_host(&self, addr: Addr, bytes: u64) {
        let mut sim = self.backend().sim();
        if bytes > 0 && !sim.unloaded {
            sim.allocated_on_host(addr, bytes);
        }
    }
}

impl Sim {
    fn allocated_on_host(&mut self, addr: Addr, bytes: u64) {
        self.operation += 1;
        let range = (addr, bytes);
        let pieces = self.memory.pieces(addr, bytes).unwrap_or_else(|rule| {
            self.violate(rule, (None, None), range);
            Vec::new()
        });
        let same_addr = self.book.within(addr, bytes).is_some();
        if same_addr || self.book.overlapping(&pieces).is_some() {
            self.violate(Rule::Overlap, (None, None), range);
        }
        // The host is ordered after what it has seen finish, and after nothing else.
        let lanes = self.streams.all.iter().map(|state| &state.lane).enumerate();
        let host = Lane::default();
        let endangered =
            unordered(lanes, (usize::MAX, &host), |s| self.streams.host.get(s), &pieces, true);
        for stream in endangered {
            self.violate(Rule::EarlyReuse, (None, Some(stream)), range);
        }
        self.book.insert(addr, bytes, pieces, None);
    }
}
