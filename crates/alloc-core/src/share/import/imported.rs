//! An open block of another process.

use super::{ImportResult, Leaving, Shared, SpanKey, fault};
use crate::backend::{SharePages, Stream, Token};
use crate::error::BackendOp;
use crate::units::{Addr, DeviceId, StreamId};
use parking_lot::Mutex;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A block of another process, open here. Dropping it waits for nothing: the memory is closed, and
/// its producer told, when the work on it is done and the [`Importer`](super::Importer) looks.
pub struct Imported<B: SharePages> {
    pub(super) shared: Arc<Shared<B>>,
    pub(super) key: SpanKey,
    pub(super) device: DeviceId,
    pub(super) addr: Addr,
    pub(super) bytes: u64,
    /// What the producer queued before it sent the block.
    pub(super) ready: Option<Token<B::Descriptor>>,
    pub(super) uses: Mutex<Vec<B::Stream>>,
    pub(super) lease: Option<Box<dyn Any + Send>>,
}

impl<B: SharePages> fmt::Debug for Imported<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Imported")
            .field("device", &self.device)
            .field("addr", &self.addr)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl<B: SharePages> Imported<B> {
    /// Where it begins here.
    pub fn addr(&self) -> Addr {
        self.addr
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where its memory is, by the number it has here.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// To be called before the first work that uses the block is queued on `stream`: that work will
    /// wait for what the producer did before it sent the block, and the block for that work.
    ///
    /// # Errors
    /// [`Backend`](super::ImportError::Backend) if the producer's event cannot be waited for. The stream must not use
    /// the block then.
    pub fn use_on(&self, stream: &B::Stream) -> ImportResult<(), B> {
        let mut uses = self.uses.lock();
        if uses.iter().any(|used| used.id() == stream.id()) {
            return Ok(());
        }
        if let Some(ready) = &self.ready {
            let awaited = self.shared.backend.await_event(stream, ready);
            awaited.map_err(fault(BackendOp::AwaitEvent))?;
        }
        uses.push(stream.clone());
        Ok(())
    }

    /// The streams that [`use_on`](Self::use_on) was called for.
    pub fn used_on(&self) -> Vec<StreamId> {
        self.uses.lock().iter().map(Stream::id).collect()
    }
}

impl<B: SharePages> Drop for Imported<B> {
    fn drop(&mut self) {
        let unrecorded = std::mem::take(self.uses.get_mut());
        let Some(lease) = self.lease.take() else { return };
        let key = Arc::clone(&self.key);
        let leaving = Leaving { key, events: Vec::new(), unrecorded, lease };
        self.shared.leaving.lock().push(leaving);
        self.shared.collect();
    }
}
