//! The stream-ordered allocator under the judge.

#![cfg(test)]

mod faults;
mod rules;
mod soak;

use alloc_core::ordered::{OrderedAllocator, OrderedConfig};
use alloc_core::{Addr, DeviceId};
use mock_backend::{MockBackend, MockStream, Work};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const DEV0: DeviceId = DeviceId::new(0);

pub(crate) struct Rig {
    pub(crate) gpu: MockBackend,
    pub(crate) s0: MockStream,
    pub(crate) s1: MockStream,
    pub(crate) pool: OrderedAllocator<MockBackend>,
}

pub(crate) fn rig(capacity: u64, config: OrderedConfig) -> Rig {
    rig_on(MockBackend::builder().device(capacity).device(capacity).log(10_000).build(), config)
}

pub(crate) fn rig_on(gpu: MockBackend, config: OrderedConfig) -> Rig {
    let [s0, s1, unifier] = [(); 3].map(|()| gpu.stream(DEV0));
    let pool = OrderedAllocator::new(gpu.clone(), unifier, config).unwrap();
    Rig { gpu, s0, s1, pool }
}

impl Rig {
    pub(crate) fn allocate(&self, bytes: u64, stream: &MockStream) -> Addr {
        let addr = self.pool.allocate(bytes, stream).unwrap();
        self.gpu.judge().allocated(addr, bytes, stream);
        addr
    }

    /// Work on a stream that comes after the allocation, and is recorded.
    pub(crate) fn use_on(&self, addr: Addr, bytes: u64, stream: &MockStream) {
        self.gpu.launch(stream, Work::new().touching(addr, bytes).endless());
        self.pool.record_use(addr, stream).unwrap();
    }

    pub(crate) fn free(&self, addr: Addr) {
        self.gpu.judge().freed(addr);
        self.pool.free(addr).unwrap();
    }
}
