//! Policy `ours`: pinned segments cut into blocks of any size.
//!
//! Every NUMA node has a *central* heap over the pinned segments of that node, and *shards* that
//! borrow runs from it for small blocks. A thread stays with one shard until it finds that shard
//! locked again and again, then moves on: threads that do not collide share the first shard and
//! waste nothing, and threads that do end up apart.
//!
//! No function here holds two locks at once.

mod verify;

use super::backend::{NodeId, PIN_ALIGN};
use super::block::BlockId;
use super::config::HostConfig;
use super::heap::{Cut, Found, Heap, Idle, Role};
use super::home::{Run, Span, Taken};
use super::ledger::Ledger;
use super::shard_hint;
use super::store::Served;
use crate::padded::Padded;
use crate::sync::{ShortGuard, ShortLock};
use crate::units::Addr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Least bytes of a run that a shard borrows.
const RUN_BYTES_MIN: u64 = 1 << 20;
/// Most bytes of a run that a shard borrows, unless that is less than four times the request.
const RUN_BYTES_MAX: u64 = 4 << 20;

/// Wholly free runs that a shard keeps when it gives the others back.
const SPARE_RUNS_KEPT: usize = 4;

/// What all heaps of a node share.
#[derive(Debug, Default)]
struct Node {
    /// Threads that are pinning memory for this node right now.
    growing: AtomicU32,
    /// Bytes that may be pinned before the shards are searched again; see [`SlabStore::may_search`].
    unsearched: AtomicU64,
    /// Whether threads ever used more than one shard.
    spread: AtomicBool,
}

#[derive(Debug)]
pub(crate) struct SlabStore<S> {
    /// By home.
    heaps: Box<[Padded<ShortLock<Heap<S>>>]>,
    nodes: Box<[Node]>,
    /// Number of shards of a node, a power of two.
    shards: usize,
    granule: u64,
    small_bytes_max: u64,
    /// Free bytes that a central heap keeps.
    cached_bytes_max: u64,
}

impl<S: PartialEq> SlabStore<S> {
    /// A store without memory, for `nodes` NUMA nodes.
    pub(crate) fn new(config: &HostConfig, nodes: u16, shards: u16) -> Self {
        let shards = usize::from(shards).next_power_of_two();
        let cached_bytes_max = config.cached_bytes_max.unwrap_or(u64::MAX);
        let heap = |granule, role| Padded(ShortLock::new(Heap::new(granule, role)));
        let central = || heap(PIN_ALIGN, Role::Central { free_bytes_max: cached_bytes_max });
        let shard = |_| heap(config.granule_bytes, Role::Shard);
        let heaps = |_| std::iter::once(central()).chain((0..shards).map(shard));
        SlabStore {
            heaps: (0..nodes).flat_map(heaps).collect(),
            nodes: (0..nodes).map(|_| Node::default()).collect(),
            shards,
            granule: config.granule_bytes,
            small_bytes_max: config.small_bytes_max,
            cached_bytes_max,
        }
    }

    /// The size of the block that a request gets, give or take a little slack.
    pub(crate) fn round(&self, bytes: u64) -> u64 {
        let granule = if self.is_small(bytes) { self.granule } else { PIN_ALIGN };
        round_to(bytes, granule)
    }

    fn is_small(&self, bytes: u64) -> bool {
        bytes <= self.small_bytes_max
    }

    /// The home of a node's central heap; those of its shards follow.
    #[inline(always)]
    fn central_home(&self, node: NodeId) -> u32 {
        (node.index() * (1 + self.shards)) as u32
    }

    #[inline(always)]
    fn shard_home(&self, node: NodeId, shard: usize) -> u32 {
        self.central_home(node) + 1 + shard as u32
    }

    /// The node of a home.
    pub(crate) fn node_of(&self, home: u32) -> NodeId {
        NodeId::new((home as usize / (1 + self.shards)) as u16)
    }

