//! The manager on a GPU: what calls cost in each mode, and copies beside plain ones. Prints one JSON
//! line a measurement; without a GPU it says so and does nothing.
//!
//! `cargo bench -p memory-manager --bench copies`

use alloc_core::DeviceId;
use alloc_cuda::CudaStream;
use memory_manager::{Cuda, DeviceAllocatorMode, ManagerConfig, MemoryManager, Platform};
use std::hint::black_box;
use std::time::Instant;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

type Manager = MemoryManager<Cuda>;

fn nanos_per_round(rounds: u32, mut round: impl FnMut()) -> f64 {
    (0..rounds / 10 + 1).for_each(|_| round());
    let start = Instant::now();
    (0..rounds).for_each(|_| round());
    start.elapsed().as_nanos() as f64 / f64::from(rounds)
}

fn pairs(manager: &Manager, mode: DeviceAllocatorMode, stream: &CudaStream) {
    for bytes in [KIB, MIB, 64 * MIB] {
        let device = nanos_per_round(20_000, || {
            let addr = manager.allocate_device_on(black_box(bytes), stream).expect("room");
            manager.free_device(addr).expect("freed");
        });
        let pinned = nanos_per_round(20_000, || {
            let addr = manager.allocate_pinned(black_box(bytes)).expect("room");
            manager.free_pinned(addr).expect("freed");
        });
        println!(
            "{{\"bench\":\"pair\",\"mode\":\"{mode:?}\",\"bytes\":{bytes},\"device_ns\":{device:.1},\
             \"pinned_ns\":{pinned:.1}}}"
        );
    }
}

/// Queueing one copy and waiting for it, by address and with buffers.
fn copies(manager: &Manager, stream: &CudaStream) {
    for bytes in [4 * KIB, MIB, 64 * MIB, 256 * MIB] {
        let rounds = u32::try_from((4096 * MIB / bytes).clamp(20, 5000)).unwrap_or(20);
        let host = manager.allocate_pinned(bytes).expect("room");
        let device = manager.allocate_device_on(bytes, stream).expect("room");
        let up = nanos_per_round(rounds, || {
            manager.copy_to_device_async(device, host, bytes, stream).expect("queued");
            stream.synchronize().expect("copied");
        });
        let down = nanos_per_round(rounds, || {
            manager.copy_to_host_async(host, device, bytes, stream).expect("queued");
            stream.synchronize().expect("copied");
        });
        manager.free_device(device).expect("freed");
        manager.free_pinned(host).expect("freed");
        let rate = |nanos: f64| bytes as f64 / nanos;
        println!(
            "{{\"bench\":\"copy\",\"bytes\":{bytes},\"to_device_ns\":{up:.0},\"to_host_ns\":{down:.0},\
             \"to_device_gb_s\":{:.2},\"to_host_gb_s\":{:.2}}}",
            rate(up),
            rate(down)
        );
    }
}

fn main() {
    let device = DeviceId::new(0);
    let cuda = match Cuda::new(device) {
        Ok(cuda) => cuda,
        Err(error) => return println!("no GPU: {error}"),
    };
    for mode in DeviceAllocatorMode::ALL {
        let config = ManagerConfig { mode, ..ManagerConfig::default() };
        let manager = MemoryManager::new(cuda.clone(), config);
        let stream = manager.platform().new_stream(device).expect("a stream");
        pairs(&manager, mode, &stream);
        if mode == DeviceAllocatorMode::Caching {
            copies(&manager, &stream);
        }
        manager.shutdown();
    }
}
