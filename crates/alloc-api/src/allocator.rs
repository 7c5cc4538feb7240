//! The object-safe allocator trait. What not every allocator can do is a trait of its own, reached by
//! a method that returns `None` where it is missing.

use crate::data_ptr::DataPtr;
use crate::device::Device;
use crate::error::AllocatorError;
use crate::stats::AllocatorStats;
use alloc_core::{Addr, StreamId};

/// An allocator of memory on one device. Any thread may call.
///
/// Pointers keep what they need of their allocator alive: it can be replaced in the registry, or
/// dropped, while they live.
pub trait Allocator: Send + Sync {
    /// Where the memory is.
    fn device(&self) -> Device;

    /// Allocates. A request of 0 bytes gets a null pointer that knows its device.
    ///
    /// # Errors
    /// [`AllocatorError::OutOfMemory`], [`AllocatorError::TooLarge`].
    fn allocate(&self, bytes: u64) -> Result<DataPtr, AllocatorError>;

    /// Gives cached memory back to the system.
    ///
    /// # Errors
    /// Any; what could not be given back stays cached.
    fn empty_cache(&self) -> Result<(), AllocatorError>;

    /// Its figures.
    ///
    /// # Errors
    /// If the figures cannot be had.
    fn stats(&self) -> Result<AllocatorStats, AllocatorError>;

    /// The interface by address, where every pointer that [`allocate`](Allocator::allocate) returns is
    /// simple.
    fn raw(&self) -> Option<&dyn RawFree> {
        None
    }

    /// Copies within its memory.
    fn copies(&self) -> Option<&dyn CopyData> {
        None
    }

    /// Use on streams, where memory is for devices.
    fn streams(&self) -> Option<&dyn StreamUse> {
        None
    }
}

/// Freeing by address.
pub trait RawFree {
    /// Frees memory of `allocate_raw`. Null is nothing.
    ///
    /// # Errors
    /// [`AllocatorError::UnknownAddress`].
    fn free_raw(&self, addr: Addr) -> Result<(), AllocatorError>;
}

/// Copies between two allocations of one allocator.
pub trait CopyData {
    /// Copies `bytes` from the address of `from` on to the address of `to`.
    ///
    /// # Errors
    /// [`AllocatorError::ForeignPointer`] unless both are of this allocator;
    /// [`AllocatorError::BadRange`] if either has fewer bytes from its address on.
    fn copy(&self, to: &mut DataPtr, from: &DataPtr, bytes: u64) -> Result<(), AllocatorError>;
}

/// Memory that streams use.
pub trait StreamUse {
    /// Allocates for use on a stream.
    ///
    /// # Errors
    /// As [`Allocator::allocate`]; [`AllocatorError::UnknownStream`].
    fn allocate_on(&self, bytes: u64, stream: StreamId) -> Result<DataPtr, AllocatorError>;

    /// Declares that work of a stream uses the memory: it is not handed out again before that work is
    /// done. `false`, and nothing happens, if the pointer is not of this allocator.
    ///
    /// # Errors
    /// [`AllocatorError::UnknownStream`].
    fn record_use(&self, pointer: &DataPtr, stream: StreamId) -> Result<bool, AllocatorError>;
}

impl dyn Allocator + '_ {
    /// A new allocation with the same bytes, `bytes` of them. What `from` owns is irrelevant; where it
    /// points must be memory of this allocator.
    ///
    /// # Errors
    /// As [`allocate`](Allocator::allocate) and [`copy`](CopyData::copy);
    /// [`AllocatorError::Unsupported`]. Nothing stays allocated then.
    pub fn clone_data(&self, from: &DataPtr, bytes: u64) -> Result<DataPtr, AllocatorError> {
        let copies = self.copies().ok_or(AllocatorError::Unsupported("copy"))?;
        let mut to = self.allocate(bytes)?;
        if bytes > 0 {
            copies.copy(&mut to, from, bytes)?;
        }
        Ok(to)
    }

    /// [`copy`](CopyData::copy), or an error where there is none.
    ///
    /// # Errors
    /// As there; [`AllocatorError::Unsupported`].
    pub fn copy_data(
        &self,
        to: &mut DataPtr,
        from: &DataPtr,
        bytes: u64,
    ) -> Result<(), AllocatorError> {
        match self.copies() {
            Some(_) if bytes == 0 => Ok(()),
            Some(copies) => copies.copy(to, from, bytes),
            None => Err(AllocatorError::Unsupported("copy")),
        }
    }

    /// Allocates for a caller that keeps the address only. 0 bytes get the null address.
    ///
    /// # Errors
    /// As [`allocate`](Allocator::allocate); [`AllocatorError::NotSimple`] if an address cannot stand
    /// for an allocation here. Nothing stays allocated then.
    pub fn allocate_raw(&self, bytes: u64) -> Result<Addr, AllocatorError> {
        if self.raw().is_none() {
            let why = "the allocator has no interface by address".to_owned();
            return Err(AllocatorError::NotSimple { why });
        }
        let pointer = self.allocate(bytes)?;
        pointer
            .into_addr()
            .map_err(|refused| AllocatorError::NotSimple { why: refused.to_string() })
    }

    /// Frees memory of `allocate_raw`. Null is nothing.
    ///
    /// # Errors
    /// [`AllocatorError::UnknownAddress`]; [`AllocatorError::Unsupported`] where there is no interface
    /// by address.
    pub fn free_raw(&self, addr: Addr) -> Result<(), AllocatorError> {
        self.raw().ok_or(AllocatorError::Unsupported("free by address"))?.free_raw(addr)
    }

    /// [`record_use`](StreamUse::record_use); `false` where memory is not for streams.
    ///
    /// # Errors
    /// As there.
    pub fn record_use(&self, pointer: &DataPtr, stream: StreamId) -> Result<bool, AllocatorError> {
        self.streams().map_or(Ok(false), |streams| streams.record_use(pointer, stream))
    }
}
