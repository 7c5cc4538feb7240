//! Physical memory behind expandable segments.
//!
//! The allocator reaches virtual memory through the object-safe [`Pager`], so that allocators of
//! backends without it need no such bound; it is called on growth and release only.

use crate::backend::{Page, Refused, Reservation, VirtualMemory};
use crate::error::BackendOp;
use crate::units::{Addr, DeviceId};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A failed backend call on behalf of a segment.
#[derive(Debug)]
pub(crate) struct PagerError<E> {
    pub(crate) op: BackendOp,
    pub(crate) source: E,
}

/// Result of unmapping a run: what was unmapped, from its start on, even if a later page failed.
#[derive(Debug)]
pub(crate) struct Unmapped<E> {
    pub(crate) bytes: u64,
    pub(crate) error: Option<PagerError<E>>,
}

/// Reserves, backs and unbacks address space. Reservations are named by their base.
///
/// Called under the growth lock of the device, never under a heap lock; no two calls for one
/// reservation run at once.
pub(crate) trait Pager<E>: Send + Sync {
    /// Reserves `bytes`; returns the base.
    fn reserve(&self, device: DeviceId, bytes: u64) -> Result<Addr, PagerError<E>>;

    /// Gives back a reservation in which nothing is mapped.
    fn unreserve(&self, base: Addr) -> Result<(), PagerError<E>>;

    /// Backs `bytes` from `at` on with new pages of `page_bytes` each, or does nothing at all.
    fn map(&self, base: Addr, at: Addr, bytes: u64, page_bytes: u64) -> Result<(), PagerError<E>>;

    /// Unbacks `bytes` from `at` on, which are whole pages, and gives the pages back. Nothing may be
    /// using them.
    fn unmap(&self, base: Addr, at: Addr, bytes: u64) -> Unmapped<E>;
}

struct Reserved<B: VirtualMemory> {
    token: B::Reservation,
    device: DeviceId,
    pages: BTreeMap<Addr, B::Page>,
}

/// The pager of a backend with virtual memory. Every page is created when it is mapped and
/// destroyed when it is unmapped.
pub(crate) struct PageStore<B: VirtualMemory> {
    backend: Arc<B>,
    reserved: Mutex<BTreeMap<Addr, Reserved<B>>>,
    /// Pages that the backend refused to take back; offered again on the next occasion.
    strays: Mutex<Vec<B::Page>>,
}

impl<B: VirtualMemory> PageStore<B> {
    pub(crate) const fn new(backend: Arc<B>) -> Self {
        PageStore { backend, reserved: Mutex::new(BTreeMap::new()), strays: Mutex::new(Vec::new()) }
    }

    /// Takes a reservation out of the table, so that no lock is held while the backend works.
    fn take(&self, base: Addr) -> Reserved<B> {
        self.reserved.lock().remove(&base).expect("I10: the reservation exists")
    }

    fn put(&self, reserved: Reserved<B>) {
        self.reserved.lock().insert(reserved.token.base(), reserved);
    }

    fn map_pages(
        &self,
        reserved: &mut Reserved<B>,
        at: Addr,
        bytes: u64,
        page_bytes: u64,
    ) -> Result<(), PagerError<B::Error>> {
        let error = |op| move |source| PagerError { op, source };
        let mut created = Vec::new();
        for _ in 0..bytes / page_bytes {
            match self.backend.create(reserved.device, page_bytes) {
                Ok(page) => created.push(page),
                Err(source) => {
                    self.destroy_all(created);
                    return Err(PagerError { op: BackendOp::Create, source });
                }
            }
        }
        let mut mapped = Vec::new();
        let mut created = created.into_iter();
        let mut cursor = at;
        for page in created.by_ref() {
            let result = self.backend.map(&reserved.token, cursor, &page);
            let bytes = page.bytes();
            if let Err(source) = result {
                self.destroy_all(created.chain([page]));
                self.unmap_pages(reserved, mapped);
                return Err(error(BackendOp::Map)(source));
            }
            mapped.push((cursor, page));
            cursor = cursor + bytes;
        }
        let access = self.backend.set_access(&reserved.token, at, bytes, reserved.device);
        if let Err(source) = access {
            self.unmap_pages(reserved, mapped);
            return Err(error(BackendOp::SetAccess)(source));
        }
        reserved.pages.extend(mapped);
        Ok(())
    }

