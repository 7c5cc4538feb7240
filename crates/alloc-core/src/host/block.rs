//! The blocks of one container (a bucket or a heap) and their states.

use super::home::Taken;
use crate::units::Addr;
use smallvec::SmallVec;

/// No block.
pub(crate) const NONE: u32 = u32::MAX;

/// One allocation: where its block is in the table, and which of the many that block has served.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct BlockId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// What a block is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// An unused slot of the table.
    Vacant,
    /// Free, and in its container's index.
    Free,
    /// Free, but kept whole for the next request of its size.
    Recent,
    /// Held by a client.
    Live,
    /// Freed by the client; so many conditions must still come true before it is reused.
    Draining {
        /// At least 1.
        pending: u32,
    },
    /// Lent to a shard, which cuts blocks from it.
    Lent {
        /// The home of that shard.
        to: u32,
    },
}

/// A reason why a freed block may not be reused yet, noted while it is live.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Use<S> {
    /// Work on this stream may touch it: wait for an event.
    Stream(S),
    /// Work captured from this stream may touch it whenever the graph runs: wait until the private
    /// pool of that slot is released, then for an event.
    Graph(u32, S),
}

/// The uses of one block. Mostly none, or one.
pub(crate) type Uses<S> = SmallVec<[Use<S>; 1]>;

/// A block. `requested` is what the client asked for, `bytes` what it got.
#[derive(Debug)]
pub(crate) struct Block<S> {
    pub(crate) addr: Addr,
    pub(crate) bytes: u64,
    pub(crate) requested: u64,
    /// Of a free block that is a whole span: which time that is.
    pub(crate) idle_stamp: u64,
    /// The blocks before and after it in its span; `NONE` at the ends.
    pub(crate) prev: u32,
    pub(crate) next: u32,
    pub(crate) generation: u32,
    /// What the span's owner gave with it; the same for all blocks of a span.
    pub(crate) origin: u32,
    pub(crate) state: State,
    /// Its memory leaves the container when it is freed.
    pub(crate) uncached: bool,
    pub(crate) uses: Uses<S>,
}

impl<S> Block<S> {
    /// Hands it to a client; it is free, and `index` is its slot.
    #[inline(always)]
    pub(crate) fn start(&mut self, index: u32, requested: u64) -> Taken {
        debug_assert!(matches!(self.state, State::Free | State::Recent), "{:?}", self.state);
        self.state = State::Live;
        self.requested = requested;
        self.generation = self.generation.wrapping_add(1);
        let id = BlockId { index, generation: self.generation };
        Taken { id, addr: self.addr, bytes: self.bytes }
    }

    /// Whether it is all of its span.
    #[inline(always)]
    pub(crate) fn is_whole_span(&self) -> bool {
        self.prev == NONE && self.next == NONE
    }
}

/// A slab of blocks. Slots are reused; generations only grow, so a stale id never resolves.
#[derive(Debug)]
pub(crate) struct BlockTable<S> {
    blocks: Vec<Block<S>>,
    vacant: Vec<u32>,
}

impl<S> Default for BlockTable<S> {
    fn default() -> Self {
        BlockTable { blocks: Vec::new(), vacant: Vec::new() }
    }
}

impl<S: PartialEq> BlockTable<S> {
    /// Adds a free block without neighbours.
    pub(crate) fn insert(&mut self, addr: Addr, bytes: u64) -> u32 {
        let generation = match self.vacant.last() {
            Some(&index) => self.blocks[index as usize].generation,
            None => 0,
        };
        let block = Block {
            addr,
            bytes,
            requested: 0,
            idle_stamp: 0,
            prev: NONE,
            next: NONE,
            generation,
            origin: NONE,
            state: State::Free,
            uncached: false,
            uses: Uses::new(),
        };
        match self.vacant.pop() {
            Some(index) => {
                self.blocks[index as usize] = block;
                index
            }
            None => {
                let index = u32::try_from(self.blocks.len()).unwrap_or(NONE);
                assert!(index != NONE, "one container holds fewer than 2^32 blocks");
                self.blocks.push(block);
                index
            }
        }
    }

