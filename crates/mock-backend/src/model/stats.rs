//! Statistics under PyTorch's names.

/// One statistic over time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stat {
    /// Its value now.
    pub current: i64,
    /// Its highest value since the last reset of peaks.
    pub peak: i64,
    /// The sum of all increases since the last reset of accumulated values.
    pub allocated: i64,
    /// The sum of all decreases since then.
    pub freed: i64,
}

impl Stat {
    pub(super) fn up(&mut self, by: u64) {
        self.current += by as i64;
        self.allocated += by as i64;
        self.peak = self.peak.max(self.current);
    }

    pub(super) fn down(&mut self, by: u64) {
        self.current -= by as i64;
        self.freed += by as i64;
    }

    fn fields(&self) -> [i64; 4] {
        [self.current, self.peak, self.allocated, self.freed]
    }

    fn get(&self, field: &str) -> Option<i64> {
        match field {
            "current" => Some(self.current),
            "peak" => Some(self.peak),
            "allocated" => Some(self.allocated),
            "freed" => Some(self.freed),
            _ => None,
        }
    }
}

/// A statistic kept for both classes and their sum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Pooled {
    all: Stat,
    small: Stat,
    large: Stat,
}

impl Pooled {
    pub(super) fn up(&mut self, small: bool, by: u64) {
        self.all.up(by);
        self.class(small).up(by);
    }

    pub(super) fn down(&mut self, small: bool, by: u64) {
        self.all.down(by);
        self.class(small).down(by);
    }

    fn class(&mut self, small: bool) -> &mut Stat {
        if small { &mut self.small } else { &mut self.large }
    }
}

/// All statistics of one device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelStats {
    pub(super) allocation: Pooled,
    pub(super) segment: Pooled,
    pub(super) active: Pooled,
    pub(super) inactive_split: Pooled,
    pub(super) allocated_bytes: Pooled,
    pub(super) reserved_bytes: Pooled,
    pub(super) active_bytes: Pooled,
    pub(super) inactive_split_bytes: Pooled,
    pub(super) requested_bytes: Pooled,
    pub(super) oversize_allocations: Stat,
    pub(super) oversize_segments: Stat,
    pub(super) num_alloc_retries: i64,
    pub(super) num_ooms: i64,
    pub(super) num_sync_all_streams: i64,
    pub(super) num_device_alloc: i64,
    pub(super) num_device_free: i64,
    pub(super) max_split_size: i64,
}

impl ModelStats {
    pub(super) fn new(max_split: Option<u64>) -> Self {
        ModelStats {
            allocation: Pooled::default(),
            segment: Pooled::default(),
            active: Pooled::default(),
            inactive_split: Pooled::default(),
            allocated_bytes: Pooled::default(),
            reserved_bytes: Pooled::default(),
            active_bytes: Pooled::default(),
            inactive_split_bytes: Pooled::default(),
            requested_bytes: Pooled::default(),
            oversize_allocations: Stat::default(),
            oversize_segments: Stat::default(),
            num_alloc_retries: 0,
            num_ooms: 0,
            num_sync_all_streams: 0,
            num_device_alloc: 0,
            num_device_free: 0,
            max_split_size: max_split.map_or(-1, |bytes| bytes as i64),
        }
    }

    /// A value by its flattened name, as `allocated_bytes.all.current` or `num_ooms`; `None` for
    /// names that do not exist.
    pub fn get(&self, key: &str) -> Option<i64> {
        let mut parts = key.split('.');
        let name = parts.next()?;
        let value = match name {
            "num_alloc_retries" => self.num_alloc_retries,
            "num_ooms" => self.num_ooms,
            "num_sync_all_streams" => self.num_sync_all_streams,
            "num_device_alloc" => self.num_device_alloc,
            "num_device_free" => self.num_device_free,
            "max_split_size" => self.max_split_size,
            "oversize_allocations" => self.oversize_allocations.get(parts.next()?)?,
            "oversize_segments" => self.oversize_segments.get(parts.next()?)?,
            _ => {
                let pooled = self.pooled(name)?;
                let stat = match parts.next()? {
                    "all" => pooled.all,
                    "small_pool" => pooled.small,
                    "large_pool" => pooled.large,
                    _ => return None,
                };
                stat.get(parts.next()?)?
            }
        };
        parts.next().is_none().then_some(value)
    }

