//! The imitation's functions, with the driver's C signatures.

use super::call::*;
use super::memory::{Code, FABRIC, PAGE, POSIX_FD};
use super::pools::{FIRST_FLAG, LAST_FLAG};
use super::state::{Event, Work};
use crate::error::code;
use crate::symbols::types;
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Defines the functions and their table. `-> type` writes the result to a first parameter.
macro_rules! exports {
    ($($name:ident($($arg:ident: $ty:ty),*) $(-> $out:ty)? $body:block)*) => {
        $(exports!(@one $name($($arg: $ty),*) $(-> $out)? $body);)*

        /// The imitation's function of a name.
        pub(super) fn lookup(name: &'static CStr) -> Option<NonNull<c_void>> {
            let address: *const c_void = match name.to_str().ok()? {
                "cuDriverGetVersion" => version as *const c_void,
                "cuGetErrorName" => error_name as *const c_void,
                $(stringify!($name) => $name as *const c_void,)*
                _ => return None,
            };
            NonNull::new(address.cast_mut())
        }

        // The types are those of the table, so a lookup by name cannot mix them up.
        const _: () = { $(let _: types::$name = $name;)* };
    };
    (@one $name:ident($($arg:ident: $ty:ty),*) -> $out:ty $body:block) => {
        #[expect(non_snake_case, reason = "the driver's name")]
        unsafe extern "C" fn $name(out: *mut $out, $($arg: $ty),*) -> u32 {
            let call = || -> Result<$out, Code> { $body };
            match call() {
                Ok(value) => {
                    // SAFETY: the driver's contract: the first parameter is a place for the result.
                    unsafe { out.write(value) };
                    code::SUCCESS
                }
                Err(code) => code,
            }
        }
    };
    (@one $name:ident($($arg:ident: $ty:ty),*) $body:block) => {
        #[expect(non_snake_case, reason = "the driver's name")]
        unsafe extern "C" fn $name($($arg: $ty),*) -> u32 {
            let call = || -> Result<(), Code> { $body };
            call().err().unwrap_or(code::SUCCESS)
        }
    };
}

/// `cuDriverGetVersion`.
unsafe extern "C" fn version(out: *mut c_int) -> u32 {
    // SAFETY: the driver's contract: a place for the result.
    unsafe { out.write(13000) };
    code::SUCCESS
}

/// `cuGetErrorName`: one code beyond those that the crate lists.
unsafe extern "C" fn error_name(number: u32, out: *mut *const c_char) -> u32 {
    if number != 910 {
        return code::INVALID_VALUE;
    }
    // SAFETY: the driver's contract: a place for the result.
    unsafe { out.write(c"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE".as_ptr()) };
    code::SUCCESS
}

/// What tells the kinds of 64-byte handles apart.
const FABRIC_TAG: u64 = 0x0066_6162_7269_6300;
const MEMORY_TAG: u64 = 0x006d_656d_6f72_7900;
const EVENT_TAG: u64 = 0x0065_7665_6e74_0000;

/// A 64-byte handle that stands for a number.
fn tagged(number: u64, tag: u64) -> [u8; 64] {
    let mut handle = [0; 64];
    handle[..8].copy_from_slice(&tag.to_le_bytes());
    handle[8..16].copy_from_slice(&number.to_le_bytes());
    handle
}

fn untagged(handle: [u8; 64], tag: u64) -> Result<u64, Code> {
    let [own, number] = [0, 8].map(|at| {
        let mut word = [0; 8];
        word.copy_from_slice(&handle[at..at + 8]);
        u64::from_le_bytes(word)
    });
    if own == tag { Ok(number) } else { Err(code::INVALID_VALUE) }
}

