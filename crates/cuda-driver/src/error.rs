//! The driver's result codes.

use std::fmt;

/// Numbers of the result codes this workspace reacts to (`CUresult` in `cuda.h`; the numbers are
/// part of the driver's ABI and never change).
pub mod code {
    macro_rules! codes {
        ($($(#[$doc:meta])* $short:ident = $number:literal, $name:literal;)*) => {
            $($(#[$doc])* pub const $short: u32 = $number;)*

            /// Number and name of every code listed here.
            pub(crate) const NAMES: &[(u32, &str)] = &[$(($number, $name)),*];
        };
    }

    codes! {
        /// It worked.
        SUCCESS = 0, "CUDA_SUCCESS";
        /// An argument is out of range.
        INVALID_VALUE = 1, "CUDA_ERROR_INVALID_VALUE";
        /// No memory, or no address space.
        OUT_OF_MEMORY = 2, "CUDA_ERROR_OUT_OF_MEMORY";
        /// `cuInit` has not been called.
        NOT_INITIALIZED = 3, "CUDA_ERROR_NOT_INITIALIZED";
        /// The driver is shutting down: the process is exiting.
        DEINITIALIZED = 4, "CUDA_ERROR_DEINITIALIZED";
        /// The toolkit's link-time stub was loaded in place of the driver.
        STUB_LIBRARY = 34, "CUDA_ERROR_STUB_LIBRARY";
        /// The device is reserved or not available to this process.
        DEVICE_UNAVAILABLE = 46, "CUDA_ERROR_DEVICE_UNAVAILABLE";
        /// No GPU.
        NO_DEVICE = 100, "CUDA_ERROR_NO_DEVICE";
        /// No device of that number.
        INVALID_DEVICE = 101, "CUDA_ERROR_INVALID_DEVICE";
        /// No context is current, or it has been destroyed.
        INVALID_CONTEXT = 201, "CUDA_ERROR_INVALID_CONTEXT";
        /// Memory of the device failed.
        ECC_UNCORRECTABLE = 214, "CUDA_ERROR_ECC_UNCORRECTABLE";
        /// The PTX text does not compile.
        INVALID_PTX = 218, "CUDA_ERROR_INVALID_PTX";
        /// The link between devices failed.
        NVLINK_UNCORRECTABLE = 220, "CUDA_ERROR_NVLINK_UNCORRECTABLE";
        /// Not possible in this state.
        ILLEGAL_STATE = 401, "CUDA_ERROR_ILLEGAL_STATE";
        /// The answer does not fit the question: the graph has edges with data.
        LOSSY_QUERY = 402, "CUDA_ERROR_LOSSY_QUERY";
        /// No function of that name in the module.
        NOT_FOUND = 500, "CUDA_ERROR_NOT_FOUND";
        /// A call of the operating system failed.
        OPERATING_SYSTEM = 304, "CUDA_ERROR_OPERATING_SYSTEM";
        /// A handle is stale or belongs to another context.
        INVALID_HANDLE = 400, "CUDA_ERROR_INVALID_HANDLE";
        /// Asked about work that is still running; no failure.
        NOT_READY = 600, "CUDA_ERROR_NOT_READY";
        /// A kernel used a wrong address. The context is lost.
        ILLEGAL_ADDRESS = 700, "CUDA_ERROR_ILLEGAL_ADDRESS";
        /// A kernel ran too long. The context is lost.
        LAUNCH_TIMEOUT = 702, "CUDA_ERROR_LAUNCH_TIMEOUT";
        /// Peer access was on already.
        PEER_ACCESS_ALREADY_ENABLED = 704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED";
        /// There is no peer access to take back.
        PEER_ACCESS_NOT_ENABLED = 705, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED";
        /// The context was destroyed.
        CONTEXT_IS_DESTROYED = 709, "CUDA_ERROR_CONTEXT_IS_DESTROYED";
        /// A kernel's assertion failed. The context is lost.
        ASSERT = 710, "CUDA_ERROR_ASSERT";
        /// That host memory is registered already.
        HOST_MEMORY_ALREADY_REGISTERED = 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
        /// That host memory was never registered.
        HOST_MEMORY_NOT_REGISTERED = 713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
        /// A kernel's stack is corrupt. The context is lost.
        HARDWARE_STACK_ERROR = 714, "CUDA_ERROR_HARDWARE_STACK_ERROR";
        /// A kernel met an unknown instruction. The context is lost.
        ILLEGAL_INSTRUCTION = 715, "CUDA_ERROR_ILLEGAL_INSTRUCTION";
        /// A kernel used an odd address. The context is lost.
        MISALIGNED_ADDRESS = 716, "CUDA_ERROR_MISALIGNED_ADDRESS";
        /// A kernel mixed address spaces. The context is lost.
        INVALID_ADDRESS_SPACE = 717, "CUDA_ERROR_INVALID_ADDRESS_SPACE";
        /// A kernel's program counter is out of bounds. The context is lost.
        INVALID_PC = 718, "CUDA_ERROR_INVALID_PC";
        /// A kernel failed for another reason. The context is lost.
        LAUNCH_FAILED = 719, "CUDA_ERROR_LAUNCH_FAILED";
        /// This process may not do that.
        NOT_PERMITTED = 800, "CUDA_ERROR_NOT_PERMITTED";
        /// This device or driver cannot do that.
        NOT_SUPPORTED = 801, "CUDA_ERROR_NOT_SUPPORTED";
        /// The node's services (fabric manager, …) are not up yet.
        SYSTEM_NOT_READY = 802, "CUDA_ERROR_SYSTEM_NOT_READY";
        /// The library and the kernel module are of different versions.
        SYSTEM_DRIVER_MISMATCH = 803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
        /// Forward compatibility is not available on this GPU.
        COMPAT_NOT_SUPPORTED_ON_DEVICE = 804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE";
        /// Not allowed on a stream that is being captured.
        STREAM_CAPTURE_UNSUPPORTED = 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
        /// The capture has been broken by an earlier call.
        STREAM_CAPTURE_INVALIDATED = 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
        /// The captures of two streams cannot become one.
        STREAM_CAPTURE_MERGE = 902, "CUDA_ERROR_STREAM_CAPTURE_MERGE";
        /// The stream did not begin the capture.
        STREAM_CAPTURE_UNMATCHED = 903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED";
        /// A stream that was forked off was not joined.
        STREAM_CAPTURE_UNJOINED = 904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED";
        /// Captured work cannot depend on work that is not captured.
        STREAM_CAPTURE_ISOLATION = 905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION";
        /// The legacy stream was used while a blocking stream is being captured.
        STREAM_CAPTURE_IMPLICIT = 906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
        /// The event was recorded inside a capture.
        CAPTURED_EVENT = 907, "CUDA_ERROR_CAPTURED_EVENT";
        /// A capture must end on the thread that began it.
        STREAM_CAPTURE_WRONG_THREAD = 908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD";
        /// The driver does not say.
        UNKNOWN = 999, "CUDA_ERROR_UNKNOWN";
    }
}

/// A driver call that did not return `CUDA_SUCCESS`.
///
/// The driver may report the failure of *earlier*, asynchronous work through any later call; such
/// errors repeat on every call ([`is_sticky`](DriverError::is_sticky)).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DriverError {
    /// The call, by its name in the driver's library (`cuMemAlloc_v2`).
    pub call: &'static str,
    /// Its result; see [`code`].
    pub code: u32,
    /// The driver's name for the result.
    pub name: &'static str,
}

impl DriverError {
    /// An error of `call` with one of the codes listed in [`code`].
    pub fn new(call: &'static str, code: u32) -> Self {
        DriverError { call, code, name: known_name(code).unwrap_or("unrecognized error code") }
    }

    /// Whether the context is lost: a kernel faulted, or the hardware did. Every later call in this
    /// context fails the same way, and only ending the process helps.
    pub fn is_sticky(&self) -> bool {
        matches!(
            self.code,
            code::ECC_UNCORRECTABLE
                | code::NVLINK_UNCORRECTABLE
                | code::ILLEGAL_ADDRESS
                | code::LAUNCH_TIMEOUT
                | code::ASSERT
                | code::HARDWARE_STACK_ERROR
                | code::ILLEGAL_INSTRUCTION
                | code::MISALIGNED_ADDRESS
                | code::INVALID_ADDRESS_SPACE
                | code::INVALID_PC
                | code::LAUNCH_FAILED
        )
    }

    /// Whether the driver or the context has been torn down, as happens while a process exits.
    pub fn is_teardown(&self) -> bool {
        matches!(
            self.code,
            code::DEINITIALIZED | code::CONTEXT_IS_DESTROYED | code::INVALID_CONTEXT
        )
    }
}

/// The name of a code listed in [`code`].
pub(crate) fn known_name(code: u32) -> Option<&'static str> {
    code::NAMES.iter().find(|(number, _)| *number == code).map(|(_, name)| *name)
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {} ({})", self.call, self.name, self.code)
    }
}

impl fmt::Debug for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for DriverError {}

/// A failed call that would have consumed its argument: the argument comes back.
#[derive(Debug)]
pub struct Refused<T> {
    /// What was to be consumed; still owned, still valid.
    pub value: T,
    /// Why it was not.
    pub error: DriverError,
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::driver::sys::CUresult;

