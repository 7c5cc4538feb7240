//! Virtual memory: address space and physical memory apart.

use crate::context::Context;
use crate::device::Device;
use crate::error::{DriverError, Refused, code};
use crate::memory::size;
use crate::symbols::call;
use cudarc::driver::sys;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// What physical memory must be capable of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PhysicalKind {
    /// Can be exported as a file descriptor.
    pub exportable: bool,
    /// Can be exported as a fabric handle, which processes of other machines can import too.
    pub fabric: bool,
    /// Can be reached by network cards (GPUDirect RDMA).
    pub gpu_direct: bool,
}

/// `CUmemLocation` of CUDA 12; newer headers put a union in the place of `id`, of the same layout.
#[repr(C)]
struct Location {
    kind: u32,
    id: c_int,
}

/// `CUmemAllocationProp`, whose enums are numbers here.
#[repr(C)]
struct AllocationProperties {
    kind: u32,
    handle_types: u32,
    location: Location,
    windows_only: *mut c_void,
    compression: u8,
    gpu_direct: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct AccessDescription {
    location: Location,
    flags: u32,
}

const _: () = {
    assert!(size_of::<Location>() == size_of::<sys::CUmemLocation>());
    assert!(size_of::<AllocationProperties>() == size_of::<sys::CUmemAllocationProp>());
    assert!(size_of::<AccessDescription>() == size_of::<sys::CUmemAccessDesc>());
};

/// Exported and imported as a file descriptor.
const POSIX_FD: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Exported and imported as 64 bytes.
const FABRIC: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;

impl Location {
    fn of(device: Device) -> Self {
        let kind = sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE as u32;
        Location { kind, id: c_int::from(device.ordinal()) }
    }
}

impl AllocationProperties {
    fn of(device: Device, kind: PhysicalKind) -> Self {
        AllocationProperties {
            kind: sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED as u32,
            handle_types: if kind.exportable { POSIX_FD.0 } else { 0 }
                | if kind.fabric { FABRIC.0 } else { 0 },
            location: Location::of(device),
            windows_only: std::ptr::null_mut(),
            compression: 0,
            gpu_direct: u8::from(kind.gpu_direct),
            usage: 0,
            reserved: [0; 4],
        }
    }

    /// As the driver's functions take it.
    fn as_raw(&self) -> *const sys::CUmemAllocationProp {
        std::ptr::from_ref(self).cast()
    }
}

impl Context {
    /// What sizes and addresses of physical memory on this device must be multiples of, in bytes.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` where virtual memory is not.
    pub fn granularity(&self, kind: PhysicalKind) -> Result<u64, DriverError> {
        let _current = self.enter()?;
        let properties = AllocationProperties::of(self.device(), kind);
        let minimum = sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut bytes = 0;
        // SAFETY: both places are valid.
        unsafe {
            call!(
                self.driver(),
                mem_get_allocation_granularity(&raw mut bytes, properties.as_raw(), minimum)
            )
        }?;
        Ok(bytes as u64)
    }
}

/// A reserved range of addresses. Owned; dropping it without [`free`](Self::free) leaks, because
/// memory may be mapped in it.
#[derive(Debug)]
#[must_use = "dropping it leaks the addresses"]
pub struct AddressRange {
    context: Arc<Context>,
    base: u64,
    bytes: u64,
}

impl AddressRange {
    /// Reserves `bytes` of addresses from a multiple of `align` (a power of two) on.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY` if no such range is free.
    pub fn reserve(
        context: &Arc<Context>,
        bytes: u64,
        align: u64,
    ) -> Result<AddressRange, DriverError> {
        let _current = context.enter()?;
        let mut base = 0;
        // SAFETY: the place for the result is valid; no wish for an address, flags must be 0.
        unsafe {
            call!(
                context.driver(),
                mem_address_reserve(&raw mut base, size(bytes), size(align), 0, 0)
            )
        }?;
        Ok(AddressRange { context: context.clone(), base, bytes })
    }

