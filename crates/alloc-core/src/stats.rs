//! Statistics under PyTorch's names (spec §7).

use crate::size_class::SizeClass;
use smallvec::SmallVec;

/// One gauge with its history. `current` is `allocated - freed` unless the accumulated counters
/// were reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stat {
    /// Value now.
    pub current: i64,
    /// Largest value since the last peak reset.
    pub peak: i64,
    /// Sum of all increases since the last reset of accumulated values.
    pub allocated: i64,
    /// Sum of all decreases since then.
    pub freed: i64,
}

impl Stat {
    /// Leaves the peak to [`StatTable::raise`].
    fn increase(&mut self, amount: i64) {
        self.current += amount;
        self.allocated += amount;
    }

    fn decrease(&mut self, amount: i64) {
        self.current -= amount;
        self.freed += amount;
    }

    fn reset_accumulated(&mut self) {
        self.allocated = 0;
        self.freed = 0;
    }

    fn add(&mut self, other: &Stat) {
        self.current += other.current;
        self.peak += other.peak;
        self.allocated += other.allocated;
        self.freed += other.freed;
    }

    const fn fields(&self) -> [(&'static str, i64); 4] {
        [
            ("allocated", self.allocated),
            ("current", self.current),
            ("freed", self.freed),
            ("peak", self.peak),
        ]
    }
}

/// The gauges that are kept for both classes and their sum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gauge {
    /// Blocks handed out and not yet freed by the client.
    Allocation,
    /// Bytes of those blocks.
    AllocatedBytes,
    /// Blocks handed out, or freed but waiting for events.
    Active,
    /// Bytes of those blocks.
    ActiveBytes,
    /// Bytes that the program asked for in active blocks.
    RequestedBytes,
    /// Segments obtained whole.
    Segment,
    /// Bytes obtained from the backend.
    ReservedBytes,
    /// Free blocks that share an ordinary segment with another block.
    InactiveSplit,
    /// Bytes of those blocks.
    InactiveSplitBytes,
}

const GAUGES: usize = 9;

impl Gauge {
    /// All gauges, in the order of the table.
    pub const ALL: [Gauge; GAUGES] = [
        Gauge::Allocation,
        Gauge::AllocatedBytes,
        Gauge::Active,
        Gauge::ActiveBytes,
        Gauge::RequestedBytes,
        Gauge::Segment,
        Gauge::ReservedBytes,
        Gauge::InactiveSplit,
        Gauge::InactiveSplitBytes,
    ];

    /// PyTorch's key.
    pub const fn name(self) -> &'static str {
        match self {
            Gauge::Allocation => "allocation",
            Gauge::AllocatedBytes => "allocated_bytes",
            Gauge::Active => "active",
            Gauge::ActiveBytes => "active_bytes",
            Gauge::RequestedBytes => "requested_bytes",
            Gauge::Segment => "segment",
            Gauge::ReservedBytes => "reserved_bytes",
            Gauge::InactiveSplit => "inactive_split",
            Gauge::InactiveSplitBytes => "inactive_split_bytes",
        }
    }
}

/// A gauge for both classes and their sum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ByClass {
    /// Both classes together.
    pub all: Stat,
    /// The small class.
    pub small: Stat,
    /// The large class.
    pub large: Stat,
}

/// What is written on every change of a gauge in one class. The rest of a [`Stat`] follows from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Tally {
    current: i64,
    peak: i64,
    freed: i64,
    /// `current` at the last reset of accumulated values: what was allocated since is
    /// `current + freed - base`.
    base: i64,
}

impl Tally {
    const fn stat(&self) -> Stat {
        Stat {
            current: self.current,
            peak: self.peak,
            allocated: self.current + self.freed - self.base,
            freed: self.freed,
        }
    }

    fn add(&mut self, other: &Tally) {
        self.current += other.current;
        self.peak += other.peak;
        self.freed += other.freed;
        self.base += other.base;
    }

    #[inline]
    fn decrease(&mut self, amount: i64) {
        self.current -= amount;
        self.freed += amount;
    }
}

