//! What one growth goes by: how much may be reserved before memory is moved, and how large new handles
//! are.

use super::super::{Device, HeapCell, Shared};
use super::Store;
use crate::backend::{Backend, SEGMENT_ALIGN};
use crate::config::OursSettings;
use crate::heap::Request;
use crate::lane::Lane;
use crate::size_class::{BLOCK_BYTES_MIN, LARGE_SEGMENT_BYTES, SizeClass};
use crate::stats::Gauge;
use std::sync::atomic::Ordering;

/// The largest handle of a request that is cut into a number of parts: PyTorch's page.
const PART_BYTES_MAX: u64 = LARGE_SEGMENT_BYTES;

/// Growths in a row without a free after which a phase counts as calm.
const CALM_AFTER: u32 = 2;

/// What one attempt goes by.
pub(super) struct Terms {
    pub(super) knobs: OursSettings,
    /// Where the request belongs.
    pub(super) lane: Lane,
    /// Multiple of all handle sizes.
    pub(super) unit: u64,
    /// What may be reserved before memory is moved.
    pub(super) line: u64,
    /// Most bytes that were ever needed.
    pub(super) peak: u64,
    /// What is created at once at least.
    pub(super) step: u64,
    /// The largest new handle.
    pub(super) handle_bytes_max: u64,
    /// Whether other streams may be waited for.
    pub(super) waiting: bool,
    /// The line was reached and moving as usual did not do.
    pub(super) desperate: bool,
    /// Nothing may move into, out of or inside the heap: it is only given new handles.
    pub(super) pinned: bool,
}

impl Terms {
    /// The smallest part of a handle that moves without the rest.
    pub(super) fn part_bytes_min(&self) -> u64 {
        if self.desperate { BLOCK_BYTES_MIN } else { self.knobs.part_bytes_min }
    }
}

/// How much memory a device needs.
struct Usage {
    /// Bytes that clients hold or work may still use.
    active: u64,
    /// Bytes that shards may have besides.
    slack: u64,
}

impl<B: Backend> Shared<B> {
    pub(super) fn terms(
        &self,
        store: &Store<B>,
        cell: &HeapCell<B>,
        request: &Request,
        waiting: bool,
    ) -> Terms {
        let device = &self.devices[cell.device.index()];
        let knobs = self.settings.lock().ours;
        let unit = store.granularity(cell.device).max(SEGMENT_ALIGN);
        let usage = self.usage(device);
        let needed = usage.active + request.rounded;
        let peak = device.needed_peak.fetch_max(needed, Ordering::Relaxed).max(needed);
        let growth = {
            let mut state = cell.lock();
            let heap = &mut state.body.heap;
            let lane = heap.lane_for(request.class, request.rounded);
            Growth { lane, in_a_row: heap.note_growth(request.class) }
        };
        let free = device.reserved().saturating_sub(usage.active);
        let step = match request.class {
            SizeClass::Small => 0,
            SizeClass::Large => step_bytes(&knobs, peak, free),
        };
        let step = step.min(knobs.handle_bytes_max) / unit * unit;
        let pinned = cell.pool().is_pinned();
        let margin = growth.margin(&knobs, peak);
        let line = peak.saturating_add(margin).saturating_add(device.pace.extra());
        let line = if cell.shard > 0 { line.saturating_add(usage.slack) } else { line };
        Terms {
            knobs,
            lane: growth.lane,
            unit,
            line: if pinned { u64::MAX } else { line },
            peak,
            step,
            handle_bytes_max: growth.handle_bytes_max(&knobs, request, unit).max(step),
            waiting,
            desperate: false,
            pinned,
        }
    }

    fn usage(&self, device: &Device<B>) -> Usage {
        let mut usage = Usage { active: 0, slack: 0 };
        for cell in device.heaps() {
            let active = cell.bytes(Gauge::ActiveBytes);
            usage.active += active;
            usage.slack += cell.slack(active);
        }
        usage
    }
}

/// What to create at once at least: a part of what was ever needed, but little where little lies
/// `free`. A program whose memory is used up when it grows may be near its peak, where all that is
/// created ahead is too much; one that has holes loses more to them.
fn step_bytes(knobs: &OursSettings, peak: u64, free: u64) -> u64 {
    let whole = (peak as f64 * knobs.step) as u64;
    whole.min(whole / 7 + free / 2)
}

/// What is known of a growth.
struct Growth {
    lane: Lane,
    /// Growths of the large class right before this one that had no free between them.
    in_a_row: u32,
}

impl Growth {
    /// What may be reserved beyond what was ever needed. More in a calm phase, where memory only grows:
    /// what comes next uses it, and is made of larger handles for it.
    fn margin(&self, knobs: &OursSettings, peak: u64) -> u64 {
        let margin = ((peak as f64 * knobs.margin) as u64).max(knobs.margin_bytes_min);
        if self.lane == Lane::Small || self.in_a_row < CALM_AFTER {
            return margin;
        }
        let calm = (peak as f64 * knobs.margin_calm) as u64;
        margin.max(calm.min(knobs.handle_bytes_calm))
    }

    /// The largest handle to create for a request: as large as the request or as usual, larger only if
    /// it would take very many of those. What lasts is not moved, so its handles may be larger than
    /// usual; and in a calm phase they become larger from growth to growth.
    fn handle_bytes_max(&self, knobs: &OursSettings, request: &Request, unit: u64) -> u64 {
        let usual = match self.lane {
            Lane::Small => return unit,
            Lane::Large => knobs.handle_bytes_max,
            Lane::Lasting => knobs.handle_bytes_calm.max(knobs.handle_bytes_max),
        };
        let share = request.rounded / u64::from(knobs.handle_share) / unit * unit;
        let usual = share.min(usual).max(unit);
        let part = request.rounded / u64::from(knobs.handle_parts);
        let usual = usual.max(part.min(PART_BYTES_MAX)) / unit * unit;
        let doublings = self.in_a_row.saturating_sub(CALM_AFTER).min(16);
        let calm = (usual << doublings).min(knobs.handle_bytes_calm);
        usual.max(calm) / unit * unit
    }
}
