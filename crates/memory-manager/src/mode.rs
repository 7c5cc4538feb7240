//! Where device memory comes from.

use std::fmt;

/// Where device memory comes from. What a device lacks falls back to the next simpler mode:
/// `CudaAsyncPool` to `AsyncStreamOrdered`, and that to `Caching`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum DeviceAllocatorMode {
    /// The caching allocator of this workspace: best fit in large segments, split and merged.
    #[default]
    Caching,
    /// The driver's stream-ordered allocator on the device's default pool (`cudaMallocAsync`).
    AsyncStreamOrdered,
    /// A stream-ordered pool of the manager's own (`cudaMemPool`), bounded by the size of the device
    /// pool.
    CudaAsyncPool,
}

impl DeviceAllocatorMode {
    /// All modes, the simplest first.
    pub const ALL: [DeviceAllocatorMode; 3] = [
        DeviceAllocatorMode::Caching,
        DeviceAllocatorMode::AsyncStreamOrdered,
        DeviceAllocatorMode::CudaAsyncPool,
    ];

    /// The mode to fall back to; `None` for the one that is always there.
    pub const fn fallback(self) -> Option<DeviceAllocatorMode> {
        match self {
            DeviceAllocatorMode::CudaAsyncPool => Some(DeviceAllocatorMode::AsyncStreamOrdered),
            DeviceAllocatorMode::AsyncStreamOrdered => Some(DeviceAllocatorMode::Caching),
            DeviceAllocatorMode::Caching => None,
        }
    }
}

impl fmt::Display for DeviceAllocatorMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DeviceAllocatorMode::Caching => "caching",
            DeviceAllocatorMode::AsyncStreamOrdered => "stream-ordered on the default pool",
            DeviceAllocatorMode::CudaAsyncPool => "stream-ordered on a private pool",
        })
    }
}

/// What became of a wish for a mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModeReport {
    /// What was asked for.
    pub requested: DeviceAllocatorMode,
    /// What new allocations on the manager's device use.
    pub effective: DeviceAllocatorMode,
    /// Why they differ, if they do.
    pub reason: Option<&'static str>,
}

impl fmt::Display for ModeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason {
            None => write!(f, "device memory is {}", self.effective),
            Some(reason) => write!(
                f,
                "device memory is {}, not {} as asked for: {reason}",
                self.effective, self.requested
            ),
        }
    }
}
