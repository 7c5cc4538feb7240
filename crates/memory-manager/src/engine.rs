//! The allocators behind a manager, made when they are first needed.

use crate::block::{Block, PinnedOf, Totals};
use crate::config::ManagerConfig;
use crate::error::{ManagerError, MemoryKind, why_not};
use crate::mode::{DeviceAllocatorMode, ModeReport};
use crate::platform::{Platform, StreamOf};
use alloc_api::Device;
use alloc_api::report::{self, OutOfMemory};
use alloc_core::backend::{Backend, Stream};
use alloc_core::host::Place;
use alloc_core::ordered::{
    OrderedAllocator, OrderedConfig, PoolChoice, PoolOptions, StreamOrdered,
};
use alloc_core::stats::Gauge;
use alloc_core::{CachingAllocator, DeviceId};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// An allocator of device memory.
enum Engine<P: Platform> {
    Caching(CachingAllocator<P::Backend>),
    Ordered(OrderedAllocator<P::Backend>),
}

/// All allocators, and what they are made with.
pub(crate) struct Engines<P: Platform> {
    config: ManagerConfig,
    settings: Mutex<Settings>,
    /// Held while an allocator is made, so that there is one of each. Never with another lock inside
    /// it but that of the settings.
    pinned: Mutex<Option<PinnedOf<P>>>,
    device: Mutex<Made<P>>,
    totals: Arc<Totals>,
}

struct Settings {
    mode: DeviceAllocatorMode,
    pinned_pool: Option<u64>,
    device_pool: Option<u64>,
    release_threshold: Option<u64>,
    /// Modes that turned out not to be there when they were first needed.
    lacking: BTreeSet<(DeviceId, DeviceAllocatorMode)>,
}

struct Made<P: Platform> {
    caching: Option<CachingAllocator<P::Backend>>,
    ordered: BTreeMap<(DeviceId, DeviceAllocatorMode), OrderedAllocator<P::Backend>>,
}

impl<P: Platform> Default for Made<P> {
    fn default() -> Self {
        Made { caching: None, ordered: BTreeMap::new() }
    }
}

impl<P: Platform> Made<P> {
    fn is_empty(&self) -> bool {
        self.caching.is_none() && self.ordered.is_empty()
    }
}

impl<P: Platform> Engines<P> {
    pub(crate) fn new(config: ManagerConfig) -> Self {
        let settings = Settings {
            mode: config.mode,
            pinned_pool: None,
            device_pool: None,
            release_threshold: config.release_threshold,
            lacking: BTreeSet::new(),
        };
        Engines {
            config,
            settings: Mutex::new(settings),
            pinned: Mutex::new(None),
            device: Mutex::default(),
            totals: Arc::default(),
        }
    }

    pub(crate) fn config(&self) -> &ManagerConfig {
        &self.config
    }

    pub(crate) fn set_pinned_pool(&self, bytes: u64) -> Result<(), ManagerError> {
        if bytes == 0 {
            return Err(ManagerError::ZeroSize("the size of the pinned pool"));
        }
        let made = self.pinned.lock();
        if made.is_some() {
            return Err(ManagerError::PoolInUse(MemoryKind::Pinned));
        }
        self.settings.lock().pinned_pool = Some(bytes);
        Ok(())
    }

    pub(crate) fn set_device_pool(&self, bytes: u64) -> Result<(), ManagerError> {
        if bytes == 0 {
            return Err(ManagerError::ZeroSize("the size of the device pool"));
        }
        let made = self.device.lock();
        if !made.is_empty() {
            return Err(ManagerError::PoolInUse(MemoryKind::Device));
        }
        self.settings.lock().device_pool = Some(bytes);
        Ok(())
    }

    pub(crate) fn set_release_threshold(&self, bytes: u64) -> Result<(), ManagerError> {
        let made = self.device.lock();
        if !made.is_empty() {
            return Err(ManagerError::PoolInUse(MemoryKind::Device));
        }
        self.settings.lock().release_threshold = Some(bytes);
        Ok(())
    }

    pub(crate) fn requested_mode(&self) -> DeviceAllocatorMode {
        self.settings.lock().mode
    }

    pub(crate) fn set_mode(&self, mode: DeviceAllocatorMode) {
        self.settings.lock().mode = mode;
    }

