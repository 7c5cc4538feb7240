//! What pages of one size would take, if memory could be anywhere: a model of paging, not of an
//! allocator, to compare allocators with.
//!
//! Every request is placed by the best fit in unlimited address space: in the smallest free run that
//! is backed by pages, else in the smallest gap, else above everything else. A page that holds nothing
//! stays where it is until it is missing elsewhere; the one that has been empty longest moves first. A
//! page is created only when none is empty. Small requests have pages of 2 MiB of their own.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use alloc_core::Bytes;
use alloc_core::size_class::OURS_SMALL_BYTES_MAX;
use mock_backend::{Call, FIRST_MAP_NS, call_ns};

use crate::error::Failure;
use crate::workload::{Action, Workload};

/// Sizes are rounded up to multiples of this, as by the allocators.
const QUANTUM: u64 = 512;
/// Pages of small requests, in bytes.
const SMALL_PAGE_BYTES: u64 = 2 << 20;

/// Smallest page to model, in bytes.
pub const PAGE_BYTES_MIN: u64 = 64 << 10;
/// Largest peak of what is asked for, in bytes: pages are looked at one by one.
pub const PEAK_BYTES_MAX: u64 = 16 << 40;

/// Which pages.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Paging {
    /// Bytes of a page for requests above 256 KiB: at least [`PAGE_BYTES_MIN`].
    pub page_bytes: u64,
    /// If given, the model knows beforehand how long each block will live: those that live for so
    /// many turnovers or more have addresses of their own. A turnover is the time in which as many
    /// bytes are asked for as ever live at once.
    pub told: Option<f64>,
}

/// What they took.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PagingFigures {
    /// Bytes of all pages, of which none is ever given back.
    pub reserved: u64,
    /// Pages created.
    pub created: u64,
    /// Pages that moved.
    pub moved: u64,
    /// What creating, mapping and making accessible costs by the simulator's model, in nanoseconds. A
    /// page that moves is mapped once more: what unmapping it would cost is not in it.
    pub stall_ns: u64,
}

/// Runs a workload on pages. Streams are not told apart.
///
/// # Errors
/// If the pages are smaller than [`PAGE_BYTES_MIN`], or more than [`PEAK_BYTES_MAX`] are asked for at
/// one time.
pub fn page(workload: &Workload, paging: &Paging) -> Result<PagingFigures, Failure> {
    let (peak, bytes) = (workload.requested_peak, paging.page_bytes);
    if peak > PEAK_BYTES_MAX {
        let why = format!("asks for {}, more than pages are counted for", Bytes(peak));
        return Err(Failure::input(&workload.path, why));
    }
    if bytes < PAGE_BYTES_MIN {
        let why = format!("pages have at least {}, not {}", Bytes(PAGE_BYTES_MIN), Bytes(bytes));
        return Err(Failure::input(&workload.path, why));
    }
    let lasting = match paging.told {
        Some(turnovers) => lasting(workload, turnovers),
        None => vec![false; workload.ops.len()],
    };
    let mut memory = Memory::new(paging.page_bytes);
    let mut places = vec![Place::default(); workload.slots];
    for (op, lasts) in workload.ops.iter().zip(lasting) {
        let place = &mut places[op.slot as usize];
        match op.action {
            Action::Alloc { bytes, .. } => {
                let bytes = bytes.max(1).next_multiple_of(QUANTUM);
                let space = if bytes <= OURS_SMALL_BYTES_MAX { 0 } else { 1 + usize::from(lasts) };
                *place = memory.take(space, bytes);
            }
            Action::Free { .. } => memory.give(*place),
        }
    }
    Ok(memory.figures)
}

/// For each operation, whether what it allocates lives for so many turnovers or is never freed.
fn lasting(workload: &Workload, turnovers: f64) -> Vec<bool> {
    let long = turnovers * workload.requested_peak as f64;
    let mut lasting = vec![true; workload.ops.len()];
    let mut births = vec![(0, 0); workload.slots];
    let mut now = 0;
    for (index, op) in workload.ops.iter().enumerate() {
        let birth = &mut births[op.slot as usize];
        match op.action {
            Action::Alloc { bytes, .. } => {
                *birth = (index, now);
                now += bytes;
            }
            Action::Free { .. } => lasting[birth.0] = (now - birth.1) as f64 >= long,
        }
    }
    lasting
}

/// Where a block lies.
#[derive(Clone, Copy, Default)]
struct Place {
    space: usize,
    at: u64,
    bytes: u64,
}

/// Unlimited addresses.
struct Space {
    page_bytes: u64,
    /// Free runs below the top: where they start, and their bytes.
    free: BTreeMap<u64, u64>,
    /// The same by bytes, then address.
    by_bytes: BTreeSet<(u64, u64)>,
    /// Above, everything is free.
    top: u64,
    /// Bytes in use of each page that holds any.
    used: HashMap<u64, u64>,
    /// Pages that hold nothing, and since when.
    empty: HashMap<u64, u64>,
}

