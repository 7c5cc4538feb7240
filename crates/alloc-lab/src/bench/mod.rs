//! Measures the host time of the allocator, with the modes, the arguments and the loops of
//! `peers/peer.cpp`, which measures other allocators. Whatever is changed in a loop here must be
//! changed there too.

mod client;
mod generator;
mod loops;
mod program;
mod row;

use std::sync::Arc;

use alloc_core::CachingAllocator;
use alloc_core::backend::{MemoryInfo, VirtualMemory};
use mock_backend::MockBackend;

use crate::configuration::{Configuration, DEFAULT_CAPACITY};
use crate::engine::{EngineError, refusal};
use crate::error::Failure;
use crate::machine::{self, BackendName, DEVICE};
use client::{ByAddress, ByHandle, Client};
pub use program::Program;
pub use row::{BenchRow, Figures, ThreadFigures};

/// What to measure.
#[derive(Clone, Debug)]
pub enum Measurement {
    /// Allocate and free `bytes`, `pairs` times.
    Pingpong {
        /// Size.
        bytes: u64,
        /// How often.
        pairs: u32,
    },
    /// Free and fill a random slot, again and again.
    Churn(Churn),
    /// Churn on so many threads, each on a stream of its own.
    Threads(u32, Churn),
    /// Churn on so many threads, all on one stream.
    Shared(u32, Churn),
    /// Pairs while `blocks` others are live.
    Live {
        /// The others.
        blocks: u32,
        /// Pairs of each kind.
        steps: u32,
    },
    /// The operations of a recorded program, each timed.
    Replay(Arc<Program>),
    /// The same without a clock between them.
    Whole(Arc<Program>),
}

/// Arguments of churn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Churn {
    /// Slots.
    pub slots: u32,
    /// Steps that are measured; half as many more come before.
    pub steps: u32,
    /// Sizes are drawn from 2^9 to 2^`max_log`: 10 to 32.
    pub max_log: u32,
    /// Seed of the random numbers. Each of several threads has its own, counted from 7.
    pub seed: u64,
}

/// The interface through which the allocator is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Api {
    /// A stream handle and allocations as values
    Handle,
    /// Addresses, looked up when they are freed
    Raw,
}

impl Api {
    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Api::Handle => "handle",
            Api::Raw => "raw",
        }
    }
}

/// What a benchmark runs on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Subject {
    /// Policy and settings.
    pub configuration: Configuration,
    /// Interface.
    pub api: Api,
    /// Device.
    pub backend: BackendName,
}

impl Subject {
    /// Measures once, on a fresh allocator.
    ///
    /// # Errors
    /// [`Failure::NoGpu`] without the device asked for; [`Failure::Usage`] for a wrong settings
    /// string; [`Failure::Refused`] if an operation fails.
    pub fn measure(&self, measurement: &Measurement) -> Result<BenchRow, Failure> {
        let config = self.configuration.config()?;
        let figures = match self.backend {
            BackendName::Mock => {
                let backend = MockBackend::builder().device(DEFAULT_CAPACITY).build();
                let allocator = machine::timed_allocator(backend, config, true)?;
                let rig = Rig { allocator, new_stream: |backend| Ok(backend.stream(DEVICE)) };
                rig.measure(self.api, measurement)?
            }
            BackendName::Cuda => {
                let backend = machine::cuda()?;
                let refused = |error: alloc_cuda::CudaError| Failure::Refused(error.to_string());
                let virtual_memory = backend.has_virtual_memory(DEVICE).map_err(refused)?;
                let allocator = machine::timed_allocator(backend, config, virtual_memory)?;
                let rig = Rig { allocator, new_stream: |backend| backend.create_stream(DEVICE) };
                rig.measure(self.api, measurement)?
            }
        };
        Ok(BenchRow {
            alloc: "ours",
            conf: self.configuration.conf.clone(),
            figures,
            policy: self.configuration.policy.name(),
            api: self.api.name(),
            backend: self.backend.name(),
        })
    }

    /// Measures `rounds` times and returns the rows in order of their main figure: the one in the
    /// middle is the median. `rounds` is at least 1.
    ///
    /// # Errors
    /// As [`measure`](Self::measure).
    pub fn rounds(&self, measurement: &Measurement, rounds: u32) -> Result<Vec<BenchRow>, Failure> {
        let rows = (0..rounds).map(|_| self.measure(measurement));
        let mut rows = rows.collect::<Result<Vec<_>, _>>()?;
        rows.sort_by(|a, b| a.figures.key().total_cmp(&b.figures.key()));
        Ok(rows)
    }
}

/// The measurements of an overview, without replays.
pub fn overview() -> Vec<Measurement> {
    let churn = |slots| Churn { slots, steps: 1_000_000, max_log: 22, seed: 7 };
    let mut list = vec![
        Measurement::Pingpong { bytes: 1 << 10, pairs: 2_000_000 },
        Measurement::Pingpong { bytes: 64 << 20, pairs: 2_000_000 },
    ];
    list.extend([64, 1024, 8192].map(|slots| Measurement::Churn(churn(slots))));
    list.extend([1, 2, 16].map(|threads| Measurement::Threads(threads, churn(1024))));
    list.extend([2, 16].map(|threads| Measurement::Shared(threads, churn(1024))));
    list.extend(
        [1_000, 10_000, 100_000, 1_000_000]
            .map(|blocks| Measurement::Live { blocks, steps: 1_000_000 }),
    );
    list
}

/// An allocator, and how to make streams for it.
struct Rig<B: VirtualMemory> {
    allocator: CachingAllocator<B>,
    new_stream: fn(&B) -> Result<B::Stream, B::Error>,
}

impl<B: VirtualMemory + MemoryInfo> Rig<B> {
    fn measure(&self, api: Api, measurement: &Measurement) -> Result<Figures, Failure> {
        let figures = match api {
            Api::Handle => loops::measure::<B, ByHandle<B>>(self, measurement),
            Api::Raw => loops::measure::<B, ByAddress<B>>(self, measurement),
        };
        figures.map_err(|error| {
            let (EngineError::OutOfMemory(text) | EngineError::Refused(text)) = error;
            Failure::Refused(text)
        })
    }

    /// A client of a new stream.
    fn client<C: Client<B>>(&self) -> Result<C, EngineError> {
        let stream = (self.new_stream)(self.allocator.backend());
        let stream = stream.map_err(|error| EngineError::Refused(error.to_string()))?;
        C::new(&self.allocator, &stream)
    }

    /// Most bytes taken from the device so far, by the allocator's statistics.
    fn reserved_peak(&self) -> Result<i64, EngineError> {
        let stats = self.allocator.stats(DEVICE).map_err(refusal)?;
        Ok(stats.get("reserved_bytes.all.peak").unwrap_or(-1))
    }
}
