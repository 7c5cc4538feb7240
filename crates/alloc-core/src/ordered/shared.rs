//! What an allocator's clones share: which allocations there are, and the calls of the backend.

use super::backend::{OrderedMemory, StreamOrdered};
use super::error::{OrderedError, OrderedOp};
use crate::backend::{BackendError, CaptureStatus, ErrorKind, Refused, Stream};
use crate::units::{Addr, DeviceId, StreamId};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::{BTreeMap, HashMap};

pub(super) type Outcome<T, B> = Result<T, OrderedError<<B as crate::backend::Backend>::Error>>;

/// An allocation.
pub(super) struct Live<B: StreamOrdered> {
    pub(super) memory: B::Ordered,
    /// The stream it was allocated on.
    pub(super) stream: B::Stream,
    /// Others that use it.
    pub(super) uses: SmallVec<[B::Stream; 2]>,
}

/// What changes.
pub(super) struct State<B: StreamOrdered> {
    pub(super) live: HashMap<Addr, Live<B>>,
    /// Bytes of requests, those under way included.
    pub(super) allocated: u64,
    pub(super) limit: Option<u64>,
    /// Every stream that memory was allocated or used on.
    pub(super) streams: BTreeMap<StreamId, B::Stream>,
    /// Holds in force, and what was freed meanwhile.
    pub(super) holds: usize,
    pub(super) held: Vec<Live<B>>,
}

pub(super) struct Shared<B: StreamOrdered> {
    pub(super) backend: B,
    pub(super) device: DeviceId,
    /// `None` only while being dropped.
    pub(super) pool: Option<B::Pool>,
    pub(super) is_private: bool,
    /// Where memory is freed that several streams used.
    pub(super) unifier: B::Stream,
    pub(super) state: Mutex<State<B>>,
}

impl<B: StreamOrdered> State<B> {
    /// Enters memory again whose free was refused.
    pub(super) fn put_back(&mut self, live: Live<B>) {
        self.allocated += live.memory.bytes();
        self.live.insert(live.memory.addr(), live);
    }
}

impl<B: StreamOrdered> Shared<B> {
    pub(super) fn pool(&self) -> &B::Pool {
        self.pool.as_ref().expect("there until it is dropped")
    }

    pub(super) fn check_stream(&self, stream: &B::Stream) -> Outcome<(), B> {
        let (device, expected) = (stream.device(), self.device);
        if device == expected {
            return Ok(());
        }
        Err(OrderedError::WrongDevice { stream: stream.id(), device, expected })
    }

    /// Counts a request, if the limit allows it.
    pub(super) fn claim(&self, bytes: u64) -> Outcome<(), B> {
        let (allocated, limit) = {
            let mut state = self.state.lock();
            let allocated = state.allocated;
            if state.limit.is_none_or(|limit| bytes <= limit.saturating_sub(allocated)) {
                state.allocated += bytes;
                return Ok(());
            }
            (allocated, state.limit)
        };
        Err(self.out_of_memory(bytes, allocated, limit))
    }

    pub(super) fn out_of_memory(
        &self,
        requested: u64,
        allocated: u64,
        limit: Option<u64>,
    ) -> OrderedError<B::Error> {
        let reserved = self.backend.pool_usage(self.pool()).ok().map(|usage| usage.reserved);
        OrderedError::OutOfMemory { device: self.device, requested, allocated, reserved, limit }
    }

    /// Memory from the pool. If there is none, the stream is waited for, the pool gives back what it
    /// does not use, and it is asked once more.
    pub(super) fn obtain(&self, bytes: u64, stream: &B::Stream) -> Outcome<B::Ordered, B> {
        let failed = |source| OrderedError::Backend { op: OrderedOp::Allocate, source };
        let is_full = |error: &B::Error| error.kind() == ErrorKind::OutOfMemory;
        match self.backend.allocate_ordered(self.pool(), bytes, stream) {
            Err(error) if is_full(&error) => {}
            result => return result.map_err(failed),
        }
        self.synchronise(stream)?;
        let trimmed = self.backend.trim_pool(self.pool(), 0);
        trimmed.map_err(|source| OrderedError::Backend { op: OrderedOp::Trim, source })?;
        self.backend.allocate_ordered(self.pool(), bytes, stream).map_err(|error| {
            if !is_full(&error) {
                return failed(error);
            }
            let (allocated, limit) = {
                let state = self.state.lock();
                (state.allocated - bytes, state.limit)
            };
            self.out_of_memory(bytes, allocated, limit)
        })
    }

