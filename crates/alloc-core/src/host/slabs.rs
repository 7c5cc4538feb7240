//! Policy `ours`: pinned segments cut into blocks of any size.
//!
//! Every NUMA node has a *central* heap over the pinned segments of that node, and *shards* that
//! borrow runs from it for small blocks. A thread stays with one shard until it finds that shard
//! locked, then moves on: threads that do not collide share the first shard and waste nothing, and
//! threads that do end up apart.
//!
//! No function here holds two locks at once.

use super::backend::{NodeId, PIN_ALIGN};
use super::block::BlockId;
use super::check::{Violation, ensure};
use super::config::HostConfig;
use super::heap::{Found, Heap, Idle};
use super::home::{Released, Span, Taken};
use super::padded::Padded;
use super::stats::Ledger;
use super::store::After;
use crate::sync::{Mutex, MutexGuard};
use crate::units::Addr;
use std::sync::atomic::{AtomicU32, Ordering};

/// Least bytes of a run that a shard borrows.
const RUN_BYTES_MIN: u64 = 1 << 20;
/// Most bytes of a run that a shard borrows, unless a request needs more.
const RUN_BYTES_MAX: u64 = 8 << 20;

type HeapLock<S> = Padded<Mutex<Heap<S>>>;

#[derive(Debug)]
struct Node<S> {
    central: HeapLock<S>,
    shards: Box<[HeapLock<S>]>,
    /// Threads that are pinning memory for this node right now.
    growing: AtomicU32,
}

#[derive(Debug)]
pub(crate) struct SlabStore<S> {
    nodes: Box<[Node<S>]>,
    /// Shards of a node, and its central heap.
    heaps_per_node: u32,
    granule: u64,
    small_bytes_max: u64,
    /// Free bytes that a central heap keeps.
    cached_bytes_max: u64,
}

impl<S: PartialEq> SlabStore<S> {
    /// A store without memory, for `nodes` NUMA nodes.
    pub(crate) fn new(config: &HostConfig, nodes: u16, shards: u16) -> Self {
        let heap = |granule| Padded(Mutex::new(Heap::new(granule)));
        let node = |_| Node {
            central: heap(PIN_ALIGN),
            shards: (0..shards).map(|_| heap(config.granule_bytes)).collect(),
            growing: AtomicU32::new(0),
        };
        SlabStore {
            nodes: (0..nodes).map(node).collect(),
            heaps_per_node: u32::from(shards) + 1,
            granule: config.granule_bytes,
            small_bytes_max: config.small_bytes_max,
            cached_bytes_max: config.cached_bytes_max.unwrap_or(u64::MAX),
        }
    }

    /// The size of the block that a request gets, give or take a little slack.
    pub(crate) fn round(&self, bytes: u64) -> u64 {
        let granule = if self.is_small(bytes) { self.granule } else { PIN_ALIGN };
        bytes.next_multiple_of(granule)
    }

    fn is_small(&self, bytes: u64) -> bool {
        bytes <= self.small_bytes_max
    }

    // Homes are numbered node by node, the central heap first.

    fn central_home(&self, node: NodeId) -> u32 {
        node.index() as u32 * self.heaps_per_node
    }

    fn place(&self, home: u32) -> (&Node<S>, u32) {
        (&self.nodes[(home / self.heaps_per_node) as usize], home % self.heaps_per_node)
    }

    pub(crate) fn node_of(&self, home: u32) -> NodeId {
        NodeId::new((home / self.heaps_per_node) as u16)
    }

    pub(crate) fn is_central(&self, home: u32) -> bool {
        home.is_multiple_of(self.heaps_per_node)
    }

