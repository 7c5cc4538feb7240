//! What driver calls cost. All figures of the model are in this file.

use std::fmt;

use crate::Call;

const MIB: u64 = 1 << 20;

/// Nanoseconds at three sizes, for calls that depend on the size of what they handle. Between the
/// points the model is linear in the size, above the last one it goes on with the last slope, below
/// the first one it is flat.
struct BySize([(u64, u64); 3]);

// Virtual memory: measured on one H200, one handle a call (means of the ranges that repeated runs
// gave).
const CREATE: BySize = BySize([(2 * MIB, 10_000), (128 * MIB, 13_000), (2048 * MIB, 37_500)]);
/// What the first mapping of a page costs beyond [`Call::Map`], whatever its size: 6.3 to 8.2 µs
/// against 0.7 to 1.5 µs for each further one (`docs/measurements/`). In nanoseconds.
pub const FIRST_MAP_NS: u64 = 6_000;
const MAP: BySize = BySize([(2 * MIB, 700), (128 * MIB, 1_000), (2048 * MIB, 3_000)]);
// For one mapping; a run of n costs n times as much (`docs/measurements/`).
const SET_ACCESS: BySize = BySize([(2 * MIB, 26_000), (128 * MIB, 31_000), (2048 * MIB, 90_000)]);
const UNMAP: BySize = BySize([(2 * MIB, 16_000), (128 * MIB, 19_000), (2048 * MIB, 38_000)]);
/// First touch by 16 threads and registration of 1 and 4 GiB, and an estimate for small sizes.
const PIN: BySize =
    BySize([(2 * MIB, 110_000), (1024 * MIB, 47_000_000), (4096 * MIB, 181_000_000)]);
const DESTROY: BySize = BySize([(2 * MIB, 12_000), (128 * MIB, 60_000), (2048 * MIB, 850_000)]);

// cudaMalloc and cudaFree on an idle H200, driver 580.159.04 (medians; `docs/measurements/`).
const ACQUIRE: BySize = BySize([(2 * MIB, 76_000), (128 * MIB, 78_000), (2048 * MIB, 271_000)]);
const RELEASE: BySize = BySize([(2 * MIB, 56_000), (128 * MIB, 146_000), (2048 * MIB, 1_506_000)]);

impl BySize {
    fn at(&self, bytes: u64) -> u64 {
        let BySize([first, middle, last]) = *self;
        let (low, high) = if bytes < middle.0 { (first, middle) } else { (middle, last) };
        let above = bytes.saturating_sub(low.0);
        low.1 + (u128::from(above) * u128::from(high.1 - low.1) / u128::from(high.0 - low.0)) as u64
    }
}

/// Modelled time of one call of this kind on `bytes` bytes, in nanoseconds. Time spent waiting for
/// queued work is not in it, nor what mapping a page for the first time adds ([`FIRST_MAP_NS`]).
pub fn call_ns(call: Call, bytes: u64) -> u64 {
    match call {
        Call::Acquire => ACQUIRE.at(bytes),
        Call::Release => RELEASE.at(bytes),
        Call::Create => CREATE.at(bytes),
        Call::Map => MAP.at(bytes),
        Call::SetAccess => SET_ACCESS.at(bytes),
        Call::Unmap => UNMAP.at(bytes),
        Call::Destroy => DESTROY.at(bytes),
        // Estimates: address space only, no page tables.
        Call::Reserve | Call::Unreserve => 2_000,
        // Measured as above, on events without timing; waiting for one stream to wait is taken to
        // cost what recording does.
        Call::Record | Call::WaitEvent => 320,
        Call::Query => 340,
        // A blocking wait on a reached event.
        Call::Wait => 450,
        Call::Memory => 7_600,
        Call::Pin => PIN.at(bytes),
        // Estimates: half the way back, and 10 GB/s.
        Call::Unpin => PIN.at(bytes) / 2,
        Call::Copy => bytes / 10,
        // Estimates: a call that is answered from a table, and calls that ask the kernel driver.
        Call::DeviceKey => 100,
        Call::ExportSegment | Call::ExportEvent | Call::ExportPage => 10_000,
        Call::OpenSegment | Call::CloseSegment | Call::ImportPage => 50_000,
        Call::AwaitEvent => 50_000,
        // cudaMallocAsync and cudaFreeAsync on a pool that keeps its memory; what growth adds is in
        // `growth_ns`. The others are estimates.
        Call::AllocateOrdered => 700,
        Call::FreeOrdered => 600,
        Call::PoolOptions | Call::PoolUsage => 500,
        Call::CreatePool | Call::DestroyPool | Call::TrimPool => 20_000,
        // Estimates: a look at the stream's state; a walk over a few nodes.
        Call::CaptureStatus | Call::CaptureTips => 150,
        Call::ExtendPast => 500,
    }
}

/// Modelled time of a pool's growth by `bytes`: a handle is made, mapped and made accessible.
pub(crate) fn growth_ns(bytes: u64) -> u64 {
    CREATE.at(bytes) + MAP.at(bytes) + FIRST_MAP_NS + SET_ACCESS.at(bytes)
}

/// What has been spent so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Costs {
    calls: [u64; Call::ALL.len()],
    /// Modelled time inside driver calls, in nanoseconds.
    pub stall_ns: u64,
    /// Simulated time the host waited for queued work with a duration, in nanoseconds.
    pub waited_ns: u64,
}

impl Default for Costs {
    fn default() -> Self {
        Costs { calls: [0; Call::ALL.len()], stall_ns: 0, waited_ns: 0 }
    }
}

impl Costs {
    /// How many calls of this kind were made, failed ones included.
    pub fn calls(&self, call: Call) -> u64 {
        self.calls[call as usize]
    }

    /// How many calls were made in all.
    pub fn total_calls(&self) -> u64 {
        self.calls.iter().sum()
    }

    pub(crate) fn count(&mut self, call: Call) {
        self.calls[call as usize] += 1;
    }
}

impl fmt::Display for Costs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for call in Call::ALL.into_iter().filter(|&call| self.calls(call) > 0) {
            write!(f, "{call} {}, ", self.calls(call))?;
        }
        write!(f, "{} ns in the driver, {} ns waited", self.stall_ns, self.waited_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GiB in 2 MiB handles costs about 22 ms, in 20 MiB handles 2.3 ms, in 512 MiB handles 0.2 ms.
    #[test]
    fn mapping_a_gib_costs_what_was_measured() {
        let gib = |page: u64| {
            let each = call_ns(Call::Create, page * MIB)
                + call_ns(Call::Map, page * MIB)
                + FIRST_MAP_NS
                + call_ns(Call::SetAccess, page * MIB);
            1024u64.div_ceil(page) * each / 1000
        };
        assert!((20_000..=24_000).contains(&gib(2)), "{} us", gib(2));
        assert!((2_000..=2_500).contains(&gib(20)), "{} us", gib(20));
        assert!((100..=250).contains(&gib(512)), "{} us", gib(512));
    }

    #[test]
    fn size_curves_meet_their_points_and_grow() {
        assert_eq!(DESTROY.at(1), 12_000);
        assert_eq!(DESTROY.at(2 * MIB), 12_000);
        assert_eq!(DESTROY.at(128 * MIB), 60_000);
        assert_eq!(DESTROY.at(2048 * MIB), 850_000);
        assert!(DESTROY.at(4096 * MIB) > 850_000);
        assert!(DESTROY.at(u64::MAX) > DESTROY.at(u64::MAX / 2));
    }
}