    /// Every value but the counters, in the order of `POOLED` and `SINGLE`, then (all, small, large),
    /// then (current, peak, allocated, freed).
    pub(crate) fn numbers(&self) -> Vec<i64> {
        let pooled = self.all_pooled().into_iter().flat_map(|p| [&p.all, &p.small, &p.large]);
        let stats = pooled.chain([&self.oversize_allocations, &self.oversize_segments]);
        stats.flat_map(Stat::fields).collect()
    }

    fn pooled(&self, name: &str) -> Option<&Pooled> {
        let at = POOLED.iter().position(|&known| known == name)?;
        Some(self.all_pooled()[at])
    }

    fn all_pooled(&self) -> [&Pooled; 9] {
        [
            &self.allocation,
            &self.segment,
            &self.active,
            &self.inactive_split,
            &self.allocated_bytes,
            &self.reserved_bytes,
            &self.active_bytes,
            &self.inactive_split_bytes,
            &self.requested_bytes,
        ]
    }

    /// All flattened names.
    pub fn keys() -> Vec<String> {
        const FIELDS: [&str; 4] = ["current", "peak", "allocated", "freed"];
        let mut keys: Vec<String> = SCALARS.iter().map(ToString::to_string).collect();
        for field in FIELDS {
            keys.extend(SINGLE.iter().map(|name| format!("{name}.{field}")));
            for class in ["all", "small_pool", "large_pool"] {
                keys.extend(POOLED.iter().map(|name| format!("{name}.{class}.{field}")));
            }
        }
        keys.sort();
        keys
    }

    fn each_stat(&mut self, mut act: impl FnMut(&mut Stat)) {
        let pooled = [
            &mut self.allocation,
            &mut self.segment,
            &mut self.active,
            &mut self.inactive_split,
            &mut self.allocated_bytes,
            &mut self.reserved_bytes,
            &mut self.active_bytes,
            &mut self.inactive_split_bytes,
            &mut self.requested_bytes,
        ];
        for pooled in pooled {
            act(&mut pooled.all);
            act(&mut pooled.small);
            act(&mut pooled.large);
        }
        act(&mut self.oversize_allocations);
        act(&mut self.oversize_segments);
    }

    pub(super) fn reset_peak(&mut self) {
        self.each_stat(|stat| stat.peak = stat.current);
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.each_stat(|stat| (stat.allocated, stat.freed) = (0, 0));
        self.num_alloc_retries = 0;
        self.num_ooms = 0;
        self.num_sync_all_streams = 0;
        self.num_device_alloc = 0;
        self.num_device_free = 0;
    }
}

const POOLED: [&str; 9] = [
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
];

const SINGLE: [&str; 2] = ["oversize_allocations", "oversize_segments"];

const SCALARS: [&str; 6] = [
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_value_and_no_other_has() {
        let stats = ModelStats::new(None);
        let keys = ModelStats::keys();
        assert_eq!(keys.len(), 9 * 12 + 2 * 4 + 6);
        assert!(keys.iter().all(|key| stats.get(key).is_some()));
        for wrong in ["", "active", "active.all", "active.all.now", "num_ooms.all", "nothing.all"] {
            assert_eq!(stats.get(wrong), None, "{wrong}");
        }
        assert_eq!(stats.get("max_split_size"), Some(-1));
    }

    #[test]
    fn resets_leave_the_rest_alone() {
        let mut stats = ModelStats::new(None);
        stats.active.up(true, 5);
        stats.active.down(true, 3);
        stats.num_ooms = 1;
        stats.reset_peak();
        let of = |stats: &ModelStats, field| stats.get(&format!("active.small_pool.{field}"));
        assert_eq!(of(&stats, "peak"), Some(2));
        assert_eq!(of(&stats, "allocated"), Some(5));
        stats.reset_accumulated();
        assert_eq!(of(&stats, "allocated"), Some(0));
        assert_eq!(of(&stats, "freed"), Some(0));
        assert_eq!(of(&stats, "current"), Some(2));
        assert_eq!(stats.num_ooms, 0);
    }
}
