//! Other workloads of the same kind: a recorded one with sizes changed, or with a part left out.
//!
//! What a policy makes of one recording may be luck: the layout of memory is chaotic, and any small
//! change moves the result. Variations show how far.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::error::Failure;
use crate::workload::{Action, Op, Workload, WorkloadBuilder};

/// Sizes that [`Variation::Jitter`] leaves alone: up to 64 KiB.
const JITTER_ABOVE: u64 = 64 << 10;
/// Largest change by [`Variation::Jitter`], in thousandths.
const JITTER: u64 = 30;
/// Parts of a workload in which [`Variation::Jitter`] changes sizes differently.
const JITTER_PARTS: usize = 20;

/// One way to change a workload.
#[derive(Clone, PartialEq, Debug)]
pub enum Variation {
    /// Every size is multiplied by this many hundredths.
    Scale(u64),
    /// Sizes above 64 KiB change by up to ±3 %: equal sizes equally, but differently in each
    /// twentieth of the run. The number is the seed.
    Jitter(u64),
    /// Without the allocations that are made and freed in this part of the run, in hundredths.
    Without(Range<u64>),
}

impl Variation {
    /// Four scalings, three jitters, and three parts left out.
    pub fn standard() -> Vec<Variation> {
        let scales = [90, 95, 105, 110].map(Variation::Scale);
        let jitters = [1, 2, 3].map(Variation::Jitter);
        let without = [5..30, 30..60, 60..95].map(Variation::Without);
        scales.into_iter().chain(jitters).chain(without).collect()
    }

    /// The changed workload. Recorded segments are left out of it: they belong to the original.
    ///
    /// # Errors
    /// None for a workload that a reader made: those have no impossible operations.
    pub fn apply(&self, workload: &Workload) -> Result<Workload, Failure> {
        let kept = self.kept(workload);
        let mut built = WorkloadBuilder::new(&workload.path);
        let part = workload.ops.len().div_ceil(JITTER_PARTS).max(1);
        for (index, Op { time_us, line, slot, action }) in workload.ops.iter().copied().enumerate()
        {
            if !kept[index] {
                continue;
            }
            match action {
                Action::Alloc { bytes, stream } => {
                    let bytes = self.bytes(bytes, index / part);
                    let stream = workload.streams[stream as usize];
                    built.alloc(line, time_us, slot.into(), bytes, stream)?;
                }
                Action::Free { .. } => built.free(line, time_us, slot.into())?,
            }
        }
        let mut built = built.finish();
        built.variation = Some(self.clone());
        Ok(built)
    }

    fn bytes(&self, bytes: u64, part: usize) -> u64 {
        match self {
            Variation::Scale(hundredths) => {
                let scaled = u128::from(bytes) * u128::from(*hundredths) / 100;
                u64::try_from(scaled).unwrap_or(u64::MAX).max(bytes.min(1))
            }
            Variation::Jitter(seed) if bytes > JITTER_ABOVE => {
                let random = mixed(bytes, *seed, part as u64);
                let thousandths = 1000 - JITTER + random % (2 * JITTER + 1);
                (u128::from(bytes) * u128::from(thousandths) / 1000).min(u64::MAX.into()) as u64
            }
            Variation::Jitter(_) | Variation::Without(_) => bytes,
        }
    }

    /// Which operations stay.
    fn kept(&self, workload: &Workload) -> Vec<bool> {
        let mut kept = vec![true; workload.ops.len()];
        let Variation::Without(part) = self else { return kept };
        let at = |hundredths: u64| (kept.len() as u128 * u128::from(hundredths) / 100) as usize;
        let part = at(part.start)..at(part.end);
        let mut made = vec![None; workload.slots];
        for (index, op) in workload.ops.iter().enumerate() {
            let slot = &mut made[op.slot as usize];
            match op.action {
                Action::Alloc { .. } => *slot = Some(index),
                Action::Free { .. } => {
                    let inside =
                        slot.take().filter(|at| part.contains(at) && part.contains(&index));
                    if let Some(alloc) = inside {
                        (kept[alloc], kept[index]) = (false, false);
                    }
                }
            }
        }
        kept
    }
}

/// A number that looks random and depends on all three.
fn mixed(bytes: u64, seed: u64, part: u64) -> u64 {
    let seed = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut x = bytes ^ seed ^ part.wrapping_mul(0xD1B5_4A32_D192_ED03);
    x ^= x >> 31;
    x = x.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^ (x >> 29)
}

