//! Statistics under PyTorch's names, and a few of our own.

use std::time::Duration;

/// Number of size classes: one for every power of two that fits in a `u64`.
pub const BUCKETS: usize = 64;

/// The class of a size: the exponent of the next power of two. `bytes` must not exceed 2^63.
pub(crate) fn bucket_of(bytes: u64) -> usize {
    bytes.next_power_of_two().trailing_zeros() as usize
}

/// One gauge with its history.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct HostStat {
    /// Value now.
    pub current: i64,
    /// Largest value since the last reset of peaks.
    pub peak: i64,
    /// Sum of all increases since the last reset of accumulated values.
    pub allocated: i64,
    /// Sum of all decreases since then.
    pub freed: i64,
}

impl HostStat {
    /// Adds another container's figures; the peak of a sum is at most the sum of the peaks.
    fn add(&mut self, gauge: &Gauge) {
        let other = gauge.stat();
        self.current += other.current;
        self.peak += other.peak;
        self.allocated += other.allocated;
        self.freed += other.freed;
    }

    fn fields(&self) -> [(&'static str, i64); 4] {
        [
            ("allocated", self.allocated),
            ("current", self.current),
            ("freed", self.freed),
            ("peak", self.peak),
        ]
    }
}

/// Durations of one kind of backend call, in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DurationStat {
    /// Sum over all calls since the last reset of accumulated values.
    pub total: i64,
    /// Longest call since the last reset of peaks.
    pub max: i64,
    /// Shortest call since the last reset of peaks; 0 if there was none.
    pub min: i64,
    /// Calls since the last reset of accumulated values.
    pub count: i64,
}

impl DurationStat {
    pub(crate) fn record(&mut self, duration: Duration) {
        let micros = i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
        self.min = if self.is_fresh() { micros } else { self.min.min(micros) };
        self.max = self.max.max(micros);
        self.total = self.total.saturating_add(micros);
        self.count += 1;
    }

    fn is_fresh(&self) -> bool {
        self.min == 0 && self.max == 0
    }

    /// Mean duration since the last reset of accumulated values; 0 if there was no call.
    pub fn average(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.total as f64 / self.count as f64 }
    }

    fn reset_peak(&mut self) {
        self.max = 0;
        self.min = 0;
    }

    fn reset_accumulated(&mut self) {
        self.total = 0;
        self.count = 0;
    }

    fn fields(&self) -> [(&'static str, i64); 4] {
        [("count", self.count), ("max", self.max), ("min", self.min), ("total", self.total)]
    }
}

/// What happened in one size class.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BucketStats {
    /// Blocks handed out, or freed but waiting for events.
    pub active_requests: HostStat,
    /// Their bytes.
    pub active_bytes: HostStat,
    /// Segments pinned.
    pub allocations: HostStat,
    /// Their bytes.
    pub allocated_bytes: HostStat,
}

/// A gauge as hot paths keep it: sums that only grow, so that each change is one addition.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gauge {
    up: u64,
    down: u64,
    peak: u64,
    /// `up` and `down` at the last reset of accumulated values.
    up_before: u64,
    down_before: u64,
}

impl Gauge {
    #[inline]
    fn increase(&mut self, amount: u64) {
        self.up += amount;
        self.peak = self.peak.max(self.current());
    }

    /// As many changes at once.
    fn apply(&mut self, run: &Run, amount: u64) {
        self.peak = self.peak.max(self.current() + run.rise() * amount);
        self.up += run.starts * amount;
        self.down += run.ends * amount;
    }

    #[inline]
    fn decrease(&mut self, amount: u64) {
        self.down += amount;
    }

    #[inline]
    pub(crate) fn current(&self) -> u64 {
        self.up - self.down
    }

    fn reset_peak(&mut self) {
        self.peak = self.current();
    }

    fn reset_accumulated(&mut self) {
        self.up_before = self.up;
        self.down_before = self.down;
    }

