//! The backend traits on CUDA.

use crate::device::DeviceState;
use crate::error::CudaError;
use crate::event::CudaEvent;
use crate::segment::CudaSegment;
use crate::stream::{CudaStream, StreamTable};
use crate::vmm::{CudaPage, CudaReservation};
use alloc_core::backend::{
    Backend, Completion, DeviceMemory, MemoryInfo, Refused, SEGMENT_ALIGN, VirtualMemory,
};
use alloc_core::{Addr, DeviceId};
use cuda_driver::{AddressRange, Attribute, Context, Device, Driver, RelaxedCaptures};
use std::sync::Arc;

/// All GPUs that the process sees, by their numbers. Clones are the same backend.
///
/// Any method may be called from any thread. Each leaves the thread's current context and capture
/// mode as they were. Calls are made with captures relaxed, as none of them disturbs one: memory may
/// be allocated while another stream is being captured.
#[derive(Clone, Debug)]
pub struct CudaBackend {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    driver: &'static Driver,
    devices: Vec<Arc<DeviceState>>,
    streams: StreamTable,
}

impl CudaBackend {
    /// Loads the driver and asks for its devices. No context is made yet.
    ///
    /// # Errors
    /// [`CudaError::Load`] without a driver or a GPU.
    pub fn new() -> Result<CudaBackend, CudaError> {
        Self::with_driver(Driver::load()?)
    }

    /// A backend on a driver that is loaded already.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn with_driver(driver: &'static Driver) -> Result<CudaBackend, CudaError> {
        let state = |ordinal| {
            let device = driver.device(ordinal)?;
            DeviceState::new(DeviceId::new(ordinal), device).map(Arc::new)
        };
        let devices = (0..driver.device_count()?).map(state).collect::<Result<Vec<_>, _>>()?;
        let streams = StreamTable::new(devices.len());
        Ok(CudaBackend { inner: Arc::new(Inner { driver, devices, streams }) })
    }

    /// The driver.
    pub fn driver(&self) -> &'static Driver {
        self.inner.driver
    }

    /// The primary context of a device, for work of one's own; made now if nobody has yet.
    ///
    /// # Errors
    /// [`CudaError::NoSuchDevice`], or whatever the driver reports.
    pub fn context(&self, device: DeviceId) -> Result<Arc<Context>, CudaError> {
        Ok(self.device(device)?.context()?.clone())
    }

    /// Makes a stream that does not wait for the legacy default stream. It is destroyed with the
    /// last clone, some of which an allocator keeps.
    ///
    /// # Errors
    /// [`CudaError::NoSuchDevice`], or whatever the driver reports.
    pub fn create_stream(&self, device: DeviceId) -> Result<CudaStream, CudaError> {
        let _relaxed = self.relaxed()?;
        self.inner.streams.create(self.device(device)?)
    }

    /// The legacy default stream of a device (the null handle; PyTorch's default stream).
    ///
    /// # Errors
    /// [`CudaError::NoSuchDevice`], or whatever the driver reports.
    pub fn default_stream(&self, device: DeviceId) -> Result<CudaStream, CudaError> {
        self.inner.streams.legacy(self.device(device)?)
    }

    /// The calling thread's default stream on a device. Other threads may free memory that was used
    /// on it, but must not queue work on it.
    ///
    /// # Errors
    /// [`CudaError::NoSuchDevice`], or whatever the driver reports.
    pub fn per_thread_stream(&self, device: DeviceId) -> Result<CudaStream, CudaError> {
        self.inner.streams.per_thread(self.device(device)?)
    }

    /// The table of streams and a device's state.
    pub(crate) fn streams(
        &self,
        device: DeviceId,
    ) -> Result<(&StreamTable, &Arc<DeviceState>), CudaError> {
        Ok((&self.inner.streams, self.device(device)?))
    }

    /// To be called just before the owner of an adopted stream destroys it: notes the end of its
    /// work, which memory used on it still waits for, and forgets it. The driver is not asked about
    /// the handle again, and whoever gets the handle next is another stream.
    ///
    /// # Errors
    /// Whatever the driver reports. The stream is still known then.
    pub fn retire(&self, stream: &CudaStream) -> Result<(), CudaError> {
        let _relaxed = self.relaxed()?;
        stream.retire()?;
        self.inner.streams.forget(stream);
        Ok(())
    }

    /// Lets kernels of `device` reach all memory of `peer` that this backend makes, made or imports.
    ///
    /// # Errors
    /// Nothing can be reached then that could not before.
    /// [`CudaError::NoPeerAccess`] if the devices are not connected; [`CudaError::NoSuchDevice`]; or
    /// whatever the driver reports.
    pub fn enable_peer_access(&self, device: DeviceId, peer: DeviceId) -> Result<(), CudaError> {
        let (own, other) = (self.device(device)?, self.device(peer)?);
        if device == peer {
            return Ok(());
        }
        if !own.device().can_access_peer(&other.device())? {
            return Err(CudaError::NoPeerAccess { device, peer });
        }
        let (from, to) = (own.context()?, other.context()?);
        let is_new = from.enable_peer_access(to)?;
        let added = other.add_peer(own.device());
        if added.is_err() && is_new {
            // Segments that are whole could be reached; the failure is reported either way.
            let _ = from.disable_peer_access(to);
        }
        added
    }

    /// Makes virtual memory of `device` from now on so that its pages are shared as fabric handles,
    /// which carry no descriptor and reach other machines of the fabric too, if the device says it
    /// can. Returns whether it does. Where the driver refuses after all, pages are shared as
    /// descriptors as before.
    ///
    /// # Errors
    /// [`CudaError::NoSuchDevice`], or whatever the driver reports.
    pub fn ask_for_fabric_handles(&self, device: DeviceId) -> Result<bool, CudaError> {
        let state = self.device(device)?;
        let Some(kind) = &state.page_kind else { return Ok(false) };
        let has = state.device().supports(Attribute::FabricHandle)?;
        if has {
            kind.ask_for_fabric();
        }
        Ok(has)
    }

    /// Whether a device has virtual memory, which expandable segments need.
    ///
    /// # Errors
    /// [`CudaError::NoSuchDevice`].
    pub fn has_virtual_memory(&self, device: DeviceId) -> Result<bool, CudaError> {
        Ok(self.device(device)?.page_kind.is_some())
    }

    /// The driver's device of that number.
    pub(crate) fn driver_device(&self, device: DeviceId) -> Result<Device, CudaError> {
        Ok(self.device(device)?.device())
    }

    pub(crate) fn device(&self, device: DeviceId) -> Result<&Arc<DeviceState>, CudaError> {
        let count = self.inner.devices.len() as u16;
        let known = self.inner.devices.get(device.index());
        known.ok_or(CudaError::NoSuchDevice { device, count })
    }

    /// Allows this thread, for the length of a call, what captures forbid.
    pub(crate) fn relaxed(&self) -> Result<RelaxedCaptures<'static>, CudaError> {
        Ok(self.inner.driver.relax_captures()?)
    }
}

