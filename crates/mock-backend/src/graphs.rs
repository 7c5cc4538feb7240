//! Graphs: what a capture recorded, and the judging of replays.
//!
//! A graph uses the addresses that it was captured with every time it runs. So what was allocated
//! during the capture belongs to the graph until it is destroyed, freed or not: nobody else may get
//! it, and it may not be returned. Captures that share their memory, because their graphs are never
//! replayed at the same time, say so ([`Judge::capture_shares`](crate::Judge::capture_shares)).

use std::collections::BTreeMap;

use alloc_core::backend::Capture;
use alloc_core::{Addr, StreamId};

use crate::captures::{CaptureError, CaptureMode};
use crate::clock::Clock;
use crate::judge::{end_of, unordered};
use crate::memory::Piece;
use crate::ranges::RangeMap;
use crate::sim::{Sim, on_stream};
use crate::streams::{End, id_of};
use crate::{Call, Judge, MockBackend, MockError, MockStream, Rule, Work};

/// Who may use the same memory: what is captured here or there is told apart no further.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sharing {
    /// One capture and its graph.
    Alone(u64),
    /// Everything in a pool of this number.
    Pool(u64),
}

/// Memory that captured work touches.
#[derive(Clone, Debug)]
pub(crate) struct Touch {
    addr: Addr,
    bytes: u64,
    /// What was behind the addresses.
    pieces: Vec<Piece>,
    /// The serial of the client's allocation that was used, if the memory is not the graph's own.
    client: Option<u64>,
}

/// What a capture has recorded.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) sharing: Sharing,
    /// Streams that took part, ascending; known at the end.
    pub(crate) streams: Vec<usize>,
    touches: Vec<Touch>,
    /// The physical memory, and the addresses, that belong to the graph.
    own_physical: RangeMap<()>,
    own_addrs: RangeMap<()>,
}

impl Recorded {
    pub(crate) fn new(sharing: Sharing) -> Self {
        Recorded {
            sharing,
            streams: Vec::new(),
            touches: Vec::new(),
            own_physical: RangeMap::default(),
            own_addrs: RangeMap::default(),
        }
    }

    /// Notes a use of memory: the graph's own, or that of a client's allocation.
    fn touch(&mut self, addr: Addr, bytes: u64, pieces: Vec<Piece>, client: Option<u64>) {
        if client.is_none() {
            for &(from, to) in &pieces {
                self.own_physical.set(from, to, ());
            }
            self.own_addrs.set(addr.get(), end_of(addr, bytes), ());
        }
        self.touches.push(Touch { addr, bytes, pieces, client });
    }
}

/// A graph that has not been destroyed.
#[derive(Debug)]
pub(crate) struct GraphState {
    recorded: Recorded,
    /// Stream, item and order of its latest replay: a graph never runs twice at once.
    latest: Option<(usize, u64, Clock)>,
}

/// The graphs that exist.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    next: u64,
    all: BTreeMap<u64, GraphState>,
}

/// A captured graph. Dropping it destroys it; its memory may be returned from then on.
pub struct Graph {
    backend: MockBackend,
    id: u64,
}

impl Graph {
    /// Streams that took part in the capture, ascending.
    pub fn streams(&self) -> Vec<StreamId> {
        let sim = self.backend.sim();
        sim.graphs.all[&self.id].recorded.streams.iter().map(|&stream| id_of(stream)).collect()
    }

    /// Memory that its work touches, as (address, bytes), in the order of queueing.
    pub fn touches(&self) -> Vec<(Addr, u64)> {
        let sim = self.backend.sim();
        let touches = &sim.graphs.all[&self.id].recorded.touches;
        touches.iter().map(|touch| (touch.addr, touch.bytes)).collect()
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.backend.sim().graphs.all.remove(&self.id);
    }
}

impl PartialEq for Graph {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id && self.backend.shared.id == other.backend.shared.id
    }
}

impl Eq for Graph {}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").field("id", &self.id).finish_non_exhaustive()
    }
}

