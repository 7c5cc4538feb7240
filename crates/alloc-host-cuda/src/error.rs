//! What can go wrong, and what it means to the allocator.

use alloc_core::DeviceId;
use alloc_core::backend::{BackendError, ErrorKind};
use cuda_driver::{DriverError, LoadError, code};
use std::fmt;

/// A failed call of the backend. `E` is the error of the source of streams.
#[derive(Debug)]
#[non_exhaustive]
pub enum PinError<E> {
    /// There is no driver, or it does not start.
    Load(LoadError),
    /// A driver call failed.
    Driver(DriverError),
    /// A call to the system failed.
    System {
        /// The call.
        call: &'static str,
        /// Why.
        error: std::io::Error,
    },
    /// A call about a stream or an event failed.
    Stream(E),
    /// The device does not exist.
    NoSuchDevice(DeviceId),
    /// No device was named: memory can be pinned only through one's context.
    NoDevice,
    /// Write-combined memory must be allocated by the driver, ordinary memory cannot become so.
    WriteCombined,
}

impl<E> PinError<E> {
    /// The last failure of the system, of `call`.
    pub(crate) fn last(call: &'static str) -> Self {
        PinError::System { call, error: std::io::Error::last_os_error() }
    }
}

impl<E> From<DriverError> for PinError<E> {
    fn from(error: DriverError) -> Self {
        PinError::Driver(error)
    }
}

impl<E> From<LoadError> for PinError<E> {
    fn from(error: LoadError) -> Self {
        PinError::Load(error)
    }
}

impl<E: BackendError> BackendError for PinError<E> {
    fn kind(&self) -> ErrorKind {
        match self {
            PinError::Driver(error) => kind_of(error),
            PinError::System { error, .. } => match error.raw_os_error() {
                Some(libc::ENOMEM | libc::EAGAIN) => ErrorKind::OutOfMemory,
                _ => ErrorKind::Other,
            },
            PinError::Stream(error) => error.kind(),
            PinError::Load(_) => ErrorKind::DeviceLost,
            PinError::WriteCombined => ErrorKind::Unsupported,
            PinError::NoSuchDevice(_) | PinError::NoDevice => ErrorKind::Other,
        }
    }
}

/// The kind of a result code.
pub(crate) fn kind_of(error: &DriverError) -> ErrorKind {
    match error.code {
        code::OUT_OF_MEMORY => ErrorKind::OutOfMemory,
        code::NOT_SUPPORTED => ErrorKind::Unsupported,
        _ if error.is_teardown() || error.is_sticky() => ErrorKind::DeviceLost,
        _ => ErrorKind::Other,
    }
}

impl<E: fmt::Display> fmt::Display for PinError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PinError::Load(error) => error.fmt(f),
            PinError::Driver(error) => error.fmt(f),
            PinError::System { call, error } => write!(f, "{call} failed: {error}"),
            PinError::Stream(error) => error.fmt(f),
            PinError::NoSuchDevice(device) => write!(f, "there is no {device}"),
            PinError::NoDevice => f.write_str("no device was named through which to pin memory"),
            PinError::WriteCombined => {
                f.write_str("memory that is registered cannot be write-combined")
            }
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for PinError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            PinError::Load(error) => Some(error),
            PinError::Driver(error) => Some(error),
            PinError::System { error, .. } => Some(error),
            PinError::Stream(error) => Some(error),
            PinError::NoSuchDevice(_) | PinError::NoDevice | PinError::WriteCombined => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[derive(Debug)]
    struct Lost;

    impl fmt::Display for Lost {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("lost")
        }
    }

    impl std::error::Error for Lost {}

    impl BackendError for Lost {
        fn kind(&self) -> ErrorKind {
            ErrorKind::DeviceLost
        }
    }

    #[test]
    fn every_failure_the_allocator_reacts_to_has_its_kind() {
        let kind = |error: PinError<Lost>| error.kind();
        let driver = |code| PinError::Driver(DriverError::new("cuMemHostRegister_v2", code));
        let system =
            |errno| PinError::System { call: "mmap", error: io::Error::from_raw_os_error(errno) };
        assert_eq!(kind(driver(code::OUT_OF_MEMORY)), ErrorKind::OutOfMemory);
        assert_eq!(kind(driver(code::DEINITIALIZED)), ErrorKind::DeviceLost);
        assert_eq!(kind(driver(code::NOT_SUPPORTED)), ErrorKind::Unsupported);
        assert_eq!(kind(driver(code::INVALID_VALUE)), ErrorKind::Other);
        assert_eq!(kind(system(libc::ENOMEM)), ErrorKind::OutOfMemory);
        assert_eq!(
            kind(system(libc::EAGAIN)),
            ErrorKind::OutOfMemory,
            "the limit on locked memory"
        );
        assert_eq!(kind(system(libc::EINVAL)), ErrorKind::Other);
        assert_eq!(kind(PinError::Stream(Lost)), ErrorKind::DeviceLost);
    }
}
