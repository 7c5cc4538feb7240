//! The C functions that PyTorch is given.
//!
//! None of them lets a Rust panic out. A request that cannot be served raises a C++ exception of
//! PyTorch's own, which becomes a `RuntimeError` in Python: the interface has no other way to fail,
//! since a null pointer is taken for memory.

use crate::config;
use crate::plugin::{Failure, Plugin};
use alloc_core::{Addr, DeviceId, PoolId};
use alloc_cuda::CudaStream;
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

/// PyTorch's `MempoolId_t`, a `std::pair<unsigned long long, unsigned long long>`: passed like this
/// structure, in two registers on x86-64 and 64-bit Arm.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PoolKey {
    /// First of the pair.
    pub first: u64,
    /// Second of the pair.
    pub second: u64,
}

impl PoolKey {
    fn id(self) -> PoolId {
        PoolId(self.first, self.second)
    }
}

thread_local! {
    /// Why the last failed call on this thread failed.
    static LAST_ERROR: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// The allocator of the process, made on first use and never dropped: tensors live until the process
/// ends.
fn plugin() -> Result<&'static Plugin, Failure> {
    static PLUGIN: OnceLock<Result<Plugin, Failure>> = OnceLock::new();
    let make = || {
        let variable = |name| std::env::var(name).ok();
        let (policy, settings) = (variable(config::POLICY), variable(config::SETTINGS));
        Plugin::new(config::from(policy.as_deref(), settings.as_deref())?)
    };
    PLUGIN.get_or_init(make).as_ref().map_err(Failure::clone)
}

/// Runs a call and keeps its failure, a panic included, as the last error.
fn guarded<R>(call: impl FnOnce() -> Result<R, Failure>) -> Option<R> {
    let result = catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|_| Err("a bug of the allocator (it panicked; see above)".to_owned()));
    result
        .inspect_err(|failure| {
            let text = CString::new(failure.replace('\0', " ")).unwrap_or_default();
            LAST_ERROR.set(Some(text));
        })
        .ok()
}

/// [`guarded`] for calls that have no way to fail: the first failure is printed.
fn reported(what: &str, call: impl FnOnce() -> Result<(), Failure>) {
    static PRINTED: OnceLock<()> = OnceLock::new();
    if guarded(call).is_none() && PRINTED.set(()).is_ok() {
        LAST_ERROR.with_borrow(|error| {
            let text = error.as_ref().map(|text| text.to_string_lossy()).unwrap_or_default();
            eprintln!("gpu_alloc: {what}: {text} (further failures are not printed)");
        });
    }
}

/// `torchCheckFail(function, file, line, message)` of PyTorch, which throws.
type TorchCheckFail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char);

/// Finds it in the PyTorch that this process has loaded, if it has.
fn torch_check_fail() -> Option<TorchCheckFail> {
    let name = c"_ZN3c106detail14torchCheckFailEPKcS2_jS2_".as_ptr();
    // SAFETY: looks a symbol up among those that are loaded; the name ends in NUL.
    let mut address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name) };
    if address.is_null() {
        let flags = libc::RTLD_NOLOAD | libc::RTLD_LAZY;
        // SAFETY: loads nothing: it finds the library only if it is loaded already.
        let library = unsafe { libc::dlopen(c"libc10.so".as_ptr(), flags) };
        if library.is_null() {
            return None;
        }
        // SAFETY: the handle was just returned; the name ends in NUL.
        address = unsafe { libc::dlsym(library, name) };
    }
    if address.is_null() {
        return None;
    }
    // SAFETY: the mangled name fixes the arguments: two strings, a number and a string.
    Some(unsafe { std::mem::transmute::<*mut c_void, TorchCheckFail>(address) })
}

/// Throws the last error as PyTorch's exception. Returns where there is no PyTorch.
fn raise() {
    let Some(fail) = torch_check_fail() else { return };
    // Stays where it is until the next failure on this thread; the exception copies it.
    let message = LAST_ERROR
        .with_borrow(|error| error.as_ref().map_or(c"unknown".as_ptr(), |text| text.as_ptr()));
    // SAFETY: all strings end in NUL. The call unwinds through this frame, which has nothing left
    // to drop, and through callers whose ABI allows it.
    unsafe { fail(c"gpu_alloc".as_ptr(), c"alloc-torch".as_ptr(), 0, message) }
}

/// A device by PyTorch's number; none has the number of a negative one.
fn device(index: c_int) -> DeviceId {
    DeviceId::new(u16::try_from(index).unwrap_or(u16::MAX))
}

/// The stream behind a handle.
///
/// # Safety
/// `raw` must be a stream that is alive and stays so: see [`gpu_alloc_malloc`].
unsafe fn adopt(
    plugin: &Plugin,
    device: DeviceId,
    raw: *mut c_void,
) -> Result<CudaStream, Failure> {
    // SAFETY: passed on from the caller.
    let stream = unsafe { plugin.backend().adopt(device, raw) };
    stream.map_err(|error| error.to_string())
}

