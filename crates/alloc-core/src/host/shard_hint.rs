//! The shard that a thread uses, whatever the allocator.
//!
//! One collision says little: the other thread may only have freed a block that it got from here.
//! A thread that left at once would meet the owner of the next shard, both would leave, and no one
//! would ever settle. So collisions are weighed against undisturbed entries.

use std::cell::Cell;

/// Threads of a model run share one OS thread: a thread-local would leak from one to the other.
const IS_MODEL: bool = cfg!(loom);

/// What a collision weighs, in undisturbed entries.
const COLLISION: u32 = 8;
/// The weight at which a thread moves on.
const MOVE_AT: u32 = 4 * COLLISION;
/// The weight that it starts with where it comes to: of two that meet there, it leaves first.
const NEWCOMER: u32 = MOVE_AT / 2;

thread_local! {
    static SHARD: Cell<usize> = const { Cell::new(0) };
    static WEIGHT: Cell<u32> = const { Cell::new(0) };
}

#[inline(always)]
pub(super) fn get() -> usize {
    if IS_MODEL { 0 } else { SHARD.get() }
}

/// Notes that the shard was found unlocked.
#[inline(always)]
pub(super) fn entered() {
    let weight = WEIGHT.get();
    if weight > 0 && !IS_MODEL {
        WEIGHT.set(weight - 1);
    }
}

/// Notes that the shard was found locked; the shard to use now.
#[cold]
pub(super) fn collided() -> usize {
    if IS_MODEL {
        return 1;
    }
    let weight = WEIGHT.get() + COLLISION;
    if weight < MOVE_AT {
        WEIGHT.set(weight);
    } else {
        WEIGHT.set(NEWCOMER);
        SHARD.set(SHARD.get().wrapping_add(1));
    }
    SHARD.get()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn threads_leave_where_they_collide_often_only() {
        let here = get();
        for _ in 0..1000 {
            assert_eq!(collided(), here, "one collision in ten entries is no reason");
            (0..10).for_each(|_| entered());
        }
        let moved = (0..4).any(|_| collided() != here);
        assert!(moved, "four in a row are");
        assert_eq!(get(), here + 1);
        assert_ne!((collided(), collided()).1, here + 1, "a newcomer leaves sooner");
    }
}