const ALLOCATION: usize = Gauge::Allocation as usize;
const ALLOCATED_BYTES: usize = Gauge::AllocatedBytes as usize;
const ACTIVE: usize = Gauge::Active as usize;
const ACTIVE_BYTES: usize = Gauge::ActiveBytes as usize;
const REQUESTED_BYTES: usize = Gauge::RequestedBytes as usize;

/// A figure with a peak: a gauge in the small class, the large one or both, or one of the two that
/// count oversize blocks and segments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Row(usize);

impl Row {
    /// How many there are.
    pub(crate) const COUNT: usize = 3 * GAUGES + 2;
    const OVERSIZE_ALLOCATIONS: Row = Row(3 * GAUGES);
    const OVERSIZE_SEGMENTS: Row = Row(3 * GAUGES + 1);

    pub(crate) fn all() -> impl Iterator<Item = Row> {
        (0..Row::COUNT).map(Row)
    }

    pub(crate) const fn index(self) -> usize {
        self.0
    }
}

/// Both classes, as part of a gauge; the classes themselves are 0 and 1.
const BOTH: usize = 2;

/// Rows, each with a number of its own.
pub(crate) type Rows = SmallVec<[(Row, i64); 4]>;

/// The statistics of one heap that change with blocks and segments.
///
/// Where the peak of the sum over heaps must be exact, the peaks are those of the device
/// (`allocator/peaks.rs`), and what stands here in their place is a ceiling: up to it, a figure rises
/// without asking. What has risen above is noted.
///
/// Active blocks are those handed out and those that drain. Most heaps never see one drain, so the
/// tallies of [`Gauge::Active`] and [`Gauge::ActiveBytes`] count the draining ones only, with the
/// peaks of all active ones; [`tally`](Self::tally) adds the others.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct StatTable {
    classes: [[Tally; GAUGES]; 2],
    /// Peaks of the sum of both classes.
    peaks: [i64; GAUGES],
    /// Blocks that drain, of both classes.
    draining: u64,
    /// Peaks are ceilings.
    is_part: bool,
    /// The highest values of what rose above its ceiling since that was looked at.
    risen: Rows,
    /// Whether there are any. Every hit asks, and a flag is cheaper to ask than the list.
    has_risen: bool,
    oversize_allocations: Stat,
    oversize_segments: Stat,
}

impl StatTable {
    /// One of several whose sum has exact peaks.
    pub(crate) fn part() -> Self {
        StatTable { is_part: true, ..StatTable::default() }
    }

    /// A block of `bytes` is handed out to a request of `requested`.
    #[inline]
    pub(crate) fn hand_out(&mut self, class: SizeClass, bytes: u64, requested: u64) {
        let [small, large] = &mut self.classes;
        let (mine, others) = match class {
            SizeClass::Small => (small, large),
            SizeClass::Large => (large, small),
        };
        // Negative if a figure is above its peak: one branch for all of them.
        let mut room = 0;
        for (gauge, amount) in
            [(ALLOCATION, 1), (ALLOCATED_BYTES, bytes), (REQUESTED_BYTES, requested)]
        {
            let tally = &mut mine[gauge];
            tally.current += amount as i64;
            let all = tally.current + others[gauge].current;
            room |= (tally.peak - tally.current) | (self.peaks[gauge] - all);
        }
        // While blocks drain, more are active than are handed out.
        if (room < 0) | (self.draining > 0) {
            self.raise_peaks();
        }
    }

    /// Sets the peaks of what [`hand_out`](Self::hand_out) counts. While memory rises, every hit comes here.
    #[inline(never)]
    fn raise_peaks(&mut self) {
        if self.is_part {
            return self.note_peaks();
        }
        let current = |table: &Self, gauge: usize| {
            let [small, large] = &table.classes;
            [small[gauge].current, large[gauge].current]
        };
        for (given, active) in [(ALLOCATION, ACTIVE), (ALLOCATED_BYTES, ACTIVE_BYTES)] {
            let handed_out = current(self, given);
            let draining = current(self, active);
            self.lift(given, handed_out);
            self.lift(active, [handed_out[0] + draining[0], handed_out[1] + draining[1]]);
        }
        self.lift(REQUESTED_BYTES, current(self, REQUESTED_BYTES));
    }

