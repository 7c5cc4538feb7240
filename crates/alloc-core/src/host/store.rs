//! The blocks of one pool, under either policy.

use super::backend::NodeId;
use super::block::{BlockId, Use, Uses};
use super::classes::ClassStore;
use super::home::{After, Freed, Home, Span, Taken};
use super::ledger::Ledger;
use super::slabs::SlabStore;
use crate::units::Addr;

#[derive(Debug)]
pub(crate) enum Store<S> {
    Classes(ClassStore<S>),
    Slabs(SlabStore<S>),
}

/// A block and the container that it came from.
pub(crate) type Served = (u32, Taken);

/// Calls a method of the locked container of `home`, whichever kind it is.
macro_rules! at_home {
    ($store:expr, $home:expr, $method:ident($($argument:expr),*)) => {
        match $store {
            Store::Classes(classes) => classes.bucket($home).$method($($argument),*),
            Store::Slabs(slabs) => slabs.heap($home).$method($($argument),*),
        }
    };
}

impl<S: PartialEq> Store<S> {
    /// Notes a use of a live allocation. False if it is not live.
    pub(crate) fn note_use(&self, home: u32, id: BlockId, used: Use<S>) -> bool {
        at_home!(self, home, note_use(id, used))
    }

    /// See [`Home::free_unused`].
    #[inline(always)]
    pub(crate) fn free_unused(&self, home: u32, id: BlockId) -> Freed {
        at_home!(self, home, free_unused(id))
    }

    /// See [`Home::begin_draining`].
    pub(crate) fn begin_draining(&self, home: u32, id: BlockId) -> Option<(Uses<S>, u64)> {
        at_home!(self, home, begin_draining(id))
    }

    /// See [`Home::undo_draining`].
    pub(crate) fn undo_draining(&self, home: u32, id: BlockId, uses: Uses<S>) {
        at_home!(self, home, undo_draining(id, uses))
    }

    /// See [`Home::count_down`].
    pub(crate) fn count_down(&self, home: u32, id: BlockId) -> Option<After> {
        at_home!(self, home, count_down(id))
    }

    /// See [`Home::take_leaving`].
    pub(crate) fn take_leaving(&self, home: u32) -> Vec<Span> {
        let leaving = at_home!(self, home, take_leaving());
        if let Store::Classes(classes) = self {
            // They find blocks by address in a map of their own.
            leaving.iter().for_each(|span| classes.forget(span.base));
        }
        leaving
    }

    pub(crate) fn each_ledger(&self, visit: impl FnMut(&mut Ledger)) {
        match self {
            Store::Classes(classes) => classes.each_ledger(visit),
            Store::Slabs(slabs) => slabs.each_ledger(visit),
        }
    }

    /// Bytes that were freed and wait for events.
    pub(crate) fn draining_bytes(&self) -> u64 {
        let mut bytes = 0;
        self.each_ledger(|ledger| bytes += ledger.draining_bytes);
        bytes
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
