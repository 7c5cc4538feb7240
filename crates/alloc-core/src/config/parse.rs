//! The parser of settings strings (spec §10).
//!
//! Stricter than upstream in one respect: a wrong separator, a missing bracket or a bad value is an
//! error, never skipped, and a failed string changes nothing.

use super::{
    BackendChoice, FREES_WATCHED, LASTING_MAX, OursSettings, ReserveSize, SHARD_BYTES_MAX,
    SHARDS_MAX, Settings,
};
use crate::size_class::{ListKey, RoundupDivisions};
use std::fmt;
use std::ops::RangeInclusive;

const MIB: u64 = 1 << 20;

/// A settings string that cannot be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfError {
    /// The key at fault, or the text where a key was expected.
    pub key: String,
    /// The value at fault; empty if there is none.
    pub text: String,
    /// What is wrong, and what is allowed.
    pub why: String,
}

impl fmt::Display for ConfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.text.is_empty() {
            write!(f, "setting `{}`: {}", self.key, self.why)
        } else {
            write!(f, "setting `{}` with value `{}`: {}", self.key, self.text, self.why)
        }
    }
}

impl std::error::Error for ConfError {}

fn error(key: &str, text: &str, why: impl Into<String>) -> ConfError {
    ConfError { key: key.to_owned(), text: text.to_owned(), why: why.into() }
}

/// One `key:value` of the string.
struct Entry<'a> {
    key: &'a str,
    text: &'a str,
}

impl Entry<'_> {
    fn error(&self, why: impl Into<String>) -> ConfError {
        error(self.key, self.text, why)
    }

    fn flag(&self) -> Result<bool, ConfError> {
        match self.text {
            "True" => Ok(true),
            "False" => Ok(false),
            _ => Err(self.error("must be True or False")),
        }
    }

    fn integer(&self) -> Result<u64, ConfError> {
        self.text.parse().map_err(|_| self.error("must be a whole number"))
    }

    fn float(&self) -> Result<f64, ConfError> {
        let value: f64 = self.text.parse().map_err(|_| self.error("must be a number"))?;
        if value.is_finite() { Ok(value) } else { Err(self.error("must be a finite number")) }
    }

    /// A number of MiB, in bytes. Larger than any memory is as good as unlimited, so it saturates.
    fn mib(&self) -> Result<u64, ConfError> {
        Ok(self.integer()?.min(u64::MAX / MIB) * MIB)
    }

    /// The items of a list `[a,b,…]`.
    fn list(&self) -> Result<Vec<&str>, ConfError> {
        let inner = self.text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        let inner = inner.ok_or_else(|| self.error("must be a list in brackets"))?;
        Ok(inner.split(',').filter(|item| !item.is_empty()).collect())
    }
}

/// Cuts the string into entries at commas outside brackets.
fn entries(text: &str) -> Result<Vec<Entry<'_>>, ConfError> {
    let mut entries = Vec::new();
    let mut depth = 0u32;
    let mut start = 0;
    for (at, byte) in text.bytes().chain([b',']).enumerate() {
        match byte {
            b'[' => depth += 1,
            b']' => {
                depth = depth
                    .checked_sub(1)
                    .ok_or_else(|| error(&text[start..at], "", "`]` without `[`"))?;
            }
            b',' if depth == 0 || at == text.len() => {
                let entry = &text[start..at];
                start = at + 1;
                if depth > 0 {
                    return Err(error(entry, "", "`[` without `]`"));
                }
                if !entry.is_empty() {
                    entries.push(split_entry(entry)?);
                }
            }
            _ => {}
        }
    }
    Ok(entries)
}

fn split_entry(entry: &str) -> Result<Entry<'_>, ConfError> {
    let (key, text) =
        entry.split_once(':').ok_or_else(|| error(entry, "", "must have the form key:value"))?;
    if text.is_empty() {
        return Err(error(key, "", "has no value"));
    }
    Ok(Entry { key, text })
}

