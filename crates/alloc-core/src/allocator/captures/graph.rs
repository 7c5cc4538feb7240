//! The memory of one graph: a state machine from the capture to the end of the graph.

use super::{CaptureError, GraphState, Known, Power};
use crate::allocator::{
    AllocResult, CachingAllocator, PoolOptions, PoolPin, PoolRef, PoolScope, ScopeFilter, Shared,
};
use crate::backend::{Backend, Capture, CaptureId, CaptureStatus, Stream};
use crate::units::{DeviceId, PoolId};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

type Step<T, B> = Result<T, CaptureError<<B as Backend>::Error>>;

/// Memory for one graph: from a pool of its own, or from one that several graphs share because they
/// are never replayed at the same time.
///
/// The steps, with the driver's between them:
///
/// 1. [`expect`](Self::expect): from here on no memory goes back to the backend, which would spoil
///    the capture. May be left out where no other thread uses the allocator.
/// 2. *The driver begins the capture.*
/// 3. [`begin`](Self::begin): requests on streams of the capture get memory of the pool.
/// 4. *Work is captured, and the driver ends the capture.*
/// 5. [`end`](Self::end), or [`abort`](Self::abort) if that failed. From now on the memory that was
///    used, freed or not, stays where it is and goes to nobody else.
/// 6. *The graph is replayed*; [`note_replay`](Self::note_replay) says where.
/// 7. *The driver destroys the graph.*
/// 8. [`reset`](Self::reset): the memory is free once its blocks are.
///
/// Dropping it aborts a capture and resets a graph. Blocks that are allocated during the capture are
/// ordinary blocks, to be freed during the capture or at any time after.
///
/// ```
/// use alloc_core::{CachingAllocator, Config, DeviceId};
/// use mock_backend::{CaptureMode, MockBackend, Work};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let gpu = MockBackend::builder().device(8 << 30).build();
/// let stream = gpu.stream(DeviceId::new(0));
/// let allocator = CachingAllocator::new(gpu.clone(), Config::ours())?;
///
/// let mut memory = allocator.graph_memory();
/// memory.expect()?;
/// gpu.begin_capture(&stream, CaptureMode::Global)?;
/// memory.begin(&stream)?;
/// let scratch = allocator.allocate(3_000_000, &stream)?;
/// allocator.free(scratch)?; // serves again within the capture, but nobody else
/// let graph = gpu.end_capture(&stream)?;
/// memory.end()?;
///
/// gpu.replay(&stream, &graph);
/// memory.note_replay(&stream)?;
/// drop(graph);
/// memory.reset()?;
/// allocator.empty_cache()?;
/// # Ok(())
/// # }
/// ```
pub struct GraphMemory<B: Backend> {
    shared: Arc<Shared<B>>,
    id: PoolId,
    /// The pool on each device; none after a reset.
    pools: Vec<PoolRef<B>>,
    state: State<B>,
}

enum State<B: Backend> {
    Idle,
    Expecting(Turn<B>, Vec<PoolPin>),
    Capturing(Turn<B>, Vec<PoolPin>, Going<B>),
    Captured(Vec<PoolPin>, Vec<B::Stream>),
}

/// A capture that goes on.
struct Going<B: Backend> {
    shared: Arc<Shared<B>>,
    id: CaptureId,
    origin: B::Stream,
    /// What sends its requests to the pool, and those of its parts that go on.
    scopes: BTreeMap<CaptureId, Vec<PoolScope<B>>>,
}

/// While it lives, nothing is given back to the backend.
struct Turn<B: Backend>(Arc<Shared<B>>);

impl<B: Backend> Turn<B> {
    fn take(shared: &Arc<Shared<B>>) -> Self {
        for (index, device) in shared.devices.iter().enumerate() {
            let _growth = device.lock_growth();
            shared.mark_idle_heaps(DeviceId::new(index as u16));
        }
        shared.captures.under_way.fetch_add(1, Ordering::AcqRel);
        for device in &shared.devices {
            // Who is giving memory back, or asking about streams, has looked at the captures already.
            drop(device.lock_growth());
        }
        Turn(Arc::clone(shared))
    }
}

impl<B: Backend> Drop for Turn<B> {
    fn drop(&mut self) {
        self.0.captures.under_way.fetch_sub(1, Ordering::AcqRel);
    }
}

