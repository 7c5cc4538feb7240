//! The settings that may change while the allocator runs, readable without a lock.

use super::config::HostConfig;
use super::engine::REQUEST_BYTES_MAX;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering::Relaxed};

#[derive(Debug)]
pub(crate) struct Options {
    register: AtomicBool,
    register_threads: AtomicU16,
    background: AtomicBool,
    free_catch_all: AtomicBool,
    /// `u64::MAX`: unlimited.
    round_bytes_max: AtomicU64,
    /// At most [`REQUEST_BYTES_MAX`].
    cached_block_bytes_max: AtomicU64,
}

impl Options {
    pub(crate) fn new(config: &HostConfig) -> Self {
        let options = Options {
            register: AtomicBool::new(false),
            register_threads: AtomicU16::new(1),
            background: AtomicBool::new(false),
            free_catch_all: AtomicBool::new(false),
            round_bytes_max: AtomicU64::new(0),
            cached_block_bytes_max: AtomicU64::new(0),
        };
        options.set(config);
        options
    }

    pub(crate) fn set(&self, config: &HostConfig) {
        self.register.store(config.register, Relaxed);
        self.register_threads.store(config.register_threads, Relaxed);
        self.background.store(config.background, Relaxed);
        self.free_catch_all.store(config.free_catch_all, Relaxed);
        self.round_bytes_max.store(config.round_bytes_max.unwrap_or(u64::MAX), Relaxed);
        self.cached_block_bytes_max.store(
            config.cached_block_bytes_max.unwrap_or(u64::MAX).min(REQUEST_BYTES_MAX),
            Relaxed,
        );
    }

    /// Threads that touch memory before it is registered; `None`: the driver allocates.
    pub(crate) fn register(&self) -> Option<u16> {
        self.register.load(Relaxed).then(|| self.register_threads.load(Relaxed))
    }

    pub(crate) fn background(&self) -> bool {
        self.background.load(Relaxed)
    }

    pub(crate) fn free_catch_all(&self) -> bool {
        self.free_catch_all.load(Relaxed)
    }

    /// Whether blocks of that many bytes are kept when freed. None of impossible sizes are.
    #[inline(always)]
    pub(crate) fn is_cached(&self, bytes: u64) -> bool {
        bytes <= self.cached_block_bytes_max.load(Relaxed)
    }

    /// The size of the block for a request under policy `pytorch`.
    pub(crate) fn class_bytes(&self, requested: u64) -> u64 {
        let rounds = requested <= self.round_bytes_max.load(Relaxed) && self.is_cached(requested);
        if rounds { requested.next_power_of_two() } else { requested }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Up to the smaller of both thresholds a size is rounded, above it is exact.
    #[test]
    fn sizes_are_rounded_up_to_both_thresholds() {
        let thresholds = [None, Some(100), Some(128), Some(1000)];
        for (round, cached) in thresholds.iter().flat_map(|r| thresholds.map(|c| (*r, c))) {
            let config = HostConfig {
                round_bytes_max: round,
                cached_block_bytes_max: cached,
                ..HostConfig::pytorch()
            };
            let options = Options::new(&config);
            let limit = round.unwrap_or(u64::MAX).min(cached.unwrap_or(u64::MAX));
            for bytes in 1..=2100 {
                let expected = if bytes <= limit { bytes.next_power_of_two() } else { bytes };
                assert_eq!(options.class_bytes(bytes), expected, "{bytes} of {limit}");
                assert_eq!(options.is_cached(bytes), bytes <= cached.unwrap_or(u64::MAX));
            }
        }
    }
}
