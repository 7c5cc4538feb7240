//! The C functions of `include/memory_manager.h`, which says what they do.
//!
//! None of them lets a Rust panic out. Addresses go in and come out as numbers: nothing here follows a
//! pointer of the caller but the places for results and the strings that it is given.

mod data;
mod streams;

pub use data::*;
pub use streams::*;

use crate::config::ManagerConfig;
use crate::cuda::Cuda;
use crate::error::ManagerError;
use crate::manager::MemoryManager;
use crate::mode::DeviceAllocatorMode;
use alloc_core::{Addr, DeviceId};
use alloc_cuda::CudaStream;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// `mm_status`.
#[expect(non_camel_case_types, reason = "the name in C")]
pub type mm_status = c_int;

const OK: mm_status = 0;
const INVALID_ARGUMENT: mm_status = 11;
const BUG: mm_status = 13;

/// What a call says that failed.
pub(crate) enum Failure {
    Manager(ManagerError),
    Argument(&'static str),
}

impl From<ManagerError> for Failure {
    fn from(error: ManagerError) -> Self {
        Failure::Manager(error)
    }
}

impl Failure {
    fn status(&self) -> mm_status {
        match self {
            Failure::Argument(_) => INVALID_ARGUMENT,
            Failure::Manager(error) => match error {
                ManagerError::OutOfMemory { .. } => 1,
                ManagerError::ZeroSize(_) => 2,
                ManagerError::TooLarge { .. } => 3,
                ManagerError::UnknownAddress { .. } => 4,
                ManagerError::WrongStream { .. } => 5,
                ManagerError::OutOfRange { .. } => 6,
                ManagerError::PoolInUse(_) => 7,
                ManagerError::ShutDown => 8,
                ManagerError::Unsupported(_) => 9,
                ManagerError::DeviceLost(_) => 10,
                ManagerError::Other(_) => 12,
                ManagerError::Capturing(_) => 14,
            },
        }
    }

    fn text(&self) -> String {
        match self {
            Failure::Manager(error) => error.to_string(),
            Failure::Argument(why) => (*why).to_owned(),
        }
    }
}

thread_local! {
    /// Why the last failed call on this thread failed.
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Runs a call; its status, with the text of a failure kept.
pub(crate) fn guarded(call: impl FnOnce() -> Result<(), Failure>) -> mm_status {
    let (status, text) = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => return OK,
        Ok(Err(failure)) => (failure.status(), failure.text()),
        Err(_) => (BUG, "a bug of the memory manager (it panicked; see above)".to_owned()),
    };
    LAST_ERROR.set(CString::new(text.replace('\0', " ")).unwrap_or_default());
    status
}

/// `mm_manager`.
#[expect(non_camel_case_types, reason = "the name in C")]
#[derive(Debug)]
pub struct mm_manager {
    pub(crate) manager: MemoryManager<Cuda>,
    /// Streams made by `mm_stream_create`, by their handles.
    pub(crate) streams: Mutex<HashMap<usize, CudaStream>>,
    is_instance: bool,
}

impl mm_manager {
    pub(crate) fn new(manager: MemoryManager<Cuda>, is_instance: bool) -> Self {
        mm_manager { manager, streams: Mutex::default(), is_instance }
    }
}

/// The manager behind a handle.
///
/// # Safety
/// `manager` must be null, or come from `mm_instance` or a `mm_create` function and not have been
/// destroyed.
pub(crate) unsafe fn handle<'a>(manager: *const mm_manager) -> Result<&'a mm_manager, Failure> {
    // SAFETY: passed on from the caller.
    unsafe { manager.as_ref() }.ok_or(Failure::Argument("the manager is null"))
}

/// Writes a result.
///
/// # Safety
/// `out` must be null or a place for the result.
pub(crate) unsafe fn put<T>(out: *mut T, value: T) -> Result<(), Failure> {
    if out.is_null() {
        return Err(Failure::Argument("the place for the result is null"));
    }
    // SAFETY: passed on from the caller; not null.
    unsafe { out.write(value) };
    Ok(())
}

/// Checks the place for a result before anything is done.
pub(crate) fn is_place<T>(out: *mut T) -> Result<(), Failure> {
    match out.is_null() {
        false => Ok(()),
        true => Err(Failure::Argument("the place for the result is null")),
    }
}

fn pointer(addr: Addr) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(addr.get() as usize)
}

fn addr(pointer: *const c_void) -> Addr {
    Addr::new(pointer.addr() as u64)
}

