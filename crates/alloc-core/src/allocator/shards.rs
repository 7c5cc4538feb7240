//! Several heaps for one stream, where its threads collide.
//!
//! What bounds threads that share a stream is not the lock of its heap but the lines of its blocks,
//! each of which another processor wrote last. So once threads find the heap in use too often, its smaller
//! requests, which are most but hold few of the bytes, go to shards: heaps of the same pool and stream,
//! of which each thread keeps to one. Blocks go back to where they come from. Memory needs no event to
//! pass between shards, since all of it is one stream's: idle handles move at once, and a request that
//! no handle can be found for is served by any of them (`docs/adr/0023-shards.md`).

use super::allocate::HandedOut;
use super::check::{Violation, ensure};
use super::device::{HeapCell, HeapState};
use super::thread::ThreadTag;
use super::{Device, Shared};
use crate::backend::Backend;
use crate::config::{FREES_WATCHED, Rules, SHARDS_MAX};
use crate::heap::Request;
use crate::size_class::REQUEST_BYTES_MAX;
use crate::stats::Gauge;
use crate::sync::OnceLock;
use crate::trace::TraceBuffer;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What a shard may have more than is in use in it: a part of that, and so many bytes.
const SLACK_PART: u64 = 8;
const SLACK_BYTES: u64 = 8 << 20;

type Places<B> = Box<[OnceLock<Arc<HeapCell<B>>>]>;

/// The shards of a heap. What is read on the way to one is written only when they begin or end.
pub(super) struct Shards<B: Backend> {
    /// Requests of fewer bytes are for a shard; without any, only those of 0 bytes are fewer.
    least: AtomicU64,
    /// How many share the requests.
    count: AtomicU32,
    /// Filled as threads come. Place n has shard n + 1.
    places: OnceLock<Places<B>>,
}

impl<B: Backend> Shards<B> {
    pub(super) fn new() -> Self {
        Shards { least: AtomicU64::new(1), count: AtomicU32::new(0), places: OnceLock::new() }
    }

    /// Whether a request stays with the heap itself, and is of a usual size: not 0 and far from too
    /// large.
    #[inline]
    pub(super) fn leave(&self, requested: u64) -> bool {
        requested.wrapping_sub(self.least.load(Ordering::Relaxed)) < REQUEST_BYTES_MAX / 2
    }

    /// Whether there are shards in use.
    pub(super) fn is_divided(&self) -> bool {
        self.least.load(Ordering::Relaxed) > 1
    }

    /// Sends small requests to shards from now on.
    fn divide(&self, rules: &Rules) {
        self.count.store(rules.shards, Ordering::Relaxed);
        self.least.store(rules.shard_bytes_max + 1, Ordering::Relaxed);
    }

    /// Follows rules that have changed.
    pub(super) fn renew(&self, rules: &Rules) {
        if rules.shards == 1 {
            self.least.store(1, Ordering::Relaxed);
        } else if self.is_divided() || rules.collisions == 0 {
            self.divide(rules);
        }
    }

    /// The place of the calling thread, if the request is for a shard.
    fn place(&self, requested: u64) -> Option<u32> {
        if requested == 0 || requested >= self.least.load(Ordering::Relaxed) {
            return None;
        }
        let shards = self.count.load(Ordering::Relaxed);
        (ThreadTag::current().number() as u32).checked_rem(shards)
    }

    fn get(&self, place: u32) -> Option<&Arc<HeapCell<B>>> {
        self.places.get()?.get(place as usize)?.get()
    }

    fn enter(&self, place: u32, cell: Arc<HeapCell<B>>) -> Option<&Arc<HeapCell<B>>> {
        let places = self.places.get_or_init(|| (0..SHARDS_MAX).map(|_| OnceLock::new()).collect());
        // Another thread may have entered it: it is the same.
        let _ = places[place as usize].set(cell);
        self.get(place)
    }
}

/// How often threads collided of late.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Collisions {
    count: u32,
    /// The clock of the heap at the first.
    since: u32,
}

impl Collisions {
    /// Notes one at a heap's time `clock`. Returns how many there have been within a while.
    fn note(&mut self, clock: u32) -> u32 {
        if clock.wrapping_sub(self.since) >= FREES_WATCHED {
            *self = Collisions { count: 0, since: clock };
        }
        self.count = self.count.saturating_add(1);
        self.count
    }
}

impl<B: Backend> HeapCell<B> {
    /// A thread found the heap in use.
    #[cold]
    #[inline(never)]
    pub(super) fn note_collision(&self, state: &mut HeapState<B>) {
        let heap = &state.body.heap;
        let collisions = state.collisions.note(heap.clock);
        if self.may_divide() && heap.rules.shards > 1 && collisions >= heap.rules.collisions {
            self.shards.divide(&heap.rules);
        }
    }

    /// Gives the heap new rules.
    pub(super) fn renew(&self, rules: Rules) {
        let mut state = self.lock();
        if self.may_divide() {
            self.shards.renew(&rules);
        }
        state.body.heap.rules = if self.shard > 0 { rules.of_shard() } else { rules };
    }

    /// Private pools have no shards: checkpoints and captures know their heaps by stream.
    pub(super) fn may_divide(&self) -> bool {
        !self.private && self.shard == 0
    }

    /// Whether memory of the one may serve the other at once: both are of one pool and stream, and none
    /// is of a pool that can end.
    pub(super) fn is_sibling(&self, other: &HeapCell<B>) -> bool {
        !self.private
            && !other.private
            && (self.device, self.stream_id) == (other.device, other.stream_id)
    }
}