/// # Capture and graphs
impl MockBackend {
    /// Begins a capture on `stream`: from now on its work, and that of streams ordered after it by
    /// captured events, goes into a graph.
    ///
    /// # Errors
    /// [`CaptureError::AlreadyCapturing`].
    pub fn begin_capture(
        &self,
        stream: &MockStream,
        mode: CaptureMode,
    ) -> Result<(), CaptureError> {
        let index = self.own(stream);
        self.sim().captures.begin(index, mode)
    }

    /// Ends the capture that was begun on `stream`.
    ///
    /// # Errors
    /// See [`CaptureError`]. With [`CaptureError::NotTheOrigin`] and [`CaptureError::WrongThread`]
    /// it goes on, otherwise it is over.
    pub fn end_capture(&self, stream: &MockStream) -> Result<Graph, CaptureError> {
        let index = self.own(stream);
        let mut sim = self.sim();
        let recorded = sim.captures.end(index)?;
        sim.graphs.next += 1;
        let id = sim.graphs.next;
        sim.graphs.all.insert(id, GraphState { recorded, latest: None });
        Ok(Graph { backend: self.clone(), id })
    }

    /// Makes the capture that `stream` takes part in fail, as a forbidden call of the client would.
    /// It must still be ended.
    ///
    /// # Panics
    /// If the stream does not capture.
    pub fn invalidate_capture(&self, stream: &MockStream) {
        let index = self.own(stream);
        let mut sim = self.sim();
        let id = sim.captures.of(index);
        sim.captures.strike(id.expect("the stream takes part in a capture"));
    }

    /// Whether `stream` takes part in a capture.
    pub fn is_capturing(&self, stream: &MockStream) -> bool {
        self.sim().captures.of(self.own(stream)).is_some()
    }

    /// Queues a run of all of the graph's work on `stream`, until somebody ends it. It comes after
    /// earlier replays of the same graph, whatever their streams. The judge objects if the memory
    /// is not what it was when it was captured, or if other work that this replay is not ordered
    /// after may still use it.
    ///
    /// # Panics
    /// If stream or graph is another backend's, or the stream captures; in a strict backend if the
    /// judge objects.
    pub fn replay(&self, stream: &MockStream, graph: &Graph) {
        let index = self.own(stream);
        assert_eq!(graph.backend.shared.id, self.shared.id, "a graph of another backend");
        let mut sim = self.sim();
        assert!(sim.captures.of(index).is_none(), "graphs in graphs are not simulated");
        if !sim.unloaded {
            sim.replay(stream, graph.id);
        }
    }
}

impl Judge<'_> {
    /// The capture that `stream` takes part in allocates from a pool of this number, and so may
    /// use memory again that belongs to graphs captured into the same pool: the client never
    /// replays them at the same time. Without this, every capture is alone.
    ///
    /// # Panics
    /// If the stream does not capture.
    pub fn capture_shares(&self, stream: &MockStream, pool: u64) {
        let backend = self.backend();
        let index = backend.own(stream);
        let mut sim = backend.sim();
        let id = sim.captures.of(index).expect("the stream takes part in a capture");
        if let Some(capture) = sim.captures.get_mut(id) {
            capture.recorded.sharing = Sharing::Pool(pool);
        }
    }
}

impl Sim {
    /// Adds work to a capture; `uses` are its ranges with what is behind them.
    pub(crate) fn capture(&mut self, id: u64, stream: usize, work: Work, uses: Vec<Vec<Piece>>) {
        let Sim { captures, book, .. } = self;
        let Some(capture) = captures.get_mut(id) else { return };
        let own = capture.add_node(stream);
        for &(from, to) in uses.iter().flatten() {
            own.lane.touched.set(from, to, own.lane.queued);
        }
        for ((addr, bytes), pieces) in work.ranges.into_iter().zip(uses) {
            let live = book.holding(addr, bytes);
            let client = live.filter(|live| live.sharing != Some(capture.recorded.sharing));
            let client = client.map(|live| live.serial);
            capture.recorded.touch(addr, bytes, pieces, client);
        }
    }

