//! PyTorch's captures as the allocator's.
//!
//! PyTorch announces a capture before it begins (`begin`), and says when it is over (`end`) and when
//! its graph is gone (`release`), naming a pool each time. It also passes a predicate that tells which
//! streams take part, as a C++ object that is not called here: the driver tells which capture a stream
//! takes part in, and the first request of an unknown one on the thread that announced it, or else on
//! any, is of the capture that was announced.

use crate::plugin::Failure;
use alloc_core::backend::{Capture, CaptureStatus, Stream};
use alloc_core::{CaptureError, DeviceId, GraphMemory, PoolId};
use alloc_cuda::{CudaAllocator, CudaBackend, CudaError, CudaStream};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ThreadId;

type Memory = GraphMemory<CudaBackend>;

/// A capture between its announcement and the end of its graph.
struct Entry {
    device: DeviceId,
    pool: PoolId,
    /// Who announced it.
    thread: ThreadId,
    memory: Memory,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// PyTorch captures.
    Open,
    /// PyTorch says that the capture is over.
    Ended,
    /// The graph is gone.
    Released,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Graphs {
    entries: Mutex<Vec<Entry>>,
    /// Those in the first stage, so that programs without captures pay one load.
    open: AtomicUsize,
}

impl Graphs {
    /// PyTorch is about to capture into `pool`.
    pub(crate) fn begin(
        &self,
        allocator: &CudaAllocator,
        device: DeviceId,
        pool: PoolId,
    ) -> Result<(), Failure> {
        let thread = std::thread::current().id();
        let mut entries = self.entries.lock();
        // A capture that fails has no end in some versions of PyTorch; a thread has one at a time.
        let failed = |entry: &Entry| entry.stage == Stage::Open && entry.thread == thread;
        entries.retain(|entry| !failed(entry));
        let mut memory = allocator.graph_memory_in(pool).map_err(|error| error.to_string())?;
        memory.expect().map_err(|error| error.to_string())?;
        entries.push(Entry { device, pool, thread, memory, stage: Stage::Open });
        self.count(&entries);
        Ok(())
    }

    /// Before a request on `stream`: whether it is the first of an announced capture, and if so, gives
    /// that its memory.
    pub(crate) fn meet(&self, backend: &CudaBackend, stream: &CudaStream) -> Result<(), Failure> {
        if self.open.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let status = backend.capture_status(stream).map_err(|error| error.to_string())?;
        let CaptureStatus::Active(capture) = status else { return Ok(()) };
        let mut entries = self.entries.lock();
        if entries.iter().any(|entry| entry.memory.capture() == Some(capture)) {
            return Ok(());
        }
        let waits = |entry: &Entry| {
            let open = entry.stage == Stage::Open && entry.memory.capture().is_none();
            open && entry.device == stream.device()
        };
        let this = std::thread::current().id();
        let own = entries.iter().position(|entry| waits(entry) && entry.thread == this);
        match own.or_else(|| entries.iter().position(waits)) {
            Some(at) => entries[at].memory.begin(stream).map_err(|error| error.to_string()),
            // Nobody announced it: not one of PyTorch's.
            None => Ok(()),
        }
    }

    /// The capture into `pool` is over.
    pub(crate) fn end(&self, device: DeviceId, pool: PoolId) -> Result<(), Failure> {
        let mut entries = self.entries.lock();
        let ours = |entry: &&mut Entry| {
            entry.stage == Stage::Open && (entry.device, entry.pool) == (device, pool)
        };
        if let Some(entry) = entries.iter_mut().find(ours) {
            entry.stage = Stage::Ended;
        }
        self.count(&entries);
        self.go_on(&mut entries, |_| Ok(()))
    }

    /// A graph of `pool` is gone. `wait` waits for all work of a device; replays may still run.
    pub(crate) fn release(
        &self,
        device: DeviceId,
        pool: PoolId,
        wait: impl Fn(DeviceId) -> Result<(), CudaError>,
    ) -> Result<(), Failure> {
        let mut entries = self.entries.lock();
        let ours = |entry: &&mut Entry| {
            entry.stage == Stage::Ended && (entry.device, entry.pool) == (device, pool)
        };
        if let Some(entry) = entries.iter_mut().find(ours) {
            entry.stage = Stage::Released;
        }
        self.go_on(&mut entries, wait)
    }

    /// Takes what was put off because something was captured.
    pub(crate) fn catch_up(
        &self,
        wait: impl Fn(DeviceId) -> Result<(), CudaError>,
    ) -> Result<(), Failure> {
        self.go_on(&mut self.entries.lock(), wait)
    }

    fn count(&self, entries: &[Entry]) {
        let open = entries.iter().filter(|entry| entry.stage == Stage::Open).count();
        self.open.store(open, Ordering::Release);
    }

    /// Ends the captures that are over, and lets go of the memory of graphs that are gone unless
    /// anything is being captured, since that is no time to wait for a device.
    fn go_on(
        &self,
        entries: &mut Vec<Entry>,
        wait: impl Fn(DeviceId) -> Result<(), CudaError>,
    ) -> Result<(), Failure> {
        let mut captures = false;
        for entry in entries.iter_mut() {
            let over = entry.stage != Stage::Open;
            if over && entry.memory.capture().is_some() {
                match entry.memory.end() {
                    // PyTorch tells before it ends the driver's capture: another time.
                    Ok(()) | Err(CaptureError::StillCapturing { .. }) => {}
                    Err(error) => return Err(error.to_string()),
                }
            } else if over && entry.memory.state() == alloc_core::GraphState::Expecting {
                // Nothing was allocated in the capture.
                entry.memory.abort().map_err(|error| error.to_string())?;
            }
            captures |= !over || entry.memory.capture().is_some();
        }
        let gone = |entry: &Entry| entry.stage == Stage::Released;
        if captures || !entries.iter().any(gone) {
            return Ok(());
        }
        let mut devices: Vec<_> = entries.iter().filter(|e| gone(e)).map(|e| e.device).collect();
        devices.dedup();
        for device in devices {
            wait(device).map_err(|error| error.to_string())?;
        }
        entries.retain(|entry| !gone(entry));
        Ok(())
    }
}
