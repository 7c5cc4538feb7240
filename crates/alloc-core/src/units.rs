//! Addresses, ids and exact arithmetic on byte counts.
//!
//! Every size in this crate is a `u64` number of bytes. Addresses are never dereferenced here, so
//! they are integers with a type of their own.

use std::fmt;

/// An address on a device (or on the host, for pinned memory). Never dereferenced by this crate.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Addr(u64);

impl Addr {
    /// The address that stands for "no memory": what a request of 0 bytes gets.
    pub const NULL: Addr = Addr(0);

    /// Wraps a raw address.
    pub const fn new(raw: u64) -> Self {
        Addr(raw)
    }

    /// The raw address.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Whether this is [`Addr::NULL`].
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address `bytes` above this one, or `None` past the end of the address space.
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(raw) => Some(Addr(raw)),
            None => None,
        }
    }

    /// Whether the address is a multiple of `align` bytes (`align` > 0).
    pub const fn is_aligned(self, align: u64) -> bool {
        self.0.is_multiple_of(align)
    }
}

/// `addr + bytes`. Wrapping past the end of the address space is a bug of the caller.
impl std::ops::Add<u64> for Addr {
    type Output = Addr;
    fn add(self, bytes: u64) -> Addr {
        Addr(self.0 + bytes)
    }
}

/// Distance in bytes from `rhs` up to `self`; `rhs` must not be the larger one.
impl std::ops::Sub for Addr {
    type Output = u64;
    fn sub(self, rhs: Addr) -> u64 {
        self.0 - rhs.0
    }
}

impl fmt::Debug for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Index of a device within one backend, counted from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DeviceId(u16);

impl DeviceId {
    /// The device with this index.
    pub const fn new(index: u16) -> Self {
        DeviceId(index)
    }

    /// The index, for tables.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.0)
    }
}

/// Identity of a stream.
///
/// Unique among all streams of all devices of a backend for the life of the process: a backend must
/// never reuse one (drivers reuse raw handles, so a raw handle is no identity). The order of ids is
/// the order in which flushes walk streams.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StreamId(u64);

impl StreamId {
    /// Wraps an id chosen by the backend.
    pub const fn new(raw: u64) -> Self {
        StreamId(raw)
    }

    /// The raw id.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {}", self.0)
    }
}

/// Identity of a pool. [`PoolId::DEFAULT`] is the pool of requests that no scope claims; user pools
/// are `{0, n}`, pools made by a graph capture `{n, 0}` (spec §1.5).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PoolId(pub u64, pub u64);

impl PoolId {
    /// The default pool.
    pub const DEFAULT: PoolId = PoolId(0, 0);
}

/// The next multiple of `align` at or above `bytes`, or `None` if it does not fit in a `u64`.
/// `align` must not be 0.
pub const fn align_up(bytes: u64, align: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(align)
}

/// Formats a byte count the way the field's tools do: `512 bytes`, `2.00 MiB`, `1.50 GiB`.
#[derive(Clone, Copy, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u32); 3] = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
        for (unit, shift) in UNITS {
            if self.0 >= 1 << shift {
                return write!(f, "{:.2} {unit}", self.0 as f64 / (1u64 << shift) as f64);
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_print_like_the_field() {
        assert_eq!(Bytes(512).to_string(), "512 bytes");
        assert_eq!(Bytes(20 << 20).to_string(), "20.00 MiB");
        assert_eq!(Bytes(3 << 29).to_string(), "1.50 GiB");
        assert_eq!(Bytes(1 << 10).to_string(), "1.00 KiB");
    }

    #[test]
    fn align_up_refuses_to_wrap() {
        assert_eq!(align_up(1, 512), Some(512));
        assert_eq!(align_up(512, 512), Some(512));
        assert_eq!(align_up(u64::MAX, 512), None);
    }
}
