//! Settings of a host allocator, and PyTorch's string form of them.

use super::backend::PIN_ALIGN;
use std::fmt;
use std::time::Duration;

/// Which rules decide.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostPolicy {
    /// PyTorch's: every block is a pinned segment of its own, a power of two long, kept on one of 64
    /// last-in-first-out lists.
    Pytorch,
    /// This project's own: blocks are cut from large pinned segments and merged again.
    Ours,
}

/// Settings. Start from [`ours`](HostConfig::ours) or [`pytorch`](HostConfig::pytorch) and change
/// fields, or [`apply`](HostConfig::apply) a settings string.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostConfig {
    /// Which rules decide. Fixed once the allocator exists.
    pub policy: HostPolicy,
    /// Touch and register memory instead of letting the driver allocate it
    /// (`pinned_use_cuda_host_register`).
    pub register: bool,
    /// Threads that touch pages before registration (`pinned_num_register_threads`): a power of two
    /// from 1 to 128. By default one for each core, up to 16: more do not touch faster.
    pub register_threads: u16,
    /// Process events on a thread of their own (`pinned_use_background_threads`). Once started, the
    /// thread lives as long as the allocator.
    pub background: bool,
    /// How often that thread looks.
    pub background_period: Duration,
    /// Pin one segment of this size at the first miss and serve requests from it while it lasts
    /// (`pinned_reserve_segment_size_mb`). 0: none. Never given back. Read once.
    pub reserve_bytes: u64,
    /// Policy `pytorch`: sizes above are not rounded to a power of two
    /// (`pinned_max_round_threshold_mb`). `None`: all are. Policy `ours` never rounds so.
    pub round_bytes_max: Option<u64>,
    /// Blocks above are not kept when freed: their memory goes back to the system at once, or when
    /// their last event is reached (`pinned_max_cached_size_mb`). `None`: all are kept.
    pub cached_block_bytes_max: Option<u64>,
    /// Policy `pytorch`: a failed event record in `free` is not an error of `free`
    /// (`pinned_free_catch_all`); the block waits until an event can be recorded. Policy `ours`
    /// always behaves so.
    pub free_catch_all: bool,
    /// Policy `ours`: free bytes that one NUMA node keeps. More is given back as soon as whole
    /// segments are free. `None`: unbounded.
    pub cached_bytes_max: Option<u64>,
    /// Policy `ours`: a segment that has been wholly free for this long is given back the next time
    /// events are processed. `None`: never.
    pub cached_age_max: Option<Duration>,
    /// Most bytes ever pinned, all nodes together. `None`: what the system has.
    pub reserved_bytes_max: Option<u64>,
    /// Policy `ours`: sizes of small blocks are multiples of this; a power of two from 64 to 4096.
    pub granule_bytes: u64,
    /// Policy `ours`: heaps for small blocks that a node may have; by default twice as many as the
    /// machine has cores. Threads use the first until they meet there often. 1 to 64.
    pub shards: u16,
    /// Policy `ours`: requests up to this many bytes are small: served by shards.
    pub small_bytes_max: u64,
    /// Policy `ours`: least bytes to pin at once; a multiple of 4096.
    pub growth_bytes_min: u64,
    /// Policy `ours`: growth is 1/256 of what is pinned already, up to this; or, up to half of this and
    /// to 1/16 of what is pinned, room for whole blocks of the size asked for, eight at most. Larger
    /// requests are pinned as large as they are.
    pub growth_bytes_max: u64,
    /// Policy `ours`: freed blocks that may share one event of a stream.
    pub batch_blocks_max: u16,
    /// Policy `ours`: bytes of freed blocks that may share one event of a stream, or half of what
    /// is pinned, up to 128 MiB, if that is more. A larger block gets its event at once,
    /// unless [`event_interval_min`](HostConfig::event_interval_min) says otherwise.
    pub batch_bytes_max: u64,
    /// Policy `ours`: when events for fewer than eight blocks each come more often than this, more
    /// large memory is pinned, up to eight blocks or 256 MiB, so that more of them share an event.
    /// Zero: never.
    pub event_interval_min: Duration,
    /// Policy `ours`: freed bytes that may wait while more is pinned for small requests. A request that
    /// finds nothing free asks about events; for a small one, open batches are closed, each by an
    /// event that others could have shared, only with this much waiting.
    pub draining_bytes_max: u64,
    /// Longest single registration; a longer segment is registered in pieces.
    pub piece_bytes_max: u64,
}

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

