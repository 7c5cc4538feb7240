//! Contexts, streams and events of the imitation, and the engine that runs queued work.

use super::FakeKernel;
use super::captures::{Captured, Captures};
use super::memory::{Code, Memory};
use super::pools::Pools;
use crate::error::code;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// Queued work.
#[derive(Clone)]
pub(super) enum Work {
    Write { to: u64, bytes: Arc<Vec<u8>> },
    Read { from: u64, to: usize, bytes: u64 },
    Copy { to: u64, from: u64, bytes: u64 },
    Fill { to: u64, pattern: Vec<u8>, bytes: u64 },
    Run { kernel: FakeKernel, arguments: Vec<u64> },
    Host { function: unsafe extern "C" fn(*mut c_void), data: usize },
    Reach { event: usize, round: u64 },
    Await { event: usize, round: u64 },
    Free { addr: u64 },
}

/// A queue. The legacy stream and blocking streams of a device keep the order of `number`s.
pub(super) struct Stream {
    pub(super) device: usize,
    pub(super) unique: u64,
    blocking: bool,
    queue: VecDeque<(u64, Work)>,
    /// A host function of it is running on a thread of its own.
    calling: bool,
    /// Destroyed by its owner. It goes when its work is done.
    destroyed: bool,
    /// Its part in a capture.
    pub(super) captured: Option<Captured>,
}

#[derive(Default)]
pub(super) struct Event {
    device: usize,
    /// How often it was recorded, and the latest recording that has been reached.
    recorded: u64,
    reached: u64,
    /// Where it was recorded last, if that was in a capture.
    captured: Option<Captured>,
    /// Whether other processes may open it.
    pub(super) shared: bool,
    /// The event that was opened here as another process would.
    of: Option<usize>,
}

impl Event {
    pub(super) fn new(device: usize, shared: bool) -> Self {
        Event { device, shared, ..Event::default() }
    }

    pub(super) fn opened(device: usize, of: usize) -> Self {
        Event { device, of: Some(of), ..Event::default() }
    }
}

/// One GPU's primary context.
pub(super) struct Context {
    pub(super) handle: usize,
    pub(super) retained: u32,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) contexts: Vec<Context>,
    pub(super) memory: Memory,
    pub(super) pools: Pools,
    /// By number; a stream outlives its handle while it has work.
    pub(super) streams: BTreeMap<usize, Stream>,
    /// The streams that handles mean.
    handles: BTreeMap<usize, usize>,
    /// Handles of destroyed streams, used again soon, as the driver does.
    free_handles: Vec<usize>,
    /// The special streams: each device's legacy one, each thread's own.
    special: BTreeMap<(usize, Option<u64>), usize>,
    threads: Vec<ThreadId>,
    pub(super) events: BTreeMap<usize, Event>,
    pub(super) kernels: BTreeMap<String, FakeKernel>,
    pub(super) kernel_handles: BTreeMap<usize, String>,
    pub(super) captures: Captures,
    pub(super) pinned: BTreeMap<usize, usize>,
    /// Pairs of devices: kernels of the first may reach memory of the second.
    pub(super) peers: BTreeSet<(usize, usize)>,
    /// Calls that fail: name, how many succeed before, code.
    pub(super) faults: Vec<(String, u32, Code)>,
    pub(super) shut_down: bool,
    /// The first fault of queued work; every later call reports it.
    pub(super) lost: Option<Code>,
    next_work: u64,
    next_handle: usize,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

/// The imitation's state, locked. `None` before the first session.
pub(super) type Guard = MutexGuard<'static, Option<State>>;

