//! What can go wrong.

use alloc_core::share::ImportError;
use alloc_core::{AllocError, BackendOp};

/// The result of this crate's operations on a backend with errors `E`.
pub type Result<T, E> = std::result::Result<T, IpcError<E>>;

/// A failed send or receive. Nothing of it stays open or lent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IpcError<E: std::error::Error + 'static> {
    /// The channel failed; [`alloc_shm::Error::PeerGone`] if the other process is gone.
    #[error(transparent)]
    Channel(#[from] alloc_shm::Error),
    /// The allocator refused to share the block.
    #[error(transparent)]
    Allocator(#[from] AllocError<E>),
    /// What was received could not be opened.
    #[error(transparent)]
    Import(#[from] ImportError<E>),
    /// A backend call failed.
    #[error("cannot {op}: {source}")]
    Backend {
        /// The call.
        op: BackendOp,
        /// What it said.
        source: E,
    },
    /// A message is not what this crate sends, or something of it was lost. The next one may be in
    /// order.
    #[error("not a shared block: {0}")]
    Message(&'static str),
    /// The note is longer than [`NOTE_BYTES_MAX`](crate::NOTE_BYTES_MAX).
    #[error("a note of {bytes} bytes: at most {max} go with a block", max = crate::NOTE_BYTES_MAX)]
    Note {
        /// Its length.
        bytes: usize,
    },
}
