//! The host backend on CUDA.

use crate::allocator::PinOptions;
use crate::error::PinError;
use crate::pinned::{How, PinTimes, PinnedMemory, TouchPool, copy};
use crate::source::StreamSource;
use crate::topology::Topology;
use alloc_core::DeviceId;
use alloc_core::backend::{Completion, Refused};
use alloc_core::host::{
    CopyData, CopyRequest, HostBackend, NodeId, PinMethod, PinRequest, PinnedSegment,
};
use cuda_driver::Context;
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pins memory through CUDA, for streams of `S`.
///
/// There is none but the one inside a [`PinnedAllocator`](crate::PinnedAllocator), whose buffers
/// rely on nobody else having it. All calls leave the thread's current context and capture mode as
/// they were, and are made with captures relaxed: none of them disturbs one.
pub struct CudaHost<S> {
    pub(crate) source: S,
    /// One for each device that memory is pinned through; memory for a node is pinned through the
    /// first device near it.
    contexts: Vec<Arc<Context>>,
    topology: Topology,
    options: PinOptions,
    /// Threads near each node, and those that are near none.
    pools: Vec<TouchPool>,
    /// Of the last registration.
    times: Mutex<PinTimes>,
    /// Segments registered in several pieces: first address, and lengths of the whole and a piece.
    pieced: RwLock<BTreeMap<u64, (u64, u64)>>,
    start: Instant,
}

impl<S> fmt::Debug for CudaHost<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaHost")
            .field("topology", &self.topology)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl<S: StreamSource> CudaHost<S> {
    pub(crate) fn new(
        source: S,
        contexts: &[Arc<Context>],
        options: PinOptions,
    ) -> Result<Self, PinError<S::Error>> {
        let driver = contexts.first().ok_or(PinError::NoDevice)?.driver();
        let devices = (0..driver.device_count()?).map(|ordinal| driver.device(ordinal));
        let devices = devices.collect::<Result<Vec<_>, _>>()?;
        let topology = Topology::read(&devices);
        let near = (0..topology.node_count()).map(|node| topology.processors(NodeId::new(node)));
        let pools = near.chain([Vec::new()]).map(TouchPool::new).collect();
        Ok(CudaHost {
            source,
            contexts: contexts.to_vec(),
            topology,
            options,
            pools,
            times: Mutex::default(),
            pieced: RwLock::new(BTreeMap::new()),
            start: Instant::now(),
        })
    }

    fn context(&self, node: Option<NodeId>) -> &Arc<Context> {
        let is_near = |context: &&Arc<Context>| {
            let device = usize::from(context.device().ordinal());
            node.is_some() && self.topology.of_device(device) == node
        };
        self.contexts.iter().find(is_near).unwrap_or(&self.contexts[0])
    }

    /// The threads that touch memory of a node.
    fn pool(&self, node: Option<NodeId>) -> &TouchPool {
        let any = self.pools.len() - 1;
        &self.pools[node.map_or(any, |node| node.index().min(any))]
    }

    /// How long the last registration took.
    pub(crate) fn pin_times(&self) -> PinTimes {
        *self.times.lock()
    }

    /// Cuts a range at the borders of registrations, which a copy should not cross.
    pub(crate) fn cut(&self, addr: u64, bytes: u64) -> Vec<(u64, u64)> {
        let pieced = self.pieced.read();
        let piece = pieced
            .range(..=addr)
            .next_back()
            .and_then(|(&base, &(whole, piece))| (addr - base < whole).then_some((base, piece)));
        let Some((base, piece)) = piece else { return vec![(addr, bytes)] };
        let mut cuts = Vec::new();
        let (mut at, end) = (addr, addr + bytes);
        while at < end {
            let border = base + ((at - base) / piece + 1) * piece;
            let next = border.min(end);
            cuts.push((at, next - at));
            at = next;
        }
        cuts
    }
}

impl<S: StreamSource> HostBackend for CudaHost<S> {
    type Stream = S::Stream;
    type Event = S::Event;
    type Pinned = PinnedMemory;
    type Error = PinError<S::Error>;

    fn node_count(&self) -> u16 {
        self.topology.node_count()
    }

    fn node_of(&self, device: DeviceId) -> Option<NodeId> {
        self.topology.of_device(device.index())
    }

    /// With [`PinMethod::Allocate`] the driver chooses the node.
    fn pin(&self, request: &PinRequest) -> Result<PinnedMemory, PinError<S::Error>> {
        let context = self.context(request.node);
        let _relaxed = context.driver().relax_captures()?;
        let memory = match request.method {
            PinMethod::Allocate => {
                PinnedMemory::allocate(context, request.bytes, request.align, self.options.flags)?
            }
            PinMethod::Register { .. } if self.options.flags.write_combined => {
                return Err(PinError::WriteCombined);
            }
            PinMethod::Register { threads } => {
                let how = How {
                    flags: self.options.flags,
                    pool: self.pool(request.node),
                    threads: usize::from(threads),
                    touch: self.options.touch,
                    piece_bytes_max: request.piece_bytes_max,
                    node: request.node.and_then(|node| self.topology.number(node)),
                    huge_pages: self.options.huge_pages,
                };
                let (memory, times) = PinnedMemory::register(context, request.bytes, &how)?;
                *self.times.lock() = times;
                memory
            }
        };
        if let Some(piece) = memory.piece_bytes() {
            self.pieced.write().insert(memory.base().get(), (memory.bytes(), piece));
        }
        Ok(memory)
    }

    fn unpin(&self, memory: PinnedMemory) -> Result<(), Refused<PinnedMemory, PinError<S::Error>>> {
        let base = memory.base().get();
        let _relaxed = match self.contexts[0].driver().relax_captures() {
            Ok(relaxed) => relaxed,
            Err(error) => return Err(Refused { value: memory, error: error.into() }),
        };
        // Before the range can be mapped again by another thread.
        let pieced = self.pieced.write().remove(&base);
        memory.unpin().inspect_err(|_| {
            self.pieced.write().extend(pieced.map(|pieces| (base, pieces)));
        })
    }

    fn record(&self, stream: &S::Stream) -> Result<S::Event, PinError<S::Error>> {
        self.source.record(stream).map_err(PinError::Stream)
    }

    fn query(&self, event: &S::Event) -> Result<Completion, PinError<S::Error>> {
        self.source.query(event).map_err(PinError::Stream)
    }

    fn wait(&self, event: &S::Event) -> Result<(), PinError<S::Error>> {
        self.source.wait(event).map_err(PinError::Stream)
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

impl<S: StreamSource> CopyData for CudaHost<S> {
    fn copy(&self, request: &CopyRequest) -> Result<(), PinError<S::Error>> {
        copy(request);
        Ok(())
    }
}
