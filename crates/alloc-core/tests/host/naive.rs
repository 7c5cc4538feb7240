//! The rules of both policies, written down as plainly as possible: lists, and searches through all
//! of them. No locks, no indices, no totals.

use std::collections::{BTreeMap, VecDeque};

pub(crate) type BlockNo = usize;

/// What a model needs to know about the outside: where memory was pinned, and which queued work of
/// which stream is done.
pub(crate) trait World {
    /// Pins memory; its address.
    fn pin(&mut self, bytes: u64) -> u64;
    fn unpin(&mut self, addr: u64);
    /// How much work was queued on a stream, and how much of it is done.
    fn queued(&self, stream: usize) -> u64;
    fn done(&self, stream: usize) -> u64;
}

/// A block that a client holds, or that drains.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    pub(crate) small: bool,
    streams: Vec<usize>,
    /// Streams whose event is still to be reached; `None` while the client holds it.
    pending: Option<usize>,
}

/// Blocks that wait for the same event: after so much work of the stream.
#[derive(Debug)]
struct Waiting {
    stream: usize,
    after: u64,
    blocks: Vec<BlockNo>,
}

/// What both policies share.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    pub(crate) all: BTreeMap<BlockNo, Block>,
    next: BlockNo,
    queue: VecDeque<Waiting>,
}

impl Blocks {
    fn add(&mut self, addr: u64, bytes: u64, small: bool) -> BlockNo {
        let block = Block { addr, bytes, small, streams: Vec::new(), pending: None };
        self.all.insert(self.next, block);
        self.next += 1;
        self.next - 1
    }

    pub(crate) fn note_use(&mut self, block: BlockNo, stream: usize) {
        let streams = &mut self.all.get_mut(&block).expect("held").streams;
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }

    pub(crate) fn active_bytes(&self) -> u64 {
        self.all.values().map(|block| block.bytes).sum()
    }

    pub(crate) fn draining_bytes(&self) -> u64 {
        let draining = self.all.values().filter(|block| block.pending.is_some());
        draining.map(|block| block.bytes).sum()
    }

    /// Visits `limit` events, oldest first; the blocks that are free then, in order. What is not
    /// reached goes to the end of the queue.
    fn reached(&mut self, world: &impl World, limit: usize) -> Vec<Block> {
        let mut free = Vec::new();
        for _ in 0..limit.min(self.queue.len()) {
            let waiting = self.queue.pop_front().expect("counted");
            if world.done(waiting.stream) < waiting.after {
                self.queue.push_back(waiting);
                continue;
            }
            for no in waiting.blocks {
                let block = self.all.get_mut(&no).expect("draining");
                let pending = block.pending.as_mut().expect("draining");
                *pending -= 1;
                if *pending == 0 {
                    free.extend(self.all.remove(&no));
                }
            }
        }
        free
    }
}

/// Policy `pytorch` with its defaults.
#[derive(Debug, Default)]
pub(crate) struct Classes {
    pub(crate) blocks: Blocks,
    /// By size: addresses of free blocks, the youngest last.
    free: BTreeMap<u64, Vec<u64>>,
}

impl Classes {
    pub(crate) fn allocate(&mut self, world: &mut impl World, bytes: u64) -> BlockNo {
        self.process(world);
        let bytes = bytes.next_power_of_two();
        let cached = self.free.entry(bytes).or_default().pop();
        let addr = cached.unwrap_or_else(|| world.pin(bytes));
        self.blocks.add(addr, bytes, false)
    }

    pub(crate) fn free(&mut self, world: &mut impl World, no: BlockNo) {
        let block = self.blocks.all.get_mut(&no).expect("held");
        let streams = std::mem::take(&mut block.streams);
        if streams.is_empty() {
            let block = self.blocks.all.remove(&no).expect("held");
            self.put_back(block);
            return;
        }
        block.pending = Some(streams.len());
        for stream in streams {
            let after = world.queued(stream);
            self.blocks.queue.push_back(Waiting { stream, after, blocks: vec![no] });
        }
    }

    fn put_back(&mut self, block: Block) {
        self.free.entry(block.bytes).or_default().push(block.addr);
    }

    pub(crate) fn process(&mut self, world: &mut impl World) {
        for block in self.blocks.reached(world, usize::MAX) {
            self.put_back(block);
        }
    }

    pub(crate) fn empty(&mut self, world: &mut impl World) {
        self.process(world);
        for addr in std::mem::take(&mut self.free).into_values().flatten() {
            world.unpin(addr);
        }
    }
}