impl<B: Backend> Drop for Going<B> {
    fn drop(&mut self) {
        self.shared.captures.known.lock().retain(|_, known| known.root != self.id);
    }
}

impl<B: Capture> CachingAllocator<B> {
    /// Memory for a graph, from a pool of its own.
    pub fn graph_memory(&self) -> GraphMemory<B> {
        self.graph_memory_of(self.shared.new_capture_pool())
    }

    /// Memory for a graph, from a pool that may have memory of other graphs, or be a user's. All of
    /// them are captured one after the other, and never replayed at the same time.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::AllocError::InvalidArgument) for the default pool, whose memory goes
    /// to everybody.
    pub fn graph_memory_in(&self, pool: PoolId) -> AllocResult<GraphMemory<B>, B> {
        let mut memory = self.graph_memory_of(pool);
        memory.open()?;
        Ok(memory)
    }

    fn graph_memory_of(&self, id: PoolId) -> GraphMemory<B> {
        self.shared.captures.power.get_or_init(Power::new);
        let shared = Arc::clone(&self.shared);
        GraphMemory { shared, id, pools: Vec::new(), state: State::Idle }
    }
}

impl<B: Backend> GraphMemory<B> {
    /// Its pool. It is the same on every device.
    pub fn pool(&self) -> PoolId {
        self.id
    }

    /// What it is up to.
    pub fn state(&self) -> GraphState {
        match &self.state {
            State::Idle => GraphState::Idle,
            State::Expecting(..) => GraphState::Expecting,
            State::Capturing(..) => GraphState::Capturing,
            State::Captured(..) => GraphState::Captured,
        }
    }

    /// The capture that goes on.
    pub fn capture(&self) -> Option<CaptureId> {
        match &self.state {
            State::Capturing(_, _, going) => Some(going.id),
            _ => None,
        }
    }

    fn wrong_state(&self, step: &'static str) -> CaptureError<B::Error> {
        CaptureError::WrongState { step, state: self.state() }
    }

    /// Refers to the pool on every device.
    fn open(&mut self) -> AllocResult<(), B> {
        if self.pools.is_empty() {
            let allocator = CachingAllocator { shared: Arc::clone(&self.shared) };
            let devices = (0..self.shared.devices.len()).map(|index| DeviceId::new(index as u16));
            let open = |device| allocator.open_pool(device, self.id, PoolOptions::new());
            self.pools = devices.map(open).collect::<Result<_, _>>()?;
        }
        Ok(())
    }

    /// A capture is about to begin: until it is over, nothing is given back to the backend, and growth
    /// records events on no stream but the caller's. Waits for growth and release that go on, and, with
    /// policy `ours`, records an event on each stream with idle memory before.
    ///
    /// # Errors
    /// [`CaptureError::WrongState`] unless [`GraphState::Idle`].
    pub fn expect(&mut self) -> Step<(), B> {
        let State::Idle = self.state else { return Err(self.wrong_state("expect a capture")) };
        self.open().map_err(CaptureError::Alloc)?;
        let turn = Turn::take(&self.shared);
        self.state = State::Expecting(turn, self.pools.iter().map(PoolRef::pin).collect());
        Ok(())
    }

    /// The driver has begun a capture on `stream`: requests on every stream that takes part in it
    /// are served from the pool.
    ///
    /// # Errors
    /// [`CaptureError::WrongState`] unless [`GraphState::Idle`] or [`GraphState::Expecting`];
    /// [`CaptureError::NotCapturing`], [`CaptureError::Invalidated`]; [`CaptureError::TakenCapture`]
    /// if another memory was begun for the capture; [`CaptureError::BusyPool`]; or whatever the
    /// backend reports.
    pub fn begin(&mut self, stream: &B::Stream) -> Step<(), B> {
        let was_idle = match self.state {
            State::Idle => true,
            State::Expecting(..) => false,
            _ => return Err(self.wrong_state("begin a capture")),
        };
        if was_idle {
            self.expect()?;
        }
        let begun = self.begin_expected(stream);
        if begun.is_err() && was_idle {
            self.state = State::Idle;
        }
        begun
    }