    /// What new allocations on `device` use, as far as the device can tell beforehand.
    pub(crate) fn mode_on(
        &self,
        platform: &P,
        device: DeviceId,
    ) -> Result<ModeReport, ManagerError> {
        let requested = self.requested_mode();
        let mut effective = requested;
        while !self.is_there(platform, device, effective)? {
            effective = effective.fallback().unwrap_or(DeviceAllocatorMode::Caching);
        }
        let reason = (effective != requested).then(|| why_not(requested));
        Ok(ModeReport { requested, effective, reason })
    }

    fn is_there(
        &self,
        platform: &P,
        device: DeviceId,
        mode: DeviceAllocatorMode,
    ) -> Result<bool, ManagerError> {
        if mode == DeviceAllocatorMode::Caching {
            return Ok(true);
        }
        if self.settings.lock().lacking.contains(&(device, mode)) {
            return Ok(false);
        }
        platform.backend().has_pools(device).map_err(ManagerError::from_backend)
    }

    /// Pinned memory.
    pub(crate) fn allocate_pinned(
        &self,
        platform: &P,
        bytes: u64,
        device: DeviceId,
    ) -> Result<Block<P>, ManagerError> {
        let host = self.pinned(platform)?;
        let allocation = host.allocate(bytes, Place::Device(device));
        let allocation = allocation.inspect_err(|error| self.report_failure(error, Device::CPU))?;
        Ok(Block::pinned(host, allocation, &self.totals))
    }

    /// Bytes that users have.
    pub(crate) fn allocated(&self, kind: MemoryKind) -> u64 {
        self.totals.of(kind)
    }

    /// Tells this thread's reporter of a request that found no memory.
    fn report_failure(&self, error: &ManagerError, device: Device) {
        if let ManagerError::OutOfMemory { kind, bytes, .. } = *error {
            let allocated = self.allocated(kind);
            report::out_of_memory(|| OutOfMemory { bytes, allocated, reserved: 0, device });
        }
    }

    fn pinned(&self, platform: &P) -> Result<PinnedOf<P>, ManagerError> {
        let mut pinned = self.pinned.lock();
        if let Some(host) = &*pinned {
            return Ok(host.clone());
        }
        let mut config = self.config.pinned.clone();
        let bytes_max = self.settings.lock().pinned_pool;
        if bytes_max.is_some() {
            config.reserved_bytes_max = bytes_max;
        }
        let host: PinnedOf<P> = platform.pinned(config)?.into();
        *pinned = Some(host.clone());
        Ok(host)
    }

    /// Device memory.
    pub(crate) fn allocate_device(
        &self,
        platform: &P,
        bytes: u64,
        stream: &StreamOf<P>,
    ) -> Result<Block<P>, ManagerError> {
        let engine = self.engine(platform, stream.device())?;
        let block = self.block_of(engine, bytes, stream);
        let device = Device::new(P::KIND, stream.device());
        block.inspect_err(|error| self.report_failure(error, device))
    }

    fn block_of(
        &self,
        engine: Engine<P>,
        bytes: u64,
        stream: &StreamOf<P>,
    ) -> Result<Block<P>, ManagerError> {
        match engine {
            Engine::Caching(allocator) => {
                let allocation = allocator.allocate(bytes, stream);
                let allocation =
                    allocation.map_err(|error| ManagerError::from_caching(bytes, error))?;
                Ok(Block::caching(allocator, allocation, stream, &self.totals))
            }
            Engine::Ordered(allocator) => {
                let addr = allocator.allocate(bytes, stream);
                let addr = addr.map_err(|error| ManagerError::from_ordered(bytes, error))?;
                Ok(Block::ordered(allocator, (addr, bytes), stream, &self.totals))
            }
        }
    }

    /// The allocator of the effective mode on a device.
    fn engine(&self, platform: &P, device: DeviceId) -> Result<Engine<P>, ManagerError> {
        loop {
            let mode = self.mode_on(platform, device)?.effective;
            match self.engine_of(platform, device, mode) {
                // The device had promised it. From now on it counts as lacking, so this ends.
                Err(ManagerError::Unsupported(_)) if mode != DeviceAllocatorMode::Caching => {
                    self.settings.lock().lacking.insert((device, mode));
                }
                result => return result,
            }
        }
    }

    fn engine_of(
        &self,
        platform: &P,
        device: DeviceId,
        mode: DeviceAllocatorMode,
    ) -> Result<Engine<P>, ManagerError> {
        let mut made = self.device.lock();
        if mode != DeviceAllocatorMode::Caching {
            if let Some(allocator) = made.ordered.get(&(device, mode)) {
                return Ok(Engine::Ordered(allocator.clone()));
            }
            let allocator = self.make_ordered(platform, device, mode)?;
            made.ordered.insert((device, mode), allocator.clone());
            return Ok(Engine::Ordered(allocator));
        }
        if let Some(allocator) = &made.caching {
            return Ok(Engine::Caching(allocator.clone()));
        }
        let allocator = self.make_caching(platform)?;
        made.caching = Some(allocator.clone());
        Ok(Engine::Caching(allocator))
    }