    /// Its first address.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives the addresses back. Nothing may be mapped in them.
    ///
    /// # Errors
    /// Hands the range back with the reason.
    pub fn free(self) -> Result<(), Refused<AddressRange>> {
        match self.try_free() {
            Ok(()) => Ok(()),
            Err(error) => Err(Refused { value: self, error }),
        }
    }

    /// The call. On success the value owns nothing any more.
    fn try_free(&self) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        let (base, bytes) = (self.base, size(self.bytes));
        // SAFETY: exactly what cuMemAddressReserve returned, not freed since.
        unsafe { call!(self.context.driver(), mem_address_free(base, bytes)) }
    }

    /// Maps all of `memory` from `at` on. Not accessible until [`set_access`](Self::set_access).
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if that is not in the range, not aligned, or mapped already.
    pub fn map(&self, at: u64, memory: &PhysicalMemory) -> Result<(), DriverError> {
        self.check("cuMemMap", at, memory.bytes)?;
        let _current = self.context.enter()?;
        let bytes = size(memory.bytes);
        // SAFETY: the addresses are ours and the memory is alive; offset and flags must be 0.
        unsafe { call!(self.context.driver(), mem_map(at, bytes, 0, memory.handle, 0)) }
    }

    /// Lets kernels of `device` read and write `bytes` of mapped memory from `at` on, which may be
    /// of several mappings.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if not all of it is mapped and in the range.
    pub fn set_access(&self, at: u64, bytes: u64, device: Device) -> Result<(), DriverError> {
        let flags = sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        self.protect(at, bytes, device, flags)
    }

    fn protect(
        &self,
        at: u64,
        bytes: u64,
        device: Device,
        flags: sys::CUmemAccess_flags_enum,
    ) -> Result<(), DriverError> {
        self.check("cuMemSetAccess", at, bytes)?;
        let _current = self.context.enter()?;
        let description = AccessDescription { location: Location::of(device), flags: flags as u32 };
        let place = std::ptr::from_ref(&description).cast();
        // SAFETY: the addresses are ours; one description is passed, as counted.
        unsafe { call!(self.context.driver(), mem_set_access(at, size(bytes), place, 1)) }
    }

    /// Takes the access of [`set_access`](Self::set_access) away again.
    ///
    /// # Errors
    /// As there.
    pub fn revoke_access(&self, at: u64, bytes: u64, device: Device) -> Result<(), DriverError> {
        self.protect(at, bytes, device, sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_NONE)
    }

    /// Unmaps what is mapped in `bytes` from `at` on: whole mappings only. Waits for nothing, so no
    /// work may still use them.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if that is not in the range or splits a mapping.
    pub fn unmap(&self, at: u64, bytes: u64) -> Result<(), DriverError> {
        self.check("cuMemUnmap", at, bytes)?;
        let _current = self.context.enter()?;
        // SAFETY: the addresses are ours.
        unsafe { call!(self.context.driver(), mem_unmap(at, size(bytes))) }
    }

    /// Refuses addresses outside the range, which might be somebody else's.
    fn check(&self, call: &'static str, at: u64, bytes: u64) -> Result<(), DriverError> {
        let end = at.checked_add(bytes);
        let inside = at >= self.base && end.is_some_and(|end| end - self.base <= self.bytes);
        if inside { Ok(()) } else { Err(DriverError::new(call, code::INVALID_VALUE)) }
    }
}

/// Physical memory of a device, mapped in whole only. Owned; dropping it without
/// [`release`](Self::release) leaks.
#[derive(Debug)]
#[must_use = "dropping it leaks the memory"]
pub struct PhysicalMemory {
    context: Arc<Context>,
    handle: sys::CUmemGenericAllocationHandle,
    bytes: u64,
}

