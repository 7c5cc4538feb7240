//! The allocator of pinned memory for CUDA.

use crate::backend::CudaHost;
use crate::error::PinError;
use crate::pinned::{PinTimes, PinnedBuffer, Touch};
use crate::source::StreamSource;
use crate::streams::{StreamError, Streams};
use alloc_core::host::{
    HostAllocation, HostAllocator, HostConfError, HostConfig, HostError, HostFreeError, HostStats,
    HostViolation, Place,
};
use alloc_core::{Addr, DeviceId, PoolId, StreamId};
use cuda_driver::{Context, Driver, HostFlags};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Errors of a [`PinnedAllocator`].
pub type PinnedAllocError<S> = HostError<PinError<<S as StreamSource>::Error>>;

/// What an allocator is made with, besides its [`HostConfig`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PinOptions {
    /// How the driver pins. Portable unless said otherwise: a pool serves all devices.
    pub flags: HostFlags,
    /// Ask for huge pages where memory is registered.
    pub huge_pages: bool,
    /// When the pages of memory are made that is registered.
    pub touch: Touch,
}

impl Default for PinOptions {
    fn default() -> Self {
        let flags = HostFlags { portable: true, ..HostFlags::default() };
        PinOptions { flags, huge_pages: true, touch: Touch::First }
    }
}

/// A caching allocator of pinned host memory, for streams of `S`. Clones share one allocator.
///
/// A buffer keeps the clone alive that it came from: threads that have a clone each do not count in
/// one place.
///
/// Memory comes as [`PinnedBuffer`]s, or through `allocator_api2`'s `Allocator`, as in
/// `Vec<T, PinnedAllocator<S>>`. The allocator of the core is reached through [`core`](Self::core)
/// only, which is `unsafe`: it frees by address, and knows nothing of slices that exist.
pub struct PinnedAllocator<S: StreamSource = Streams> {
    host: Arc<HostAllocator<CudaHost<S>>>,
}

impl<S: StreamSource> Clone for PinnedAllocator<S> {
    fn clone(&self) -> Self {
        PinnedAllocator { host: Arc::new(HostAllocator::clone(&self.host)) }
    }
}

impl<S: StreamSource> fmt::Debug for PinnedAllocator<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.host.fmt(f)
    }
}

impl PinnedAllocator<Streams> {
    /// An allocator for these devices, with streams of its own. Makes the primary context of each
    /// unless it exists: name only devices that the program uses anyway.
    ///
    /// # Errors
    /// Without a driver, or a device of that number; or as [`with_source`](Self::with_source).
    pub fn new(
        devices: &[DeviceId],
        config: HostConfig,
        options: PinOptions,
    ) -> Result<Self, NewError<StreamError>> {
        Self::with_driver(Driver::load().map_err(PinError::from)?, devices, config, options)
    }

    /// As [`new`](Self::new), on a driver that is loaded already.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_driver(
        driver: &'static Driver,
        devices: &[DeviceId],
        config: HostConfig,
        options: PinOptions,
    ) -> Result<Self, NewError<StreamError>> {
        let context = |device: &DeviceId| {
            let device = driver.device(device.index() as u16)?;
            Context::retain(device)
        };
        let contexts = devices.iter().map(context).collect::<Result<Vec<_>, _>>();
        let contexts = contexts.map_err(PinError::from)?;
        Self::with_source(Streams::new(&contexts), &contexts, config, options)
    }

    /// The streams.
    pub fn streams(&self) -> &Streams {
        self.source()
    }
}

impl<S: StreamSource> PinnedAllocator<S> {
    /// An allocator that pins through these contexts, for streams of `source`. Memory of a NUMA
    /// node is pinned through the first context whose device is near it, else through the first.
    ///
    /// # Errors
    /// If no context is given or a setting is out of range; or whatever the driver reports.
    pub fn with_source(
        source: S,
        contexts: &[Arc<Context>],
        config: HostConfig,
        options: PinOptions,
    ) -> Result<Self, NewError<S::Error>> {
        // Write-combined memory cannot be registered.
        let register = config.register && !options.flags.write_combined;
        let config = HostConfig { register, ..config };
        let host = CudaHost::new(source, contexts, options)?;
        Ok(PinnedAllocator { host: Arc::new(HostAllocator::new(host, config)?) })
    }

    pub(crate) fn host(&self) -> &HostAllocator<CudaHost<S>> {
        &self.host
    }

    /// The same clone, for a buffer.
    fn same(&self) -> Self {
        PinnedAllocator { host: Arc::clone(&self.host) }
    }

    /// Where its streams are from.
    pub fn source(&self) -> &S {
        &self.host.backend().source
    }

    /// A buffer of `bytes`.
    ///
    /// # Errors
    /// As [`HostAllocator::allocate`].
    pub fn buffer(&self, bytes: usize) -> Result<PinnedBuffer<S>, PinnedAllocError<S>> {
        self.buffer_on(bytes, Place::Anywhere)
    }

    /// A buffer near a device, or on a NUMA node.
    ///
    /// # Errors
    /// As [`HostAllocator::allocate_on`].
    pub fn buffer_on(
        &self,
        bytes: usize,
        place: Place,
    ) -> Result<PinnedBuffer<S>, PinnedAllocError<S>> {
        let allocation = self.host.allocate_on(bytes as u64, place)?;
        Ok(PinnedBuffer::new(self.same(), allocation))
    }