pub(super) fn lock() -> Guard {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until something happens.
pub(super) fn wait(guard: Guard) -> Guard {
    CHANGED.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Starts afresh; numbers go on, so that handles of an earlier session stay unknown.
pub(super) fn reset(totals: &[u64]) {
    let mut guard = lock();
    let (next_handle, first_addr) = guard
        .as_ref()
        .map_or((0x1000, 0x7f00_0000_0000), |old| (old.next_handle, 0x7f00_0000_0000));
    let mut state = State { next_handle, ..State::default() };
    state.memory = Memory::new(totals, first_addr);
    for _ in totals {
        let handle = state.handle();
        state.contexts.push(Context { handle, retained: 0 });
    }
    *guard = Some(state);
}

impl State {
    /// A number never used before.
    pub(super) fn handle(&mut self) -> usize {
        self.next_handle += 16;
        self.next_handle
    }

    pub(super) fn device_of_context(&self, handle: usize) -> Result<usize, Code> {
        let retained = |context: &Context| context.handle == handle && context.retained > 0;
        self.contexts.iter().position(retained).ok_or(code::INVALID_CONTEXT)
    }

    /// The devices whose memory from `cuMemAlloc` kernels of a device reach.
    pub(super) fn peers_of(&self, device: usize) -> Vec<usize> {
        self.peers.iter().filter(|(from, _)| *from == device).map(|(_, to)| *to).collect()
    }

    /// Makes a stream and returns its handle.
    pub(super) fn create_stream(&mut self, device: usize, blocking: bool) -> usize {
        let handle = match self.free_handles.pop() {
            Some(handle) => handle,
            None => self.handle(),
        };
        let number = self.add_stream(device, blocking);
        self.handles.insert(handle, number);
        handle
    }

    fn add_stream(&mut self, device: usize, blocking: bool) -> usize {
        let number = self.handle();
        let stream = Stream {
            device,
            unique: number as u64 + 7,
            blocking,
            queue: VecDeque::new(),
            calling: false,
            destroyed: false,
            captured: None,
        };
        self.streams.insert(number, stream);
        number
    }

    /// Ends a stream. Its work goes on.
    pub(super) fn destroy_stream(&mut self, handle: usize) -> Result<(), Code> {
        let number = self.handles.remove(&handle).ok_or(code::INVALID_HANDLE)?;
        self.free_handles.push(handle);
        if let Some(stream) = self.streams.get_mut(&number) {
            stream.destroyed = true;
        }
        self.run();
        Ok(())
    }

    /// The number of the stream a handle means on this thread.
    pub(super) fn stream(&mut self, handle: usize) -> Result<usize, Code> {
        let thread = match handle {
            0 | crate::Stream::LEGACY => None,
            crate::Stream::PER_THREAD => Some(self.thread_number()),
            _ => return self.handles.get(&handle).copied().ok_or(code::INVALID_HANDLE),
        };
        let device = super::call::current(self)?;
        if let Some(&known) = self.special.get(&(device, thread)) {
            return Ok(known);
        }
        let created = self.add_stream(device, true);
        self.special.insert((device, thread), created);
        Ok(created)
    }

    fn thread_number(&mut self) -> u64 {
        let this = std::thread::current().id();
        let known = self.threads.iter().position(|&thread| thread == this);
        known.unwrap_or_else(|| {
            self.threads.push(this);
            self.threads.len() - 1
        }) as u64
    }

    /// Queues work, or records it if the stream is being captured.
    pub(super) fn queue(&mut self, stream: usize, work: Work) -> Result<(), Code> {
        if self.streams.get(&stream).is_some_and(|stream| stream.captured.is_some()) {
            return self.record_work(stream, work);
        }
        let number = self.next_work;
        self.next_work += 1;
        let stream = self.streams.get_mut(&stream).ok_or(code::INVALID_HANDLE)?;
        stream.queue.push_back((number, work));
        self.run();
        Ok(())
    }

    pub(super) fn record(&mut self, event: usize, stream: usize) -> Result<(), Code> {
        let own = self.streams.get(&stream).ok_or(code::INVALID_HANDLE)?;
        let known = self.events.get_mut(&event).ok_or(code::INVALID_HANDLE)?;
        if known.device != own.device || known.of.is_some() {
            return Err(code::INVALID_HANDLE);
        }
        known.captured = own.captured.clone();
        if known.captured.is_some() {
            return Ok(());
        }
        known.recorded += 1;
        let round = known.recorded;
        self.queue(stream, Work::Reach { event, round })
    }

    pub(super) fn await_event(&mut self, stream: usize, event: usize) -> Result<(), Code> {
        let known = self.events.get(&event).ok_or(code::INVALID_HANDLE)?;
        if let Some(of) = known.of {
            return self.await_event(stream, of);
        }
        let round = known.recorded;
        if let Some(captured) = known.captured.clone() {
            return self.join(stream, &captured);
        }
        let own = self.streams.get(&stream).ok_or(code::INVALID_HANDLE)?;
        if let Some(id) = own.captured.as_ref().map(|captured| captured.id) {
            return Err(self.refuse_isolated(id));
        }
        self.queue(stream, Work::Await { event, round })
    }

    pub(super) fn is_reached(&mut self, event: usize) -> Result<bool, Code> {
        let event = self.events.get(&event).ok_or(code::INVALID_HANDLE)?;
        match event.captured.as_ref().map(|captured| captured.id) {
            Some(id) => Err(self.refuse_captured(id)),
            None => Ok(event.reached >= event.recorded),
        }
    }

    pub(super) fn is_idle(&self, stream: usize) -> Result<bool, Code> {
        let stream = self.streams.get(&stream).ok_or(code::INVALID_HANDLE)?;
        Ok(stream.queue.is_empty() && !stream.calling)
    }

    /// Whether all streams of a device are idle.
    pub(super) fn is_device_idle(&self, device: usize) -> bool {
        let mut own = self.streams.values().filter(|stream| stream.device == device);
        own.all(|stream| stream.queue.is_empty() && !stream.calling)
    }

    /// Runs whatever can run now.
    pub(super) fn run(&mut self) {
        while let Some(handle) = self.runnable() {
            let Some((_, work)) =
                self.streams.get_mut(&handle).and_then(|stream| stream.queue.pop_front())
            else {
                break;
            };
            if let Err(code) = self.execute(handle, work) {
                self.lost.get_or_insert(code);
            }
        }
        let is_over =
            |stream: &Stream| stream.destroyed && stream.queue.is_empty() && !stream.calling;
        self.streams.retain(|_, stream| !is_over(stream));
        CHANGED.notify_all();
    }

    /// A stream whose first work waits for nothing.
    fn runnable(&self) -> Option<usize> {
        let ready = |(&handle, stream): (&usize, &Stream)| {
            let (number, work) = stream.queue.front()?;
            let awaited = match work {
                Work::Await { event, round } => {
                    self.events.get(event).is_some_and(|event| event.reached < *round)
                }
                _ => false,
            };
            let free = !stream.calling && !awaited && !self.waits_for_default(stream, *number);
            free.then_some(handle)
        };
        self.streams.iter().find_map(ready)
    }

    /// The legacy stream's rule: it waits for earlier work of the blocking streams of its device,
    /// and they for its.
    fn waits_for_default(&self, stream: &Stream, number: u64) -> bool {
        let legacy = self.special.get(&(stream.device, None)).and_then(|h| self.streams.get(h));
        let Some(legacy) = legacy.filter(|_| stream.blocking) else { return false };
        let earlier = |other: &Stream| {
            other.calling && !std::ptr::eq(other, stream)
                || other.queue.front().is_some_and(|(first, _)| *first < number)
        };
        if std::ptr::eq(legacy, stream) {
            let mut others = self.streams.values();
            others.any(|other| other.device == stream.device && other.blocking && earlier(other))
        } else {
            earlier(legacy)
        }
    }

    fn execute(&mut self, stream: usize, work: Work) -> Result<(), Code> {
        match work {
            Work::Write { to, bytes } => self.memory.write(to, &bytes),
            Work::Read { from, to, bytes } => {
                let copy = self.memory.read(from, bytes)?;
                super::call::write_host(to, &copy);
                Ok(())
            }
            Work::Copy { to, from, bytes } => {
                let copy = self.memory.read(from, bytes)?;
                self.memory.write(to, &copy)
            }
            Work::Fill { to, pattern, bytes } => self.memory.visit(to, bytes, |offset, piece| {
                for (index, byte) in piece.iter_mut().enumerate() {
                    *byte = pattern[(offset + index) % pattern.len()];
                }
            }),
            Work::Run { kernel, arguments } => {
                let device = self.streams.get(&stream).map(|own| own.device);
                self.memory.running = device.map(|device| (device, self.peers_of(device)));
                let memory = &mut super::KernelMemory { memory: &mut self.memory };
                let result = (kernel.run)(memory, &arguments);
                self.memory.running = None;
                result
            }
            Work::Host { function, data } => {
                if let Some(stream) = self.streams.get_mut(&stream) {
                    stream.calling = true;
                }
                std::thread::spawn(move || call_host(stream, function, data));
                Ok(())
            }
            Work::Reach { event, round } => {
                if let Some(event) = self.events.get_mut(&event) {
                    event.reached = event.reached.max(round);
                }
                Ok(())
            }
            Work::Await { .. } => Ok(()),
            Work::Free { addr } => {
                self.pools.leave(addr);
                self.memory.free(addr)
            }
        }
    }
}

/// Runs a host function with nothing locked, then lets its stream go on.
fn call_host(stream: usize, function: unsafe extern "C" fn(*mut c_void), data: usize) {
    super::call::call_function(function, data);
    if let Some(state) = lock().as_mut() {
        if let Some(stream) = state.streams.get_mut(&stream) {
            stream.calling = false;
        }
        state.run();
    }
}
