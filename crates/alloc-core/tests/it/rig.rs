//! The harness: an allocator on a simulated GPU whose judge hears of everything.

use alloc_core::backend::Stream;
use alloc_core::{
    Addr, AllocError, Allocation, CachingAllocator, Checkpoint, Config, DeviceId, GraphMemory,
    Policy, PoolId, PoolRef, Restored, Settings, TraceEntry, TraceSink,
};
use mock_backend::{
    Builder, Call, CaptureMode, Graph, LogEntry, MockBackend, MockError, MockStream, Work,
};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

pub(crate) type Alloc = CachingAllocator<MockBackend>;
pub(crate) type Error = AllocError<MockError>;

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const DEV0: DeviceId = DeviceId::new(0);
pub(crate) const DEV1: DeviceId = DeviceId::new(1);
pub(crate) const BOTH: [Policy; 2] = [Policy::Pytorch, Policy::Ours];

/// Side streams that every device of a rig has besides its default stream.
const SIDE_STREAMS: usize = 4;

/// A pool's number for the judge.
pub(crate) fn number(pool: PoolId) -> u64 {
    pool.0 << 32 | pool.1
}

/// The configuration of `policy` with ordinary segments, changed by a settings string.
pub(crate) fn config(policy: Policy, text: &str) -> Config {
    let mut config = Config::of(policy);
    config.settings = Settings { expandable_segments: Some(false), ..Settings::default() };
    config.apply(text).expect(text);
    config
}

/// An allocator under test. After every operation it is checked from scratch and its statistics are
/// compared with what the judge knows to be live; the end of a rig frees everything, drops the
/// allocator and asserts that nothing leaked.
pub(crate) struct Rig {
    pub(crate) backend: MockBackend,
    alloc: Option<Alloc>,
    streams: Vec<Vec<MockStream>>,
    live: RefCell<BTreeMap<Addr, (DeviceId, u64)>>,
}

impl Deref for Rig {
    type Target = Alloc;
    fn deref(&self) -> &Alloc {
        self.alloc.as_ref().expect("the allocator lives as long as the rig")
    }
}

impl Rig {
    /// One device of 80 GiB.
    pub(crate) fn new(policy: Policy, text: &str) -> Self {
        Rig::on(MockBackend::builder(), policy, text)
    }

    /// One device of `bytes`.
    pub(crate) fn of_size(bytes: u64, policy: Policy, text: &str) -> Self {
        Rig::on(MockBackend::builder().device(bytes), policy, text)
    }

    /// Any machine. It becomes strict and keeps a log of its calls.
    pub(crate) fn on(builder: Builder, policy: Policy, text: &str) -> Self {
        Rig::configured(builder, config(policy, text))
    }

    pub(crate) fn configured(builder: Builder, config: Config) -> Self {
        use alloc_core::backend::Backend;
        let backend = builder.strict().log(100_000).build();
        let alloc = Alloc::with_virtual_memory(backend.clone(), config).expect("an allocator");
        let streams = (0..backend.device_count())
            .map(|index| {
                let device = DeviceId::new(index);
                let side = (0..SIDE_STREAMS).map(|_| backend.stream(device));
                [backend.default_stream(device)].into_iter().chain(side).collect()
            })
            .collect();
        Rig { backend, alloc: Some(alloc), streams, live: RefCell::default() }
    }

    /// Stream `n` of device 0; 0 is its default stream.
    pub(crate) fn s(&self, n: usize) -> MockStream {
        self.streams[0][n]
    }

    /// Stream `n` of device 1.
    pub(crate) fn s1(&self, n: usize) -> MockStream {
        self.streams[1][n]
    }

    /// Allocates; a kernel that touches the block is queued on its stream, ending when it can.
    pub(crate) fn try_alloc(&self, bytes: u64, stream: &MockStream) -> Result<Allocation, Error> {
        self.noted(self.allocate(bytes, stream), bytes, stream)
    }

    /// From a pool; otherwise as [`alloc`](Self::alloc).
    #[track_caller]
    pub(crate) fn alloc_in(
        &self,
        pool: &PoolRef<MockBackend>,
        bytes: u64,
        stream: &MockStream,
    ) -> Allocation {
        match self.noted(pool.allocate(bytes, stream), bytes, stream) {
            Ok(block) => block,
            Err(error) => panic!("{bytes} bytes: {error}"),
        }
    }

    fn noted(
        &self,
        result: Result<Allocation, Error>,
        bytes: u64,
        stream: &MockStream,
    ) -> Result<Allocation, Error> {
        if let Ok(block) = &result
            && bytes > 0
        {
            assert!(block.bytes() >= bytes && block.requested() == bytes);
            let (judge, pool) = (self.backend.judge(), self.pool_of(block));
            match pool {
                PoolId::DEFAULT => judge.allocated(block.addr(), block.bytes(), stream),
                pool => judge.allocated_in(block.addr(), block.bytes(), stream, number(pool)),
            }
            self.live.borrow_mut().insert(block.addr(), (stream.device(), block.bytes()));
            self.touch(block, stream);
        }
        self.verify();
        result
    }

