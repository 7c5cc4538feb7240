//! Where every handle is mapped, and which of those places each of its bytes belongs to.

use crate::pager::next_serial;
use crate::units::Addr;
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Names a handle of a store. The number of a handle that is gone is used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct HandleId(u32);

impl HandleId {
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// An address in a reservation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) base: Addr,
    pub(crate) at: Addr,
}

/// One place where a handle is mapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View {
    pub(crate) place: Place,
    /// The epoch in which bytes last left it.
    pub(crate) left: u64,
    /// Whether it was made for a part of the handle.
    pub(crate) partial: bool,
}

/// Bytes of a handle that belong to one of its views.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Home {
    pub(crate) from: u64,
    pub(crate) bytes: u64,
    /// The start of the view, not of the bytes.
    pub(crate) view: Place,
}

impl Home {
    const fn end(&self) -> u64 {
        self.from + self.bytes
    }
}

#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) bytes: u64,
    /// Names it for ever, unlike its id.
    pub(crate) serial: u64,
    /// All places where it is mapped, oldest first.
    pub(crate) views: SmallVec<[View; 4]>,
    /// Its bytes in order, each in one home. Empty if it is nobody's memory: left over from a growth
    /// that failed and could not be undone.
    pub(crate) homes: SmallVec<[Home; 2]>,
}

impl Handle {
    /// The one view that all bytes belong to, if there is one.
    pub(crate) fn only_home(&self) -> Option<Place> {
        let home = self.homes.first()?;
        (home.bytes == self.bytes).then_some(home.view)
    }

    pub(crate) fn is_home(&self, view: Place) -> bool {
        self.homes.iter().any(|home| home.view == view)
    }
}

/// A view that is being unmapped.
#[derive(Debug)]
pub(crate) struct TakenView {
    handle: HandleId,
    view: View,
    pub(crate) bytes: u64,
}

/// The address space of one reservation.
#[derive(Debug)]
struct Span {
    views: BTreeMap<Addr, HandleId>,
    /// Stretches in which nothing is mapped, by address.
    gaps: BTreeMap<Addr, u64>,
}

impl Span {
    fn has_gap(&self, at: Addr, bytes: u64) -> bool {
        let gap = self.gaps.range(..=at).next_back();
        gap.is_some_and(|(start, length)| at + bytes <= *start + *length)
    }

    fn cut_gap(&mut self, at: Addr, bytes: u64) {
        let (start, length) = self.gaps.range(..=at).next_back().expect("E4: views are disjoint");
        let (start, end) = (*start, *start + *length);
        debug_assert!(at + bytes <= end, "E4: views are disjoint");
        self.gaps.remove(&start);
        if start < at {
            self.gaps.insert(start, at - start);
        }
        if at + bytes < end {
            self.gaps.insert(at + bytes, end - (at + bytes));
        }
    }

    fn widen_gap(&mut self, mut at: Addr, mut bytes: u64) {
        if let Some(above) = self.gaps.remove(&(at + bytes)) {
            bytes += above;
        }
        if let Some((below, length)) = self.gaps.range(..at).next_back().map(|(a, n)| (*a, *n))
            && below + length == at
        {
            at = below;
            bytes += length;
        }
        self.gaps.insert(at, bytes);
    }
}

/// The book of views and homes. Knows no backend.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    handles: Vec<Option<Handle>>,
    vacant: Vec<HandleId>,
    spans: BTreeMap<Addr, Span>,
    /// Counts changes of homes.
    epoch: u64,
    /// The largest handle so far, in bytes.
    largest: u64,
    /// At least the number of views of every handle.
    views_most: usize,
    /// Ranges that are being made.
    pins: u32,
}

impl Layout {
    pub(crate) fn add_span(&mut self, base: Addr, bytes: u64) {
        let gaps = BTreeMap::from([(base, bytes)]);
        self.spans.insert(base, Span { views: BTreeMap::new(), gaps });
    }

    /// Forgets a reservation without views.
    pub(crate) fn remove_span(&mut self, base: Addr) {
        self.spans.remove(&base);
    }

    /// A new handle without views.
    pub(crate) fn add_handle(&mut self, bytes: u64) -> HandleId {
        self.largest = self.largest.max(bytes);
        let serial = next_serial();
        let handle = Handle { bytes, serial, views: SmallVec::new(), homes: SmallVec::new() };
        if let Some(id) = self.vacant.pop() {
            self.handles[id.index()] = Some(handle);
            return id;
        }
        self.handles.push(Some(handle));
        HandleId(u32::try_from(self.handles.len() - 1).expect("fewer than 2^32 handles"))
    }

    /// Takes a range in which nothing is mapped out of the gaps, so that nobody else uses it while it
    /// is being mapped, and keeps all reservations meanwhile. Returns whether it was to be had.
    #[must_use]
    pub(crate) fn claim(&mut self, base: Addr, at: Addr, bytes: u64) -> bool {
        let span = self.spans.get_mut(&base);
        let Some(span) = span.filter(|span| span.has_gap(at, bytes)) else { return false };
        span.cut_gap(at, bytes);
        self.pins += 1;
        true
    }

