//! Reports as events of `tracing`.

use super::{MemoryReporter, MemoryUsage, OutOfMemory};

/// Emits an event of target `gpu_alloc::memory` for each report: allocations and frees as `TRACE`,
/// requests that failed as `WARN`. Listens only while the target is enabled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TracingReporter;

const TARGET: &str = "gpu_alloc::memory";

impl MemoryReporter for TracingReporter {
    fn usage(&self, usage: &MemoryUsage) {
        let MemoryUsage { addr, delta, allocated, reserved, device } = *usage;
        tracing::trace!(
            target: TARGET,
            device = %device,
            addr = addr.get(),
            delta,
            allocated,
            reserved,
            "{}",
            if delta < 0 { "free" } else { "allocate" },
        );
    }

    fn out_of_memory(&self, request: &OutOfMemory) {
        let OutOfMemory { bytes, allocated, reserved, device } = *request;
        tracing::warn!(
            target: TARGET,
            device = %device,
            bytes,
            allocated,
            reserved,
            "out of memory",
        );
    }

    fn is_enabled(&self) -> bool {
        tracing::enabled!(target: TARGET, tracing::Level::WARN)
    }
}