    fn begin_expected(&mut self, stream: &B::Stream) -> Step<(), B> {
        let id = self.active_capture(stream)?;
        self.make_known(id, id)?;
        let shared = Arc::clone(&self.shared);
        let scopes = BTreeMap::from([(id, self.scopes(id))]);
        let going = Going { shared, id, origin: stream.clone(), scopes };
        if let State::Expecting(turn, pins) = std::mem::replace(&mut self.state, State::Idle) {
            self.state = State::Capturing(turn, pins, going);
        }
        Ok(())
    }

    /// The capture that a stream takes part in.
    fn active_capture(&self, stream: &B::Stream) -> Step<CaptureId, B> {
        match self.shared.capture_status(stream).map_err(CaptureError::Alloc)? {
            CaptureStatus::Active(id) => Ok(id),
            CaptureStatus::None => Err(CaptureError::NotCapturing { stream: stream.id() }),
            CaptureStatus::Invalidated => Err(CaptureError::Invalidated { stream: stream.id() }),
        }
    }

    /// Enters a capture, which is a part of `root` or itself one.
    fn make_known(&self, id: CaptureId, root: CaptureId) -> Step<(), B> {
        let mut known = self.shared.captures.known.lock();
        if known.contains_key(&id) {
            return Err(CaptureError::TakenCapture { capture: id });
        }
        let other = |known: &Known| known.pool == self.id && known.root != root;
        if let Some((&capture, _)) = known.iter().find(|(_, known)| other(known)) {
            return Err(CaptureError::BusyPool { pool: self.id, capture });
        }
        known.insert(id, Known { pool: self.id, root, pasts: HashMap::new() });
        Ok(())
    }

    fn scopes(&self, id: CaptureId) -> Vec<PoolScope<B>> {
        self.pools.iter().map(|pool| pool.scope(ScopeFilter::Capture(id))).collect()
    }

    /// A part of the graph is captured apart: the driver has begun the capture of the body of a
    /// conditional node on `stream`, within `parent`, which is the capture itself or a part of it.
    /// Requests of that capture are served from the pool too. Returns its id.
    ///
    /// # Errors
    /// [`CaptureError::WrongState`] unless [`GraphState::Capturing`];
    /// [`CaptureError::UnknownCapture`] if `parent` does not go on; otherwise as
    /// [`begin`](Self::begin).
    pub fn begin_part(&mut self, parent: CaptureId, stream: &B::Stream) -> Step<CaptureId, B> {
        let State::Capturing(_, _, going) = &self.state else {
            return Err(self.wrong_state("begin a part of a capture"));
        };
        let root = going.id;
        if !going.scopes.contains_key(&parent) {
            return Err(CaptureError::UnknownCapture { capture: parent });
        }
        let id = self.active_capture(stream)?;
        self.make_known(id, root)?;
        let scopes = self.scopes(id);
        if let State::Capturing(_, _, going) = &mut self.state {
            going.scopes.insert(id, scopes);
        }
        Ok(id)
    }

    /// The driver has ended the capture of a part. Blocks that it used on side streams wait for the
    /// end of the whole, which also ends the parts that go on.
    ///
    /// # Errors
    /// [`CaptureError::WrongState`] unless [`GraphState::Capturing`];
    /// [`CaptureError::UnknownCapture`] unless it is a part that goes on.
    pub fn end_part(&mut self, part: CaptureId) -> Step<(), B> {
        let State::Capturing(_, _, going) = &mut self.state else {
            return Err(self.wrong_state("end a part of a capture"));
        };
        match part != going.id && going.scopes.remove(&part).is_some() {
            true => Ok(()),
            false => Err(CaptureError::UnknownCapture { capture: part }),
        }
    }

    /// The driver has ended the capture and given a graph. Blocks that were freed meanwhile, but
    /// waited for their uses in the capture, are free now.
    ///
    /// # Errors
    /// [`CaptureError::WrongState`] unless [`GraphState::Capturing`];
    /// [`CaptureError::StillCapturing`]; or whatever the backend reports.
    pub fn end(&mut self) -> Step<(), B> {
        let State::Capturing(_, _, going) = &self.state else {
            return Err(self.wrong_state("end a capture"));
        };
        let status = self.shared.capture_status(&going.origin).map_err(CaptureError::Alloc)?;
        // The stream may be captured again by now.
        if status == CaptureStatus::Active(going.id) || status == CaptureStatus::Invalidated {
            return Err(CaptureError::StillCapturing { stream: going.origin.id() });
        }
        if let State::Capturing(turn, pins, going) = std::mem::replace(&mut self.state, State::Idle)
        {
            self.state = State::Captured(pins, Vec::new());
            self.settle(going, turn);
        }
        Ok(())
    }