    /// The peaks of a gauge are at least these values of its classes, and their sum.
    #[inline]
    fn lift(&mut self, gauge: usize, values: [i64; 2]) {
        for (class, value) in self.classes.iter_mut().zip(values) {
            class[gauge].peak = class[gauge].peak.max(value);
        }
        self.peaks[gauge] = self.peaks[gauge].max(values[0] + values[1]);
    }

    /// [`raise_peaks`](Self::raise_peaks) where peaks are ceilings.
    #[cold]
    #[inline(never)]
    fn note_peaks(&mut self) {
        for gauge in [ALLOCATION, ALLOCATED_BYTES, ACTIVE, ACTIVE_BYTES, REQUESTED_BYTES] {
            self.raise_gauge(gauge);
        }
    }

    #[inline(never)]
    fn raise_gauge(&mut self, gauge: usize) {
        for part in 0..=BOTH {
            self.raise(Row(3 * gauge + part));
        }
    }

    /// A figure may have risen above its peak.
    fn raise(&mut self, row: Row) {
        let current = self.current(row);
        if current <= self.peak(row) {
            return;
        }
        if !self.is_part {
            return self.set_peak(row, current);
        }
        self.has_risen = true;
        match self.risen.iter_mut().find(|(noted, _)| *noted == row) {
            Some((_, highest)) => *highest = current.max(*highest),
            None => self.risen.push((row, current)),
        }
    }

    pub(crate) fn current(&self, Row(row): Row) -> i64 {
        match (row / 3, row % 3) {
            (gauge @ 0..GAUGES, BOTH) => {
                [0, 1].map(|class| self.tally(class, gauge).current).iter().sum()
            }
            (gauge @ 0..GAUGES, class) => self.tally(class, gauge).current,
            _ => self.oversize(Row(row)).current,
        }
    }

    /// The peak, or what stands in its place.
    pub(crate) fn peak(&self, Row(row): Row) -> i64 {
        match (row / 3, row % 3) {
            (gauge @ 0..GAUGES, BOTH) => self.peaks[gauge],
            (gauge @ 0..GAUGES, class) => self.classes[class][gauge].peak,
            _ => self.oversize(Row(row)).peak,
        }
    }

    pub(crate) fn set_peak(&mut self, Row(row): Row, value: i64) {
        match (row / 3, row % 3) {
            (gauge @ 0..GAUGES, BOTH) => self.peaks[gauge] = value,
            (gauge @ 0..GAUGES, class) => self.classes[class][gauge].peak = value,
            _ => self.oversize_mut(Row(row)).peak = value,
        }
    }

    /// Whether something rose above its ceiling.
    #[inline]
    pub(crate) const fn has_risen(&self) -> bool {
        self.has_risen
    }

    /// What rose above its ceiling, each with how much it has sunk again from its highest value.
    #[cold]
    pub(crate) fn take_risen(&mut self) -> Rows {
        self.has_risen = false;
        let mut risen = std::mem::take(&mut self.risen);
        risen.iter_mut().for_each(|(row, highest)| *highest -= self.current(*row));
        risen
    }

    fn oversize(&self, row: Row) -> &Stat {
        if row == Row::OVERSIZE_ALLOCATIONS {
            &self.oversize_allocations
        } else {
            &self.oversize_segments
        }
    }

    fn oversize_mut(&mut self, row: Row) -> &mut Stat {
        if row == Row::OVERSIZE_ALLOCATIONS {
            &mut self.oversize_allocations
        } else {
            &mut self.oversize_segments
        }
    }

    /// An oversize block is handed out (`true`) or freed by the client.
    pub(crate) fn count_oversize_allocation(&mut self, comes: bool) {
        self.count_oversize(Row::OVERSIZE_ALLOCATIONS, comes);
    }

    /// An oversize segment comes (`true`) or goes.
    pub(crate) fn count_oversize_segment(&mut self, comes: bool) {
        self.count_oversize(Row::OVERSIZE_SEGMENTS, comes);
    }

