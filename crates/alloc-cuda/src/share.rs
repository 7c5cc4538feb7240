//! Memory and events for other processes.

use crate::backend::CudaBackend;
use crate::device::DeviceState;
use crate::error::CudaError;
use crate::segment::CudaSegment;
use crate::stream::CudaStream;
use crate::vmm::CudaPage;
use alloc_core::backend::{
    DeviceKey, Refused, Segment, Share, SharePages, Stream as _, Token, TokenKind,
};
use alloc_core::{Addr, DeviceId};
use cuda_driver::{Event, IpcHandle, OpenedMemory, PhysicalKind, PhysicalMemory};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// A handle of `cuIpcGetMemHandle`, and where in that memory the segment begins, in 8 bytes.
const SEGMENT: TokenKind = TokenKind(1);
/// Physical memory, as a descriptor.
const PAGE_DESCRIPTOR: TokenKind = TokenKind(2);
/// Physical memory, as a fabric handle.
const PAGE_FABRIC: TokenKind = TokenKind(3);
/// A handle of `cuIpcGetEventHandle`.
const EVENT: TokenKind = TokenKind(4);

/// A segment of another process. Dropping it leaks the mapping: work may still be using it.
#[derive(Debug)]
pub struct CudaOpened {
    memory: OpenedMemory,
    base: Addr,
    bytes: u64,
}

impl Segment for CudaOpened {
    fn base(&self) -> Addr {
        self.base
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// An event that other processes may wait for while this exists. Dropping it lets the driver's event
/// be used again.
#[derive(Debug)]
pub struct CudaSharedEvent {
    /// `None` only while being dropped.
    event: Option<Event>,
    device: Arc<DeviceState>,
}

impl Drop for CudaSharedEvent {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            self.device.put_shared_event(event);
        }
    }
}

fn plain(kind: TokenKind, bytes: &[u8]) -> Token<OwnedFd> {
    Token { kind, bytes: bytes.to_vec(), descriptor: None }
}

/// The handle at the beginning of a token, and what follows it.
fn handle_of(token: &Token<OwnedFd>) -> Result<(IpcHandle, &[u8]), CudaError> {
    let (handle, rest) = token.bytes.split_first_chunk().ok_or(CudaError::BadToken)?;
    Ok((*handle, rest))
}

fn expect(token: &Token<OwnedFd>, kind: TokenKind) -> Result<(), CudaError> {
    if token.kind == kind { Ok(()) } else { Err(unknown(token)) }
}

fn unknown(token: &Token<OwnedFd>) -> CudaError {
    CudaError::UnknownToken { kind: token.kind.0 }
}

impl Share for CudaBackend {
    type Descriptor = OwnedFd;
    type Opened = CudaOpened;
    type SharedEvent = CudaSharedEvent;

    /// The device's UUID.
    fn device_key(&self, device: DeviceId) -> Result<DeviceKey, CudaError> {
        Ok(DeviceKey(self.device(device)?.device().uuid()?))
    }

    fn export_segment(&self, segment: &CudaSegment) -> Result<Token<OwnedFd>, CudaError> {
        let _relaxed = self.relaxed()?;
        let memory = segment.memory();
        let mut bytes = memory.ipc_handle()?.to_vec();
        let offset = segment.base().get() - memory.addr();
        bytes.extend_from_slice(&offset.to_le_bytes());
        Ok(plain(SEGMENT, &bytes))
    }

    /// In the process that exported it, the driver refuses.
    fn open_segment(
        &self,
        device: DeviceId,
        bytes: u64,
        token: Token<OwnedFd>,
    ) -> Result<CudaOpened, CudaError> {
        expect(&token, SEGMENT)?;
        let (handle, offset) = handle_of(&token)?;
        let offset = offset.try_into().map_err(|_| CudaError::BadToken)?;
        let _relaxed = self.relaxed()?;
        let memory = OpenedMemory::open(self.device(device)?.context()?, handle)?;
        let base = Addr::new(memory.addr()).checked_add(u64::from_le_bytes(offset));
        match base {
            Some(base) => Ok(CudaOpened { memory, base, bytes }),
            None => {
                memory.close().map_err(|refused| refused.error)?;
                Err(CudaError::BadToken)
            }
        }
    }

    fn close_segment(&self, opened: CudaOpened) -> Result<(), Refused<CudaOpened, CudaError>> {
        let _relaxed = match self.relaxed() {
            Ok(relaxed) => relaxed,
            Err(error) => return Err(Refused { value: opened, error }),
        };
        let CudaOpened { memory, base, bytes } = opened;
        memory.close().map_err(|refused| Refused {
            value: CudaOpened { memory: refused.value, base, bytes },
            error: refused.error.into(),
        })
    }

    fn export_event(
        &self,
        stream: &CudaStream,
    ) -> Result<(CudaSharedEvent, Token<OwnedFd>), CudaError> {
        let _relaxed = self.relaxed()?;
        let device = self.device(stream.device())?;
        let event = device.take_shared_event()?;
        // Back in the pool on failure, too.
        let shared = CudaSharedEvent { event: Some(event), device: Arc::clone(device) };
        let event = shared.event.as_ref().ok_or(CudaError::BadToken)?;
        stream.record_into(event)?;
        let token = plain(EVENT, &event.ipc_handle()?);
        Ok((shared, token))
    }

    fn await_event(&self, stream: &CudaStream, token: &Token<OwnedFd>) -> Result<(), CudaError> {
        expect(token, EVENT)?;
        let (handle, _) = handle_of(token)?;
        let _relaxed = self.relaxed()?;
        let context = self.device(stream.device())?.context()?;
        let event = Event::open(context, handle)?;
        stream.driver_stream().wait_event(&event)?;
        Ok(())
    }
}

impl SharePages for CudaBackend {
    fn export_page(&self, page: &CudaPage) -> Result<Token<OwnedFd>, CudaError> {
        let _relaxed = self.relaxed()?;
        let kind = page.kind();
        if kind.fabric {
            return Ok(plain(PAGE_FABRIC, &page.memory().export_fabric()?));
        }
        if !kind.exportable {
            let device = DeviceId::new(page.memory().context().device().ordinal());
            return Err(CudaError::NotShareable { device });
        }
        let descriptor = Some(page.memory().export()?);
        Ok(Token { kind: PAGE_DESCRIPTOR, bytes: Vec::new(), descriptor })
    }

    fn import_page(
        &self,
        device: DeviceId,
        bytes: u64,
        token: Token<OwnedFd>,
    ) -> Result<CudaPage, CudaError> {
        let context = self.device(device)?.context()?;
        let _relaxed = self.relaxed()?;
        let memory = match token.kind {
            PAGE_DESCRIPTOR => {
                let descriptor = token.descriptor.as_ref().ok_or(CudaError::BadToken)?;
                PhysicalMemory::import(context, descriptor.as_fd(), bytes)?
            }
            PAGE_FABRIC => PhysicalMemory::import_fabric(context, handle_of(&token)?.0, bytes)?,
            _ => return Err(unknown(&token)),
        };
        // It is the exporter's to export.
        Ok(CudaPage::new((memory, PhysicalKind::default())))
    }
}
