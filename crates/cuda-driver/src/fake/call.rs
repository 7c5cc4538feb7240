//! What every function of the imitation goes through: scripted errors, the current context, waiting.

use super::memory::Code;
use super::state::{self, Guard, State};
use crate::error::code;
use cudarc::driver::sys;
use std::cell::{Cell, RefCell};
use std::ffi::c_void;

thread_local! {
    /// The contexts pushed on this thread; 0 is none.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// What captures forbid this thread.
    static CAPTURE_MODE: Cell<u32> = const { Cell::new(0) };
}

/// The context current on this thread.
pub(super) fn current_context() -> Option<usize> {
    CURRENT.with_borrow(|stack| stack.last().copied()).filter(|&handle| handle != 0)
}

/// The device whose context is current.
pub(super) fn current(state: &State) -> Result<usize, Code> {
    state.device_of_context(current_context().ok_or(code::INVALID_CONTEXT)?)
}

/// Locks the state for a call, unless the call must fail.
pub(super) fn begin(name: &str) -> Result<Guard, Code> {
    let mut guard = state::lock();
    let state = guard.get_or_insert_default();
    if state.shut_down {
        return Err(code::DEINITIALIZED);
    }
    let fault = state.faults.iter_mut().position(|(call, successes, _)| {
        let hit = call == name && *successes == 0;
        if call == name {
            *successes = successes.saturating_sub(1);
        }
        hit
    });
    match (fault, state.lost) {
        (Some(index), _) => Err(state.faults.remove(index).2),
        (None, Some(code)) => Err(code),
        (None, None) => Ok(guard),
    }
}

/// A call on the state, as a result code.
pub(super) fn on_state<R>(
    name: &str,
    call: impl FnOnce(&mut State) -> Result<R, Code>,
) -> Result<R, Code> {
    let mut guard = begin(name)?;
    call(guard.get_or_insert_default())
}

/// A call on a stream, given as (state, its handle).
pub(super) fn on_stream<R>(
    name: &str,
    handle: sys::CUstream,
    call: impl FnOnce(&mut State, usize) -> Result<R, Code>,
) -> Result<R, Code> {
    on_state(name, |state| {
        let stream = state.stream(handle as usize)?;
        call(state, stream)
    })
}

/// Waits until `done` says so.
pub(super) fn wait_until(
    name: &str,
    done: impl Fn(&mut State) -> Result<bool, Code>,
) -> Result<(), Code> {
    let mut guard = begin(name)?;
    loop {
        let state = guard.get_or_insert_default();
        if done(state)? {
            return state.lost.map_or(Ok(()), Err);
        }
        guard = state::wait(guard);
    }
}

/// Refuses what a capture forbids this thread, and breaks the capture, as the driver does.
pub(super) fn not_in_capture(state: &mut State) -> Result<(), Code> {
    match state.captures.forbid_unsafe_call(CAPTURE_MODE.get()) {
        true => Err(code::STREAM_CAPTURE_UNSUPPORTED),
        false => Ok(()),
    }
}

/// Copies into host memory.
pub(super) fn write_host(to: usize, bytes: &[u8]) {
    let to: *mut u8 = std::ptr::with_exposed_provenance_mut(to);
    // SAFETY: whoever queued the copy vouched for the target until it is done.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
}

/// Calls a host function.
pub(super) fn call_function(function: unsafe extern "C" fn(*mut c_void), data: usize) {
    // SAFETY: whoever queued it vouched for function and data.
    unsafe { function(std::ptr::with_exposed_provenance_mut(data)) }
}

/// Reads host memory.
///
/// # Safety
/// `from` must be readable for `bytes`.
pub(super) unsafe fn read_host(from: *const c_void, bytes: usize) -> Vec<u8> {
    // SAFETY: passed on from the caller.
    unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.to_vec()
}

/// Writes to a result that is not the first parameter.
///
/// # Safety
/// `out` must be a place for the result.
pub(super) unsafe fn put<T>(out: *mut T, value: T) -> Result<(), Code> {
    // SAFETY: passed on from the caller.
    unsafe { out.write(value) };
    Ok(())
}

/// Writes to a result that may not be wanted.
///
/// # Safety
/// `out` must be null or a place for the result.
pub(super) unsafe fn put_if<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: passed on from the caller.
        unsafe { out.write(value) };
    }
}

/// Pushes a context on this thread.
pub(super) fn push_context(handle: usize) {
    CURRENT.with_borrow_mut(|stack| stack.push(handle));
}

/// Pops this thread's context.
pub(super) fn pop_context() -> Option<usize> {
    CURRENT.with_borrow_mut(Vec::pop)
}

/// Sets what captures forbid this thread.
pub(super) fn replace_capture_mode(mode: u32) -> u32 {
    CAPTURE_MODE.replace(mode)
}

/// One 32-bit word of a structure.
///
/// # Safety
/// The structure must be readable that far.
pub(super) unsafe fn read_word<T>(structure: *const T, index: usize) -> u32 {
    // SAFETY: passed on from the caller.
    unsafe { structure.cast::<u32>().wrapping_add(index).read() }
}
