//! Policy `pytorch`: one segment pinned ahead, from which blocks are served while it lasts.

use super::backend::PIN_ALIGN;
use super::heap::{Cut, Heap, Role};
use super::home::{Run, Span};
use crate::sync::Mutex;
use crate::units::Addr;
use std::collections::BTreeMap;

#[derive(Debug)]
pub(crate) struct Reserve {
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    /// Not pinned yet: so many bytes are wanted.
    Wanted(u64),
    /// There is none: not wanted, being pinned right now, or impossible.
    Off,
    Ready {
        span: Span,
        /// Only lends runs.
        heap: Box<Heap<()>>,
        /// The runs that are lent.
        pieces: BTreeMap<Addr, Run>,
    },
}

impl Reserve {
    pub(crate) fn new(bytes: u64) -> Self {
        let state = if bytes == 0 { State::Off } else { State::Wanted(bytes) };
        Reserve { state: Mutex::new(state) }
    }

    /// The bytes to pin, for the first caller. It must call [`ready`](Reserve::ready) once it has
    /// them.
    pub(crate) fn claim(&self) -> Option<u64> {
        let mut state = self.state.lock();
        let State::Wanted(bytes) = *state else { return None };
        *state = State::Off;
        Some(bytes.next_multiple_of(PIN_ALIGN))
    }

    pub(crate) fn ready(&self, span: Span) {
        let mut heap = Box::new(Heap::new(PIN_ALIGN, Role::Central { free_bytes_max: u64::MAX }));
        heap.add_span(span);
        *self.state.lock() = State::Ready { span, heap, pieces: BTreeMap::new() };
    }

    /// A piece for a block, if there is room.
    pub(crate) fn take(&self, bytes: u64) -> Option<Span> {
        match &mut *self.state.lock() {
            State::Ready { heap, pieces, .. } => {
                let run = heap.lend(bytes.next_multiple_of(PIN_ALIGN), 0, Cut::Freely)?;
                pieces.insert(run.span.base, run);
                Some(Span { base: run.span.base, bytes })
            }
            _ => None,
        }
    }

    /// Takes a piece back if it is one.
    pub(crate) fn give_back(&self, base: Addr) -> bool {
        match &mut *self.state.lock() {
            State::Ready { heap, pieces, .. } => match pieces.remove(&base) {
                Some(run) => {
                    heap.reclaim(run);
                    true
                }
                None => false,
            },
            State::Wanted(_) | State::Off => false,
        }
    }

    /// Ends the reserve if no piece of it is in use; where it was.
    pub(crate) fn close(&self) -> Option<Addr> {
        let mut state = self.state.lock();
        let State::Ready { span, pieces, .. } = &*state else { return None };
        let base = pieces.is_empty().then_some(span.base)?;
        *state = State::Off;
        Some(base)
    }

    /// The whole reserve, and the first addresses of the pieces in use.
    pub(crate) fn pieces(&self) -> Option<(Span, Vec<Addr>)> {
        match &*self.state.lock() {
            State::Ready { span, pieces, .. } => Some((*span, pieces.keys().copied().collect())),
            State::Wanted(_) | State::Off => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_back_and_serve_again() {
        let reserve = Reserve::new(10_000);
        assert_eq!(reserve.take(1), None, "not pinned yet");
        assert_eq!(reserve.claim(), Some(12_288));
        assert_eq!(reserve.claim(), None, "once only");
        reserve.ready(Span { base: Addr::new(1 << 20), bytes: 12_288 });
        let piece = reserve.take(5000).expect("8192 of 12,288");
        assert_eq!(piece, Span { base: Addr::new(1 << 20), bytes: 5000 });
        assert_eq!(reserve.take(8192), None, "full");
        assert!(reserve.take(4096).is_some());
        assert!(reserve.give_back(piece.base));
        assert!(!reserve.give_back(Addr::new(1 << 30)), "not of the reserve");
        assert_eq!(reserve.take(8192).map(|piece| piece.base), Some(piece.base));
    }
}
