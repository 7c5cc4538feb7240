#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

#[expect(unsafe_code, reason = "the C interface")]
mod abi;
mod config;
mod graphs;
mod plugin;

pub use abi::{
    PoolKey, gpu_alloc_base, gpu_alloc_begin_pool, gpu_alloc_check, gpu_alloc_end_pool,
    gpu_alloc_free, gpu_alloc_init, gpu_alloc_last_error, gpu_alloc_malloc,
    gpu_alloc_record_stream, gpu_alloc_release_pool, gpu_alloc_reset, gpu_alloc_reset_peak_stats,
    gpu_alloc_set_memory_fraction, gpu_alloc_stats,
};
