//! Blocks on the side that owns the arena: first written by one, then read by many.
#![allow(unsafe_code, reason = "lends ranges that the arena has given to one owner")]

use crate::arena::Arena;
use crate::arena::space::Placed;
use crate::steps::{Step, pass};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The address of a block, the same in every process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockAddr {
    /// The arena's id.
    pub arena: u64,
    /// Where the bytes begin in it.
    pub offset: u64,
    /// How many there are.
    pub len: u64,
    /// Differs from the generation of every earlier and later block of that arena.
    pub generation: u64,
}

/// A block that only its owner sees: to be written, then [shared](Block::share).
///
/// Given back to the arena on drop.
pub struct Block {
    owner: Owner,
}

impl Block {
    pub(crate) fn new(arena: Arena, placed: Placed) -> Self {
        let retired = AtomicBool::new(false);
        Block { owner: Owner { arena, placed, len: placed.requested, retired } }
    }

    /// Makes the block readable for others: nobody writes it until every reader is done.
    pub fn share(self) -> SharedBlock {
        SharedBlock::publish(self.owner)
    }
}

impl Deref for Block {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.owner.bytes()
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        let Owner { arena, placed, len, .. } = &self.owner;
        // SAFETY: the space gave this range to this block alone; its address is not published, so
        // no reader has been sent it; `&mut self` excludes every other reference. The region is
        // the arena's writable mapping.
        let bytes = unsafe { arena.inner().region().bytes_mut(placed.offset, *len) };
        bytes.expect("a placed block lies within its arena")
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Block").field(&self.owner.addr()).finish()
    }
}

/// A block that everybody may read and nobody writes.
///
/// Cheap to clone. Goes back to the arena when the last clone is gone and every peer that was sent
/// it has given it back or died.
#[derive(Clone)]
pub struct SharedBlock(Arc<Owner>);

impl SharedBlock {
    /// Shares the first `len` bytes of a block that nobody else has a reference to.
    pub(crate) fn of_placed(arena: Arena, placed: Placed, len: u64) -> Self {
        debug_assert!(len <= placed.requested);
        Self::publish(Owner { arena, placed, len, retired: AtomicBool::new(false) })
    }

    fn publish(owner: Owner) -> Self {
        pass(Step::Publish);
        let Placed { offset, generation, .. } = owner.placed;
        owner.arena.inner().write_header(offset, generation, owner.len);
        SharedBlock(Arc::new(owner))
    }

    /// The block's address.
    pub fn addr(&self) -> BlockAddr {
        self.0.addr()
    }

    /// The arena it lies in.
    pub fn arena(&self) -> &Arena {
        &self.0.arena
    }

    /// Never gives the block's range back while the arena lives: a peer may read it, and nobody
    /// will hear when it no longer does.
    pub(crate) fn retire(&self) {
        self.0.retired.store(true, Ordering::Relaxed);
    }
}

impl Deref for SharedBlock {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl fmt::Debug for SharedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedBlock").field(&self.addr()).finish()
    }
}

/// The one who gives the range back.
struct Owner {
    arena: Arena,
    placed: Placed,
    /// Bytes in use: all that were asked for, or what a vector had filled of them.
    len: u64,
    retired: AtomicBool,
}

impl Owner {
    fn addr(&self) -> BlockAddr {
        let Placed { offset, generation, .. } = self.placed;
        BlockAddr { arena: self.arena.id(), offset, len: self.len, generation }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the space gave this range to this owner alone. It is written through `&mut Block`
        // only, which excludes this borrow, and no other process can map the arena for writing.
        let bytes = unsafe { self.arena.inner().region().bytes(self.placed.offset, self.len) };
        bytes.expect("a placed block lies within its arena")
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if !*self.retired.get_mut() {
            self.arena.inner().free(self.placed);
        }
    }
}
