//! Finds the smallest device on which a workload completes.

use crate::engine::Engine;
use crate::error::Failure;
use crate::replay::{Plan, completes, replay};
use crate::workload::Workload;
use crate::{configuration::DEFAULT_CAPACITY, replay::Options};

/// Sizes that are tried are multiples of this many bytes.
pub const STEP: u64 = 2 << 20;

/// The answer of a search.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fit {
    /// Bytes of the smallest device found.
    pub capacity: u64,
    /// Most bytes asked for at one time.
    pub requested_peak: u64,
    /// Most bytes held at one time on a device that is large enough for anything.
    pub unlimited_peak: u64,
    /// Replays that it took.
    pub runs: u32,
}

/// Searches for the smallest device, in steps of [`STEP`], on which `workload` completes.
///
/// Below the peak of bytes asked for it cannot; with as many bytes as it holds on an unlimited
/// device it does. In between the search halves the interval, which supposes that a larger device
/// never fails where a smaller one succeeds. The answer is certain in one respect: the workload was
/// seen to complete on it, and to fail on a device one step smaller, unless that one is smaller
/// than what the workload asks for.
///
/// Segments lie where the simulated driver puts them: recorded ones are not handed out, because a
/// smaller device makes the allocator ask for others. `progress` is told the runs so far and the
/// size that is tried next.
///
/// # Errors
/// What `make` returns, and [`Failure::Stopped`] if the workload fails even on an unlimited device,
/// or fails on any device of the interval for another reason than lack of memory.
pub fn fit<E: Engine>(
    mut make: impl FnMut(&Plan) -> Result<E, Failure>,
    workload: &Workload,
    label: &str,
    mut progress: impl FnMut(u32, u64),
) -> Result<Fit, Failure> {
    let unlimited = unlimited_capacity(workload);
    progress(0, unlimited);
    let options = Options { capacity: unlimited, feed: false, timing: false };
    let outcome = replay(&mut make, workload, options, |_| {})?;
    if let Some(stopped) = outcome.stopped {
        return Err(stopped.failure(workload, label, unlimited));
    }
    let steps = |bytes: u64| bytes.div_ceil(STEP);
    let unlimited_peak = outcome.driver.reserved_peak;
    let mut search = Search { make: &mut make, workload, label, progress, runs: 1 };
    // Invariant: `high` steps suffice, fewer than `low` steps do not.
    let mut low = steps(workload.requested_peak).max(1);
    let mut high = steps(unlimited_peak).max(low);
    while !search.completes(high)? {
        // The allocator used its freedom on the larger device: what it held is not enough here.
        low = high + 1;
        high += high.div_ceil(8);
    }
    while low < high {
        let middle = low + (high - low) / 2;
        if search.completes(middle)? {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Ok(Fit {
        capacity: high * STEP,
        requested_peak: workload.requested_peak,
        unlimited_peak,
        runs: search.runs,
    })
}

/// A device that is large enough for any allocator that does not waste three quarters of it.
pub fn unlimited_capacity(workload: &Workload) -> u64 {
    workload.requested_peak.saturating_mul(4).max(DEFAULT_CAPACITY)
}

struct Search<'a, M, P> {
    make: &'a mut M,
    workload: &'a Workload,
    label: &'a str,
    progress: P,
    runs: u32,
}

impl<E: Engine, M: FnMut(&Plan) -> Result<E, Failure>, P: FnMut(u32, u64)> Search<'_, M, P> {
    /// Whether the workload completes on a device of `steps` steps.
    fn completes(&mut self, steps: u64) -> Result<bool, Failure> {
        let capacity = steps.saturating_mul(STEP);
        (self.progress)(self.runs, capacity);
        self.runs += 1;
        let plan =
            Plan { capacity, streams: self.workload.streams.len(), feed: Vec::new(), watch: false };
        match completes(&mut (self.make)(&plan)?, self.workload) {
            Ok(()) => Ok(true),
            Err(stopped) if stopped.is_out_of_memory() && capacity < u64::MAX => Ok(false),
            Err(stopped) => Err(stopped.failure(self.workload, self.label, capacity)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::fake::Fake;
    use crate::format::trace_csv;
    use std::path::Path;

    const MIB: u64 = 1 << 20;

    fn workload(rows: &str) -> Workload {
        let text = format!("time_us,op,id,bytes,stream\n{rows}");
        trace_csv::read(Path::new("w.csv"), text.as_bytes()).unwrap()
    }

    fn make(plan: &Plan) -> Result<Fake, Failure> {
        Ok(Fake::new(plan.capacity, []))
    }

    /// What the fake engine keeps it gives back only when the device is full: it holds 9 + 3 units
    /// of 2 MiB if it can, and completes with 9 + 2.
    #[test]
    fn the_smallest_device_is_found() {
        let rows = "0,alloc,1,18874368,0\n0,alloc,2,2097152,0\n0,free,2,,\n0,alloc,3,4194304,0\n";
        let mut sizes = Vec::new();
        let fit = fit(make, &workload(rows), "x", |_, bytes| sizes.push(bytes)).unwrap();
        assert_eq!((fit.capacity, fit.unlimited_peak), (22 * MIB, 24 * MIB));
        assert_eq!((fit.requested_peak, fit.runs), (22 * MIB, 3));
        assert_eq!(sizes, [unlimited_capacity(&workload(rows)), 24 * MIB, 22 * MIB]);
    }

    #[test]
    fn one_step_less_fails() {
        let rows: String = (1..40)
            .map(|i| format!("0,alloc,{i},{},0\n0,free,{i},,\n", i * 300_000))
            .chain(["0,alloc,99,1,0\n".to_owned()])
            .collect();
        let w = workload(&rows);
        let fit = fit(make, &w, "x", |_, _| {}).unwrap();
        assert!(fit.capacity < fit.unlimited_peak);
        assert_eq!(completes(&mut Fake::new(fit.capacity, []), &w), Ok(()));
        assert!(
            fit.capacity - STEP < fit.requested_peak
                || completes(&mut Fake::new(fit.capacity - STEP, []), &w).is_err()
        );
    }

    #[test]
    fn an_empty_workload_fits_anywhere() {
        assert_eq!(fit(make, &workload(""), "x", |_, _| {}).unwrap().capacity, STEP);
    }

    #[test]
    fn more_than_the_unlimited_peak_may_be_needed() {
        // An engine that wants a reserve of 6 MiB on devices of less than 64 MiB.
        let greedy = |plan: &Plan| {
            let reserve = if plan.capacity < 64 * MIB { 6 * MIB } else { 0 };
            Ok(Fake::new(plan.capacity.saturating_sub(reserve), []))
        };
        let fit = fit(greedy, &workload("0,alloc,1,20971520,0\n"), "x", |_, _| {}).unwrap();
        assert_eq!((fit.unlimited_peak, fit.capacity), (20 * MIB, 26 * MIB));
    }
}