    /// Judges whether what is handed out, or goes away, belongs to a graph or a capture that
    /// `sharing` does not share with.
    pub(crate) fn belongs_to_a_graph(
        &self,
        sharing: Option<Sharing>,
        overlaps: impl Fn(&RangeMap<()>, &RangeMap<()>) -> bool,
    ) -> bool {
        let graphs = self.graphs.all.values().map(|graph| &graph.recorded);
        let captures = self.captures.recorded().map(|(_, recorded)| recorded);
        graphs
            .chain(captures)
            .filter(|recorded| sharing != Some(recorded.sharing))
            .any(|recorded| overlaps(&recorded.own_physical, &recorded.own_addrs))
    }

    fn replay(&mut self, stream: &MockStream, graph: u64) {
        self.operation += 1;
        let index = stream.index;
        let Some(state) = self.graphs.all.get(&graph) else { return };
        let touches = state.recorded.touches.clone();
        if let Some((on, item, clock)) = state.latest.clone()
            && on != index
        {
            self.streams.queue_after(index, (on, item), &clock);
        }
        for touch in &touches {
            self.judge_replay(stream, touch);
        }
        let item = self.streams.queue_work(index, End::Open);
        let state = &mut self.streams.all[index];
        for touch in touches {
            state.touched_addrs.set(touch.addr.get(), end_of(touch.addr, touch.bytes), item);
            for (from, to) in touch.pieces {
                state.lane.replayed.set(from, to, item);
            }
        }
        let clock = state.lane.now(index);
        if let Some(graph) = self.graphs.all.get_mut(&graph) {
            graph.latest = Some((index, item, clock));
        }
        self.streams.settle();
    }

    fn judge_replay(&mut self, stream: &MockStream, touch: &Touch) {
        let &Touch { addr, bytes, ref pieces, client } = touch;
        let on = Some(stream.index);
        // Whether its devices may access it was judged when it was captured.
        let now = self.memory.pieces(addr, bytes);
        if now.as_ref() != Ok(pieces) {
            self.violate(Rule::ReplayWithoutMemory, (on, None), (addr, bytes));
        }
        if let Some(serial) = client
            && self.book.holding(addr, bytes).is_none_or(|live| live.serial != serial)
        {
            self.violate(Rule::UnallocatedUse, (on, None), (addr, bytes));
        }
        let all = &self.streams.all;
        let lanes = all.iter().map(|state| &state.lane).enumerate();
        let own = (stream.index, &all[stream.index].lane);
        let racing = unordered(lanes, own, |s| self.streams.host.get(s), pieces, true);
        for other in racing {
            self.violate(Rule::ReplayRace, (on, Some(other)), (addr, bytes));
        }
    }
}

impl Capture for MockBackend {
    fn capture_status(
        &self,
        stream: &MockStream,
    ) -> Result<alloc_core::backend::CaptureStatus, MockError> {
        let info = on_stream(Call::CaptureStatus, stream);
        self.call(info, |sim, _| {
            self.check_stream(sim, stream, &info)?;
            Ok(sim.captures.status(stream.index))
        })
    }

    fn capture_tips(
        &self,
        stream: &MockStream,
    ) -> Result<Option<alloc_core::backend::CaptureTips>, MockError> {
        let info = on_stream(Call::CaptureTips, stream);
        self.call(info, |sim, _| {
            self.check_stream(sim, stream, &info)?;
            Ok(sim.captures.tips(stream.index))
        })
    }

    fn extend_past(
        &self,
        stream: &MockStream,
        past: &mut std::collections::HashSet<alloc_core::backend::GraphNodeId>,
    ) -> Result<(), MockError> {
        let info = on_stream(Call::ExtendPast, stream);
        self.call(info, |sim, _| {
            self.check_stream(sim, stream, &info)?;
            sim.captures.extend_past(stream.index, past);
            Ok(())
        })
    }
}
