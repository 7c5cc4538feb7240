//! Configuration: what an allocator is made with, and what may change while it runs.

mod ours;
mod parse;

pub use ours::OursSettings;
pub(crate) use ours::{FREES_WATCHED, LASTING_MAX, SHARD_BYTES_MAX, SHARDS_MAX};
pub use parse::ConfError;

use crate::heap::{Request, WaitingList};
use crate::size_class::{
    BLOCK_BYTES_MIN, FewSize, LARGE_SEGMENT_BYTES, OURS_SMALL_BYTES_MAX, RoundupDivisions,
    SMALL_BYTES_MAX, SizeClass, round_request, segment_bytes,
};
use std::collections::BTreeMap;

/// Which rules decide.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// PyTorch's, bit for bit: every address and every statistic as PyTorch would have it. Its
    /// harmless defects are part of it (`docs/adr/0006-upstream-defects.md`).
    Pytorch,
    /// This project's own.
    Ours,
}

impl Policy {
    /// The name used on command lines and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Policy::Pytorch => "pytorch",
            Policy::Ours => "ours",
        }
    }
}

/// The order of streams in which finished events are processed.
///
/// No address depends on it, nor any current value; only the order of `free_completed` entries and
/// the peaks and sums of the `inactive_split` statistics do (spec §3.4).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventOrder {
    /// By stream id.
    Ascending,
    /// The default stream first, then the others from the highest id down: what PyTorch's hash table
    /// gives for the default stream and streams from its pool. The default stream is the one with
    /// the lowest id among those of the device that the allocator has seen.
    DefaultThenDescending,
}

/// How peaks of sums over heaps are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PeakMode {
    /// Exact. A hit that raises a figure of its heap above what other heaps leave it to rise waits
    /// for them: that is every one that sets a new peak, and few others.
    Exact,
    /// Each heap keeps its own peaks and readers add them up: nothing is shared between streams, and
    /// the figure is at least the true peak and at most the sum of what each heap ever held. With one
    /// stream whose threads do not collide it is exact, and that of all reserved bytes always is.
    PerHeap,
}

/// Address space to reserve for one expandable segment.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ReserveSize {
    /// This fraction of the device's memory.
    Fraction(f64),
    /// This many bytes.
    Bytes(u64),
}

impl ReserveSize {
    /// In bytes, for a device of `total` bytes. Saturates.
    fn bytes(self, total: u64) -> u64 {
        match self {
            // A float to integer cast saturates.
            ReserveSize::Fraction(fraction) => (fraction * total as f64) as u64,
            ReserveSize::Bytes(bytes) => bytes,
        }
    }
}

/// Which allocator backs a process, as the settings string names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BackendChoice {
    /// The caching allocator of this crate.
    #[default]
    Native,
    /// The driver's stream-ordered allocator. Read and kept for fronts that offer a choice; this
    /// crate's own allocators do not look at it.
    MallocAsync,
}