impl HostConfig {
    /// PyTorch's defaults: power-of-two blocks, driver allocation, nothing ever given back.
    pub fn pytorch() -> Self {
        HostConfig {
            policy: HostPolicy::Pytorch,
            register: false,
            register_threads: 1,
            cached_bytes_max: None,
            cached_age_max: None,
            ..HostConfig::ours()
        }
    }

    /// This project's defaults: blocks cut from registered segments, a bounded cache.
    pub fn ours() -> Self {
        HostConfig {
            policy: HostPolicy::Ours,
            register: true,
            register_threads: cores().next_power_of_two().min(16),
            background: false,
            background_period: Duration::from_millis(100),
            reserve_bytes: 0,
            round_bytes_max: None,
            cached_block_bytes_max: None,
            free_catch_all: false,
            cached_bytes_max: Some(32 * GIB),
            cached_age_max: Some(Duration::from_secs(60)),
            reserved_bytes_max: None,
            granule_bytes: 512,
            shards: (2 * cores()).min(64),
            small_bytes_max: MIB,
            growth_bytes_min: 2 * MIB,
            growth_bytes_max: 64 * MIB,
            batch_blocks_max: 32,
            batch_bytes_max: 8 * MIB,
            event_interval_min: Duration::from_micros(20),
            draining_bytes_max: 8 * MIB,
            piece_bytes_max: 64 * GIB,
        }
    }

    /// Changes settings by a string `key:value,key:value` of PyTorch's `pinned_*` keys. Keys of the
    /// device allocator are skipped, as both read the same string. Spaces do not count.
    ///
    /// # Errors
    /// On an unknown `pinned_*` key or a bad value; then nothing is changed.
    pub fn apply(&mut self, text: &str) -> Result<(), HostConfError> {
        let mut changed = self.clone();
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        for item in split_items(&text) {
            let Some((key, value)) = item.split_once(':') else {
                return Err(HostConfError::new(item, "expected key:value"));
            };
            changed.set(key, value)?;
        }
        changed.validate()?;
        *self = changed;
        Ok(())
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), HostConfError> {
        match key {
            "pinned_use_cuda_host_register" | "pinned_use_hip_host_register" => {
                self.register = parse_bool(key, value)?;
            }
            "pinned_use_background_threads" => self.background = parse_bool(key, value)?,
            "pinned_free_catch_all" => self.free_catch_all = parse_bool(key, value)?,
            "pinned_num_register_threads" => {
                let threads = parse_int(key, value)?;
                self.register_threads = u16::try_from(threads).unwrap_or(u16::MAX);
            }
            "pinned_reserve_segment_size_mb" => match parse_mib(key, value)? {
                0 => return Err(HostConfError::new(key, "must be greater than 0")),
                bytes => self.reserve_bytes = bytes,
            },
            "pinned_max_round_threshold_mb" => self.round_bytes_max = Some(parse_mib(key, value)?),
            "pinned_max_cached_size_mb" => {
                self.cached_block_bytes_max = Some(parse_mib(key, value)?);
            }
            _ if key.starts_with("pinned_") => {
                return Err(HostConfError::new(key, "is no setting of the host allocator"));
            }
            _ => {}
        }
        Ok(())
    }

    /// Checks that every setting is in its range.
    ///
    /// # Errors
    /// Names the first that is not.
    pub fn validate(&self) -> Result<(), HostConfError> {
        let require = |fine: bool, key: &str, why: &str| match fine {
            true => Ok(()),
            false => Err(HostConfError::new(key, why)),
        };
        let threads = self.register_threads;
        require(
            threads.is_power_of_two() && threads <= 128,
            "pinned_num_register_threads",
            "must be a power of two from 1 to 128",
        )?;
        require(
            self.granule_bytes.is_power_of_two() && (64..=PIN_ALIGN).contains(&self.granule_bytes),
            "granule_bytes",
            "must be a power of two from 64 to 4096",
        )?;
        require((1..=64).contains(&self.shards), "shards", "must be from 1 to 64")?;
        require(
            self.growth_bytes_min >= PIN_ALIGN && self.growth_bytes_min.is_multiple_of(PIN_ALIGN),
            "growth_bytes_min",
            "must be a multiple of 4096, and not 0",
        )?;
        require(
            self.growth_bytes_max >= self.growth_bytes_min,
            "growth_bytes_max",
            "must not be below growth_bytes_min",
        )?;
        require(
            self.small_bytes_max <= self.growth_bytes_min,
            "small_bytes_max",
            "must not exceed growth_bytes_min",
        )?;
        require(self.batch_blocks_max >= 1, "batch_blocks_max", "must be at least 1")?;
        require(self.piece_bytes_max >= PIN_ALIGN, "piece_bytes_max", "must be at least 4096")?;
        require(!self.background_period.is_zero(), "background_period", "must not be 0")
    }
}

