//! Seeded sequences of operations on an allocator.
//!
//! Operations name allocations by a *pick*: a number that is reduced modulo the allocations live at
//! that moment ([`Picks`]). So any part of a sequence is a sequence, and shrinking always works.
//!
//! Each seed draws its own weights (swarm testing): some sequences never free across streams, some
//! do little else, some only know one size.
//!
//! ```
//! use mock_backend::workload::{Op, Shape, Workload};
//! let ops: Vec<Op> = Workload::new(7, Shape { streams: 3, ..Shape::default() }).take(100).collect();
//! assert_eq!(ops, Workload::new(7, Shape { streams: 3, ..Shape::default() }).take(100).collect::<Vec<_>>());
//! ```

use crate::Rng;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// One operation. Streams are indices into the streams of whoever plays it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// Allocate.
    Allocate {
        /// Bytes asked for; may be 0.
        bytes: u64,
        /// The stream.
        stream: usize,
    },
    /// Free a live allocation.
    Free {
        /// Which one.
        pick: u32,
    },
    /// Record a use on a stream and queue work there that touches the allocation.
    Use {
        /// Which one.
        pick: u32,
        /// The stream; may be the allocation's own.
        stream: usize,
    },
    /// Record a use without any work.
    Record {
        /// Which one.
        pick: u32,
        /// The stream.
        stream: usize,
    },
    /// Queue work that touches nothing.
    Busy {
        /// The stream.
        stream: usize,
    },
    /// All work of a stream finishes.
    Pass {
        /// The stream.
        stream: usize,
    },
    /// The host waits for everything.
    Sync,
    /// Give the cache back.
    EmptyCache,
    /// Free everything that is live.
    FreeAll,
    /// Reset peaks, of all devices.
    ResetPeak,
    /// Reset accumulated values, of all devices.
    ResetAccumulated,
    /// Limit every device to this many bytes.
    SetLimit {
        /// The limit; `None` lifts it.
        bytes: Option<u64>,
    },
    /// Switch expandable segments.
    Expandable {
        /// On or off.
        on: bool,
    },
    /// Make a pool.
    NewPool {
        /// A stream of its device.
        stream: usize,
        /// Whether its blocks are whole segments.
        no_split: bool,
        /// Whether it helps out before others run out of memory.
        use_on_oom: bool,
    },
    /// The owner of a pool lets it go.
    DropPool {
        /// Which one.
        pick: u32,
    },
    /// Give the cache of a pool back.
    EmptyPool {
        /// Which one.
        pick: u32,
    },
    /// Open a scope that sends requests to a pool.
    Enter {
        /// Which pool.
        pick: u32,
        /// Requests on this stream, from any thread; without, those of the current thread.
        stream: Option<usize>,
    },
    /// End a scope.
    Leave {
        /// Which one.
        pick: u32,
    },
    /// Take a checkpoint of a pool.
    Checkpoint {
        /// Which pool.
        pick: u32,
    },
    /// Restore a checkpoint.
    Restore {
        /// Which one.
        pick: u32,
    },
    /// Forget a checkpoint.
    Forget {
        /// Which one.
        pick: u32,
    },
}

/// Bounds of a workload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Number of streams.
    pub streams: usize,
    /// Largest request in bytes; 64 MiB by default.
    pub bytes_max: u64,
    /// About how many allocations are live after a while.
    pub live: u64,
    /// Limits to choose from; none by default.
    pub limits: Option<(u64, u64)>,
    /// Whether expandable segments are switched now and then.
    pub toggles: bool,
    /// Whether there are private pools.
    pub pools: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Shape {
            streams: 3,
            bytes_max: 64 * MIB,
            live: 100,
            limits: None,
            toggles: false,
            pools: false,
        }
    }
}

/// How often each kind of operation comes, relative to the others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weights {
    pub(crate) sizes: [u64; 7],
    /// Sizes that come again and again, as in a training loop.
    pub(crate) favourites: [u64; 4],
    pub(crate) free: u64,
    pub(crate) uses: u64,
    pub(crate) record: u64,
    pub(crate) busy: u64,
    pub(crate) pass: u64,
    pub(crate) sync: u64,
    pub(crate) empty: u64,
    pub(crate) free_all: u64,
    pub(crate) reset: u64,
    pub(crate) limit: u64,
    pub(crate) toggle: u64,
    pub(crate) new_pool: u64,
    pub(crate) drop_pool: u64,
    pub(crate) empty_pool: u64,
    pub(crate) enter: u64,
    pub(crate) leave: u64,
    pub(crate) checkpoint: u64,
    pub(crate) restore: u64,
    pub(crate) forget: u64,
}

