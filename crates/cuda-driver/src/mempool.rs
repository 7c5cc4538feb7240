//! The driver's own stream-ordered allocator.

use crate::device::Device;
use crate::error::{DriverError, Refused};
use crate::memory::size;
use crate::stream::Stream;
use crate::symbols::call;
use cudarc::driver::sys;
use std::ffi::{c_int, c_void};

/// A pool that memory is allocated from in the order of streams. The default pool of a device lives as
/// long as the device; one that was [created](MemoryPool::create) leaks unless it is
/// [destroyed](MemoryPool::destroy).
#[derive(Debug)]
pub struct MemoryPool {
    device: Device,
    /// The handle as a number: the driver's functions may be called on it from any thread.
    raw: usize,
    is_default: bool,
}

/// A number that a pool knows about itself, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolCounter {
    /// Held of the device now.
    ReservedNow,
    /// The most ever held.
    ReservedPeak,
    /// Handed out now.
    UsedNow,
    /// The most ever handed out.
    UsedPeak,
}

/// A way in which a pool may hand memory to a stream that was freed on another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolReuseRule {
    /// If the stream comes after the free by events.
    FollowEvents,
    /// If the free is done already.
    Opportunistic,
    /// By making the stream wait for the free.
    InternalDependencies,
}

/// `CUmemPoolProps`, whose enums are numbers here.
#[repr(C)]
struct PoolProperties {
    kind: u32,
    handle_types: u32,
    location_kind: u32,
    location_id: c_int,
    windows_only: *mut c_void,
    bytes_max: usize,
    reserved: [u8; 56],
}

const _: () = assert!(size_of::<PoolProperties>() == size_of::<sys::CUmemPoolProps>());

impl PoolReuseRule {
    fn attribute(self) -> sys::CUmemPool_attribute {
        use sys::CUmemPool_attribute_enum::*;
        match self {
            PoolReuseRule::FollowEvents => CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
            PoolReuseRule::Opportunistic => CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
            PoolReuseRule::InternalDependencies => {
                CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
            }
        }
    }
}

const THRESHOLD: sys::CUmemPool_attribute =
    sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;

impl MemoryPool {
    /// The pool that a device has from the start.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` where there are no pools.
    pub fn default_of(device: Device) -> Result<MemoryPool, DriverError> {
        let mut raw: sys::CUmemoryPool = std::ptr::null_mut();
        // SAFETY: the place for the result is valid.
        unsafe { call!(device.driver(), device_get_default_mem_pool(&raw mut raw, device.raw())) }?;
        Ok(MemoryPool { device, raw: raw.expose_provenance(), is_default: true })
    }

    /// A new pool, of at most `bytes_max` bytes if that is not `None`. Drivers before 12.2 know no
    /// bound and refuse one.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` where there are no pools.
    pub fn create(device: Device, bytes_max: Option<u64>) -> Result<MemoryPool, DriverError> {
        let properties = PoolProperties {
            kind: sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED as u32,
            handle_types: 0,
            location_kind: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE as u32,
            location_id: c_int::from(device.ordinal()),
            windows_only: std::ptr::null_mut(),
            bytes_max: bytes_max.map_or(0, size),
            reserved: [0; 56],
        };
        let mut raw: sys::CUmemoryPool = std::ptr::null_mut();
        let described = (&raw const properties).cast();
        // SAFETY: the place for the result is valid; the description has the layout of the header's.
        unsafe { call!(device.driver(), mem_pool_create(&raw mut raw, described)) }?;
        Ok(MemoryPool { device, raw: raw.expose_provenance(), is_default: false })
    }

    /// Ends a pool that was created; a default pool stays. Memory of it stays valid, and the driver
    /// gives the rest back when all of it is freed.
    ///
    /// # Errors
    /// Hands the pool back with the reason.
    pub fn destroy(self) -> Result<(), Refused<MemoryPool>> {
        if self.is_default {
            return Ok(());
        }
        // SAFETY: it was created and not destroyed since; nobody has the handle after this.
        let destroyed = unsafe { call!(self.device.driver(), mem_pool_destroy(self.handle())) };
        destroyed.map_err(|error| Refused { value: self, error })
    }

    fn handle(&self) -> sys::CUmemoryPool {
        std::ptr::with_exposed_provenance_mut(self.raw)
    }

    /// Its device.
    pub fn device(&self) -> Device {
        self.device
    }

