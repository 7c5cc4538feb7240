//! Reports as counters and gauges of `metrics`.

use super::{MemoryReporter, MemoryUsage, OutOfMemory};
use metrics::{counter, gauge};

/// Keeps these metrics, each with a label `device`, in the recorder that is installed:
///
/// | name | what |
/// |---|---|
/// | `gpu_alloc_allocations_total` | counter of allocations |
/// | `gpu_alloc_frees_total` | counter of frees |
/// | `gpu_alloc_allocated_bytes_total` | counter of bytes allocated |
/// | `gpu_alloc_freed_bytes_total` | counter of bytes freed |
/// | `gpu_alloc_out_of_memory_total` | counter of requests that failed |
/// | `gpu_alloc_allocated_bytes` | gauge of bytes that callers hold |
/// | `gpu_alloc_reserved_bytes` | gauge of bytes that the allocator holds |
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MetricsReporter;

impl MemoryReporter for MetricsReporter {
    fn usage(&self, usage: &MemoryUsage) {
        let device = usage.device.to_string();
        let (calls, bytes) = match usage.delta {
            ..0 => ("gpu_alloc_frees_total", "gpu_alloc_freed_bytes_total"),
            _ => ("gpu_alloc_allocations_total", "gpu_alloc_allocated_bytes_total"),
        };
        counter!(calls, "device" => device.clone()).increment(1);
        counter!(bytes, "device" => device.clone()).increment(usage.delta.unsigned_abs());
        levels(&device, usage.allocated, usage.reserved);
    }

    fn out_of_memory(&self, request: &OutOfMemory) {
        let device = request.device.to_string();
        counter!("gpu_alloc_out_of_memory_total", "device" => device.clone()).increment(1);
        levels(&device, request.allocated, request.reserved);
    }
}

fn levels(device: &str, allocated: u64, reserved: u64) {
    gauge!("gpu_alloc_allocated_bytes", "device" => device.to_owned()).set(allocated as f64);
    gauge!("gpu_alloc_reserved_bytes", "device" => device.to_owned()).set(reserved as f64);
}