    fn count_oversize(&mut self, row: Row, comes: bool) {
        let stat = self.oversize_mut(row);
        if comes {
            stat.increase(1);
            self.raise(row);
        } else {
            stat.decrease(1);
        }
    }

    /// A block is freed, and nothing uses it any more.
    #[inline]
    pub(crate) fn give_back(&mut self, class: SizeClass, bytes: u64, requested: u64) {
        let tallies = &mut self.classes[class.index()];
        tallies[ALLOCATION].decrease(1);
        tallies[ALLOCATED_BYTES].decrease(bytes as i64);
        tallies[REQUESTED_BYTES].decrease(requested as i64);
    }

    /// A block is freed and begins to drain.
    pub(crate) fn let_go(&mut self, class: SizeClass, bytes: u64) {
        let tallies = &mut self.classes[class.index()];
        tallies[ALLOCATION].decrease(1);
        tallies[ALLOCATED_BYTES].decrease(bytes as i64);
        tallies[ACTIVE].current += 1;
        tallies[ACTIVE_BYTES].current += bytes as i64;
        self.draining += 1;
    }

    /// A block has drained.
    pub(crate) fn drained(&mut self, class: SizeClass, bytes: u64, requested: u64) {
        let tallies = &mut self.classes[class.index()];
        tallies[ACTIVE].current -= 1;
        tallies[ACTIVE_BYTES].current -= bytes as i64;
        tallies[REQUESTED_BYTES].decrease(requested as i64);
        self.draining -= 1;
    }

    /// Any gauge but those that the four functions above count.
    #[inline]
    pub(crate) fn increase(&mut self, gauge: Gauge, class: SizeClass, amount: u64) {
        let gauge = gauge as usize;
        let tally = &mut self.classes[class.index()][gauge];
        tally.current += amount as i64;
        let rises = tally.current > tally.peak;
        let all = self.classes[0][gauge].current + self.classes[1][gauge].current;
        if rises | (all > self.peaks[gauge]) {
            self.raise_gauge(gauge);
        }
    }

    #[inline]
    pub(crate) fn decrease(&mut self, gauge: Gauge, class: SizeClass, amount: u64) {
        self.classes[class.index()][gauge as usize].decrease(amount as i64);
    }

    /// One gauge in one class.
    fn tally(&self, class: usize, gauge: usize) -> Tally {
        let tally = self.classes[class][gauge];
        let handed_out = match gauge {
            ACTIVE => ALLOCATION,
            ACTIVE_BYTES => ALLOCATED_BYTES,
            _ => return tally,
        };
        let given = self.classes[class][handed_out];
        Tally {
            current: given.current + tally.current,
            peak: tally.peak,
            // What drains has been freed by the client, but is active still.
            freed: given.freed + tally.base - tally.current,
            base: given.base + tally.base,
        }
    }

    pub(crate) fn get(&self, gauge: Gauge) -> ByClass {
        let gauge = gauge as usize;
        let [small, large] = [self.tally(0, gauge), self.tally(1, gauge)];
        let mut sum = small;
        sum.add(&large);
        sum.peak = self.peaks[gauge];
        ByClass { all: sum.stat(), small: small.stat(), large: large.stat() }
    }

    /// Sets the peak of reserved bytes over both classes, which a device knows exactly.
    pub(crate) fn set_reserved_peak(&mut self, bytes: u64) {
        self.peaks[Gauge::ReservedBytes as usize] = bytes as i64;
    }

    /// Sets every peak, or what stands in its place, to the current value.
    pub(crate) fn reset_peak(&mut self) {
        Row::all().for_each(|row| self.set_peak(row, self.current(row)));
    }

    pub(crate) fn reset_accumulated(&mut self) {
        for tally in self.classes.as_flattened_mut() {
            tally.freed = 0;
            tally.base = tally.current;
        }
        self.oversize_allocations.reset_accumulated();
        self.oversize_segments.reset_accumulated();
    }

