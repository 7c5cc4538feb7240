//! What is left of an allocator that is gone: nothing, whoever pointed at whom.

use alloc_core::backend::{Backend, Completion, DeviceMemory, MemoryInfo, Refused, Stream};
use alloc_core::{CachingAllocator, Config, DeviceId, PoolOptions, StreamId};
use mock_backend::{MockBackend, MockError, MockEvent, MockSegment, MockStream};
use std::sync::Arc;

/// A stream whose clones can be counted: heaps keep some.
#[derive(Clone)]
struct Counted(MockStream, Arc<()>);

impl Stream for Counted {
    fn id(&self) -> StreamId {
        self.0.id()
    }

    fn device(&self) -> DeviceId {
        self.0.device()
    }
}

struct Gpu(MockBackend);

impl Backend for Gpu {
    type Stream = Counted;
    type Event = MockEvent;
    type Segment = MockSegment;
    type Error = MockError;

    fn device_count(&self) -> u16 {
        self.0.device_count()
    }

    fn acquire(
        &self,
        device: DeviceId,
        bytes: u64,
        stream: &Counted,
    ) -> Result<MockSegment, MockError> {
        self.0.acquire(device, bytes, &stream.0)
    }

    fn release(&self, segment: MockSegment) -> Result<(), Refused<MockSegment, MockError>> {
        self.0.release(segment)
    }

    fn record(&self, stream: &Counted) -> Result<MockEvent, MockError> {
        self.0.record(&stream.0)
    }

    fn query(&self, event: &MockEvent) -> Result<Completion, MockError> {
        self.0.query(event)
    }

    fn wait(&self, event: &MockEvent) -> Result<(), MockError> {
        self.0.wait(event)
    }
}

impl MemoryInfo for Gpu {
    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, MockError> {
        self.0.memory(device)
    }
}

/// Heaps of the default pool, of a pool that lives and of one that has ended keep their streams no
/// longer than the allocator lives.
#[test]
fn heaps_go_with_their_allocator() {
    let device = DeviceId::new(0);
    for config in [Config::ours(), Config::pytorch()] {
        let gpu = MockBackend::builder().device(1 << 30).build();
        let stream = Counted(gpu.stream(device), Arc::new(()));
        let allocator = CachingAllocator::new(Gpu(gpu.clone()), config).expect("a device");
        let live = allocator.allocate(5 << 20, &stream).expect("room");
        for end in [true, false] {
            let pool = allocator.create_pool(device, PoolOptions::new()).expect("a device");
            let block = pool.allocate(5 << 20, &stream).expect("room");
            allocator.free(block).expect("live");
            match end {
                true => pool.release().expect("nothing is in use"),
                false => drop(pool),
            }
        }
        assert!(Arc::strong_count(&stream.1) > 1, "heaps keep their streams");
        drop((live, allocator));
        assert_eq!(Arc::strong_count(&stream.1), 1);
        gpu.assert_clean();
    }
}