    /// The capture failed, or will not be begun: there is no graph, and what was allocated for it is
    /// as any other memory of the pool, which this memory no longer refers to. The driver should
    /// have ended the capture before: until it does, requests on its streams are served from the
    /// default pool.
    ///
    /// # Errors
    /// [`CaptureError::WrongState`] unless [`GraphState::Expecting`] or [`GraphState::Capturing`].
    pub fn abort(&mut self) -> Step<(), B> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Capturing(turn, _, going) => self.settle(going, turn),
            State::Expecting(..) => {}
            other => {
                self.state = other;
                return Err(self.wrong_state("abort a capture"));
            }
        }
        self.pools.clear();
        Ok(())
    }

    /// Ends what a capture holds back.
    fn settle(&self, going: Going<B>, turn: Turn<B>) {
        drop(going);
        let mut op = self.shared.begin();
        for index in 0..self.shared.devices.len() {
            self.shared.settle_deferred(DeviceId::new(index as u16), &mut op.trace);
        }
        drop(turn);
    }

    /// The graph was queued on `stream`: [`reset`](Self::reset) will wait for it. Replays that are
    /// not noted must be over by then. This is about the memory of the pool only: a replay is also
    /// work on the blocks from elsewhere that the graph uses, to be declared by
    /// [`record_stream`](CachingAllocator::record_stream) as any other.
    ///
    /// # Errors
    /// [`CaptureError::WrongState`] unless [`GraphState::Captured`].
    pub fn note_replay(&mut self, stream: &B::Stream) -> Step<(), B> {
        let State::Captured(_, replays) = &mut self.state else {
            return Err(self.wrong_state("note a replay"));
        };
        if replays.iter().all(|known| known.id() != stream.id()) {
            replays.push(stream.clone());
        }
        Ok(())
    }

    /// The graph has been destroyed and will not be replayed again: waits for the replays that were
    /// noted, and lets go of the memory. Its blocks that are free go back with the next flush unless
    /// somebody else refers to the pool; those that are not stay until they are freed.
    ///
    /// # Errors
    /// [`CaptureError::WrongState`] while a capture is expected or goes on;
    /// [`CaptureError::StillCapturing`] if a stream with a noted replay captures now; or whatever the
    /// backend reports.
    pub fn reset(&mut self) -> Step<(), B> {
        match &self.state {
            State::Captured(_, replays) => {
                for stream in replays {
                    if !self.shared.synchronize(stream).map_err(CaptureError::Alloc)? {
                        return Err(CaptureError::StillCapturing { stream: stream.id() });
                    }
                }
            }
            State::Idle => {}
            _ => return Err(self.wrong_state("reset the memory")),
        }
        self.state = State::Idle;
        self.pools.clear();
        Ok(())
    }
}

impl<B: Backend> Drop for GraphMemory<B> {
    fn drop(&mut self) {
        match self.state() {
            GraphState::Expecting | GraphState::Capturing => drop(self.abort()),
            GraphState::Idle | GraphState::Captured => {
                if self.reset().is_err()
                    && let State::Captured(pins, _) =
                        std::mem::replace(&mut self.state, State::Idle)
                {
                    // Replays may still run: the memory stays where it is.
                    std::mem::forget(pins);
                }
            }
        }
    }
}

impl<B: Backend> fmt::Debug for GraphMemory<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphMemory")
            .field("pool", &self.id)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

impl<B: Backend> Shared<B> {
    /// The id of a pool for captures that no pool of this allocator had before.
    fn new_capture_pool(&self) -> PoolId {
        loop {
            let id = PoolId(self.next_capture_pool.fetch_add(1, Ordering::Relaxed), 0);
            // Fronts may have named pools themselves.
            if self.devices.iter().all(|device| !device.pools.exists(id)) {
                return id;
            }
        }
    }
}