    /// Forgets a block that is free.
    pub(crate) fn remove(&mut self, index: u32) {
        let block = &mut self.blocks[index as usize];
        debug_assert!(matches!(block.state, State::Free | State::Recent), "{:?}", block.state);
        block.state = State::Vacant;
        self.vacant.push(index);
    }

    /// Hands a free block to a client.
    #[inline]
    pub(crate) fn start(&mut self, index: u32, requested: u64) -> Taken {
        self[index].start(index, requested)
    }

    #[inline(always)]
    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut Block<S>> {
        self.blocks.get_mut(index as usize)
    }

    pub(crate) fn get(&self, index: u32) -> Option<&Block<S>> {
        self.blocks.get(index as usize)
    }

    /// The block of an allocation that its client still holds.
    #[inline(always)]
    pub(crate) fn live(&mut self, id: BlockId) -> Option<&mut Block<S>> {
        self.blocks
            .get_mut(id.index as usize)
            .filter(|block| block.generation == id.generation && block.state == State::Live)
    }

    /// Notes a use of a live block, once. False if the id is stale.
    pub(crate) fn note_use(&mut self, id: BlockId, used: Use<S>) -> bool {
        let Some(block) = self.live(id) else { return false };
        if !block.uses.contains(&used) {
            block.uses.push(used);
        }
        true
    }

    /// Counts one condition of a draining block as come true; whether it was the last.
    ///
    /// # Panics
    /// If the block is not draining: some event was counted twice.
    pub(crate) fn count_down(&mut self, id: BlockId) -> bool {
        let block = &mut self.blocks[id.index as usize];
        match &mut block.state {
            State::Draining { pending } if block.generation == id.generation => {
                *pending -= 1;
                *pending == 0
            }
            state => panic!("H5: an event was reached for a block that is {state:?}"),
        }
    }

    /// The id of the allocation that a block serves now, if it is live.
    pub(crate) fn live_id(&self, index: u32) -> Option<BlockId> {
        let block = &self.blocks[index as usize];
        (block.state == State::Live).then_some(BlockId { index, generation: block.generation })
    }

    /// All blocks with their slots, vacant ones left out.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Block<S>)> {
        (0..).zip(&self.blocks).filter(|(_, block)| block.state != State::Vacant)
    }
}

impl<S> std::ops::Index<u32> for BlockTable<S> {
    type Output = Block<S>;
    #[inline(always)]
    fn index(&self, index: u32) -> &Block<S> {
        &self.blocks[index as usize]
    }
}

impl<S> std::ops::IndexMut<u32> for BlockTable<S> {
    #[inline(always)]
    fn index_mut(&mut self, index: u32) -> &mut Block<S> {
        &mut self.blocks[index as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_id_never_resolves() {
        let mut table = BlockTable::<u32>::default();
        let index = table.insert(Addr::new(64), 64);
        let first = table.start(index, 10).id;
        assert!(table.live(first).is_some());
        table[index].state = State::Free;
        assert!(table.live(first).is_none(), "freed");
        let second = table.start(index, 10).id;
        assert!(table.live(first).is_none(), "served again");
        table[index].state = State::Free;
        table.remove(index);
        assert_eq!(table.insert(Addr::new(128), 64), index, "the slot is used again");
        let third = table.start(index, 10).id;
        assert!(table.live(second).is_none() && table.live(third).is_some());
    }

    #[test]
    fn a_use_is_noted_once_per_stream() {
        let mut table = BlockTable::<u32>::default();
        let index = table.insert(Addr::new(64), 64);
        let id = table.start(index, 10).id;
        for stream in [1, 2, 1] {
            assert!(table.note_use(id, Use::Stream(stream)));
        }
        assert_eq!(table[index].uses.as_slice(), [Use::Stream(1), Use::Stream(2)]);
    }

    #[test]
    #[should_panic(expected = "H5")]
    fn an_event_that_is_counted_twice_is_a_bug() {
        let mut table = BlockTable::<u32>::default();
        let index = table.insert(Addr::new(64), 64);
        let id = table.start(index, 10).id;
        table[index].state = State::Draining { pending: 1 };
        assert!(table.count_down(id));
        table[index].state = State::Free;
        table.count_down(id);
    }
}
