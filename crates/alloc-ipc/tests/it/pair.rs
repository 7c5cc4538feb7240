//! A producer and a consumer in one process, each a simulated one with its judge.

use alloc_core::share::{ImportCounts, Importer};
use alloc_core::{Allocation, CachingAllocator, Config, DeviceId, Policy};
use alloc_ipc::{Producer, Received, Receiver, Sender};
use alloc_shm::Channel;
use mock_backend::{Exchange, MockBackend, MockStream};
use std::time::Duration;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const DEV0: DeviceId = DeviceId::new(0);
pub(crate) const SOON: Option<Duration> = Some(Duration::from_secs(20));
pub(crate) type Alloc = CachingAllocator<MockBackend>;

pub(crate) fn config(policy: Policy, expandable: bool) -> Config {
    let mut config = Config::of(policy);
    config.settings.expandable_segments = Some(expandable);
    config
}

/// Policies and kinds of segments.
pub(crate) fn kinds() -> [Config; 4] {
    [Policy::Pytorch, Policy::Ours]
        .map(|policy| [config(policy, false), config(policy, true)])
        .concat()
        .try_into()
        .unwrap_or_else(|_| unreachable!())
}

pub(crate) struct Pair {
    pub(crate) exchange: Exchange,
    pub(crate) gpu: MockBackend,
    pub(crate) stream: MockStream,
    pub(crate) alloc: Alloc,
    pub(crate) producer: Producer<MockBackend>,
    pub(crate) sender: Sender<MockBackend>,
    pub(crate) there: MockBackend,
    pub(crate) side: MockStream,
    pub(crate) receiver: Receiver<MockBackend>,
}

impl Pair {
    pub(crate) fn new(config: Config) -> Self {
        Self::on(config, 1 << 30)
    }

    pub(crate) fn on(config: Config, device_bytes: u64) -> Self {
        let exchange = Exchange::new();
        let process =
            || MockBackend::builder().device(device_bytes).exchange(&exchange).strict().build();
        let (gpu, there) = (process(), process());
        let (one, other) = Channel::pair().unwrap();
        let alloc = Alloc::with_virtual_memory(gpu.clone(), config).unwrap();
        let producer = Producer::new(&alloc);
        let sender = producer.connect(one);
        let receiver = Receiver::new(other, &Importer::new(there.clone()));
        let (stream, side) = (gpu.default_stream(DEV0), there.default_stream(DEV0));
        Pair { exchange, gpu, stream, alloc, producer, sender, there, side, receiver }
    }

    pub(crate) fn block(&self, bytes: u64) -> Allocation {
        let block = self.alloc.allocate(bytes, &self.stream).unwrap();
        self.gpu.judge().allocated(block.addr(), block.bytes(), &self.stream);
        block
    }

    pub(crate) fn free(&self, block: Allocation) {
        self.gpu.judge().freed(block.addr());
        self.alloc.free(block).unwrap();
    }

    pub(crate) fn send(&self, block: &Allocation, note: &[u8]) {
        self.sender.send(block, &self.stream, note).unwrap();
    }

    pub(crate) fn receive(&self) -> Received<MockBackend> {
        self.receiver.receive(SOON).unwrap()
    }

    /// Both processes end in good order.
    pub(crate) fn end(self) {
        let Pair { exchange, gpu, alloc, producer, sender, there, receiver, .. } = self;
        assert_eq!(receiver.importer().collect(), 0);
        assert_eq!(receiver.importer().counts(), ImportCounts::default());
        assert_eq!(producer.lent(), 0);
        alloc.check().unwrap();
        alloc.empty_cache().unwrap();
        drop((receiver, sender, producer, alloc));
        gpu.assert_clean();
        there.assert_clean();
        assert_eq!(exchange.imports(), 0);
    }
}