    /// Adds another heap's figures. The peak of a sum is at most the sum of the peaks.
    pub(crate) fn add(&mut self, other: &StatTable) {
        let tallies = other.classes.as_flattened();
        for (mine, theirs) in self.classes.as_flattened_mut().iter_mut().zip(tallies) {
            mine.add(theirs);
        }
        for (mine, theirs) in self.peaks.iter_mut().zip(&other.peaks) {
            *mine += theirs;
        }
        self.draining += other.draining;
        self.oversize_allocations.add(&other.oversize_allocations);
        self.oversize_segments.add(&other.oversize_segments);
    }
}

/// Plain counters of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Requests that climbed the ladder to its last step, the flush of everything.
    pub num_alloc_retries: i64,
    /// Requests that ended in out of memory.
    pub num_ooms: i64,
    /// Times that all pending events were waited for.
    pub num_sync_all_streams: i64,
    /// Segments obtained, and runs of pages mapped.
    pub num_device_alloc: i64,
    /// Segments given back, and runs of pages unmapped.
    pub num_device_free: i64,
    /// Pieces of free memory that were moved to where a request fits, and back (policy `ours`).
    /// PyTorch has no such counter, so it is not among the flattened names.
    pub num_moves: i64,
}

/// The statistics of one device at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceStats {
    pub(crate) table: StatTable,
    /// The plain counters.
    pub counters: Counters,
    /// The setting `max_split_size` in bytes when the allocator was made; -1 is unlimited.
    pub max_split_size: i64,
}

impl DeviceStats {
    /// A gauge for both classes and their sum.
    pub fn gauge(&self, gauge: Gauge) -> ByClass {
        self.table.get(gauge)
    }

    /// Blocks of `max_split_size` and more that are handed out.
    pub fn oversize_allocations(&self) -> &Stat {
        &self.table.oversize_allocations
    }

    /// Segments of `max_split_size` and more.
    pub fn oversize_segments(&self) -> &Stat {
        &self.table.oversize_segments
    }

    /// One value by PyTorch's flattened name, such as `allocated_bytes.all.peak` or `num_ooms`.
    pub fn get(&self, key: &str) -> Option<i64> {
        let mut parts = key.split('.');
        let first = parts.next()?;
        let second = parts.next();
        let third = parts.next();
        if parts.next().is_some() {
            return None;
        }
        match (second, third) {
            (None, None) => self.scalar(first),
            (Some(field), None) => field_of(self.single(first)?, field),
            (Some(class), Some(field)) => {
                let gauge = Gauge::ALL.into_iter().find(|gauge| gauge.name() == first)?;
                let by_class = self.table.get(gauge);
                let stat = match class {
                    "all" => &by_class.all,
                    "small_pool" => &by_class.small,
                    "large_pool" => &by_class.large,
                    _ => return None,
                };
                field_of(stat, field)
            }
            (None, Some(_)) => None,
        }
    }

