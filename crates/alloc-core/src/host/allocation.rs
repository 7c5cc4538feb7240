//! What clients hold: allocations, their contexts, and where memory should be.

use super::backend::NodeId;
use super::block::BlockId;
use super::home::BlockRef;
use crate::units::{Addr, DeviceId};

/// Where memory should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Place {
    /// Wherever: the node of device 0, or node 0.
    #[default]
    Anywhere,
    /// On the NUMA node nearest to this device.
    Device(DeviceId),
    /// On this NUMA node.
    Node(NodeId),
}

/// Pinned memory that the holder owns until it gives it back with
/// [`free`](super::HostAllocator::free). Dropping it instead leaks the memory.
#[must_use = "pinned memory that is not freed is leaked"]
#[derive(Debug)]
pub struct HostAllocation {
    pub(crate) addr: Addr,
    pub(crate) requested: u64,
    pub(crate) bytes: u64,
    pub(crate) context: HostContext,
}

impl HostAllocation {
    /// First address; [`Addr::NULL`] for a request of 0 bytes.
    pub fn addr(&self) -> Addr {
        self.addr
    }

    /// Bytes that were asked for.
    pub fn requested(&self) -> u64 {
        self.requested
    }

    /// Bytes of the block, at least [`requested`](HostAllocation::requested).
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A name for this allocation, for [`record_event`](super::HostAllocator::record_event).
    pub fn context(&self) -> HostContext {
        self.context
    }
}

/// Names one allocation of one allocator. It only serves to look the allocation up: a context whose
/// allocation is gone is recognised as such.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct HostContext {
    /// The allocator.
    pub(crate) owner: u32,
    pub(crate) block: BlockRef,
}

impl HostContext {
    /// The context of an allocation of 0 bytes.
    pub(crate) fn null(owner: u32) -> Self {
        let id = BlockId { index: u32::MAX, generation: 0 };
        HostContext { owner, block: BlockRef { pool: 0, home: 0, id } }
    }
}
