//! Maps of segments, their blocks and the pages under them, as text and as SVG.

mod picture;
mod text;

use alloc_core::Bytes;

use crate::engine::SegmentView;
use crate::format::golden::{Block, BlockState, Class};

/// A moment of a run, to be drawn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Map {
    /// Heading: what ran, and when the picture was taken.
    pub title: String,
    /// Segments in order of address.
    pub segments: Vec<SegmentView>,
    /// The numbers that the workload gives its streams.
    pub streams: Vec<u32>,
}

impl Map {
    /// Draws the map with characters.
    pub fn to_text(&self) -> String {
        text::render(self)
    }

    /// Draws the map as an SVG file.
    pub fn to_svg(&self) -> String {
        picture::render(self)
    }

    /// Segments that share pool, stream and class.
    fn groups(&self) -> Vec<Group<'_>> {
        let key = |s: &SegmentView| (s.pool, s.stream, s.class == Class::Large);
        let mut sorted: Vec<&SegmentView> = self.segments.iter().collect();
        sorted.sort_by_key(|s| (key(s), s.addr));
        let groups = sorted.chunk_by(|a, b| key(a) == key(b));
        groups.map(|segments| Group { segments: segments.to_vec(), map: self }).collect()
    }

    fn summary(&self) -> String {
        Totals::of(self.segments.iter()).describe()
    }
}

/// Segments that share pool, stream and class, in order of address; at least one.
struct Group<'a> {
    segments: Vec<&'a SegmentView>,
    map: &'a Map,
}

impl Group<'_> {
    fn heading(&self) -> String {
        let first = self.segments[0];
        let number = self.map.streams.get(first.stream as usize).copied();
        let (stream, class) = (number.unwrap_or(first.stream), first.class.name());
        let pool = match first.pool {
            (0, 0) => String::new(),
            (a, b) => format!("pool {a},{b}, "),
        };
        let totals = Totals::of(self.segments.iter().copied());
        format!("{pool}stream {stream}, {class}: {}", totals.describe())
    }

    fn bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.bytes).sum()
    }

    /// Bytes that one cell stands for: a power of two, at least `finest`, so that the group takes
    /// at most about `cells` cells.
    fn cell_bytes(&self, finest: u64, cells: u64) -> u64 {
        self.bytes().div_ceil(cells).max(finest).next_power_of_two()
    }
}

/// Sums over segments.
struct Totals {
    segments: usize,
    bytes: u64,
    allocated: u64,
    pending: u64,
    largest_free: u64,
}

impl Totals {
    fn of<'a>(segments: impl Iterator<Item = &'a SegmentView>) -> Self {
        let mut t = Totals { segments: 0, bytes: 0, allocated: 0, pending: 0, largest_free: 0 };
        for segment in segments {
            t.segments += 1;
            t.bytes += segment.bytes;
            for block in &segment.blocks {
                match block.state {
                    BlockState::ActiveAllocated => t.allocated += block.bytes,
                    BlockState::ActivePendingFree => t.pending += block.bytes,
                    BlockState::Inactive => t.largest_free = t.largest_free.max(block.bytes),
                }
            }
        }
        t
    }

    fn describe(&self) -> String {
        let s = if self.segments == 1 { "" } else { "s" };
        let mut text = format!("{} segment{s}, {}", self.segments, Bytes(self.bytes));
        text += &format!(", {} allocated", Bytes(self.allocated));
        if self.pending > 0 {
            text += &format!(", {} waiting for events", Bytes(self.pending));
        }
        let free = self.bytes - self.allocated - self.pending;
        text += &format!(", {} free (largest {})", Bytes(free), Bytes(self.largest_free));
        text
    }
}

/// What is in a piece of a segment that is drawn as one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cell {
    /// Nothing but blocks in use.
    Full,
    /// Blocks in use, and others.
    Mixed,
    /// Freed blocks that wait for events; none in use.
    Pending,
    /// Nothing but free blocks.
    Free,
}

/// The cells of a segment, each of `cell_bytes`, the last one possibly shorter.
fn cells(segment: &SegmentView, cell_bytes: u64) -> Vec<Cell> {
    let mut blocks = segment.blocks.iter().peekable();
    (0..segment.bytes.div_ceil(cell_bytes))
        .map(|i| {
            let begin = segment.addr + i * cell_bytes;
            let end = (begin + cell_bytes).min(segment.addr + segment.bytes);
            let (mut used, mut pending) = (0, 0);
            while let Some(&&block) = blocks.peek() {
                let part = overlap(block, begin, end);
                match block.state {
                    BlockState::ActiveAllocated => used += part,
                    BlockState::ActivePendingFree => pending += part,
                    BlockState::Inactive => {}
                }
                if block.addr + block.bytes > end {
                    break;
                }
                blocks.next();
            }
            match (used, pending) {
                (used, _) if used == end - begin => Cell::Full,
                (0, 0) => Cell::Free,
                (0, _) => Cell::Pending,
                _ => Cell::Mixed,
            }
        })
        .collect()
}

