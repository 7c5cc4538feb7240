//! `proptest` strategies for the operations of [`workload`](crate::workload), with shrinking: fewer
//! operations, smaller sizes, lower picks and streams.

use std::ops::Range;

use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::Union;

use crate::Rng;
use crate::workload::{EDGES, Kind, Op, Shape, Weights};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Sequences of operations. Each case draws its own weights.
pub fn ops(shape: Shape, len: Range<usize>) -> impl Strategy<Value = Vec<Op>> {
    any::<u64>().no_shrink().prop_flat_map(move |seed| {
        let weights = Weights::draw(&mut Rng::new(seed), &shape);
        prop::collection::vec(op(&shape, &weights), len.clone())
    })
}

fn op(shape: &Shape, weights: &Weights) -> impl Strategy<Value = Op> + use<> {
    let kinds = weights.kinds().into_iter().filter(|(_, weight)| *weight > 0);
    Union::new_weighted(
        kinds.map(|(kind, weight)| (weight as u32, of_kind(kind, shape, weights))).collect(),
    )
}

fn of_kind(kind: Kind, shape: &Shape, weights: &Weights) -> BoxedStrategy<Op> {
    let streams = 0..shape.streams;
    let picks = any::<u32>();
    match kind {
        Kind::Allocate => (bytes(shape, weights), streams)
            .prop_map(|(bytes, stream)| Op::Allocate { bytes, stream })
            .boxed(),
        Kind::Free => picks.prop_map(|pick| Op::Free { pick }).boxed(),
        Kind::Use => (picks, streams).prop_map(|(pick, stream)| Op::Use { pick, stream }).boxed(),
        Kind::Record => {
            (picks, streams).prop_map(|(pick, stream)| Op::Record { pick, stream }).boxed()
        }
        Kind::Busy => streams.prop_map(|stream| Op::Busy { stream }).boxed(),
        Kind::Pass => streams.prop_map(|stream| Op::Pass { stream }).boxed(),
        Kind::Sync => Just(Op::Sync).boxed(),
        Kind::EmptyCache => Just(Op::EmptyCache).boxed(),
        Kind::FreeAll => Just(Op::FreeAll).boxed(),
        Kind::ResetPeak => Just(Op::ResetPeak).boxed(),
        Kind::ResetAccumulated => Just(Op::ResetAccumulated).boxed(),
        Kind::SetLimit => {
            let (low, high) = shape.limits.unwrap_or((u64::MAX, u64::MAX));
            let limit = prop::option::weighted(0.8, low..=high);
            limit.prop_map(|bytes| Op::SetLimit { bytes }).boxed()
        }
        Kind::Expandable => any::<bool>().prop_map(|on| Op::Expandable { on }).boxed(),
        Kind::NewPool => {
            let options = (prop::bool::weighted(0.2), prop::bool::weighted(0.3));
            (streams, options)
                .prop_map(|(stream, (no_split, use_on_oom))| Op::NewPool {
                    stream,
                    no_split,
                    use_on_oom,
                })
                .boxed()
        }
        Kind::DropPool => picks.prop_map(|pick| Op::DropPool { pick }).boxed(),
        Kind::EmptyPool => picks.prop_map(|pick| Op::EmptyPool { pick }).boxed(),
        Kind::Enter => (picks, prop::option::weighted(0.4, streams))
            .prop_map(|(pick, stream)| Op::Enter { pick, stream })
            .boxed(),
        Kind::Leave => picks.prop_map(|pick| Op::Leave { pick }).boxed(),
        Kind::Checkpoint => picks.prop_map(|pick| Op::Checkpoint { pick }).boxed(),
        Kind::Restore => picks.prop_map(|pick| Op::Restore { pick }).boxed(),
        Kind::Forget => picks.prop_map(|pick| Op::Forget { pick }).boxed(),
    }
}

fn bytes(shape: &Shape, weights: &Weights) -> impl Strategy<Value = u64> + use<> {
    let near_edge = (select(&EDGES[..]), 0..3u64, 0..3u64)
        .prop_map(|(edge, quantum, byte)| (edge + quantum * 512 + byte).saturating_sub(513));
    let kinds = [
        (1..=16 * KIB).boxed(),
        (1..=MIB).boxed(),
        (1..=12 * MIB).boxed(),
        (1..=64 * MIB).boxed(),
        near_edge.boxed(),
        Just(0).boxed(),
        select(weights.favourites.to_vec()).boxed(),
    ];
    let weighted = kinds.into_iter().zip(weights.sizes).filter(|(_, weight)| *weight > 0);
    let max = shape.bytes_max;
    Union::new_weighted(weighted.map(|(kind, weight)| (weight as u32, kind)).collect())
        .prop_map(move |bytes| bytes.min(max))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    /// A failing sequence shrinks to the operations that matter.
    #[test]
    fn sequences_shrink() {
        let fails = |ops: &[Op]| {
            ops.iter().any(|op| matches!(op, Op::Allocate { bytes, .. } if *bytes >= 1000))
        };
        let mut runner = TestRunner::deterministic();
        let mut tree = loop {
            let tree = ops(Shape::default(), 1..200).new_tree(&mut runner).unwrap();
            if fails(&tree.current()) {
                break tree;
            }
        };
        let mut smallest = tree.current();
        let mut goes_on = tree.simplify();
        while goes_on {
            let failing = fails(&tree.current());
            if failing {
                smallest = tree.current();
            }
            goes_on = if failing { tree.simplify() } else { tree.complicate() };
        }
        assert_eq!(smallest, [Op::Allocate { bytes: 1000, stream: 0 }]);
    }
}