/// One range of a heap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    /// Free, but not merged; the number says how long.
    Recent(u64),
    Used,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    addr: u64,
    bytes: u64,
    span: u64,
    state: State,
}

/// A heap: all its pieces by address.
#[derive(Debug)]
struct Heap {
    granule: u64,
    pieces: Vec<Piece>,
    clock: u64,
}

impl Heap {
    fn new(granule: u64) -> Self {
        Heap { granule, pieces: Vec::new(), clock: 0 }
    }

    fn add(&mut self, addr: u64, bytes: u64) {
        self.pieces.push(Piece { addr, bytes, span: addr, state: State::Free });
        self.pieces.sort_by_key(|piece| piece.addr);
    }

    fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }

    fn free_bytes(&self) -> u64 {
        let free = self.pieces.iter().filter(|piece| piece.state != State::Used);
        free.map(|piece| piece.bytes).sum()
    }

    fn largest(&self) -> u64 {
        let free = self.pieces.iter().filter(|piece| piece.state == State::Free);
        free.map(|piece| piece.bytes).max().unwrap_or(0)
    }

    fn at(&self, addr: u64) -> usize {
        self.pieces.iter().position(|piece| piece.addr == addr).expect("a piece starts there")
    }

    /// A piece for `bytes`: address and length.
    fn take(&mut self, bytes: u64, recent_too: bool, sparing: bool) -> Option<(u64, u64)> {
        let bytes = bytes.next_multiple_of(self.granule);
        let slack = bytes / 64;
        let age = |piece: &Piece| match piece.state {
            State::Recent(age) if piece.bytes >= bytes && piece.bytes - bytes <= slack => Some(age),
            _ => None,
        };
        let recent = (0..self.pieces.len()).filter(|_| recent_too);
        let youngest = recent.filter_map(|i| Some((age(&self.pieces[i])?, i))).max();
        if let Some((_, i)) = youngest {
            self.pieces[i].state = State::Used;
            return Some((self.pieces[i].addr, self.pieces[i].bytes));
        }
        let idle_bytes: u64 = (0..self.pieces.len())
            .filter(|&i| self.pieces[i].state != State::Used && self.whole(i))
            .map(|i| self.pieces[i].bytes)
            .sum();
        let total = self.bytes();
        let spared = |i: usize| {
            let span = self.pieces[i].bytes;
            let large = span > total / 32 && bytes < span / 4;
            sparing && idle_bytes <= total / 4 && large && self.whole(i)
        };
        let fits = |piece: &Piece| piece.state == State::Free && piece.bytes >= bytes;
        let (_, _, i) = (0..self.pieces.len())
            .filter(|&i| fits(&self.pieces[i]) && !spared(i))
            .map(|i| (self.pieces[i].bytes, self.pieces[i].addr, i))
            .min()?;
        let piece = self.pieces[i];
        self.pieces[i].state = State::Used;
        if piece.bytes - bytes > slack {
            self.pieces[i].bytes = bytes;
            let rest = Piece { addr: piece.addr + bytes, bytes: piece.bytes - bytes, ..piece };
            self.pieces.insert(i + 1, rest);
        }
        Some((self.pieces[i].addr, self.pieces[i].bytes))
    }

    fn free(&mut self, addr: u64) {
        let recent = |piece: &Piece| match piece.state {
            State::Recent(age) => Some((age, piece.addr)),
            _ => None,
        };
        let kept: Vec<_> = self.pieces.iter().filter_map(recent).collect();
        self.clock += 1;
        let i = self.at(addr);
        self.pieces[i].state = State::Recent(self.clock);
        if kept.len() == 8 {
            let (_, oldest) = kept.into_iter().min().expect("8");
            self.merge(oldest);
        }
    }

    fn merge(&mut self, addr: u64) {
        let mut i = self.at(addr);
        self.pieces[i].state = State::Free;
        let joins = |a: &Piece, b: &Piece| {
            a.span == b.span && a.state == State::Free && b.state == State::Free
        };
        if i > 0 && joins(&self.pieces[i - 1], &self.pieces[i]) {
            self.pieces[i - 1].bytes += self.pieces[i].bytes;
            self.pieces.remove(i);
            i -= 1;
        }
        if i + 1 < self.pieces.len() && joins(&self.pieces[i], &self.pieces[i + 1]) {
            self.pieces[i].bytes += self.pieces[i + 1].bytes;
            self.pieces.remove(i + 1);
        }
    }

    fn merge_all(&mut self) {
        let recent = |piece: &&Piece| matches!(piece.state, State::Recent(_));
        while let Some(addr) = self.pieces.iter().find(recent).map(|piece| piece.addr) {
            self.merge(addr);
        }
    }

    fn whole(&self, i: usize) -> bool {
        self.pieces.iter().filter(|piece| piece.span == self.pieces[i].span).count() == 1
    }

    fn idle_count(&self) -> usize {
        (0..self.pieces.len())
            .filter(|&i| self.pieces[i].state != State::Used && self.whole(i))
            .count()
    }

    /// Wholly free spans, the smallest first.
    fn idle(&mut self) -> Vec<(u64, u64)> {
        self.merge_all();
        let mut idle: Vec<_> = (0..self.pieces.len())
            .filter(|&i| self.pieces[i].state == State::Free && self.whole(i))
            .map(|i| (self.pieces[i].bytes, self.pieces[i].addr))
            .collect();
        idle.sort_unstable();
        idle
    }

    fn remove(&mut self, addr: u64) {
        let i = self.at(addr);
        self.pieces.remove(i);
    }
}

