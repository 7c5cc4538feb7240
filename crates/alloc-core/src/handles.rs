//! Physical memory as a shared resource: handles of several sizes that address ranges borrow.
//!
//! A handle can be mapped at several places at once; each such place is a *view*. One view is the
//! handle's *home*: there its memory is in use or free. The others are dormant: address space that
//! looks like a hole, but can become the home again without any driver call. So memory moves by
//! being mapped once more, never by being unmapped first, and an old layout that returns costs
//! nothing (`docs/adr/0010-views.md`).

use crate::backend::{Page, Refused, Reservation, VirtualMemory};
use crate::error::BackendOp;
use crate::pager::{BadRange, Flaw, Pager, PagerError, Unmapped};
use crate::units::{Addr, DeviceId};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Names a handle of a store. Never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct HandleId(u64);

/// One place where a handle is mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct View {
    pub(crate) at: Addr,
    pub(crate) bytes: u64,
    pub(crate) handle: HandleId,
    /// Where the handle's home is; `at`, if this view is it; null, if it has none.
    pub(crate) home: Addr,
    /// Whether it could be the home: not, if it is left over from a backing that failed.
    pub(crate) good: bool,
}

/// What is to stand behind the next stretch of a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// A new handle of this many bytes.
    New(u64),
    /// A handle that exists, of so many bytes, mapped here as well.
    Handle(HandleId, u64),
}

impl Part {
    pub(crate) const fn bytes(&self) -> u64 {
        match self {
            Part::New(bytes) | Part::Handle(_, bytes) => *bytes,
        }
    }
}

/// A pager whose memory can change place.
pub(crate) trait HandleStore<E>: Pager<E> {
    /// Backs the range from `at` on with `parts`, one after the other, and makes this their home; or
    /// does nothing at all. No view may lie in the range.
    fn back(&self, base: Addr, at: Addr, parts: &[Part]) -> Result<(), PagerError<E>>;

    /// Makes the view that starts at `at` the home of its handle.
    fn settle(&self, base: Addr, at: Addr);

    /// The views in the range, ascending.
    fn views(&self, base: Addr, from: Addr, to: Addr) -> Vec<View>;

    /// Counts changes of homes; see [`trim`](Self::trim).
    fn epoch(&self) -> u64;

    /// Whether a handle has more than `most` views.
    fn is_crowded(&self, most: usize) -> bool;

    /// Unmaps dormant views in the reservations `bases`, of handles with more than `most` views, that
    /// were left before `epoch`: work that used them must be done by now. One that cannot be unmapped
    /// stays.
    fn trim(&self, bases: &[Addr], most: usize, epoch: u64);
}

struct Handle<P> {
    page: Arc<P>,
    device: DeviceId,
    bytes: u64,
    /// `None`: left over from a backing that failed and could not be undone. Nobody's memory, until
    /// it can be unmapped.
    home: Option<Place>,
    /// All places where it is mapped, oldest first.
    views: SmallVec<[Mapping; 4]>,
}

/// Pages that were just mapped, with their places.
type MappedPages<P> = Vec<(Addr, Arc<P>)>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place {
    base: Addr,
    at: Addr,
}

/// A place, and the epoch in which it last stopped being the home.
#[derive(Clone, Copy, Debug)]
struct Mapping {
    place: Place,
    left: u64,
    /// See [`View::good`].
    good: bool,
}

struct Reserved<R> {
    token: Arc<R>,
    device: DeviceId,
    views: BTreeMap<Addr, HandleId>,
}

struct State<B: VirtualMemory> {
    handles: BTreeMap<HandleId, Handle<B::Page>>,
    reserved: BTreeMap<Addr, Reserved<B::Reservation>>,
    next: u64,
    epoch: u64,
    /// Pages that the backend refused to take back, with their device.
    strays: Vec<(DeviceId, B::Page)>,
}

/// The handles of a backend. Its lock is never held while the backend works; that no two growths of
/// one device run at once is the growth lock's doing.
pub(crate) struct HandleTable<B: VirtualMemory> {
    backend: Arc<B>,
    state: Mutex<State<B>>,
}

fn fault<E>(op: BackendOp) -> impl FnOnce(E) -> PagerError<E> {
    move |source| PagerError { op, source }
}

impl<B: VirtualMemory> HandleTable<B> {
    pub(crate) const fn new(backend: Arc<B>) -> Self {
        let state = State {
            handles: BTreeMap::new(),
            reserved: BTreeMap::new(),
            next: 0,
            epoch: 0,
            strays: Vec::new(),
        };
        HandleTable { backend, state: Mutex::new(state) }
    }

    fn reservation(&self, base: Addr) -> (Arc<B::Reservation>, DeviceId) {
        let state = self.state.lock();
        let reserved = state.reserved.get(&base).expect("I10: the reservation exists");
        (Arc::clone(&reserved.token), reserved.device)
    }

