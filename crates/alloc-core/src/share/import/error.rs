//! Why memory of another process could not be opened.

use crate::backend::DeviceKey;
use crate::error::BackendOp;
use std::fmt;

/// Why a shared block could not be opened. Nothing stays open of it.
#[derive(Debug)]
#[non_exhaustive]
pub enum ImportError<E> {
    /// The description contradicts itself, or the tokens do not go with it.
    Malformed(&'static str),
    /// No device of the backend is the one that the memory is on. Make it visible to this process.
    NoSuchDevice(DeviceKey),
    /// A backend call failed.
    Backend {
        /// The call.
        op: BackendOp,
        /// What it said.
        source: E,
    },
}

impl<E: fmt::Display> fmt::Display for ImportError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ImportError::Malformed(why) => write!(f, "not a shared block: {why}"),
            ImportError::NoSuchDevice(key) => {
                write!(
                    f,
                    "the memory is on a device that this process does not see: {:02x?}",
                    key.0
                )
            }
            ImportError::Backend { op, source } => write!(f, "cannot {op}: {source}"),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for ImportError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ImportError::Backend { source, .. } => Some(source),
            _ => None,
        }
    }
}
