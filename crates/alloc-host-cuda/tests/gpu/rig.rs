//! What the tests run on: a driver, and gates that hold streams up.

use alloc_core::DeviceId;
use alloc_core::host::HostConfig;
use alloc_host_cuda::{HostStream, PinOptions, PinnedAllocator, PinnedBuffer, Streams};
use cuda_driver::fake::Session;
use cuda_driver::{DeviceMemory, Driver};
use std::sync::mpsc::{Sender, channel};

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;
pub(crate) const FIRST: DeviceId = DeviceId::new(0);

pub(crate) struct Rig {
    driver: &'static Driver,
    session: Option<Session>,
}

impl Rig {
    pub(crate) fn on_gpu() -> Result<Rig, String> {
        let driver = Driver::load().map_err(|error| error.to_string())?;
        match driver.device_count() {
            Ok(0) => Err("the driver sees none".to_owned()),
            Ok(_) => Ok(Rig { driver, session: None }),
            Err(error) => Err(error.to_string()),
        }
    }

    pub(crate) fn on_imitation() -> Rig {
        let session = Session::new(&[256 << 20, 256 << 20]);
        Rig { driver: session.driver(), session: Some(session) }
    }

    /// The imitation, to make calls fail.
    pub(crate) fn imitation(&self) -> Option<&Session> {
        self.session.as_ref()
    }

    pub(crate) fn device_count(&self) -> u16 {
        self.driver.device_count().expect("asked before")
    }

    pub(crate) fn allocator(&self, config: HostConfig) -> PinnedAllocator {
        self.allocator_with(config, PinOptions::default())
    }

    pub(crate) fn allocator_with(
        &self,
        config: HostConfig,
        options: PinOptions,
    ) -> PinnedAllocator {
        self.allocator_for(&[FIRST], config, options)
    }

    pub(crate) fn allocator_for(
        &self,
        devices: &[DeviceId],
        config: HostConfig,
        options: PinOptions,
    ) -> PinnedAllocator {
        PinnedAllocator::with_driver(self.driver, devices, config, options).expect("an allocator")
    }
}

/// Every policy with every way of pinning.
pub(crate) fn configs() -> Vec<HostConfig> {
    let mut configs = Vec::new();
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        for register in [false, true] {
            configs.push(HostConfig { register, register_threads: 4, ..config.clone() });
        }
    }
    configs
}

pub(crate) fn stream_of(pinned: &PinnedAllocator) -> HostStream {
    pinned.streams().create(FIRST).expect("a stream")
}

pub(crate) fn device_memory(stream: &HostStream, bytes: usize) -> DeviceMemory {
    DeviceMemory::allocate(stream.driver_stream().context(), bytes as u64).expect("device memory")
}

pub(crate) fn buffer(pinned: &PinnedAllocator, bytes: usize) -> PinnedBuffer<Streams> {
    pinned.buffer(bytes).expect("pinned memory")
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
    pub(crate) fn close(stream: &HostStream) -> Gate {
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