/// Defines the functions. In each, `manager` names the handle's value; the code runs guarded.
macro_rules! functions {
    ($($(#[$about:meta])* fn $name:ident($($arg:ident: $type:ty),*) |$handle:ident| $body:block)*) => {
        $(
            $(#[$about])*
            ///
            /// # Safety
            /// `manager` must be one that is not destroyed, or null; streams must be alive; places for
            /// results must be valid, or null.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(manager: *const mm_manager, $($arg: $type),*) -> mm_status {
                guarded(|| {
                    // SAFETY: passed on from the caller.
                    let $handle = unsafe { handle(manager) }?;
                    $body
                })
            }
        )*
    };
}
pub(crate) use functions;

/// `mm_instance`.
///
/// # Safety
/// `out` must be null or a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mm_instance(out: *mut *const mm_manager) -> mm_status {
    use std::sync::OnceLock;
    static INSTANCE: OnceLock<mm_manager> = OnceLock::new();
    guarded(|| {
        let manager = MemoryManager::instance()?;
        let instance = INSTANCE.get_or_init(|| mm_manager::new(manager.clone(), true));
        // SAFETY: passed on from the caller.
        unsafe { put(out, std::ptr::from_ref(instance)) }
    })
}

/// `mm_create`.
///
/// # Safety
/// `out` must be null or a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mm_create(device: u16, out: *mut *const mm_manager) -> mm_status {
    guarded(|| {
        is_place(out)?;
        let device = DeviceId::new(device);
        let config = ManagerConfig { device, ..ManagerConfig::default() };
        let manager = MemoryManager::new(Cuda::new(device)?, config);
        let made = Box::into_raw(Box::new(mm_manager::new(manager, false)));
        // SAFETY: passed on from the caller.
        unsafe { put(out, made.cast_const()) }
    })
}

/// `mm_create_on_imitation`.
///
/// # Safety
/// `out` must be null or a place for the result.
#[cfg(feature = "fake")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mm_create_on_imitation(
    device_bytes: u64,
    pools: c_int,
    out: *mut *const mm_manager,
) -> mm_status {
    guarded(|| {
        is_place(out)?;
        let session = cuda_driver::fake::Session::new(&[device_bytes]);
        if pools == 0 {
            session.remove_memory_pools();
        }
        let backend = alloc_cuda::CudaBackend::with_driver(session.driver());
        // The imitation is this process's from now on.
        std::mem::forget(session);
        let backend = backend.map_err(ManagerError::from_backend)?;
        let config = ManagerConfig::default();
        let manager = MemoryManager::new(Cuda::on(backend, config.device)?, config);
        let made = Box::into_raw(Box::new(mm_manager::new(manager, false)));
        // SAFETY: passed on from the caller.
        unsafe { put(out, made.cast_const()) }
    })
}

/// `mm_destroy`.
///
/// # Safety
/// `manager` must be one that is not destroyed, or null, and no call on it may be running.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mm_destroy(manager: *const mm_manager) -> mm_status {
    guarded(|| {
        // SAFETY: passed on from the caller.
        let Some(known) = (unsafe { manager.as_ref() }) else { return Ok(()) };
        if known.is_instance {
            return Err(Failure::Argument("the instance of the process is not destroyed"));
        }
        // SAFETY: it came from `Box::into_raw`, and the caller gives it up.
        drop(unsafe { Box::from_raw(manager.cast_mut()) });
        Ok(())
    })
}

/// `mm_last_error`.
#[unsafe(no_mangle)]
pub extern "C" fn mm_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|text| text.as_ptr())
}

