//! Physical memory as a shared resource: handles of several sizes that address ranges borrow.
//!
//! A handle can be mapped at several places at once; each such place is a *view*. Every byte of it
//! belongs to exactly one of them, its *home*: there it is in use or free, in the other views it is
//! a hole. So memory moves by being mapped once more, never by being unmapped first, part of a
//! handle can move without the rest, and an old layout that returns costs nothing
//! (`docs/adr/0010-views.md`).

mod layout;

pub(crate) use layout::{HandleId, Layout, Place};

use crate::backend::{Page, Refused, Reservation, VirtualMemory};
use crate::error::BackendOp;
use crate::pager::{BadRange, Flaw, MappedPage, Pager, PagerError, Unmapped};
use crate::sync::{Mutex, MutexGuard};
use crate::units::{Addr, DeviceId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What is to stand behind the next stretch of a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// A new handle of this many bytes.
    New(u64),
    /// A handle that exists, mapped here as well.
    Known {
        handle: HandleId,
        /// Its size: what it takes of the range.
        bytes: u64,
        /// The bytes of it that move here, `from` its start on.
        from: u64,
        moves: u64,
    },
}

impl Part {
    /// Address space that it takes.
    pub(crate) const fn bytes(&self) -> u64 {
        match self {
            Part::New(bytes) | Part::Known { bytes, .. } => *bytes,
        }
    }
}

/// A pager whose memory can change place.
pub(crate) trait HandleStore<E>: Pager<E> {
    /// The book of views and homes, locked: a leaf lock, under which nothing may call out. It changes
    /// under the growth lock of the device only.
    fn layout(&self) -> MutexGuard<'_, Layout>;

    /// Backs the range from `at` on with `parts`, one after the other, and makes this the home of what
    /// they bring; or does nothing at all. The range is claimed.
    fn back(&self, base: Addr, at: Addr, parts: &[Part]) -> Result<(), PagerError<E>>;

    /// Unmaps views that no byte belongs to in the reservations `bases`, of handles with more than
    /// `most` views, that were left before `epoch`: work that used them must be done by now. One that
    /// cannot be unmapped stays.
    fn trim(&self, bases: &[Addr], most: usize, epoch: u64);
}

struct Reserved<R> {
    token: Arc<R>,
    device: DeviceId,
}

/// What the backend gave.
struct Tokens<B: VirtualMemory> {
    pages: BTreeMap<HandleId, Arc<B::Page>>,
    reserved: BTreeMap<Addr, Reserved<B::Reservation>>,
    /// Pages that the backend refused to take back, with their device.
    strays: Vec<(DeviceId, B::Page)>,
}

/// The handles of a backend. Its locks are never held while the backend works; that no two growths of
/// one device run at once is the growth lock's doing.
pub(crate) struct HandleTable<B: VirtualMemory> {
    backend: Arc<B>,
    tokens: Mutex<Tokens<B>>,
    layout: Mutex<Layout>,
}

fn fault<E>(op: BackendOp) -> impl FnOnce(E) -> PagerError<E> {
    move |source| PagerError { op, source }
}

type Mapped<B> = Vec<(Addr, Arc<<B as VirtualMemory>::Page>)>;

impl<B: VirtualMemory> HandleTable<B> {
    pub(crate) fn new(backend: Arc<B>) -> Self {
        let tokens =
            Tokens { pages: BTreeMap::new(), reserved: BTreeMap::new(), strays: Vec::new() };
        HandleTable { backend, tokens: Mutex::new(tokens), layout: Mutex::default() }
    }

    fn reservation(&self, base: Addr) -> (Arc<B::Reservation>, DeviceId) {
        let tokens = self.tokens.lock();
        let reserved = tokens.reserved.get(&base).expect("I10: the reservation exists");
        (Arc::clone(&reserved.token), reserved.device)
    }

    /// Maps `parts` one after the other; on failure everything mapped or created here is undone.
    fn map_parts(
        &self,
        base: Addr,
        at: Addr,
        parts: &[Part],
    ) -> Result<Mapped<B>, PagerError<B::Error>> {
        let (token, device) = self.reservation(base);
        let mut mapped = Vec::new();
        let mut cursor = at;
        let result = parts.iter().try_for_each(|part| {
            let page = match part {
                Part::New(bytes) => {
                    let page = self.backend.create(device, *bytes);
                    Arc::new(page.map_err(fault(BackendOp::Create))?)
                }
                Part::Known { handle, .. } => Arc::clone(&self.tokens.lock().pages[handle]),
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
                self.unmap_parts(base, &token, device, parts, mapped);
                Err(error)
            }
        }
    }

    /// Undoes a half-done backing. What cannot be unmapped stays as the view of a handle of its own
    /// that nothing belongs to: it may lack access, so nothing must come to lie there.
    fn unmap_parts(
        &self,
        base: Addr,
        token: &B::Reservation,
        device: DeviceId,
        parts: &[Part],
        mapped: Mapped<B>,
    ) {
        for ((at, page), part) in mapped.into_iter().zip(parts) {
            if self.backend.unmap(token, at, page.bytes()).is_ok() {
                self.drop_page(device, page);
                continue;
            }
            let mut layout = self.layout.lock();
            let id = layout.add_handle(part.bytes());
            layout.add_view(id, Place { base, at }, true);
            drop(layout);
            self.tokens.lock().pages.insert(id, page);
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
            self.tokens.lock().strays.push((device, value));
            fault(BackendOp::Destroy)(error)
        })
    }

