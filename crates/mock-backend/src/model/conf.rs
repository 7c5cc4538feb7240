//! Settings of the reference, read from the text of `PYTORCH_CUDA_ALLOC_CONF`.

const MIB: u64 = 1 << 20;

/// In which order the streams are visited when events are looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventOrder {
    /// By id.
    Ascending,
    /// Default streams first, then the others by descending id: what PyTorch's hash table gives.
    DefaultThenDescending,
}

/// Settings of the [`Model`](super::Model).
#[derive(Clone, PartialEq, Debug)]
pub struct ModelConf {
    /// Blocks from this size on are never split; none if `None`.
    pub max_split: Option<u64>,
    /// How much larger than an oversize request a block may be; the large segment size if `None`.
    pub max_non_split_rounding: Option<u64>,
    /// Size of an ordinary large segment, and of the pages of an expandable one.
    pub large_segment: u64,
    /// Share of the limit above which cached segments are collected; 0 is off.
    pub gc_threshold: f64,
    /// Divisions for rounding, for sizes below 2 MiB, below 4 MiB, …, from 32 GiB on.
    pub divisions: [u64; 16],
    /// Whether misses are served by expandable segments.
    pub expandable: bool,
    /// Order of streams when events are looked at.
    pub event_order: EventOrder,
}

impl Default for ModelConf {
    fn default() -> Self {
        ModelConf {
            max_split: None,
            max_non_split_rounding: None,
            large_segment: 20 * MIB,
            gc_threshold: 0.0,
            divisions: [0; 16],
            expandable: false,
            event_order: EventOrder::DefaultThenDescending,
        }
    }
}

impl ModelConf {
    /// Reads settings; `None` if a key is unknown or a value has the wrong form. Ranges of values
    /// are not checked.
    pub fn parse(text: &str) -> Option<Self> {
        let mut conf = ModelConf::default();
        let mut rest = text;
        while !rest.is_empty() {
            let (key, after) = rest.split_once(':')?;
            let value_len = match after.starts_with('[') {
                true => after.find(']')? + 1,
                false => after.find(',').unwrap_or(after.len()),
            };
            let (value, after) = after.split_at(value_len);
            conf.set(key, value)?;
            rest = after.trim_start_matches(',');
        }
        Some(conf)
    }

    fn set(&mut self, key: &str, value: &str) -> Option<()> {
        match key {
            "max_split_size_mb" => self.max_split = Some(value.parse::<u64>().ok()? * MIB),
            "max_non_split_rounding_mb" => {
                self.max_non_split_rounding = Some(value.parse::<u64>().ok()? * MIB);
            }
            "large_segment_size_mb" => self.large_segment = value.parse::<u64>().ok()? * MIB,
            "garbage_collection_threshold" => self.gc_threshold = value.parse().ok()?,
            "roundup_power2_divisions" => self.divisions = divisions(value)?,
            "expandable_segments" => self.expandable = value == "True",
            _ => return None,
        }
        Some(())
    }

    pub(super) fn non_split_rounding(&self) -> u64 {
        self.max_non_split_rounding.unwrap_or(self.large_segment)
    }

    /// The size that a request of `bytes` is rounded to.
    pub(super) fn round(&self, bytes: u64) -> u64 {
        if bytes < 512 {
            return 512;
        }
        let index = bytes.ilog2().saturating_sub(20).min(15) as usize;
        let divisions = self.divisions[index];
        if divisions <= 1 || bytes <= 512 * divisions {
            return bytes.next_multiple_of(512);
        }
        if bytes.is_power_of_two() {
            return bytes;
        }
        let floor = 1u64 << bytes.ilog2();
        let step = floor >> divisions.ilog2();
        if step == 0 { 2 * floor } else { bytes.next_multiple_of(step) }
    }

    /// The size of the ordinary segment that a rounded request takes.
    pub(super) fn segment_bytes(&self, rounded: u64) -> u64 {
        if rounded <= MIB {
            2 * MIB
        } else if rounded < 10 * MIB {
            self.large_segment
        } else {
            rounded.next_multiple_of(2 * MIB)
        }
    }
}

/// `4` or `[256:1,512:2,>:8]`.
fn divisions(value: &str) -> Option<[u64; 16]> {
    let Some(list) = value.strip_prefix('[') else {
        return Some([value.parse().ok()?; 16]);
    };
    let mut table = [0; 16];
    let mut last = None;
    for entry in list.strip_suffix(']')?.split(',') {
        let (key, divisions) = entry.split_once(':')?;
        let divisions = divisions.parse().ok()?;
        if key == ">" {
            table[last.unwrap_or(0) + 1..].fill(divisions);
            continue;
        }
        let index = (key.parse::<u64>().ok()?.checked_ilog2()? as usize).min(15);
        let from = if last.is_none() { 0 } else { index };
        table[from..=index].fill(divisions);
        last = Some(index);
    }
    Some(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(text: &str, bytes: u64) -> u64 {
        ModelConf::parse(text).unwrap().round(bytes)
    }

    /// The worked examples of the documentation and of reports.
    #[test]
    fn rounding() {
        let four = "roundup_power2_divisions:4";
        assert_eq!(round("", 1), 512);
        assert_eq!(round("", 4200), 4608);
        assert_eq!(round("", MIB + 1), MIB + 512);
        assert_eq!(round(four, 1200), 1536);
        assert_eq!(round(four, 5000), 5120);
        assert_eq!(round("roundup_power2_divisions:2", 4200), 6144);
        assert_eq!(round(four, 84 * MIB), 96 * MIB);
        assert_eq!(round("roundup_power2_divisions:[64:8,>:1]", 84 * MIB), 88 * MIB);
        assert_eq!(round("roundup_power2_divisions:[256:2]", 400 * MIB), 512 * MIB);
        let listed = "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]";
        let by_key = [(300, 300), (514, 768), (1100, 1280), (2100, 2304)];
        for (mib, rounded) in by_key {
            assert_eq!(round(listed, mib * MIB), rounded * MIB, "{mib} MiB");
        }
        assert_eq!(round("roundup_power2_divisions:[>:2]", 3 * MIB + 1), 4 * MIB);
        assert_eq!(round("roundup_power2_divisions:[>:2]", 1500 * 1024), 1500 * 1024);
    }

    #[test]
    fn segment_sizes() {
        let conf = ModelConf::default();
        let sizes = [
            (MIB, 2 * MIB),
            (MIB + 512, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (10 * MIB + 512, 12 * MIB),
        ];
        for (rounded, segment) in sizes {
            assert_eq!(conf.segment_bytes(rounded), segment);
        }
    }

    #[test]
    fn settings_text() {
        let text =
            "max_split_size_mb:24,roundup_power2_divisions:[4:2,>:8],expandable_segments:True";
        let conf = ModelConf::parse(text).unwrap();
        assert_eq!((conf.max_split, conf.expandable), (Some(24 * MIB), true));
        assert_eq!(conf.divisions[..4], [2, 2, 2, 8]);
        assert_eq!(ModelConf::parse("max_split_size:24"), None);
        assert_eq!(ModelConf::parse("max_split_size_mb:x"), None);
    }
}
