//! The backend itself: what tests do with it. The driver calls are in `driver`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use alloc_core::backend::Stream;
use alloc_core::{Addr, DeviceId};
use parking_lot::{Mutex, RwLock};

use crate::captures::Captures;
use crate::event::{Alive, MockEvent};
use crate::faults::FaultPlan;
use crate::graphs::Sharing;
use crate::share::Neighbours;
use crate::sim::{Position, Sim, on_stream};
use crate::streams::Ending;
use crate::{
    Builder, Call, CallInfo, Costs, Fault, Fed, Feed, Leaks, LogEntry, MockError, MockStream, Rule,
    SpanKind, Violation, Work,
};

/// Runs at the start of a driver call.
pub(crate) type Hook = Arc<dyn Fn(&CallInfo) + Send + Sync>;

/// A simulated machine with its driver. Clones are the same machine.
///
/// Everything may be called from any thread. One internal lock serialises the calls; hooks and
/// feeds run without it.
#[derive(Clone)]
pub struct MockBackend {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) id: u32,
    pub(crate) device_count: u16,
    pub(crate) granularity: u64,
    pub(crate) events: Arc<AtomicUsize>,
    hooks: RwLock<BTreeMap<Call, Hook>>,
    feed: Mutex<Option<Feed>>,
    sim: Mutex<Sim>,
    pub(crate) neighbours: Neighbours,
}

impl MockBackend {
    /// One device of 80 GiB, everything else at its default.
    pub fn new() -> Self {
        MockBackend::builder().build()
    }

    /// Describes a machine.
    pub fn builder() -> Builder {
        Builder::new()
    }

    pub(crate) fn assemble(
        mut sim: Sim,
        device_count: u16,
        granularity: u64,
        feed: Option<Feed>,
        hooks: Vec<(Call, Hook)>,
        neighbours: Neighbours,
    ) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        // No two captures of a process have the same id.
        sim.captures = Captures::above(u64::from(id) << 32);
        let shared = Shared {
            id,
            device_count,
            granularity,
            events: Arc::default(),
            hooks: RwLock::new(hooks.into_iter().collect()),
            feed: Mutex::new(feed),
            sim: Mutex::new(sim),
            neighbours,
        };
        MockBackend { shared: Arc::new(shared) }
    }

    pub(crate) fn sim(&self) -> parking_lot::MutexGuard<'_, Sim> {
        self.shared.sim.lock()
    }

    pub(crate) fn run_hook(&self, info: &CallInfo) {
        let hook = self.shared.hooks.read().get(&info.call).cloned();
        if let Some(hook) = hook {
            hook(info);
        }
    }

    /// What the feed says; [`Fed::Choose`] if there is none.
    pub(crate) fn ask_feed(&self, kind: SpanKind, bytes: u64) -> Option<Fed> {
        match &mut *self.shared.feed.lock() {
            None => Some(Fed::Choose),
            Some(feed) => feed(kind, bytes),
        }
    }

    /// Panics unless the stream is one of this backend.
    pub(crate) fn own(&self, stream: &MockStream) -> usize {
        assert_eq!(stream.backend, self.shared.id, "a stream of another backend");
        stream.index
    }
}

