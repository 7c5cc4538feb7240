//! What a stream-ordered allocator needs from a platform.
//!
//! The rules of [`backend`](crate::backend) hold: no method is called with an allocator lock held, any
//! thread may call, and an error means that nothing was done.

use crate::backend::{Backend, Capture, Refused};
use crate::units::{Addr, DeviceId};

/// Backends that can order one stream's work after an event without the host.
pub trait StreamWait: Backend {
    /// What is queued on `stream` from now on runs after `event` (cuStreamWaitEvent), which may be of
    /// another device.
    ///
    /// # Errors
    /// Any; the stream is unchanged.
    fn wait_event(&self, stream: &Self::Stream, event: &Self::Event) -> Result<(), Self::Error>;
}

/// When a pool may hand memory to a stream that was freed on another. On the same stream it always
/// may: the new work comes after the free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolReuse {
    /// If the stream comes after the free by events that the program recorded and waited for.
    pub follow_events: bool,
    /// If the free happens to have been reached.
    pub opportunistic: bool,
    /// If there is no other memory: the driver makes the stream wait for the free.
    pub internal_dependencies: bool,
}

impl PoolReuse {
    /// All three, as the driver starts with.
    pub const ALL: PoolReuse =
        PoolReuse { follow_events: true, opportunistic: true, internal_dependencies: true };
    /// None: across streams, only what the host has seen freed.
    pub const NONE: PoolReuse =
        PoolReuse { follow_events: false, opportunistic: false, internal_dependencies: false };
}

/// What can be set of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolOptions {
    /// See [`PoolReuse`].
    pub reuse: PoolReuse,
    /// Bytes that the pool may keep when the host synchronises; what is unused beyond goes back to the
    /// device then. `u64::MAX` keeps all.
    pub release_threshold: u64,
}

/// What a pool holds, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolUsage {
    /// Held of the device.
    pub reserved: u64,
    /// Most of it since peaks were reset.
    pub reserved_peak: u64,
    /// Handed out.
    pub used: u64,
    /// Most of it since peaks were reset.
    pub used_peak: u64,
}

/// Memory of a pool. Owned; dropping it instead of freeing it leaks.
pub trait OrderedMemory: Send + 'static {
    /// First address.
    fn addr(&self) -> Addr;

    /// Bytes asked for.
    fn bytes(&self) -> u64;
}

/// Backends with pools of their own in which allocations and frees are work of a stream (CUDA's
/// cudaMallocAsync family).
///
/// Neither is called on a stream that takes part in a capture, where memory would become part of the
/// graph.
///
/// Memory may be used by work that comes after its allocation, on its stream or by events, and must
/// not be used by work that is not before its free.
pub trait StreamOrdered: StreamWait + Capture {
    /// Its pools. Owned; a default pool is the device's, and its value only names it.
    type Pool: Send + Sync + 'static;
    /// Memory of them.
    type Ordered: OrderedMemory;

    /// Whether a device has pools. Constant.
    ///
    /// # Errors
    /// If the device does not exist, or cannot be asked.
    fn has_pools(&self, device: DeviceId) -> Result<bool, Self::Error>;

    /// The pool that a device has from the start, which others may use too.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::backend::ErrorKind::Unsupported) where there are no pools.
    fn default_pool(&self, device: DeviceId) -> Result<Self::Pool, Self::Error>;

    /// Makes a pool that never holds more than `bytes_max`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::backend::ErrorKind::Unsupported) where there are none.
    fn create_pool(
        &self,
        device: DeviceId,
        bytes_max: Option<u64>,
    ) -> Result<Self::Pool, Self::Error>;

    /// Ends a pool. What is allocated from it stays valid; its memory goes back to the device when all
    /// of it is freed. For a default pool, does nothing.
    ///
    /// # Errors
    /// Hands the pool back.
    fn destroy_pool(&self, pool: Self::Pool) -> Result<(), Refused<Self::Pool, Self::Error>>;

    /// Allocates `bytes`, not 0, for work that is queued on `stream` from now on.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`](crate::backend::ErrorKind::OutOfMemory) if the pool can hold no more.
    fn allocate_ordered(
        &self,
        pool: &Self::Pool,
        bytes: u64,
        stream: &Self::Stream,
    ) -> Result<Self::Ordered, Self::Error>;

    /// Frees memory once the work queued on `stream` so far is done. Any stream of the device will do,
    /// if all use comes before.
    ///
    /// # Errors
    /// Hands the memory back.
    fn free_ordered(
        &self,
        memory: Self::Ordered,
        stream: &Self::Stream,
    ) -> Result<(), Refused<Self::Ordered, Self::Error>>;

    /// Changes how a pool behaves.
    ///
    /// # Errors
    /// Any; a part may have changed.
    fn set_pool_options(&self, pool: &Self::Pool, options: PoolOptions) -> Result<(), Self::Error>;

    /// How a pool behaves.
    ///
    /// # Errors
    /// Any.
    fn pool_options(&self, pool: &Self::Pool) -> Result<PoolOptions, Self::Error>;

    /// What a pool holds.
    ///
    /// # Errors
    /// Any.
    fn pool_usage(&self, pool: &Self::Pool) -> Result<PoolUsage, Self::Error>;

    /// Lets the peaks of a pool start over from now.
    ///
    /// # Errors
    /// Any.
    fn reset_pool_peaks(&self, pool: &Self::Pool) -> Result<(), Self::Error>;

    /// Gives unused memory back to the device until the pool holds `keep_bytes` at most. Memory whose
    /// free the host has not seen is in use.
    ///
    /// # Errors
    /// Any.
    fn trim_pool(&self, pool: &Self::Pool, keep_bytes: u64) -> Result<(), Self::Error>;
}
