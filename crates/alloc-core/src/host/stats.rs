//! Statistics under PyTorch's names, and a few of our own.

use super::ledger::{Gauge, Ledger, PinLedger};
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
    /// Whether there was a call since the last reset of peaks; it may have taken no microsecond.
    has_extremes: bool,
}

impl DurationStat {
    pub(crate) fn record(&mut self, duration: Duration) {
        let micros = i64::try_from(duration.as_micros()).unwrap_or(i64::MAX);
        self.min = if self.has_extremes { self.min.min(micros) } else { micros };
        self.has_extremes = true;
        self.max = self.max.max(micros);
        self.total = self.total.saturating_add(micros);
        self.count += 1;
    }

    /// Mean duration since the last reset of accumulated values; 0 if there was no call.
    pub fn average(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.total as f64 / self.count as f64 }
    }

    pub(super) fn reset_peak(&mut self) {
        self.max = 0;
        self.min = 0;
        self.has_extremes = false;
    }

    pub(super) fn reset_accumulated(&mut self) {
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
        assert_eq!((stat.total, stat.max, stat.min, stat.count), (60, 30, 10, 3));
        assert_eq!(stat.average(), 20.0);
        stat.reset_accumulated();
        stat.reset_peak();
        assert_eq!(stat, DurationStat::default());
    }

    #[test]
    fn a_call_that_takes_no_microsecond_is_the_shortest() {
        let mut stat = DurationStat::default();
        [0, 30].into_iter().for_each(|micros| stat.record(Duration::from_micros(micros)));
        assert_eq!((stat.max, stat.min), (30, 0));
        stat.reset_peak();
        stat.record(Duration::from_micros(20));
        assert_eq!((stat.max, stat.min), (20, 20));
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