    /// Maps `parts` one after the other; on failure everything mapped or created here is undone.
    fn map_parts(
        &self,
        base: Addr,
        at: Addr,
        parts: &[Part],
    ) -> Result<MappedPages<B::Page>, PagerError<B::Error>> {
        let (token, device) = self.reservation(base);
        let mut mapped = Vec::new();
        let mut cursor = at;
        let result = parts.iter().try_for_each(|part| {
            let page = match part {
                Part::New(bytes) => {
                    let page = self.backend.create(device, *bytes);
                    Arc::new(page.map_err(fault(BackendOp::Create))?)
                }
                Part::Handle(id, _) => Arc::clone(&self.state.lock().handles[id].page),
            };
            let result = self.backend.map(&token, cursor, &page).map_err(fault(BackendOp::Map));
            if let Err(error) = result {
                self.drop_page(device, page);
                return Err(error);
            }
            mapped.push((cursor, page));
            cursor = cursor + part.bytes();
            Ok(())
        });
        let result = result.and_then(|()| {
            self.backend
                .set_access(&token, at, cursor - at, device)
                .map_err(fault(BackendOp::SetAccess))
        });
        match result {
            Ok(()) => Ok(mapped),
            Err(error) => {
                self.unmap_parts(base, &token, device, mapped);
                Err(error)
            }
        }
    }

    /// Undoes a half-done backing. What cannot be unmapped becomes a dormant view, of a handle without
    /// a home if it was new.
    fn unmap_parts(
        &self,
        base: Addr,
        token: &B::Reservation,
        device: DeviceId,
        mapped: MappedPages<B::Page>,
    ) {
        for (at, page) in mapped {
            match self.backend.unmap(token, at, page.bytes()) {
                Ok(()) => self.drop_page(device, page),
                Err(_) => self.keep_stuck(device, Place { base, at }, page),
            }
        }
    }

    fn keep_stuck(&self, device: DeviceId, place: Place, page: Arc<B::Page>) {
        let mut state = self.state.lock();
        let known = state.handles.iter().find(|(_, handle)| Arc::ptr_eq(&handle.page, &page));
        let id = known.map(|(id, _)| *id);
        let id = id.unwrap_or_else(|| state.adopt(device, page));
        state.add_view(id, place, false);
    }

    /// Unmaps what failed backings have left over on a device, and gives handles without a home back.
    fn bury_leftovers(&self, device: DeviceId) {
        let leftovers: Vec<_> = {
            let state = self.state.lock();
            let on = |view: &&Mapping| state.reserved[&view.place.base].device == device;
            let views = state.handles.values().flat_map(|handle| &handle.views);
            views.filter(|view| !view.good).filter(on).map(|view| view.place).collect()
        };
        for place in leftovers {
            let _ = self.drop_view(place);
        }
        let mut state = self.state.lock();
        let gone = |handle: &Handle<B::Page>| handle.home.is_none() && handle.views.is_empty();
        let ids: Vec<_> =
            state.handles.iter().filter(|(_, h)| gone(h)).map(|(id, _)| *id).collect();
        let gone: Vec<_> = ids.iter().filter_map(|id| state.handles.remove(id)).collect();
        drop(state);
        for handle in gone {
            self.drop_page(handle.device, handle.page);
        }
    }

    /// Gives a page back if nobody else holds it.
    fn drop_page(&self, device: DeviceId, page: Arc<B::Page>) {
        if let Some(page) = Arc::into_inner(page) {
            let _ = self.destroy(device, page);
        }
    }

    fn destroy(&self, device: DeviceId, page: B::Page) -> Result<(), PagerError<B::Error>> {
        self.backend.destroy(page).map_err(|Refused { value, error }| {
            self.state.lock().strays.push((device, value));
            fault(BackendOp::Destroy)(error)
        })
    }

    /// Unmaps the view at `place`, which is no home.
    fn drop_view(&self, place: Place) -> Result<(), PagerError<B::Error>> {
        let (token, _) = self.reservation(place.base);
        let (id, bytes) = {
            let state = self.state.lock();
            let id = state.reserved[&place.base].views[&place.at];
            (id, state.handles[&id].bytes)
        };
        self.backend.unmap(&token, place.at, bytes).map_err(fault(BackendOp::Unmap))?;
        self.state.lock().forget_view(id, place);
        Ok(())
    }

