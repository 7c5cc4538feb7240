//! How memory is closed: when nobody uses it and the work on it is done.

use super::{Backing, Leaving, OpenPage, Shared, Span, SpanKey};
use crate::backend::{BackendError, Completion, ErrorKind, Refused, SharePages};
use crate::share::MemoryId;
use std::sync::Arc;

impl<B: SharePages> Shared<B> {
    /// Ends one use of each page; those without a use are given back.
    pub(super) fn leave_pages(&self, pages: impl IntoIterator<Item = (MemoryId, Arc<B::Page>)>) {
        let ids: Vec<MemoryId> = pages.into_iter().map(|(id, _)| id).collect();
        ids.into_iter().for_each(|id| self.leave_page(id));
    }

    fn leave_page(&self, id: MemoryId) {
        let mut table = self.table.lock();
        let Some(open) = table.pages.get_mut(&id) else { return };
        open.users -= 1;
        if open.users == 0 {
            drop(table);
            self.discard_page(id);
        }
    }

    /// Gives an unused page back. One that is refused stays, to be used or given back later.
    fn discard_page(&self, id: MemoryId) {
        let Some(OpenPage { page, bytes, device, .. }) = self.table.lock().pages.remove(&id) else {
            return;
        };
        let Some(page) = Arc::into_inner(page) else { return };
        if let Err(Refused { value, .. }) = self.backend.destroy(page) {
            let open = OpenPage { page: Arc::new(value), bytes, device, users: 0 };
            self.table.lock().pages.insert(id, open);
        }
    }

    /// Unmaps and closes; returns what is left if that fails half-way.
    pub(super) fn close(&self, backing: Backing<B>) -> Result<(), Backing<B>> {
        match backing {
            Backing::Segment(opened) => {
                let closed = self.backend.close_segment(opened);
                closed.map_err(|refused| Backing::Segment(refused.value))
            }
            Backing::Pages { reservation, mut mapped } => {
                while let Some((at, id, bytes)) = mapped.pop() {
                    if self.backend.unmap(&reservation, at, bytes).is_err() {
                        mapped.push((at, id, bytes));
                        return Err(Backing::Pages { reservation, mapped });
                    }
                    self.leave_page(id);
                }
                let unreserved = self.backend.unreserve(reservation);
                unreserved.map_err(|refused| Backing::Pages { reservation: refused.value, mapped })
            }
        }
    }

    /// Ends one use of a span.
    fn leave_span(&self, key: &SpanKey) {
        let mut table = self.table.lock();
        let Some(span) = table.spans.get_mut(key) else { return };
        span.users = span.users.saturating_sub(1);
        if span.users == 0 {
            drop(table);
            self.close_span(key);
        }
    }

    /// Closes an unused span. A segment that cannot be closed may be used again; of pages, some may
    /// be unmapped by then.
    fn close_span(&self, key: &SpanKey) {
        let Some(span) = self.table.lock().spans.remove(key) else { return };
        let Span { base, bytes, device, backing, .. } = span;
        match self.close(backing) {
            Ok(()) => {}
            Err(backing @ Backing::Segment(_)) => {
                let span = Span { base, bytes, device, users: 0, backing };
                self.table.lock().spans.insert(Arc::clone(key), span);
            }
            Err(rest) => self.table.lock().unclosed.push(rest),
        }
    }

    /// Closes what has no user and whose work is done. Waits for nothing.
    pub(super) fn collect(&self) {
        let mut done = Vec::new();
        {
            let _turn = self.turn.lock();
            self.retry();
            let leaving = std::mem::take(&mut *self.leaving.lock());
            let mut waiting = Vec::new();
            for mut entry in leaving {
                if self.is_done(&mut entry) {
                    self.leave_span(&entry.key);
                    done.push(entry.lease);
                } else {
                    waiting.push(entry);
                }
            }
            self.leaving.lock().extend(waiting);
        }
        // With nothing locked: the lease may tell somebody.
        drop(done);
    }

    /// Tries once more to close what could not be closed.
    fn retry(&self) {
        let (unclosed, spans, pages) = {
            let mut table = self.table.lock();
            let unclosed = std::mem::take(&mut table.unclosed);
            let spans = table.spans.iter().filter(|(_, span)| span.users == 0);
            let spans: Vec<SpanKey> = spans.map(|(key, _)| Arc::clone(key)).collect();
            let pages = table.pages.iter().filter(|(_, page)| page.users == 0);
            let pages: Vec<MemoryId> = pages.map(|(id, _)| *id).collect();
            (unclosed, spans, pages)
        };
        for backing in unclosed {
            if let Err(rest) = self.close(backing) {
                self.table.lock().unclosed.push(rest);
            }
        }
        spans.iter().for_each(|key| self.close_span(key));
        pages.into_iter().for_each(|id| self.discard_page(id));
    }

    /// Whether all work on a dropped block is done.
    fn is_done(&self, entry: &mut Leaving<B>) -> bool {
        let Leaving { events, unrecorded, .. } = entry;
        unrecorded.retain(|stream| match self.backend.record(stream) {
            Ok(event) => {
                events.push(event);
                false
            }
            // Nothing runs on a lost device.
            Err(error) => error.kind() != ErrorKind::DeviceLost,
        });
        events.retain(|event| match self.backend.query(event) {
            Ok(completion) => completion == Completion::Pending,
            Err(error) => error.kind() != ErrorKind::DeviceLost,
        });
        events.is_empty() && unrecorded.is_empty()
    }

    /// Waits for all work on a dropped block. Returns whether that worked.
    fn wait(&self, entry: &mut Leaving<B>) -> bool {
        self.is_done(entry);
        entry.events.iter().for_each(|event| {
            let _ = self.backend.wait(event);
        });
        self.is_done(entry)
    }
}

impl<B: SharePages> Drop for Shared<B> {
    /// Waits for the work on what was dropped, then closes everything. Memory under work that cannot
    /// be waited for stays open, and its producer is not told.
    fn drop(&mut self) {
        let mut leases = Vec::new();
        for mut entry in std::mem::take(self.leaving.get_mut()) {
            if self.wait(&mut entry) {
                self.leave_span(&entry.key);
                leases.push(entry.lease);
            } else {
                std::mem::forget(entry);
            }
        }
        self.retry();
    }
}