/// `before` with the settings of `text` applied.
pub(super) fn apply(before: &Settings, text: &str) -> Result<Settings, ConfError> {
    let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let entries = entries(&text)?;
    let mut settings = before.clone();
    settings.max_split_bytes = None;
    settings.max_non_split_rounding_bytes = None;
    settings.gc_threshold = None;
    settings.roundup = RoundupDivisions::NONE;
    // First, because the minima of other settings follow it wherever it stands.
    for entry in entries.iter().filter(|entry| entry.key == "large_segment_size_mb") {
        settings.large_segment_bytes = large_segment(entry)?;
    }
    for entry in &entries {
        set(&mut settings, entry)?;
    }
    Ok(settings)
}

fn set(settings: &mut Settings, entry: &Entry<'_>) -> Result<(), ConfError> {
    match entry.key {
        "backend" => settings.backend = backend(entry)?,
        "max_split_size_mb" => {
            settings.max_split_bytes = Some(split_limit(entry, settings.large_segment_bytes)?);
        }
        "max_non_split_rounding_mb" => {
            settings.max_non_split_rounding_bytes =
                Some(split_limit(entry, settings.large_segment_bytes)?);
        }
        "large_segment_size_mb" => {}
        "garbage_collection_threshold" => settings.gc_threshold = Some(threshold(entry)?),
        "roundup_power2_divisions" => settings.roundup = roundup(entry)?,
        "expandable_segments" => settings.expandable_segments = Some(entry.flag()?),
        "expandable_segments_reserve" => {
            settings.expandable_reserve = Some(reserve(entry, entry.text)?);
        }
        "expandable_segments_reserve_by_class" => reserve_by_class(settings, entry)?,
        "per_process_memory_fraction" => settings.memory_fraction = fraction(entry)?,
        "throw_on_cudamalloc_oom" => settings.throw_on_oom = entry.flag()?,
        "release_lock_on_cudamalloc" | "release_lock_on_hipmalloc" => {
            settings.release_lock_on_malloc = entry.flag()?;
        }
        "graph_capture_record_stream_reuse" => {
            settings.graph_capture_record_stream_reuse = entry.flag()?;
        }
        key if key.starts_with("ours_") => set_ours(&mut settings.ours, entry)?,
        _ => set_pinned(settings, entry)?,
    }
    Ok(())
}

fn set_ours(ours: &mut OursSettings, entry: &Entry<'_>) -> Result<(), ConfError> {
    match entry.key {
        "ours_goal" => *ours = goal(entry)?,
        "ours_margin" => ours.margin = fraction(entry)?,
        "ours_margin_min_mb" => ours.margin_bytes_min = bounded_mib(entry, 0)?,
        "ours_margin_calm" => ours.margin_calm = fraction(entry)?,
        "ours_lasting" => ours.lasting_turnovers = between(entry, 0..=LASTING_MAX)?,
        "ours_handle_max_mb" => ours.handle_bytes_max = bounded_mib(entry, 2)?,
        "ours_step" => ours.step = fraction(entry)?,
        "ours_handle_calm_mb" => ours.handle_bytes_calm = bounded_mib(entry, 2)?,
        "ours_part_min_kb" => ours.part_bytes_min = between(entry, 1..=1 << 30)? as u64 * 1024,
        "ours_handle_share" => ours.handle_share = between(entry, 1..=1024)?,
        "ours_handle_parts" => ours.handle_parts = between(entry, 1..=1024)?,
        "ours_ahead" => ours.ahead = between(entry, 1..=1024)?,
        "ours_stall_share" => ours.stall_share = fraction(entry)?,
        "ours_hurry_max" => ours.hurry_max = fraction(entry)?,
        "ours_variety" => ours.variety = between(entry, 0..=1 << 20)?,
        "ours_waiting_max" => ours.waiting_max = between(entry, 0..=1 << 16)?,
        "ours_views_max" => ours.views_max = between(entry, 1..=64)?,
        "ours_shards" => ours.shards = between(entry, 1..=SHARDS_MAX)?,
        "ours_shard_max_kb" => {
            let most = (SHARD_BYTES_MAX >> 10) as u32;
            ours.shard_bytes_max = u64::from(between(entry, 1..=most)?) << 10;
        }
        "ours_collisions" => ours.collisions = between(entry, 0..=FREES_WATCHED)?,
        _ => return Err(entry.error("there is no such setting")),
    }
    Ok(())
}