impl Space {
    fn new(page_bytes: u64) -> Self {
        Space {
            page_bytes,
            free: BTreeMap::new(),
            by_bytes: BTreeSet::new(),
            top: 0,
            used: HashMap::new(),
            empty: HashMap::new(),
        }
    }

    /// The pages that `at..at + bytes` touches, each with the bytes that lie there.
    fn pages(&self, at: u64, bytes: u64) -> impl Iterator<Item = (u64, u64)> + use<> {
        let size = self.page_bytes;
        let end = at + bytes;
        (at / size..end.div_ceil(size))
            .map(move |page| (page, end.min((page + 1) * size) - at.max(page * size)))
    }

    fn is_backed(&self, page: u64) -> bool {
        self.used.contains_key(&page) || self.empty.contains_key(&page)
    }

    fn choose(&self, bytes: u64) -> u64 {
        let gaps = || self.by_bytes.range((bytes, 0)..);
        let backed = gaps().filter_map(|(length, at)| self.tightest(*at, *length, bytes)).min();
        let gap = || gaps().next().map(|(_, at)| *at);
        backed.map(|(_, at)| at).or_else(gap).unwrap_or(self.top)
    }

    /// The smallest sufficient run of a gap that pages back, with its bytes.
    fn tightest(&self, at: u64, length: u64, bytes: u64) -> Option<(u64, u64)> {
        let (mut best, mut run) = (None, 0);
        let mut cursor = at;
        let mut end_run = |run: u64, end: u64| {
            if run >= bytes && best.is_none_or(|(least, _)| run < least) {
                best = Some((run, end - run));
            }
        };
        for (page, inside) in self.pages(at, length) {
            if self.is_backed(page) {
                run += inside;
            } else {
                end_run(std::mem::take(&mut run), cursor);
            }
            cursor += inside;
        }
        end_run(run, cursor);
        best
    }

    fn occupy(&mut self, at: u64, bytes: u64) {
        if at >= self.top {
            self.top = at + bytes;
            return;
        }
        let (start, length) = self.free.range(..=at).next_back().expect("it is free");
        let (start, end) = (*start, *start + *length);
        self.drop_run(start, end - start);
        self.add_run(start, at - start);
        self.add_run(at + bytes, end - at - bytes);
    }

    fn release(&mut self, mut at: u64, mut bytes: u64) {
        if let Some((start, length)) = self.free.range(..at).next_back().map(|(a, n)| (*a, *n))
            && start + length == at
        {
            self.drop_run(start, length);
            (at, bytes) = (start, bytes + length);
        }
        if let Some(length) = self.free.get(&(at + bytes)).copied() {
            self.drop_run(at + bytes, length);
            bytes += length;
        }
        if at + bytes == self.top {
            self.top = at;
        } else {
            self.add_run(at, bytes);
        }
    }

    fn add_run(&mut self, at: u64, bytes: u64) {
        if bytes > 0 {
            self.free.insert(at, bytes);
            self.by_bytes.insert((bytes, at));
        }
    }

    fn drop_run(&mut self, at: u64, bytes: u64) {
        self.free.remove(&at);
        self.by_bytes.remove(&(bytes, at));
    }
}

/// The small requests' space, and two others with pages of one size.
struct Memory {
    spaces: [Space; 3],
    /// Pages that hold nothing, longest empty first: since when, in which space, and which.
    empty: BTreeMap<u64, (usize, u64)>,
    now: u64,
    figures: PagingFigures,
}

impl Memory {
    fn new(page_bytes: u64) -> Self {
        let large = || Space::new(page_bytes);
        Memory {
            spaces: [Space::new(SMALL_PAGE_BYTES), large(), large()],
            empty: BTreeMap::new(),
            now: 0,
            figures: PagingFigures { reserved: 0, created: 0, moved: 0, stall_ns: 0 },
        }
    }

    fn take(&mut self, space: usize, bytes: u64) -> Place {
        let at = self.spaces[space].choose(bytes);
        self.spaces[space].occupy(at, bytes);
        let mut missing = 0;
        let room = &mut self.spaces[space];
        for (page, inside) in room.pages(at, bytes) {
            let used = room.used.entry(page).or_default();
            if *used == 0 {
                match room.empty.remove(&page) {
                    Some(since) => drop(self.empty.remove(&since)),
                    None => missing += 1,
                }
            }
            *used += inside;
        }
        for _ in 0..missing {
            self.back(space);
        }
        Place { space, at, bytes }
    }

    fn give(&mut self, place: Place) {
        let room = &mut self.spaces[place.space];
        for (page, inside) in room.pages(place.at, place.bytes) {
            let used = room.used.get_mut(&page).expect("it holds the block");
            *used -= inside;
            if *used == 0 {
                room.used.remove(&page);
                room.empty.insert(page, self.now);
                self.empty.insert(self.now, (place.space, page));
                self.now += 1;
            }
        }
        room.release(place.at, place.bytes);
    }