/// [`adopt`] for the tests of safe modules, of streams that are never destroyed.
#[cfg(test)]
pub(crate) fn adopt_for_tests(plugin: &Plugin, device: DeviceId, raw: *mut c_void) -> CudaStream {
    // SAFETY: the tests leak their streams.
    unsafe { adopt(plugin, device, raw) }.expect("adopts")
}

fn addr(pointer: *mut c_void) -> Addr {
    Addr::new(pointer.addr() as u64)
}

fn pointer(addr: Addr) -> *mut c_void {
    // An address of the device; nobody on the host follows it.
    std::ptr::without_provenance_mut(addr.get() as usize)
}

/// Allocates `size` bytes on `device` for work on `stream`; null for 0 bytes.
///
/// Raises a C++ exception inside PyTorch if there is no memory; elsewhere returns null, and
/// [`gpu_alloc_last_error`] has the reason.
///
/// # Safety
/// `stream` must be null or a stream that is alive, and stay so as long as any memory is allocated
/// for it or cached, as PyTorch's own streams do.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gpu_alloc_malloc(
    size: usize,
    device_index: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    let allocated = guarded(|| {
        let plugin = plugin()?;
        // SAFETY: passed on from the caller.
        let stream = unsafe { adopt(plugin, device(device_index), stream) }?;
        plugin.allocate(size as u64, &stream)
    });
    match allocated {
        Some(addr) => pointer(addr),
        None => {
            raise();
            std::ptr::null_mut()
        }
    }
}

/// Gives back what [`gpu_alloc_malloc`] returned. The other arguments are PyTorch's habit and not
/// needed. A block that cannot be freed stays allocated; the first time that is printed.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_alloc_free(
    block: *mut c_void,
    _size: usize,
    _device: c_int,
    _stream: *mut c_void,
) {
    reported("cannot free", || plugin()?.free(addr(block)));
}

/// `set_record_stream_fn`: work on `stream` uses the block until it is freed.
///
/// # Safety
/// `stream` must be null or a stream that is alive, and stay so until the block has been freed.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn gpu_alloc_record_stream(block: *mut c_void, stream: *mut c_void) {
    let recorded = guarded(|| {
        let plugin = plugin()?;
        // SAFETY: passed on from the caller.
        let device = unsafe { plugin.backend().device_of_stream(stream) };
        let device = device.map_err(|error| error.to_string())?;
        // SAFETY: passed on from the caller.
        let stream = unsafe { adopt(plugin, device, stream) }?;
        plugin.record_stream(addr(block), &stream)
    });
    if recorded.is_none() {
        raise();
    }
}

/// `set_init_fn`: makes the allocator, so that a wrong setting is reported now and not later.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn gpu_alloc_init(_device_count: c_int) {
    if guarded(plugin).is_none() {
        raise();
    }
}

/// `set_reset_fn`, which is PyTorch's `empty_cache`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn gpu_alloc_reset() {
    if guarded(|| plugin()?.empty_cache()).is_none() {
        raise();
    }
}

/// `set_memory_fraction_fn`.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn gpu_alloc_set_memory_fraction(fraction: f64, device_index: c_int) {
    let set = guarded(|| plugin()?.set_memory_fraction(fraction, device(device_index)));
    if set.is_none() {
        raise();
    }
}

/// `set_base_alloc_fn`: the segment that a block lies in, with its length in `*size`. The block
/// itself if it is not this allocator's.
///
/// # Safety
/// `size` must be null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_alloc_base(block: *mut c_void, size: *mut usize) -> *mut c_void {
    let segment = guarded(|| Ok(plugin()?.segment_of(addr(block)))).flatten();
    let Some((base, bytes)) = segment else { return block };
    if !size.is_null() {
        // SAFETY: the caller vouches for the place.
        unsafe { size.write(bytes as usize) };
    }
    pointer(base)
}

/// `set_begin_allocate_to_pool`: a capture into `pool` is about to begin. The predicate is a
/// `std::function` that PyTorch passes by the address of a copy of its own, and is not looked at.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn gpu_alloc_begin_pool(
    device_index: c_int,
    pool: PoolKey,
    _predicate: *const c_void,
) {
    if guarded(|| plugin()?.begin_pool(device(device_index), pool.id())).is_none() {
        raise();
    }
}

/// `set_end_allocate_to_pool_fn`: a capture into `pool` has ended.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_alloc_end_pool(device_index: c_int, pool: PoolKey) {
    reported("cannot end a pool", || plugin()?.end_pool(device(device_index), pool.id()));
}

/// `set_release_pool`: the graphs of `pool` are gone, and their memory may go.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_alloc_release_pool(device_index: c_int, pool: PoolKey) {
    reported("cannot release a pool", || plugin()?.release_pool(device(device_index), pool.id()));
}

