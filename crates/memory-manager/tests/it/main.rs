//! The manager on the simulated device, under its judge.

#![cfg(test)]

mod copies;
mod errors;
mod modes;
mod pools;
mod registered;
mod seed;
mod shutdown;
mod threads;

use alloc_api::DeviceType;
use alloc_core::backend::Stream;
use alloc_core::host::{HostAllocator, HostConfig};
use alloc_core::{Addr, CachingAllocator, Config, DeviceId};
use memory_manager::{
    CopyJob, DeviceAllocatorMode, HostMemory, ManagerConfig, ManagerError, MemoryManager, Platform,
};
use mock_backend::{MockBackend, MockStream, Work};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const FIRST: DeviceId = DeviceId::new(0);

/// The simulated machine as a platform.
#[derive(Clone)]
pub(crate) struct Machine {
    pub(crate) gpu: MockBackend,
    /// Whether copies fail.
    pub(crate) copies_fail: Arc<AtomicBool>,
}

impl Platform for Machine {
    type Backend = MockBackend;
    const KIND: DeviceType = DeviceType::Cuda;

    fn backend(&self) -> &MockBackend {
        &self.gpu
    }

    fn caching(&self, config: Config) -> Result<CachingAllocator<MockBackend>, ManagerError> {
        let made = CachingAllocator::with_virtual_memory(self.gpu.clone(), config);
        made.map_err(|error| ManagerError::Other(Box::new(error)))
    }

    fn pinned(&self, config: HostConfig) -> Result<Box<dyn HostMemory<MockStream>>, ManagerError> {
        match HostAllocator::new(self.gpu.clone(), config) {
            Ok(host) => Ok(Box::new(host)),
            Err(error) => Err(ManagerError::Other(Box::new(error))),
        }
    }

    fn default_stream(&self, device: DeviceId) -> Result<MockStream, ManagerError> {
        Ok(self.gpu.default_stream(device))
    }

    fn new_stream(&self, device: DeviceId) -> Result<MockStream, ManagerError> {
        Ok(self.gpu.stream(device))
    }

    fn queue_copy(&self, job: &CopyJob, stream: &MockStream) -> Result<(), ManagerError> {
        if self.copies_fail.load(Ordering::Relaxed) {
            return Err(ManagerError::Other("the copy fails".into()));
        }
        let work =
            Work::new().touching(job.device(), job.bytes()).touching(job.host(), job.bytes());
        self.gpu.launch(stream, work);
        Ok(())
    }

    fn synchronise(&self, stream: &MockStream) -> Result<(), ManagerError> {
        self.gpu.sync_stream(stream);
        Ok(())
    }
}

/// A manager, and the judge told of what it hands out.
pub(crate) struct Rig {
    pub(crate) gpu: MockBackend,
    pub(crate) machine: Machine,
    pub(crate) manager: MemoryManager<Machine>,
}

pub(crate) fn rig(mode: DeviceAllocatorMode) -> Rig {
    let gpu = MockBackend::builder().device(64 * MIB).device(64 * MIB).log(100_000).build();
    rig_on(gpu, ManagerConfig { mode, ..ManagerConfig::default() })
}

pub(crate) fn rig_on(gpu: MockBackend, config: ManagerConfig) -> Rig {
    let machine = Machine { gpu: gpu.clone(), copies_fail: Arc::default() };
    let manager = MemoryManager::new(machine.clone(), config);
    Rig { gpu, machine, manager }
}

impl Rig {
    pub(crate) fn pinned(&self, bytes: u64) -> Addr {
        let addr = self.manager.allocate_pinned(bytes).unwrap();
        self.gpu.judge().allocated_on_host(addr, bytes);
        addr
    }

    pub(crate) fn free_pinned(&self, addr: Addr) {
        self.gpu.judge().freed(addr);
        self.manager.free_pinned(addr).unwrap();
    }

    /// Memory of the default stream.
    pub(crate) fn device(&self, bytes: u64) -> Addr {
        let addr = self.manager.allocate_device(bytes).unwrap();
        self.gpu.judge().allocated(addr, bytes, &self.gpu.default_stream(FIRST));
        addr
    }

    pub(crate) fn device_on(&self, bytes: u64, stream: &MockStream) -> Addr {
        let addr = self.manager.allocate_device_on(bytes, stream).unwrap();
        self.gpu.judge().allocated(addr, bytes, stream);
        addr
    }

    pub(crate) fn free_device(&self, addr: Addr) {
        self.gpu.judge().freed(addr);
        self.manager.free_device(addr).unwrap();
    }

    pub(crate) fn stream(&self) -> MockStream {
        self.gpu.stream(FIRST)
    }

    #[track_caller]
    pub(crate) fn expect_no_violations(&self) {
        assert_eq!(self.gpu.violations(), []);
    }

    /// Ends the manager, which must leave nothing behind.
    #[track_caller]
    pub(crate) fn finish(self) {
        let report = self.manager.shutdown();
        assert!(report.outstanding.is_empty(), "{report:?}");
        assert!(report.failure.is_none(), "{report:?}");
        self.gpu.sync();
        self.gpu.assert_clean();
        assert_eq!(self.gpu.pinned(alloc_core::host::NodeId::new(0)), 0);
    }
}

pub(crate) fn work_on(gpu: &MockBackend, stream: &MockStream, addr: Addr, bytes: u64) {
    gpu.launch(stream, Work::new().touching(addr, bytes).endless());
}

pub(crate) fn device_of(stream: &MockStream) -> DeviceId {
    stream.device()
}