fn goal(entry: &Entry<'_>) -> Result<OursSettings, ConfError> {
    match entry.text {
        "memory" => Ok(OursSettings::default()),
        "speed" => Ok(OursSettings::speed()),
        _ => Err(entry.error("must be memory or speed")),
    }
}

/// A whole number in `range`.
fn between(entry: &Entry<'_>, range: RangeInclusive<u32>) -> Result<u32, ConfError> {
    let value = entry.integer()?;
    let value = u32::try_from(value).ok().filter(|n| range.contains(n));
    let (least, most) = range.into_inner();
    value.ok_or_else(|| entry.error(format!("must be from {least} to {most}")))
}

/// A number of MiB that is not absurd, in bytes.
fn bounded_mib(entry: &Entry<'_>, least_mib: u64) -> Result<u64, ConfError> {
    match entry.mib()? {
        bytes if bytes < least_mib * MIB => {
            Err(entry.error(format!("too small, must be >= {least_mib}")))
        }
        bytes if bytes >= 1 << 50 => Err(entry.error("must be < 2^30 MB")),
        bytes => Ok(bytes),
    }
}

fn set_pinned(settings: &mut Settings, entry: &Entry<'_>) -> Result<(), ConfError> {
    match entry.key {
        "pinned_use_cuda_host_register" | "pinned_use_hip_host_register" => {
            settings.pinned_use_host_register = entry.flag()?;
        }
        "pinned_num_register_threads" => {
            settings.pinned_register_threads = register_threads(entry)?;
        }
        "pinned_reserve_segment_size_mb" => settings.pinned_reserve_bytes = positive_mib(entry)?,
        "pinned_free_catch_all" => settings.pinned_free_catch_all = entry.flag()?,
        "pinned_use_background_threads" => {
            settings.pinned_use_background_threads = entry.flag()?;
        }
        "pinned_max_round_threshold_mb" => settings.pinned_round_bytes_max = positive_mib(entry)?,
        "pinned_max_cached_size_mb" => settings.pinned_cached_bytes_max = positive_mib(entry)?,
        _ => return Err(entry.error("there is no such setting")),
    }
    Ok(())
}

fn backend(entry: &Entry<'_>) -> Result<BackendChoice, ConfError> {
    match entry.text {
        "native" => Ok(BackendChoice::Native),
        "cudaMallocAsync" | "hipMallocAsync" => Ok(BackendChoice::MallocAsync),
        _ => Err(entry.error("must be native, cudaMallocAsync or hipMallocAsync")),
    }
}

fn large_segment(entry: &Entry<'_>) -> Result<u64, ConfError> {
    match entry.mib()? {
        bytes if bytes <= 10 * MIB => Err(entry.error("must be > 10 MB")),
        // A segment that no device has would turn every request into an out-of-memory.
        bytes if bytes >= 1 << 50 => Err(entry.error("must be < 2^30 MB")),
        bytes => Ok(bytes),
    }
}

fn split_limit(entry: &Entry<'_>, large_segment_bytes: u64) -> Result<u64, ConfError> {
    let bytes = entry.mib()?;
    if bytes < large_segment_bytes {
        let least = large_segment_bytes / MIB;
        return Err(entry.error(format!("too small, must be >= {least}")));
    }
    // Keeps sums with request sizes, which are below 2^60, far from wrapping.
    Ok(bytes.min(1 << 62))
}

fn threshold(entry: &Entry<'_>) -> Result<f64, ConfError> {
    match entry.float()? {
        value if value > 0.0 && value < 1.0 => Ok(value),
        _ => Err(entry.error("must be greater than 0 and less than 1")),
    }
}

fn fraction(entry: &Entry<'_>) -> Result<f64, ConfError> {
    match entry.float()? {
        value if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err(entry.error("is invalid, must be from 0 to 1")),
    }
}