    #[test]
    fn names_and_numbers_are_those_of_the_header() {
        use CUresult::*;
        for known in [
            CUDA_ERROR_INVALID_VALUE,
            CUDA_ERROR_OUT_OF_MEMORY,
            CUDA_ERROR_NOT_INITIALIZED,
            CUDA_ERROR_DEINITIALIZED,
            CUDA_ERROR_STUB_LIBRARY,
            CUDA_ERROR_DEVICE_UNAVAILABLE,
            CUDA_ERROR_NO_DEVICE,
            CUDA_ERROR_INVALID_DEVICE,
            CUDA_ERROR_INVALID_CONTEXT,
            CUDA_ERROR_ECC_UNCORRECTABLE,
            CUDA_ERROR_INVALID_PTX,
            CUDA_ERROR_NVLINK_UNCORRECTABLE,
            CUDA_ERROR_ILLEGAL_STATE,
            CUDA_ERROR_LOSSY_QUERY,
            CUDA_ERROR_NOT_FOUND,
            CUDA_ERROR_OPERATING_SYSTEM,
            CUDA_ERROR_INVALID_HANDLE,
            CUDA_ERROR_NOT_READY,
            CUDA_ERROR_ILLEGAL_ADDRESS,
            CUDA_ERROR_LAUNCH_TIMEOUT,
            CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
            CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,
            CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUDA_ERROR_ASSERT,
            CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
            CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
            CUDA_ERROR_HARDWARE_STACK_ERROR,
            CUDA_ERROR_ILLEGAL_INSTRUCTION,
            CUDA_ERROR_MISALIGNED_ADDRESS,
            CUDA_ERROR_INVALID_ADDRESS_SPACE,
            CUDA_ERROR_INVALID_PC,
            CUDA_ERROR_LAUNCH_FAILED,
            CUDA_ERROR_NOT_PERMITTED,
            CUDA_ERROR_NOT_SUPPORTED,
            CUDA_ERROR_SYSTEM_NOT_READY,
            CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
            CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE,
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
            CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            CUDA_ERROR_STREAM_CAPTURE_MERGE,
            CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
            CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
            CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
            CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
            CUDA_ERROR_CAPTURED_EVENT,
            CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
            CUDA_ERROR_UNKNOWN,
        ] {
            assert_eq!(known_name(known as u32), Some(format!("{known:?}").as_str()));
        }
        // One more than listed above: success.
        assert_eq!(code::NAMES.len(), 48);
        assert_eq!(known_name(CUDA_SUCCESS as u32), Some("CUDA_SUCCESS"));
    }

    #[test]
    fn an_error_names_the_call_and_the_code() {
        let error = DriverError::new("cuMemAlloc_v2", code::OUT_OF_MEMORY);
        assert_eq!(error.to_string(), "cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)");
        assert!(!error.is_sticky());
        assert!(DriverError::new("cuMemFree_v2", code::DEINITIALIZED).is_teardown());
        assert!(DriverError::new("cuEventQuery", code::ILLEGAL_ADDRESS).is_sticky());
    }
}