    fn make_caching(&self, platform: &P) -> Result<CachingAllocator<P::Backend>, ManagerError> {
        let allocator = platform.caching(self.config.caching.clone())?;
        if let Some(bytes) = self.settings.lock().device_pool {
            for device in (0..platform.backend().device_count()).map(DeviceId::new) {
                let set = allocator.set_memory_limit(device, Some(bytes));
                set.map_err(|error| ManagerError::from_caching(0, error))?;
            }
        }
        Ok(allocator)
    }

    fn make_ordered(
        &self,
        platform: &P,
        device: DeviceId,
        mode: DeviceAllocatorMode,
    ) -> Result<OrderedAllocator<P::Backend>, ManagerError> {
        let (size, threshold) = {
            let settings = self.settings.lock();
            (settings.device_pool, settings.release_threshold)
        };
        let threshold = threshold.or(size).unwrap_or(u64::MAX);
        let pool = match mode {
            DeviceAllocatorMode::CudaAsyncPool => PoolChoice::Private { bytes_max: size },
            _ => PoolChoice::Default,
        };
        let options = PoolOptions { reuse: self.config.reuse, release_threshold: threshold };
        let config = OrderedConfig { pool, options, limit: size };
        let unifier = platform.new_stream(device)?;
        OrderedAllocator::new(platform.backend().clone(), unifier, config)
            .map_err(|error| ManagerError::from_ordered(0, error))
    }

    /// All allocators that there are.
    fn all(&self) -> (Option<PinnedOf<P>>, Vec<Engine<P>>) {
        let pinned = self.pinned.lock().clone();
        let made = self.device.lock();
        let caching = made.caching.iter().cloned().map(Engine::Caching);
        let ordered = made.ordered.values().cloned().map(Engine::Ordered);
        (pinned, caching.chain(ordered).collect())
    }

    /// Gives cached memory of every allocator back. All are tried; the first error comes out.
    pub(crate) fn empty_caches(&self) -> Result<(), ManagerError> {
        let (pinned, engines) = self.all();
        let mut result = pinned.map_or(Ok(()), |host| host.empty_cache());
        for engine in engines {
            let emptied = match engine {
                Engine::Caching(allocator) => {
                    allocator.empty_cache().map_err(|error| ManagerError::from_caching(0, error))
                }
                Engine::Ordered(allocator) => {
                    allocator.empty_cache().map_err(|error| ManagerError::from_ordered(0, error))
                }
            };
            result = result.and(emptied);
        }
        result
    }

    /// Gives unused memory of each stream-ordered pool back until it holds `keep_bytes` at most.
    pub(crate) fn trim(&self, keep_bytes: u64) -> Result<(), ManagerError> {
        let (_, engines) = self.all();
        let mut result = Ok(());
        for engine in engines {
            let Engine::Ordered(allocator) = engine else { continue };
            let trimmed = allocator.trim(keep_bytes);
            result = result.and(trimmed.map_err(|error| ManagerError::from_ordered(0, error)));
        }
        result
    }

    /// Bytes held of the system: pinned memory, device memory of all devices. Figures that cannot be
    /// had count as 0.
    pub(crate) fn reserved(&self, platform: &P) -> (u64, u64) {
        let (pinned, engines) = self.all();
        let devices = platform.backend().device_count();
        let reserved = |engine: &Engine<P>| match engine {
            Engine::Caching(allocator) => (0..devices).map(DeviceId::new).fold(0, |sum, device| {
                let stats = allocator.stats(device);
                sum + stats.map_or(0, |s| s.gauge(Gauge::ReservedBytes).all.current as u64)
            }),
            Engine::Ordered(allocator) => allocator.stats().map_or(0, |usage| usage.reserved),
        };
        let pinned = pinned.map_or(0, |host| host.stats().reserved.current);
        (pinned, engines.iter().map(reserved).sum())
    }

    /// Lets go of every allocator; those with memory that is out live on with it.
    pub(crate) fn close(&self) {
        let pinned = self.pinned.lock().take();
        let made = std::mem::take(&mut *self.device.lock());
        drop((pinned, made));
    }
}
