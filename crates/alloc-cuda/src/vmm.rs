//! Virtual memory: reservations, physical pages, and who may reach them.

use crate::device::DeviceState;
use crate::error::CudaError;
use alloc_core::Addr;
use alloc_core::backend::{Page, Refused, Reservation};
use cuda_driver::{AddressRange, Context, Device, DriverError, PhysicalKind, PhysicalMemory, code};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// How physical memory of a device is made: with all it is said to be capable of, or with less,
/// found by trying. A container or virtual machine can forbid what the device's attributes promise.
#[derive(Debug)]
pub(crate) struct PageKind {
    ladder: [PhysicalKind; 3],
    /// Position on the ladder.
    step: AtomicUsize,
    /// Whether to ask for fabric handles.
    fabric: AtomicBool,
}

impl PageKind {
    pub(crate) fn new(best: PhysicalKind) -> Self {
        let local = PhysicalKind { gpu_direct: false, ..best };
        PageKind {
            ladder: [best, local, PhysicalKind::default()],
            step: AtomicUsize::new(0),
            fabric: AtomicBool::new(false),
        }
    }

    /// What is used now.
    pub(crate) fn get(&self) -> PhysicalKind {
        self.ladder[self.step.load(Ordering::Relaxed)]
    }

    /// From now on memory is made so that it has fabric handles, unless that fails.
    pub(crate) fn ask_for_fabric(&self) {
        self.fabric.store(true, Ordering::Relaxed);
    }

    /// Creates memory, going down the ladder while the driver refuses the kind.
    pub(crate) fn create(
        &self,
        context: &Arc<Context>,
        bytes: u64,
    ) -> Result<(PhysicalMemory, PhysicalKind), DriverError> {
        if self.fabric.load(Ordering::Relaxed) {
            let kind = PhysicalKind { fabric: true, ..self.get() };
            match PhysicalMemory::create(context, bytes, kind) {
                Ok(memory) => return Ok((memory, kind)),
                Err(error) if error.code == code::OUT_OF_MEMORY => return Err(error),
                // What machines without a fabric, or without the right to it, answer differs.
                Err(_) => self.fabric.store(false, Ordering::Relaxed),
            }
        }
        let first = self.step.load(Ordering::Relaxed);
        let mut refusal = None;
        for (step, &kind) in self.ladder.iter().enumerate().skip(first) {
            match PhysicalMemory::create(context, bytes, kind) {
                Ok(memory) => {
                    self.step.store(step, Ordering::Relaxed);
                    return Ok((memory, kind));
                }
                Err(error) if refuses_kind(&error) => refusal = Some(error),
                Err(error) => return Err(error),
            }
        }
        // If even plain memory is refused, the kind was not the reason.
        Err(refusal.unwrap_or(DriverError::new("cuMemCreate", code::NOT_SUPPORTED)))
    }
}

/// Whether an error may be about what the memory should be capable of.
fn refuses_kind(error: &DriverError) -> bool {
    matches!(error.code, code::INVALID_VALUE | code::NOT_SUPPORTED | code::NOT_PERMITTED)
}

/// Physical memory from `cuMemCreate`. Dropping it leaks.
#[derive(Debug)]
pub struct CudaPage {
    memory: PhysicalMemory,
    kind: PhysicalKind,
}

impl Page for CudaPage {
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }
}

impl CudaPage {
    pub(crate) fn new((memory, kind): (PhysicalMemory, PhysicalKind)) -> Self {
        CudaPage { memory, kind }
    }

    /// What it can be exported as.
    pub(crate) fn kind(&self) -> PhysicalKind {
        self.kind
    }

    /// The driver's handle, to export it for instance.
    pub fn memory(&self) -> &PhysicalMemory {
        &self.memory
    }

    pub(crate) fn destroy(self) -> Result<(), Refused<Self, CudaError>> {
        let CudaPage { memory, kind } = self;
        memory.release().map_err(|refused| Refused {
            value: CudaPage { memory: refused.value, kind },
            error: refused.error.into(),
        })
    }
}

/// A range of addresses from `cuMemAddressReserve`. Dropping it leaks.
#[derive(Debug)]
pub struct CudaReservation {
    base: Addr,
    bytes: u64,
    home: Arc<DeviceState>,
    shared: Arc<Reserved>,
}

