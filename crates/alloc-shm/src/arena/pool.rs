//! Arenas made as they are needed.

use crate::arena::{Arena, ArenaStats, Block};
use crate::error::{Error, Result};
use parking_lot::Mutex;

/// How an [`ArenaPool`] grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolConfig {
    /// Bytes of each arena. A larger request gets an arena of its own.
    pub arena_bytes: u64,
    /// Arenas at most: each costs one descriptor here, and one mapping here and in every peer.
    pub arenas_max: usize,
}

/// Blocks from as many arenas as it takes, up to a limit.
#[derive(Debug)]
pub struct ArenaPool {
    config: PoolConfig,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The one allocated from last comes last.
    arenas: Vec<Arena>,
    /// Arenas that some thread is making, outside of the lock.
    in_the_making: usize,
}

impl ArenaPool {
    /// An empty pool: the first allocation makes the first arena.
    pub fn new(config: PoolConfig) -> Self {
        ArenaPool { config, state: Mutex::default() }
    }

    /// A block of `bytes` on a cache line, from an arena that has room or from a new one.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] if every arena is full and there may be no more; otherwise as
    /// [`Arena::new`].
    pub fn allocate(&self, bytes: u64) -> Result<Block> {
        if let Some(block) = self.allocate_from_existing(bytes) {
            return Ok(block);
        }
        self.announce_new_arena()?;
        // Room for the block's header and its rounding.
        let arena = Arena::new(self.config.arena_bytes.max(bytes.saturating_add(128)));
        let mut state = self.state.lock();
        state.in_the_making -= 1;
        let arena = arena?;
        let block = arena.allocate(bytes);
        state.arenas.push(arena);
        block
    }

    fn allocate_from_existing(&self, bytes: u64) -> Option<Block> {
        let mut state = self.state.lock();
        let found = state
            .arenas
            .iter()
            .enumerate()
            .rev()
            .find_map(|(index, arena)| arena.allocate(bytes).ok().map(|block| (index, block)));
        let (index, block) = found?;
        let last = state.arenas.len() - 1;
        state.arenas.swap(index, last);
        Some(block)
    }

    fn announce_new_arena(&self) -> Result<()> {
        let mut state = self.state.lock();
        if state.arenas.len() + state.in_the_making >= self.config.arenas_max {
            return Err(Error::Limit { what: "arenas", limit: self.config.arenas_max as u64 });
        }
        state.in_the_making += 1;
        Ok(())
    }

    /// Gives back arenas that hold no block. Peers unmap them when they next hear from here.
    pub fn trim(&self) {
        self.state.lock().arenas.retain(|arena| arena.stats().live_blocks > 0);
    }

    /// Arenas now.
    pub fn arenas(&self) -> usize {
        self.state.lock().arenas.len()
    }

    /// The counters of all arenas together; the largest free range is that of the best arena.
    pub fn stats(&self) -> ArenaStats {
        let state = self.state.lock();
        state.arenas.iter().map(Arena::stats).fold(ArenaStats::default(), |sum, one| ArenaStats {
            live_blocks: sum.live_blocks + one.live_blocks,
            live_bytes: sum.live_bytes + one.live_bytes,
            free_bytes: sum.free_bytes + one.free_bytes,
            free_ranges: sum.free_ranges + one.free_ranges,
            largest_free: sum.largest_free.max(one.largest_free),
        })
    }
}
