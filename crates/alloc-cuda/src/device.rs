//! What the backend keeps of one device: its context, events, peers and reservations.

use crate::error::CudaError;
use crate::vmm::{PageKind, Reserved};
use alloc_core::DeviceId;
use alloc_core::backend::DeviceMemory;
use cuda_driver::{Attribute, Context, Device, Event, PhysicalKind};
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock, Weak};

/// One device. Its context is retained when first needed: making the contexts of all devices of a
/// machine takes seconds and memory on each.
#[derive(Debug)]
pub(crate) struct DeviceState {
    pub(crate) id: DeviceId,
    device: Device,
    context: OnceLock<Arc<Context>>,
    retaining: Mutex<()>,
    /// Events to record again.
    events: Mutex<Vec<Event>>,
    /// The same, of the kind that other processes can open.
    shared_events: Mutex<Vec<Event>>,
    /// How physical memory is made here, or `None` without virtual memory.
    pub(crate) page_kind: Option<PageKind>,
    /// Devices whose kernels may reach this one's memory.
    peers: Mutex<Vec<Device>>,
    /// The reservations whose pages peers must reach too.
    reserved: Mutex<Vec<Weak<Reserved>>>,
}

impl DeviceState {
    pub(crate) fn new(id: DeviceId, device: Device) -> Result<DeviceState, CudaError> {
        let page_kind = if device.supports(Attribute::VirtualMemory)? {
            Some(PageKind::new(PhysicalKind {
                exportable: device.supports(Attribute::PosixFileDescriptor)?,
                fabric: false,
                gpu_direct: device.supports(Attribute::GpuDirectWithVirtualMemory)?,
            }))
        } else {
            None
        };
        Ok(DeviceState {
            id,
            device,
            context: OnceLock::new(),
            retaining: Mutex::new(()),
            events: Mutex::new(Vec::new()),
            shared_events: Mutex::new(Vec::new()),
            page_kind,
            peers: Mutex::new(Vec::new()),
            reserved: Mutex::new(Vec::new()),
        })
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// The primary context, retained now if it was not.
    pub(crate) fn context(&self) -> Result<&Arc<Context>, CudaError> {
        if let Some(context) = self.context.get() {
            return Ok(context);
        }
        let _one_at_a_time = self.retaining.lock();
        if let Some(context) = self.context.get() {
            return Ok(context);
        }
        let context = Context::retain(self.device)?;
        Ok(self.context.get_or_init(|| context))
    }

    /// Free and total memory. Before the context is needed for anything else, asking would make it:
    /// until then all of the device is said to be free.
    pub(crate) fn memory(&self) -> Result<DeviceMemory, CudaError> {
        match self.context.get() {
            Some(context) => {
                let info = context.memory_info()?;
                Ok(DeviceMemory { free: info.free, total: info.total })
            }
            None => {
                let total = self.device.total_memory()?;
                Ok(DeviceMemory { free: total, total })
            }
        }
    }

    /// An event to record, an old one if there is any.
    pub(crate) fn take_event(&self) -> Result<Event, CudaError> {
        if let Some(event) = self.events.lock().pop() {
            return Ok(event);
        }
        Ok(Event::create(self.context()?)?)
    }

    /// Keeps an event for the next use.
    pub(crate) fn put_event(&self, event: Event) {
        self.events.lock().push(event);
    }

    /// An event that other processes can open, to record.
    pub(crate) fn take_shared_event(&self) -> Result<Event, CudaError> {
        if let Some(event) = self.shared_events.lock().pop() {
            return Ok(event);
        }
        Ok(Event::create_shared(self.context()?)?)
    }

    /// Keeps such an event for the next use.
    pub(crate) fn put_shared_event(&self, event: Event) {
        self.shared_events.lock().push(event);
    }

    /// The devices besides this one that may reach its memory.
    pub(crate) fn peers(&self) -> Vec<Device> {
        self.peers.lock().clone()
    }

    /// Adds a device that may reach this one's memory from now on, and lets it reach the pages that
    /// are mapped already. If that fails it reaches none and is not added, and can be tried again.
    pub(crate) fn add_peer(&self, peer: Device) -> Result<(), CudaError> {
        {
            let mut peers = self.peers.lock();
            if peers.contains(&peer) {
                return Ok(());
            }
            peers.push(peer);
        }
        // Reservations made from now on see the new list; the others are visited.
        let reserved: Vec<_> = self.reserved.lock().iter().filter_map(Weak::upgrade).collect();
        let refused = reserved.iter().enumerate().find_map(|(at, reserved)| {
            let error = reserved.admit(peer).err()?;
            Some((at, error))
        });
        let Some((reached, error)) = refused else { return Ok(()) };
        self.peers.lock().retain(|known| *known != peer);
        reserved[..reached].iter().for_each(|reserved| reserved.dismiss(peer));
        Err(error)
    }

    /// Remembers a reservation for peers to come.
    pub(crate) fn add_reservation(&self, reservation: &Arc<Reserved>) {
        let mut reserved = self.reserved.lock();
        reserved.retain(|known| known.strong_count() > 0);
        reserved.push(Arc::downgrade(reservation));
    }
}