    /// Unmaps every view of the handle whose home is at `at`, then gives it back. Its dormant views
    /// go first, so that a failure leaves it as usable as before.
    fn discard(&self, base: Addr, at: Addr) -> Result<u64, PagerError<B::Error>> {
        let home = Place { base, at };
        let (id, dormant) = {
            let state = self.state.lock();
            let id = state.reserved[&base].views[&at];
            let views = state.handles[&id].views.clone();
            (id, views.into_iter().map(|view| view.place).filter(move |place| *place != home))
        };
        for place in dormant {
            self.drop_view(place)?;
        }
        self.drop_view(home)?;
        let (device, handle) = {
            let mut state = self.state.lock();
            let device = state.reserved[&base].device;
            (device, state.handles.remove(&id).expect("I10: the handle exists"))
        };
        let bytes = handle.bytes;
        if let Some(page) = Arc::into_inner(handle.page) {
            self.destroy(device, page)?;
        }
        Ok(bytes)
    }
}

impl<B: VirtualMemory> State<B> {
    /// A handle without a home yet.
    fn adopt(&mut self, device: DeviceId, page: Arc<B::Page>) -> HandleId {
        let id = HandleId(self.next);
        self.next += 1;
        let bytes = page.bytes();
        self.handles.insert(id, Handle { page, device, bytes, home: None, views: SmallVec::new() });
        id
    }

    fn add_view(&mut self, id: HandleId, place: Place, good: bool) {
        let mapping = Mapping { place, left: self.epoch, good };
        self.handles.get_mut(&id).expect("I10: the handle exists").views.push(mapping);
        let reserved = self.reserved.get_mut(&place.base).expect("I10: the reservation exists");
        reserved.views.insert(place.at, id);
    }

    /// Makes a view of a handle its home.
    fn move_home(&mut self, id: HandleId, place: Place) {
        self.epoch += 1;
        let epoch = self.epoch;
        let handle = self.handles.get_mut(&id).expect("I10: the handle exists");
        let before = handle.home.replace(place);
        for view in handle.views.iter_mut().filter(|view| Some(view.place) == before) {
            view.left = epoch;
        }
    }

    fn forget_view(&mut self, id: HandleId, place: Place) {
        if let Some(handle) = self.handles.get_mut(&id) {
            handle.views.retain(|view| view.place != place);
        }
        if let Some(reserved) = self.reserved.get_mut(&place.base) {
            reserved.views.remove(&place.at);
        }
    }
}

impl<B: VirtualMemory> HandleStore<B::Error> for HandleTable<B> {
    fn back(&self, base: Addr, at: Addr, parts: &[Part]) -> Result<(), PagerError<B::Error>> {
        let mapped = self.map_parts(base, at, parts)?;
        let (_, device) = self.reservation(base);
        let mut state = self.state.lock();
        for (part, (at, page)) in parts.iter().zip(mapped) {
            let place = Place { base, at };
            let id = match part {
                Part::New(_) => state.adopt(device, page),
                Part::Handle(id, _) => *id,
            };
            state.add_view(id, place, true);
            state.move_home(id, place);
        }
        Ok(())
    }

    fn settle(&self, base: Addr, at: Addr) {
        let mut state = self.state.lock();
        let id = state.reserved[&base].views[&at];
        state.move_home(id, Place { base, at });
    }

    fn epoch(&self) -> u64 {
        self.state.lock().epoch
    }

    fn is_crowded(&self, most: usize) -> bool {
        self.state.lock().handles.values().any(|handle| handle.views.len() > most)
    }

    fn trim(&self, bases: &[Addr], most: usize, epoch: u64) {
        let surplus: Vec<Place> = {
            let state = self.state.lock();
            let crowded = state.handles.values().filter(|handle| handle.views.len() > most);
            crowded
                .flat_map(|handle| {
                    let old = |view: &&Mapping| {
                        Some(view.place) != handle.home
                            && view.left <= epoch
                            && bases.contains(&view.place.base)
                    };
                    let count = handle.views.len() - most;
                    handle.views.iter().filter(old).take(count).map(|view| view.place)
                })
                .collect()
        };
        for place in surplus {
            let _ = self.drop_view(place);
        }
    }

    fn views(&self, base: Addr, from: Addr, to: Addr) -> Vec<View> {
        let state = self.state.lock();
        let views = state.reserved[&base].views.range(from..to);
        views
            .map(|(at, id)| {
                let handle = &state.handles[id];
                let home = handle.home.map_or(Addr::NULL, |home| home.at);
                let here = Place { base, at: *at };
                let good = handle.views.iter().any(|view| view.place == here && view.good);
                View { at: *at, bytes: handle.bytes, handle: *id, home, good }
            })
            .collect()
    }
}

impl<B: VirtualMemory> Pager<B::Error> for HandleTable<B> {
    fn reserve(
        &self,
        device: DeviceId,
        bytes: u64,
        flaw: &dyn Fn(Addr, u64) -> Option<Flaw>,
    ) -> Result<Result<Addr, BadRange>, PagerError<B::Error>> {
        let token = self.backend.reserve(device, bytes).map_err(fault(BackendOp::Reserve))?;
        let (base, actual) = (token.base(), token.bytes());
        if let Some(Flaw { why, returnable }) = flaw(base, actual) {
            if returnable {
                let _ = self.backend.unreserve(token);
            }
            return Ok(Err(BadRange { base, bytes: actual, why }));
        }
        let reserved = Reserved { token: Arc::new(token), device, views: BTreeMap::new() };
        self.state.lock().reserved.insert(base, reserved);
        Ok(Ok(base))
    }

