#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod error;
mod message;
mod producer;
mod receiver;

pub use error::{IpcError, Result};
pub use message::NOTE_BYTES_MAX;
pub use producer::{EVENTS_MAX, Producer, Sender};
pub use receiver::{Received, Receiver};

use alloc_core::backend::SharePages;
use std::os::fd::{AsFd, OwnedFd};

/// Backends whose tokens a socket can carry. Every backend that shares pages by descriptors is one.
pub trait Portable: SharePages<Descriptor: AsFd + From<OwnedFd> + Sync> {}

impl<B: SharePages<Descriptor: AsFd + From<OwnedFd> + Sync>> Portable for B {}