    /// Undoes a half-done map. A page that cannot even be unmapped stays mapped and is kept, so that
    /// it is not lost; its range is never handed out because the hole was never booked as backed.
    fn unmap_pages(&self, reserved: &mut Reserved<B>, mapped: Vec<(Addr, B::Page)>) {
        let mut unmapped = Vec::new();
        for (at, page) in mapped {
            match self.backend.unmap(&reserved.token, at, page.bytes()) {
                Ok(()) => unmapped.push(page),
                Err(_) => {
                    reserved.pages.insert(at, page);
                }
            }
        }
        self.destroy_all(unmapped);
    }

    fn destroy_all(&self, pages: impl IntoIterator<Item = B::Page>) {
        for page in pages {
            let _ = self.destroy(page);
        }
    }

    fn destroy(&self, page: B::Page) -> Result<(), PagerError<B::Error>> {
        self.backend.destroy(page).map_err(|Refused { value, error }| {
            self.strays.lock().push(value);
            PagerError { op: BackendOp::Destroy, source: error }
        })
    }

    fn retry_strays(&self) {
        let strays = std::mem::take(&mut *self.strays.lock());
        self.destroy_all(strays);
    }
}

impl<B: VirtualMemory> Pager<B::Error> for PageStore<B> {
    fn reserve(&self, device: DeviceId, bytes: u64) -> Result<Addr, PagerError<B::Error>> {
        let token = self
            .backend
            .reserve(device, bytes)
            .map_err(|source| PagerError { op: BackendOp::Reserve, source })?;
        let base = token.base();
        self.put(Reserved { token, device, pages: BTreeMap::new() });
        Ok(base)
    }

    fn unreserve(&self, base: Addr) -> Result<(), PagerError<B::Error>> {
        let reserved = self.take(base);
        self.backend.unreserve(reserved.token).map_err(|Refused { value, error }| {
            self.put(Reserved { token: value, ..reserved });
            PagerError { op: BackendOp::Unreserve, source: error }
        })
    }

    fn map(
        &self,
        base: Addr,
        at: Addr,
        bytes: u64,
        page_bytes: u64,
    ) -> Result<(), PagerError<B::Error>> {
        let mut reserved = self.take(base);
        let result = self.map_pages(&mut reserved, at, bytes, page_bytes);
        self.put(reserved);
        result
    }

    fn unmap(&self, base: Addr, at: Addr, bytes: u64) -> Unmapped<B::Error> {
        self.retry_strays();
        let mut reserved = self.take(base);
        let mut done = 0;
        let mut error = None;
        while done < bytes {
            let cursor = at + done;
            let page = reserved.pages.remove(&cursor).expect("E2: backed runs are whole pages");
            let page_bytes = page.bytes();
            if let Err(source) = self.backend.unmap(&reserved.token, cursor, page_bytes) {
                reserved.pages.insert(cursor, page);
                error = Some(PagerError { op: BackendOp::Unmap, source });
                break;
            }
            done += page_bytes;
            if let Err(refused) = self.destroy(page) {
                error = Some(refused);
                break;
            }
        }
        self.put(reserved);
        Unmapped { bytes: done, error }
    }
}

impl<B: VirtualMemory> Drop for PageStore<B> {
    /// Best effort: a backend that is gone already has taken everything with it.
    fn drop(&mut self) {
        self.retry_strays();
        for (_, reserved) in std::mem::take(self.reserved.get_mut()) {
            for (at, page) in reserved.pages {
                let _ = self.backend.unmap(&reserved.token, at, page.bytes());
                let _ = self.backend.destroy(page);
            }
            let _ = self.backend.unreserve(reserved.token);
        }
        self.retry_strays();
    }
}
