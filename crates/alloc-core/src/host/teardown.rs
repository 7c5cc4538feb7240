//! The end of an allocator.

use super::backend::HostBackend;
use super::engine::Engine;
use super::store::Store;

impl<B: HostBackend> Engine<B> {
    /// Waits for everything that was freed and gives all memory back that nobody holds. Errors are
    /// of no use to anybody here: what cannot be waited for or given back is leaked.
    pub(crate) fn tear_down(&self) {
        let _ = self.flush_all();
        // An event that cannot be waited for goes to the end of the queue, so each is tried once.
        for _ in 0..self.queue.len() {
            let _ = self.wait_for_first();
        }
        self.each_pool(|pool| drop(self.empty_pool(pool)));
        self.unpin_kept();
    }

    /// Gives the reserve back if it is wholly free.
    fn unpin_kept(&self) {
        if let Some(base) = self.reserve.close() {
            let _ = self.pins.unpin(&self.backend, base);
        }
        let Store::Slabs(slabs) = &self.pools.default_pool().store else { return };
        for kept in self.pins.all().into_iter().filter(|pin| pin.keep) {
            let idle = slabs.idle_segments(kept.node).into_iter();
            let free = idle.into_iter().find(|idle| idle.span == kept.span);
            if free.is_some_and(|idle| slabs.remove_idle(kept.node, idle)) {
                let _ = self.pins.unpin(&self.backend, kept.span.base);
            }
        }
    }
}
