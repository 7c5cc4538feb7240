//! The checker of a slab store.

use super::SlabStore;
use crate::host::backend::NodeId;
use crate::host::block::BlockId;
use crate::host::check::{Violation, ensure};
use crate::host::home::Span;

impl<S: PartialEq> SlabStore<S> {
    /// Recomputes everything from the blocks. Appends the segments by node, and the draining blocks
    /// by home.
    pub(crate) fn check(
        &self,
        spans: &mut Vec<(NodeId, Span)>,
        draining: &mut Vec<(u32, BlockId, u32)>,
    ) -> Result<(), Violation> {
        for node in self.node_ids() {
            let (mut lent, mut borrowed) = (Vec::new(), Vec::new());
            for home in self.homes(node) {
                let sums = self.heap(home).check()?;
                draining.extend(sums.draining.iter().map(|&(id, pending)| (home, id, pending)));
                lent.extend(sums.lent);
                if home == self.central_home(node) {
                    spans.extend(sums.spans.iter().map(|&span| (node, span)));
                } else {
                    borrowed.extend(sums.spans.iter().map(|&span| (home, span)));
                }
            }
            lent.sort();
            borrowed.sort();
            ensure(lent == borrowed, "H7", || {
                format!("{node} has lent {lent:?}, its shards hold {borrowed:?}")
            })?;
        }
        Ok(())
    }
}
