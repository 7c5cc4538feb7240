//! Device memory from the driver's own stream-ordered pools.
//!
//! The driver keeps freed memory in a pool and hands it out again when streams are ordered so that it
//! may. What is left to do here is what PyTorch's cudaMallocAsync backend does (spec §9.1): memory
//! that several streams used is freed after all of them, limits are kept, and lack of memory is
//! answered by giving back what the pool does not use before it becomes an error.
//!
//! ```
//! use alloc_core::DeviceId;
//! use alloc_core::ordered::{OrderedAllocator, OrderedConfig};
//! use mock_backend::MockBackend;
//!
//! let gpu = MockBackend::new();
//! let (main, side) = (gpu.stream(DeviceId::new(0)), gpu.stream(DeviceId::new(0)));
//! let unifier = gpu.stream(DeviceId::new(0));
//! let pool = OrderedAllocator::new(gpu, unifier, OrderedConfig::default_pool())?;
//!
//! let block = pool.allocate(3_000_000, &main)?;
//! pool.record_use(block, &side)?; // work there reads it
//! pool.free(block)?; // freed after the work of both streams
//! assert_eq!(pool.stats()?.used, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod allocator;
mod backend;
mod error;
mod shared;

pub use allocator::{FreeHold, OrderedAllocator, OrderedConfig, PoolChoice};
pub use backend::{OrderedMemory, PoolOptions, PoolReuse, PoolUsage, StreamOrdered, StreamWait};
pub use error::{OrderedError, OrderedOp};