    fn scalar(&self, name: &str) -> Option<i64> {
        self.scalars().into_iter().find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    fn scalars(&self) -> [(&'static str, i64); 6] {
        let c = &self.counters;
        [
            ("max_split_size", self.max_split_size),
            ("num_alloc_retries", c.num_alloc_retries),
            ("num_device_alloc", c.num_device_alloc),
            ("num_device_free", c.num_device_free),
            ("num_ooms", c.num_ooms),
            ("num_sync_all_streams", c.num_sync_all_streams),
        ]
    }

    fn single(&self, name: &str) -> Option<&Stat> {
        match name {
            "oversize_allocations" => Some(&self.table.oversize_allocations),
            "oversize_segments" => Some(&self.table.oversize_segments),
            _ => None,
        }
    }

    /// All values under PyTorch's flattened names, sorted by name.
    pub fn flatten(&self) -> Vec<(String, i64)> {
        let mut rows: Vec<(String, i64)> =
            self.scalars().into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        for name in ["oversize_allocations", "oversize_segments"] {
            if let Some(stat) = self.single(name) {
                rows.extend(stat.fields().map(|(field, value)| (format!("{name}.{field}"), value)));
            }
        }
        for gauge in Gauge::ALL {
            let by_class = self.table.get(gauge);
            for (class, stat) in [
                ("all", &by_class.all),
                ("small_pool", &by_class.small),
                ("large_pool", &by_class.large),
            ] {
                rows.extend(
                    stat.fields()
                        .map(|(field, value)| (format!("{}.{class}.{field}", gauge.name()), value)),
                );
            }
        }
        rows.sort();
        rows
    }
}

fn field_of(stat: &Stat, field: &str) -> Option<i64> {
    stat.fields().into_iter().find(|(name, _)| *name == field).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_remembers_its_peak_and_history() {
        let mut table = StatTable::default();
        for comes in [true, true, true, false, false, true] {
            table.count_oversize_segment(comes);
        }
        let stat = table.oversize_segments;
        assert_eq!(stat, Stat { current: 2, peak: 3, allocated: 4, freed: 2 });
        table.reset_peak();
        table.reset_accumulated();
        assert_eq!(table.oversize_segments, Stat { current: 2, peak: 2, allocated: 0, freed: 0 });
        assert!(!table.has_risen());
    }

    #[test]
    fn rows_are_the_figures_that_have_peaks() {
        let mut table = StatTable::default();
        for (n, gauge) in Gauge::ALL.into_iter().enumerate() {
            let n = n as u64;
            table.increase(gauge, SizeClass::Small, 10 * n + 1);
            table.increase(gauge, SizeClass::Large, 10 * n + 2);
        }
        table.count_oversize_allocation(true);
        let (mut currents, mut peaks) = (Vec::new(), Vec::new());
        for gauge in Gauge::ALL {
            let ByClass { all, small, large } = table.get(gauge);
            currents.extend([small.current, large.current, all.current]);
            peaks.extend([small.peak, large.peak, all.peak]);
        }
        currents.extend([1, 0]);
        peaks.extend([1, 0]);
        assert_eq!(Row::all().map(|row| table.current(row)).collect::<Vec<_>>(), currents);
        assert_eq!(Row::all().map(|row| table.peak(row)).collect::<Vec<_>>(), peaks);
        Row::all().for_each(|row| table.set_peak(row, row.index() as i64));
        assert!(Row::all().all(|row| table.peak(row) == row.index() as i64));
        assert_eq!(Row::all().count(), Row::COUNT);
    }

    #[test]
    fn a_part_notes_what_rises_above_its_ceiling() {
        let mut part = StatTable::part();
        let [small, all] = [0, BOTH].map(|part| Row(3 * (Gauge::ReservedBytes as usize) + part));
        part.set_peak(small, 10);
        part.set_peak(all, 30);
        part.increase(Gauge::ReservedBytes, SizeClass::Small, 10);
        assert!(!part.has_risen());
        part.increase(Gauge::ReservedBytes, SizeClass::Small, 7);
        part.decrease(Gauge::ReservedBytes, SizeClass::Small, 5);
        part.increase(Gauge::ReservedBytes, SizeClass::Large, 1);
        // It is 2 above its ceiling, and was 5 higher; nothing else rose.
        let large = Row(small.0 + 1);
        assert_eq!(part.take_risen()[..], [(small, 5), (large, 0)]);
        assert!(!part.has_risen());
        assert_eq!([small, large, all].map(|row| part.peak(row)), [10, 0, 30]);
        assert_eq!([small, large, all].map(|row| part.current(row)), [12, 1, 13]);
    }

    #[test]
    fn every_flattened_name_can_be_asked_for() {
        let mut stats = DeviceStats::default();
        stats.table.increase(Gauge::ReservedBytes, SizeClass::Large, 20);
        stats.counters.num_ooms = 3;
        let rows = stats.flatten();
        assert_eq!(rows.len(), 9 * 3 * 4 + 2 * 4 + 6);
        assert!(rows.is_sorted());
        for (key, value) in rows {
            assert_eq!(stats.get(&key), Some(value), "{key}");
        }
        assert_eq!(stats.get("reserved_bytes.large_pool.peak"), Some(20));
        assert_eq!(stats.get("num_ooms"), Some(3));
        assert_eq!(stats.get("no.such.key"), None);
        assert_eq!(stats.get("reserved_bytes.all.peak.x"), None);
    }
}
