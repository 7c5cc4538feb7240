//! What is counted, where it changes: under the lock of a container, or when memory is pinned.

use super::stats::{BUCKETS, DurationStat, HostStat, bucket_of};

/// A gauge as hot paths keep it: sums that only grow, so that each change is one addition.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gauge {
    /// All increases ever.
    pub(super) up: u64,
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

    pub(super) fn stat(&self) -> HostStat {
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
pub(super) struct Tally {
    pub(super) count: Gauge,
    pub(super) bytes: Gauge,
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

pub(super) type Tallies = Box<[Tally; BUCKETS]>;

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
    pub(super) by_class: Tallies,
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
    pub(super) by_class: Tallies,
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