/// The settings of a `PYTORCH_ALLOC_CONF` string (spec §10.2), as values.
#[derive(Clone, PartialEq, Debug)]
pub struct Settings {
    /// `backend`.
    pub backend: BackendChoice,
    /// `max_split_size_mb`, in bytes; `None` is unlimited.
    pub max_split_bytes: Option<u64>,
    /// `max_non_split_rounding_mb`, in bytes; `None` follows `large_segment_bytes`.
    pub max_non_split_rounding_bytes: Option<u64>,
    /// `large_segment_size_mb`, in bytes.
    pub large_segment_bytes: u64,
    /// `garbage_collection_threshold`, between 0 and 1 without both; `None` is off.
    pub gc_threshold: Option<f64>,
    /// `roundup_power2_divisions`.
    pub roundup: RoundupDivisions,
    /// `expandable_segments`. `None` is what the policy prefers: off with policy `pytorch`, on with
    /// policy `ours` where the allocator was made with virtual memory.
    pub expandable_segments: Option<bool>,
    /// `expandable_segments_reserve`; `None` is 9/8 of the device.
    pub expandable_reserve: Option<ReserveSize>,
    /// `expandable_segments_reserve_by_class`, by the class name that a stream is tagged with.
    pub expandable_reserve_by_class: BTreeMap<String, ReserveSize>,
    /// `per_process_memory_fraction`, 0 to 1. 1 is no limit. Read when an allocator is made.
    pub memory_fraction: f64,
    /// `throw_on_cudamalloc_oom`: with a limit, a request that would exceed it fails at once.
    pub throw_on_oom: bool,
    /// `release_lock_on_cudamalloc`. Accepted; this allocator never holds a lock there.
    pub release_lock_on_malloc: bool,
    /// `graph_capture_record_stream_reuse`.
    pub graph_capture_record_stream_reuse: bool,
    /// `pinned_use_cuda_host_register`.
    pub pinned_use_host_register: bool,
    /// `pinned_num_register_threads`, a power of two up to 128.
    pub pinned_register_threads: u32,
    /// `pinned_reserve_segment_size_mb`, in bytes; `None` is off.
    pub pinned_reserve_bytes: Option<u64>,
    /// `pinned_free_catch_all`.
    pub pinned_free_catch_all: bool,
    /// `pinned_use_background_threads`.
    pub pinned_use_background_threads: bool,
    /// `pinned_max_round_threshold_mb`, in bytes: larger requests are not rounded to powers of two.
    pub pinned_round_bytes_max: Option<u64>,
    /// `pinned_max_cached_size_mb`, in bytes: larger blocks are not cached.
    pub pinned_cached_bytes_max: Option<u64>,
    /// What only policy `ours` has.
    pub ours: OursSettings,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            backend: BackendChoice::Native,
            max_split_bytes: None,
            max_non_split_rounding_bytes: None,
            large_segment_bytes: LARGE_SEGMENT_BYTES,
            gc_threshold: None,
            roundup: RoundupDivisions::NONE,
            expandable_segments: None,
            expandable_reserve: None,
            expandable_reserve_by_class: BTreeMap::new(),
            memory_fraction: 1.0,
            throw_on_oom: false,
            release_lock_on_malloc: false,
            graph_capture_record_stream_reuse: false,
            pinned_use_host_register: false,
            pinned_register_threads: 1,
            pinned_reserve_bytes: None,
            pinned_free_catch_all: false,
            pinned_use_background_threads: false,
            pinned_round_bytes_max: None,
            pinned_cached_bytes_max: None,
            ours: OursSettings::default(),
        }
    }
}

impl Settings {
    /// Applies a settings string such as `max_split_size_mb:128,expandable_segments:True`.
    ///
    /// As upstream, each string first resets `max_split_size_mb`, `max_non_split_rounding_mb`,
    /// `garbage_collection_threshold` and `roundup_power2_divisions`; the other settings stay as
    /// they were unless named (spec §10.1).
    ///
    /// # Errors
    /// Unknown key, wrong type or value out of range, naming key and text. Nothing is changed then.
    pub fn apply(&mut self, text: &str) -> Result<(), ConfError> {
        *self = parse::apply(self, text)?;
        Ok(())
    }

    /// Settings that have no effect in this combination, each with the reason, so that a front can
    /// say so once instead of staying silent. `limited`: whether a memory limit is in force.
    pub fn without_effect(&self, policy: Policy, limited: bool) -> Vec<(&'static str, String)> {
        let mut list = Vec::new();
        if self.gc_threshold.is_some() && !limited && policy == Policy::Pytorch {
            list.push((
                "garbage_collection_threshold",
                "needs a memory limit with policy pytorch (per_process_memory_fraction below 1)"
                    .to_owned(),
            ));
        }
        if self.throw_on_oom && !limited {
            list.push(("throw_on_cudamalloc_oom", "needs a memory limit".to_owned()));
        }
        if self.release_lock_on_malloc {
            list.push((
                "release_lock_on_cudamalloc",
                "no lock is held during backend calls anyway".to_owned(),
            ));
        }
        list
    }