    /// Unmaps the view at `place`, if `choose` wants that of it. With its last one a handle goes back
    /// to the backend.
    fn drop_view(
        &self,
        place: Place,
        choose: impl Fn(&layout::Handle, &layout::View) -> bool,
    ) -> Result<(), PagerError<B::Error>> {
        let Some(taken) = self.layout.lock().take_view(place, choose) else { return Ok(()) };
        let (token, device) = self.reservation(place.base);
        let unmapped = self.backend.unmap(&token, place.at, taken.bytes);
        if let Err(source) = unmapped {
            self.layout.lock().put_view(taken);
            return Err(fault(BackendOp::Unmap)(source));
        }
        let gone = self.layout.lock().free_view(&taken);
        let page = gone.and_then(|id| self.tokens.lock().pages.remove(&id));
        match page.and_then(Arc::into_inner) {
            Some(page) => self.destroy(device, page),
            None => Ok(()),
        }
    }

    /// Unmaps every view of the handle at `at`, which is its only home, and gives it back. The other
    /// views go first, so that a failure leaves it as usable as before.
    fn discard(&self, base: Addr, at: Addr) -> Result<(), PagerError<B::Error>> {
        let home = Place { base, at };
        let views: Vec<Place> = {
            let layout = self.layout.lock();
            let view = layout.views(base, at, at + 1).next();
            let (_, id) = view.expect("I10: the view exists");
            layout[id].views.iter().map(|view| view.place).filter(|at| *at != home).collect()
        };
        for place in views {
            self.drop_view(place, |_, _| true)?;
        }
        self.drop_view(home, |_, _| true)
    }

    /// Views that match, each with its place.
    fn views_where(&self, choose: impl Fn(&layout::Handle, &layout::View) -> bool) -> Vec<Place> {
        let layout = self.layout.lock();
        let views = layout.handles().flat_map(|(_, handle)| {
            let chosen = handle.views.iter().filter(|view| choose(handle, view));
            chosen.map(|view| view.place)
        });
        views.collect()
    }
}