impl PhysicalMemory {
    /// Creates `bytes`, a multiple of the granularity.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn create(
        context: &Arc<Context>,
        bytes: u64,
        kind: PhysicalKind,
    ) -> Result<PhysicalMemory, DriverError> {
        let _current = context.enter()?;
        let properties = AllocationProperties::of(context.device(), kind);
        let mut handle = 0;
        // SAFETY: both places are valid; flags must be 0.
        unsafe {
            call!(
                context.driver(),
                mem_create(&raw mut handle, size(bytes), properties.as_raw(), 0)
            )
        }?;
        Ok(PhysicalMemory { context: context.clone(), handle, bytes })
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where it is.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Gives it back. Where it is still mapped it lives on until unmapped.
    ///
    /// # Errors
    /// Hands the memory back with the reason.
    pub fn release(self) -> Result<(), Refused<PhysicalMemory>> {
        match self.try_release() {
            Ok(()) => Ok(()),
            Err(error) => Err(Refused { value: self, error }),
        }
    }

    /// The call. On success the value owns nothing any more.
    fn try_release(&self) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        // SAFETY: the handle is ours and was not released since.
        unsafe { call!(self.context.driver(), mem_release(self.handle)) }
    }

    /// A file descriptor that another process, once it has been passed one, can import.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the memory was not created [exportable](PhysicalKind).
    pub fn export(&self) -> Result<OwnedFd, DriverError> {
        let _current = self.context.enter()?;
        let mut descriptor: RawFd = -1;
        let place = (&raw mut descriptor).cast::<c_void>();
        // SAFETY: the place has the type that this kind of handle is returned as.
        unsafe { call!(self.context.driver(), mem_export(place, self.handle, POSIX_FD, 0)) }?;
        // SAFETY: the driver opened the descriptor for us; nobody else closes it.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// 64 bytes that another process, on this machine or on one connected to it, can import.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the memory was not created for this ([`PhysicalKind::fabric`]).
    pub fn export_fabric(&self) -> Result<[u8; 64], DriverError> {
        let _current = self.context.enter()?;
        let mut handle = [0u8; 64];
        let place = (&raw mut handle).cast::<c_void>();
        // SAFETY: the place has the size of this kind of handle.
        unsafe { call!(self.context.driver(), mem_export(place, self.handle, FABRIC, 0)) }?;
        Ok(handle)
    }

    /// Physical memory of another process, from what [`export_fabric`](Self::export_fabric) gave
    /// there. `bytes` must be the size it was created with.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if that means no memory; `CUDA_ERROR_NOT_PERMITTED` where such
    /// handles may not be used.
    pub fn import_fabric(
        context: &Arc<Context>,
        mut fabric: [u8; 64],
        bytes: u64,
    ) -> Result<PhysicalMemory, DriverError> {
        let _current = context.enter()?;
        let mut handle = 0;
        let value = (&raw mut fabric).cast::<c_void>();
        // SAFETY: the place for the result is valid; the value is such a handle.
        unsafe { call!(context.driver(), mem_import(&raw mut handle, value, FABRIC)) }?;
        Ok(PhysicalMemory { context: context.clone(), handle, bytes })
    }

    /// Physical memory of another process, from a descriptor it exported. `bytes` must be the size
    /// it was created with.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the descriptor is not such memory.
    pub fn import(
        context: &Arc<Context>,
        descriptor: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<PhysicalMemory, DriverError> {
        let _current = context.enter()?;
        let mut handle = 0;
        // The driver takes the number itself in the place of a pointer.
        let number = usize::try_from(descriptor.as_raw_fd()).unwrap_or(usize::MAX);
        let value = std::ptr::without_provenance_mut::<c_void>(number);
        // SAFETY: the place for the result is valid; the descriptor is open.
        unsafe { call!(context.driver(), mem_import(&raw mut handle, value, POSIX_FD)) }?;
        Ok(PhysicalMemory { context: context.clone(), handle, bytes })
    }
}