impl Backend for CudaBackend {
    type Stream = CudaStream;
    type Event = CudaEvent;
    type Segment = CudaSegment;
    type Error = CudaError;

    fn device_count(&self) -> u16 {
        self.inner.devices.len() as u16
    }

    fn acquire(
        &self,
        device: DeviceId,
        bytes: u64,
        _stream: &CudaStream,
    ) -> Result<CudaSegment, CudaError> {
        let _relaxed = self.relaxed()?;
        CudaSegment::allocate(self.device(device)?.context()?, bytes)
    }

    fn release(&self, segment: CudaSegment) -> Result<(), Refused<CudaSegment, CudaError>> {
        match self.relaxed() {
            Ok(_relaxed) => segment.release(),
            Err(error) => Err(Refused { value: segment, error }),
        }
    }

    fn record(&self, stream: &CudaStream) -> Result<CudaEvent, CudaError> {
        stream.record()
    }

    fn query(&self, event: &CudaEvent) -> Result<Completion, CudaError> {
        let _relaxed = self.relaxed()?;
        event.query()
    }

    fn wait(&self, event: &CudaEvent) -> Result<(), CudaError> {
        let _relaxed = self.relaxed()?;
        event.wait()
    }
}

impl MemoryInfo for CudaBackend {
    /// Before a device has been used, asking the driver would make its context; until then all of it
    /// counts as free.
    fn memory(&self, device: DeviceId) -> Result<DeviceMemory, CudaError> {
        self.device(device)?.memory()
    }
}

impl VirtualMemory for CudaBackend {
    type Reservation = CudaReservation;
    type Page = CudaPage;

    /// What the driver says; 2 MiB where it has no virtual memory, and then every other call fails.
    fn granularity(&self, device: DeviceId) -> u64 {
        let ask = || -> Result<Option<u64>, CudaError> {
            let state = self.device(device)?;
            let Some(kind) = &state.page_kind else { return Ok(None) };
            Ok(Some(state.context()?.granularity(kind.get())?))
        };
        ask().ok().flatten().unwrap_or(SEGMENT_ALIGN)
    }

    fn reserve(&self, device: DeviceId, bytes: u64) -> Result<CudaReservation, CudaError> {
        let state = self.device(device)?;
        if state.page_kind.is_none() {
            return Err(CudaError::NoVirtualMemory { device });
        }
        let _relaxed = self.relaxed()?;
        let range = AddressRange::reserve(state.context()?, bytes, SEGMENT_ALIGN)?;
        Ok(CudaReservation::new(range, state))
    }

    fn unreserve(
        &self,
        reservation: CudaReservation,
    ) -> Result<(), Refused<CudaReservation, CudaError>> {
        match self.relaxed() {
            Ok(_relaxed) => reservation.unreserve(),
            Err(error) => Err(Refused { value: reservation, error }),
        }
    }

    fn create(&self, device: DeviceId, bytes: u64) -> Result<CudaPage, CudaError> {
        let state = self.device(device)?;
        let kind = state.page_kind.as_ref().ok_or(CudaError::NoVirtualMemory { device })?;
        let _relaxed = self.relaxed()?;
        Ok(CudaPage::new(kind.create(state.context()?, bytes)?))
    }

    fn destroy(&self, page: CudaPage) -> Result<(), Refused<CudaPage, CudaError>> {
        match self.relaxed() {
            Ok(_relaxed) => page.destroy(),
            Err(error) => Err(Refused { value: page, error }),
        }
    }

    fn map(
        &self,
        reservation: &CudaReservation,
        at: Addr,
        page: &CudaPage,
    ) -> Result<(), CudaError> {
        let _relaxed = self.relaxed()?;
        reservation.map(at, page)
    }

    fn set_access(
        &self,
        reservation: &CudaReservation,
        at: Addr,
        bytes: u64,
        device: DeviceId,
    ) -> Result<(), CudaError> {
        let device = self.device(device)?.device();
        let _relaxed = self.relaxed()?;
        reservation.set_access(at, bytes, device)
    }

    fn unmap(&self, reservation: &CudaReservation, at: Addr, bytes: u64) -> Result<(), CudaError> {
        let _relaxed = self.relaxed()?;
        reservation.unmap(at, bytes)
    }
}