    fn granularity(&self, device: DeviceId) -> u64 {
        self.backend.granularity(device)
    }

    fn tidy(&self, device: DeviceId) {
        self.bury_leftovers(device);
        let mut mine = Vec::new();
        let mut state = self.state.lock();
        for (of, page) in std::mem::take(&mut state.strays) {
            if of == device {
                mine.push(page);
            } else {
                state.strays.push((of, page));
            }
        }
        drop(state);
        for page in mine {
            let _ = self.destroy(device, page);
        }
    }

    fn mapped(&self, device: DeviceId) -> BTreeMap<(Addr, u64), Vec<(Addr, u64)>> {
        let state = self.state.lock();
        let mine = state.reserved.iter().filter(|(_, reserved)| reserved.device == device);
        mine.map(|(base, reserved)| {
            let homes = reserved.views.iter().filter_map(|(at, id)| {
                let handle = &state.handles[id];
                let here = Place { base: *base, at: *at };
                (handle.home == Some(here)).then_some((*at, handle.bytes))
            });
            ((*base, reserved.token.bytes()), homes.collect())
        })
        .collect()
    }

    fn unreserve(&self, base: Addr) -> Result<(), PagerError<B::Error>> {
        let places: Vec<_> = self.state.lock().reserved[&base].views.keys().copied().collect();
        for at in places {
            self.drop_view(Place { base, at })?;
        }
        let reserved = self.state.lock().reserved.remove(&base);
        let Reserved { token, device, views } = reserved.expect("I10: the reservation exists");
        let token = Arc::into_inner(token).expect("no call uses an empty reservation");
        self.backend.unreserve(token).map_err(|Refused { value, error }| {
            let back = Reserved { token: Arc::new(value), device, views };
            self.state.lock().reserved.insert(base, back);
            fault(BackendOp::Unreserve)(error)
        })
    }

    fn whole_pages(&self, base: Addr, at: Addr, bytes: u64) -> Option<(Addr, u64)> {
        let end = at + bytes;
        let views = self.views(base, at, end);
        let inside =
            views.iter().filter(|view| view.home == view.at && view.at + view.bytes <= end);
        let bytes: u64 = inside.clone().map(|view| view.bytes).sum();
        inside.clone().next().map(|first| (first.at, bytes))
    }

    fn map(&self, base: Addr, at: Addr, bytes: u64, page: u64) -> Result<(), PagerError<B::Error>> {
        let parts: Vec<_> = (0..bytes / page).map(|_| Part::New(page)).collect();
        self.back(base, at, &parts)
    }

    fn unmap(&self, base: Addr, at: Addr, bytes: u64) -> Unmapped<B::Error> {
        let mut done = 0;
        while done < bytes {
            let before = self.views(base, at + done, at + done + 1).first().map(|v| v.bytes);
            match self.discard(base, at + done) {
                Ok(freed) => done += freed,
                Err(error) => {
                    // A handle that was unmapped but not taken back is gone from here all the same.
                    if error.op == BackendOp::Destroy {
                        done += before.unwrap_or(0);
                    }
                    return Unmapped { bytes: done, error: Some(error) };
                }
            }
        }
        Unmapped { bytes: done, error: None }
    }
}

impl<B: VirtualMemory> Drop for HandleTable<B> {
    /// Best effort: a backend that is gone already has taken everything with it.
    fn drop(&mut self) {
        let state = self.state.get_mut();
        // Whatever could not be unmapped keeps its page and its reservation.
        let mut stuck = Vec::new();
        for (base, reserved) in &state.reserved {
            for (at, id) in &reserved.views {
                let bytes = state.handles.get(id).map_or(0, |handle| handle.bytes);
                if self.backend.unmap(&reserved.token, *at, bytes).is_err() {
                    stuck.push((*base, *id));
                }
            }
        }
        for (base, id) in stuck {
            state.handles.remove(&id);
            state.reserved.remove(&base);
        }
        let strays = std::mem::take(&mut state.strays).into_iter().map(|(_, page)| page);
        let pages = std::mem::take(&mut state.handles).into_values();
        let pages = pages.filter_map(|handle| Arc::into_inner(handle.page));
        for page in pages.chain(strays) {
            let _ = self.backend.destroy(page);
        }
        for reserved in std::mem::take(&mut state.reserved).into_values() {
            if let Some(token) = Arc::into_inner(reserved.token) {
                let _ = self.backend.unreserve(token);
            }
        }
    }
}