impl Weights {
    /// Draws weights; each kind may be absent, rare or common.
    pub(crate) fn draw(rng: &mut Rng, shape: &Shape) -> Self {
        let mut swarm = |usual: u64| match rng.below(6) {
            0 => 0,
            1 | 2 => usual.div_ceil(4),
            3 | 4 => usual,
            _ => usual * 4,
        };
        let many = u64::from(shape.streams > 1);
        let pools = u64::from(shape.pools);
        let weights = Weights {
            sizes: [33, 25, 25, 15, 6, 1, 40].map(&mut swarm),
            favourites: [0; 4],
            free: swarm(40),
            uses: swarm(30),
            record: swarm(5) * many,
            busy: swarm(8),
            pass: swarm(12),
            sync: swarm(3),
            empty: swarm(2),
            free_all: swarm(1),
            reset: swarm(1),
            limit: swarm(2) * u64::from(shape.limits.is_some()),
            toggle: swarm(2) * u64::from(shape.toggles),
            new_pool: swarm(4) * pools,
            drop_pool: swarm(3) * pools,
            empty_pool: swarm(2) * pools,
            enter: swarm(8) * pools,
            leave: swarm(8) * pools,
            checkpoint: swarm(2) * pools,
            restore: swarm(4) * pools,
            forget: swarm(2) * pools,
        };
        let favourites = [0; 4].map(|_| draw_bytes(rng, &USUAL_SIZES, &weights.favourites, shape));
        // Something must be allocated, of some size.
        let nothing = weights.sizes.iter().all(|&weight| weight == 0);
        let sizes = if nothing { USUAL_SIZES } else { weights.sizes };
        Weights { sizes, favourites, ..weights }
    }

    /// The kinds and their weights, allocation first.
    pub(crate) fn kinds(&self) -> [(Kind, u64); 21] {
        [
            (Kind::Allocate, 60),
            (Kind::Free, self.free),
            (Kind::Use, self.uses),
            (Kind::Record, self.record),
            (Kind::Busy, self.busy),
            (Kind::Pass, self.pass),
            (Kind::Sync, self.sync),
            (Kind::EmptyCache, self.empty),
            (Kind::FreeAll, self.free_all),
            (Kind::ResetPeak, self.reset),
            (Kind::ResetAccumulated, self.reset),
            (Kind::SetLimit, self.limit),
            (Kind::Expandable, self.toggle),
            (Kind::NewPool, self.new_pool),
            (Kind::DropPool, self.drop_pool),
            (Kind::EmptyPool, self.empty_pool),
            (Kind::Enter, self.enter),
            (Kind::Leave, self.leave),
            (Kind::Checkpoint, self.checkpoint),
            (Kind::Restore, self.restore),
            (Kind::Forget, self.forget),
        ]
    }
}

/// The kinds of [`Op`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Allocate,
    Free,
    Use,
    Record,
    Busy,
    Pass,
    Sync,
    EmptyCache,
    FreeAll,
    ResetPeak,
    ResetAccumulated,
    SetLimit,
    Expandable,
    NewPool,
    DropPool,
    EmptyPool,
    Enter,
    Leave,
    Checkpoint,
    Restore,
    Forget,
}

/// One of `choices`, by weight; the first if all weigh nothing.
fn weighted<T: Copy>(rng: &mut Rng, choices: &[(T, u64)]) -> T {
    let mut at = rng.below(choices.iter().map(|choice| choice.1).sum());
    for &(value, weight) in choices {
        if at < weight {
            return value;
        }
        at -= weight;
    }
    choices[0].0
}

/// Sizes at which a rule changes: rounding, classes, segments.
pub(crate) const EDGES: [u64; 10] =
    [512, 2 * KIB, MIB, 2 * MIB, 10 * MIB, 12 * MIB, 20 * MIB, 24 * MIB, 32 * MIB, 64 * MIB];

/// Weights of the kinds of sizes if nothing else is drawn: no favourites.
const USUAL_SIZES: [u64; 7] = [33, 25, 25, 15, 6, 1, 0];

/// A size: up to 16 KiB, 1 MiB, 12 MiB, 64 MiB, near an edge, 0, or a
/// favourite.
fn draw_bytes(rng: &mut Rng, weights: &[u64; 7], favourites: &[u64; 4], shape: &Shape) -> u64 {
    const KINDS: [usize; 7] = [0, 1, 2, 3, 4, 5, 6];
    let choices = KINDS.map(|kind| (kind, weights[kind]));
    let bytes = match weighted(rng, &choices) {
        0 => rng.between(1, 16 * KIB),
        1 => rng.between(1, MIB),
        2 => rng.between(1, 12 * MIB),
        3 => rng.between(1, 64 * MIB),
        4 => {
            let edge = EDGES[rng.below(EDGES.len() as u64) as usize];
            (edge + rng.below(3) * 512 + rng.below(3)).saturating_sub(513)
        }
        5 => 0,
        _ => favourites[rng.below(4) as usize],
    };
    bytes.min(shape.bytes_max)
}

/// An endless sequence of operations; an iterator.
#[derive(Clone, Debug)]
pub struct Workload {
    rng: Rng,
    shape: Shape,
    weights: Weights,
    /// About how many are live; exact while no request fails.
    live: u64,
}

impl Workload {
    /// The sequence of this seed.
    pub fn new(seed: u64, shape: Shape) -> Self {
        let mut rng = Rng::new(seed);
        let weights = Weights::draw(&mut rng, &shape);
        Workload { rng, shape, weights, live: 0 }
    }

