//! Physical memory behind expandable segments.
//!
//! The allocator reaches virtual memory through the object-safe [`Pager`], so that allocators of
//! backends without it need no such bound; it is called on growth and release only.

use crate::backend::{Page, Refused, Reservation, VirtualMemory};
use crate::error::BackendOp;
use crate::sync::Mutex;
use crate::units::{Addr, DeviceId};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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

/// Why a range that the backend handed out cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Flaw {
    pub(crate) why: &'static str,
    /// Whether it can be given back without harm to another range.
    pub(crate) returnable: bool,
}

/// A range that cannot be used.
#[derive(Debug)]
pub(crate) struct BadRange {
    pub(crate) base: Addr,
    pub(crate) bytes: u64,
    pub(crate) why: &'static str,
}

/// A number that no page of any store had before.
pub(crate) fn next_serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A page as it is mapped.
pub(crate) struct MappedPage<'a> {
    pub(crate) at: Addr,
    /// Names the page for ever, among those of all stores of the process.
    pub(crate) serial: u64,
    /// The backend's page.
    pub(crate) page: &'a dyn Any,
}

/// Reserves, backs and unbacks address space. Reservations are named by their base.
///
/// Called under the growth lock of the device, never under a heap lock; no two calls for one
/// reservation run at once.
pub(crate) trait Pager<E>: Send + Sync {
    /// Reserves `bytes`; returns the base, or what `flaw` finds wrong with the range, which goes back
    /// unless that could take another one along.
    fn reserve(
        &self,
        device: DeviceId,
        bytes: u64,
        flaw: &dyn Fn(Addr, u64) -> Option<Flaw>,
    ) -> Result<Result<Addr, BadRange>, PagerError<E>>;

    /// What sizes of pages on `device` are multiples of, in bytes.
    fn granularity(&self, device: DeviceId) -> u64;

    /// Offers the backend once more what it refused to take back from `device` before, if anything.
    fn tidy(&self, device: DeviceId);

    /// The pages of one device as they are mapped, by reservation: (base, bytes of the reservation),
    /// (address, bytes of each page in use). For checks.
    fn mapped(&self, device: DeviceId) -> BTreeMap<(Addr, u64), Vec<(Addr, u64)>>;

    /// Gives back a reservation in which nothing is mapped.
    fn unreserve(&self, base: Addr) -> Result<(), PagerError<E>>;

    /// The longest run of whole pages in the backed range of `bytes` from `at` on, if any.
    fn whole_pages(&self, base: Addr, at: Addr, bytes: u64) -> Option<(Addr, u64)>;

    /// Backs `bytes` from `at` on with new pages of `page_bytes` each, or does nothing at all.
    fn map(&self, base: Addr, at: Addr, bytes: u64, page_bytes: u64) -> Result<(), PagerError<E>>;

    /// Unbacks `bytes` from `at` on, which are whole pages, and gives the pages back. Nothing may be
    /// using them.
    fn unmap(&self, base: Addr, at: Addr, bytes: u64) -> Unmapped<E>;