    fn set<T: Copy>(
        &self,
        attribute: sys::CUmemPool_attribute,
        value: T,
    ) -> Result<(), DriverError> {
        let mut value = value;
        let place = (&raw mut value).cast();
        let handle = self.handle();
        // SAFETY: callers pass a value of the attribute's type.
        unsafe { call!(self.device.driver(), mem_pool_set_attribute(handle, attribute, place)) }
    }

    fn get<T: Copy + Default>(
        &self,
        attribute: sys::CUmemPool_attribute,
    ) -> Result<T, DriverError> {
        let mut value = T::default();
        let place = (&raw mut value).cast();
        let handle = self.handle();
        // SAFETY: callers ask for the attribute's type.
        unsafe { call!(self.device.driver(), mem_pool_get_attribute(handle, attribute, place)) }?;
        Ok(value)
    }

    /// How much unused memory the pool keeps at a synchronisation; `u64::MAX` for all.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn set_release_threshold(&self, bytes: u64) -> Result<(), DriverError> {
        self.set::<u64>(THRESHOLD, bytes)
    }

    /// What was [set](Self::set_release_threshold).
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn release_threshold(&self) -> Result<u64, DriverError> {
        self.get::<u64>(THRESHOLD)
    }

    /// Allows or forbids a way of reuse.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn set_reuse(&self, rule: PoolReuseRule, allowed: bool) -> Result<(), DriverError> {
        self.set::<c_int>(rule.attribute(), c_int::from(allowed))
    }

    /// Whether a way of reuse is allowed.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn reuse(&self, rule: PoolReuseRule) -> Result<bool, DriverError> {
        Ok(self.get::<c_int>(rule.attribute())? != 0)
    }

    /// One of its counters.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn counter(&self, counter: PoolCounter) -> Result<u64, DriverError> {
        use sys::CUmemPool_attribute_enum::*;
        self.get::<u64>(match counter {
            PoolCounter::ReservedNow => CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
            PoolCounter::ReservedPeak => CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
            PoolCounter::UsedNow => CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
            PoolCounter::UsedPeak => CU_MEMPOOL_ATTR_USED_MEM_HIGH,
        })
    }

    /// Lets both peaks start over from now.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn reset_peaks(&self) -> Result<(), DriverError> {
        use sys::CUmemPool_attribute_enum::*;
        self.set::<u64>(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0)?;
        self.set::<u64>(CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0)
    }

    /// Gives unused memory back to the device until at most `keep` bytes are held.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn trim(&self, keep: u64) -> Result<(), DriverError> {
        // SAFETY: the pool is alive.
        unsafe { call!(self.device.driver(), mem_pool_trim_to(self.handle(), size(keep))) }
    }

    /// Allocates, for work that is queued on `stream` from now on.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn allocate(&self, bytes: u64, stream: &Stream) -> Result<PoolMemory, DriverError> {
        let _current = stream.context().enter()?;
        let mut addr = 0;
        let (place, bytes_asked) = (&raw mut addr, size(bytes));
        // SAFETY: the place for the result is valid; pool and stream are alive.
        unsafe {
            call!(
                self.device.driver(),
                mem_alloc_from_pool_async(place, bytes_asked, self.handle(), stream.handle())
            )
        }?;
        Ok(PoolMemory { addr, bytes })
    }
}

/// Memory of a [`MemoryPool`]. Owned; dropping it without [`free`](PoolMemory::free) leaks, because
/// work may still be using it.
#[derive(Debug)]
#[must_use = "dropping it leaks the memory"]
pub struct PoolMemory {
    addr: u64,
    bytes: u64,
}

impl PoolMemory {
    /// Its first address.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Bytes asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives it back once the work queued on `stream` so far is done. All other work on it must come
    /// before; work that does not is work on memory of somebody else, which the driver cannot notice.
    ///
    /// # Errors
    /// Hands the memory back with the reason.
    pub fn free(self, stream: &Stream) -> Result<(), Refused<PoolMemory>> {
        match self.try_free(stream) {
            Ok(()) => Ok(()),
            Err(error) => Err(Refused { value: self, error }),
        }
    }

    /// The call. On success the value owns nothing any more.
    fn try_free(&self, stream: &Stream) -> Result<(), DriverError> {
        let _current = stream.context().enter()?;
        // SAFETY: the address came from a pool and was not freed since; the stream is alive.
        unsafe { call!(stream.context().driver(), mem_free_async(self.addr, stream.handle())) }
    }
}