    /// Ends a [`claim`](Self::claim): what has no view now is a gap again.
    pub(crate) fn release_claim(&mut self, base: Addr, at: Addr, bytes: u64) {
        self.pins -= 1;
        let mut cursor = at;
        let views: Vec<_> =
            self.views(base, at, at + bytes).map(|(view, id)| (view, self[id].bytes)).collect();
        let span = self.spans.get_mut(&base).expect("E1: a pinned reservation stays");
        for (view, length) in views {
            if cursor < view {
                span.widen_gap(cursor, view - cursor);
            }
            cursor = view + length;
        }
        if cursor < at + bytes {
            span.widen_gap(cursor, at + bytes - cursor);
        }
    }

    /// Whether a range is being made, so that no reservation may go.
    pub(crate) const fn is_pinned(&self) -> bool {
        self.pins > 0
    }

    /// Adds a view to a range that is claimed.
    pub(crate) fn add_view(&mut self, id: HandleId, place: Place, partial: bool) {
        let left = self.epoch;
        let handle = self.handle_mut(id);
        handle.views.push(View { place, left, partial });
        let views = handle.views.len();
        self.views_most = self.views_most.max(views);
        let span = self.spans.get_mut(&place.base).expect("I10: the reservation exists");
        span.views.insert(place.at, id);
    }

    /// Takes the view at `place` away if `choose` still wants that. It can be put back with what this
    /// returns; its address space is claimed until [`free_view`](Self::free_view).
    pub(crate) fn take_view(
        &mut self,
        place: Place,
        choose: impl Fn(&Handle, &View) -> bool,
    ) -> Option<TakenView> {
        let span = self.spans.get_mut(&place.base)?;
        let id = *span.views.get(&place.at)?;
        let handle = self.handles[id.index()].as_mut().expect("I10: the handle exists");
        let at = handle.views.iter().position(|view| view.place == place)?;
        if !choose(handle, &handle.views[at]) {
            return None;
        }
        let view = handle.views.remove(at);
        span.views.remove(&place.at);
        Some(TakenView { handle: id, view, bytes: handle.bytes })
    }

    pub(crate) fn put_view(&mut self, taken: TakenView) {
        self.handle_mut(taken.handle).views.push(taken.view);
        let span = self.spans.get_mut(&taken.view.place.base);
        let span = span.expect("I10: the reservation exists");
        span.views.insert(taken.view.place.at, taken.handle);
    }

    /// Ends the claim of a view that is unmapped now. Returns its handle if that was the last one; the
    /// handle is forgotten then.
    pub(crate) fn free_view(&mut self, taken: &TakenView) -> Option<HandleId> {
        let place = taken.view.place;
        let span = self.spans.get_mut(&place.base).expect("I10: the reservation exists");
        span.widen_gap(place.at, taken.bytes);
        let handle = self.handle_mut(taken.handle);
        handle.homes.retain(|home| home.view != place);
        let last = handle.views.is_empty();
        if last {
            self.handles[taken.handle.index()] = None;
            self.vacant.push(taken.handle);
        }
        last.then_some(taken.handle)
    }

    /// Makes `bytes` of a handle, `from` its start on, belong to the view at `place`.
    pub(crate) fn rehome(&mut self, id: HandleId, from: u64, bytes: u64, place: Place) {
        self.epoch += 1;
        let epoch = self.epoch;
        let new = Home { from, bytes, view: place };
        let handle = self.handle_mut(id);
        let old = std::mem::take(&mut handle.homes);
        let mut homes: SmallVec<[Home; 4]> = SmallVec::new();
        for home in &old {
            if home.from < new.end() && new.from < home.end() {
                let left = handle.views.iter_mut().filter(|view| view.place == home.view);
                left.for_each(|view| view.left = epoch);
            }
            if home.from < new.from {
                homes.push(Home { bytes: home.end().min(new.from) - home.from, ..*home });
            }
            if home.end() > new.end() {
                let from = home.from.max(new.end());
                homes.push(Home { from, bytes: home.end() - from, ..*home });
            }
        }
        homes.push(new);
        homes.sort_unstable_by_key(|home| home.from);
        for home in homes {
            match handle.homes.last_mut() {
                Some(last) if last.view == home.view => last.bytes += home.bytes,
                _ => handle.homes.push(home),
            }
        }
    }

    fn handle_mut(&mut self, id: HandleId) -> &mut Handle {
        self.handles[id.index()].as_mut().expect("I10: the handle exists")
    }

    /// Every handle.
    pub(crate) fn handles(&self) -> impl Iterator<Item = (HandleId, &Handle)> {
        let slots = self.handles.iter().enumerate();
        slots.filter_map(|(index, slot)| Some((HandleId(index as u32), slot.as_ref()?)))
    }

    /// Above the number of every handle.
    pub(crate) fn handles_end(&self) -> usize {
        self.handles.len()
    }

