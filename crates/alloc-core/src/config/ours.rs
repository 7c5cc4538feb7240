//! Settings that only policy `ours` has.

/// The largest request that can be for a shard, in bytes.
pub(crate) const SHARD_BYTES_MAX: u64 = 2 << 20;
/// Most shards of one heap.
pub(crate) const SHARDS_MAX: u32 = 64;
/// Longest life that can be asked of what lasts, in turnovers.
pub(crate) const LASTING_MAX: u32 = 1 << 16;
/// Collisions are counted within so many frees of a heap.
pub(crate) const FREES_WATCHED: u32 = 4096;

/// How policy `ours` grows expandable segments, keeps freed blocks, and what it does about threads that
/// collide; keys of the settings string begin with `ours_`.
///
/// The default spends driver calls to reserve little more than is needed; [`speed`](Self::speed) is
/// for programs that are short of time instead. `ours_goal:memory` and `ours_goal:speed` choose between
/// the two; keys that follow change single settings of them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct OursSettings {
    /// `ours_margin`, from 0 to 1: memory is moved rather than created once this fraction
    /// more is reserved than was ever needed. Larger means fewer moves and more memory.
    pub margin: f64,
    /// `ours_margin_min_mb`, in bytes: but not below this much more.
    pub margin_bytes_min: u64,
    /// `ours_margin_calm`, from 0 to 1: while memory only grows, as when weights are loaded, this
    /// fraction instead, but at most one handle of `ours_handle_calm_mb`. What comes next uses it.
    pub margin_calm: f64,
    /// `ours_ahead`: within the margin, up to this many times the request is created at once.
    pub ahead: u32,
    /// `ours_step`, from 0 to 1: within the margin, at least this fraction of what was ever
    /// needed is created at once, in one handle; where memory is tight less of it, a seventh and half
    /// of what lies free. Larger means fewer driver calls and more memory.
    pub step: f64,
    /// `ours_handle_max_mb`, in bytes: the largest physical handle to create for usual growth.
    pub handle_bytes_max: u64,
    /// `ours_handle_share`: and no handle is larger than the request it is created for divided by
    /// this. Where requests are cut from small handles, few are left partly used.
    pub handle_share: u32,
    /// `ours_handle_parts`: a request that would take more handles than this gets larger ones, of up to
    /// 20 MiB.
    pub handle_parts: u32,
    /// `ours_handle_calm_mb`, in bytes: the largest one where memory only grows, and for what lasts.
    pub handle_bytes_calm: u64,
    /// `ours_part_min_kb`, in bytes: the smallest free end of a partly used handle that is mapped
    /// where it helps, unless nothing else avoids running out of memory.
    pub part_bytes_min: u64,
    /// `ours_lasting`: sizes whose blocks live for so many turnovers or more have addresses of their own,
    /// as far as others do not fill gaps there. A turnover is the time in which as much is allocated as
    /// ever lived at once. 0 is never.
    pub lasting_turnovers: u32,
    /// `ours_views_max`: places where one handle may be mapped at once; above, old ones are unmapped
    /// when they are known to be unused, and no part of the handle moves.
    pub views_max: u32,
    /// `ours_waiting_max`: freed blocks that a stream keeps as they are for requests of the same size,
    /// until memory is short. Requests of 8 to 256 KiB, and those for shards, which this serves best, are
    /// rounded to eight sizes a power of two. 0: blocks merge with free neighbours at once, and every request is
    /// rounded to 512 bytes.
    pub waiting_max: u32,
    /// `ours_variety`: where the allocator has a clock, and of so many requests above 256 KiB that no freed
    /// block waited for three quarters and more ask for a new size, with 125,000 frees a second and more,
    /// those of up to 16 MiB are rounded to few sizes as well, and wait once freed. Growth then takes
    /// new memory where it would have moved some, up to half of `ours_hurry_max`. It ends when frees become
    /// fewer or memory is short. 0 is never.
    pub variety: u32,
    /// `ours_stall_share`, from 0 to 1: the share of time that moving memory may take, where
    /// the allocator has a clock.
    pub stall_share: f64,
    /// `ours_hurry_max`, from 0 to 1: where that does not suffice, up to this fraction more
    /// is reserved than was ever needed.
    pub hurry_max: f64,
    /// `ours_shards`, from 1 to 64: heaps that serve the smaller requests of a stream of the default pool
    /// once its threads collide, each thread keeping to one of them. 1 is none.
    pub shards: u32,
    /// `ours_shard_max_kb`, in bytes: the largest request for them. Larger means fewer collisions and
    /// more memory.
    pub shard_bytes_max: u64,
    /// `ours_collisions`: so many times within 4,096 frees a thread has to find the heap in use for that;
    /// 0 is from the start.
    pub collisions: u32,
}

impl OursSettings {
    /// `ours_goal:speed`: few, large handles, created some time before they are needed. On recorded
    /// training runs a third of the handles and of the time in driver calls, for 0 to 4 % more memory:
    /// still less than PyTorch's expandable segments take.
    pub fn speed() -> Self {
        OursSettings {
            margin: 0.035,
            ahead: 1,
            step: 0.04,
            handle_bytes_max: 1 << 30,
            handle_bytes_calm: 1 << 30,
            part_bytes_min: 4 << 20,
            ..Self::default()
        }
    }
}

impl Default for OursSettings {
    fn default() -> Self {
        OursSettings {
            margin: 0.005,
            margin_bytes_min: 24 << 20,
            margin_calm: 0.05,
            ahead: 4,
            step: 0.0,
            handle_bytes_max: 12 << 20,
            handle_share: 1,
            handle_parts: 14,
            handle_bytes_calm: 64 << 20,
            part_bytes_min: 1 << 20,
            lasting_turnovers: 3,
            views_max: 8,
            waiting_max: 512,
            variety: 512,
            stall_share: 0.01,
            hurry_max: 0.5,
            shards: 16,
            shard_bytes_max: 1 << 20,
            collisions: 64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Policy, Rules, Settings};

    #[test]
    fn a_goal_sets_everything_and_later_keys_change_it() {
        let mut settings = Settings::default();
        settings.apply("ours_views_max:3,ours_goal:speed,ours_margin:0.25").unwrap();
        assert_eq!(settings.ours, OursSettings { margin: 0.25, ..OursSettings::speed() });
        settings.apply("ours_step:0.125").unwrap();
        assert_eq!(settings.ours.step, 0.125);
        let error = settings.apply("ours_goal:fun").unwrap_err().to_string();
        assert!(error.contains("ours_goal") && error.contains("memory or speed"), "{error}");
        settings.apply("ours_goal:memory").unwrap();
        assert_eq!(settings.ours, OursSettings::default());
    }

    #[test]
    fn a_life_that_is_set_directly_is_bounded_too() {
        let ours = OursSettings { lasting_turnovers: u32::MAX, ..OursSettings::default() };
        let settings = Settings { ours, ..Settings::default() };
        let rules = Rules::new(Policy::Ours, &settings, false, true);
        assert_eq!(rules.lasting_turnovers, LASTING_MAX);
    }
}
