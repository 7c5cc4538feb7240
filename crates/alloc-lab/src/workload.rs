//! A workload in the form that a replay needs: checked, with dense numbers for allocations and
//! streams, so that nothing but the allocator costs time while it runs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::error::Failure;
use crate::vary::Variation;

/// One operation of the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Op {
    /// Microseconds since the beginning of the recording.
    pub time_us: u64,
    /// Line in the file, counted from 1.
    pub line: u32,
    /// Which allocation. Numbers are dense and reused after a free; two that live at the same time
    /// differ.
    pub slot: u32,
    /// What to do.
    pub action: Action,
}

/// What an [`Op`] does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Allocate.
    Alloc {
        /// Bytes asked for.
        bytes: u64,
        /// Index into [`Workload::streams`].
        stream: u32,
    },
    /// Free.
    Free {
        /// Bytes that were asked for.
        bytes: u64,
    },
}

/// A segment that the recorded program's allocator took from the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordedSegment {
    /// Its address.
    pub addr: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

/// A recorded program: what it allocated and freed, in order.
#[derive(Clone, PartialEq, Debug)]
pub struct Workload {
    /// Where it came from.
    pub path: PathBuf,
    /// What was changed in it.
    pub variation: Option<Variation>,
    /// The operations, in order.
    pub ops: Vec<Op>,
    /// The segments that the recorded allocator took, in order; empty if the file has none.
    pub segments: Vec<RecordedSegment>,
    /// The file's stream numbers, ascending; operations hold indices into this list.
    pub streams: Vec<u32>,
    /// Numbers of slots in use: one more than the largest.
    pub slots: usize,
    /// Largest sum of bytes asked for by live allocations.
    pub requested_peak: u64,
    /// Largest time in the file, in microseconds.
    pub wall_us: u64,
}

impl Workload {
    /// The workload's file as it was given, and what was changed in it, for reports.
    pub fn file(&self) -> String {
        self.varied(self.path.display().to_string())
    }

    /// The last part of the file's name without its suffixes, and what was changed, for titles.
    pub fn name(&self) -> String {
        let name = self.path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into());
        self.varied(name.split('.').next().unwrap_or_default().to_owned())
    }

    fn varied(&self, name: String) -> String {
        match &self.variation {
            Some(variation) => format!("{name} ({variation})"),
            None => name,
        }
    }

    /// Number of operations up to and including the one after which the bytes asked for are at
    /// their peak for the first time.
    pub fn ops_to_peak(&self) -> usize {
        let mut live = 0u128;
        let mut peak = (0, 0);
        for (i, op) in self.ops.iter().enumerate() {
            match op.action {
                Action::Alloc { bytes, .. } => live += u128::from(bytes),
                Action::Free { bytes } => live -= u128::from(bytes),
            }
            if live > peak.0 {
                peak = (live, i + 1);
            }
        }
        peak.1
    }
}

/// What was last done to an id.
#[derive(Clone, Copy)]
enum Id {
    Live { slot: u32, bytes: u64, line: u32 },
    Freed { line: u32 },
}

/// Builds a [`Workload`] operation by operation and refuses what no program can have done. Every
/// file format ends here, so all of them are checked alike.
pub struct WorkloadBuilder {
    workload: Workload,
    ids: HashMap<u64, Id>,
    free_slots: Vec<u32>,
    streams: HashMap<u32, u32>,
    live_bytes: u128,
    peak_bytes: u128,
}

impl WorkloadBuilder {
    /// An empty workload from `path`.
    pub fn new(path: &Path) -> Self {
        WorkloadBuilder {
            workload: Workload {
                path: path.to_owned(),
                variation: None,
                ops: Vec::new(),
                segments: Vec::new(),
                streams: Vec::new(),
                slots: 0,
                requested_peak: 0,
                wall_us: 0,
            },
            ids: HashMap::new(),
            free_slots: Vec::new(),
            streams: HashMap::new(),
            live_bytes: 0,
            peak_bytes: 0,
        }
    }