    /// A buffer for work on `stream`: while that is being captured, from the capture's pool.
    ///
    /// # Errors
    /// As [`HostAllocator::allocate_for`].
    pub fn buffer_for(
        &self,
        bytes: usize,
        place: Place,
        stream: &S::Stream,
    ) -> Result<PinnedBuffer<S>, PinnedAllocError<S>> {
        let allocation = self.host.allocate_for(bytes as u64, place, stream)?;
        Ok(PinnedBuffer::new(self.same(), allocation))
    }

    /// Memory without a slice, for those who see to its use themselves. Give it back with
    /// [`free`](Self::free).
    ///
    /// # Errors
    /// As [`HostAllocator::allocate_on`].
    #[inline]
    pub fn allocate(
        &self,
        bytes: u64,
        place: Place,
    ) -> Result<HostAllocation, PinnedAllocError<S>> {
        self.host.allocate_on(bytes, place)
    }

    /// Gives memory of [`allocate`](Self::allocate) back.
    ///
    /// # Errors
    /// As [`HostAllocator::free`].
    #[inline]
    pub fn free(
        &self,
        allocation: HostAllocation,
    ) -> Result<(), HostFreeError<PinError<S::Error>>> {
        self.host.free(allocation)
    }

    /// Names a stream whose work uses memory of [`allocate`](Self::allocate).
    ///
    /// # Errors
    /// As [`HostAllocator::record_use`].
    #[inline]
    pub fn record_use(
        &self,
        allocation: &HostAllocation,
        stream: &S::Stream,
    ) -> Result<(), PinnedAllocError<S>> {
        self.host.record_use(allocation, stream)
    }

    /// Names a stream whose work uses what a collection holds in pinned memory, until it is freed.
    /// False if `values` are not from this allocator.
    pub fn record_use_of<T>(&self, values: &[T], stream: &S::Stream) -> bool {
        let addr = Addr::new(values.as_ptr().addr() as u64);
        size_of_val(values) > 0 && self.host.record_event(addr, None, stream)
    }

    /// Whether a value lies in memory that this allocator has pinned.
    pub fn is_pinned<T: ?Sized>(&self, value: &T) -> bool {
        self.host.is_pinned(Addr::new((&raw const *value).addr() as u64))
    }

    /// How long the last registration of memory took, by part; zero before the first.
    pub fn pin_times(&self) -> PinTimes {
        self.host.backend().pin_times()
    }

    /// See [`HostAllocator::config`].
    pub fn config(&self) -> HostConfig {
        self.host.config()
    }

    /// See [`HostAllocator::apply`].
    ///
    /// # Errors
    /// As there.
    pub fn apply(&self, text: &str) -> Result<(), HostConfError> {
        self.host.apply(text)
    }

    /// See [`HostAllocator::process_events`].
    ///
    /// # Errors
    /// As there.
    pub fn process_events(&self) -> Result<(), PinnedAllocError<S>> {
        self.host.process_events()
    }

    /// See [`HostAllocator::empty_cache`].
    ///
    /// # Errors
    /// As there.
    pub fn empty_cache(&self) -> Result<(), PinnedAllocError<S>> {
        self.host.empty_cache()
    }

    /// See [`HostAllocator::trim`].
    ///
    /// # Errors
    /// As there.
    pub fn trim(&self, age: Duration) -> Result<(), PinnedAllocError<S>> {
        self.host.trim(age)
    }

    /// See [`HostAllocator::stats`].
    pub fn stats(&self) -> HostStats {
        self.host.stats()
    }

    /// See [`HostAllocator::reset_peak_stats`].
    pub fn reset_peak_stats(&self) {
        self.host.reset_peak_stats();
    }

    /// See [`HostAllocator::reset_accumulated_stats`].
    pub fn reset_accumulated_stats(&self) {
        self.host.reset_accumulated_stats();
    }

    /// See [`HostAllocator::begin_allocate_to_pool`].
    ///
    /// # Errors
    /// As there.
    pub fn begin_allocate_to_pool(
        &self,
        pool: PoolId,
        filter: impl Fn(StreamId) -> bool + Send + Sync + 'static,
    ) -> Result<(), PinnedAllocError<S>> {
        self.host.begin_allocate_to_pool(pool, filter)
    }

    /// See [`HostAllocator::end_allocate_to_pool`].
    ///
    /// # Errors
    /// As there.
    pub fn end_allocate_to_pool(&self, pool: PoolId) -> Result<(), PinnedAllocError<S>> {
        self.host.end_allocate_to_pool(pool)
    }

    /// See [`HostAllocator::release_pool`].
    ///
    /// # Errors
    /// As there.
    pub fn release_pool(&self, pool: PoolId) -> Result<(), PinnedAllocError<S>> {
        self.host.release_pool(pool)
    }

    /// See [`HostAllocator::check`].
    ///
    /// # Errors
    /// As there.
    pub fn check(&self) -> Result<(), HostViolation> {
        self.host.check()
    }
}

/// Why an allocator was not made.
#[derive(Debug)]
pub enum NewError<E> {
    /// A setting is out of range.
    Config(HostConfError),
    /// The backend cannot work.
    Backend(PinError<E>),
}

impl<E> From<HostConfError> for NewError<E> {
    fn from(error: HostConfError) -> Self {
        NewError::Config(error)
    }
}

impl<E> From<PinError<E>> for NewError<E> {
    fn from(error: PinError<E>) -> Self {
        NewError::Backend(error)
    }
}

impl<E: fmt::Display> fmt::Display for NewError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NewError::Config(error) => error.fmt(f),
            NewError::Backend(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for NewError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            NewError::Config(error) => Some(error),
            NewError::Backend(error) => Some(error),
        }
    }
}