    #[track_caller]
    pub(crate) fn alloc(&self, bytes: u64, stream: &MockStream) -> Allocation {
        match self.try_alloc(bytes, stream) {
            Ok(block) => block,
            Err(error) => panic!("{bytes} bytes: {error}"),
        }
    }

    /// The error of a request that must run out of memory.
    #[track_caller]
    pub(crate) fn oom(&self, bytes: u64, stream: &MockStream) -> Error {
        match self.try_alloc(bytes, stream) {
            Ok(block) => panic!("{bytes} bytes were served at {}", block.addr()),
            Err(error) => {
                assert!(matches!(error, AllocError::OutOfMemory(_)), "{error}");
                error
            }
        }
    }

    /// The pool of a live block.
    #[track_caller]
    pub(crate) fn pool_of(&self, block: &Allocation) -> PoolId {
        self.locate(block.addr()).expect("the block is live").pool
    }

    /// Begins a capture on `stream` whose graph gets `memory`.
    #[track_caller]
    pub(crate) fn begin(&self, memory: &mut GraphMemory<MockBackend>, stream: &MockStream) {
        memory.expect().expect("no graph yet");
        self.backend.begin_capture(stream, CaptureMode::Global).expect("begins");
        self.backend.judge().capture_shares(stream, number(memory.pool()));
        memory.begin(stream).expect("it captures");
        self.verify();
    }

    /// Ends it.
    #[track_caller]
    pub(crate) fn end(&self, memory: &mut GraphMemory<MockBackend>, stream: &MockStream) -> Graph {
        let graph = self.backend.end_capture(stream).expect("a graph");
        memory.end().expect("it captures no more");
        self.verify();
        graph
    }

    /// Captures what `work` does on `stream` into a graph with `memory`.
    #[track_caller]
    pub(crate) fn capture<R>(
        &self,
        memory: &mut GraphMemory<MockBackend>,
        stream: &MockStream,
        work: impl FnOnce() -> R,
    ) -> (Graph, R) {
        self.begin(memory, stream);
        let result = work();
        (self.end(memory, stream), result)
    }

    /// Replays a graph.
    #[track_caller]
    pub(crate) fn replay(
        &self,
        memory: &mut GraphMemory<MockBackend>,
        graph: &Graph,
        stream: &MockStream,
    ) {
        self.backend.replay(stream, graph);
        memory.note_replay(stream).expect("there is a graph");
    }

    /// Queues a kernel on `stream` that touches the block and ends when it can: at once, unless
    /// the stream is busy.
    pub(crate) fn touch(&self, block: &Allocation, stream: &MockStream) {
        let work = Work::new().touching(block.addr(), block.bytes()).lasting(0);
        self.backend.launch(stream, work);
    }

    /// Restores a checkpoint. The judge learns of the blocks that came and went.
    pub(crate) fn try_restore(
        &self,
        pool: &PoolRef<MockBackend>,
        checkpoint: &Checkpoint,
    ) -> Result<Restored, Error> {
        let result = pool.restore(checkpoint);
        if let Ok(restored) = &result {
            for stale in &restored.stale {
                assert!(self.live.borrow_mut().remove(&stale.addr).is_some());
                self.backend.judge().freed(stale.addr);
            }
            for block in &restored.revived {
                let streams = self.streams.iter().flatten();
                let stream = streams.copied().find(|stream| stream.id() == block.stream());
                let stream = stream.expect("a stream of the rig");
                self.backend.judge().allocated(block.addr(), block.bytes(), &stream);
                self.live.borrow_mut().insert(block.addr(), (stream.device(), block.bytes()));
                self.touch(block, &stream);
            }
        }
        self.verify();
        result
    }

    #[track_caller]
    pub(crate) fn restore(&self, pool: &PoolRef<MockBackend>, checkpoint: &Checkpoint) -> Restored {
        match self.try_restore(pool, checkpoint) {
            Ok(restored) => restored,
            Err(error) => panic!("{error}"),
        }
    }

    pub(crate) fn try_free(&self, block: Allocation) -> Result<(), (Allocation, Error)> {
        let addr = block.addr();
        let result = self.deref().free(block).map_err(|e| (e.allocation, e.error));
        if result.is_ok() && self.live.borrow_mut().remove(&addr).is_some() {
            self.backend.judge().freed(addr);
        }
        self.verify();
        result
    }

    #[track_caller]
    pub(crate) fn free(&self, block: Allocation) {
        if let Err((block, error)) = self.try_free(block) {
            panic!("free of {}: {error}", block.addr());
        }
    }

