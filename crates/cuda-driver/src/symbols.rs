//! The driver's entry points as a table of function pointers, filled once.
//!
//! cudarc's own wrappers look a symbol up on its first call and panic when it is missing; a table
//! turns that into one error at start. It also takes results as plain numbers: a driver newer than
//! the header may return a code that the header's enum does not have, and such an enum value would
//! be undefined behaviour.

use crate::loader::LoadError;
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::NonNull;

/// One entry point: its name for messages and its address.
pub(crate) struct Entry<F> {
    pub(crate) name: &'static str,
    pub(crate) call: F,
}

/// Calls an entry point and turns its result into a `Result<(), DriverError>`. To be used inside
/// `unsafe`, whose note says why the arguments are right.
macro_rules! call {
    ($driver:expr, $entry:ident($($arg:expr),* $(,)?)) => {{
        let entry = &$driver.symbols().$entry;
        let code = (entry.call)($($arg),*);
        $driver.check(entry.name, code)
    }};
}
pub(crate) use call;

macro_rules! symbols {
    ($($field:ident = $name:ident($($arg:ty),* $(,)?);)*) => {
        /// Every entry point that this crate calls.
        pub(crate) struct Symbols {
            $(pub(crate) $field: Entry<unsafe extern "C" fn($($arg),*) -> u32>,)*
        }

        impl Symbols {
            /// Looks every name up.
            ///
            /// # Safety
            /// What `lookup` finds must be the driver's function of that name, or one with the same
            /// C signature, and stay loaded.
            pub(crate) unsafe fn resolve(
                lookup: &dyn Fn(&'static CStr) -> Option<NonNull<c_void>>,
            ) -> Result<Symbols, LoadError> {
                $(
                    let name = c_name(concat!(stringify!($name), "\0"));
                    let address = lookup(name)
                        .ok_or(LoadError::MissingSymbol { name: stringify!($name) })?;
                    // SAFETY: the caller vouches for the signature; data and function pointers are
                    // of one size wherever dlsym exists.
                    let function = unsafe {
                        std::mem::transmute::<
                            NonNull<c_void>,
                            unsafe extern "C" fn($($arg),*) -> u32,
                        >(address)
                    };
                    let $field = Entry { name: stringify!($name), call: function };
                )*
                Ok(Symbols { $($field),* })
            }

            /// The names, for tests.
            #[cfg(all(test, feature = "fake"))]
            pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),*];
        }

        /// The type of each function, under its name, for the imitation driver to agree with.
        #[cfg(feature = "fake")]
        #[expect(non_camel_case_types, reason = "these are the driver's names")]
        pub(crate) mod types {
            use super::*;
            $(pub(crate) type $name = unsafe extern "C" fn($($arg),*) -> u32;)*
        }

        // The arguments are those of cudarc's declarations, which are generated from the header.
        const _: () = {
            $(declared!($name($($arg),*));)*
        };
    };
}

/// Compares an entry point with cudarc's declaration.
macro_rules! declared {
    // Headers of CUDA 13 do not declare these any more. The library still has them, for programs that
    // were built earlier.
    (cuStreamGetCaptureInfo_v2($($arg:ty),*)) => {};
    (cuGraphNodeGetDependencies($($arg:ty),*)) => {};
    ($name:ident($($arg:ty),*)) => {
        let _: unsafe fn($($arg),*) -> sys::CUresult = sys::$name;
    };
}

/// A literal that ends in NUL as a C string.
const fn c_name(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a symbol's name ends in NUL and has no other"),
    }
}

