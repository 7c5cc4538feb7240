//! Copies between the host and a device.

use alloc_core::Addr;

/// Which way a copy goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From pinned memory to a device.
    ToDevice,
    /// From a device to pinned memory.
    ToHost,
}

/// A copy to be queued. Only a manager makes one: both ranges lie inside allocations of its own,
/// which it keeps until the copy is done, so a platform may copy without further checks.
#[derive(Debug)]
pub struct CopyJob {
    pub(crate) direction: Direction,
    pub(crate) device: Addr,
    pub(crate) host: Addr,
    pub(crate) bytes: u64,
}

impl CopyJob {
    /// Which way.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// First address on the device.
    pub fn device(&self) -> Addr {
        self.device
    }

    /// First address on the host.
    pub fn host(&self) -> Addr {
        self.host
    }

    /// How many bytes; not 0.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}