    fn stat(&self) -> HostStat {
        HostStat {
            current: self.current() as i64,
            peak: self.peak as i64,
            allocated: (self.up - self.up_before) as i64,
            freed: (self.down - self.down_before) as i64,
        }
    }
}

/// Blocks and their bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    count: Gauge,
    bytes: Gauge,
}

impl Tally {
    #[inline]
    fn increase(&mut self, bytes: u64) {
        self.count.increase(1);
        self.bytes.increase(bytes);
    }

    #[inline]
    fn decrease(&mut self, bytes: u64) {
        self.count.decrease(1);
        self.bytes.decrease(bytes);
    }

    fn apply(&mut self, run: &Run) {
        self.count.apply(run, 1);
        self.bytes.apply(run, run.bytes);
    }
}

type Tallies = Box<[Tally; BUCKETS]>;

fn tallies() -> Tallies {
    Box::new([Tally::default(); BUCKETS])
}

/// Requests of one size that are served and freed one after the other, as programs do in loops: only
/// counted, until a request of another size comes.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    bytes: u64,
    requested: u64,
    starts: u64,
    ends: u64,
    /// [`rise`](Run::rise), up to the last end.
    high: u64,
}

impl Run {
    /// By how many blocks more were active than at the beginning, at most.
    fn rise(&self) -> u64 {
        self.high.max(self.starts.saturating_sub(self.ends))
    }
}

/// What the clients hold of one container; changed under the container's lock.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    /// Not in `figures` yet.
    run: Run,
    figures: Figures,
    /// Bytes of freed blocks that wait for events.
    pub(crate) draining_bytes: u64,
}

/// The figures of a [`Ledger`].
#[derive(Clone, Debug)]
pub(crate) struct Figures {
    pub(crate) active_requests: Gauge,
    pub(crate) active_bytes: Gauge,
    pub(crate) requested_bytes: Gauge,
    by_class: Tallies,
}

impl Default for Figures {
    fn default() -> Self {
        Figures {
            active_requests: Gauge::default(),
            active_bytes: Gauge::default(),
            requested_bytes: Gauge::default(),
            by_class: tallies(),
        }
    }
}

impl Ledger {
    /// A block is handed out.
    #[inline]
    pub(crate) fn start(&mut self, bytes: u64, requested: u64) {
        if self.is_run_of(bytes, requested) {
            self.start_again();
        } else {
            self.begin_run(bytes, requested);
            self.figures.start(bytes, requested);
        }
    }

    /// A block is free again.
    #[inline]
    pub(crate) fn end(&mut self, bytes: u64, requested: u64) {
        if self.is_run_of(bytes, requested) {
            self.end_again();
        } else {
            self.begin_run(bytes, requested);
            self.figures.end(bytes, requested);
        }
    }

    /// Whether the last block was of that size.
    #[inline(always)]
    pub(crate) fn is_run_of(&self, bytes: u64, requested: u64) -> bool {
        self.run.bytes == bytes && self.run.requested == requested
    }

    /// As [`start`](Ledger::start), of a block of the same size as the last one.
    #[inline(always)]
    pub(crate) fn start_again(&mut self) {
        self.run.starts += 1;
    }

    /// As [`end`](Ledger::end), of a block of the same size as the last one.
    #[inline(always)]
    pub(crate) fn end_again(&mut self) {
        let run = &mut self.run;
        if run.starts > run.ends + run.high {
            run.high = run.starts - run.ends;
        }
        run.ends += 1;
    }

    #[inline]
    fn begin_run(&mut self, bytes: u64, requested: u64) {
        if self.run.starts + self.run.ends > 0 {
            self.settle();
        }
        (self.run.bytes, self.run.requested) = (bytes, requested);
    }

    /// Brings the figures up to date.
    #[inline(never)]
    fn settle(&mut self) {
        let run = std::mem::take(&mut self.run);
        self.figures.apply(&run);
    }

