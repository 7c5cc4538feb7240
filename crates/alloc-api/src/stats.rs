//! Figures that every allocator has.

/// A number of bytes now, and the most it has been.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Level {
    /// Now.
    pub current: u64,
    /// The most since the allocator was made, or since peaks were reset.
    pub peak: u64,
}

/// What an allocator has handed out and holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AllocatorStats {
    /// Bytes that callers hold.
    pub allocated: Level,
    /// Bytes held from the system or the driver, cached ones included.
    pub reserved: Level,
}