    #[inline(always)]
    pub(crate) fn heap(&self, home: u32) -> ShortGuard<'_, Heap<S>> {
        self.heaps[home as usize].lock()
    }

    #[inline(always)]
    fn central(&self, node: NodeId) -> ShortGuard<'_, Heap<S>> {
        self.heap(self.central_home(node))
    }

    pub(crate) fn node_ids(&self) -> impl Iterator<Item = NodeId> + use<S> {
        (0..self.nodes.len() as u16).map(NodeId::new)
    }

    /// The homes of a node: central first, then the shards.
    fn homes(&self, node: NodeId) -> std::ops::Range<u32> {
        self.central_home(node)..self.shard_home(node, self.shards)
    }

    /// All homes with their heaps locked, one after the other.
    fn each_heap(&self) -> impl Iterator<Item = (u32, ShortGuard<'_, Heap<S>>)> {
        self.node_ids()
            .flat_map(move |node| self.homes(node).map(move |home| (home, self.heap(home))))
    }

    /// The heap that serves the calling thread, and the size of the block that a request gets there.
    #[inline(always)]
    pub(crate) fn at_hand(&self, node: NodeId, requested: u64) -> (u32, u64) {
        let central = self.central_home(node);
        let (home, granule) = match self.is_small(requested) {
            true => (central + 1 + (shard_hint::get() & (self.shards - 1)) as u32, self.granule),
            false => (central, PIN_ALIGN),
        };
        (home, round_to(requested, granule))
    }

    /// The heap [`at_hand`](SlabStore::at_hand) for a request, unless it is locked now.
    #[inline(always)]
    pub(crate) fn try_enter(&self, home: u32, requested: u64) -> Option<ShortGuard<'_, Heap<S>>> {
        let heap = self.try_heap(home);
        if self.is_small(requested) {
            // Whoever tries again finds the shard unlocked, mostly: the collision is noted here.
            match heap {
                Some(_) => shard_hint::entered(),
                None => _ = shard_hint::collided(),
            }
        }
        heap
    }

    /// A heap, unless it is locked now or there is none of that number.
    #[inline(always)]
    pub(crate) fn try_heap(&self, home: u32) -> Option<ShortGuard<'_, Heap<S>>> {
        self.heaps.get(home as usize)?.try_lock()
    }

    /// A block for `requested` bytes from what the heap of the calling thread has at hand.
    pub(crate) fn take_at_hand(&self, node: NodeId, requested: u64, cut: Cut) -> Option<Served> {
        let bytes = self.round(requested);
        let (home, mut heap) = if self.is_small(requested) {
            self.enter(node)
        } else {
            let home = self.central_home(node);
            (home, self.heap(home))
        };
        let taken = heap.take(bytes, requested, cut)?;
        Some((home, taken))
    }

    /// A block for `requested` bytes from memory that is free already.
    pub(crate) fn take(&self, node: NodeId, requested: u64, cut: Cut) -> Option<Served> {
        let at_hand = self.take_at_hand(node, requested, cut);
        if at_hand.is_some() || !self.is_small(requested) {
            return at_hand;
        }
        let (home, heap) = self.enter(node);
        let bytes = self.round(requested);
        let wish = run_bytes(heap.bytes(), bytes);
        drop(heap);
        let run = self.borrow_run(home, wish, bytes, cut)?;
        Some((home, self.take_from_new_run(home, run, bytes, requested)))
    }

    /// Locks the shard of the calling thread. A thread that often finds it locked moves on to the
    /// next.
    #[inline(always)]
    fn enter(&self, node: NodeId) -> (u32, ShortGuard<'_, Heap<S>>) {
        let home = self.shard_home(node, shard_hint::get() & (self.shards - 1));
        if let Some(heap) = self.try_heap(home) {
            shard_hint::entered();
            return (home, heap);
        }
        let home = self.shard_home(node, shard_hint::collided() & (self.shards - 1));
        (home, self.heap(home))
    }

    /// A run for a shard: as large as wished, or as there is, but no less than `least`.
    #[cold]
    pub(crate) fn borrow_run(&self, home: u32, wish: u64, least: u64, cut: Cut) -> Option<Run> {
        let node = self.node_of(home);
        if home != self.shard_home(node, 0) {
            self.nodes[node.index()].spread.store(true, Ordering::Relaxed);
        }
        let mut central = self.central(node);
        let least = least.next_multiple_of(PIN_ALIGN);
        let bytes = wish.min(central.largest_free()).max(least);
        central.lend(bytes, home, cut).or_else(|| central.lend(least, home, cut))
    }

    #[cold]
    fn take_from_new_run(&self, home: u32, run: Run, bytes: u64, requested: u64) -> Taken {
        let mut heap = self.heap(home);
        heap.add_run(run);
        // The run alone is large enough, and the lock was not released since it came.
        heap.take(bytes, requested, Cut::Freely)
            .expect("a run serves the request that it was borrowed for")
    }

    /// Whether a request that missed should search the shards of other threads before `bytes` more
    /// are pinned for it.
    ///
    /// A search takes the lock of every shard and the free runs of all, so that their threads miss
    /// soon in turn; with many threads that feeds itself. So after each search 1/32 of the node's
    /// memory may be pinned without another one.
    pub(crate) fn may_search(&self, node: NodeId, bytes: u64) -> bool {
        let Node { unsearched, spread, .. } = &self.nodes[node.index()];
        if !spread.load(Ordering::Relaxed) {
            return true;
        }
        let spend = |left: u64| left.checked_sub(bytes);
        if unsearched.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).is_ok() {
            return false;
        }
        unsearched.store(self.bytes(node) / 32, Ordering::Relaxed);
        true
    }

    /// A block for a small request from any shard of the node.
    pub(crate) fn take_from_any_shard(&self, node: NodeId, requested: u64) -> Option<Served> {
        if !self.is_small(requested) {
            return None;
        }
        let bytes = self.round(requested);
        self.homes(node).skip(1).find_map(|home| {
            let taken = self.heap(home).take(bytes, requested, Cut::Freely)?;
            Some((home, taken))
        })
    }

    /// Adds a pinned segment and serves a request from it.
    pub(crate) fn add_and_take(&self, node: NodeId, span: Span, requested: u64) -> Served {
        let bytes = self.round(requested);
        let mut central = self.central(node);
        central.add_span(span);
        if !self.is_small(requested) {
            let taken = central.take(bytes, requested, Cut::Freely);
            let taken = taken.expect("a segment serves the request that it was pinned for");
            return (self.central_home(node), taken);
        }
        let home = self.shard_home(node, shard_hint::get() & (self.shards - 1));
        let run = central
            .lend(run_bytes(0, bytes).min(span.bytes), home, Cut::Freely)
            .expect("a segment is no smaller than its first run");
        drop(central);
        (home, self.take_from_new_run(home, run, bytes, requested))
    }

    /// Adds a pinned segment as one block that leaves when it is freed.
    pub(crate) fn add_uncached(&self, node: NodeId, span: Span, requested: u64) -> Served {
        (self.central_home(node), self.central(node).add_uncached(span, requested))
    }

    /// Adds a pinned segment as free memory.
    pub(crate) fn restore(&self, node: NodeId, span: Span) {
        self.central(node).add_span(span);
    }

    /// Gives runs back that a shard does not need. Call after a block was released there.
    pub(crate) fn return_surplus(&self, home: u32) {
        let node = self.node_of(home);
        let runs = self.heap(home).remove_idle_beyond(SPARE_RUNS_KEPT);
        let mut central = self.central(node);
        runs.into_iter().for_each(|run| central.reclaim(run));
    }

    /// Gathers all free memory of a node in its central heap, merged.
    pub(crate) fn collect(&self, node: NodeId) {
        for home in self.homes(node).skip(1) {
            let runs = {
                let mut heap = self.heap(home);
                heap.consolidate();
                heap.remove_idle_beyond(0)
            };
            if !runs.is_empty() {
                let mut central = self.central(node);
                runs.into_iter().for_each(|run| central.reclaim(run));
            }
        }
        self.central(node).consolidate();
    }

    /// The segments of a node that are wholly free, the smallest first.
    /// [`collect`](SlabStore::collect) first to see all.
    pub(crate) fn idle_segments(&self, node: NodeId) -> Vec<Idle> {
        self.central(node).idle()
    }

    /// Takes a segment out if it is still wholly free, and was all the time.
    pub(crate) fn remove_idle(&self, node: NodeId, idle: Idle) -> bool {
        self.central(node).remove_idle(idle).is_some()
    }

    /// How many free bytes a node has beyond the bound, merged as far as they can be.
    pub(crate) fn excess(&self, node: NodeId) -> u64 {
        let mut central = self.central(node);
        let excess = central.free_bytes().saturating_sub(self.cached_bytes_max);
        if excess > 0 {
            central.consolidate();
        }
        excess
    }

    /// The live allocation that holds `addr`, and where it starts.
    pub(crate) fn find(&self, node: NodeId, addr: Addr) -> Option<(u32, BlockId, Addr)> {
        let mut home = self.central_home(node);
        loop {
            let found = self.heap(home).find(addr)?;
            match found {
                Found::Live { id, start } => return Some((home, id, start)),
                Found::Lent { to } => home = to,
            }
        }
    }

    /// Announces that the calling thread pins memory for a node; whether another does so already.
    pub(crate) fn begin_growth(&self, node: NodeId) -> bool {
        self.nodes[node.index()].growing.fetch_add(1, Ordering::Relaxed) > 0
    }

    /// Ends what [`begin_growth`](SlabStore::begin_growth) announced.
    pub(crate) fn end_growth(&self, node: NodeId) {
        self.nodes[node.index()].growing.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn each_ledger(&self, mut visit: impl FnMut(&mut Ledger)) {
        for (_, mut heap) in self.each_heap() {
            visit(heap.stats());
        }
    }

    /// Free bytes of a node, and of the largest block among them.
    pub(crate) fn free_bytes(&self, node: NodeId) -> (u64, u64) {
        let (mut total, mut largest) = (0, 0);
        for home in self.homes(node) {
            let heap = self.heap(home);
            total += heap.free_bytes();
            largest = largest.max(heap.largest_free());
        }
        (total, largest)
    }

    /// Bytes of all segments of a node.
    pub(crate) fn bytes(&self, node: NodeId) -> u64 {
        self.central(node).bytes()
    }
}

