//! Captures into private pools.

use super::HostAllocator;
use crate::host::backend::HostBackend;
use crate::host::engine::Result;
use crate::host::error::HostError;
use crate::host::pools::PoolError;
use crate::units::{PoolId, StreamId};
use std::sync::Arc;

impl<B: HostBackend> HostAllocator<B> {
    /// Begins a capture: from now on, requests for streams that `filter` accepts are served by the
    /// private pool `pool`, and uses on such streams keep memory from reuse until the pool is
    /// released. If several captures accept a stream, the one that began first gets it. The pool is
    /// made if no graph uses it; otherwise this is one use more, and needs one release more.
    ///
    /// `filter` is called without locks, whenever a stream comes up while a capture is underway.
    ///
    /// # Errors
    /// If a capture into this pool is underway; nothing has changed then.
    pub fn begin_allocate_to_pool(
        &self,
        pool: PoolId,
        filter: impl Fn(StreamId) -> bool + Send + Sync + 'static,
    ) -> Result<(), B> {
        let engine = self.engine();
        let begun = engine.pools.begin(pool, Arc::new(filter), || engine.private_store());
        begun.map_err(|error| pool_error(error, pool))
    }

    /// Ends the capture into `pool`. Its memory stays as it is, for the graph.
    ///
    /// # Errors
    /// If no capture into this pool is underway.
    pub fn end_allocate_to_pool(&self, pool: PoolId) -> Result<(), B> {
        self.engine().pools.end(pool).map_err(|error| pool_error(error, pool))
    }

    /// A graph that uses `pool` is gone. After the last one, memory held for graphs is reused as
    /// soon as the streams that were recorded for it have finished what is queued on them. Launches
    /// of the graph on other streams must have finished before.
    ///
    /// # Errors
    /// If no graph uses the pool, or the capture of the last one is still underway.
    pub fn release_pool(&self, pool: PoolId) -> Result<(), B> {
        let released =
            self.engine().pools.release(pool).map_err(|error| pool_error(error, pool))?;
        if let Some((pool, held)) = released {
            self.engine().release_held(&pool, held);
        }
        Ok(())
    }
}

fn pool_error<E>(error: PoolError, pool: PoolId) -> HostError<E> {
    match error {
        PoolError::Unknown => HostError::UnknownPool(pool),
        PoolError::IsRecording => HostError::PoolIsRecording(pool),
        PoolError::IsNotRecording => HostError::PoolIsNotRecording(pool),
    }
}
