//! Which of the ranges that would serve a request costs least.

use super::compose::{End, Site, Task};
use crate::handles::HandleId;

/// Parts of a byte in which costs are counted. An end of a partly used handle is worth one such part of
/// what it holds: a range that uses one up gains that, one that leaves another behind loses it. Worth
/// nothing, ends would be left to become many; worth as much as memory is, memory would be taken to be
/// rid of them.
const PARTS: i64 = 8;

/// How a range begins, and what may follow.
#[derive(Clone, Copy)]
pub(super) struct Start<'a> {
    pub(super) site: Site,
    /// The free tail that it begins with, unless it continues the free block of its site.
    pub(super) tail: Option<End>,
    /// How much of the request is served by that.
    pub(super) bytes: u64,
    /// Handles without a byte in use, in the order in which to take them.
    pub(super) idle: &'a [HandleId],
    /// Ascending by bytes.
    pub(super) heads: &'a [End],
}

/// A range that would serve the request.
pub(super) struct Shape<'a> {
    pub(super) start: Start<'a>,
    pub(super) idle: &'a [HandleId],
    /// Bytes to create after those.
    pub(super) create: u64,
    /// What it ends with.
    pub(super) head: Option<End>,
    pub(super) cost: Cost,
}

/// Bytes in parts of [`PARTS`]; of equals, what is created decides.
pub(super) type Cost = (i64, u64);

impl Start<'_> {
    /// The smallest head of at least `bytes`, of another handle than the tail's.
    fn closing(&self, bytes: u64) -> Option<End> {
        let first = self.heads.partition_point(|head| head.bytes < bytes);
        self.heads[first..].iter().copied().find(|head| self.is_other(head))
    }

    fn longest(&self) -> Option<End> {
        self.heads.iter().rev().copied().find(|head| self.is_other(head))
    }

    fn is_other(&self, head: &End) -> bool {
        self.tail.is_none_or(|tail| tail.handle != head.handle)
    }
}