fn register_threads(entry: &Entry<'_>) -> Result<u32, ConfError> {
    match entry.integer()? {
        n if n.is_power_of_two() && n <= 128 => Ok(n as u32),
        _ => Err(entry.error("must be a power of two up to 128")),
    }
}

fn positive_mib(entry: &Entry<'_>) -> Result<Option<u64>, ConfError> {
    match entry.mib()? {
        0 => Err(entry.error("must be greater than 0")),
        bytes => Ok(Some(bytes)),
    }
}

fn roundup(entry: &Entry<'_>) -> Result<RoundupDivisions, ConfError> {
    if !entry.text.starts_with('[') {
        let divisions = entry.integer()?;
        if !divisions.is_power_of_two() {
            return Err(entry.error("must be a power of two"));
        }
        return Ok(RoundupDivisions::uniform(divisions));
    }
    let list: Result<Vec<_>, _> =
        entry.list()?.into_iter().map(|item| roundup_item(entry, item)).collect();
    Ok(RoundupDivisions::from_list(&list?))
}

fn roundup_item(entry: &Entry<'_>, item: &str) -> Result<(ListKey, u64), ConfError> {
    let (key, divisions) = item
        .split_once(':')
        .ok_or_else(|| entry.error(format!("`{item}` must have the form size:divisions")))?;
    let divisions: u64 = divisions
        .parse()
        .map_err(|_| entry.error(format!("`{divisions}` must be a whole number")))?;
    if divisions != 0 && !divisions.is_power_of_two() {
        return Err(entry.error(format!("`{divisions}` must be 0 or a power of two")));
    }
    if key == ">" {
        return Ok((ListKey::Rest, divisions));
    }
    match key.parse::<u64>() {
        Ok(mib) if mib.is_power_of_two() => Ok((ListKey::Mib(mib), divisions)),
        _ => Err(entry.error(format!("`{key}` must be a power of two in MB, or `>`"))),
    }
}

/// A fraction, or a number of GiB with the suffix G.
fn reserve(entry: &Entry<'_>, text: &str) -> Result<ReserveSize, ConfError> {
    let number = text.strip_suffix(['G', 'g']).unwrap_or(text);
    let value: f64 = number.parse().map_err(|_| {
        entry.error(format!("`{text}` must be a fraction of the device, or a size like 40G"))
    })?;
    if !value.is_finite() || value <= 0.0 {
        return Err(entry.error(format!("`{text}` must be greater than 0")));
    }
    if number.len() == text.len() {
        return Ok(ReserveSize::Fraction(value));
    }
    Ok(ReserveSize::Bytes((value * (1u64 << 30) as f64) as u64))
}