    /// The block is used on `stream`, and the allocator is told.
    #[track_caller]
    pub(crate) fn record(&self, block: &Allocation, stream: &MockStream) {
        self.touch(block, stream);
        self.record_stream(block, stream).expect("record_stream");
        self.verify();
    }

    pub(crate) fn busy(&self, stream: &MockStream) {
        self.backend.busy(stream);
    }

    pub(crate) fn pass(&self, stream: &MockStream) {
        self.backend.pass(stream);
    }

    #[track_caller]
    pub(crate) fn empty(&self) {
        self.empty_cache().expect("empty_cache");
        self.verify();
    }

    /// A statistic of a device.
    #[track_caller]
    pub(crate) fn stat_of(&self, device: DeviceId, key: &str) -> i64 {
        let stats = self.stats(device).expect("the device exists");
        stats.get(key).unwrap_or_else(|| panic!("no statistic {key}"))
    }

    /// A statistic of device 0.
    #[track_caller]
    pub(crate) fn stat(&self, key: &str) -> i64 {
        self.stat_of(DEV0, key)
    }

    /// Bytes of device 0 obtained from the backend.
    #[track_caller]
    pub(crate) fn reserved(&self) -> u64 {
        self.stat("reserved_bytes.all.current") as u64
    }

    #[track_caller]
    pub(crate) fn allocated(&self) -> u64 {
        self.stat("allocated_bytes.all.current") as u64
    }

    #[track_caller]
    pub(crate) fn active(&self) -> u64 {
        self.stat("active_bytes.all.current") as u64
    }

    /// First address of the segment of a live block.
    #[track_caller]
    pub(crate) fn segment(&self, block: &Allocation) -> Addr {
        self.locate(block.addr()).expect("the block is live").segment
    }

    /// The calls of this kind since the log was last taken.
    pub(crate) fn calls(&self, call: Call) -> Vec<LogEntry> {
        self.backend.take_log().into_iter().filter(|entry| entry.info.call == call).collect()
    }

    /// Everything recomputed from scratch agrees, and the judge knows the same live bytes.
    #[track_caller]
    pub(crate) fn verify(&self) {
        if let Err(violation) = self.check() {
            panic!("{violation}");
        }
        for index in 0..self.streams.len() {
            let device = DeviceId::new(index as u16);
            let live = self.live.borrow();
            let live = live.values().filter(|(at, _)| *at == device);
            let (count, bytes) = live.fold((0, 0), |sum, (_, bytes)| (sum.0 + 1, sum.1 + bytes));
            assert_eq!(self.stat_of(device, "allocation.all.current"), count);
            assert_eq!(self.stat_of(device, "allocated_bytes.all.current") as u64, bytes);
        }
    }

    /// The blocks that the client holds.
    pub(crate) fn live(&self) -> Vec<Addr> {
        self.live.borrow().keys().copied().collect()
    }

    /// The block at `addr` was freed behind the rig's back.
    pub(crate) fn forget(&self, addr: Addr) {
        assert!(self.live.borrow_mut().remove(&addr).is_some());
        self.backend.judge().freed(addr);
    }

    /// Frees everything that is live.
    #[track_caller]
    pub(crate) fn free_all(&self) {
        for addr in self.live() {
            self.free_raw(addr).expect("a live block");
            self.backend.judge().freed(addr);
            self.live.borrow_mut().remove(&addr);
        }
        self.verify();
    }

    /// Drops the allocator, whatever is live.
    pub(crate) fn drop_allocator(&mut self) {
        for addr in std::mem::take(self.live.get_mut()).into_keys() {
            self.backend.judge().freed(addr);
        }
        self.alloc = None;
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        if self.alloc.is_some() {
            self.free_all();
        }
        self.drop_allocator();
        self.backend.assert_clean();
    }
}

/// Collects the trace.
#[derive(Default)]
pub(crate) struct Recorder(Mutex<Vec<TraceEntry>>);

impl TraceSink for Recorder {
    fn record(&self, entry: &TraceEntry) {
        self.0.lock().expect("no recorder panics").push(*entry);
    }
}

impl Recorder {
    /// A recorder that receives the trace of `alloc` from now on.
    pub(crate) fn attached(alloc: &Alloc) -> Arc<Self> {
        let recorder = Arc::new(Recorder::default());
        alloc.set_trace_sink(Some(Arc::clone(&recorder) as Arc<dyn TraceSink>));
        recorder
    }

    /// The entries since the last call.
    pub(crate) fn take(&self) -> Vec<TraceEntry> {
        std::mem::take(&mut *self.0.lock().expect("no recorder panics"))
    }

    /// The names of the actions since the last call.
    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.take().into_iter().map(|entry| entry.action.name()).collect()
    }
}