symbols! {
    init = cuInit(c_uint);

    device_get_count = cuDeviceGetCount(*mut c_int);
    device_get = cuDeviceGet(*mut sys::CUdevice, c_int);
    device_get_name = cuDeviceGetName(*mut c_char, c_int, sys::CUdevice);
    device_get_uuid = cuDeviceGetUuid_v2(*mut sys::CUuuid, sys::CUdevice);
    device_total_mem = cuDeviceTotalMem_v2(*mut usize, sys::CUdevice);
    device_get_attribute = cuDeviceGetAttribute(*mut c_int, sys::CUdevice_attribute, sys::CUdevice);
    device_can_access_peer = cuDeviceCanAccessPeer(*mut c_int, sys::CUdevice, sys::CUdevice);
    primary_ctx_retain = cuDevicePrimaryCtxRetain(*mut sys::CUcontext, sys::CUdevice);
    primary_ctx_release = cuDevicePrimaryCtxRelease_v2(sys::CUdevice);

    ctx_get_current = cuCtxGetCurrent(*mut sys::CUcontext);
    ctx_push_current = cuCtxPushCurrent_v2(sys::CUcontext);
    ctx_pop_current = cuCtxPopCurrent_v2(*mut sys::CUcontext);
    ctx_synchronize = cuCtxSynchronize();
    ctx_get_device = cuCtxGetDevice(*mut sys::CUdevice);
    ctx_enable_peer_access = cuCtxEnablePeerAccess(sys::CUcontext, c_uint);
    ctx_disable_peer_access = cuCtxDisablePeerAccess(sys::CUcontext);

    stream_create = cuStreamCreateWithPriority(*mut sys::CUstream, c_uint, c_int);
    stream_destroy = cuStreamDestroy_v2(sys::CUstream);
    stream_query = cuStreamQuery(sys::CUstream);
    stream_synchronize = cuStreamSynchronize(sys::CUstream);
    stream_wait_event = cuStreamWaitEvent(sys::CUstream, sys::CUevent, c_uint);
    stream_get_capture_info = cuStreamGetCaptureInfo_v2(
        sys::CUstream,
        *mut sys::CUstreamCaptureStatus,
        *mut c_ulonglong,
        *mut sys::CUgraph,
        *mut *const sys::CUgraphNode,
        *mut usize,
    );
    stream_get_ctx = cuStreamGetCtx(sys::CUstream, *mut sys::CUcontext);
    stream_get_id = cuStreamGetId(sys::CUstream, *mut c_ulonglong);
    launch_host_func = cuLaunchHostFunc(sys::CUstream, sys::CUhostFn, *mut c_void);

    event_create = cuEventCreate(*mut sys::CUevent, c_uint);
    event_record = cuEventRecord(sys::CUevent, sys::CUstream);
    event_query = cuEventQuery(sys::CUevent);
    event_synchronize = cuEventSynchronize(sys::CUevent);
    event_destroy = cuEventDestroy_v2(sys::CUevent);

    mem_alloc = cuMemAlloc_v2(*mut sys::CUdeviceptr, usize);
    mem_free = cuMemFree_v2(sys::CUdeviceptr);
    mem_get_info = cuMemGetInfo_v2(*mut usize, *mut usize);
    memcpy_htod = cuMemcpyHtoD_v2(sys::CUdeviceptr, *const c_void, usize);
    memcpy_dtoh = cuMemcpyDtoH_v2(*mut c_void, sys::CUdeviceptr, usize);
    memcpy_htod_async = cuMemcpyHtoDAsync_v2(sys::CUdeviceptr, *const c_void, usize, sys::CUstream);
    memcpy_dtoh_async = cuMemcpyDtoHAsync_v2(*mut c_void, sys::CUdeviceptr, usize, sys::CUstream);
    memcpy_dtod_async =
        cuMemcpyDtoDAsync_v2(sys::CUdeviceptr, sys::CUdeviceptr, usize, sys::CUstream);
    memset_d8_async = cuMemsetD8Async(sys::CUdeviceptr, u8, usize, sys::CUstream);
    memset_d32_async = cuMemsetD32Async(sys::CUdeviceptr, c_uint, usize, sys::CUstream);

    mem_host_alloc = cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    mem_free_host = cuMemFreeHost(*mut c_void);
    mem_host_register = cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    mem_host_unregister = cuMemHostUnregister(*mut c_void);

    mem_get_allocation_granularity = cuMemGetAllocationGranularity(
        *mut usize,
        *const sys::CUmemAllocationProp,
        sys::CUmemAllocationGranularity_flags,
    );
    mem_address_reserve =
        cuMemAddressReserve(*mut sys::CUdeviceptr, usize, usize, sys::CUdeviceptr, c_ulonglong);
    mem_address_free = cuMemAddressFree(sys::CUdeviceptr, usize);
    mem_create = cuMemCreate(
        *mut sys::CUmemGenericAllocationHandle,
        usize,
        *const sys::CUmemAllocationProp,
        c_ulonglong,
    );
    mem_release = cuMemRelease(sys::CUmemGenericAllocationHandle);
    mem_map =
        cuMemMap(sys::CUdeviceptr, usize, usize, sys::CUmemGenericAllocationHandle, c_ulonglong);
    mem_unmap = cuMemUnmap(sys::CUdeviceptr, usize);
    mem_set_access = cuMemSetAccess(sys::CUdeviceptr, usize, *const sys::CUmemAccessDesc, usize);
    mem_export = cuMemExportToShareableHandle(
        *mut c_void,
        sys::CUmemGenericAllocationHandle,
        sys::CUmemAllocationHandleType,
        c_ulonglong,
    );
    mem_import = cuMemImportFromShareableHandle(
        *mut sys::CUmemGenericAllocationHandle,
        *mut c_void,
        sys::CUmemAllocationHandleType,
    );

    ipc_get_mem_handle = cuIpcGetMemHandle(*mut sys::CUipcMemHandle, sys::CUdeviceptr);
    ipc_open_mem_handle =
        cuIpcOpenMemHandle_v2(*mut sys::CUdeviceptr, sys::CUipcMemHandle, c_uint);
    ipc_close_mem_handle = cuIpcCloseMemHandle(sys::CUdeviceptr);
    ipc_get_event_handle = cuIpcGetEventHandle(*mut sys::CUipcEventHandle, sys::CUevent);
    ipc_open_event_handle = cuIpcOpenEventHandle(*mut sys::CUevent, sys::CUipcEventHandle);

    device_get_default_mem_pool = cuDeviceGetDefaultMemPool(*mut sys::CUmemoryPool, sys::CUdevice);
    mem_pool_set_attribute =
        cuMemPoolSetAttribute(sys::CUmemoryPool, sys::CUmemPool_attribute, *mut c_void);
    mem_pool_get_attribute =
        cuMemPoolGetAttribute(sys::CUmemoryPool, sys::CUmemPool_attribute, *mut c_void);
    mem_pool_trim_to = cuMemPoolTrimTo(sys::CUmemoryPool, usize);
    mem_pool_create = cuMemPoolCreate(*mut sys::CUmemoryPool, *const sys::CUmemPoolProps);
    mem_pool_destroy = cuMemPoolDestroy(sys::CUmemoryPool);
    mem_alloc_from_pool_async =
        cuMemAllocFromPoolAsync(*mut sys::CUdeviceptr, usize, sys::CUmemoryPool, sys::CUstream);
    mem_free_async = cuMemFreeAsync(sys::CUdeviceptr, sys::CUstream);

    module_load_data = cuModuleLoadData(*mut sys::CUmodule, *const c_void);
    module_get_function = cuModuleGetFunction(*mut sys::CUfunction, sys::CUmodule, *const c_char);
    module_unload = cuModuleUnload(sys::CUmodule);
    launch_kernel = cuLaunchKernel(
        sys::CUfunction,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        sys::CUstream,
        *mut *mut c_void,
        *mut *mut c_void,
    );

    thread_exchange_capture_mode = cuThreadExchangeStreamCaptureMode(*mut sys::CUstreamCaptureMode);
    stream_begin_capture = cuStreamBeginCapture_v2(sys::CUstream, sys::CUstreamCaptureMode);
    stream_end_capture = cuStreamEndCapture(sys::CUstream, *mut sys::CUgraph);
    graph_node_get_dependencies =
        cuGraphNodeGetDependencies(sys::CUgraphNode, *mut sys::CUgraphNode, *mut usize);
    graph_instantiate =
        cuGraphInstantiateWithFlags(*mut sys::CUgraphExec, sys::CUgraph, c_ulonglong);
    graph_launch = cuGraphLaunch(sys::CUgraphExec, sys::CUstream);
    graph_exec_destroy = cuGraphExecDestroy(sys::CUgraphExec);
    graph_destroy = cuGraphDestroy(sys::CUgraph);
}