    pub(crate) fn heap(&self, home: u32) -> MutexGuard<'_, Heap<S>> {
        match self.place(home) {
            (node, 0) => node.central.lock(),
            (node, shard) => node.shards[shard as usize - 1].lock(),
        }
    }

    fn central(&self, node: NodeId) -> MutexGuard<'_, Heap<S>> {
        self.nodes[node.index()].central.lock()
    }

    pub(crate) fn node_ids(&self) -> impl Iterator<Item = NodeId> + use<S> {
        (0..self.nodes.len() as u16).map(NodeId::new)
    }

    /// All homes with their heaps locked, one after the other.
    fn each_heap(&self) -> impl Iterator<Item = (u32, MutexGuard<'_, Heap<S>>)> {
        (0..self.nodes.len() as u32 * self.heaps_per_node).map(|home| (home, self.heap(home)))
    }

    /// A block for `requested` bytes from memory that is free already.
    pub(crate) fn take(&self, node: NodeId, requested: u64) -> Option<(u32, Taken)> {
        let bytes = self.round(requested);
        if self.is_small(requested) {
            return self.take_small(node, bytes, requested);
        }
        let taken = self.central(node).take(bytes, requested)?;
        Some((self.central_home(node), taken))
    }

    fn take_small(&self, node: NodeId, bytes: u64, requested: u64) -> Option<(u32, Taken)> {
        let (shard, mut heap) = self.enter(node);
        let home = self.central_home(node) + 1 + shard as u32;
        if let Some(taken) = heap.take(bytes, requested) {
            return Some((home, taken));
        }
        let wish = run_bytes(heap.bytes(), bytes);
        drop(heap);
        let run = self.borrow_run(home, wish, bytes)?;
        Some((home, self.take_from_new_run(home, run, bytes, requested)))
    }

    /// Locks the shard of the calling thread. A thread that finds it locked moves on to the next.
    fn enter(&self, node: NodeId) -> (usize, MutexGuard<'_, Heap<S>>) {
        let shards = &self.nodes[node.index()].shards;
        let shard = shard_hint::get() % shards.len();
        if let Some(heap) = shards[shard].try_lock() {
            return (shard, heap);
        }
        let shard = shard_hint::advance() % shards.len();
        (shard, shards[shard].lock())
    }

    /// A run for a shard: as large as wished, or as there is, but no less than `least`.
    fn borrow_run(&self, home: u32, wish: u64, least: u64) -> Option<Span> {
        let mut central = self.central(self.node_of(home));
        let least = least.next_multiple_of(PIN_ALIGN);
        let bytes = wish.min(central.largest_free()).max(least);
        central.lend(bytes, home)
    }

    fn take_from_new_run(&self, home: u32, run: Span, bytes: u64, requested: u64) -> Taken {
        let mut heap = self.heap(home);
        heap.add_span(run);
        // The run alone is large enough, and the lock was not released since it came.
        heap.take(bytes, requested).expect("a run serves the request that it was borrowed for")
    }

    /// A block for a small request from any shard of the node.
    pub(crate) fn take_from_any_shard(&self, node: NodeId, requested: u64) -> Option<(u32, Taken)> {
        if !self.is_small(requested) {
            return None;
        }
        let bytes = self.round(requested);
        let first = self.central_home(node) + 1;
        (first..first + self.heaps_per_node - 1).find_map(|home| {
            let taken = self.heap(home).take(bytes, requested)?;
            Some((home, taken))
        })
    }

    /// Adds a pinned segment and serves a request from it.
    pub(crate) fn add_and_take(&self, node: NodeId, span: Span, requested: u64) -> (u32, Taken) {
        let bytes = self.round(requested);
        let home = self.central_home(node);
        let mut central = self.central(node);
        central.add_span(span);
        if !self.is_small(requested) {
            let taken = central.take(bytes, requested);
            return (home, taken.expect("a segment serves the request that it was pinned for"));
        }
        let shards = self.heaps_per_node as usize - 1;
        let home = home + 1 + (shard_hint::get() % shards) as u32;
        let run = central
            .lend(run_bytes(0, bytes).min(span.bytes), home)
            .expect("a segment is no smaller than its first run");
        drop(central);
        (home, self.take_from_new_run(home, run, bytes, requested))
    }

    /// Adds a pinned segment as one block that leaves when it is freed.
    pub(crate) fn add_uncached(&self, node: NodeId, span: Span, requested: u64) -> (u32, Taken) {
        (self.central_home(node), self.central(node).add_uncached(span, requested))
    }

    /// Adds a pinned segment as free memory.
    pub(crate) fn restore(&self, node: NodeId, span: Span) {
        self.central(node).add_span(span);
    }

    /// Gives runs back that a shard does not need. Call after a block was released there.
    pub(crate) fn return_surplus(&self, home: u32) {
        let node = self.node_of(home);
        loop {
            let Some(run) = self.heap(home).remove_surplus() else { return };
            self.central(node).reclaim(run.base);
        }
    }

    /// Gathers all free memory of a node in its central heap, merged.
    pub(crate) fn collect(&self, node: NodeId) {
        let first = self.central_home(node) + 1;
        for home in first..first + self.heaps_per_node - 1 {
            let mut heap = self.heap(home);
            heap.consolidate();
            let idle: Vec<_> = heap.idle().map(|idle| idle.span.base).collect();
            for &base in &idle {
                heap.remove_idle(base, None);
            }
            drop(heap);
            let mut central = self.central(node);
            idle.iter().for_each(|&base| central.reclaim(base));
        }
        self.central(node).consolidate();
    }

    /// The segments of a node that are wholly free. [`collect`](SlabStore::collect) first to see all.
    pub(crate) fn idle_segments(&self, node: NodeId) -> Vec<Idle> {
        self.central(node).idle().collect()
    }

    /// Takes a segment out if it is still wholly free, and was all the time.
    pub(crate) fn remove_idle(&self, node: NodeId, idle: Idle) -> bool {
        self.central(node).remove_idle(idle.span.base, Some(idle.stamp)).is_some()
    }

    /// What to do after a block of `heap`, the locked heap of `home`, was released.
    pub(crate) fn after_release(&self, home: u32, heap: &Heap<S>, released: Released) -> After {
        match released {
            Released::Leaves(span) => After::Unpin(span),
            Released::Kept if self.is_central(home) => {
                let over = heap.free_bytes() > self.cached_bytes_max;
                if over { After::Excess } else { After::Nothing }
            }
            Released::Kept if heap.idle_count() > 1 => After::Surplus,
            Released::Kept => After::Nothing,
        }
    }

    /// How many free bytes a node has beyond the bound, merged as far as they can be.
    pub(crate) fn excess(&self, node: NodeId) -> u64 {
        let mut central = self.central(node);
        central.consolidate();
        central.free_bytes().saturating_sub(self.cached_bytes_max)
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
        let first = self.central_home(node);
        let (mut total, mut largest) = (0, 0);
        for home in first..first + self.heaps_per_node {
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

    /// Recomputes everything from the blocks. Appends the segments by node, and the draining blocks
    /// by home.
    pub(crate) fn check(
        &self,
        spans: &mut Vec<(NodeId, Span)>,
        draining: &mut Vec<(u32, BlockId, u32)>,
    ) -> Result<(), Violation> {
        for node in self.node_ids() {
            let (mut lent, mut borrowed) = (Vec::new(), Vec::new());
            let first = self.central_home(node);
            for home in first..first + self.heaps_per_node {
                let sums = self.heap(home).check()?;
                draining.extend(sums.draining.iter().map(|&(id, pending)| (home, id, pending)));
                lent.extend(sums.lent);
                if self.is_central(home) {
                    spans.extend(sums.spans.iter().map(|&span| (node, span)));
                } else {
                    borrowed.extend(sums.spans.iter().map(|&span| (home, span)));
                }
            }
            lent.sort();
            borrowed.sort();
            ensure(lent == borrowed, "H7", || {
                format!("{node} has lent {lent:?}, its shards hold {borrowed:?}")
            })?;
        }
        Ok(())
    }
}

/// How much a shard that holds `held` bytes should borrow for a request of `bytes`: a quarter of
/// what it has, so that runs become few as it grows.
fn run_bytes(held: u64, bytes: u64) -> u64 {
    let run = (held / 4).clamp(RUN_BYTES_MIN, RUN_BYTES_MAX).max(bytes);
    run.next_multiple_of(PIN_ALIGN)
}

/// The shard that a thread last found free, whatever the allocator.
#[cfg(not(loom))]
mod shard_hint {
    use std::cell::Cell;

    thread_local! {
        static HINT: Cell<usize> = const { Cell::new(0) };
    }

    pub(super) fn get() -> usize {
        HINT.get()
    }

    pub(super) fn advance() -> usize {
        HINT.set(HINT.get().wrapping_add(1));
        HINT.get()
    }
}

/// Threads of a model run share one OS thread: a thread-local would leak from one to the other.
#[cfg(loom)]
mod shard_hint {
    pub(super) fn get() -> usize {
        0
    }

    pub(super) fn advance() -> usize {
        1
    }
}