    /// What is active now: blocks, their bytes, and those that were asked for.
    pub(crate) fn active(&self) -> [u64; 3] {
        let Ledger { run, figures, .. } = self;
        let now = |gauge: &Gauge, each| gauge.current() + run.starts * each - run.ends * each;
        [
            now(&figures.active_requests, 1),
            now(&figures.active_bytes, run.bytes),
            now(&figures.requested_bytes, run.requested),
        ]
    }

    /// The figures of now.
    pub(crate) fn figures(&mut self) -> &mut Figures {
        self.settle();
        &mut self.figures
    }
}

impl Figures {
    #[inline]
    fn start(&mut self, bytes: u64, requested: u64) {
        self.active_requests.increase(1);
        self.active_bytes.increase(bytes);
        self.requested_bytes.increase(requested);
        self.by_class[bucket_of(bytes)].increase(bytes);
    }

    #[inline]
    fn end(&mut self, bytes: u64, requested: u64) {
        self.active_requests.decrease(1);
        self.active_bytes.decrease(bytes);
        self.requested_bytes.decrease(requested);
        self.by_class[bucket_of(bytes)].decrease(bytes);
    }

    fn apply(&mut self, run: &Run) {
        self.active_requests.apply(run, 1);
        self.active_bytes.apply(run, run.bytes);
        self.requested_bytes.apply(run, run.requested);
        self.by_class[bucket_of(run.bytes)].apply(run);
    }

    fn each(&mut self) -> impl Iterator<Item = &mut Gauge> {
        [&mut self.active_requests, &mut self.active_bytes, &mut self.requested_bytes]
            .into_iter()
            .chain(each_of(&mut self.by_class))
    }

    pub(crate) fn reset_peak(&mut self) {
        self.each().for_each(Gauge::reset_peak);
    }

    pub(crate) fn reset_accumulated(&mut self) {
        self.each().for_each(Gauge::reset_accumulated);
    }
}

fn each_of(tallies: &mut Tallies) -> impl Iterator<Item = &mut Gauge> {
    tallies.iter_mut().flat_map(|tally| [&mut tally.count, &mut tally.bytes])
}

/// What is pinned, and what that took. Changed only when memory is pinned or given back.
#[derive(Clone, Debug)]
pub(crate) struct PinLedger {
    pub(crate) allocations: Gauge,
    pub(crate) allocated_bytes: Gauge,
    by_class: Tallies,
    pub(crate) alloc_time: DurationStat,
    pub(crate) free_time: DurationStat,
}

impl Default for PinLedger {
    fn default() -> Self {
        PinLedger {
            allocations: Gauge::default(),
            allocated_bytes: Gauge::default(),
            by_class: tallies(),
            alloc_time: DurationStat::default(),
            free_time: DurationStat::default(),
        }
    }
}

impl PinLedger {
    pub(crate) fn pinned(&mut self, bytes: u64) {
        self.allocations.increase(1);
        self.allocated_bytes.increase(bytes);
        self.by_class[bucket_of(bytes)].increase(bytes);
    }

    pub(crate) fn unpinned(&mut self, bytes: u64) {
        self.allocations.decrease(1);
        self.allocated_bytes.decrease(bytes);
        self.by_class[bucket_of(bytes)].decrease(bytes);
    }

    fn each(&mut self) -> impl Iterator<Item = &mut Gauge> {
        [&mut self.allocations, &mut self.allocated_bytes]
            .into_iter()
            .chain(each_of(&mut self.by_class))
    }

    pub(crate) fn reset_peak(&mut self) {
        self.each().for_each(Gauge::reset_peak);
        self.alloc_time.reset_peak();
        self.free_time.reset_peak();
    }

    pub(crate) fn reset_accumulated(&mut self) {
        self.each().for_each(Gauge::reset_accumulated);
        self.alloc_time.reset_accumulated();
        self.free_time.reset_accumulated();
    }
}