/// # Streams and work
impl MockBackend {
    /// The default stream of `device`, which exists from the start.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn default_stream(&self, device: DeviceId) -> MockStream {
        assert!(device.index() < usize::from(self.shared.device_count), "no {device}");
        MockStream { backend: self.shared.id, index: device.index(), device }
    }

    /// A new stream on `device`; ids ascend in the order of creation.
    ///
    /// # Panics
    /// If there is no such device.
    pub fn stream(&self, device: DeviceId) -> MockStream {
        assert!(device.index() < usize::from(self.shared.device_count), "no {device}");
        let index = self.sim().streams.add(device);
        MockStream { backend: self.shared.id, index, device }
    }

    /// Queues work. On a capturing stream it goes into the capture instead and never runs.
    ///
    /// # Panics
    /// If the stream is another backend's; in a strict backend if the judge objects.
    pub fn launch(&self, stream: &MockStream, work: Work) {
        self.own(stream);
        let mut sim = self.sim();
        if !sim.unloaded {
            sim.launch(stream, work);
        }
    }

    /// Queues work that touches no memory and runs until somebody ends it.
    pub fn busy(&self, stream: &MockStream) {
        self.launch(stream, Work::new().endless());
    }

    /// Everything queued on `stream` so far finishes, now, and everything it waits for. The host
    /// does not notice: it still has to ask.
    pub fn pass(&self, stream: &MockStream) {
        let index = self.own(stream);
        let mut sim = self.sim();
        sim.operation += 1;
        let items = sim.streams.all[index].lane.queued;
        sim.streams.end_through(index, items, Ending::Told);
    }

    /// The first unfinished work of `stream` finishes, now. `false` if there is none, or if it has
    /// to wait for another stream first.
    pub fn finish_next(&self, stream: &MockStream) -> bool {
        let index = self.own(stream);
        let mut sim = self.sim();
        sim.operation += 1;
        sim.streams.end_next(index)
    }

    /// Whether `stream` has unfinished work.
    pub fn is_busy(&self, stream: &MockStream) -> bool {
        self.sim().streams.is_busy(self.own(stream))
    }

    /// The host waits for all work of all devices.
    pub fn sync(&self) {
        let mut sim = self.sim();
        sim.operation += 1;
        let all: Vec<usize> = (0..sim.streams.all.len()).collect();
        sim.host_waits_for_all(&all);
        sim.after_sync();
    }

    /// The host waits for all work of `device` (cudaDeviceSynchronize).
    pub fn sync_device(&self, device: DeviceId) {
        let mut sim = self.sim();
        sim.operation += 1;
        let all = sim.streams.of_device(device);
        sim.host_waits_for_all(&all);
        sim.after_sync();
    }

    /// The host waits for all work of `stream` (cudaStreamSynchronize).
    pub fn sync_stream(&self, stream: &MockStream) {
        let index = self.own(stream);
        let mut sim = self.sim();
        sim.operation += 1;
        sim.host_waits_for_all(&[index]);
        sim.after_sync();
    }

    /// What follows on `stream` runs after `event` (cudaStreamWaitEvent); the host does not wait. If
    /// the event was captured, the stream joins that capture.
    ///
    /// # Errors
    /// Injected ones; [`ErrorKind::Other`](alloc_core::backend::ErrorKind) if exactly one of stream
    /// and event belongs to a capture, or they belong to two.
    pub fn wait_event(&self, stream: &MockStream, event: &MockEvent) -> Result<(), MockError> {
        let index = self.own(stream);
        let info = on_stream(Call::WaitEvent, stream);
        self.run_hook(&info);
        let mut sim = self.sim();
        let begun = sim.begin(info)?;
        let result = match event.backend == self.shared.id {
            true => sim.order_after(index, event),
            false => Err(sim.refuse(Rule::ForeignHandle, &info, "an event of another backend")),
        };
        sim.finish(begun, result)
    }

    /// What follows on `after` runs after all that is queued on `before` so far: the client's own
    /// event and wait, allowed in captures (where it forks and joins), never failing.
    ///
    /// # Panics
    /// If the streams are in two captures, or only `after` is in one.
    pub fn order(&self, before: &MockStream, after: &MockStream) {
        let (from, to) = (self.own(before), self.own(after));
        let mut sim = self.sim();
        sim.operation += 1;
        let event = self.event_on(&sim, from);
        let ordered = sim.order_after(to, &event);
        assert!(ordered.is_ok(), "streams of different captures cannot be ordered");
    }

    pub(crate) fn event_on(&self, sim: &Sim, stream: usize) -> MockEvent {
        let Position { items, clock, capture, tips } = sim.position(stream);
        let _alive = Alive::new(&self.shared.events);
        MockEvent { backend: self.shared.id, stream, items, clock, capture, tips, _alive }
    }

    /// Simulated time in nanoseconds: driver calls and waits take time, [`advance`](Self::advance)
    /// adds some.
    pub fn now_ns(&self) -> u64 {
        self.sim().streams.now_ns
    }

    /// Lets `ns` nanoseconds pass; work with a duration may end.
    pub fn advance(&self, ns: u64) {
        let mut sim = self.sim();
        sim.streams.now_ns += ns;
        sim.streams.settle();
    }
}

/// # The judge
impl MockBackend {
    /// Where the harness reports what the allocator under test does.
    pub fn judge(&self) -> Judge<'_> {
        Judge(self)
    }

    /// The rules broken so far, oldest first.
    pub fn violations(&self) -> Vec<Violation> {
        self.sim().violations.clone()
    }

    /// The rules broken so far; they are forgotten.
    pub fn take_violations(&self) -> Vec<Violation> {
        std::mem::take(&mut self.sim().violations)
    }

    /// What has not been given back by now. Nothing, after [`unload`](Self::unload): the driver's
    /// end takes all with it.
    pub fn leaks(&self) -> Leaks {
        let sim = self.sim();
        if sim.unloaded {
            return Leaks::default();
        }
        Leaks {
            segments: sim.live_segments(),
            reservations: sim.memory.live_reservations(),
            mappings: sim.memory.live_mappings(),
            pages: sim.memory.live_pages(),
            ordered: sim.pools.live(),
            pools: sim.pools.unended(),
            events: self.shared.events.load(Ordering::Relaxed),
            captures: sim.captures.count(),
            allocations: sim.book.live(),
        }
    }

    /// Asserts that no rule was broken and nothing leaked.
    ///
    /// # Panics
    /// If not.
    #[track_caller]
    pub fn assert_clean(&self) {
        let violations = self.violations();
        if let Some(first) = violations.first() {
            panic!("{} violations, the first: {first}", violations.len());
        }
        let leaks = self.leaks();
        assert!(leaks.is_empty(), "leaked: {leaks:?}");
    }
}

/// Reports to the judge; see [`MockBackend::judge`]. Reports about 0 bytes are ignored.
#[derive(Clone, Copy, Debug)]
pub struct Judge<'a>(&'a MockBackend);