    pub(super) fn record(&self, stream: &B::Stream) -> Outcome<B::Event, B> {
        let event = self.backend.record(stream);
        event.map_err(|source| OrderedError::Backend { op: OrderedOp::Record, source })
    }

    pub(super) fn synchronise(&self, stream: &B::Stream) -> Outcome<(), B> {
        let event = self.record(stream)?;
        let waited = self.backend.wait(&event);
        waited.map_err(|source| OrderedError::Backend { op: OrderedOp::Wait, source })
    }
}

impl<B: StreamOrdered> Shared<B> {
    pub(super) fn is_capturing(&self, stream: &B::Stream) -> Outcome<bool, B> {
        let status = self.backend.capture_status(stream);
        let status =
            status.map_err(|source| OrderedError::Backend { op: OrderedOp::Capture, source })?;
        Ok(status != CaptureStatus::None)
    }

    /// Frees memory, or notes its free while one of its streams is being captured.
    pub(super) fn free_or_hold(
        &self,
        live: Live<B>,
    ) -> Result<(), (Live<B>, OrderedError<B::Error>)> {
        let mut streams = std::iter::once(&live.stream).chain(&live.uses);
        let capturing =
            streams.try_fold(false, |any, stream| Ok(any || self.is_capturing(stream)?));
        match capturing {
            Ok(false) => self.give_back(live),
            Ok(true) => {
                self.state.lock().held.push(live);
                Ok(())
            }
            Err(error) => Err((live, error)),
        }
    }

    /// Carries noted frees out, as far as they may be by now. What is refused stays allocated, and can
    /// be freed again.
    pub(super) fn flush_held(&self) {
        let held = {
            let mut state = self.state.lock();
            if state.holds > 0 || state.held.is_empty() {
                return;
            }
            std::mem::take(&mut state.held)
        };
        for live in held {
            if let Err((live, _)) = self.free_or_hold(live) {
                self.state.lock().put_back(live);
            }
        }
    }

    /// Frees memory after all streams that use it.
    pub(super) fn give_back(&self, live: Live<B>) -> Result<(), (Live<B>, OrderedError<B::Error>)> {
        let last = if live.uses.is_empty() {
            live.stream.clone()
        } else {
            if let Err(error) = self.unify(&live) {
                return Err((live, error));
            }
            self.unifier.clone()
        };
        let Live { memory, stream, uses } = live;
        self.backend.free_ordered(memory, &last).map_err(|Refused { value: memory, error }| {
            let error = OrderedError::Backend { op: OrderedOp::Free, source: error };
            (Live { memory, stream, uses }, error)
        })
    }

    /// Orders the unifier after all streams that use the memory.
    pub(super) fn unify(&self, live: &Live<B>) -> Outcome<(), B> {
        for stream in std::iter::once(&live.stream).chain(&live.uses) {
            let event = self.record(stream)?;
            let waited = self.backend.wait_event(&self.unifier, &event);
            waited.map_err(|source| OrderedError::Backend { op: OrderedOp::Wait, source })?;
        }
        Ok(())
    }
}

impl<B: StreamOrdered> Drop for Shared<B> {
    fn drop(&mut self) {
        let Some(pool) = self.pool.take() else { return };
        let state = self.state.get_mut();
        if self.is_private && state.live.is_empty() && state.held.is_empty() {
            // Fails when the driver is gone, and the pool with it.
            let _ = self.backend.destroy_pool(pool);
        }
    }
}