functions! {
    /// `mm_allocate_pinned`.
    fn mm_allocate_pinned(bytes: u64, out: *mut *mut c_void) |known| {
        is_place(out)?;
        let memory = known.manager.allocate_pinned(bytes)?;
        // SAFETY: passed on from the caller.
        unsafe { put(out, pointer(memory)) }
    }

    /// `mm_allocate_pinned_on`.
    fn mm_allocate_pinned_on(bytes: u64, stream: *mut c_void, out: *mut *mut c_void) |known| {
        is_place(out)?;
        // SAFETY: passed on from the caller.
        let stream = unsafe { known.stream(stream) }?;
        let memory = known.manager.allocate_pinned_on(bytes, &stream)?;
        // SAFETY: passed on from the caller.
        unsafe { put(out, pointer(memory)) }
    }

    /// `mm_free_pinned`.
    fn mm_free_pinned(memory: *mut c_void) |known| {
        Ok(known.manager.free_pinned(addr(memory))?)
    }

    /// `mm_free_pinned_on`.
    fn mm_free_pinned_on(memory: *mut c_void, stream: *mut c_void) |known| {
        // SAFETY: passed on from the caller.
        let stream = unsafe { known.stream(stream) }?;
        Ok(known.manager.free_pinned_on(addr(memory), &stream)?)
    }

    /// `mm_allocate_device`.
    fn mm_allocate_device(bytes: u64, out: *mut *mut c_void) |known| {
        is_place(out)?;
        let memory = known.manager.allocate_device(bytes)?;
        // SAFETY: passed on from the caller.
        unsafe { put(out, pointer(memory)) }
    }

    /// `mm_allocate_device_on`.
    fn mm_allocate_device_on(bytes: u64, stream: *mut c_void, out: *mut *mut c_void) |known| {
        is_place(out)?;
        // SAFETY: passed on from the caller.
        let stream = unsafe { known.stream(stream) }?;
        let memory = known.manager.allocate_device_on(bytes, &stream)?;
        // SAFETY: passed on from the caller.
        unsafe { put(out, pointer(memory)) }
    }

    /// `mm_free_device`.
    fn mm_free_device(memory: *mut c_void) |known| {
        Ok(known.manager.free_device(addr(memory))?)
    }

    /// `mm_free_device_on`.
    fn mm_free_device_on(memory: *mut c_void, stream: *mut c_void) |known| {
        // SAFETY: passed on from the caller.
        let stream = unsafe { known.stream(stream) }?;
        Ok(known.manager.free_device_on(addr(memory), &stream)?)
    }

    /// `mm_record_use`.
    fn mm_record_use(memory: *mut c_void, stream: *mut c_void) |known| {
        // SAFETY: passed on from the caller.
        let stream = unsafe { known.stream(stream) }?;
        Ok(known.manager.record_use(addr(memory), &stream)?)
    }

    /// `mm_copy_to_device_async`.
    fn mm_copy_to_device_async(
        to: *mut c_void, from: *const c_void, bytes: u64, stream: *mut c_void
    ) |known| {
        // SAFETY: passed on from the caller.
        let stream = unsafe { known.stream(stream) }?;
        Ok(known.manager.copy_to_device_async(addr(to), addr(from), bytes, &stream)?)
    }

    /// `mm_copy_to_host_async`.
    fn mm_copy_to_host_async(
        to: *mut c_void, from: *const c_void, bytes: u64, stream: *mut c_void
    ) |known| {
        // SAFETY: passed on from the caller.
        let stream = unsafe { known.stream(stream) }?;
        Ok(known.manager.copy_to_host_async(addr(to), addr(from), bytes, &stream)?)
    }

    /// `mm_set_pinned_pool_size`.
    fn mm_set_pinned_pool_size(bytes: u64) |known| {
        Ok(known.manager.set_pinned_pool_size(bytes)?)
    }

    /// `mm_set_device_pool_size`.
    fn mm_set_device_pool_size(bytes: u64) |known| {
        Ok(known.manager.set_device_pool_size(bytes)?)
    }

    /// `mm_set_release_threshold`.
    fn mm_set_release_threshold(bytes: u64) |known| {
        Ok(known.manager.set_release_threshold(bytes)?)
    }

    /// `mm_trim_device_pools`.
    fn mm_trim_device_pools(keep_bytes: u64) |known| {
        Ok(known.manager.trim_device_pools(keep_bytes)?)
    }

    /// `mm_set_device_allocator_mode`.
    fn mm_set_device_allocator_mode(mode: c_int) |known| {
        let mode = usize::try_from(mode).ok().and_then(|at| DeviceAllocatorMode::ALL.get(at));
        let mode = *mode.ok_or(Failure::Argument("there is no such mode"))?;
        known.manager.set_device_allocator_mode(mode)?;
        Ok(())
    }

    /// `mm_requested_device_allocator_mode`.
    fn mm_requested_device_allocator_mode(out: *mut c_int) |known| {
        let mode = known.manager.requested_device_allocator_mode();
        // SAFETY: passed on from the caller.
        unsafe { put(out, mode as c_int) }
    }

    /// `mm_effective_device_allocator_mode`.
    fn mm_effective_device_allocator_mode(out: *mut c_int) |known| {
        let mode = known.manager.effective_device_allocator_mode()?;
        // SAFETY: passed on from the caller.
        unsafe { put(out, mode as c_int) }
    }

    /// `mm_supports_async_device_allocator`.
    fn mm_supports_async_device_allocator(out: *mut c_int) |known| {
        let supported = known.manager.supports_async_device_allocator()?;
        // SAFETY: passed on from the caller.
        unsafe { put(out, c_int::from(supported)) }
    }

    /// `mm_empty_caches`.
    fn mm_empty_caches() |known| {
        Ok(known.manager.empty_caches()?)
    }

    /// `mm_get_stats`.
    fn mm_get_stats(out: *mut mm_stats) |known| {
        let stats = known.manager.stats()?;
        let stats = mm_stats {
            pinned_allocated: stats.pinned_allocated,
            pinned_reserved: stats.pinned_reserved,
            device_allocated: stats.device_allocated,
            device_reserved: stats.device_reserved,
        };
        // SAFETY: passed on from the caller.
        unsafe { put(out, stats) }
    }

    /// `mm_shutdown`.
    fn mm_shutdown(pinned_bytes: *mut u64, device_bytes: *mut u64) |known| {
        let report = known.manager.shutdown();
        let sum = |list: &[(Addr, u64)]| list.iter().map(|(_, bytes)| bytes).sum::<u64>();
        for (out, list) in [
            (pinned_bytes, &report.outstanding.pinned),
            (device_bytes, &report.outstanding.device),
        ] {
            if !out.is_null() {
                // SAFETY: passed on from the caller.
                unsafe { put(out, sum(list)) }?;
            }
        }
        report.failure.map_or(Ok(()), |failure| Err(failure.into()))
    }
}

/// `mm_stats`, in bytes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct mm_stats {
    /// Pinned memory that users have.
    pub pinned_allocated: u64,
    /// Pinned memory held of the system.
    pub pinned_reserved: u64,
    /// Device memory that users have.
    pub device_allocated: u64,
    /// Device memory held of the devices.
    pub device_reserved: u64,
}