/// Replaces the whole map, as upstream.
fn reserve_by_class(settings: &mut Settings, entry: &Entry<'_>) -> Result<(), ConfError> {
    let mut map = std::collections::BTreeMap::new();
    for item in entry.list()? {
        let (class, text) = item
            .split_once(':')
            .filter(|(class, _)| !class.is_empty())
            .ok_or_else(|| entry.error(format!("`{item}` must have the form class:size")))?;
        map.insert(class.to_owned(), reserve(entry, text)?);
    }
    settings.expandable_reserve_by_class = map;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Settings {
        let mut settings = Settings::default();
        settings.apply(text).expect(text);
        settings
    }

    fn refused(text: &str) -> String {
        let mut settings = Settings::default();
        let error = settings.apply(text).expect_err(text);
        assert_eq!(settings, Settings::default(), "a failed string changes nothing");
        error.to_string()
    }

    #[test]
    fn every_key_is_known() {
        let settings = parsed(
            "backend:cudaMallocAsync, max_split_size_mb:64, max_non_split_rounding_mb:40, \
             large_segment_size_mb:32, garbage_collection_threshold:0.6, \
             roundup_power2_divisions:[256:1,512:2,>:8], expandable_segments:True, \
             expandable_segments_reserve:40G, \
             expandable_segments_reserve_by_class:[side:0.25,main:1.5G], \
             per_process_memory_fraction:0.5, throw_on_cudamalloc_oom:True, \
             release_lock_on_cudamalloc:True, graph_capture_record_stream_reuse:True, \
             pinned_use_cuda_host_register:True, pinned_num_register_threads:8, \
             pinned_reserve_segment_size_mb:16, pinned_free_catch_all:True, \
             pinned_use_background_threads:True, pinned_max_round_threshold_mb:128, \
             pinned_max_cached_size_mb:1024",
        );
        assert_eq!(settings.backend, BackendChoice::MallocAsync);
        assert_eq!(settings.max_split_bytes, Some(64 * MIB));
        assert_eq!(settings.max_non_split_rounding_bytes, Some(40 * MIB));
        assert_eq!(settings.large_segment_bytes, 32 * MIB);
        assert_eq!(settings.gc_threshold, Some(0.6));
        assert_eq!(settings.roundup.table()[8..12], [1, 2, 8, 8]);
        assert!(settings.throw_on_oom);
        assert_eq!(settings.expandable_segments, Some(true));
        assert_eq!(settings.expandable_reserve, Some(ReserveSize::Bytes(40 << 30)));
        assert_eq!(
            settings.expandable_reserve_by_class.get("main"),
            Some(&ReserveSize::Bytes(3 << 29))
        );
        assert_eq!(settings.memory_fraction, 0.5);
        assert_eq!(settings.pinned_register_threads, 8);
        assert_eq!(settings.pinned_reserve_bytes, Some(16 * MIB));
        assert_eq!(settings.pinned_round_bytes_max, Some(128 * MIB));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, expected) in [
            ("foo:1", "setting `foo` with value `1`: there is no such setting"),
            ("max_split_size_mb", "must have the form key:value"),
            ("max_split_size_mb:", "has no value"),
            ("max_split_size_mb:2", "too small, must be >= 20"),
            ("max_split_size_mb:x", "setting `max_split_size_mb` with value `x`"),
            ("max_split_size_mb:30,large_segment_size_mb:64", "too small, must be >= 64"),
            ("large_segment_size_mb:10", "must be > 10 MB"),
            ("garbage_collection_threshold:1", "greater than 0 and less than 1"),
            ("garbage_collection_threshold:nan", "finite"),
            ("expandable_segments:true", "must be True or False"),
            ("roundup_power2_divisions:3", "must be a power of two"),
            ("roundup_power2_divisions:0", "must be a power of two"),
            ("roundup_power2_divisions:[64:3]", "`3` must be 0 or a power of two"),
            ("roundup_power2_divisions:[48:2]", "`48` must be a power of two in MB"),
            ("roundup_power2_divisions:[64:2", "`[` without `]`"),
            ("roundup_power2_divisions:64:2]", "`]` without `[`"),
            ("per_process_memory_fraction:1.1", "per_process_memory_fraction"),
            ("per_process_memory_fraction:-0.1", "from 0 to 1"),
            ("pinned_num_register_threads:1024", "power of two up to 128"),
            ("pinned_reserve_segment_size_mb:0", "greater than 0"),
            ("expandable_segments_reserve:0", "greater than 0"),
            ("expandable_segments_reserve:4x", "a size like 40G"),
            ("backend:other", "must be native"),
        ] {
            let message = refused(text);
            assert!(message.contains(expected), "{text}: {message}");
        }
    }

    #[test]
    fn some_settings_are_reset_by_each_string_and_some_stay() {
        let mut settings = parsed("max_split_size_mb:64,expandable_segments:True");
        settings.apply("garbage_collection_threshold:0.5").unwrap();
        assert_eq!(settings.max_split_bytes, None);
        assert_eq!(settings.expandable_segments, Some(true));
        settings.apply("").unwrap();
        assert_eq!(settings.gc_threshold, None);
    }

    #[test]
    fn huge_values_saturate() {
        let settings = parsed("max_split_size_mb:18446744073709551615");
        assert_eq!(settings.max_split_bytes, Some(1 << 62));
        assert_eq!(settings.reserve_bytes(1 << 30, 2 << 20, None), (1 << 30) + (1 << 27));
        let tiny = parsed("expandable_segments_reserve:0.000001");
        assert_eq!(tiny.reserve_bytes(1 << 30, 2 << 20, None), 2 << 20);
    }
}
