//! Exact peaks of sums over heaps, without anything that all hits share.
//!
//! What a device keeps is the peak of each figure. It is shared out to the heaps as ceilings: how far
//! the figure may rise in each of them without asking. The ceilings of a figure add up to no more than
//! its peak, so as long as each heap stays below its own, the sum stays below the peak. A heap that
//! rises above finds room with other heaps that have more than they need, one at a time; when that is
//! not enough, all heaps of the device are locked at once, and the true sum says whether there is a new
//! peak (`docs/adr/0020-exact-peaks.md`).
//!
//! The operation that rose is not over before this is done, so it counts as happening at that moment.

use super::Shared;
use super::device::{Device, HeapCell, HeapState, Heaps};
use crate::backend::Backend;
use crate::stats::{Row, Rows, StatTable};
use crate::sync::{Mutex, ShortGuard};
use crate::units::DeviceId;
use smallvec::SmallVec;
use std::sync::Arc;

/// Heaps that are asked for room before all are locked.
const LENDERS_MAX: usize = 8;

/// The peaks of a device. Its lock comes before those of heaps; with it, one thread may hold several
/// of those.
pub(super) type Peaks = Mutex<[i64; Row::COUNT]>;

/// All heaps of a device, locked.
type Locked<'a, B> = SmallVec<[ShortGuard<'a, HeapState<B>>; 16]>;

fn lock_all<B: Backend>(heaps: &Heaps<B>) -> Locked<'_, B> {
    heaps.counting().map(|cell| cell.state.lock()).collect()
}

fn sum<B: Backend>(heaps: &Locked<'_, B>, row: Row) -> i64 {
    heaps.iter().map(|state| state.stats.current(row)).sum()
}

impl<B: Backend> Device<B> {
    /// Figures of a heap rose above their ceilings. No heap is locked by this thread.
    #[cold]
    #[inline(never)]
    pub(super) fn find_room(&self, cell: &HeapCell<B>, risen: Rows) {
        let Some(peaks) = &self.peaks else { return };
        let heaps = self.heaps.read();
        // Room on its way from one heap to another must not be shared out a second time.
        let mut peaks = peaks.lock();
        let missing = borrow(&heaps, cell, risen);
        if !missing.is_empty() {
            raise(&heaps, &mut peaks, cell, &missing);
        }
    }

    /// Runs `f` with the peaks and all heaps, none of which changes meanwhile.
    fn at_rest<R>(
        &self,
        peaks: &Peaks,
        f: impl FnOnce(&mut [i64; Row::COUNT], &mut Locked<'_, B>) -> R,
    ) -> R {
        let heaps = self.heaps.read();
        let mut peaks = peaks.lock();
        f(&mut peaks, &mut lock_all(&heaps))
    }
}

/// Takes room from other heaps, half of what each has left or what is needed. Returns what there is
/// still no room for.
fn borrow<B: Backend>(heaps: &Heaps<B>, cell: &HeapCell<B>, mut risen: Rows) -> Rows {
    let is_other = |other: &&Arc<HeapCell<B>>| other.index != cell.index;
    // Beginning behind the heap itself, so that not all turn to the same one.
    let behind = heaps.counting().skip_while(is_other).filter(is_other);
    let before = heaps.counting().take_while(is_other);
    for other in behind.chain(before).take(LENDERS_MAX) {
        let lent: Rows = {
            let stats = &mut other.state.lock().stats;
            risen.iter().map(|(row, _)| (*row, lend(stats, *row))).collect()
        };
        let stats = &mut cell.state.lock().stats;
        lent.into_iter().for_each(|(row, room)| stats.set_peak(row, stats.peak(row) + room));
        risen.retain(|(row, higher)| stats.current(*row) + *higher > stats.peak(*row));
        if risen.is_empty() {
            break;
        }
    }
    risen
}

/// Takes half of the room that a heap has left.
fn lend(stats: &mut StatTable, row: Row) -> i64 {
    let room = (stats.peak(row) - stats.current(row)).max(0);
    let lent = room - room / 2;
    stats.set_peak(row, stats.peak(row) - lent);
    lent
}

/// Raises the peaks to what the sums are or were in the course of the operation, and shares out what
/// is below them: most of it to the heap that needed it, to the others at most half of what they have.
fn raise<B: Backend>(
    heaps: &Heaps<B>,
    peaks: &mut [i64; Row::COUNT],
    cell: &HeapCell<B>,
    missing: &Rows,
) {
    let mut locked = lock_all(heaps);
    for &(row, higher) in missing {
        let sum = sum(&locked, row);
        let peak = &mut peaks[row.index()];
        *peak = (*peak).max(sum + higher);
        let mut room = *peak - sum;
        let most = room / (2 * locked.len() as i64);
        for other in locked.iter_mut().filter(|state| state.body.name != cell.name) {
            let stats = &mut other.stats;
            let current = stats.current(row);
            let keeps = ((stats.peak(row) - current) / 2).clamp(0, most);
            stats.set_peak(row, current + keeps);
            room -= keeps;
        }
        for own in locked.iter_mut().filter(|state| state.body.name == cell.name) {
            let stats = &mut own.stats;
            stats.set_peak(row, stats.current(row) + room);
        }
    }
}

impl<B: Backend> Shared<B> {
    pub(super) fn stat_table(&self, device: DeviceId) -> StatTable {
        let device = &self.devices[device.index()];
        let mut total = StatTable::default();
        let Some(peaks) = &device.peaks else {
            for cell in device.counting_heaps() {
                total.add(&cell.state.lock().stats);
            }
            return total;
        };
        device.at_rest(peaks, |peaks, heaps| {
            heaps.iter().for_each(|state| total.add(&state.stats));
            for row in Row::all() {
                // An operation may be about to find room.
                peaks[row.index()] = peaks[row.index()].max(total.current(row));
                total.set_peak(row, peaks[row.index()]);
            }
        });
        total
    }

    pub(super) fn reset_peaks(&self, device: DeviceId) {
        let device = &self.devices[device.index()];
        let Some(peaks) = &device.peaks else {
            for cell in device.counting_heaps() {
                cell.state.lock().stats.reset_peak();
            }
            return;
        };
        device.at_rest(peaks, |peaks, heaps| {
            heaps.iter_mut().for_each(|state| state.stats.reset_peak());
            Row::all().for_each(|row| peaks[row.index()] = sum(heaps, row));
        });
    }

    pub(super) fn reset_accumulated(&self, device: DeviceId) {
        for cell in self.devices[device.index()].counting_heaps() {
            cell.state.lock().stats.reset_accumulated();
        }
    }
}

impl<B: Backend> Device<B> {
    /// I6: what is shared out of a peak is no more than the peak. With no call running.
    pub(super) fn check_ceilings(&self) -> Result<(), String> {
        let Some(peaks) = &self.peaks else { return Ok(()) };
        self.at_rest(peaks, |peaks, heaps| {
            for row in Row::all() {
                let shared_out: i64 = heaps.iter().map(|state| state.stats.peak(row)).sum();
                let peak = peaks[row.index()];
                if shared_out > peak {
                    return Err(format!("{row:?} may rise to {shared_out}, its peak is {peak}"));
                }
            }
            Ok(())
        })
    }
}
