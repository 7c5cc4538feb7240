//! Pools and captures of a recording, by the numbers that it gives them.

use std::collections::HashMap;

use alloc_core::backend::Stream;
use alloc_core::{
    Addr, CachingAllocator, DeviceId, MemPool, PoolId, PoolOptions, PoolRef, PoolScope,
    ScopeFilter, Snapshot,
};
use mock_backend::{MockBackend, MockStream};

use super::{EngineError, refusal};

type Allocator = CachingAllocator<MockBackend>;

/// What refers to pools.
#[derive(Default)]
pub(super) struct Pools {
    users: HashMap<u32, MemPool<MockBackend>>,
    /// Scopes of user pools, outermost first.
    entered: Vec<PoolScope<MockBackend>>,
    graphs: HashMap<u32, PoolRef<MockBackend>>,
    captures: HashMap<u32, PoolScope<MockBackend>>,
}

impl Pools {
    pub(super) fn new_pool(
        &mut self,
        allocator: &Allocator,
        n: u32,
        id: (u64, u64),
        no_split: bool,
    ) -> Result<(), EngineError> {
        let mut options = PoolOptions::new();
        options.no_split = no_split;
        let pool = allocator.create_pool(DeviceId::new(0), options).map_err(refusal)?;
        same_id(pool.id(), id)?;
        self.users.insert(n, pool);
        Ok(())
    }

    pub(super) fn delete_pool(&mut self, n: u32) -> Result<(), EngineError> {
        self.users.remove(&n).ok_or_else(|| unknown("pool", n))?.release().map_err(refusal)
    }

    pub(super) fn enter(&mut self, n: u32) -> Result<(), EngineError> {
        let pool = self.users.get(&n).ok_or_else(|| unknown("pool", n))?;
        self.entered.push(pool.scope(ScopeFilter::CurrentThread));
        Ok(())
    }

    pub(super) fn leave(&mut self) {
        drop(self.entered.pop());
    }

    pub(super) fn begin_capture(
        &mut self,
        allocator: &Allocator,
        graph: u32,
        id: (u64, u64),
        shared: Option<u32>,
        stream: &MockStream,
    ) -> Result<(), EngineError> {
        let device = DeviceId::new(0);
        let pool = match shared {
            // The graph that the pool was made for may be gone, and others still use it.
            Some(_) => allocator.open_pool(device, PoolId(id.0, id.1), PoolOptions::new()),
            None => allocator.create_capture_pool(device),
        };
        let pool = pool.map_err(refusal)?;
        same_id(pool.id(), id)?;
        self.captures.insert(graph, pool.scope(ScopeFilter::Stream(stream.id())));
        self.graphs.insert(graph, pool);
        Ok(())
    }

    pub(super) fn end_capture(&mut self, graph: u32) -> Result<(), EngineError> {
        self.captures.remove(&graph).map(drop).ok_or_else(|| unknown("capture of graph", graph))
    }

    pub(super) fn delete_graph(&mut self, graph: u32) -> Result<(), EngineError> {
        self.graphs.remove(&graph).map(drop).ok_or_else(|| unknown("graph", graph))
    }
}

/// The pools in the order in which segments of them come in `addrs`.
pub(super) fn order_of(addrs: &[u64], snapshot: &Snapshot) -> Vec<PoolId> {
    let mut order: Vec<PoolId> = Vec::new();
    for &addr in addrs {
        let after = snapshot.segments.partition_point(|segment| segment.addr <= Addr::new(addr));
        let Some(at) = after.checked_sub(1) else { continue };
        let pool = snapshot.segments[at].pool;
        if !order.contains(&pool) {
            order.push(pool);
        }
    }
    order
}

fn unknown(what: &str, n: u32) -> EngineError {
    EngineError::Refused(format!("there is no {what} {n}"))
}

fn same_id(got: PoolId, expected: (u64, u64)) -> Result<(), EngineError> {
    if (got.0, got.1) == expected {
        return Ok(());
    }
    Err(EngineError::Refused(format!("the new pool has id {got:?}, not {expected:?}")))
}
