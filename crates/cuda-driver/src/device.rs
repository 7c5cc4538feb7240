//! Devices and what they can do.

use crate::error::DriverError;
use crate::loader::Driver;
use crate::symbols::call;
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int};

/// A property of a device that is a number; a yes or no is 1 or 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attribute {
    /// Number of multiprocessors.
    MultiprocessorCount,
    /// The 9 of compute capability 9.0.
    ComputeCapabilityMajor,
    /// The 0 of compute capability 9.0.
    ComputeCapabilityMinor,
    /// The virtual memory calls work.
    VirtualMemory,
    /// Virtual memory can be exported as a file descriptor.
    PosixFileDescriptor,
    /// Virtual memory can be exported as a fabric handle.
    FabricHandle,
    /// Virtual memory can be made reachable by network cards (GPUDirect RDMA).
    GpuDirectWithVirtualMemory,
    /// `cuMemAllocAsync` works.
    MemoryPools,
    /// Domain of its PCI address.
    PciDomain,
    /// Bus of its PCI address.
    PciBus,
    /// Slot of its PCI address.
    PciDevice,
}

impl Attribute {
    /// The driver's number for it.
    fn number(self) -> sys::CUdevice_attribute {
        use sys::CUdevice_attribute_enum::*;
        match self {
            Attribute::MultiprocessorCount => CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            Attribute::ComputeCapabilityMajor => CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            Attribute::ComputeCapabilityMinor => CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            Attribute::VirtualMemory => CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
            Attribute::PosixFileDescriptor => {
                CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            }
            Attribute::FabricHandle => CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
            Attribute::GpuDirectWithVirtualMemory => {
                CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
            }
            Attribute::MemoryPools => CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
            Attribute::PciDomain => CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
            Attribute::PciBus => CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
            Attribute::PciDevice => CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
        }
    }
}

/// One GPU, by its number in this process.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    driver: &'static Driver,
    ordinal: u16,
    raw: sys::CUdevice,
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.driver, other.driver) && self.ordinal == other.ordinal
    }
}

impl Eq for Device {}

impl Driver {
    /// How many GPUs this process sees.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn device_count(&self) -> Result<u16, DriverError> {
        let mut count = 0;
        // SAFETY: the place for the result is valid.
        unsafe { call!(self, device_get_count(&raw mut count)) }?;
        Ok(u16::try_from(count).unwrap_or(0))
    }

    /// The GPU with this number.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE` if there is none.
    pub fn device(&'static self, ordinal: u16) -> Result<Device, DriverError> {
        let mut raw = 0;
        // SAFETY: the place for the result is valid.
        unsafe { call!(self, device_get(&raw mut raw, c_int::from(ordinal))) }?;
        Ok(Device { driver: self, ordinal, raw })
    }
}

impl Device {
    /// The driver it belongs to.
    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// Its number, counted from 0.
    pub fn ordinal(&self) -> u16 {
        self.ordinal
    }

    /// The driver's handle.
    pub(crate) fn raw(&self) -> sys::CUdevice {
        self.raw
    }

    /// What it is called ("NVIDIA H200").
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn name(&self) -> Result<String, DriverError> {
        const ROOM: usize = 256;
        let mut name = [0u8; ROOM];
        let place = name.as_mut_ptr().cast::<c_char>();
        // SAFETY: the place has room for the stated number of bytes.
        unsafe { call!(self.driver, device_get_name(place, ROOM as c_int, self.raw)) }?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or(c"");
        Ok(name.to_string_lossy().into_owned())
    }

    /// What names it in every process of every machine.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn uuid(&self) -> Result<[u8; 16], DriverError> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the place for the result is valid.
        unsafe { call!(self.driver, device_get_uuid(&raw mut uuid, self.raw)) }?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// All its memory, in bytes.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn total_memory(&self) -> Result<u64, DriverError> {
        let mut bytes = 0;
        // SAFETY: the place for the result is valid.
        unsafe { call!(self.driver, device_total_mem(&raw mut bytes, self.raw)) }?;
        Ok(bytes as u64)
    }

    /// One property.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn attribute(&self, attribute: Attribute) -> Result<i32, DriverError> {
        let mut value = 0;
        let number = attribute.number();
        // SAFETY: the place for the result is valid.
        unsafe { call!(self.driver, device_get_attribute(&raw mut value, number, self.raw)) }?;
        Ok(value)
    }

    /// Whether a yes-or-no property holds.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn supports(&self, attribute: Attribute) -> Result<bool, DriverError> {
        Ok(self.attribute(attribute)? != 0)
    }

    /// Whether its kernels may be given access to `peer`'s memory. A device is not its own peer.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn can_access_peer(&self, peer: &Device) -> Result<bool, DriverError> {
        let mut answer = 0;
        // SAFETY: the place for the result is valid.
        unsafe { call!(self.driver, device_can_access_peer(&raw mut answer, self.raw, peer.raw)) }?;
        Ok(answer != 0)
    }
}