impl Judge<'_> {
    pub(crate) fn backend(&self) -> &MockBackend {
        self.0
    }

    /// The allocator has handed out `bytes` at `addr`, to be used on `stream` from now on.
    pub fn allocated(&self, addr: Addr, bytes: u64, stream: &MockStream) {
        self.0.own(stream);
        let mut sim = self.0.sim();
        if bytes > 0 && !sim.unloaded {
            sim.allocated(addr, bytes, stream, None);
            self.0.judge_reuse(&mut sim, addr, bytes);
        }
    }

    /// As [`allocated`](Self::allocated), from a pool with this number: it may be the memory of
    /// graphs that were captured into that pool, see [`capture_shares`](Self::capture_shares).
    pub fn allocated_in(&self, addr: Addr, bytes: u64, stream: &MockStream, pool: u64) {
        self.0.own(stream);
        let mut sim = self.0.sim();
        if bytes > 0 && !sim.unloaded {
            sim.allocated(addr, bytes, stream, Some(Sharing::Pool(pool)));
            self.0.judge_reuse(&mut sim, addr, bytes);
        }
    }

    /// The client gives the allocation at `addr` back; its size, if it was live. Report it *before*
    /// the allocator is told, or another thread may be handed the memory first.
    pub fn freed(&self, addr: Addr) -> Option<u64> {
        let mut sim = self.0.sim();
        if addr.is_null() || sim.unloaded {
            return None;
        }
        sim.freed(addr)
    }

    /// The free that was just reported failed: the allocation is live again, unjudged.
    pub fn still_live(&self, addr: Addr, bytes: u64) {
        let mut sim = self.0.sim();
        if !sim.unloaded {
            sim.still_live(addr, bytes);
        }
    }

    /// Whether `device` may access all of the live allocation at `addr`. It may access any segment,
    /// as with peers enabled, but mapped pages only if access was set for it.
    pub fn is_accessible(&self, addr: Addr, device: DeviceId) -> bool {
        let sim = self.0.sim();
        let bytes = sim.book.bytes_at(addr);
        bytes.is_some_and(|bytes| sim.memory.translate(addr, bytes, device).is_ok())
    }

    /// The size of the live allocation at `addr`.
    pub fn live_bytes(&self, addr: Addr) -> Option<u64> {
        self.0.sim().book.bytes_at(addr)
    }
}

/// # Faults, hooks, log, costs
impl MockBackend {
    /// Replaces the injected failures; calls are counted anew.
    pub fn set_faults(&self, faults: impl IntoIterator<Item = Fault>) {
        self.sim().faults = FaultPlan::new(faults);
    }

    /// Fallible calls since the failures were last set, and how many of them were made to fail.
    pub fn fault_counts(&self) -> (u64, u64) {
        let sim = self.sim();
        (sim.faults.calls, sim.faults.struck)
    }

    /// Runs `hook` at the start of every call of this kind, in place of an earlier hook, before the
    /// call has any effect. It runs on the caller's thread without any lock of the simulator, so it
    /// may block, panic, or call the allocator and this backend.
    pub fn set_hook(&self, call: Call, hook: impl Fn(&CallInfo) + Send + Sync + 'static) {
        self.shared.hooks.write().insert(call, Arc::new(hook));
    }

    /// Removes the hook of this kind of call.
    pub fn clear_hook(&self, call: Call) {
        self.shared.hooks.write().remove(&call);
    }

    /// Replaces the feed of addresses; `None` leaves the choice to the placement.
    pub fn set_feed(&self, feed: Option<Feed>) {
        *self.shared.feed.lock() = feed;
    }

    /// Takes the logged driver calls out, oldest first; see [`Builder::log`].
    pub fn take_log(&self) -> Vec<LogEntry> {
        self.sim().log.take()
    }

    /// What driver calls have cost so far.
    pub fn costs(&self) -> Costs {
        self.sim().costs
    }

    /// Bytes of `device` in segments and pages.
    pub fn used(&self, device: DeviceId) -> u64 {
        self.sim().memory.devices[device.index()].used
    }

    /// Changes what can be had from `device` in all, as another process would. It may be less than
    /// what is in use.
    pub fn set_capacity(&self, device: DeviceId, bytes: u64) {
        self.sim().memory.devices[device.index()].capacity = bytes;
    }

    /// The driver goes away, as at process exit: from now on every call fails with
    /// [`ErrorKind::DeviceLost`](alloc_core::backend::ErrorKind), and nothing is judged.
    pub fn unload(&self) {
        self.sim().unloaded = true;
    }
}

impl Default for MockBackend {
    fn default() -> Self {
        MockBackend::new()
    }
}

impl std::fmt::Debug for MockBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let MockBackend { shared } = self;
        f.debug_struct("MockBackend")
            .field("id", &shared.id)
            .field("devices", &shared.device_count)
            .finish_non_exhaustive()
    }
}

/// Streams print and compare by id.
impl std::fmt::Display for MockStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {}", self.id(), self.device)
    }
}
