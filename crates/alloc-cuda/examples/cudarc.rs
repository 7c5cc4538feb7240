//! A program that uses cudarc takes its memory from the caching allocator: three lines change.
//!
//! `cargo run -p alloc-cuda --features cudarc --example cudarc`

use alloc_core::Config;
use alloc_cuda::{CudaAllocator, CudaBackend};
use cudarc::driver::{CudaContext, DriverError};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // cudarc panics when there is no driver, so that is asked first.
    let backend = match CudaBackend::new() {
        Ok(backend) => backend,
        Err(reason) => {
            println!("no CUDA here: {reason}");
            return Ok(());
        }
    };
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;

    // 1: the allocator, once.
    let allocator = CudaAllocator::on(backend, Config::ours())?;
    // 2: cudarc's stream, once for each.
    let ours = allocator.backend().adopt_cudarc(&stream)?;
    // 3: in place of `stream.alloc::<f32>(1000)`.
    let buffer = allocator.buffer::<f32>(1000, &ours)?;
    let mut slice = buffer.into_cudarc(&stream).map_err(|_| "another stream")?;

    // From here on it is a `CudaSlice` like any other, but that it is written through a view.
    stream.memcpy_htod(&vec![2.5f32; 1000], &mut slice.view_mut())?;
    let values: Vec<f32> = download(&stream, &slice)?;
    assert!(values.iter().all(|value| *value == 2.5));
    drop(slice);

    let stats = allocator.stats(alloc_core::DeviceId::new(0))?;
    println!("cached: {:?} bytes", stats.get("reserved_bytes.all.current"));
    Ok(())
}

/// A function that knows cudarc only.
fn download(
    stream: &std::sync::Arc<cudarc::driver::CudaStream>,
    slice: &cudarc::driver::CudaSlice<f32>,
) -> Result<Vec<f32>, DriverError> {
    stream.clone_dtoh(slice)
}
