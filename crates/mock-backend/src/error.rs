//! Why a simulated driver call failed.

use std::error::Error;
use std::fmt;

use alloc_core::backend::{BackendError, ErrorKind};

use crate::Call;

/// Error of a simulated driver call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MockError {
    call: Call,
    kind: ErrorKind,
    why: &'static str,
    injected: bool,
}

impl MockError {
    pub(crate) fn new(call: Call, kind: ErrorKind, why: &'static str) -> Self {
        MockError { call, kind, why, injected: false }
    }

    pub(crate) fn injected(call: Call, kind: ErrorKind) -> Self {
        MockError { call, kind, why: "injected fault", injected: true }
    }

    /// The call that failed.
    pub fn call(&self) -> Call {
        self.call
    }

    /// Whether a [`Fault`](crate::Fault) asked for this failure.
    pub fn is_injected(&self) -> bool {
        self.injected
    }
}

impl fmt::Display for MockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "simulated {} failed: {} ({:?})", self.call, self.why, self.kind)
    }
}

impl Error for MockError {}

impl BackendError for MockError {
    fn kind(&self) -> ErrorKind {
        self.kind
    }
}