/// The settings of policy `ours` that the model knows.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) granule: u64,
    pub(crate) small_max: u64,
    pub(crate) growth_min: u64,
    pub(crate) growth_max: u64,
    pub(crate) batch_blocks: usize,
    pub(crate) batch_bytes: u64,
    pub(crate) draining_max: u64,
    /// Whether events for fewer than eight blocks matter.
    pub(crate) gathers: bool,
    pub(crate) cached_max: u64,
}

/// Policy `ours`: one node, one thread.
#[derive(Debug)]
pub(crate) struct Slabs {
    pub(crate) blocks: Blocks,
    rules: Rules,
    central: Heap,
    shard: Heap,
    /// Freed blocks without an event, by stream.
    open: BTreeMap<usize, Vec<BlockNo>>,
    /// Events for few blocks that no memory was pinned for yet.
    events: u64,
}

impl Slabs {
    pub(crate) fn new(rules: Rules) -> Self {
        Slabs {
            blocks: Blocks::default(),
            central: Heap::new(4096),
            shard: Heap::new(rules.granule),
            open: BTreeMap::new(),
            events: 0,
            rules,
        }
    }

    pub(crate) fn allocate(&mut self, world: &mut impl World, bytes: u64) -> BlockNo {
        let taken = self
            .take(bytes)
            .or_else(|| {
                if self.leaves_gathering(bytes) {
                    return None;
                }
                self.reach(world, usize::MAX);
                self.take(bytes).or_else(|| {
                    let waits = self.open.values().any(|open| !open.is_empty());
                    let much = self.blocks.draining_bytes() >= self.rules.draining_max;
                    if waits && (much || bytes > self.rules.small_max) {
                        self.process(world);
                    }
                    self.take(bytes)
                })
            })
            .or_else(|| {
                self.collect();
                self.take(bytes)
            });
        let (addr, block) = taken.unwrap_or_else(|| self.grow_and_take(world, bytes));
        self.blocks.add(addr, block, bytes <= self.rules.small_max)
    }

    /// Events for few blocks have cost as much as the memory for one more does.
    fn should_gather(&self, bytes: u64) -> bool {
        self.rules.gathers && self.events > bytes.div_ceil(64 << 10)
    }

    fn leaves_gathering(&mut self, bytes: u64) -> bool {
        let waits = (1..8 * bytes).contains(&self.blocks.draining_bytes());
        let leaves = bytes > self.rules.small_max && waits && self.should_gather(bytes);
        if leaves {
            self.events -= bytes.div_ceil(64 << 10);
        }
        leaves
    }

    fn take(&mut self, bytes: u64) -> Option<(u64, u64)> {
        if bytes > self.rules.small_max {
            return self.central.take(bytes, true, true);
        }
        self.shard.take(bytes, true, false).or_else(|| {
            let rounded = bytes.next_multiple_of(self.rules.granule);
            let least = rounded.next_multiple_of(4096);
            let wish = (self.shard.bytes() / 16).clamp(1 << 20, 4 << 20).max(4 * rounded);
            let run = wish.next_multiple_of(4096).min(self.central.largest()).max(least);
            let central = &mut self.central;
            let lent = central.take(run, false, true).or_else(|| central.take(least, false, true));
            let (addr, run) = lent?;
            self.shard.add(addr, run);
            self.shard.take(bytes, true, false)
        })
    }