    /// Finds memory for one page of a space: an empty page of the same size, or a new one.
    fn back(&mut self, space: usize) {
        let bytes = self.spaces[space].page_bytes;
        let is_like = |(_, (other, _)): &(&u64, &(usize, u64))| (*other == 0) == (space == 0);
        let oldest = self.empty.iter().find(is_like).map(|(since, page)| (*since, *page));
        let mapping = call_ns(Call::Map, bytes) + call_ns(Call::SetAccess, bytes);
        self.figures.stall_ns += mapping;
        match oldest {
            Some((since, (other, page))) => {
                self.empty.remove(&since);
                self.spaces[other].empty.remove(&page);
                self.figures.moved += 1;
            }
            None => {
                self.figures.reserved += bytes;
                self.figures.created += 1;
                self.figures.stall_ns += call_ns(Call::Create, bytes) + FIRST_MAP_NS;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::WorkloadBuilder;
    use std::path::Path;

    const MIB: u64 = 1 << 20;

    /// Positive numbers allocate so many MiB under that number, negative ones free it.
    fn workload(steps: &[i64]) -> Workload {
        let mut built = WorkloadBuilder::new(Path::new("t.csv"));
        for (line, step) in (2..).zip(steps) {
            let id = step.unsigned_abs();
            let done = match step {
                0.. => built.alloc(line, 0, id, id * MIB, 0),
                _ => built.free(line, 0, id),
            };
            done.expect("a possible step");
        }
        built.finish()
    }

    fn figures(steps: &[i64], page_mib: u64, told: Option<f64>) -> (u64, u64, u64) {
        let paging = Paging { page_bytes: page_mib * MIB, told };
        let PagingFigures { reserved, created, moved, .. } =
            page(&workload(steps), &paging).unwrap();
        (reserved / MIB, created, moved)
    }

    #[test]
    fn only_pages_that_hold_something_are_pinned() {
        // 3 and 5 MiB lie in four pages of 2; of 4 MiB it takes two.
        assert_eq!(figures(&[3, 5], 2, None), (8, 4, 0));
        assert_eq!(figures(&[3, 5], 4, None), (8, 2, 0));
        // Of 3, the page that both lie in is pinned.
        assert_eq!(figures(&[3, 5, -5, 4], 2, None), (8, 4, 0));
    }

    #[test]
    fn empty_pages_move_before_any_is_created() {
        // What 4 leaves below 6 does not suffice for 8: its two pages move above.
        assert_eq!(figures(&[4, 6, -4, 8], 2, None), (14, 7, 2));
        // The gap of 4 is unbacked now, and empty pages come back to it.
        assert_eq!(figures(&[4, 6, -4, 8, -8, 4], 2, None), (14, 7, 4));
    }

    #[test]
    fn what_is_backed_is_preferred_to_a_tighter_gap() {
        // The pages of 4 went to 20. Where 5 was there is room enough for 3, and memory.
        assert_eq!(figures(&[4, 6, 5, 7, -4, 20, -5, 3], 2, None), (38, 19, 2));
    }

    #[test]
    fn a_gap_is_filled_again_where_it_was() {
        // 6 leaves a gap between 4 and 5, whose pages all go to 20. When that is freed three of its own
        // come there.
        let steps = [4, 6, 5, -6, 20, -20, 6];
        let (_, created, moved) = figures(&steps, 2, None);
        assert_eq!((created, moved), (2 + 3 + 3 + 7, 6));
    }

    #[test]
    fn what_lasts_lies_apart_if_the_model_is_told() {
        let steps: Vec<i64> =
            [7, 9, -7, 3].into_iter().chain((0..8).flat_map(|_| [5, -5])).collect();
        let flags = lasting(&workload(&steps), 1.0);
        assert_eq!(flags[..4], [false, true, true, true]);
        assert!(!flags[4] && !flags[18]);
        // Untold, 3 goes where 7 was; told, above 9.
        assert_eq!(figures(&[7, 9, -7, 3], 2, None), (16, 8, 0));
        assert_eq!(figures(&[7, 9, -7, 3], 2, Some(1.5)), (18, 9, 1));
    }

    #[test]
    fn what_cannot_be_counted_is_refused() {
        let refused = |mib: i64, page_bytes| {
            let paging = Paging { page_bytes, told: None };
            page(&workload(&[mib]), &paging).unwrap_err().to_string()
        };
        assert!(refused((16 << 20) + 1, MIB).contains("asks for"));
        assert!(refused(1, 4096).contains("64.00 KiB"), "{}", refused(1, 4096));
    }

    #[test]
    fn small_requests_have_pages_of_their_own() {
        let mut built = WorkloadBuilder::new(Path::new("t.csv"));
        built.alloc(2, 0, 1, 1000, 0).unwrap();
        built.alloc(3, 0, 2, MIB, 0).unwrap();
        let paging = Paging { page_bytes: 8 * MIB, told: None };
        let figures = page(&built.finish(), &paging).unwrap();
        assert_eq!((figures.reserved, figures.created), (10 * MIB, 2));
        let each = |bytes| {
            call_ns(Call::Create, bytes)
                + call_ns(Call::Map, bytes)
                + call_ns(Call::SetAccess, bytes)
        };
        assert_eq!(figures.stall_ns, each(2 * MIB) + each(8 * MIB) + 2 * FIRST_MAP_NS);
    }
}
