//! What the C interface does, in safe terms.

use crate::graphs::Graphs;
use alloc_core::{Addr, AllocError, Config, DeviceId, PoolId};
use alloc_cuda::{CudaAllocError, CudaAllocator, CudaBackend, CudaError, CudaStream};
use parking_lot::Mutex;
use std::fmt::Write as _;

/// The allocator of the process, with what PyTorch needs around it.
pub(crate) struct Plugin {
    allocator: CudaAllocator,
    graphs: Graphs,
    /// Devices that have been allocated on.
    used: Mutex<Vec<DeviceId>>,
}

/// A failure, in words for the user.
pub(crate) type Failure = String;

impl Plugin {
    pub(crate) fn new(config: Config) -> Result<Plugin, Failure> {
        let backend = CudaBackend::new().map_err(|error| error.to_string())?;
        Self::on(backend, config)
    }

    pub(crate) fn on(backend: CudaBackend, config: Config) -> Result<Plugin, Failure> {
        let allocator = CudaAllocator::on(backend, config).map_err(|error| error.to_string())?;
        Ok(Plugin { allocator, graphs: Graphs::default(), used: Mutex::default() })
    }

    pub(crate) fn backend(&self) -> &CudaBackend {
        self.allocator.backend()
    }

    /// Allocates for work on `stream`. 0 bytes get the null address.
    pub(crate) fn allocate(&self, bytes: u64, stream: &CudaStream) -> Result<Addr, Failure> {
        let device = device_of(stream);
        self.note_use(device);
        self.graphs.meet(self.backend(), stream)?;
        self.allocator.allocate_raw(bytes, stream).map_err(|error| describe(&error))
    }

    /// Gives a block back. Never fails where PyTorch could see it: a block that cannot be freed now
    /// stays allocated, and the reason is returned.
    pub(crate) fn free(&self, addr: Addr) -> Result<(), Failure> {
        let Err(error) = self.allocator.free_raw(addr) else { return Ok(()) };
        // When the process ends the driver may be gone before the last tensor.
        if error.is_device_lost() { Ok(()) } else { Err(describe(&error)) }
    }

    /// `stream` uses the block at `addr` until it is freed. Memory of other allocators is ignored.
    pub(crate) fn record_stream(&self, addr: Addr, stream: &CudaStream) -> Result<(), Failure> {
        self.graphs.meet(self.backend(), stream)?;
        match self.allocator.record_stream_raw(addr, stream) {
            Ok(()) | Err(AllocError::UnknownAddress { .. }) => Ok(()),
            Err(error) => Err(describe(&error)),
        }
    }

    /// Gives cached memory back to the driver.
    pub(crate) fn empty_cache(&self) -> Result<(), Failure> {
        self.graphs.catch_up(|device| self.wait_for(device))?;
        self.allocator.empty_cache().map_err(|error| describe(&error))
    }

    pub(crate) fn set_memory_fraction(
        &self,
        fraction: f64,
        device: DeviceId,
    ) -> Result<(), Failure> {
        self.allocator.set_memory_fraction(device, fraction).map_err(|error| describe(&error))
    }

    /// First address and length of the segment that a block lies in, or `None` for a foreign address.
    pub(crate) fn segment_of(&self, addr: Addr) -> Option<(Addr, u64)> {
        let located = self.allocator.locate(addr)?;
        let snapshot = self.allocator.snapshot(located.device).ok()?;
        let segment = snapshot.segments.iter().find(|segment| segment.addr == located.segment)?;
        Some((segment.addr, segment.bytes))
    }

    /// A capture into `pool` is about to begin.
    pub(crate) fn begin_pool(&self, device: DeviceId, pool: PoolId) -> Result<(), Failure> {
        self.graphs.begin(&self.allocator, device, pool)
    }

    /// It is over.
    pub(crate) fn end_pool(&self, device: DeviceId, pool: PoolId) -> Result<(), Failure> {
        self.graphs.end(device, pool)
    }

    /// A graph of `pool` is gone. PyTorch does not say where it was replayed, so its memory waits for
    /// the whole device.
    pub(crate) fn release_pool(&self, device: DeviceId, pool: PoolId) -> Result<(), Failure> {
        self.graphs.release(device, pool, |device| self.wait_for(device))
    }