impl Task<'_> {
    /// The cheapest range that begins so: it ends with a head as soon as one suffices, or after all of
    /// the idle handles that are needed, with new memory if these do not suffice.
    pub(super) fn cheapest_from<'a>(&self, start: Start<'a>) -> Shape<'a> {
        let need = self.wanted - start.bytes;
        let moved = need.saturating_sub(self.headroom);
        let mut best: Option<Shape<'a>> = None;
        let mut offer = |shape: Shape<'a>| {
            if best.as_ref().is_none_or(|best| shape.cost < best.cost) {
                best = Some(shape);
            }
        };
        let (mut count, mut sum) = (0, 0);
        loop {
            let idle = &start.idle[..count];
            if let Some(rest) = need.checked_sub(sum).filter(|rest| *rest > 0)
                && let Some(head) = start.closing(rest)
            {
                offer(self.shape(start, idle, 0, Some(head), sum));
            }
            match start.idle.get(count) {
                Some(handle) if sum < moved => sum += self.layout[*handle].bytes,
                _ => break,
            }
            count += 1;
        }
        let idle = &start.idle[..count];
        let rest = need.saturating_sub(sum);
        let whole = rest.next_multiple_of(self.unit);
        offer(self.shape(start, idle, self.at_once(whole), None, sum));
        if let Some(longest) = start.longest().filter(|head| head.bytes < rest) {
            let less = (rest - longest.bytes).next_multiple_of(self.unit);
            if less < whole && less == self.at_once(less) {
                // Of those with which as little is created, the shortest.
                let head = start.closing(rest - less);
                offer(self.shape(start, idle, less, head, sum));
            }
        }
        best.expect("one is always offered")
    }

    /// What to create where `bytes` are missing.
    fn at_once(&self, bytes: u64) -> u64 {
        if bytes > 0 { bytes.max(self.step) } else { 0 }
    }

    /// A range of `moved` bytes in idle handles, `create` new ones and a head.
    fn shape<'a>(
        &self,
        start: Start<'a>,
        idle: &'a [HandleId],
        create: u64,
        head: Option<End>,
        moved: u64,
    ) -> Shape<'a> {
        let before = start.bytes + moved + create;
        let head_bytes = head.map_or(0, |head| head.bytes);
        let left_over = before + head_bytes - self.wanted;
        // What is left of a head lies between bytes in use. What is left of other memory is an end.
        let (lost, end) = if head.is_some() { (left_over, 0) } else { (0, left_over) };
        let used = start.bytes + head_bytes - lost;
        let whole = create.saturating_sub(self.headroom) + lost;
        let cost = whole as i64 * PARTS + end as i64 - used as i64;
        Shape { start, idle, create, head, cost: (cost, create) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::paging::stock::Stock;
    use crate::handles::Layout;
    use crate::heap::SegmentId;
    use crate::size_class::SizeClass;
    use crate::units::Addr;

    const MIB: u64 = 1 << 20;

    /// What may be used, in MiB: handles of 32 with a free tail or head, and idle handles.
    #[derive(Default)]
    struct Free<'a> {
        tail: Option<u64>,
        heads: &'a [u64],
        idle: &'a [u64],
        headroom: u64,
        step: u64,
    }

    /// A shape in MiB, and its cost in parts of one.
    #[derive(PartialEq, Eq, Debug)]
    struct Picture {
        idle: usize,
        create: u64,
        head: Option<u64>,
        cost: i64,
    }

    impl Free<'_> {
        fn cheapest(&self, wanted: u64) -> Picture {
            let mut layout = Layout::default();
            let mut end = |from: u64, bytes: u64| End {
                handle: layout.add_handle(32 * MIB),
                from: from * MIB,
                bytes: bytes * MIB,
            };
            let tail = self.tail.map(|bytes| end(32 - bytes, bytes));
            let heads: Vec<_> = self.heads.iter().map(|bytes| end(0, *bytes)).collect();
            let idle: Vec<_> = self.idle.iter().map(|mib| layout.add_handle(mib * MIB)).collect();
            let task = Task {
                stock: &Stock::new(&layout),
                layout: &layout,
                class: SizeClass::Large,
                wanted: wanted * MIB,
                unit: 2 * MIB,
                headroom: self.headroom * MIB,
                step: self.step * MIB,
                handle_bytes_max: 32 * MIB,
                part_bytes_min: MIB,
                views_max: 8,
                desperate: false,
            };
            let at = Addr::new(2 * MIB);
            let site =
                Site { segment: SegmentId::new(0), base: at, at, bytes: 1 << 40, left: None };
            let bytes = tail.map_or(0, |tail| tail.bytes);
            let shape = task.cheapest_from(Start { site, tail, bytes, idle: &idle, heads: &heads });
            Picture {
                idle: shape.idle.len(),
                create: shape.create / MIB,
                head: shape.head.map(|head| head.bytes / MIB),
                cost: shape.cost.0 / MIB as i64,
            }
        }
    }

    #[test]
    fn ends_that_fit_gain_what_they_hold() {
        let fits = Free { tail: Some(5), heads: &[11, 13], ..Free::default() }.cheapest(16);
        assert_eq!(fits, Picture { idle: 0, create: 0, head: Some(11), cost: -16 });
        let loses = Free { tail: Some(7), heads: &[11, 13], ..Free::default() }.cheapest(16);
        assert_eq!(loses, Picture { idle: 0, create: 0, head: Some(11), cost: 2 * PARTS - 16 });
    }

    #[test]
    fn a_head_closes_where_it_fits_best() {
        let free = Free { heads: &[6, 9], idle: &[10, 4, 10], ..Free::default() };
        // After the first handle 10 are missing, after the second 6.
        assert_eq!(free.cheapest(20), Picture { idle: 2, create: 0, head: Some(6), cost: -6 });
        // Without one that fits, the last handle has an end left.
        let free = Free { heads: &[20], ..free };
        assert_eq!(free.cheapest(22), Picture { idle: 3, create: 0, head: None, cost: 2 });
    }

    #[test]
    fn no_more_of_a_head_is_lost_than_would_be_created() {
        let free = Free { idle: &[10], heads: &[30], ..Free::default() };
        assert_eq!(free.cheapest(12), Picture { idle: 1, create: 2, head: None, cost: 2 * PARTS });
        assert_eq!(free.cheapest(28).head, Some(30));
    }

    #[test]
    fn what_is_created_within_the_headroom_costs_nothing() {
        let free = Free { idle: &[10, 10], headroom: 6, ..Free::default() };
        assert_eq!(free.cheapest(16), Picture { idle: 1, create: 6, head: None, cost: 0 });
        assert_eq!(free.cheapest(28), Picture { idle: 2, create: 8, head: None, cost: 2 * PARTS });
    }

    #[test]
    fn the_shortest_head_is_taken_with_which_as_little_is_created() {
        let free = Free { heads: &[3, 5, 6], ..Free::default() };
        // 4 with any from 5 on, 6 with 3.
        assert_eq!(
            free.cheapest(9),
            Picture { idle: 0, create: 4, head: Some(5), cost: 4 * PARTS - 5 }
        );
    }

    #[test]
    fn a_step_is_created_whole_or_not_at_all() {
        let free = Free { heads: &[7], headroom: 16, step: 8, ..Free::default() };
        assert_eq!(free.cheapest(9), Picture { idle: 0, create: 10, head: None, cost: 1 });
        assert_eq!(free.cheapest(3), Picture { idle: 0, create: 8, head: None, cost: 5 });
        assert_eq!(free.cheapest(15), Picture { idle: 0, create: 8, head: Some(7), cost: -7 });
    }

    #[test]
    fn a_handle_does_not_end_what_it_begins() {
        let mut layout = Layout::default();
        let handle = layout.add_handle(32 * MIB);
        let tail = End { handle, from: 24 * MIB, bytes: 8 * MIB };
        let head = End { handle, from: 0, bytes: 8 * MIB };
        let at = Addr::new(2 * MIB);
        let site = Site { segment: SegmentId::new(0), base: at, at, bytes: 1 << 40, left: None };
        let start = Start { site, tail: Some(tail), bytes: 8 * MIB, idle: &[], heads: &[head] };
        assert_eq!((start.closing(MIB), start.longest()), (None, None));
        let start = Start { tail: None, ..start };
        assert_eq!((start.closing(MIB), start.longest()), (Some(head), Some(head)));
    }
}