    fn collect(&mut self) {
        for (_, addr) in self.shard.idle() {
            self.shard.remove(addr);
            self.central.merge(addr);
        }
        self.central.merge_all();
    }

    fn grow_and_take(&mut self, world: &mut impl World, bytes: u64) -> (u64, u64) {
        let Rules { growth_min, growth_max, small_max, granule, .. } = self.rules;
        let granule = if bytes <= small_max { granule } else { 4096 };
        let exact = bytes.next_multiple_of(granule).max(growth_min);
        let huge = exact.next_multiple_of(2 << 20);
        let exact = if huge - exact <= exact / 64 { huge } else { exact.next_multiple_of(4096) };
        let pinned = self.central.bytes();
        let share = (pinned / 256).clamp(growth_min, growth_max);
        let block = bytes.next_multiple_of(4096);
        let blocks = block * ((growth_max / 2).min(pinned / 16) / block).min(8);
        let growth = exact.max(share - share % growth_min).max(blocks);
        let mut replaced = 0;
        for (bytes, addr) in self.central.idle().into_iter().rev() {
            if bytes < exact && replaced < growth {
                self.central.remove(addr);
                world.unpin(addr);
                replaced += bytes;
            }
        }
        let segment = growth.max(replaced);
        let addr = world.pin(segment);
        self.central.add(addr, segment);
        if bytes > small_max {
            return self.central.take(bytes, true, false).expect("the new segment");
        }
        let run = (1 << 20).max(4 * bytes.next_multiple_of(granule));
        let run = self.central.take(run.next_multiple_of(4096).min(segment), false, false);
        let (addr, run) = run.expect("the new segment");
        self.shard.add(addr, run);
        self.shard.take(bytes, true, false).expect("the new run")
    }

    pub(crate) fn free(&mut self, world: &mut impl World, no: BlockNo) {
        let block = self.blocks.all.get_mut(&no).expect("held");
        let streams = std::mem::take(&mut block.streams);
        if streams.is_empty() {
            let block = self.blocks.all.remove(&no).expect("held");
            self.put_back(world, block);
            return;
        }
        block.pending = Some(streams.len());
        for stream in streams {
            let open = self.open.entry(stream).or_default();
            open.push(no);
            let bytes: u64 = open.iter().map(|no| self.blocks.all[no].bytes).sum();
            let many = open.len() >= self.rules.batch_blocks;
            let most = self.rules.batch_bytes.max(self.central.bytes() / 2);
            let freed = self.blocks.all[&no].bytes;
            if many || (bytes >= most && !self.should_gather(freed)) {
                self.flush(world, stream);
                self.reach(world, 2.min(self.blocks.queue.len() - 1));
            }
        }
    }

    fn flush(&mut self, world: &impl World, stream: usize) {
        let blocks = self.open.remove(&stream).unwrap_or_default();
        if !blocks.is_empty() {
            self.events += u64::from(blocks.len() < 8);
            let after = world.queued(stream);
            self.blocks.queue.push_back(Waiting { stream, after, blocks });
        }
    }

    fn reach(&mut self, world: &mut impl World, limit: usize) {
        for block in self.blocks.reached(world, limit) {
            self.put_back(world, block);
        }
    }

    pub(crate) fn process(&mut self, world: &mut impl World) {
        for stream in self.open.keys().copied().collect::<Vec<_>>() {
            self.flush(world, stream);
        }
        self.reach(world, usize::MAX);
    }

    fn put_back(&mut self, world: &mut impl World, block: Block) {
        if block.small {
            self.shard.free(block.addr);
            if self.shard.idle_count() <= 8 {
                return;
            }
            for (_, addr) in self.shard.idle().into_iter().skip(4) {
                self.shard.remove(addr);
                self.central.merge(addr);
            }
        } else {
            self.central.free(block.addr);
        }
        self.give_back_excess(world);
    }

    fn give_back_excess(&mut self, world: &mut impl World) {
        let mut excess = self.central.free_bytes().saturating_sub(self.rules.cached_max);
        if excess == 0 {
            return;
        }
        for (bytes, addr) in self.central.idle().into_iter().rev() {
            if excess == 0 {
                break;
            }
            self.central.remove(addr);
            world.unpin(addr);
            excess = excess.saturating_sub(bytes);
        }
    }

    pub(crate) fn empty(&mut self, world: &mut impl World) {
        self.process(world);
        self.collect();
        for (_, addr) in self.central.idle() {
            self.central.remove(addr);
            world.unpin(addr);
        }
    }
}
