//! What a miss does for the hits that follow it.
//!
//! Calls of a driver take tens to hundreds of microseconds and leave the caches of the processor full of
//! other things, so that the next operations would take several times as long as others. Who has just
//! waited for the driver looks at what they will look at, which costs a few microseconds there.

use super::Heap;
use std::hint::black_box;

impl Heap {
    /// Brings what hits read into the caches, and makes room for blocks that they cut and free.
    pub(crate) fn make_ready(&mut self) {
        self.blocks.make_room();
        self.lanes.iter_mut().for_each(|lane| lane.free.make_room());
        let lanes = self.lanes.iter().map(|lane| lane.free.read_through());
        let read = lanes.fold(self.blocks.read_through(), u64::wrapping_add);
        black_box(read.wrapping_add(self.lives.read_through()));
    }
}