impl<B: Backend> HeapCell<B> {
    /// Bytes that the device may reserve more because the heap, in which so many are in use, is a shard:
    /// few blocks fit together less well than many.
    pub(super) fn slack(&self, active: u64) -> u64 {
        if self.shard > 0 { active / SLACK_PART + SLACK_BYTES } else { 0 }
    }

    /// Whether it is a shard that has less than its slack. One that had to ask others for every block
    /// would be slower than none, so it gets memory of its own first, if some is idle.
    pub(super) fn is_short(&self) -> bool {
        let active = self.bytes(Gauge::ActiveBytes);
        self.bytes(Gauge::ReservedBytes) < active + self.slack(active)
    }

    /// How many heaps share what one is for. They have one's address space together.
    pub(super) fn sharing(&self) -> u64 {
        if self.shard > 0 { u64::from(self.state.lock().body.heap.rules.shards) } else { 1 }
    }

    /// The current value of a figure.
    pub(super) fn bytes(&self, gauge: Gauge) -> u64 {
        self.state.lock().stats.get(gauge).all.current as u64
    }
}

impl<B: Backend> Device<B> {
    /// The other heaps of the pool and stream of `cell`, those behind it first.
    fn siblings(&self, cell: &HeapCell<B>) -> Vec<Arc<HeapCell<B>>> {
        if cell.private {
            return Vec::new();
        }
        let pool = self.pools.default_pool().id();
        let heaps = self.heaps.read();
        let mut siblings: Vec<_> =
            heaps.within(pool, cell.stream_id..=cell.stream_id).cloned().collect();
        let own = siblings.partition_point(|other| other.shard <= cell.shard);
        siblings.rotate_left(own);
        siblings.pop();
        siblings
    }
}

impl<B: Backend> Shared<B> {
    /// The shard that serves a request of the heap `cell`, if one does.
    #[inline]
    pub(super) fn shard_for<'a>(
        &'a self,
        cell: &'a HeapCell<B>,
        requested: u64,
    ) -> Option<&'a HeapCell<B>> {
        let place = cell.shards.place(requested)?;
        match cell.shards.get(place) {
            Some(shard) => Some(shard),
            None => self.first_shard_at(cell, place),
        }
    }

    #[cold]
    fn first_shard_at<'a>(&'a self, cell: &'a HeapCell<B>, place: u32) -> Option<&'a HeapCell<B>> {
        let pool = cell.home.pools.default_pool();
        let shard = self.heap_at(pool, &cell.stream, place + 1);
        cell.shards.enter(place, shard).map(|shard| &**shard)
    }

    /// The heap that a request of a shard would be for if there were none, and the request as it would be
    /// there: a shard may lack address space where the first heap has some.
    pub(super) fn without_shard(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
    ) -> Option<(Arc<HeapCell<B>>, Request)> {
        let siblings = self.devices[cell.device.index()].siblings(cell);
        let first = siblings.into_iter().find(|sibling| sibling.shard == 0)?;
        let request = first.state.lock().body.heap.rules.request(request.requested);
        Some((first, request))
    }

    /// Serves a request from what is free in the other heaps of its pool and stream.
    pub(super) fn search_siblings(
        &self,
        cell: &HeapCell<B>,
        request: &Request,
        trace: &mut TraceBuffer,
    ) -> Option<HandedOut> {
        self.devices[cell.device.index()].siblings(cell).iter().find_map(|sibling| {
            sibling.hit(Some(trace), |body, ledger| {
                let block = body.heap.serve_hit(*request, ledger)?;
                Some(HandedOut { heap: sibling.name, block })
            })
        })
    }
}

/// I14: shards are of the default pool, the first heap of their stream knows them, and requests are sent
/// there as its rules say.
pub(super) fn check_shards<B: Backend>(device: &Device<B>) -> Result<(), Violation> {
    for cell in device.heaps() {
        let (stream, shard) = (cell.stream_id, cell.shard);
        let heaps = device.siblings(&cell);
        let first = heaps.iter().find(|sibling| sibling.shard == 0);
        let place = shard.checked_sub(1);
        let known = place.zip(first).and_then(|(place, first)| first.shards.get(place));
        ensure(shard == 0 || known.is_some_and(|known| Arc::ptr_eq(known, &cell)), "I14", || {
            format!("shard {shard} of {stream} is not known to the heap of the stream")
        })?;
        let state = cell.state.lock();
        let (least, count) = (&cell.shards.least, &cell.shards.count);
        let limits = (least.load(Ordering::Relaxed), count.load(Ordering::Relaxed));
        let rules = &state.body.heap.rules;
        let right = !cell.shards.is_divided()
            || cell.may_divide() && limits == (rules.shard_bytes_max + 1, rules.shards);
        ensure(right, "I14", || format!("{stream} is divided against its rules: {limits:?}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collisions_are_counted_within_a_while() {
        let mut collisions = Collisions::default();
        assert_eq!([5, 6, 4095].map(|clock| collisions.note(clock)), [1, 2, 3]);
        assert_eq!([4096, 8191].map(|clock| collisions.note(clock)), [1, 2]);
        assert_eq!(collisions.note(8192), 1);
        let mut late = Collisions { count: 7, since: u32::MAX };
        assert_eq!(late.note(4094), 8, "the clock wraps around");
        assert_eq!(late.note(4095), 1);
        let mut many = Collisions { count: u32::MAX, since: 0 };
        assert_eq!(many.note(0), u32::MAX);
    }
}
