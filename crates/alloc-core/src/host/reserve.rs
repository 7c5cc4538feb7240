//! Policy `pytorch`: one segment pinned ahead, from which blocks are served while it lasts.

use super::backend::PIN_ALIGN;
use super::heap::Heap;
use super::home::Span;
use crate::sync::Mutex;
use crate::units::Addr;

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
        let mut heap = Box::new(Heap::new(PIN_ALIGN));
        heap.add_span(span);
        *self.state.lock() = State::Ready { span, heap };
    }

    /// A piece for a block, if there is room.
    pub(crate) fn take(&self, bytes: u64) -> Option<Span> {
        match &mut *self.state.lock() {
            State::Ready { heap, .. } => {
                let run = heap.lend(bytes.next_multiple_of(PIN_ALIGN), 0)?;
                Some(Span { base: run.base, bytes })
            }
            _ => None,
        }
    }

    /// Takes a piece back if it is one.
    pub(crate) fn give_back(&self, base: Addr) -> bool {
        match &mut *self.state.lock() {
            State::Ready { span, heap } if contains(span, base) => {
                heap.reclaim(base);
                true
            }
            _ => false,
        }
    }

    /// Ends the reserve if no piece of it is in use; where it was.
    pub(crate) fn close(&self) -> Option<Addr> {
        let mut state = self.state.lock();
        let State::Ready { span, heap } = &mut *state else { return None };
        heap.consolidate();
        let base = heap.remove_idle(span.base, None)?.base;
        *state = State::Off;
        Some(base)
    }

    /// The whole reserve, and the first addresses of the pieces in use.
    pub(crate) fn pieces(&self) -> Option<(Span, Vec<Addr>)> {
        match &*self.state.lock() {
            State::Ready { span, heap } => {
                let sums = heap.check().ok()?;
                Some((*span, sums.lent.iter().map(|(_, run)| run.base).collect()))
            }
            _ => None,
        }
    }
}

fn contains(span: &Span, addr: Addr) -> bool {
    addr >= span.base && addr - span.base < span.bytes
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
