//! The part of the checker that knows pools.

use super::Registered;
use crate::allocator::check::{Violation, ensure};
use crate::allocator::{Device, HeapCell};
use crate::backend::Backend;
use crate::units::PoolId;
use std::sync::Arc;

/// I13: every heap is of a pool that exists, every private pool is referred to or holds memory, and
/// the scopes are told apart correctly.
pub(in crate::allocator) fn check_pools<B: Backend>(device: &Device<B>) -> Result<(), Violation> {
    let private = device.pools.private.read();
    for cell in device.heaps() {
        let owner = cell.pool();
        let known = match owner.id() {
            PoolId::DEFAULT => Some(&device.pools.default),
            id => private.get(&id).map(|entry| &entry.pool),
        };
        let right = known.is_some_and(|known| Arc::ptr_eq(known, &owner));
        let id = owner.id();
        ensure(right && cell.private == (id != PoolId::DEFAULT), "I13", || {
            format!("a heap on {} belongs to pool {id:?}, which does not exist", cell.stream_id)
        })?;
    }
    for Registered { pool, .. } in private.values() {
        let heaps = device.heaps_of(pool.id());
        let needed = !pool.is_idle() || heaps.iter().any(|cell| !is_empty(cell));
        ensure(needed, "I13", || format!("pool {:?} has not ended", pool.id()))?;
    }
    for cell in device.heaps.read().vacant.values().flatten() {
        ensure(is_empty(cell), "I13", || {
            format!("a heap without a pool on {} holds memory", cell.stream_id)
        })?;
    }
    for pool in device.pools.scopes.pools() {
        let known = private.get(&pool.id()).is_some_and(|known| Arc::ptr_eq(&known.pool, &pool));
        ensure(known && !pool.is_unreferenced(), "I13", || {
            format!("a scope leads to pool {:?}, which nobody refers to", pool.id())
        })?;
    }
    ensure(device.pools.scopes.is_consistent(), "I13", || {
        "the mask of the scopes is not theirs".to_owned()
    })
}

fn is_empty<B: Backend>(cell: &Arc<HeapCell<B>>) -> bool {
    let state = cell.state.lock();
    state.body.heap.segments.is_empty() && state.body.tokens.is_empty()
}