/// Writes the statistics of a device, under PyTorch's names, as one JSON object to `buffer`: as much
/// as fits into `capacity` bytes, a final NUL included. Returns the length of the whole text without
/// it, or 0 on failure.
///
/// # Safety
/// `buffer` must be writable for `capacity` bytes; it may be null if that is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_alloc_stats(
    device_index: c_int,
    buffer: *mut c_char,
    capacity: usize,
) -> usize {
    match guarded(|| plugin()?.stats(device(device_index))) {
        // SAFETY: passed on from the caller.
        Some(text) => unsafe { copy_out(&text, buffer, capacity) },
        None => 0,
    }
}

/// Sets every peak of a device's statistics to its current value. Returns whether that worked.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_alloc_reset_peak_stats(device_index: c_int) -> bool {
    guarded(|| plugin()?.reset_peak_stats(device(device_index))).is_some()
}

/// Recomputes the state of the allocator from scratch. Returns whether it is sound; if not,
/// [`gpu_alloc_last_error`] says what is wrong. For tests: it takes a while.
#[unsafe(no_mangle)]
pub extern "C" fn gpu_alloc_check() -> bool {
    guarded(|| plugin()?.check()).is_some()
}

/// Writes why the last failed call on this thread failed, like [`gpu_alloc_stats`]; 0 if none has.
///
/// # Safety
/// As [`gpu_alloc_stats`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpu_alloc_last_error(buffer: *mut c_char, capacity: usize) -> usize {
    let text = LAST_ERROR.with_borrow(|error| {
        error.as_ref().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
    });
    // SAFETY: passed on from the caller.
    unsafe { copy_out(&text, buffer, capacity) }
}

/// Copies a text and a final NUL, as much as fits. Returns its length.
///
/// # Safety
/// `buffer` must be writable for `capacity` bytes.
unsafe fn copy_out(text: &str, buffer: *mut c_char, capacity: usize) -> usize {
    let Some(room) = capacity.checked_sub(1) else { return text.len() };
    let copied = text.len().min(room);
    // SAFETY: at most `capacity` bytes; the text is elsewhere.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast::<c_char>(), buffer, copied) };
    // SAFETY: the last byte is still within `capacity`.
    unsafe { buffer.wrapping_add(copied).write(0) };
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(call: impl Fn(*mut c_char, usize) -> usize) -> String {
        let length = call(std::ptr::null_mut(), 0);
        let mut buffer = vec![0u8; length + 1];
        assert_eq!(call(buffer.as_mut_ptr().cast(), buffer.len()), length);
        assert_eq!(buffer.pop(), Some(0));
        String::from_utf8(buffer).expect("text")
    }

    #[test]
    fn without_a_driver_calls_fail_with_a_reason_and_nothing_crashes() {
        if plugin().is_ok() {
            return;
        }
        // SAFETY: the null stream.
        let block = unsafe { gpu_alloc_malloc(1 << 20, 0, std::ptr::null_mut()) };
        assert!(block.is_null());
        // SAFETY: `text_of` passes a buffer and its size.
        let error = text_of(|buffer, capacity| unsafe { gpu_alloc_last_error(buffer, capacity) });
        assert!(error.contains("driver"), "{error}");
        gpu_alloc_free(std::ptr::null_mut(), 0, 0, std::ptr::null_mut());
        gpu_alloc_init(1);
        gpu_alloc_reset();
        gpu_alloc_set_memory_fraction(0.5, 0);
        gpu_alloc_begin_pool(0, PoolKey { first: 1, second: 0 }, std::ptr::null());
        gpu_alloc_end_pool(0, PoolKey { first: 1, second: 0 });
        gpu_alloc_release_pool(0, PoolKey { first: 1, second: 0 });
        assert!(!gpu_alloc_check() && !gpu_alloc_reset_peak_stats(-1));
        // SAFETY: no buffer and no capacity.
        assert_eq!(unsafe { gpu_alloc_stats(0, std::ptr::null_mut(), 0) }, 0);
        let somewhere: *mut c_void = std::ptr::without_provenance_mut(4096);
        // SAFETY: no place for the size.
        assert_eq!(unsafe { gpu_alloc_base(somewhere, std::ptr::null_mut()) }, somewhere);
    }

    #[test]
    fn a_short_buffer_gets_the_beginning() {
        let mut buffer = [b'x'; 5];
        // SAFETY: the buffer has room for as many bytes.
        let length = unsafe { copy_out("reason", buffer.as_mut_ptr().cast(), 5) };
        assert_eq!((length, &buffer), (6, b"reas\0"));
    }

    #[test]
    fn a_panic_becomes_an_error() {
        assert_eq!(guarded::<()>(|| panic!("expected in this test")), None);
        // SAFETY: `text_of` passes a buffer and its size.
        let error = text_of(|buffer, capacity| unsafe { gpu_alloc_last_error(buffer, capacity) });
        assert!(error.contains("panicked"), "{error}");
    }
}