/// The statistics of a host allocator at one moment, all pools together.
///
/// Currents and sums are exact. `allocations.peak` and `allocated_bytes.peak` are exact too; the
/// peaks of the `active_*` and requested gauges are sums over buckets (policy `pytorch`, as in
/// PyTorch) or heaps (policy `ours`), so they may overstate, never understate. They are at most the
/// peak of what was pinned.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostStats {
    /// Segments pinned: in use or cached.
    pub allocations: HostStat,
    /// Bytes pinned.
    pub allocated_bytes: HostStat,
    /// Blocks handed out, or freed but waiting for events.
    pub active_requests: HostStat,
    /// Their bytes, rounding included.
    pub active_bytes: HostStat,
    /// The bytes that were asked for in those blocks.
    pub requested_bytes: HostStat,
    /// Time in pin calls.
    pub host_alloc_time: DurationStat,
    /// Time in unpin calls.
    pub host_free_time: DurationStat,
    /// Segments ever pinned, by size class.
    pub bucket_allocation: [u64; BUCKETS],
    /// Figures by size class.
    pub buckets: Box<[BucketStats; BUCKETS]>,
    /// Bytes of freed blocks that wait for events (part of `active_bytes`).
    pub draining_bytes: u64,
    /// Event records and background queries that failed and were put off.
    pub deferred_failures: u64,
    /// Segments that could not be given back and stayed cached.
    pub unpin_failures: u64,
    /// Requests that no free block served.
    pub num_misses: u64,
    /// Requests that ended in out of memory.
    pub num_ooms: u64,
}

impl HostStats {
    pub(crate) fn new(pins: &PinLedger) -> Self {
        let mut buckets = Box::new([BucketStats::default(); BUCKETS]);
        let mut bucket_allocation = [0; BUCKETS];
        for (class, pinned) in pins.by_class.iter().enumerate() {
            buckets[class].allocations = pinned.count.stat();
            buckets[class].allocated_bytes = pinned.bytes.stat();
            bucket_allocation[class] = pinned.count.up;
        }
        HostStats {
            allocations: pins.allocations.stat(),
            allocated_bytes: pins.allocated_bytes.stat(),
            active_requests: HostStat::default(),
            active_bytes: HostStat::default(),
            requested_bytes: HostStat::default(),
            host_alloc_time: pins.alloc_time,
            host_free_time: pins.free_time,
            bucket_allocation,
            buckets,
            draining_bytes: 0,
            deferred_failures: 0,
            unpin_failures: 0,
            num_misses: 0,
            num_ooms: 0,
        }
    }

    pub(crate) fn add(&mut self, ledger: &mut Ledger) {
        self.draining_bytes += ledger.draining_bytes;
        let figures = ledger.figures();
        self.active_requests.add(&figures.active_requests);
        self.active_bytes.add(&figures.active_bytes);
        self.requested_bytes.add(&figures.requested_bytes);
        for (bucket, active) in self.buckets.iter_mut().zip(figures.by_class.iter()) {
            bucket.active_requests.add(&active.count);
            bucket.active_bytes.add(&active.bytes);
        }
    }

    /// No more was ever active than was pinned.
    pub(crate) fn bound_peaks(&mut self) {
        let bound = self.allocated_bytes.peak;
        for stat in [&mut self.active_bytes, &mut self.requested_bytes] {
            stat.peak = stat.peak.min(bound);
        }
    }

    /// Calls that pinned memory since the last reset of accumulated values.
    pub fn num_host_alloc(&self) -> i64 {
        self.allocations.allocated
    }

    /// Calls that gave pinned memory back since the last reset of accumulated values.
    pub fn num_host_free(&self) -> i64 {
        self.allocations.freed
    }