/// The part of a reservation that a new peer must reach.
#[derive(Debug)]
pub(crate) struct Reserved {
    state: Mutex<ReservedState>,
}

#[derive(Debug)]
struct ReservedState {
    /// `None` once given back.
    range: Option<AddressRange>,
    /// The mapped pages: address, length, whether access was set.
    pages: BTreeMap<u64, (u64, bool)>,
}

impl Reservation for CudaReservation {
    fn base(&self) -> Addr {
        self.base
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl CudaReservation {
    pub(crate) fn new(range: AddressRange, home: &Arc<DeviceState>) -> Self {
        let (base, bytes) = (Addr::new(range.base()), range.bytes());
        let state = ReservedState { range: Some(range), pages: BTreeMap::new() };
        let shared = Arc::new(Reserved { state: Mutex::new(state) });
        home.add_reservation(&shared);
        CudaReservation { base, bytes, home: home.clone(), shared }
    }

    pub(crate) fn unreserve(self) -> Result<(), Refused<Self, CudaError>> {
        let range = self.shared.state.lock().range.take();
        match range.map_or(Ok(()), AddressRange::free) {
            Ok(()) => Ok(()),
            Err(refused) => {
                self.shared.state.lock().range = Some(refused.value);
                Err(Refused { value: self, error: refused.error.into() })
            }
        }
    }

    pub(crate) fn map(&self, at: Addr, page: &CudaPage) -> Result<(), CudaError> {
        let mut state = self.shared.state.lock();
        state.range()?.map(at.get(), &page.memory)?;
        state.pages.insert(at.get(), (page.bytes(), false));
        Ok(())
    }

    /// Lets `device` reach a range; with the device it lies on come its peers.
    pub(crate) fn set_access(&self, at: Addr, bytes: u64, device: Device) -> Result<(), CudaError> {
        let mut state = self.shared.state.lock();
        state.range()?.set_access(at.get(), bytes, device)?;
        if device != self.home.device() {
            return Ok(());
        }
        for (_, page) in state.pages.range_mut(at.get()..at.get() + bytes) {
            page.1 = true;
        }
        // Read after marking: a peer that is added meanwhile either is in the list or finds the
        // pages marked.
        let peers = self.home.peers();
        peers
            .into_iter()
            .try_for_each(|peer| Ok(state.range()?.set_access(at.get(), bytes, peer)?))
    }

    pub(crate) fn unmap(&self, at: Addr, bytes: u64) -> Result<(), CudaError> {
        let mut state = self.shared.state.lock();
        state.range()?.unmap(at.get(), bytes)?;
        state.pages.remove(&at.get());
        Ok(())
    }
}

impl Reserved {
    /// Lets one more device reach every page that has been made accessible, or none of them.
    pub(crate) fn admit(&self, peer: Device) -> Result<(), CudaError> {
        let state = self.state.lock();
        let Some(range) = &state.range else { return Ok(()) };
        let mut pages = state.accessible();
        let refused = pages.find_map(|(at, bytes)| {
            let error = range.set_access(at, bytes, peer).err()?;
            Some((at, error))
        });
        let Some((end, error)) = refused else { return Ok(()) };
        for (at, bytes) in state.accessible().take_while(|(at, _)| *at < end) {
            let _ = range.revoke_access(at, bytes, peer);
        }
        Err(error.into())
    }

    /// Undoes [`admit`](Self::admit), as far as the driver does it.
    pub(crate) fn dismiss(&self, peer: Device) {
        let state = self.state.lock();
        let Some(range) = &state.range else { return };
        for (at, bytes) in state.accessible() {
            let _ = range.revoke_access(at, bytes, peer);
        }
    }
}

impl ReservedState {
    /// The pages that the device itself may reach: address, length.
    fn accessible(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let accessible = self.pages.iter().filter(|(_, (_, accessible))| *accessible);
        accessible.map(|(at, (bytes, _))| (*at, *bytes))
    }

    fn range(&self) -> Result<&AddressRange, CudaError> {
        let gone = || DriverError::new("cuMemMap", code::INVALID_VALUE).into();
        self.range.as_ref().ok_or_else(gone)
    }
}