/// The next multiple of a power of two.
#[inline(always)]
fn round_to(bytes: u64, power: u64) -> u64 {
    (bytes + power - 1) & !(power - 1)
}

/// How much a shard that holds `held` bytes should borrow for a request of `bytes`: a share of what
/// it has, so that runs become few as it grows, and room for some more of the kind.
fn run_bytes(held: u64, bytes: u64) -> u64 {
    let run = (held / 16).clamp(RUN_BYTES_MIN, RUN_BYTES_MAX).max(4 * bytes);
    run.next_multiple_of(PIN_ALIGN)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Also where nobody waits for the lock.
    #[test]
    fn a_shard_that_is_found_locked_again_and_again_is_left() {
        let store = SlabStore::<u32>::new(&HostConfig::ours(), 1, 4);
        let node = NodeId::new(0);
        let (home, _) = store.at_hand(node, 4096);
        let _held = store.heap(home);
        let left = (0..8).any(|_| {
            assert!(store.try_enter(home, 4096).is_none());
            store.at_hand(node, 4096).0 != home
        });
        assert!(left);
    }

    #[test]
    fn shards_are_searched_once_for_a_share_of_the_memory() {
        const MIB: u64 = 1 << 20;
        let node = NodeId::new(0);
        let store = SlabStore::<u32>::new(&HostConfig::ours(), 1, 4);
        store.restore(node, Span { base: Addr::new(1 << 40), bytes: 128 * MIB });
        assert!((0..9).all(|_| store.may_search(node, MIB)), "one shard has no other threads");
        let run = store.borrow_run(store.shard_home(node, 1), MIB, 4096, Cut::Freely);
        assert!(run.is_some());
        assert!(store.may_search(node, MIB));
        assert!((0..4).all(|_| !store.may_search(node, MIB)), "4 of 128 MiB are free to pin");
        assert!(store.may_search(node, MIB));
        assert!(!store.may_search(node, 3 * MIB) && store.may_search(node, 3 * MIB));
    }
}