    /// The views that `from..to` touches, ascending, with their handles.
    pub(crate) fn views(
        &self,
        base: Addr,
        from: Addr,
        to: Addr,
    ) -> impl Iterator<Item = (Addr, HandleId)> {
        let views = &self.spans[&base].views;
        let first = views.range(..=from).next_back().map(|(at, id)| (*at, *id, self[*id].bytes));
        let first = first.filter(|(at, _, bytes)| *at + *bytes > from);
        let next = first.map_or(from, |(at, _, bytes)| at + bytes);
        // Most often one view covers the whole range.
        let rest = (next < to).then(|| views.range(next..to));
        let rest = rest.into_iter().flatten().map(|(at, id)| (*at, *id));
        first.map(|(at, id, _)| (at, id)).into_iter().chain(rest)
    }

    /// The stretches of a reservation in which nothing is mapped, by address.
    pub(crate) fn gaps(&self, base: Addr) -> impl Iterator<Item = (Addr, u64)> {
        self.spans[&base].gaps.iter().map(|(at, bytes)| (*at, *bytes))
    }

    /// Whether a handle has more than `most` views.
    pub(crate) fn is_crowded(&mut self, most: usize) -> bool {
        if self.views_most > most {
            let views = self.handles().map(|(_, handle)| handle.views.len());
            self.views_most = views.max().unwrap_or(0);
        }
        self.views_most > most
    }

    pub(crate) const fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(crate) const fn largest(&self) -> u64 {
        self.largest
    }
}

impl std::ops::Index<HandleId> for Layout {
    type Output = Handle;
    fn index(&self, id: HandleId) -> &Handle {
        self.handles[id.index()].as_ref().expect("I10: the handle exists")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 2 << 20;

    fn place(page: u64) -> Place {
        Place { base: Addr::new(PAGE), at: Addr::new(PAGE + page * PAGE) }
    }

    fn layout() -> Layout {
        let mut layout = Layout::default();
        layout.add_span(Addr::new(PAGE), 100 * PAGE);
        layout
    }

    fn map(layout: &mut Layout, id: HandleId, page: u64) {
        let (Place { base, at }, bytes) = (place(page), layout[id].bytes);
        assert!(layout.claim(base, at, bytes));
        layout.add_view(id, place(page), false);
        layout.release_claim(base, at, bytes);
    }

    #[test]
    fn a_claim_returns_what_was_not_used() {
        let mut layout = layout();
        let id = layout.add_handle(2 * PAGE);
        let base = Addr::new(PAGE);
        assert!(layout.claim(base, place(0).at, 10 * PAGE));
        assert!(layout.is_pinned() && !layout.claim(base, place(9).at, PAGE));
        layout.add_view(id, place(4), false);
        layout.release_claim(base, place(0).at, 10 * PAGE);
        let gaps: Vec<_> = layout.gaps(base).collect();
        assert_eq!(gaps, [(place(0).at, 4 * PAGE), (place(6).at, 94 * PAGE)]);
    }

    #[test]
    fn bytes_have_one_home() {
        let mut layout = layout();
        let id = layout.add_handle(4 * PAGE);
        map(&mut layout, id, 0);
        layout.rehome(id, 0, 4 * PAGE, place(0));
        map(&mut layout, id, 10);
        layout.rehome(id, 3 * PAGE, PAGE, place(10));
        let homes = |layout: &Layout| {
            layout[id].homes.iter().map(|h| (h.from, h.bytes, h.view)).collect::<Vec<_>>()
        };
        assert_eq!(homes(&layout), [(0, 3 * PAGE, place(0)), (3 * PAGE, PAGE, place(10))]);
        layout.rehome(id, PAGE, PAGE, place(10));
        assert_eq!(layout[id].homes.len(), 4);
        layout.rehome(id, 0, 4 * PAGE, place(10));
        assert_eq!(layout[id].only_home(), Some(place(10)));
        assert_eq!(layout[id].views[0].left, layout.epoch());
    }

    #[test]
    fn gaps_are_what_no_view_covers() {
        let mut layout = layout();
        let (a, b) = (layout.add_handle(2 * PAGE), layout.add_handle(3 * PAGE));
        map(&mut layout, a, 0);
        map(&mut layout, b, 2);
        map(&mut layout, a, 8);
        let gaps = |layout: &Layout| layout.gaps(Addr::new(PAGE)).collect::<Vec<_>>();
        assert_eq!(gaps(&layout), [(place(5).at, 3 * PAGE), (place(10).at, 90 * PAGE)]);
        let seen: Vec<_> = layout.views(Addr::new(PAGE), place(3).at, place(9).at).collect();
        assert_eq!(seen, [(place(2).at, b), (place(8).at, a)]);
        let taken = layout.take_view(place(2), |_, _| true).unwrap();
        assert!(!layout.claim(Addr::new(PAGE), place(5).at, 4 * PAGE));
        assert_eq!(layout.free_view(&taken), Some(b));
        let taken = layout.take_view(place(8), |_, _| true).unwrap();
        assert_eq!(layout.free_view(&taken), None);
        assert_eq!(gaps(&layout), [(place(2).at, 98 * PAGE)]);
    }
}
