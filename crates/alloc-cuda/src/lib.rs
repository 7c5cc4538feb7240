#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod allocator;
mod backend;
#[expect(unsafe_code, reason = "copies between device memory and slices")]
mod buffer;
mod device;
mod error;
mod event;
#[cfg(feature = "cudarc")]
#[expect(unsafe_code, reason = "hands addresses and stream handles to cudarc")]
mod interop;
mod ordered;
mod segment;
mod share;
#[expect(unsafe_code, reason = "takes stream handles from outside")]
mod stream;
#[cfg(test)]
#[expect(unsafe_code, reason = "adopts streams")]
mod tests;
mod vmm;

/// The driver's calls, whose types some methods here take and return.
pub use cuda_driver as driver;

pub use allocator::{CudaAllocError, CudaAllocator};
pub use backend::CudaBackend;
pub use buffer::{DeviceBuffer, Plain};
pub use error::CudaError;
pub use event::CudaEvent;
#[cfg(feature = "cudarc")]
pub use interop::{CudarcSlice, OtherStream};
pub use ordered::{CudaOrdered, CudaPool};
pub use segment::CudaSegment;
pub use share::{CudaOpened, CudaSharedEvent};
pub use stream::CudaStream;
pub use vmm::{CudaPage, CudaReservation};
