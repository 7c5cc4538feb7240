//! Recorded programs, and the loops that run them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use alloc_core::CachingAllocator;
use alloc_core::backend::{MemoryInfo, VirtualMemory};

use super::client::Client;
use super::row::digits;
use super::{Figures, Rig};
use crate::engine::EngineError;
use crate::workload::{Action, Workload};

/// A recorded program, ready to run: nothing is looked up by name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Program {
    /// Name of the trace, without its folders.
    file: String,
    steps: Vec<Step>,
    allocations: usize,
    streams: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Step {
    is_alloc: bool,
    /// Which allocation, in order of their beginning.
    id: u32,
    bytes: u64,
    /// The stream of the allocation, for its free too.
    stream: u32,
}

impl Program {
    /// The operations of `workload`.
    pub fn new(workload: &Workload) -> Self {
        let mut steps = Vec::with_capacity(workload.ops.len());
        let mut in_slot = vec![(0, 0); workload.slots];
        let mut allocations = 0;
        for op in &workload.ops {
            let last = &mut in_slot[op.slot as usize];
            let (is_alloc, bytes) = match op.action {
                Action::Alloc { bytes, stream } => {
                    *last = (allocations, stream);
                    allocations += 1;
                    (true, bytes)
                }
                Action::Free { bytes } => (false, bytes),
            };
            let (id, stream) = *last;
            steps.push(Step { is_alloc, id, bytes, stream });
        }
        let file = workload.path.file_name();
        Program {
            file: file.map_or_else(String::new, |name| name.to_string_lossy().into()),
            steps,
            allocations: allocations as usize,
            streams: workload.streams.len(),
        }
    }

    /// Whether there is nothing to run.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}

/// A program that runs: what is live, by allocation.
struct Run<B: VirtualMemory, C: Client<B>> {
    /// By stream.
    clients: Vec<C>,
    blocks: Vec<Option<C::Block>>,
    sizes: Vec<u64>,
    live: u64,
    requested_peak: u64,
}

impl<B: VirtualMemory + MemoryInfo, C: Client<B>> Run<B, C> {
    fn new(rig: &Rig<B>, program: &Program) -> Result<Self, EngineError> {
        let clients = (0..program.streams).map(|_| rig.client::<C>());
        // Both are written once, so that the loop is not the first to touch their memory.
        let (mut blocks, mut sizes) = (Vec::new(), Vec::new());
        blocks.resize_with(program.allocations, || None);
        sizes.resize(program.allocations, 0);
        let clients = clients.collect::<Result<_, _>>()?;
        Ok(Run { clients, blocks, sizes, live: 0, requested_peak: 0 })
    }

    #[inline]
    fn step(&mut self, step: &Step) -> Result<(), EngineError> {
        let id = step.id as usize;
        if step.is_alloc {
            self.blocks[id] = Some(self.clients[step.stream as usize].allocate(step.bytes)?);
            self.sizes[id] = step.bytes;
            self.live += step.bytes;
            self.requested_peak = self.requested_peak.max(self.live);
        } else if let Some(block) = self.blocks[id].take() {
            self.clients[step.stream as usize].free(block)?;
            self.live -= self.sizes[id];
        }
        Ok(())
    }