    fn kind(&mut self) -> Kind {
        // Above the target, every other allocation becomes a free.
        let kind = weighted(&mut self.rng, &self.weights.kinds());
        let full = self.live >= self.shape.live && self.rng.chance(0.6);
        if kind == Kind::Allocate && full { Kind::Free } else { kind }
    }

    fn op(&mut self, kind: Kind) -> Op {
        let rng = &mut self.rng;
        let pick = rng.next_u64() as u32;
        let stream = rng.below(self.shape.streams as u64) as usize;
        match kind {
            Kind::Allocate => {
                let Weights { sizes, favourites, .. } = &self.weights;
                Op::Allocate { bytes: draw_bytes(rng, sizes, favourites, &self.shape), stream }
            }
            Kind::Free => Op::Free { pick },
            Kind::Use => Op::Use { pick, stream },
            Kind::Record => Op::Record { pick, stream },
            Kind::Busy => Op::Busy { stream },
            Kind::Pass => Op::Pass { stream },
            Kind::Sync => Op::Sync,
            Kind::EmptyCache => Op::EmptyCache,
            Kind::FreeAll => Op::FreeAll,
            Kind::ResetPeak => Op::ResetPeak,
            Kind::ResetAccumulated => Op::ResetAccumulated,
            Kind::SetLimit => {
                let limits = self.shape.limits.filter(|_| rng.chance(0.8));
                Op::SetLimit { bytes: limits.map(|(low, high)| rng.between(low, high)) }
            }
            Kind::Expandable => Op::Expandable { on: rng.chance(0.5) },
            Kind::NewPool => {
                Op::NewPool { stream, no_split: rng.chance(0.2), use_on_oom: rng.chance(0.3) }
            }
            Kind::DropPool => Op::DropPool { pick },
            Kind::EmptyPool => Op::EmptyPool { pick },
            Kind::Enter => Op::Enter { pick, stream: rng.chance(0.4).then_some(stream) },
            Kind::Leave => Op::Leave { pick },
            Kind::Checkpoint => Op::Checkpoint { pick },
            Kind::Restore => Op::Restore { pick },
            Kind::Forget => Op::Forget { pick },
        }
    }
}

impl Iterator for Workload {
    type Item = Op;

    fn next(&mut self) -> Option<Op> {
        let kind = self.kind();
        self.live = match kind {
            Kind::Allocate => self.live + 1,
            Kind::Free => self.live.saturating_sub(1),
            Kind::FreeAll => 0,
            _ => self.live,
        };
        Some(self.op(kind))
    }
}

/// Live things that picks choose from.
#[derive(Clone, Debug)]
pub struct Picks<T>(Vec<T>);

impl<T> Default for Picks<T> {
    fn default() -> Self {
        Picks(Vec::new())
    }
}

impl<T> Picks<T> {
    /// Adds one.
    pub fn push(&mut self, value: T) {
        self.0.push(value);
    }

    /// Looks at one; `None` if there are none.
    pub fn get(&self, pick: u32) -> Option<&T> {
        self.0.get(self.index(pick)?)
    }

    /// Takes one out; `None` if there are none.
    pub fn take(&mut self, pick: u32) -> Option<T> {
        self.index(pick).map(|at| self.0.swap_remove(at))
    }

    /// Takes out those for which this is false.
    pub fn retain(&mut self, keep: impl FnMut(&T) -> bool) {
        self.0.retain(keep);
    }

    /// Takes all out.
    pub fn take_all(&mut self) -> Vec<T> {
        std::mem::take(&mut self.0)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn index(&self, pick: u32) -> Option<usize> {
        (pick as usize).checked_rem(self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_replay_differ_and_stay_in_bounds() {
        let limits = Some((MIB, 2 * MIB));
        let shape = Shape { limits, toggles: true, pools: true, ..Shape::default() };
        let ops = |seed| Workload::new(seed, shape).take(2000).collect::<Vec<_>>();
        assert_eq!(ops(3), ops(3));
        assert_ne!(ops(3), ops(4));
        let mut kinds = std::collections::HashSet::new();
        for op in (0..50).flat_map(ops) {
            kinds.insert(std::mem::discriminant(&op));
            match op {
                Op::Allocate { bytes, stream } => {
                    assert!(bytes <= shape.bytes_max && stream < shape.streams);
                }
                Op::SetLimit { bytes: Some(bytes) } => assert!((MIB..=2 * MIB).contains(&bytes)),
                _ => {}
            }
        }
        assert_eq!(kinds.len(), 21, "every kind of operation comes up in some seed");
    }

    #[test]
    fn the_number_of_live_allocations_settles() {
        for seed in 0..20 {
            let (mut live, mut most) = (0u64, 0);
            for op in Workload::new(seed, Shape { live: 50, ..Shape::default() }).take(5000) {
                match op {
                    Op::Allocate { .. } => live += 1,
                    Op::Free { .. } => live = live.saturating_sub(1),
                    Op::FreeAll => live = 0,
                    _ => {}
                }
                most = most.max(live);
            }
            assert!(most < 150, "seed {seed}: {most}");
        }
    }
}