    /// Waits for all work of a device.
    fn wait_for(&self, device: DeviceId) -> Result<(), CudaError> {
        Ok(self.backend().context(device)?.synchronize()?)
    }

    /// The statistics of a device under PyTorch's names, as one JSON object.
    pub(crate) fn stats(&self, device: DeviceId) -> Result<String, Failure> {
        let stats = self.allocator.stats(device).map_err(|error| describe(&error))?;
        let mut json = String::from("{");
        for (name, value) in stats.flatten() {
            let comma = if json.len() > 1 { ", " } else { "" };
            // Names are letters, dots and underscores; writing to a string cannot fail.
            let _ = write!(json, "{comma}\"{name}\": {value}");
        }
        json.push('}');
        Ok(json)
    }

    pub(crate) fn reset_peak_stats(&self, device: DeviceId) -> Result<(), Failure> {
        self.allocator.reset_peak_stats(device).map_err(|error| describe(&error))
    }

    /// Recomputes everything from scratch.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.allocator.check().map_err(|violation| format!("{violation:?}"))
    }

    /// On the first use of a device: PyTorch copies between devices as if all memory could be
    /// reached, which is true of ordinary segments but must be asked for with expandable ones.
    fn note_use(&self, device: DeviceId) {
        let mut used = self.used.lock();
        if used.contains(&device) {
            return;
        }
        used.push(device);
        if !self.allocator.expandable_segments() {
            return;
        }
        for &other in used.iter().filter(|other| **other != device) {
            // Devices that are no peers are copied between by way of the host.
            let _ = self.backend().enable_peer_access(device, other);
            let _ = self.backend().enable_peer_access(other, device);
        }
    }
}

fn device_of(stream: &CudaStream) -> DeviceId {
    use alloc_core::backend::Stream as _;
    stream.device()
}

