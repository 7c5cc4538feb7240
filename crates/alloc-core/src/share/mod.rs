//! Memory of other processes: how a block is described to them, and how they open it.
//!
//! The producer calls [`CachingAllocator::share`](crate::CachingAllocator::share); what that returns
//! travels to the consumer, whose [`Importer`] opens it. How it travels, and how the producer learns
//! that a consumer is done, is not this crate's business (`alloc-ipc` does it over sockets).

mod import;

pub use import::{ImportCounts, ImportError, Imported, Importer};

use crate::backend::DeviceKey;
use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;

/// Names a piece of memory among all that any allocator of any process ever had: numbers are not
/// used again, so that it tells an old segment from a new one in the same place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct MemoryId {
    /// Chosen at random by the process.
    pub process: u64,
    /// The allocator and the heap of a segment; pages are numbered without regard to them.
    pub owner: u64,
    /// Counts what that owner had.
    pub serial: u64,
}

/// In place of the owner of a page.
const PAGES: u64 = u64::MAX;

impl MemoryId {
    /// A segment obtained whole.
    pub(crate) fn segment(allocator: u32, heap: u32, serial: u64) -> Self {
        let owner = u64::from(allocator) << 32 | (u64::from(heap) + 1);
        MemoryId { process: process(), owner, serial }
    }

    /// A page. Their numbers are those of the process.
    pub(crate) fn page(serial: u64) -> Self {
        MemoryId { process: process(), owner: PAGES, serial }
    }
}

/// What tells this process from others. Decides nothing.
fn process() -> u64 {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    *PROCESS.get_or_init(|| RandomState::new().hash_one(std::process::id()))
}

/// What a piece of memory is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PieceKind {
    /// A segment obtained whole. A block lies in one.
    Segment,
    /// A page of virtual memory. A block may lie in several, side by side.
    Page,
}

/// Memory that is shared in one piece.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SharedPiece {
    /// Which.
    pub id: MemoryId,
    /// All of its bytes.
    pub bytes: u64,
    /// What it is.
    pub kind: PieceKind,
}

/// A block as another process sees it: plain data.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct SharedBlock {
    /// Where its memory is.
    pub device: DeviceKey,
    /// Where it begins, in bytes from the start of the first piece.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
    /// What it lies in, in order, side by side. A page can occur twice.
    pub pieces: Vec<SharedPiece>,
}

/// The most pieces of one block.
pub const PIECES_MAX: usize = 1 << 20;

impl SharedBlock {
    /// Bytes of all pieces.
    ///
    /// # Errors
    /// What is wrong with the description. One that passes can be mapped and contains its block.
    pub fn span_bytes(&self) -> Result<u64, &'static str> {
        if self.pieces.is_empty() || self.pieces.len() > PIECES_MAX {
            return Err("no pieces, or too many");
        }
        let is_segment = |piece: &SharedPiece| piece.kind == PieceKind::Segment;
        if self.pieces.len() > 1 && self.pieces.iter().any(is_segment) {
            return Err("a segment beside other pieces");
        }
        if self.pieces.iter().any(|piece| piece.bytes == 0) {
            return Err("an empty piece");
        }
        let add = |sum: u64, piece: &SharedPiece| sum.checked_add(piece.bytes);
        let span = self.pieces.iter().try_fold(0, add).filter(|span| *span < 1 << 60);
        let span = span.ok_or("more bytes than any device has")?;
        let end = self.offset.checked_add(self.bytes);
        if self.bytes == 0 || end.is_none_or(|end| end > span) {
            return Err("a block outside its pieces");
        }
        Ok(span)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(kinds: &[(PieceKind, u64)], offset: u64, bytes: u64) -> SharedBlock {
        let piece = |(serial, &(kind, bytes)): (usize, &(PieceKind, u64))| SharedPiece {
            id: MemoryId::page(serial as u64),
            bytes,
            kind,
        };
        let pieces = kinds.iter().enumerate().map(piece).collect();
        SharedBlock { device: DeviceKey([0; 16]), offset, bytes, pieces }
    }

    #[test]
    fn descriptions_are_checked() {
        use PieceKind::{Page, Segment};
        assert_eq!(block(&[(Page, 100), (Page, 50)], 90, 60).span_bytes(), Ok(150));
        assert_eq!(block(&[(Segment, 100)], 0, 100).span_bytes(), Ok(100));
        for bad in [
            block(&[], 0, 1),
            block(&[(Page, 100)], 0, 0),
            block(&[(Page, 100)], 1, 100),
            block(&[(Page, 100)], u64::MAX, 2),
            block(&[(Page, 0)], 0, 0),
            block(&[(Page, 100), (Page, 0)], 0, 100),
            block(&[(Segment, 100), (Page, 100)], 0, 10),
            block(&[(Page, u64::MAX), (Page, 2)], 0, 1),
            block(&[(Page, 1 << 60)], 0, 1),
        ] {
            assert!(bad.span_bytes().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn ids_tell_owners_apart() {
        let ids = [
            MemoryId::page(0),
            MemoryId::page(1),
            MemoryId::segment(0, 0, 0),
            MemoryId::segment(0, 1, 0),
            MemoryId::segment(1, 0, 0),
        ];
        for (index, id) in ids.iter().enumerate() {
            assert!(!ids[..index].contains(id), "{id:?}");
        }
    }
}