    /// Adds an allocation of `bytes` on `stream`, which is called `id` from now on.
    ///
    /// # Errors
    /// If `id` is live.
    pub fn alloc(
        &mut self,
        line: u32,
        time_us: u64,
        id: u64,
        bytes: u64,
        stream: u32,
    ) -> Result<(), Failure> {
        if let Some(Id::Live { line: since, .. }) = self.ids.get(&id) {
            return Err(self.broken(line, format!("alloc of id {id}, live since line {since}")));
        }
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.workload.slots += 1;
            (self.workload.slots - 1) as u32
        });
        self.ids.insert(id, Id::Live { slot, bytes, line });
        let next = self.streams.len() as u32;
        let stream = *self.streams.entry(stream).or_insert(next);
        self.live_bytes += u128::from(bytes);
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        self.push(line, time_us, slot, Action::Alloc { bytes, stream });
        Ok(())
    }

    /// Adds the free of `id`.
    ///
    /// # Errors
    /// If `id` is not live.
    pub fn free(&mut self, line: u32, time_us: u64, id: u64) -> Result<(), Failure> {
        let (slot, bytes) = match self.ids.get(&id) {
            Some(Id::Live { slot, bytes, .. }) => (*slot, *bytes),
            Some(Id::Freed { line: before }) => {
                let what = format!("free of id {id}, which is not live: freed at line {before}");
                return Err(self.broken(line, what));
            }
            None => {
                let what = format!("free of id {id}, which is not live: never allocated");
                return Err(self.broken(line, what));
            }
        };
        self.ids.insert(id, Id::Freed { line });
        self.free_slots.push(slot);
        self.live_bytes -= u128::from(bytes);
        self.push(line, time_us, slot, Action::Free { bytes });
        Ok(())
    }

    /// Adds a segment that the recorded allocator took from the driver.
    pub fn segment(&mut self, segment: RecordedSegment) {
        self.workload.segments.push(segment);
    }

    /// The finished workload.
    pub fn finish(mut self) -> Workload {
        let numbers = sorted_numbers(&self.streams);
        let mut rank = vec![0; numbers.len()];
        for (sorted, (_, seen)) in numbers.iter().enumerate() {
            rank[*seen as usize] = sorted as u32;
        }
        for op in &mut self.workload.ops {
            if let Action::Alloc { stream, .. } = &mut op.action {
                *stream = rank[*stream as usize];
            }
        }
        self.workload.streams = numbers.into_iter().map(|(number, _)| number).collect();
        self.workload.requested_peak = u64::try_from(self.peak_bytes).unwrap_or(u64::MAX);
        self.workload
    }

    fn push(&mut self, line: u32, time_us: u64, slot: u32, action: Action) {
        self.workload.wall_us = self.workload.wall_us.max(time_us);
        self.workload.ops.push(Op { time_us, line, slot, action });
    }

    fn broken(&self, line: u32, what: String) -> Failure {
        Failure::input_at(&self.workload.path, line.into(), what)
    }
}

impl std::fmt::Debug for WorkloadBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkloadBuilder").field("ops", &self.workload.ops.len()).finish()
    }
}

/// (number in the file, order of first appearance), ascending by number.
fn sorted_numbers(streams: &HashMap<u32, u32>) -> Vec<(u32, u32)> {
    let mut numbers: Vec<(u32, u32)> = streams.iter().map(|(&n, &i)| (n, i)).collect();
    numbers.sort_unstable();
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn builder() -> WorkloadBuilder {
        WorkloadBuilder::new(Path::new("dir/some.trace.csv.gz"))
    }

    #[test]
    fn slots_are_dense_and_reused() {
        let mut b = builder();
        b.alloc(2, 0, 100, 10, 0).unwrap();
        b.alloc(3, 1, 200, 20, 0).unwrap();
        b.free(4, 2, 100).unwrap();
        b.alloc(5, 3, 300, 5, 0).unwrap();
        let w = b.finish();
        assert_eq!(w.slots, 2);
        assert_eq!(w.ops.iter().map(|op| op.slot).collect::<Vec<_>>(), [0, 1, 0, 0]);
        assert_eq!((w.requested_peak, w.wall_us), (30, 3));
        assert_eq!(w.ops_to_peak(), 2);
        assert_eq!(w.name(), "some");
    }

    #[test]
    fn streams_keep_the_order_of_their_numbers() {
        let mut b = builder();
        b.alloc(2, 0, 1, 1, 70).unwrap();
        b.alloc(3, 0, 2, 1, 4_000_000_000).unwrap();
        b.alloc(4, 0, 3, 1, 5).unwrap();
        let w = b.finish();
        assert_eq!(w.streams, [5, 70, 4_000_000_000]);
        let used: Vec<u32> = w
            .ops
            .iter()
            .map(|op| match op.action {
                Action::Alloc { stream, .. } => w.streams[stream as usize],
                Action::Free { .. } => unreachable!("only allocations here"),
            })
            .collect();
        assert_eq!(used, [70, 4_000_000_000, 5]);
    }

    #[test]
    fn impossible_programs_are_refused_with_their_line() {
        let mut b = builder();
        b.alloc(2, 0, 1, 8, 0).unwrap();
        let twice = b.alloc(3, 0, 1, 8, 0).unwrap_err().to_string();
        assert!(twice.ends_with(":3: alloc of id 1, live since line 2"), "{twice}");
        b.free(4, 0, 1).unwrap();
        let again = b.free(5, 0, 1).unwrap_err().to_string();
        assert!(again.ends_with(":5: free of id 1, which is not live: freed at line 4"), "{again}");
        let never = b.free(6, 0, 9).unwrap_err().to_string();
        assert!(never.ends_with(":6: free of id 9, which is not live: never allocated"), "{never}");
        b.alloc(7, 0, 1, 8, 0).unwrap();
        assert_eq!(b.finish().ops.len(), 3);
    }

    #[test]
    fn a_peak_beyond_64_bits_saturates() {
        let mut b = builder();
        b.alloc(2, 0, 1, u64::MAX, 0).unwrap();
        b.alloc(3, 0, 2, u64::MAX, 0).unwrap();
        assert_eq!(b.finish().requested_peak, u64::MAX);
    }
}
