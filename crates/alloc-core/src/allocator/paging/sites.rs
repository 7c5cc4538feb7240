//! Where in a heap's address space a new range can lie.

use super::super::grow::{Grown, Shortage};
use super::super::{AllocResult, HeapCell, Shared};
use super::compose::Site;
use super::terms::Terms;
use super::{Store, backend_error};
use crate::backend::{Backend, BackendError, ErrorKind, SEGMENT_ALIGN};
use crate::error::{AddressSpaceLack, AllocError};
use crate::heap::Request;
use crate::pager::BadRange;
use crate::size_class::BLOCK_BYTES_MIN;

impl<B: Backend> Shared<B> {
    /// Address space that a range may take beyond the request: handles are taken whole.
    pub(super) fn slack(&self, store: &Store<B>, terms: &Terms) -> u64 {
        let largest = terms.knobs.handle_bytes_calm.max(store.layout().largest());
        (4 * largest + terms.step).next_multiple_of(terms.unit)
    }

    /// [`find_sites`](Self::find_sites), reserving more address space if there is not enough.
    pub(super) fn sites(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        terms: &Terms,
        room: u64,
    ) -> AllocResult<Grown<(Site, Site)>, B> {
        match self.find_sites(store, cell, request, terms, room) {
            Some(found) => Ok(Ok(found)),
            None => {
                Ok(self.reserve_site(store, cell, request, terms, room)?.map(|site| (site, site)))
            }
        }
    }

    /// Where the request needs the least new backing, and where a range of its own can lie.
    pub(super) fn find_sites(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        terms: &Terms,
        room: u64,
    ) -> Option<(Site, Site)> {
        let state = cell.lock();
        let heap = &state.body.heap;
        let layout = store.layout();
        let segments = heap.segments.iter();
        let usable = segments.filter(|(_, s)| s.is_expandable() && s.lane == terms.lane);
        let mut best: Option<Site> = None;
        let mut lowest = None;
        for (segment, info) in usable {
            for (at, bytes) in layout.gaps(info.base).filter(|(_, bytes)| *bytes >= room) {
                let left = heap.free_below(terms.lane, at);
                let left = left.map(|block| (block, heap.blocks[block].bytes));
                let left = left.filter(|(_, bytes)| *bytes < request.rounded);
                let site = Site { segment, base: info.base, at, bytes, left };
                lowest.get_or_insert(Site { left: None, ..site });
                if best.is_none_or(|best| best.left_bytes() < site.left_bytes()) {
                    best = Some(site);
                }
            }
        }
        best.zip(lowest)
    }

    fn reserve_site(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        terms: &Terms,
        room: u64,
    ) -> AllocResult<Grown<Site>, B> {
        let total = self.devices[cell.device.index()].total;
        if request.rounded > total {
            return Ok(Err(Shortage::Memory));
        }
        let unit = store.granularity(cell.device).max(SEGMENT_ALIGN);
        let usual = self.settings.lock().reserve_bytes(total, unit, None) / cell.sharing();
        let bytes = usual.max(room).next_multiple_of(unit);
        let flaw = |base, actual| self.flaw(base, actual, bytes);
        let base = match store.reserve(cell.device, bytes, &flaw) {
            Ok(Ok(base)) => base,
            Ok(Err(BadRange { base, bytes, why })) => {
                return Err(AllocError::BadSegment { base, bytes, why });
            }
            Err(error) if error.source.kind() == ErrorKind::OutOfMemory => {
                return Ok(Err(Shortage::Addresses(AddressSpaceLack::Exhausted { bytes })));
            }
            Err(error) => return Err(backend_error(error)),
        };
        let mut state = cell.lock();
        let heap = &mut state.body.heap;
        let segment = heap.segments.next_id();
        // Holes end where a byte belongs to another view, which is at any block boundary.
        heap.adopt_reservation(segment, base, bytes, terms.lane, BLOCK_BYTES_MIN);
        Ok(Ok(Site { segment, base, at: base, bytes, left: None }))
    }
}
