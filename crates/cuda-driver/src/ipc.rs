//! Memory and events of other processes.

use crate::context::Context;
use crate::error::{DriverError, Refused};
use crate::event::Event;
use crate::memory::DeviceMemory;
use crate::symbols::call;
use cudarc::driver::sys;
use std::ffi::{c_char, c_uint};
use std::sync::Arc;

/// What stands for memory or for an event in another process.
pub type IpcHandle = [u8; 64];

/// Lets peers reach opened memory when they first do.
const LAZY_PEERS: c_uint = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;

fn to_bytes(raw: [c_char; 64]) -> IpcHandle {
    raw.map(|byte| byte as u8)
}

fn to_raw(bytes: IpcHandle) -> [c_char; 64] {
    bytes.map(|byte| byte as c_char)
}

impl DeviceMemory {
    /// A handle by which other processes can open this memory, all of it. The same each time. Freeing
    /// it while it is open elsewhere is undefined there.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_SUPPORTED` where memory cannot be shared like this.
    pub fn ipc_handle(&self) -> Result<IpcHandle, DriverError> {
        let _current = self.context().enter()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        let addr = self.addr();
        // SAFETY: the place for the result is valid; the memory is alive.
        unsafe { call!(self.context().driver(), ipc_get_mem_handle(&raw mut handle, addr)) }?;
        Ok(to_bytes(handle.reserved))
    }
}

/// Memory of another process, open here. Owned; dropping it without [`close`](Self::close) leaks,
/// because work may still be using it.
#[derive(Debug)]
#[must_use = "dropping it leaks the mapping"]
pub struct OpenedMemory {
    context: Arc<Context>,
    addr: u64,
}

impl OpenedMemory {
    /// Opens memory of the context's device. A handle is to be opened once at a time in a process.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`, `CUDA_ERROR_INVALID_CONTEXT` or `CUDA_ERROR_MAP_FAILED` if it means
    /// no memory of another process.
    pub fn open(context: &Arc<Context>, handle: IpcHandle) -> Result<OpenedMemory, DriverError> {
        let _current = context.enter()?;
        let handle = sys::CUipcMemHandle { reserved: to_raw(handle) };
        let mut addr = 0;
        // SAFETY: the place for the result is valid.
        unsafe { call!(context.driver(), ipc_open_mem_handle(&raw mut addr, handle, LAZY_PEERS)) }?;
        Ok(OpenedMemory { context: context.clone(), addr })
    }

    /// Where it begins here.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Closes it. No work may be using it.
    ///
    /// # Errors
    /// Hands it back with the reason.
    pub fn close(self) -> Result<(), Refused<OpenedMemory>> {
        match self.try_close() {
            Ok(()) => Ok(()),
            Err(error) => Err(Refused { value: self, error }),
        }
    }

    /// The call. On success the value owns nothing any more.
    fn try_close(&self) -> Result<(), DriverError> {
        let _current = self.context.enter()?;
        // SAFETY: the address came from cuIpcOpenMemHandle in this context and was not closed since.
        unsafe { call!(self.context.driver(), ipc_close_mem_handle(self.addr)) }
    }
}

impl Event {
    /// A handle by which other processes can open this event, as long as it exists.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` unless it was made by [`create_shared`](Event::create_shared).
    pub fn ipc_handle(&self) -> Result<IpcHandle, DriverError> {
        let _current = self.context().enter()?;
        let mut handle = sys::CUipcEventHandle { reserved: [0; 64] };
        let event = self.handle();
        // SAFETY: the place for the result is valid; the event is alive.
        unsafe { call!(self.context().driver(), ipc_get_event_handle(&raw mut handle, event)) }?;
        Ok(to_bytes(handle.reserved))
    }

    /// An event of another process. It can be waited for, not recorded.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE` or `CUDA_ERROR_INVALID_VALUE` if it means no event any more.
    pub fn open(context: &Arc<Context>, handle: IpcHandle) -> Result<Event, DriverError> {
        let _current = context.enter()?;
        let handle = sys::CUipcEventHandle { reserved: to_raw(handle) };
        let mut raw: sys::CUevent = std::ptr::null_mut();
        // SAFETY: the place for the result is valid.
        unsafe { call!(context.driver(), ipc_open_event_handle(&raw mut raw, handle)) }?;
        Ok(Event::adopt(context, raw))
    }
}
