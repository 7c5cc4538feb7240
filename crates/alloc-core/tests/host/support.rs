//! An allocator on a simulated machine, with the judge told of everything.

use alloc_core::DeviceId;
use alloc_core::host::{
    HostAllocation, HostAllocator, HostConfig, HostError, HostFreeError, HostPolicy, Place,
};
use mock_backend::{Call, MockBackend, MockError, MockStream, Work};

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

pub(crate) type Host = HostAllocator<MockBackend>;
pub(crate) type Error = HostError<MockError>;

pub(crate) struct Rig {
    pub(crate) backend: MockBackend,
    pub(crate) host: Host,
}

/// A strict machine with one device and one NUMA node.
pub(crate) fn machine() -> MockBackend {
    MockBackend::builder().strict().log(10_000).build()
}

pub(crate) fn pytorch() -> Rig {
    Rig::new(machine(), HostConfig::pytorch())
}

pub(crate) fn ours() -> Rig {
    Rig::new(machine(), HostConfig::ours())
}

/// Policy `pytorch` with a settings string.
pub(crate) fn pytorch_with(conf: &str) -> Rig {
    let mut config = HostConfig::pytorch();
    config.apply(conf).expect("a valid string");
    Rig::new(machine(), config)
}

/// Both policies.
pub(crate) fn both() -> [Rig; 2] {
    [pytorch(), ours()]
}

impl Rig {
    pub(crate) fn new(backend: MockBackend, config: HostConfig) -> Self {
        let host = HostAllocator::new(backend.clone(), config).expect("a valid config");
        Rig { backend, host }
    }

    pub(crate) fn is_ours(&self) -> bool {
        self.host.config().policy == HostPolicy::Ours
    }

    pub(crate) fn stream(&self) -> MockStream {
        self.backend.stream(DeviceId::new(0))
    }

    #[track_caller]
    pub(crate) fn allocate(&self, bytes: u64) -> HostAllocation {
        self.try_allocate(bytes).expect("memory")
    }

    pub(crate) fn try_allocate(&self, bytes: u64) -> Result<HostAllocation, Error> {
        self.told(self.host.allocate(bytes))
    }

    #[track_caller]
    pub(crate) fn allocate_on(&self, bytes: u64, place: Place) -> HostAllocation {
        self.told(self.host.allocate_on(bytes, place)).expect("memory")
    }

    #[track_caller]
    pub(crate) fn allocate_for(&self, bytes: u64, stream: &MockStream) -> HostAllocation {
        self.told(self.host.allocate_for(bytes, Place::Anywhere, stream)).expect("memory")
    }

    fn told(&self, result: Result<HostAllocation, Error>) -> Result<HostAllocation, Error> {
        if let Ok(allocation) = &result {
            self.backend.judge().allocated_on_host(allocation.addr(), allocation.bytes());
        }
        result
    }

    #[track_caller]
    pub(crate) fn free(&self, allocation: HostAllocation) {
        self.try_free(allocation).expect("freed");
    }

    pub(crate) fn try_free(
        &self,
        allocation: HostAllocation,
    ) -> Result<(), HostFreeError<MockError>> {
        let (addr, bytes) = (allocation.addr(), allocation.bytes());
        self.backend.judge().freed(addr);
        let result = self.host.free(allocation);
        if result.is_err() && bytes > 0 {
            self.backend.judge().still_live(addr, bytes);
        }
        result
    }

    /// Records a use and queues work on it that does not end by itself.
    pub(crate) fn use_on(&self, allocation: &HostAllocation, stream: &MockStream) {
        self.host.record_use(allocation, stream).expect("live");
        self.launch_on(allocation, stream);
    }

    /// Queues the work only.
    pub(crate) fn launch_on(&self, allocation: &HostAllocation, stream: &MockStream) {
        let work = Work::new().touching(allocation.addr(), allocation.bytes()).endless();
        self.backend.launch(stream, work);
    }

    /// Driver calls of a kind so far.
    pub(crate) fn calls(&self, call: Call) -> u64 {
        self.backend.costs().calls(call)
    }

    /// Bytes pinned.
    pub(crate) fn pinned(&self) -> u64 {
        self.host.stats().allocated_bytes.current as u64
    }

    #[track_caller]
    pub(crate) fn check(&self) {
        if let Err(violation) = self.host.check() {
            panic!("{violation}");
        }
    }

    /// Drops the allocator; nothing may be left.
    #[track_caller]
    pub(crate) fn finish(self) {
        self.check();
        drop(self.host);
        self.backend.assert_clean();
    }
}
