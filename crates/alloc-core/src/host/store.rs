//! The blocks of one pool, under either policy.

use super::backend::NodeId;
use super::block::{BlockId, Use, Uses};
use super::classes::ClassStore;
use super::home::{Begun, Home, Released, Taken};
use super::slabs::SlabStore;
use super::stats::Ledger;
use crate::units::Addr;

#[derive(Debug)]
pub(crate) enum Store<S> {
    Classes(ClassStore<S>),
    Slabs(SlabStore<S>),
}

/// What is left to do, without the lock, after a block was released.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum After {
    /// Nothing.
    Nothing,
    /// Give this memory back to the system.
    Unpin(super::home::Span),
    /// The shard holds a run too many.
    Surplus,
    /// The central heap holds more than the bound on cached bytes.
    Excess,
}

impl<S: PartialEq> Store<S> {
    /// Notes a use of a live allocation. False if it is not live.
    pub(crate) fn note_use(&self, home: u32, id: BlockId, used: Use<S>) -> bool {
        match self {
            Store::Classes(classes) => classes.bucket(home).table().note_use(id, used),
            Store::Slabs(slabs) => slabs.heap(home).table().note_use(id, used),
        }
    }

    /// See [`Home::begin_free`].
    pub(crate) fn begin_free(&self, home: u32, id: BlockId) -> (Begun<S>, After) {
        match self {
            Store::Classes(classes) => {
                let begun = classes.bucket(home).begin_free(id);
                let after = match begun {
                    Begun::Released(released) => after_class(classes, released),
                    _ => After::Nothing,
                };
                (begun, after)
            }
            Store::Slabs(slabs) => {
                let mut heap = slabs.heap(home);
                let begun = heap.begin_free(id);
                let after = match begun {
                    Begun::Released(released) => slabs.after_release(home, &heap, released),
                    _ => After::Nothing,
                };
                (begun, after)
            }
        }
    }

    /// See [`Home::undo_free`].
    pub(crate) fn undo_free(&self, home: u32, id: BlockId, uses: Uses<S>) {
        match self {
            Store::Classes(classes) => classes.bucket(home).undo_free(id, uses),
            Store::Slabs(slabs) => slabs.heap(home).undo_free(id, uses),
        }
    }

    /// See [`Home::count_down`]. `None` if the block goes on draining.
    pub(crate) fn count_down(&self, home: u32, id: BlockId) -> Option<After> {
        match self {
            Store::Classes(classes) => {
                let released = classes.bucket(home).count_down(id)?;
                Some(after_class(classes, released))
            }
            Store::Slabs(slabs) => {
                let mut heap = slabs.heap(home);
                let released = heap.count_down(id)?;
                Some(slabs.after_release(home, &heap, released))
            }
        }
    }

    pub(crate) fn each_ledger(&self, visit: impl FnMut(&mut Ledger)) {
        match self {
            Store::Classes(classes) => classes.each_ledger(visit),
            Store::Slabs(slabs) => slabs.each_ledger(visit),
        }
    }

    /// Free bytes, and the largest free block.
    pub(crate) fn free_bytes(&self) -> (u64, u64) {
        match self {
            Store::Classes(classes) => classes.free_bytes(),
            Store::Slabs(slabs) => slabs
                .node_ids()
                .map(|node| slabs.free_bytes(node))
                .fold((0, 0), |sum, (total, largest)| (sum.0 + total, sum.1.max(largest))),
        }
    }

    /// The live allocation that `addr` belongs to, and its first address. Policy `pytorch` knows
    /// first addresses only.
    pub(crate) fn find(&self, node: NodeId, addr: Addr) -> Option<(u32, BlockId, Addr)> {
        match self {
            Store::Classes(classes) => classes.find(addr).map(|(home, id)| (home, id, addr)),
            Store::Slabs(slabs) => slabs.find(node, addr),
        }
    }

    /// Whether no memory is left in it.
    pub(crate) fn is_empty(&self) -> bool {
        match self {
            Store::Classes(classes) => classes.is_empty(),
            Store::Slabs(slabs) => slabs.node_ids().all(|node| slabs.bytes(node) == 0),
        }
    }
}

fn after_class<S: PartialEq>(classes: &ClassStore<S>, released: Released) -> After {
    match released {
        Released::Kept => After::Nothing,
        Released::Leaves(span) => {
            classes.forget(span.base);
            After::Unpin(span)
        }
    }
}

/// A block and the container that it came from.
pub(crate) type Served = (u32, Taken);