    /// Frees what the program left.
    fn end(self) -> Result<(), EngineError> {
        self.blocks.into_iter().flatten().try_for_each(|block| self.clients[0].free(block))
    }
}

/// Runs `program` with the clock read at its two ends only.
pub(super) fn whole<B: VirtualMemory + MemoryInfo, C: Client<B>>(
    rig: &Rig<B>,
    program: &Program,
) -> Result<Figures, EngineError> {
    let mut run = Run::<B, C>::new(rig, program)?;
    let begin = Instant::now();
    for step in &program.steps {
        run.step(step)?;
    }
    let time = begin.elapsed();
    let figures = Figures::Whole {
        file: program.file.clone(),
        ops: program.steps.len(),
        total_ms: digits(time.as_secs_f64() * 1e3, 2),
        requested_peak: run.requested_peak,
        reserved_peak: rig.reserved_peak()?,
    };
    run.end()?;
    Ok(figures)
}

/// Runs `program` and times each of its operations.
pub(super) fn replay<B: VirtualMemory + MemoryInfo, C: Client<B>>(
    rig: &Rig<B>,
    program: &Program,
) -> Result<Figures, EngineError> {
    let mut run = Run::<B, C>::new(rig, program)?;
    let (mut times, mut hits) = (room_for(program.steps.len()), room_for(program.steps.len()));
    let misses = Misses::counted(&rig.allocator);
    for step in &program.steps {
        let missed = misses.count();
        let begin = Instant::now();
        run.step(step)?;
        let time = begin.elapsed().as_nanos() as f32;
        times.push(time);
        if misses.count() == missed {
            hits.push(time);
        }
    }
    let total: f64 = times.iter().copied().map(f64::from).sum();
    times.sort_unstable_by(f32::total_cmp);
    hits.sort_unstable_by(f32::total_cmp);
    let longest = times.last().copied().map_or(0.0, f64::from);
    let figures = Figures::Replay {
        file: program.file.clone(),
        ops: program.steps.len(),
        total_ms: digits(total / 1e6, 2),
        p50_ns: digits(quantile(&times, 0.5), 0),
        p99_ns: digits(quantile(&times, 0.99), 0),
        max_us: digits(longest / 1e3, 1),
        requested_peak: run.requested_peak,
        reserved_peak: rig.reserved_peak()?,
        misses: misses.count(),
        hit_p50_ns: digits(quantile(&hits, 0.5), 0),
        hit_p99_ns: digits(quantile(&hits, 0.99), 0),
    };
    run.end()?;
    Ok(figures)
}

/// An empty vector whose memory has been written, so that the loop is not the first to touch it.
fn room_for(times: usize) -> Vec<f32> {
    let mut room = Vec::new();
    room.resize(times, 1.0);
    room.clear();
    room
}

/// The value that so great a part of the sorted ones does not exceed; 0 of none.
fn quantile(sorted: &[f32], part: f64) -> f64 {
    sorted.get((sorted.len() as f64 * part) as usize).copied().map_or(0.0, f64::from)
}

/// Counts the requests of an allocator that no cached block serves.
struct Misses(Arc<AtomicUsize>);

impl Misses {
    fn counted<B: VirtualMemory>(allocator: &CachingAllocator<B>) -> Self {
        let count = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&count);
        // Callbacks run at every miss and nowhere else; this one has nothing to free.
        allocator.add_free_memory_callback("bench", move |_| {
            counter.fetch_add(1, Ordering::Relaxed);
            false
        });
        Misses(count)
    }

    fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::trace_csv;
    use std::path::Path;

    #[test]
    fn a_program_numbers_allocations_in_their_order() {
        let text = "time_us,op,id,bytes,stream\n0,alloc,90,1,0\n0,free,90,,\n0,alloc,80,2,3\n\
            0,alloc,70,3,0\n0,free,80,,\n";
        let workload = trace_csv::read(Path::new("a/t.csv"), text.as_bytes()).unwrap();
        let program = Program::new(&workload);
        let steps: Vec<_> = program.steps.iter().map(|s| (s.is_alloc, s.id, s.bytes)).collect();
        let expected = [(true, 0, 1), (false, 0, 1), (true, 1, 2), (true, 2, 3), (false, 1, 2)];
        assert_eq!(steps, expected);
        assert_eq!((program.file.as_str(), program.allocations, program.streams), ("t.csv", 3, 2));
        let streams: Vec<_> = program.steps.iter().map(|step| step.stream).collect();
        assert_eq!(streams, [0, 0, 1, 0, 1]);
    }
}