    /// One value by PyTorch's flattened name, such as `active_bytes.peak` or `host_alloc_time.max`.
    pub fn get(&self, key: &str) -> Option<i64> {
        self.rows().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// All values under PyTorch's flattened names, sorted by name. Averages are left out: see
    /// [`DurationStat::average`].
    pub fn flatten(&self) -> Vec<(String, i64)> {
        let mut rows: Vec<_> = self.rows().collect();
        rows.sort();
        rows
    }

    fn rows(&self) -> impl Iterator<Item = (String, i64)> {
        let gauges = [
            ("allocations", self.allocations),
            ("allocated_bytes", self.allocated_bytes),
            ("active_requests", self.active_requests),
            ("active_bytes", self.active_bytes),
            ("requested_bytes", self.requested_bytes),
        ]
        .map(|(name, stat)| (name, stat.fields()));
        let times =
            [("host_alloc_time", self.host_alloc_time), ("host_free_time", self.host_free_time)]
                .map(|(name, stat)| (name, stat.fields()));
        let counts = [
            ("num_host_alloc".to_owned(), self.num_host_alloc()),
            ("num_host_free".to_owned(), self.num_host_free()),
        ];
        gauges
            .into_iter()
            .chain(times)
            .flat_map(|(name, fields)| fields.map(|(field, v)| (format!("{name}.{field}"), v)))
            .chain(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_the_exponent_of_the_next_power_of_two() {
        for exponent in 0..63 {
            let power = 1_u64 << exponent;
            assert_eq!(bucket_of(power), exponent);
            if power > 2 {
                assert_eq!(bucket_of(power - 1), exponent);
            }
            assert_eq!(bucket_of(power + 1), exponent + 1);
        }
        assert_eq!(bucket_of(1 << 63), 63);
    }

    #[test]
    fn durations_keep_extremes_and_sums() {
        let mut stat = DurationStat::default();
        for micros in [30, 10, 20] {
            stat.record(Duration::from_micros(micros));
        }
        assert_eq!(stat, DurationStat { total: 60, max: 30, min: 10, count: 3 });
        assert_eq!(stat.average(), 20.0);
        stat.reset_accumulated();
        stat.reset_peak();
        assert_eq!(stat, DurationStat::default());
    }

    /// A run is the same as its single changes, whatever they are.
    #[test]
    fn runs_lose_nothing() {
        let sizes = [(4096, 4000), (4096, 4096), (512, 1), (1 << 24, 1 << 24)];
        let (mut runs, mut plain) = (Ledger::default(), Figures::default());
        let mut active = Vec::new();
        let mut state = 1_u64;
        for step in 0..3000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let random = (state >> 33) as usize;
            // Long runs, short ones, and none.
            let size = sizes[if step % 1000 < 500 { random / 16 % 4 } else { step / 7 % 4 }];
            if random.is_multiple_of(2) {
                runs.start(size.0, size.1);
                plain.start(size.0, size.1);
                active.push(size);
            } else if let Some(at) = active.iter().rposition(|&other| other == size) {
                active.swap_remove(at);
                runs.end(size.0, size.1);
                plain.end(size.0, size.1);
            }
            if step % 97 == 0 {
                let gauges = |figures: &mut Figures| -> Vec<_> {
                    figures.each().map(|gauge| gauge.stat()).collect()
                };
                assert_eq!(gauges(runs.figures()), gauges(&mut plain), "step {step}");
            }
            if step % 400 == 0 {
                runs.figures().reset_peak();
                plain.reset_peak();
            }
        }
    }

    #[test]
    fn every_flattened_name_can_be_asked_for() {
        let mut pins = PinLedger::default();
        pins.pinned(4096);
        let mut ledger = Ledger::default();
        ledger.start(4096, 4000);
        let mut stats = HostStats::new(&pins);
        stats.add(&mut ledger);
        let rows = stats.flatten();
        assert_eq!(rows.len(), 5 * 4 + 2 * 4 + 2);
        assert!(rows.is_sorted());
        for (key, value) in rows {
            assert_eq!(stats.get(&key), Some(value), "{key}");
        }
        assert_eq!(stats.get("active_bytes.current"), Some(4096));
        assert_eq!(stats.get("requested_bytes.peak"), Some(4000));
        assert_eq!(stats.get("num_host_alloc"), Some(1));
        assert_eq!(stats.get("no.such"), None);
        assert_eq!(stats.buckets[12].active_requests.current, 1);
    }
}
