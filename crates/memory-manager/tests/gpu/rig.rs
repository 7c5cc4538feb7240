//! What the tests run on: managers on a driver, and bytes at addresses.

use alloc_core::{Addr, DeviceId};
use alloc_cuda::{CudaBackend, CudaStream};
use cuda_driver::Driver;
use cuda_driver::fake::Session;
use memory_manager::{Cuda, DeviceAllocatorMode, ManagerConfig, MemoryManager, Platform};
use std::sync::mpsc::{Sender, channel};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const FIRST: DeviceId = DeviceId::new(0);

pub(crate) type Manager = MemoryManager<Cuda>;

pub(crate) struct Rig {
    /// `None` once closed.
    backend: Option<CudaBackend>,
    session: Option<Session>,
}

impl Rig {
    pub(crate) fn on_gpu() -> Result<Rig, String> {
        let driver = Driver::load().map_err(|error| error.to_string())?;
        match driver.device_count() {
            Ok(0) => Err("the driver sees none".to_owned()),
            Ok(_) => Ok(Rig::on(driver, None)),
            Err(error) => Err(error.to_string()),
        }
    }

    pub(crate) fn on_imitation() -> Rig {
        let session = Session::new(&[256 << 20, 256 << 20]);
        Rig::on(session.driver(), Some(session))
    }

    fn on(driver: &'static Driver, session: Option<Session>) -> Rig {
        Rig { backend: Some(CudaBackend::with_driver(driver).expect("a backend")), session }
    }

    pub(crate) fn backend(&self) -> &CudaBackend {
        self.backend.as_ref().expect("not closed")
    }

    /// The imitation, to make calls fail.
    pub(crate) fn imitation(&self) -> Option<&Session> {
        self.session.as_ref()
    }

    /// Lets go of the driver; what the imitation has not got back.
    pub(crate) fn close(&mut self) -> usize {
        self.backend = None;
        self.session.as_ref().map_or(0, Session::outstanding)
    }

    pub(crate) fn manager(&self, mode: DeviceAllocatorMode) -> Manager {
        self.manager_with(ManagerConfig { mode, ..ManagerConfig::default() })
    }

    pub(crate) fn manager_with(&self, config: ManagerConfig) -> Manager {
        let cuda = Cuda::on(self.backend().clone(), config.device).expect("a platform");
        MemoryManager::new(cuda, config)
    }
}

pub(crate) fn stream_of(manager: &Manager) -> CudaStream {
    manager.platform().new_stream(manager.device()).expect("a stream")
}

/// The bytes of pinned memory.
///
/// # Safety
/// The memory must be allocated, no copy may be running on it, and no other slice of it be alive.
pub(crate) unsafe fn bytes_at<'a>(addr: Addr, bytes: u64) -> &'a mut [u8] {
    let start = std::ptr::with_exposed_provenance_mut(addr.get() as usize);
    // SAFETY: passed on from the caller.
    unsafe { std::slice::from_raw_parts_mut(start, bytes as usize) }
}

/// Bytes that depend on their place and a seed.
pub(crate) fn fill(bytes: &mut [u8], seed: u8) {
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = pattern(at, seed);
    }
}

pub(crate) fn is_filled(bytes: &[u8], seed: u8) -> bool {
    bytes.iter().enumerate().all(|(at, byte)| *byte == pattern(at, seed))
}

fn pattern(at: usize, seed: u8) -> u8 {
    (at.wrapping_mul(2_654_435_761) >> 13) as u8 ^ seed
}

/// Holds a stream up until it is opened, or dropped.
pub(crate) struct Gate(Option<Sender<()>>);

impl Gate {
    pub(crate) fn close(stream: &CudaStream) -> Gate {
        let (open, wait) = channel::<()>();
        // Ends when the sender is dropped.
        let hold = move || while wait.recv().is_ok() {};
        stream.driver_stream().call_host(hold).expect("queued");
        Gate(Some(open))
    }

    pub(crate) fn open(mut self) {
        self.0 = None;
    }
}