    /// Shows the pages that the backed range of `bytes` from `at` on touches, by address.
    fn visit(&self, base: Addr, at: Addr, bytes: u64, visit: &mut dyn FnMut(MappedPage<'_>));
}

struct Reserved<B: VirtualMemory> {
    token: B::Reservation,
    device: DeviceId,
    pages: BTreeMap<Addr, Numbered<B::Page>>,
    /// Pages of a failed growth that could not be unmapped either: nobody's memory, still mapped.
    /// The next growth there takes them over.
    leftovers: BTreeMap<Addr, B::Page>,
}

/// See [`MappedPage::serial`].
struct Numbered<P> {
    serial: u64,
    page: P,
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
    pub(crate) fn new(backend: Arc<B>) -> Self {
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
        let (there, missing): (Vec<_>, Vec<_>) = (0..bytes / page_bytes)
            .map(|page| at + page * page_bytes)
            .partition(|at| reserved.leftovers.contains_key(at));
        let created = self.create_pages(reserved.device, page_bytes, missing.len())?;
        let mut mapped: BTreeMap<_, _> =
            there.iter().filter_map(|at| reserved.leftovers.remove_entry(at)).collect();
        let mut todo = missing.into_iter().zip(created);
        while let Some((at, page)) = todo.next() {
            if let Err(source) = self.backend.map(&reserved.token, at, &page) {
                self.destroy_all(std::iter::once(page).chain(todo.map(|(_, page)| page)));
                self.undo_map(reserved, mapped);
                return Err(PagerError { op: BackendOp::Map, source });
            }
            mapped.insert(at, page);
        }
        let access = self.backend.set_access(&reserved.token, at, bytes, reserved.device);
        if let Err(source) = access {
            self.undo_map(reserved, mapped);
            return Err(PagerError { op: BackendOp::SetAccess, source });
        }
        let numbered = |(at, page)| (at, Numbered { serial: next_serial(), page });
        reserved.pages.extend(mapped.into_iter().map(numbered));
        Ok(())
    }

    fn create_pages(
        &self,
        device: DeviceId,
        page_bytes: u64,
        count: usize,
    ) -> Result<Vec<B::Page>, PagerError<B::Error>> {
        let mut created = Vec::new();
        for _ in 0..count {
            match self.backend.create(device, page_bytes) {
                Ok(page) => created.push(page),
                Err(source) => {
                    self.destroy_all(created);
                    return Err(PagerError { op: BackendOp::Create, source });
                }
            }
        }
        Ok(created)
    }

    /// Undoes a half-done map. What cannot even be unmapped is left over.
    fn undo_map(&self, reserved: &mut Reserved<B>, mapped: BTreeMap<Addr, B::Page>) {
        reserved.leftovers.extend(mapped);
        let _ = self.unmap_leftovers(reserved);
    }

    fn unmap_leftovers(&self, reserved: &mut Reserved<B>) -> Result<(), PagerError<B::Error>> {
        let mut result = Ok(());
        for (at, page) in std::mem::take(&mut reserved.leftovers) {
            match self.backend.unmap(&reserved.token, at, page.bytes()) {
                Ok(()) => drop(self.destroy(page)),
                Err(source) => {
                    reserved.leftovers.insert(at, page);
                    result = Err(PagerError { op: BackendOp::Unmap, source });
                }
            }
        }
        result
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

    /// The reservations of a device with pages left over from a failed growth.
    fn untidy(&self, device: DeviceId) -> Vec<Addr> {
        let reserved = self.reserved.lock();
        let untidy = reserved.iter().filter(|(_, r)| r.device == device && !r.leftovers.is_empty());
        untidy.map(|(base, _)| *base).collect()
    }
}

impl<B: VirtualMemory> Pager<B::Error> for PageStore<B> {
    fn reserve(
        &self,
        device: DeviceId,
        bytes: u64,
        flaw: &dyn Fn(Addr, u64) -> Option<Flaw>,
    ) -> Result<Result<Addr, BadRange>, PagerError<B::Error>> {
        let token = self
            .backend
            .reserve(device, bytes)
            .map_err(|source| PagerError { op: BackendOp::Reserve, source })?;
        let (base, bytes) = (token.base(), token.bytes());
        if let Some(Flaw { why, returnable }) = flaw(base, bytes) {
            if returnable {
                // Whether this works or not, the caller learns what is wrong with the backend.
                let _ = self.backend.unreserve(token);
            }
            return Ok(Err(BadRange { base, bytes, why }));
        }
        self.put(Reserved { token, device, pages: BTreeMap::new(), leftovers: BTreeMap::new() });
        Ok(Ok(base))
    }

    fn granularity(&self, device: DeviceId) -> u64 {
        self.backend.granularity(device)
    }

    fn mapped(&self, device: DeviceId) -> BTreeMap<(Addr, u64), Vec<(Addr, u64)>> {
        let reserved = self.reserved.lock();
        let mine = reserved.values().filter(|reserved| reserved.device == device);
        mine.map(|reserved| {
            let pages = reserved.pages.iter().map(|(at, own)| (*at, own.page.bytes())).collect();
            ((reserved.token.base(), reserved.token.bytes()), pages)
        })
        .collect()
    }

    fn tidy(&self, device: DeviceId) {
        for base in self.untidy(device) {
            let mut reserved = self.take(base);
            let _ = self.unmap_leftovers(&mut reserved);
            self.put(reserved);
        }
        let strays = std::mem::take(&mut *self.strays.lock());
        self.destroy_all(strays);
    }

    fn unreserve(&self, base: Addr) -> Result<(), PagerError<B::Error>> {
        let mut reserved = self.take(base);
        if let Err(error) = self.unmap_leftovers(&mut reserved) {
            self.put(reserved);
            return Err(error);
        }
        self.backend.unreserve(reserved.token).map_err(|Refused { value, error }| {
            self.put(Reserved { token: value, ..reserved });
            PagerError { op: BackendOp::Unreserve, source: error }
        })
    }

    fn whole_pages(&self, _base: Addr, at: Addr, bytes: u64) -> Option<(Addr, u64)> {
        // All pages of a segment have one size, and the range is already cut to that.
        Some((at, bytes))
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
        let mut reserved = self.take(base);
        let mut done = 0;
        let mut error = None;
        while done < bytes {
            let cursor = at + done;
            let own = reserved.pages.remove(&cursor).expect("E2: backed runs are whole pages");
            let page_bytes = own.page.bytes();
            if let Err(source) = self.backend.unmap(&reserved.token, cursor, page_bytes) {
                reserved.pages.insert(cursor, own);
                error = Some(PagerError { op: BackendOp::Unmap, source });
                break;
            }
            done += page_bytes;
            if let Err(refused) = self.destroy(own.page) {
                error = Some(refused);
                break;
            }
        }
        self.put(reserved);
        Unmapped { bytes: done, error }
    }

    fn visit(&self, base: Addr, at: Addr, bytes: u64, visit: &mut dyn FnMut(MappedPage<'_>)) {
        let reserved = self.take(base);
        let below = reserved.pages.range(..=at).next_back().map_or(at, |(start, _)| *start);
        for (start, own) in reserved.pages.range(below..at + bytes) {
            if *start + own.page.bytes() > at {
                visit(MappedPage { at: *start, serial: own.serial, page: &own.page });
            }
        }
        self.put(reserved);
    }
}

impl<B: VirtualMemory> Drop for PageStore<B> {
    /// Best effort: a backend that is gone already has taken everything with it.
    fn drop(&mut self) {
        for (_, reserved) in std::mem::take(self.reserved.get_mut()) {
            let mut empty = true;
            let pages = reserved.pages.into_iter().map(|(at, own)| (at, own.page));
            for (at, page) in pages.chain(reserved.leftovers) {
                match self.backend.unmap(&reserved.token, at, page.bytes()) {
                    Ok(()) => drop(self.backend.destroy(page)),
                    Err(_) => empty = false,
                }
            }
            if empty {
                let _ = self.backend.unreserve(reserved.token);
            }
        }
        for page in std::mem::take(self.strays.get_mut()) {
            let _ = self.backend.destroy(page);
        }
    }
}