impl fmt::Display for Variation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Variation::Scale(hundredths) => write!(f, "scale:{hundredths}"),
            Variation::Jitter(seed) => write!(f, "jitter:{seed}"),
            Variation::Without(part) => write!(f, "without:{}-{}", part.start, part.end),
        }
    }
}

impl FromStr for Variation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is none of scale:PERCENT (1 to 1000), jitter:SEED, without:FROM-TO (percent \
                 of the run), all"
            )
        };
        let number = |text: &str| text.parse::<u64>().map_err(|_| wrong());
        match text.split_once(':') {
            Some(("scale", hundredths)) => match number(hundredths)? {
                hundredths @ 1..=1000 => Ok(Variation::Scale(hundredths)),
                _ => Err(wrong()),
            },
            Some(("jitter", seed)) => Ok(Variation::Jitter(number(seed)?)),
            Some(("without", part)) => {
                let (from, to) = part.split_once('-').ok_or_else(wrong)?;
                let part = number(from)?..number(to)?;
                if part.is_empty() || part.end > 100 {
                    return Err(wrong());
                }
                Ok(Variation::Without(part))
            }
            _ => Err(wrong()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::trace_csv;
    use std::path::Path;

    fn workload() -> Workload {
        // Ten operations; the second allocation lives and dies in the middle.
        let rows = "0,segment_alloc,2097152,2097152,\n\
                    0,alloc,1,1000000,7\n1,alloc,2,200000,9\n2,free,2,,\n3,alloc,3,64,7\n4,free,3,,\n\
                    5,alloc,4,1000000,7\n6,free,1,,\n7,free,4,,\n8,alloc,5,1000000,7\n9,free,5,,\n";
        let text = format!("time_us,op,id,bytes,stream\n{rows}");
        trace_csv::read(Path::new("w.csv"), text.as_bytes()).unwrap()
    }

    fn sizes(workload: &Workload) -> Vec<u64> {
        let size = |op: &Op| match op.action {
            Action::Alloc { bytes, .. } => Some(bytes),
            Action::Free { .. } => None,
        };
        workload.ops.iter().filter_map(size).collect()
    }

    #[test]
    fn scaling_changes_every_size_and_nothing_else() {
        let original = workload();
        let scaled = Variation::Scale(110).apply(&original).unwrap();
        assert_eq!(sizes(&scaled), [1_100_000, 220_000, 70, 1_100_000, 1_100_000]);
        assert_eq!(scaled.requested_peak, 2_200_000);
        assert_eq!((scaled.ops.len(), scaled.wall_us), (10, original.wall_us));
        assert_eq!(scaled.streams, original.streams);
        assert!(scaled.segments.is_empty() && !original.segments.is_empty());
        assert_eq!(scaled.file(), "w.csv (scale:110)");
        assert_eq!(Variation::Scale(1).apply(&original).unwrap().ops.len(), 10);
    }

    #[test]
    fn jitter_is_a_matter_of_seed_size_and_time() {
        let jittered = |seed| sizes(&Variation::Jitter(seed).apply(&workload()).unwrap());
        let sizes = jittered(1);
        assert_eq!((&sizes, sizes[2]), (&jittered(1), 64));
        assert_ne!(sizes, jittered(2));
        let near = |bytes: u64, of: u64| bytes.abs_diff(of) <= of * 3 / 100;
        assert!(near(sizes[0], 1_000_000) && near(sizes[1], 200_000));
        assert_ne!(sizes[0], sizes[4], "another part of the run");
    }

    #[test]
    fn what_lives_in_the_part_is_left_out() {
        let without = |part| sizes(&Variation::Without(part).apply(&workload()).unwrap());
        assert_eq!(without(10..50), [1_000_000, 1_000_000, 1_000_000]);
        assert_eq!(without(10..40), [1_000_000, 64, 1_000_000, 1_000_000]);
        assert_eq!(without(0..100), Vec::<u64>::new());
    }

    #[test]
    fn variations_are_written_as_they_are_read() {
        for variation in Variation::standard() {
            assert_eq!(variation.to_string().parse(), Ok(variation));
        }
        for wrong in
            ["", "scale", "scale:0", "scale:x", "without:30-30", "without:1-101", "twice:2"]
        {
            assert!(wrong.parse::<Variation>().unwrap_err().contains("scale:PERCENT"), "{wrong}");
        }
    }
}