    /// Address space for one expandable segment of a device of `total` bytes: what was configured,
    /// at most 9/8 of the device, in whole pages (spec §4.1).
    pub(crate) fn reserve_bytes(&self, total: u64, page_bytes: u64, tag: Option<&str>) -> u64 {
        let most = total.saturating_add(total / 8);
        let by_class = tag.and_then(|tag| self.expandable_reserve_by_class.get(tag));
        let wanted = by_class.or(self.expandable_reserve.as_ref());
        let bytes = wanted.map_or(most, |size| size.bytes(total).min(most));
        bytes.max(1).next_multiple_of(page_bytes)
    }
}

/// What an allocator is made with.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    /// Which rules decide.
    pub policy: Policy,
    /// What may change at run time.
    pub settings: Settings,
    /// See [`EventOrder`].
    pub event_order: EventOrder,
    /// See [`PeakMode`].
    pub peaks: PeakMode,
}

impl Config {
    /// PyTorch's rules and defaults, everything exact.
    pub fn pytorch() -> Self {
        Config {
            policy: Policy::Pytorch,
            settings: Settings::default(),
            event_order: EventOrder::DefaultThenDescending,
            peaks: PeakMode::Exact,
        }
    }

    /// This project's own rules and defaults.
    pub fn ours() -> Self {
        Config {
            policy: Policy::Ours,
            settings: Settings::default(),
            event_order: EventOrder::Ascending,
            peaks: PeakMode::PerHeap,
        }
    }

    /// The preset of a policy.
    pub fn of(policy: Policy) -> Self {
        match policy {
            Policy::Pytorch => Config::pytorch(),
            Policy::Ours => Config::ours(),
        }
    }

    /// Applies a settings string; see [`Settings::apply`].
    ///
    /// # Errors
    /// As [`Settings::apply`].
    pub fn apply(&mut self, text: &str) -> Result<(), ConfError> {
        self.settings.apply(text)
    }
}

/// The part of the configuration that decides about blocks. Every heap has its own copy, so that the
/// hit path reads nothing that another stream writes.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) roundup: RoundupDivisions,
    /// Whether `roundup` asks for nothing.
    plain_rounding: bool,
    pub(crate) large_segment_bytes: u64,
    pub(crate) max_split_bytes: Option<u64>,
    pub(crate) max_non_split_rounding_bytes: u64,
    /// Whether oversize blocks of expandable segments are off limits for smaller requests: true
    /// upstream, where it lets reserved memory grow without bound.
    pub(crate) oversize_covers_expandable: bool,
    /// Whether searches advance the clock of garbage collection.
    pub(crate) counts_searches: bool,
    /// Whether requests may use and grow expandable segments.
    pub(crate) expandable: bool,
    /// Whether the smallest block that suffices is the one to take, whatever lies behind it.
    pub(crate) plain_fit: bool,
    /// Whether it is recorded how long blocks live: from the first one on, or the record is wrong.
    pub(crate) watches_lives: bool,
    /// From how long a life on a size has addresses of its own, in turnovers; 0 is never.
    pub(crate) lasting_turnovers: u32,
    /// How many freed blocks may wait to be asked for again. 0 where a rule forbids some requests some
    /// blocks.
    pub(crate) waiting_max: u32,
    /// How many large requests it takes to tell whether their sizes are ever new ones; 0 is never.
    pub(crate) variety: u32,
    /// Largest rounded request of the small class.
    pub(crate) small_bytes_max: u64,
    /// Requests up to here are rounded to one of few sizes. 0 where no freed block waits.
    few_bytes_max: u64,
    /// Heaps that serve smaller requests where threads collide; 1 is none.
    pub(crate) shards: u32,
    /// Their largest request.
    pub(crate) shard_bytes_max: u64,
    /// Collisions after which there are such.
    pub(crate) collisions: u32,
}

const _: () =
    assert!(SHARD_BYTES_MAX <= FewSize::BYTES_MAX && SMALL_BYTES_MAX <= FewSize::BYTES_MAX);