exports! {
    cuInit(_flags: c_uint) { on_state("cuInit", |_| Ok(())) }

    cuDeviceGetCount() -> c_int {
        on_state("cuDeviceGetCount", |state| Ok(state.contexts.len() as c_int))
    }
    cuDeviceGet(ordinal: c_int) -> sys::CUdevice {
        on_state("cuDeviceGet", |state| {
            if (ordinal as usize) < state.contexts.len() {
                Ok(ordinal)
            } else {
                Err(code::INVALID_DEVICE)
            }
        })
    }
    cuDeviceGetName(out: *mut c_char, room: c_int, _device: sys::CUdevice) {
        let name = b"Imitation\0";
        if (room as usize) < name.len() {
            return Err(code::INVALID_VALUE);
        }
        write_host(out as usize, name);
        Ok(())
    }
    cuDeviceTotalMem_v2(device: sys::CUdevice) -> usize {
        on_state("cuDeviceTotalMem_v2", |state| Ok(state.memory.info(device as usize).1 as usize))
    }
    cuDeviceGetAttribute(attribute: sys::CUdevice_attribute, _device: sys::CUdevice) -> c_int {
        use sys::CUdevice_attribute_enum::*;
        on_state("cuDeviceGetAttribute", |state| Ok(match attribute {
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 4,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
            CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED => 1,
            CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => c_int::from(!state.pools.are_missing),
            _ => 0,
        }))
    }
    cuDeviceCanAccessPeer(device: sys::CUdevice, peer: sys::CUdevice) -> c_int {
        on_state("cuDeviceCanAccessPeer", |_| Ok(c_int::from(device != peer)))
    }
    cuDevicePrimaryCtxRetain(device: sys::CUdevice) -> sys::CUcontext {
        on_state("cuDevicePrimaryCtxRetain", |state| {
            let context = state.contexts.get_mut(device as usize).ok_or(code::INVALID_DEVICE)?;
            context.retained += 1;
            Ok(std::ptr::without_provenance_mut(context.handle))
        })
    }
    cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice) {
        on_state("cuDevicePrimaryCtxRelease_v2", |state| {
            let context = state.contexts.get_mut(device as usize).ok_or(code::INVALID_DEVICE)?;
            context.retained = context.retained.checked_sub(1).ok_or(code::INVALID_CONTEXT)?;
            Ok(())
        })
    }

    cuCtxGetCurrent() -> sys::CUcontext {
        on_state("cuCtxGetCurrent", |_| {
            Ok(std::ptr::without_provenance_mut(current_context().unwrap_or(0)))
        })
    }
    cuCtxPushCurrent_v2(context: sys::CUcontext) {
        on_state("cuCtxPushCurrent_v2", |state| {
            state.device_of_context(context as usize)?;
            push_context(context as usize);
            Ok(())
        })
    }
    cuCtxPopCurrent_v2() -> sys::CUcontext {
        on_state("cuCtxPopCurrent_v2", |_| {
            let popped = pop_context().ok_or(code::INVALID_CONTEXT)?;
            Ok(std::ptr::without_provenance_mut(popped))
        })
    }
    cuCtxSynchronize() {
        wait_until("cuCtxSynchronize", |state| {
            let device = current(state)?;
            Ok(state.is_device_idle(device))
        })
    }
    cuCtxGetDevice() -> sys::CUdevice {
        on_state("cuCtxGetDevice", |state| Ok(current(state)? as sys::CUdevice))
    }
    cuCtxEnablePeerAccess(peer: sys::CUcontext, _flags: c_uint) {
        on_state("cuCtxEnablePeerAccess", |state| {
            let (own, peer) = (current(state)?, state.device_of_context(peer as usize)?);
            if own == peer {
                return Err(code::INVALID_DEVICE);
            }
            let is_new = state.peers.insert((own, peer));
            if is_new { Ok(()) } else { Err(code::PEER_ACCESS_ALREADY_ENABLED) }
        })
    }
    cuCtxDisablePeerAccess(peer: sys::CUcontext) {
        on_state("cuCtxDisablePeerAccess", |state| {
            let pair = (current(state)?, state.device_of_context(peer as usize)?);
            if state.peers.remove(&pair) { Ok(()) } else { Err(code::PEER_ACCESS_NOT_ENABLED) }
        })
    }

    cuStreamCreateWithPriority(flags: c_uint, _priority: c_int) -> sys::CUstream {
        on_state("cuStreamCreateWithPriority", |state| {
            let device = current(state)?;
            let handle = state.create_stream(device, flags & 1 == 0);
            Ok(std::ptr::without_provenance_mut(handle))
        })
    }
    cuStreamDestroy_v2(stream: sys::CUstream) {
        on_state("cuStreamDestroy_v2", |state| state.destroy_stream(stream as usize))
    }
    cuStreamQuery(stream: sys::CUstream) {
        on_stream("cuStreamQuery", stream, |state, stream| {
            if state.is_idle(stream)? { Ok(()) } else { Err(code::NOT_READY) }
        })
    }
    cuStreamSynchronize(stream: sys::CUstream) {
        wait_until("cuStreamSynchronize", |state| {
            let stream = state.stream(stream as usize)?;
            state.is_idle(stream)
        })
    }
    cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, _flags: c_uint) {
        on_stream("cuStreamWaitEvent", stream, |state, stream| {
            state.await_event(stream, event as usize)
        })
    }
    cuStreamGetCaptureInfo_v2(
        stream: sys::CUstream, status: *mut sys::CUstreamCaptureStatus, id: *mut c_ulonglong,
        graph: *mut sys::CUgraph, tips: *mut *const sys::CUgraphNode, count: *mut usize
    ) {
        let (number, captured) = on_stream("cuStreamGetCaptureInfo_v2", stream, |state, stream| {
            let stream = state.streams.get(&stream).ok_or(code::INVALID_HANDLE)?;
            let Some(captured) = &stream.captured else { return Ok((0, None)) };
            // The list is the stream's own: it stays until the stream's next call.
            let tips: *const usize = captured.tips.as_ptr();
            match state.captures.is_valid(captured.id) {
                true => Ok((1, Some((captured.id, tips.expose_provenance(), captured.tips.len())))),
                false => Ok((2, None)),
            }
        })?;
        // SAFETY: the driver's contract: a place for the result, as large as a C enum.
        unsafe { put(status.cast::<u32>(), number) }?;
        let Some((number, list, length)) = captured else { return Ok(()) };
        // SAFETY: the driver's contract: null or a place for the result.
        unsafe { put_if(id, number) };
        // SAFETY: as above.
        unsafe { put_if(graph, std::ptr::without_provenance_mut(number as usize)) };
        // SAFETY: as above. Handles are numbers as large as pointers.
        unsafe { put_if(tips, std::ptr::with_exposed_provenance(list)) };
        // SAFETY: as above.
        unsafe { put_if(count, length) };
        Ok(())
    }
    cuGraphNodeGetDependencies(
        node: sys::CUgraphNode, out: *mut sys::CUgraphNode, count: *mut usize
    ) {
        let before = on_state("cuGraphNodeGetDependencies", |state| {
            state.captures.before(node as usize).map(<[usize]>::to_vec)
        })?;
        if !out.is_null() {
            // SAFETY: the driver's contract: a place with the room of the array.
            let room = unsafe { count.read() };
            for (index, &node) in before.iter().take(room).enumerate() {
                // SAFETY: within that room.
                unsafe { put(out.wrapping_add(index), std::ptr::without_provenance_mut(node)) }?;
            }
        }
        // SAFETY: the driver's contract: a place for the result.
        unsafe { put(count, before.len()) }
    }
    cuStreamGetCtx(stream: sys::CUstream, out: *mut sys::CUcontext) {
        let context = on_stream("cuStreamGetCtx", stream, |state, stream| {
            let device = state.streams.get(&stream).ok_or(code::INVALID_HANDLE)?.device;
            Ok(std::ptr::without_provenance_mut(state.contexts[device].handle))
        })?;
        // SAFETY: the driver's contract: a place for the result.
        unsafe { put(out, context) }
    }
    cuStreamGetId(stream: sys::CUstream, out: *mut c_ulonglong) {
        let id = on_stream("cuStreamGetId", stream, |state, stream| {
            let stream = state.streams.get(&stream).ok_or(code::INVALID_HANDLE)?;
            match stream.captured {
                Some(_) => Err(code::STREAM_CAPTURE_UNSUPPORTED),
                None => Ok(stream.unique),
            }
        })?;
        // SAFETY: the driver's contract: a place for the result.
        unsafe { put(out, id) }
    }
    cuLaunchHostFunc(stream: sys::CUstream, function: sys::CUhostFn, data: *mut c_void) {
        let function = function.ok_or(code::INVALID_VALUE)?;
        on_stream("cuLaunchHostFunc", stream, |state, stream| {
            state.queue(stream, Work::Host { function, data: data.expose_provenance() })
        })
    }

    cuEventCreate(flags: c_uint) -> sys::CUevent {
        on_state("cuEventCreate", |state| {
            let device = current(state)?;
            let handle = state.handle();
            let shared = flags & sys::CUevent_flags::CU_EVENT_INTERPROCESS as c_uint != 0;
            state.events.insert(handle, Event::new(device, shared));
            Ok(std::ptr::without_provenance_mut(handle))
        })
    }
    cuEventRecord(event: sys::CUevent, stream: sys::CUstream) {
        on_stream("cuEventRecord", stream, |state, stream| state.record(event as usize, stream))
    }
    cuEventQuery(event: sys::CUevent) {
        on_state("cuEventQuery", |state| {
            not_in_capture(state)?;
            if state.is_reached(event as usize)? { Ok(()) } else { Err(code::NOT_READY) }
        })
    }
    cuEventSynchronize(event: sys::CUevent) {
        wait_until("cuEventSynchronize", |state| state.is_reached(event as usize))
    }
    cuEventDestroy_v2(event: sys::CUevent) {
        on_state("cuEventDestroy_v2", |state| {
            state.events.remove(&(event as usize)).map(drop).ok_or(code::INVALID_HANDLE)
        })
    }

    cuMemAlloc_v2(bytes: usize) -> sys::CUdeviceptr {
        on_state("cuMemAlloc_v2", |state| {
            not_in_capture(state)?;
            let device = current(state)?;
            state.memory.allocate(device, bytes as u64)
        })
    }
    cuMemFree_v2(addr: sys::CUdeviceptr) {
        wait_until("cuMemFree_v2", |state| {
            not_in_capture(state)?;
            let device = state.memory.device_of(addr)?;
            if !state.is_device_idle(device) {
                return Ok(false);
            }
            state.memory.free(addr).map(|()| true)
        })
    }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let info = on_state("cuMemGetInfo_v2", |state| {
            let device = current(state)?;
            Ok(state.memory.info(device))
        })?;
        // SAFETY: the driver's contract: a place for the result.
        unsafe { put(free, info.0 as usize) }?;
        // SAFETY: the driver's contract: a place for the result.
        unsafe { put(total, info.1 as usize) }
    }
    cuMemcpyHtoD_v2(to: sys::CUdeviceptr, from: *const c_void, bytes: usize) {
        // SAFETY: the driver's contract: readable for as many bytes.
        let bytes = unsafe { read_host(from, bytes) };
        on_state("cuMemcpyHtoD_v2", |state| state.memory.write(to, &bytes))
    }
    cuMemcpyDtoH_v2(to: *mut c_void, from: sys::CUdeviceptr, bytes: usize) {
        let copy = on_state("cuMemcpyDtoH_v2", |state| state.memory.read(from, bytes as u64))?;
        write_host(to.expose_provenance(), &copy);
        Ok(())
    }
    cuMemcpyHtoDAsync_v2(
        to: sys::CUdeviceptr, from: *const c_void, bytes: usize, stream: sys::CUstream
    ) {
        // SAFETY: the driver's contract: readable for as many bytes.
        let bytes = Arc::new(unsafe { read_host(from, bytes) });
        on_stream("cuMemcpyHtoDAsync_v2", stream, |state, stream| {
            state.queue(stream, Work::Write { to, bytes })
        })
    }
    cuMemcpyDtoHAsync_v2(
        to: *mut c_void, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream
    ) {
        on_stream("cuMemcpyDtoHAsync_v2", stream, |state, stream| {
            let to = to.expose_provenance();
            state.queue(stream, Work::Read { from, to, bytes: bytes as u64 })
        })
    }
    cuMemcpyDtoDAsync_v2(
        to: sys::CUdeviceptr, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream
    ) {
        on_stream("cuMemcpyDtoDAsync_v2", stream, |state, stream| {
            state.queue(stream, Work::Copy { to, from, bytes: bytes as u64 })
        })
    }
    cuMemsetD8Async(to: sys::CUdeviceptr, byte: u8, count: usize, stream: sys::CUstream) {
        on_stream("cuMemsetD8Async", stream, |state, stream| {
            state.queue(stream, Work::Fill { to, pattern: vec![byte], bytes: count as u64 })
        })
    }
    cuMemsetD32Async(to: sys::CUdeviceptr, word: c_uint, count: usize, stream: sys::CUstream) {
        on_stream("cuMemsetD32Async", stream, |state, stream| {
            let pattern = word.to_le_bytes().to_vec();
            state.queue(stream, Work::Fill { to, pattern, bytes: 4 * count as u64 })
        })
    }

    cuMemHostAlloc(bytes: usize, _flags: c_uint) -> *mut c_void {
        on_state("cuMemHostAlloc", |state| {
            let memory = vec![0u64; bytes.div_ceil(8).max(1)].into_boxed_slice();
            let place = Box::into_raw(memory);
            state.pinned.insert(place.expose_provenance(), place.len());
            Ok(place.cast())
        })
    }
    cuMemFreeHost(place: *mut c_void) {
        on_state("cuMemFreeHost", |state| {
            let words = state.pinned.remove(&place.addr()).ok_or(code::INVALID_VALUE)?;
            let memory = std::ptr::slice_from_raw_parts_mut(place.cast::<u64>(), words);
            // SAFETY: made by `Box::into_raw` with this length, and only now taken off the list.
            drop(unsafe { Box::from_raw(memory) });
            Ok(())
        })
    }
    cuMemHostRegister_v2(place: *mut c_void, _bytes: usize, _flags: c_uint) {
        on_state("cuMemHostRegister_v2", |state| match state.pinned.insert(place.addr(), 0) {
            None => Ok(()),
            Some(_) => Err(code::HOST_MEMORY_ALREADY_REGISTERED),
        })
    }
    cuMemHostUnregister(place: *mut c_void) {
        on_state("cuMemHostUnregister", |state| {
            let known = state.pinned.remove(&place.addr());
            known.map(drop).ok_or(code::HOST_MEMORY_NOT_REGISTERED)
        })
    }

    cuMemGetAllocationGranularity(
        _properties: *const sys::CUmemAllocationProp,
        _option: sys::CUmemAllocationGranularity_flags
    ) -> usize {
        on_state("cuMemGetAllocationGranularity", |_| Ok(PAGE as usize))
    }
    cuMemAddressReserve(
        bytes: usize, align: usize, _wish: sys::CUdeviceptr, _flags: c_ulonglong
    ) -> sys::CUdeviceptr {
        on_state("cuMemAddressReserve", |state| {
            state.memory.reserve(bytes as u64, align as u64)
        })
    }
    cuMemAddressFree(base: sys::CUdeviceptr, bytes: usize) {
        on_state("cuMemAddressFree", |state| state.memory.unreserve(base, bytes as u64))
    }
    cuMemCreate(
        bytes: usize, properties: *const sys::CUmemAllocationProp, _flags: c_ulonglong
    ) -> sys::CUmemGenericAllocationHandle {
        on_state("cuMemCreate", |state| {
            // SAFETY: the driver's contract: readable; the device's number is the fourth word.
            let device = unsafe { read_word(properties, 3) };
            // SAFETY: as above; the kinds of handles are the second word.
            let kinds = unsafe { read_word(properties, 1) };
            state.memory.create(device as usize, bytes as u64, kinds)
        })
    }
    cuMemRelease(handle: sys::CUmemGenericAllocationHandle) {
        on_state("cuMemRelease", |state| state.memory.release(handle))
    }
    cuMemMap(
        at: sys::CUdeviceptr, bytes: usize, _offset: usize,
        handle: sys::CUmemGenericAllocationHandle, _flags: c_ulonglong
    ) {
        on_state("cuMemMap", |state| state.memory.map(at, bytes as u64, handle))
    }
    cuMemUnmap(at: sys::CUdeviceptr, bytes: usize) {
        on_state("cuMemUnmap", |state| state.memory.unmap(at, bytes as u64))
    }
    cuMemSetAccess(
        at: sys::CUdeviceptr, bytes: usize, access: *const sys::CUmemAccessDesc, _count: usize
    ) {
        // SAFETY: the driver's contract: readable; the device's number is the second word.
        let device = unsafe { read_word(access, 1) };
        // SAFETY: as above; the rights are the third word.
        let rights = unsafe { read_word(access, 2) };
        on_state("cuMemSetAccess", |state| {
            state.memory.set_access(at, bytes as u64, device as usize, rights != 0)
        })
    }
    cuMemExportToShareableHandle(
        out: *mut c_void, handle: sys::CUmemGenericAllocationHandle,
        kind: sys::CUmemAllocationHandleType, _flags: c_ulonglong
    ) {
        on_state("cuMemExportToShareableHandle", |state| match kind.0 {
            POSIX_FD => {
                let descriptor = state.memory.export_descriptor(handle)?.into_raw_fd();
                // SAFETY: the driver's contract: a place for this kind of handle.
                unsafe { put(out.cast::<c_int>(), descriptor) }
            }
            FABRIC => {
                let handle = tagged(state.memory.export_fabric(handle)?, FABRIC_TAG);
                // SAFETY: the driver's contract: a place for this kind of handle.
                unsafe { put(out.cast::<[u8; 64]>(), handle) }
            }
            _ => Err(code::NOT_SUPPORTED),
        })
    }
    cuMemImportFromShareableHandle(
        value: *mut c_void, kind: sys::CUmemAllocationHandleType
    ) -> sys::CUmemGenericAllocationHandle {
        on_state("cuMemImportFromShareableHandle", |state| match kind.0 {
            POSIX_FD => {
                let number = c_int::try_from(value.addr()).map_err(|_| code::INVALID_VALUE)?;
                // SAFETY: the driver's contract: in the place of a pointer, an open descriptor.
                let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
                state.memory.import_descriptor(descriptor)
            }
            FABRIC => {
                // SAFETY: the driver's contract: such a handle.
                let handle = unsafe { value.cast::<[u8; 64]>().read() };
                state.memory.import_fabric(untagged(handle, FABRIC_TAG)?)
            }
            _ => Err(code::NOT_SUPPORTED),
        })
    }

    cuDeviceGetUuid_v2(device: sys::CUdevice) -> sys::CUuuid {
        on_state("cuDeviceGetUuid_v2", |_| Ok(sys::CUuuid { bytes: [device as c_char + 1; 16] }))
    }
    cuIpcGetMemHandle(addr: sys::CUdeviceptr) -> sys::CUipcMemHandle {
        on_state("cuIpcGetMemHandle", |state| {
            if !state.memory.is_direct(addr) {
                return Err(code::INVALID_VALUE);
            }
            Ok(sys::CUipcMemHandle { reserved: tagged(addr, MEMORY_TAG).map(|b| b as c_char) })
        })
    }
    cuIpcOpenMemHandle_v2(handle: sys::CUipcMemHandle, _flags: c_uint) -> sys::CUdeviceptr {
        on_state("cuIpcOpenMemHandle_v2", |state| {
            let addr = untagged(handle.reserved.map(|byte| byte as u8), MEMORY_TAG)?;
            let device = current(state)?;
            state.memory.open(addr, device)
        })
    }
    cuIpcCloseMemHandle(addr: sys::CUdeviceptr) {
        on_state("cuIpcCloseMemHandle", |state| state.memory.close(addr))
    }
    cuIpcGetEventHandle(event: sys::CUevent) -> sys::CUipcEventHandle {
        on_state("cuIpcGetEventHandle", |state| {
            let known = state.events.get(&(event as usize)).filter(|event| event.shared);
            known.ok_or(code::INVALID_HANDLE)?;
            let handle = tagged(event as u64, EVENT_TAG);
            Ok(sys::CUipcEventHandle { reserved: handle.map(|byte| byte as c_char) })
        })
    }
    cuIpcOpenEventHandle(handle: sys::CUipcEventHandle) -> sys::CUevent {
        on_state("cuIpcOpenEventHandle", |state| {
            let of = untagged(handle.reserved.map(|byte| byte as u8), EVENT_TAG)? as usize;
            if !state.events.contains_key(&of) {
                return Err(code::INVALID_HANDLE);
            }
            let device = current(state)?;
            let opened = state.handle();
            state.events.insert(opened, Event::opened(device, of));
            Ok(std::ptr::without_provenance_mut(opened))
        })
    }

    cuDeviceGetDefaultMemPool(device: sys::CUdevice) -> sys::CUmemoryPool {
        on_state("cuDeviceGetDefaultMemPool", |state| {
            let handle = state.pools.default_of(device as usize)?;
            Ok(std::ptr::without_provenance_mut(handle))
        })
    }
    cuMemPoolCreate(properties: *const sys::CUmemPoolProps) -> sys::CUmemoryPool {
        // SAFETY: the driver's contract: readable; the device's number is the fourth word.
        let device = unsafe { read_word(properties, 3) };
        // SAFETY: as above; the bound is the seventh and eighth word.
        let low = unsafe { read_word(properties, 6) };
        // SAFETY: as above.
        let high = unsafe { read_word(properties, 7) };
        on_state("cuMemPoolCreate", |state| {
            let bytes_max = u64::from(low) | u64::from(high) << 32;
            let handle = state.handle();
            state.pools.create(handle, device as usize, bytes_max)?;
            Ok(std::ptr::without_provenance_mut(handle))
        })
    }
    cuMemPoolDestroy(pool: sys::CUmemoryPool) {
        on_state("cuMemPoolDestroy", |state| state.pools.destroy(pool as usize))
    }
    cuMemPoolSetAttribute(
        pool: sys::CUmemoryPool, which: sys::CUmemPool_attribute, value: *mut c_void
    ) {
        let value = match which as u32 {
            // SAFETY: the driver's contract: a 32-bit number.
            FIRST_FLAG..=LAST_FLAG => u64::from(unsafe { value.cast::<u32>().read() }),
            // SAFETY: the driver's contract: a 64-bit number.
            _ => unsafe { value.cast::<u64>().read() },
        };
        on_state("cuMemPoolSetAttribute", |state| {
            state.pools.set(pool as usize, which as u32, value)
        })
    }
    cuMemPoolGetAttribute(
        pool: sys::CUmemoryPool, which: sys::CUmemPool_attribute, value: *mut c_void
    ) {
        let answer = on_state("cuMemPoolGetAttribute", |state| {
            state.pools.get(pool as usize, which as u32)
        })?;
        match which as u32 {
            // SAFETY: the driver's contract: a place for a 32-bit number.
            FIRST_FLAG..=LAST_FLAG => unsafe { put(value.cast::<u32>(), answer as u32) },
            // SAFETY: the driver's contract: a place for a 64-bit number.
            _ => unsafe { put(value.cast::<u64>(), answer) },
        }
    }
    cuMemPoolTrimTo(pool: sys::CUmemoryPool, _keep: usize) {
        // The imitation's pools keep nothing.
        on_state("cuMemPoolTrimTo", |state| state.pools.find(pool as usize).map(drop))
    }
    cuMemAllocFromPoolAsync(
        bytes: usize, pool: sys::CUmemoryPool, stream: sys::CUstream
    ) -> sys::CUdeviceptr {
        on_stream("cuMemAllocFromPoolAsync", stream, |state, stream| {
            let device = state.streams.get(&stream).ok_or(code::INVALID_HANDLE)?.device;
            let taken = (bytes as u64).next_multiple_of(PAGE);
            state.pools.claim(pool as usize, device, taken)?;
            let addr = state.memory.allocate(device, bytes as u64);
            match addr {
                Ok(addr) => state.pools.enter(pool as usize, addr, taken),
                Err(_) => state.pools.unclaim(pool as usize, taken),
            }
            addr
        })
    }
    cuMemFreeAsync(addr: sys::CUdeviceptr, stream: sys::CUstream) {
        on_stream("cuMemFreeAsync", stream, |state, stream| {
            state.queue(stream, Work::Free { addr })
        })
    }

    cuModuleLoadData(_text: *const c_void) -> sys::CUmodule {
        on_state("cuModuleLoadData", |state| {
            current(state)?;
            Ok(std::ptr::without_provenance_mut(state.handle()))
        })
    }
    cuModuleGetFunction(_module: sys::CUmodule, name: *const c_char) -> sys::CUfunction {
        // SAFETY: the driver's contract: a string that ends in NUL.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        on_state("cuModuleGetFunction", |state| {
            if !state.kernels.contains_key(&name) {
                return Err(code::NOT_FOUND);
            }
            let handle = state.handle();
            state.kernel_handles.insert(handle, name);
            Ok(std::ptr::without_provenance_mut(handle))
        })
    }
    cuModuleUnload(_module: sys::CUmodule) { on_state("cuModuleUnload", |_| Ok(())) }
    cuLaunchKernel(
        kernel: sys::CUfunction,
        _gx: c_uint, _gy: c_uint, _gz: c_uint, _bx: c_uint, _by: c_uint, _bz: c_uint,
        _shared: c_uint, stream: sys::CUstream,
        places: *mut *mut c_void, _extra: *mut *mut c_void
    ) {
        on_stream("cuLaunchKernel", stream, |state, stream| {
            let name = state.kernel_handles.get(&(kernel as usize)).ok_or(code::INVALID_HANDLE)?;
            let kernel = *state.kernels.get(name).ok_or(code::INVALID_HANDLE)?;
            let argument = |index| {
                let place = places.wrapping_add(index);
                // SAFETY: as many places as the kernel has parameters, by the caller's promise.
                let place = unsafe { place.read() };
                // SAFETY: `Kernel::launch` keeps every argument in 64 bits.
                unsafe { place.cast::<u64>().read() }
            };
            let arguments = (0..kernel.parameters).map(argument).collect();
            state.queue(stream, Work::Run { kernel, arguments })
        })
    }

    cuThreadExchangeStreamCaptureMode(mode: *mut sys::CUstreamCaptureMode) {
        on_state("cuThreadExchangeStreamCaptureMode", |_| {
            let mode = mode.cast::<u32>();
            // SAFETY: the driver's contract: a place that holds a mode, as large as a C enum.
            let wanted = unsafe { mode.read() };
            // SAFETY: as above.
            unsafe { put(mode, replace_capture_mode(wanted)) }
        })
    }
    cuStreamBeginCapture_v2(stream: sys::CUstream, mode: sys::CUstreamCaptureMode) {
        if (stream as usize) <= crate::Stream::LEGACY {
            return Err(code::STREAM_CAPTURE_UNSUPPORTED);
        }
        on_stream("cuStreamBeginCapture_v2", stream, |state, stream| {
            state.begin_capture(stream, mode as u32)
        })
    }
    cuStreamEndCapture(stream: sys::CUstream, out: *mut sys::CUgraph) {
        let graph = on_stream("cuStreamEndCapture", stream, |state, stream| {
            Ok(std::ptr::without_provenance_mut(state.end_capture(stream)?))
        })?;
        // SAFETY: the driver's contract: a place for the result.
        unsafe { put(out, graph) }
    }
    cuGraphInstantiateWithFlags(graph: sys::CUgraph, _flags: c_ulonglong) -> sys::CUgraphExec {
        on_state("cuGraphInstantiateWithFlags", |state| {
            let work = state.captures.graphs.get(&(graph as usize)).ok_or(code::INVALID_HANDLE)?.clone();
            let handle = state.handle();
            state.captures.graphs.insert(handle, work);
            Ok(std::ptr::without_provenance_mut(handle))
        })
    }
    cuGraphLaunch(graph: sys::CUgraphExec, stream: sys::CUstream) {
        on_stream("cuGraphLaunch", stream, |state, stream| {
            let work = state.captures.graphs.get(&(graph as usize)).ok_or(code::INVALID_HANDLE)?.clone();
            work.into_iter().try_for_each(|work| state.queue(stream, work))
        })
    }
    cuGraphExecDestroy(graph: sys::CUgraphExec) {
        on_state("cuGraphExecDestroy", |state| {
            state.captures.graphs.remove(&(graph as usize)).map(drop).ok_or(code::INVALID_HANDLE)
        })
    }
    cuGraphDestroy(graph: sys::CUgraph) {
        on_state("cuGraphDestroy", |state| {
            state.captures.graphs.remove(&(graph as usize)).map(drop).ok_or(code::INVALID_HANDLE)
        })
    }
}
