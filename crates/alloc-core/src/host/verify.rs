//! The checks that span the parts of an allocator.

use super::backend::{HostBackend, NodeId};
use super::check::{HostViolation, ensure};
use super::engine::{Engine, PoolOf};
use super::home::{BlockRef, Span};
use super::store::Store;
use crate::units::Addr;
use std::collections::BTreeMap;

type Checked = Result<(), HostViolation>;

/// What all pools hold.
#[derive(Default)]
struct Holdings {
    /// Heap spans, by pool.
    spans: Vec<(u32, NodeId, Span)>,
    /// Blocks of classes.
    blocks: Vec<Span>,
    /// Draining blocks, and for how many conditions each waits.
    draining: BTreeMap<BlockRef, u32>,
}

impl<B: HostBackend> Engine<B> {
    pub(crate) fn check(&self) -> Checked {
        let mut holdings = Holdings::default();
        let mut outcome = Ok(());
        self.each_pool(|pool| {
            if outcome.is_ok() {
                outcome = check_pool::<B>(pool, &mut holdings);
            }
        });
        outcome?;
        self.check_conditions(&holdings)?;
        if self.is_ours() { self.check_spans(holdings) } else { self.check_blocks(holdings) }
    }

    /// H5: every draining block is referred to as often as it says.
    fn check_conditions(&self, holdings: &Holdings) -> Checked {
        let mut counted = BTreeMap::<BlockRef, u32>::new();
        let mut count = |block: BlockRef| *counted.entry(block).or_default() += 1;
        self.queue.each(|pending| pending.blocks.iter().for_each(|&block| count(block)));
        self.streams.all().iter().for_each(|stream| stream.each_waiting(|&block| count(block)));
        self.each_pool(|pool| pool.each_held(&mut count));
        ensure(counted == holdings.draining, "H5", || {
            format!("blocks wait for {:?}, they are waited for {counted:?}", holdings.draining)
        })
    }

    /// H8 for policy `ours`.
    fn check_spans(&self, holdings: Holdings) -> Checked {
        let mut spans = holdings.spans;
        spans.sort_by_key(|(_, _, span)| span.base);
        let pins = self.pins.all();
        let pinned: Vec<_> = pins.iter().map(|pin| (pin.pool, pin.node, pin.span)).collect();
        ensure(spans == pinned, "H8", || format!("heaps hold {spans:?}, pinned is {pinned:?}"))
    }

    /// H8 for policy `pytorch`.
    fn check_blocks(&self, holdings: Holdings) -> Checked {
        let (reserve, pieces) =
            self.reserve.pieces().map_or((None, Vec::new()), |(span, pieces)| (Some(span), pieces));
        let in_reserve = |addr: Addr| {
            reserve.is_some_and(|span| addr >= span.base && addr - span.base < span.bytes)
        };
        let (mut inside, mut own): (Vec<_>, Vec<_>) =
            holdings.blocks.into_iter().partition(|block| in_reserve(block.base));
        inside.sort();
        own.extend(reserve);
        own.sort();
        let pinned: Vec<_> = self.pins.all().iter().map(|pin| pin.span).collect();
        ensure(own == pinned, "H8", || format!("blocks are {own:?}, pinned is {pinned:?}"))?;
        let inside: Vec<_> = inside.iter().map(|block| block.base).collect();
        ensure(inside == pieces, "H8", || {
            format!("blocks in the reserve are at {inside:?}, its pieces at {pieces:?}")
        })
    }
}

fn check_pool<B: HostBackend>(pool: &PoolOf<B>, holdings: &mut Holdings) -> Checked {
    let mut draining = Vec::new();
    match &pool.store {
        Store::Classes(classes) => classes.check(&mut holdings.blocks, &mut draining)?,
        Store::Slabs(slabs) => {
            let mut spans = Vec::new();
            slabs.check(&mut spans, &mut draining)?;
            let spans = spans.into_iter().map(|(node, span)| (pool.slot, node, span));
            holdings.spans.extend(spans);
        }
    }
    for (home, id, pending) in draining {
        holdings.draining.insert(BlockRef { pool: pool.slot, home, id }, pending);
    }
    Ok(())
}