impl Rules {
    pub(crate) fn new(
        policy: Policy,
        settings: &Settings,
        limited: bool,
        expandable: bool,
    ) -> Self {
        let large_segment_bytes = settings.large_segment_bytes;
        let rounding = settings.max_non_split_rounding_bytes.unwrap_or(large_segment_bytes);
        let counts_searches =
            settings.gc_threshold.is_some() && (limited || policy == Policy::Ours);
        let plain_fit = policy == Policy::Ours && expandable;
        let small_bytes_max = if plain_fit { OURS_SMALL_BYTES_MAX } else { SMALL_BYTES_MAX };
        let mut rules = Rules {
            roundup: settings.roundup.honouring_one(policy == Policy::Ours),
            plain_rounding: settings.roundup.is_plain(),
            large_segment_bytes,
            max_split_bytes: settings.max_split_bytes,
            max_non_split_rounding_bytes: rounding,
            oversize_covers_expandable: policy == Policy::Pytorch,
            counts_searches,
            expandable,
            plain_fit,
            watches_lives: policy == Policy::Ours,
            lasting_turnovers: if plain_fit {
                settings.ours.lasting_turnovers.min(LASTING_MAX)
            } else {
                0
            },
            waiting_max: if plain_fit && settings.max_split_bytes.is_none() && !counts_searches {
                settings.ours.waiting_max
            } else {
                0
            },
            variety: if plain_fit && settings.ours.hurry_max > 0.0 {
                settings.ours.variety
            } else {
                0
            },
            small_bytes_max,
            few_bytes_max: 0,
            shards: if expandable && policy == Policy::Ours {
                settings.ours.shards.clamp(1, SHARDS_MAX)
            } else {
                1
            },
            shard_bytes_max: settings.ours.shard_bytes_max.clamp(1, SHARD_BYTES_MAX),
            collisions: settings.ours.collisions,
        };
        rules.widen(false);
        rules
    }

    /// The rules of a shard, whose small class is as large as what it is for.
    pub(crate) fn of_shard(self) -> Self {
        let mut rules = Rules { small_bytes_max: self.shard_bytes_max, ..self };
        rules.widen(false);
        rules
    }

    /// Whether requests of the large class are rounded to few sizes as well: time is short.
    pub(crate) const fn is_wide(&self) -> bool {
        self.few_bytes_max > self.small_bytes_max
    }

    /// Rounds requests of the large class to few sizes as well, or no longer.
    pub(crate) fn widen(&mut self, yes: bool) {
        let most = if yes { FewSize::BYTES_MAX } else { self.small_bytes_max };
        self.few_bytes_max = if self.waiting_max > 0 { FewSize::bytes_up_to(most) } else { 0 };
    }

    /// A request of `requested` bytes, which is neither 0 nor too large.
    #[inline]
    pub(crate) fn request(&self, requested: u64) -> Request {
        let rounded = if self.plain_rounding {
            // Far from overflowing.
            (requested + (BLOCK_BYTES_MIN - 1)) & !(BLOCK_BYTES_MIN - 1)
        } else {
            round_request(requested, &self.roundup)
        };
        let expandable = self.expandable;
        if rounded <= self.few_bytes_max {
            let few = FewSize::of(rounded);
            let list = WaitingList::of_few(few);
            let class = SizeClass::of(few.bytes, self.small_bytes_max);
            return Request { requested, rounded: few.bytes, class, expandable, list };
        }
        let class = SizeClass::of(rounded, self.small_bytes_max);
        let waits = (class == SizeClass::Large) & (self.few_bytes_max > 0);
        let list = if waits { WaitingList::LARGE } else { WaitingList::NONE };
        Request { requested, rounded, class, expandable, list }
    }

    pub(crate) const fn segment_bytes(&self, rounded: u64) -> u64 {
        segment_bytes(rounded, self.large_segment_bytes)
    }

    pub(crate) fn is_oversize(&self, bytes: u64) -> bool {
        self.max_split_bytes.is_some_and(|max| bytes >= max)
    }
}