/// PyTorch programs look for "out of memory" in the text.
fn describe(error: &CudaAllocError) -> Failure {
    if error.is_out_of_memory() { format!("CUDA {error}") } else { error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc_cuda::driver::fake::Session;
    use alloc_cuda::driver::{CaptureMode, ExecutableGraph, Stream};
    use std::sync::mpsc;

    const MIB: u64 = 1 << 20;
    const FIRST: DeviceId = DeviceId::new(0);

    struct Rig {
        plugin: Plugin,
        session: Session,
    }

    fn rig(settings: &str) -> Rig {
        let session = Session::new(&[256 * MIB, 256 * MIB]);
        let backend = CudaBackend::with_driver(session.driver()).expect("starts");
        let config = crate::config::from(Some("ours"), Some(settings)).expect("valid");
        Rig { plugin: Plugin::on(backend, config).expect("starts"), session }
    }

    impl Rig {
        fn default_stream(&self) -> CudaStream {
            self.plugin.backend().default_stream(FIRST).expect("stream")
        }

        /// A stream as PyTorch makes them: not ours, and never destroyed.
        fn foreign(&self) -> CudaStream {
            let context = self.plugin.backend().context(FIRST).expect("context");
            let stream = Box::leak(Box::new(Stream::create(&context).expect("stream")));
            crate::abi::adopt_for_tests(&self.plugin, FIRST, stream.raw())
        }

        fn allocate(&self, bytes: u64, stream: &CudaStream) -> Addr {
            self.plugin.allocate(bytes, stream).expect("room")
        }
    }

    #[test]
    fn blocks_come_back_and_foreign_memory_is_left_alone() {
        let rig = rig("expandable_segments:False");
        let stream = rig.default_stream();
        let block = rig.allocate(3 * MIB, &stream);
        assert_eq!(rig.plugin.segment_of(block), Some((block, 20 * MIB)));
        rig.plugin.free(block).expect("frees");
        assert_eq!(rig.allocate(3 * MIB, &stream), block);
        assert!(rig.allocate(0, &stream).is_null());
        rig.plugin.free(Addr::NULL).expect("nothing");
        let foreign = Addr::new(0x1234_5600);
        assert!(rig.plugin.free(foreign).is_err());
        rig.plugin.record_stream(foreign, &rig.foreign()).expect("ignored");
        assert_eq!(rig.plugin.segment_of(foreign), None);
        rig.plugin.check().expect("sound");
    }

    #[test]
    fn side_streams_hold_what_they_use() {
        let rig = rig("");
        let (main, side) = (rig.default_stream(), rig.foreign());
        let block = rig.allocate(3 * MIB, &main);
        let (open, wait) = mpsc::channel::<()>();
        let hold = move || {
            let _ = wait.recv();
        };
        side.driver_stream().call_host(hold).expect("queued");
        rig.plugin.record_stream(block, &side).expect("records");
        rig.plugin.free(block).expect("frees");
        assert_ne!(rig.allocate(3 * MIB, &main), block, "still used");
        drop(open);
        side.synchronize().expect("no failed work");
        assert_eq!(rig.allocate(3 * MIB, &main), block);
    }

    #[test]
    fn running_out_of_memory_is_said_in_pytorchs_words() {
        let rig = rig("");
        let stream = rig.default_stream();
        let error = rig.plugin.allocate(300 * MIB, &stream).expect_err("too much");
        assert!(error.starts_with("CUDA out of memory"), "{error}");
        rig.plugin.set_memory_fraction(0.25, FIRST).expect("sets");
        assert!(rig.plugin.allocate(100 * MIB, &stream).is_err());
        assert!(rig.plugin.set_memory_fraction(2.0, FIRST).is_err());
        rig.plugin.set_memory_fraction(1.0, FIRST).expect("sets");
        let block = rig.allocate(100 * MIB, &stream);
        rig.plugin.free(block).expect("frees");
        rig.plugin.empty_cache().expect("empties");
        let stats = rig.plugin.stats(FIRST).expect("stats");
        assert!(stats.contains("\"reserved_bytes.all.current\": 0"), "{stats}");
        assert!(stats.contains("\"num_ooms\": 2"), "{stats}");
        assert!(stats.starts_with("{\"") && stats.ends_with('}') && !stats.contains(",}"));
        rig.plugin.reset_peak_stats(FIRST).expect("resets");
        assert!(rig.plugin.stats(DeviceId::new(9)).is_err());
    }

    /// A capture as PyTorch makes one, between its hooks.
    fn capture(
        rig: &Rig,
        stream: &CudaStream,
        pool: PoolId,
        work: impl FnOnce(),
    ) -> ExecutableGraph {
        rig.plugin.begin_pool(FIRST, pool).expect("announced");
        stream.driver_stream().begin_capture(CaptureMode::Global).expect("begin");
        work();
        let graph = stream.driver_stream().end_capture().expect("the capture is whole");
        rig.plugin.end_pool(FIRST, pool).expect("ended");
        graph.instantiate().expect("instantiates")
    }

    #[test]
    fn memory_of_a_graph_stays_until_its_pool_is_released() {
        let rig = rig("");
        let (main, captured) = (rig.default_stream(), rig.foreign());
        let pool = PoolId(1, 0);
        let outer = rig.allocate(3 * MIB, &main);
        let pending = rig.allocate(3 * MIB, &main);
        rig.plugin.record_stream(pending, &captured).expect("records");
        let mut inner = Addr::NULL;
        let graph = capture(&rig, &captured, pool, || {
            inner = rig.allocate(3 * MIB, &captured);
            rig.plugin.free(inner).expect("frees");
            let again = rig.allocate(3 * MIB, &captured);
            assert_eq!(again, inner, "a capture reuses its memory");
            rig.plugin.free(again).expect("frees");
            rig.plugin.record_stream(outer, &captured).expect("records");
            rig.plugin.free(outer).expect("frees");
            rig.plugin.free(pending).expect("no event can be recorded now");
            assert!(![outer, pending].contains(&rig.allocate(3 * MIB, &main)), "not over yet");
        });
        let eager = [0; 3].map(|_| rig.allocate(3 * MIB, &main));
        assert!(eager.contains(&outer) && eager.contains(&pending), "settled: {eager:?}");
        assert!(!eager.contains(&inner));
        rig.plugin.empty_cache().expect("empties");
        rig.plugin.release_pool(FIRST, PoolId(2, 0)).expect("no such pool");
        assert_ne!(rig.allocate(3 * MIB, &captured), inner, "the graph is there");
        drop(graph);
        rig.plugin.release_pool(FIRST, pool).expect("releases");
        rig.plugin.empty_cache().expect("empties");
        let stats = rig.plugin.stats(FIRST).expect("stats");
        assert!(stats.contains("\"allocated_bytes.all.current\": 15728640"), "{stats}");
        rig.plugin.check().expect("sound");
    }

    #[test]
    fn captures_share_pools_fail_and_are_empty() {
        let rig = rig("");
        let captured = rig.foreign();
        let pool = PoolId(1, 0);
        let mut addrs = Vec::new();
        let graphs = [0; 2].map(|_| {
            capture(&rig, &captured, pool, || {
                let block = rig.allocate(3 * MIB, &captured);
                addrs.push(block);
                rig.plugin.free(block).expect("frees");
            })
        });
        assert_eq!(addrs[0], addrs[1], "one after the other");
        drop(graphs);
        // A capture that fails, of which PyTorch never says that it is over.
        rig.plugin.begin_pool(FIRST, PoolId(2, 0)).expect("announced");
        captured.driver_stream().begin_capture(CaptureMode::Global).expect("begin");
        let lost = rig.allocate(3 * MIB, &captured);
        let memory =
            alloc_cuda::driver::DeviceMemory::allocate(captured.driver_stream().context(), 4);
        assert!(memory.is_err(), "forbidden, and the capture is broken");
        captured.driver_stream().end_capture().expect_err("broken");
        rig.plugin.free(lost).expect("frees");
        // One without any request.
        drop(capture(&rig, &captured, PoolId(3, 0), || ()));
        for pool in [PoolId(3, 0), pool, pool] {
            rig.plugin.release_pool(FIRST, pool).expect("releases");
        }
        rig.plugin.empty_cache().expect("empties");
        let stats = rig.plugin.stats(FIRST).expect("stats");
        assert!(stats.contains("\"reserved_bytes.all.current\": 0"), "{stats}");
        rig.plugin.check().expect("sound");
    }

    /// A graph's memory is not let go of while another one is captured: that is no time to wait.
    #[test]
    fn a_release_waits_for_captures_to_end() {
        let rig = rig("");
        let (first, second) = (rig.foreign(), rig.foreign());
        let graph = capture(&rig, &first, PoolId(1, 0), || {
            let block = rig.allocate(3 * MIB, &first);
            rig.plugin.free(block).expect("frees");
        });
        let other = capture(&rig, &second, PoolId(2, 0), || {
            drop(graph);
            rig.plugin.release_pool(FIRST, PoolId(1, 0)).expect("put off");
            assert_eq!(rig.plugin.allocator.pools(FIRST).expect("pools").len(), 2);
        });
        rig.plugin.empty_cache().expect("catches up");
        assert!(rig.plugin.allocator.pools(FIRST).expect("pools").is_empty());
        drop(other);
    }

    #[test]
    fn devices_reach_each_others_expandable_segments() {
        let rig = rig("expandable_segments:True");
        let first = rig.default_stream();
        let second = rig.plugin.backend().default_stream(DeviceId::new(1)).expect("stream");
        let blocks = [rig.allocate(3 * MIB, &first), rig.allocate(3 * MIB, &second)];
        // Access for a peer is asked for when a page is mapped; making that fail shows it.
        rig.session.fail("cuMemSetAccess", 1, alloc_cuda::driver::code::UNKNOWN);
        assert!(rig.plugin.allocate(60 * MIB, &first).is_err());
        blocks.into_iter().for_each(|block| rig.plugin.free(block).expect("frees"));
    }

    #[test]
    fn after_the_driver_is_gone_freeing_is_quiet() {
        let rig = rig("");
        let (main, side) = (rig.default_stream(), rig.foreign());
        let block = rig.allocate(3 * MIB, &main);
        rig.plugin.record_stream(block, &side).expect("records");
        rig.session.shut_down();
        rig.plugin.free(block).expect("quiet");
        assert!(rig.plugin.allocate(60 * MIB, &main).is_err());
    }
}
