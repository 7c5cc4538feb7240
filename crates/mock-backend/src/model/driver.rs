//! The reference's own idea of a GPU: memory that may run out, and streams that are busy or not.

use alloc_core::{Addr, DeviceId, StreamId};

use super::{EventOrder, ModelAddresses, ModelConf, ModelTrace};
use crate::SpanKind;

struct GpuStream {
    id: StreamId,
    device: DeviceId,
    is_default: bool,
    /// Pieces of work queued and finished.
    queued: u64,
    finished: u64,
}

struct Gpu {
    capacity: u64,
    total: u64,
    used: u64,
}

/// What the devices share.
pub(super) struct Driver {
    pub(super) conf: ModelConf,
    pub(super) trace: Vec<ModelTrace>,
    addresses: ModelAddresses,
    gpus: Vec<Gpu>,
    streams: Vec<GpuStream>,
}

impl Driver {
    pub(super) fn new(conf: ModelConf, addresses: ModelAddresses) -> Self {
        Driver { conf, trace: Vec::new(), addresses, gpus: Vec::new(), streams: Vec::new() }
    }

    pub(super) fn add_device(&mut self, capacity: u64, total: u64) -> DeviceId {
        self.gpus.push(Gpu { capacity, total, used: 0 });
        DeviceId::new(self.gpus.len() as u16 - 1)
    }

    pub(super) fn add_stream(&mut self, id: StreamId, device: DeviceId) {
        let is_default = self.streams.iter().all(|s| s.device != device);
        self.streams.push(GpuStream { id, device, is_default, queued: 0, finished: 0 });
    }

    fn stream(&mut self, id: StreamId) -> &mut GpuStream {
        self.streams.iter_mut().find(|s| s.id == id).expect("unknown stream")
    }

    pub(super) fn device_of(&self, id: StreamId) -> DeviceId {
        self.streams.iter().find(|s| s.id == id).expect("unknown stream").device
    }

    /// Streams in the order in which their events are looked at.
    pub(super) fn event_order(&self) -> Vec<StreamId> {
        let mut ids: Vec<StreamId> = self.streams.iter().map(|s| s.id).collect();
        ids.sort();
        if self.conf.event_order == EventOrder::DefaultThenDescending {
            let is_default = |id| self.streams.iter().any(|s| s.id == id && s.is_default);
            let (first, rest): (Vec<_>, Vec<_>) = ids.into_iter().partition(|&id| is_default(id));
            ids = first.into_iter().chain(rest.into_iter().rev()).collect();
        }
        ids
    }

    pub(super) fn queue_work(&mut self, id: StreamId) {
        self.stream(id).queued += 1;
    }

    /// Where an event recorded now stands in its stream.
    pub(super) fn position(&mut self, id: StreamId) -> u64 {
        self.stream(id).queued
    }

    pub(super) fn reached(&mut self, id: StreamId, position: u64) -> bool {
        self.stream(id).finished >= position
    }

    pub(super) fn wait_until(&mut self, id: StreamId, position: u64) {
        let stream = self.stream(id);
        stream.finished = stream.finished.max(position);
    }

    pub(super) fn finish(&mut self, id: StreamId) {
        let stream = self.stream(id);
        stream.finished = stream.queued;
    }

    pub(super) fn finish_device(&mut self, device: DeviceId) {
        for stream in self.streams.iter_mut().filter(|s| s.device == device) {
            stream.finished = stream.queued;
        }
    }

    pub(super) fn finish_all(&mut self) {
        for stream in &mut self.streams {
            stream.finished = stream.queued;
        }
    }

    /// Takes `bytes` of memory; `false` if there is no room.
    pub(super) fn take(&mut self, device: DeviceId, bytes: u64) -> bool {
        let gpu = &mut self.gpus[device.index()];
        let fits = gpu.capacity - gpu.used >= bytes;
        if fits {
            gpu.used += bytes;
        }
        fits
    }

    pub(super) fn put_back(&mut self, device: DeviceId, bytes: u64) {
        self.gpus[device.index()].used -= bytes;
    }

    pub(super) fn address(&mut self, kind: SpanKind, bytes: u64) -> Addr {
        (self.addresses)(kind, bytes)
    }

    /// Bytes that an expandable segment with pages of `page` bytes reserves.
    pub(super) fn reservation_bytes(&self, device: DeviceId, page: u64) -> u64 {
        let total = self.gpus[device.index()].total;
        (total + total / 8).next_multiple_of(page)
    }
}