/// Threads that can run at once, as far as a setting for it goes.
fn cores() -> u16 {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().min(64) as u16)
}

/// Splits at commas outside square brackets; empty items vanish.
fn split_items(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_i32;
    text.split(move |c| {
        depth += match c {
            '[' => 1,
            ']' => -1,
            _ => 0,
        };
        c == ',' && depth == 0
    })
    .filter(|item| !item.is_empty())
}

fn parse_bool(key: &str, value: &str) -> Result<bool, HostConfError> {
    match value {
        "True" => Ok(true),
        "False" => Ok(false),
        _ => Err(HostConfError::new(key, "must be True or False")),
    }
}

fn parse_int(key: &str, value: &str) -> Result<u64, HostConfError> {
    value.parse().map_err(|_| HostConfError::new(key, "must be a whole number, 0 or more"))
}

fn parse_mib(key: &str, value: &str) -> Result<u64, HostConfError> {
    let mib = parse_int(key, value)?;
    mib.checked_mul(MIB).ok_or_else(|| HostConfError::new(key, "is more than 2^64 bytes"))
}

/// A setting that cannot be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostConfError {
    /// The setting, by PyTorch's key or the field's name.
    pub key: String,
    /// What is wrong with it.
    pub why: String,
}

impl HostConfError {
    fn new(key: &str, why: &str) -> Self {
        HostConfError { key: key.to_owned(), why: why.to_owned() }
    }
}

impl fmt::Display for HostConfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.key, self.why)
    }
}

impl std::error::Error for HostConfError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(text: &str) -> Result<HostConfig, HostConfError> {
        let mut config = HostConfig::pytorch();
        config.apply(text).map(|()| config)
    }

    #[test]
    fn every_key_of_the_table_is_read() {
        let config = applied(
            "pinned_use_cuda_host_register:True, pinned_num_register_threads : 8,\
             pinned_use_background_threads:True,pinned_reserve_segment_size_mb:16,\
             pinned_free_catch_all:True,pinned_max_round_threshold_mb:64,\
             pinned_max_cached_size_mb:0",
        )
        .expect("valid");
        assert!(config.register && config.background && config.free_catch_all);
        assert_eq!(config.register_threads, 8);
        assert_eq!(config.reserve_bytes, 16 * MIB);
        assert_eq!(config.round_bytes_max, Some(64 * MIB));
        assert_eq!(config.cached_block_bytes_max, Some(0));
        assert!(applied("pinned_use_hip_host_register:True").expect("valid").register);
    }

    #[test]
    fn keys_of_the_device_allocator_are_skipped() {
        let config = applied("max_split_size_mb:24,roundup_power2_divisions:[256:1,512:2,>:4]");
        assert_eq!(config, Ok(HostConfig::pytorch()));
    }

    #[test]
    fn bad_values_are_refused_and_change_nothing() {
        let bad = [
            "pinned_num_register_threads:3",
            "pinned_num_register_threads:0",
            "pinned_num_register_threads:256",
            "pinned_num_register_threads:-1",
            "pinned_num_register_threads:8x",
            "pinned_reserve_segment_size_mb:0",
            "pinned_use_background_threads:true",
            "pinned_use_background_threads",
            "pinned_max_cached_size_mb:18446744073709551615",
            "pinned_no_such_key:1",
        ];
        for text in bad {
            let mut config = HostConfig::pytorch();
            let both = format!("pinned_free_catch_all:True,{text}");
            assert!(config.apply(&both).is_err(), "{text}");
            assert_eq!(config, HostConfig::pytorch(), "{text}");
        }
    }

    #[test]
    fn fields_out_of_range_are_named() {
        type Break = fn(&mut HostConfig);
        let broken: [(&str, Break); 6] = [
            ("granule_bytes", |c| c.granule_bytes = 96),
            ("shards", |c| c.shards = 0),
            ("growth_bytes_min", |c| c.growth_bytes_min = 1000),
            ("growth_bytes_max", |c| c.growth_bytes_max = 4096),
            ("small_bytes_max", |c| c.small_bytes_max = u64::MAX),
            ("piece_bytes_max", |c| c.piece_bytes_max = 0),
        ];
        for (key, break_it) in broken {
            let mut config = HostConfig::ours();
            break_it(&mut config);
            assert_eq!(config.validate().expect_err(key).key, key);
        }
    }
}
