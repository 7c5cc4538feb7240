//! Data pointers at the C interface: an address, and a context with a function that releases it.
//!
//! The only place where a deleter is a C function. What comes from C becomes a [`DataPtr`] whose
//! context calls that function, once; what goes to C carries a Rust pointer as its context.

use super::{Failure, functions, guarded, handle, is_place, mm_manager, mm_status, put};
use alloc_api::{DataPtr, Device, DeviceType};
use alloc_core::{Addr, DeviceId};
use std::ffi::{c_int, c_void};

/// `mm_data_ptr`.
#[repr(C)]
#[derive(Debug)]
pub struct mm_data_ptr {
    /// What the user works with. Need not be what is owned.
    pub data: *mut c_void,
    /// What is owned; null if nothing is.
    pub context: *mut c_void,
    /// Releases the context; null if nothing is to be done.
    pub deleter: Option<unsafe extern "C" fn(*mut c_void)>,
    /// 0 for the host, 1 for CUDA.
    pub device_type: c_int,
    /// Which device.
    pub device_index: c_int,
}

/// A context from C, released by a function of C.
struct Foreign {
    context: *mut c_void,
    deleter: unsafe extern "C" fn(*mut c_void),
}

// SAFETY: whoever made the pointer has promised that it may be released on any thread, which is all
// that is done with it.
unsafe impl Send for Foreign {}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: the deleter belongs to this context, which is released here only.
        unsafe { (self.deleter)(self.context) }
    }
}

impl mm_data_ptr {
    /// Takes over what a C program owns. A null context is borrowed, a null deleter releases nothing.
    ///
    /// # Safety
    /// The deleter may be called with the context, once, on any thread, and nobody else may do so.
    pub unsafe fn into_data_ptr(self) -> DataPtr {
        let index = DeviceId::new(u16::try_from(self.device_index).unwrap_or(0));
        let device = match self.device_type {
            0 => Device::CPU,
            _ => Device::new(DeviceType::Cuda, index),
        };
        let data = Addr::new(self.data.expose_provenance() as u64);
        match self.deleter {
            Some(deleter) if !self.context.is_null() => {
                DataPtr::owned(data, Foreign { context: self.context, deleter }, device)
            }
            _ => DataPtr::borrowed(data, device),
        }
    }

    /// Hands a pointer of Rust to a C program, which must call the deleter with the context once.
    pub fn from_data_ptr(pointer: DataPtr) -> Self {
        let Device { kind, index } = pointer.device();
        let data = std::ptr::with_exposed_provenance_mut(pointer.get().get() as usize);
        let is_owner = pointer.is_owner();
        let context =
            if is_owner { Box::into_raw(Box::new(pointer)) } else { std::ptr::null_mut() };
        mm_data_ptr {
            data,
            context: context.cast(),
            deleter: is_owner.then_some(release as unsafe extern "C" fn(*mut c_void)),
            device_type: c_int::from(kind != DeviceType::Cpu),
            device_index: index.index() as c_int,
        }
    }
}

/// The deleter of pointers of Rust.
unsafe extern "C" fn release(context: *mut c_void) {
    // SAFETY: the context is the box that `from_data_ptr` made, given up by its owner.
    let pointer = unsafe { Box::from_raw(context.cast::<DataPtr>()) };
    // A panic must not reach C; it has been printed.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(pointer)));
}

functions! {
    /// `mm_device_data`.
    fn mm_device_data(bytes: u64, stream: *mut c_void, out: *mut mm_data_ptr) |known| {
        is_place(out)?;
        // SAFETY: passed on from the caller.
        let stream = unsafe { known.stream(stream) }?;
        let pointer = known.manager.device_buffer(bytes, &stream)?.into_data_ptr();
        // SAFETY: passed on from the caller.
        unsafe { put(out, mm_data_ptr::from_data_ptr(pointer)) }
    }

    /// `mm_pinned_data`.
    fn mm_pinned_data(bytes: u64, out: *mut mm_data_ptr) |known| {
        is_place(out)?;
        let pointer = known.manager.pinned_buffer(bytes)?.into_data_ptr();
        // SAFETY: passed on from the caller.
        unsafe { put(out, mm_data_ptr::from_data_ptr(pointer)) }
    }
}

/// `mm_data_release`.
///
/// # Safety
/// `pointer` must be null, or a pointer whose context was not released yet, from here or from
/// elsewhere.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mm_data_release(pointer: *mut mm_data_ptr) -> mm_status {
    guarded(|| {
        // SAFETY: passed on from the caller.
        let Some(pointer) = (unsafe { pointer.as_mut() }) else {
            return Err(Failure::Argument("the pointer is null"));
        };
        let taken = mm_data_ptr {
            data: std::mem::replace(&mut pointer.data, std::ptr::null_mut()),
            context: std::mem::replace(&mut pointer.context, std::ptr::null_mut()),
            deleter: pointer.deleter.take(),
            device_type: pointer.device_type,
            device_index: pointer.device_index,
        };
        // SAFETY: passed on from the caller; the context was taken out above.
        drop(unsafe { taken.into_data_ptr() });
        Ok(())
    })
}