/// Bytes of `block` between `begin` and `end`.
fn overlap(block: Block, begin: u64, end: u64) -> u64 {
    (block.addr + block.bytes).min(end).saturating_sub(block.addr.max(begin))
}

/// How many pages of which size, as `3 × 20.00 MiB + 1 × 2.00 MiB`, in order of appearance.
fn page_sizes(segment: &SegmentView) -> String {
    let mut sizes: Vec<(u64, usize)> = Vec::new();
    for &page in &segment.pages {
        match sizes.iter_mut().find(|(size, _)| *size == page) {
            Some((_, count)) => *count += 1,
            None => sizes.push((page, 1)),
        }
    }
    let texts = sizes.iter().map(|&(size, count)| format!("{count} × {}", Bytes(size)));
    texts.collect::<Vec<_>>().join(" + ")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A segment at `addr` whose blocks have these sizes in MiB and states.
    fn segment(addr: u64, stream: u32, blocks: &[(u64, BlockState)]) -> SegmentView {
        let mut at = addr;
        let blocks: Vec<Block> = blocks
            .iter()
            .map(|&(mib, state)| {
                let block = Block { addr: at, bytes: mib * MIB, requested: mib * MIB, state };
                at += mib * MIB;
                block
            })
            .collect();
        let bytes = at - addr;
        let class = Class::Large;
        let pages = vec![bytes];
        SegmentView { pool: (0, 0), addr, bytes, stream, class, expandable: false, blocks, pages }
    }

    pub(crate) fn map() -> Map {
        use BlockState::{ActiveAllocated as A, ActivePendingFree as P, Inactive as F};
        let mut grown = segment(0x9000_0000, 0, &[(10, A), (20, F), (10, A)]);
        grown.expandable = true;
        grown.pages = vec![20 * MIB, 20 * MIB];
        let mut pool = segment(0x4000_0000, 0, &[(2, F)]);
        pool.pool = (0, 7);
        let mut small = segment(0x1000_0000, 0, &[(2, A)]);
        small.class = Class::Small;
        Map {
            title: "t at operation 5".to_owned(),
            segments: vec![
                small,
                segment(0x2000_0000, 0, &[(3, A), (9, F), (8, P)]),
                pool,
                segment(0x5000_0000, 1, &[(1, F), (1, A), (18, F)]),
                grown,
            ],
            streams: vec![0, 40],
        }
    }

    #[test]
    fn groups_are_by_pool_stream_and_class() {
        let map = map();
        let headings: Vec<String> = map.groups().iter().map(Group::heading).collect();
        assert_eq!(
            headings,
            [
                "stream 0, small: 1 segment, 2.00 MiB, 2.00 MiB allocated, 0 bytes free \
                 (largest 0 bytes)",
                "stream 0, large: 2 segments, 60.00 MiB, 23.00 MiB allocated, 8.00 MiB waiting for \
                 events, 29.00 MiB free (largest 20.00 MiB)",
                "stream 40, large: 1 segment, 20.00 MiB, 1.00 MiB allocated, 19.00 MiB free \
                 (largest 18.00 MiB)",
                "pool 0,7, stream 0, large: 1 segment, 2.00 MiB, 0 bytes allocated, 2.00 MiB free \
                 (largest 2.00 MiB)",
            ]
        );
    }

    #[test]
    fn cells_tell_what_is_in_them() {
        use Cell::{Free, Full, Mixed, Pending};
        let map = map();
        assert_eq!(cells(&map.segments[1], 4 * MIB), [Mixed, Free, Free, Pending, Pending]);
        assert_eq!(cells(&map.segments[1], 3 * MIB)[..2], [Full, Free]);
        assert_eq!(cells(&map.segments[3], 64 * MIB), [Mixed]);
        assert_eq!(cells(&map.segments[4], 16 * MIB), [Mixed, Mixed, Full]);
    }

    #[test]
    fn pages_are_counted_by_size() {
        assert_eq!(page_sizes(&map().segments[4]), "2 × 20.00 MiB");
    }
}