impl<B: VirtualMemory> HandleStore<B::Error> for HandleTable<B> {
    fn layout(&self) -> MutexGuard<'_, Layout> {
        self.layout.lock()
    }

    fn back(&self, base: Addr, at: Addr, parts: &[Part]) -> Result<(), PagerError<B::Error>> {
        let mapped = self.map_parts(base, at, parts)?;
        let mut layout = self.layout.lock();
        let mut created = Vec::new();
        for (part, (at, page)) in parts.iter().zip(mapped) {
            let place = Place { base, at };
            let (id, from, bytes) = match part {
                Part::New(bytes) => {
                    let id = layout.add_handle(*bytes);
                    created.push((id, page));
                    (id, 0, *bytes)
                }
                Part::Known { handle, from, moves, .. } => (*handle, *from, *moves),
            };
            layout.add_view(id, place, bytes < part.bytes());
            layout.rehome(id, from, bytes, place);
        }
        drop(layout);
        self.tokens.lock().pages.extend(created);
        Ok(())
    }

    fn trim(&self, bases: &[Addr], most: usize, epoch: u64) {
        let old = |handle: &layout::Handle, view: &layout::View| {
            handle.views.len() > most
                && !handle.is_home(view.place)
                && view.left <= epoch
                && bases.contains(&view.place.base)
        };
        for place in self.views_where(old) {
            let _ = self.drop_view(place, old);
        }
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
        self.tokens.lock().reserved.insert(base, Reserved { token: Arc::new(token), device });
        self.layout.lock().add_span(base, actual);
        Ok(Ok(base))
    }

    fn granularity(&self, device: DeviceId) -> u64 {
        self.backend.granularity(device)
    }

    fn tidy(&self, device: DeviceId) {
        let left_over = |handle: &layout::Handle, _: &layout::View| handle.homes.is_empty();
        for place in self.views_where(left_over) {
            if self.reservation(place.base).1 == device {
                let _ = self.drop_view(place, left_over);
            }
        }
        let strays = std::mem::take(&mut self.tokens.lock().strays);
        for (of, page) in strays {
            if of == device {
                let _ = self.destroy(device, page);
            } else {
                self.tokens.lock().strays.push((of, page));
            }
        }
    }

    fn mapped(&self, device: DeviceId) -> BTreeMap<(Addr, u64), Vec<(Addr, u64)>> {
        let reserved: Vec<(Addr, u64)> = {
            let tokens = self.tokens.lock();
            let mine = tokens.reserved.iter().filter(|(_, reserved)| reserved.device == device);
            mine.map(|(base, reserved)| (*base, reserved.token.bytes())).collect()
        };
        let layout = self.layout.lock();
        let owned = |(base, bytes): (Addr, u64)| {
            let mut pieces = Vec::new();
            for (at, id) in layout.views(base, base, base + bytes) {
                let homes = layout[id].homes.iter().filter(|home| home.view.at == at);
                pieces.extend(homes.map(|home| (at + home.from, home.bytes)));
            }
            ((base, bytes), pieces)
        };
        reserved.into_iter().map(owned).collect()
    }

    fn unreserve(&self, base: Addr) -> Result<(), PagerError<B::Error>> {
        for place in self.views_where(|_, view| view.place.base == base) {
            self.drop_view(place, |_, _| true)?;
        }
        let reserved = self.tokens.lock().reserved.remove(&base);
        let Reserved { token, device } = reserved.expect("I10: the reservation exists");
        let token = Arc::into_inner(token).expect("no call uses an empty reservation");
        match self.backend.unreserve(token) {
            Ok(()) => {
                self.layout.lock().remove_span(base);
                Ok(())
            }
            Err(Refused { value, error }) => {
                let back = Reserved { token: Arc::new(value), device };
                self.tokens.lock().reserved.insert(base, back);
                Err(fault(BackendOp::Unreserve)(error))
            }
        }
    }

    fn whole_pages(&self, base: Addr, at: Addr, bytes: u64) -> Option<(Addr, u64)> {
        let end = at + bytes;
        let layout = self.layout.lock();
        let whole = layout.views(base, at, end).filter(|(view, id)| {
            let handle = &layout[*id];
            let inside = *view >= at && *view + handle.bytes <= end;
            inside && handle.only_home() == Some(Place { base, at: *view })
        });
        // Every byte of the range is at home here, so that only its first and its last handle can have
        // bytes elsewhere.
        let mut run = None;
        for (view, id) in whole {
            let (start, length) = run.unwrap_or((view, 0));
            run = Some((start, length + layout[id].bytes));
        }
        run
    }

    fn map(&self, base: Addr, at: Addr, bytes: u64, page: u64) -> Result<(), PagerError<B::Error>> {
        let parts: Vec<_> = (0..bytes / page).map(|_| Part::New(page)).collect();
        self.back(base, at, &parts)
    }

    fn unmap(&self, base: Addr, at: Addr, bytes: u64) -> Unmapped<B::Error> {
        let mut done = 0;
        while done < bytes {
            let cursor = at + done;
            let size = {
                let layout = self.layout.lock();
                let view = layout.views(base, cursor, cursor + 1).next();
                layout[view.expect("E2: backed runs are whole handles").1].bytes
            };
            match self.discard(base, cursor) {
                Ok(()) => done += size,
                Err(error) => {
                    // A handle that was unmapped but not taken back is gone from here all the same.
                    if error.op == BackendOp::Destroy {
                        done += size;
                    }
                    return Unmapped { bytes: done, error: Some(error) };
                }
            }
        }
        Unmapped { bytes: done, error: None }
    }

    fn visit(&self, base: Addr, at: Addr, bytes: u64, visit: &mut dyn FnMut(MappedPage<'_>)) {
        let views: Vec<_> = {
            let layout = self.layout.lock();
            let views = layout.views(base, at, at + bytes);
            views.map(|(at, id)| (at, id, layout[id].serial)).collect()
        };
        for (at, id, serial) in views {
            let page = Arc::clone(&self.tokens.lock().pages[&id]);
            visit(MappedPage { at, serial, page: &*page });
        }
    }
}

impl<B: VirtualMemory> Drop for HandleTable<B> {
    /// Best effort: a backend that is gone already has taken everything with it.
    fn drop(&mut self) {
        let views = self.views_where(|_, _| true);
        let is_stuck = |place: &Place| {
            let dropped = self.drop_view(*place, |_, _| true);
            dropped.is_err_and(|error| error.op == BackendOp::Unmap)
        };
        let stuck: Vec<Addr> = views.into_iter().filter(is_stuck).map(|at| at.base).collect();
        let tokens = self.tokens.get_mut();
        let strays = std::mem::take(&mut tokens.strays);
        for (_, page) in strays {
            let _ = self.backend.destroy(page);
        }
        for (base, reserved) in std::mem::take(&mut tokens.reserved) {
            let token = Arc::into_inner(reserved.token).filter(|_| !stuck.contains(&base));
            if let Some(token) = token {
                let _ = self.backend.unreserve(token);
            }
        }
    }
}
