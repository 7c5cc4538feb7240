//! Pinning and unpinning.

use super::map::{Mapping, page_bytes, unmap};
use super::{Touch, TouchPool, pointer};
use crate::error::PinError;
use alloc_core::Addr;
use alloc_core::backend::Refused;
use alloc_core::host::{CopyRequest, PinnedSegment};
use cuda_driver::{Context, DriverError, HostFlags};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A contiguous range of pinned memory. Dropping it leaks the memory, because work may still use it.
#[derive(Debug)]
#[must_use = "dropping it leaks the memory"]
pub struct PinnedMemory {
    context: Arc<Context>,
    start: usize,
    bytes: u64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// By the driver, from this address on.
    Allocated { place: usize },
    /// Our own mapping, registered in pieces of so many bytes, the last one shorter.
    Registered { piece_bytes: u64, flags: HostFlags },
}

impl PinnedSegment for PinnedMemory {
    fn base(&self) -> Addr {
        Addr::new(self.start as u64)
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// How to register memory.
#[derive(Debug)]
pub(crate) struct How<'a> {
    pub(crate) flags: HostFlags,
    pub(crate) pool: &'a TouchPool,
    pub(crate) threads: usize,
    pub(crate) touch: Touch,
    pub(crate) piece_bytes_max: u64,
    pub(crate) node: Option<u32>,
    pub(crate) huge_pages: bool,
}

/// How long registering memory took, by part. Touching and registering may overlap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PinTimes {
    /// Mapping it.
    pub map: Duration,
    /// Making its pages, until the last thread was done.
    pub touch: Duration,
    /// The driver's calls.
    pub register: Duration,
}

impl PinnedMemory {
    /// Lets the driver allocate and pin.
    pub(crate) fn allocate<E>(
        context: &Arc<Context>,
        bytes: u64,
        align: u64,
        flags: HostFlags,
    ) -> Result<Self, PinError<E>> {
        let allocate = |room: u64| -> Result<Self, PinError<E>> {
            let place = context.host_allocate(room, flags)?.as_ptr().expose_provenance();
            let start = place.next_multiple_of(align as usize);
            let kind = Kind::Allocated { place };
            Ok(PinnedMemory { context: context.clone(), start, bytes, kind })
        };
        let memory = allocate(bytes)?;
        if matches!(memory.kind, Kind::Allocated { place } if place == memory.start) {
            return Ok(memory);
        }
        // The driver aligns large requests to pages and does not say what it does with small ones.
        memory.unpin().map_err(|refused| refused.error)?;
        allocate(bytes + align - 1)
    }

    /// Maps memory, touches it with several threads, and registers it; how long that took.
    pub(crate) fn register<E>(
        context: &Arc<Context>,
        bytes: u64,
        how: &How<'_>,
    ) -> Result<(Self, PinTimes), PinError<E>> {
        let page = page_bytes() as u64;
        let bytes = bytes.next_multiple_of(page);
        let begin = Instant::now();
        let mapping = Mapping::new(bytes as usize, how.node, how.huge_pages)?;
        let map = begin.elapsed();
        let memory = PinnedMemory {
            context: context.clone(),
            start: mapping.start(),
            bytes,
            kind: Kind::Registered {
                piece_bytes: (how.piece_bytes_max / page * page).max(page),
                flags: how.flags,
            },
        };
        let register = || {
            let begin = Instant::now();
            let result = memory.register_pieces(memory.pieces().len());
            (result, begin.elapsed())
        };
        let range = (memory.start, bytes as usize);
        // SAFETY: whole pages of a mapping that nobody else knows yet.
        let touched = unsafe { how.pool.touch(range, how.threads, how.touch, register) };
        let ((result, register), touch) = touched;
        result?;
        // From here on the value owns it.
        mapping.into_start();
        Ok((memory, PinTimes { map, touch, register }))
    }

    /// Gives the memory back.
    pub(crate) fn unpin<E>(self) -> Result<(), Refused<Self, PinError<E>>> {
        let result = match self.kind {
            Kind::Allocated { place } => self.free_allocated(place),
            Kind::Registered { .. } => self.unregister_pieces(self.pieces().len()),
        };
        if let Err(error) = result {
            return Err(Refused { value: self, error: error.into() });
        }
        if let Kind::Registered { .. } = self.kind {
            unmap(self.start, self.bytes as usize);
        }
        Ok(())
    }

    fn free_allocated(&self, place: usize) -> Result<(), DriverError> {
        let Some(place) = pointer(place as u64) else { return Ok(()) };
        // SAFETY: from `host_allocate` of this context, and not freed since, as that consumes the
        // value; the allocator gives memory back only when nothing uses it.
        unsafe { self.context.host_free(place) }
    }

    /// Offset and length of each registration.
    fn pieces(&self) -> Vec<(u64, u64)> {
        match self.kind {
            Kind::Allocated { .. } => vec![(0, self.bytes)],
            Kind::Registered { piece_bytes, .. } => {
                let offsets = (0..self.bytes).step_by(piece_bytes as usize);
                offsets.map(|offset| (offset, piece_bytes.min(self.bytes - offset))).collect()
            }
        }
    }

    /// If the memory is registered in several pieces: the length of all but the last.
    pub(crate) fn piece_bytes(&self) -> Option<u64> {
        match self.kind {
            Kind::Registered { piece_bytes, .. } if piece_bytes < self.bytes => Some(piece_bytes),
            _ => None,
        }
    }

    /// Registers the first `count` pieces, or none of them.
    fn register_pieces(&self, count: usize) -> Result<(), DriverError> {
        let Kind::Registered { flags, .. } = self.kind else { return Ok(()) };
        for (done, (offset, bytes)) in self.pieces().into_iter().take(count).enumerate() {
            let Some(place) = pointer(self.start as u64 + offset) else { continue };
            // SAFETY: inside the mapping, which lives until the memory is unregistered.
            if let Err(error) = unsafe { self.context.host_register(place, bytes, flags) } {
                // What cannot be undone either stays registered until the context is gone.
                let _ = self.unregister_pieces(done);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Unregisters the first `count` pieces, or none of them.
    fn unregister_pieces(&self, count: usize) -> Result<(), DriverError> {
        for (done, (offset, _)) in self.pieces().into_iter().take(count).enumerate() {
            let Some(place) = pointer(self.start as u64 + offset) else { continue };
            // SAFETY: the allocator gives memory back only when no work uses it.
            if let Err(error) = unsafe { self.context.host_unregister(place) } {
                // What cannot be registered again works as ordinary memory, only slower.
                let _ = self.register_pieces(done);
                return Err(error);
            }
        }
        Ok(())
    }
}

/// Copies between two allocations.
pub(crate) fn copy(request: &CopyRequest) {
    let (Some(to), Some(from)) = (pointer(request.to().get()), pointer(request.from().get()))
    else {
        return;
    };
    // SAFETY: only the allocator over this backend makes such a request, as the backend is never
    // handed out: both ranges lie in live allocations of its pinned memory, are apart, and belong to
    // the caller, the target exclusively.
    unsafe { to.copy_from_nonoverlapping(from, request.bytes() as usize) };
}
