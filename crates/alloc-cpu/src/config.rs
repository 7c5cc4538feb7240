//! What can be set, and what follows from it for one request.

use crate::error::CpuError;

/// What new memory contains.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fill {
    /// Whatever was there.
    #[default]
    None,
    /// Zeros.
    Zero,
    /// A pattern that is no number as a 32-bit float and a very large one as anything else, so that
    /// reading memory that was never written is noticed.
    Junk,
}

/// Bytes around every allocation that may be read, for code that reads a little past the ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Guards {
    /// Bytes before; a multiple of the alignment.
    pub before: u64,
    /// Bytes after.
    pub after: u64,
}

/// What an allocator is made with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuConfig {
    /// What addresses are multiples of: a power of two, from 8 bytes to a page. Requests of
    /// [`LARGE_BYTES_MIN`](CpuConfig::LARGE_BYTES_MIN) or more start at a page.
    pub align: u64,
    /// Ask for huge pages from 2 MiB on. Such memory starts at a multiple of 2 MiB.
    pub huge_pages: bool,
    /// Take memory from this NUMA node only. It comes in whole pages then.
    pub numa_node: Option<u16>,
    /// What new memory contains.
    pub fill: Fill,
    /// Readable bytes around every allocation.
    pub guards: Option<Guards>,
    /// Keep freed memory, to serve requests of exactly the same size.
    pub cache: bool,
}

impl Default for CpuConfig {
    /// 64-byte alignment and nothing else.
    fn default() -> Self {
        CpuConfig {
            align: 64,
            huge_pages: false,
            numa_node: None,
            fill: Fill::None,
            guards: None,
            cache: false,
        }
    }
}

/// Size of a huge page.
pub(crate) const HUGE_PAGE: u64 = 2 << 20;

impl CpuConfig {
    /// Requests of so many bytes start at a page.
    pub const LARGE_BYTES_MIN: u64 = 64 << 10;

    pub(crate) fn validate(&self, page: u64) -> Result<(), CpuError> {
        let bad = |what, why| Err(CpuError::BadConfig { what, why });
        if !self.align.is_power_of_two() || self.align < 8 || self.align > page {
            return bad("align", "a power of two from 8 to the size of a page");
        }
        match self.guards {
            Some(Guards { before, .. }) if !before.is_multiple_of(self.align) => {
                bad("guards.before", "a multiple of the alignment")
            }
            Some(Guards { before, after }) if before > HUGE_PAGE || after > HUGE_PAGE => {
                bad("guards", "at most 2 MiB each")
            }
            _ => Ok(()),
        }
    }
}

/// Where memory is taken from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// The C library's heap, which neighbours share pages of.
    Heap,
    /// Pages of its own.
    Pages {
        /// Huge ones if the system has them.
        huge: bool,
        /// From this node only.
        node: Option<u16>,
    },
}

/// How a request is served. The same request gives the same plan, so memory can be freed by its
/// address and size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    pub(crate) source: Source,
    /// What the address is a multiple of.
    pub(crate) align: u64,
    /// Bytes between the start of the memory and the address.
    pub(crate) before: u64,
    /// Bytes asked for.
    pub(crate) bytes: u64,
    /// Bytes to obtain, guards included.
    pub(crate) total: u64,
}

impl Plan {
    /// The plan for `bytes`, not 0, at a multiple of `align` at least.
    pub(crate) fn new(
        config: &CpuConfig,
        page: u64,
        bytes: u64,
        align: u64,
    ) -> Result<Plan, CpuError> {
        let too_large = CpuError::TooLarge { bytes };
        let huge = config.huge_pages && bytes >= HUGE_PAGE;
        let source = match config.numa_node {
            None if !huge => Source::Heap,
            node => Source::Pages { huge, node },
        };
        let own = if bytes >= CpuConfig::LARGE_BYTES_MIN { page } else { config.align };
        let least = match source {
            Source::Heap => own,
            Source::Pages { huge: false, .. } => page,
            Source::Pages { huge: true, .. } => HUGE_PAGE,
        };
        let align = least.max(align);
        let Guards { before, after } = config.guards.unwrap_or(Guards { before: 0, after: 0 });
        let before = before.next_multiple_of(align);
        let total = before.checked_add(bytes).and_then(|sum| sum.checked_add(after));
        let total = match source {
            Source::Heap => total,
            Source::Pages { .. } => total.and_then(|sum| sum.checked_next_multiple_of(page)),
        };
        // Room to align the start must be there as well.
        let total =
            total.filter(|sum| sum.checked_add(align).is_some_and(|s| s <= i64::MAX as u64));
        Ok(Plan { source, align, before, bytes, total: total.ok_or(too_large)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn plan(config: CpuConfig, bytes: u64) -> Plan {
        Plan::new(&config, PAGE, bytes, 1).unwrap()
    }

    #[test]
    fn small_requests_are_aligned_to_64_and_large_ones_to_a_page() {
        let config = CpuConfig::default();
        for (bytes, align) in [(1, 64), (100, 64), (65_535, 64), (65_536, 4096), (1 << 30, 4096)] {
            let plan = plan(config, bytes);
            assert_eq!((plan.align, plan.total, plan.source), (align, bytes, Source::Heap));
        }
        assert_eq!(Plan::new(&config, PAGE, 8, 256).unwrap().align, 256);
    }

    #[test]
    fn huge_pages_and_nodes_have_pages_of_their_own() {
        let huge = CpuConfig { huge_pages: true, ..CpuConfig::default() };
        assert_eq!(plan(huge, HUGE_PAGE - 1).source, Source::Heap);
        let large = plan(huge, HUGE_PAGE + 1);
        assert_eq!(large.source, Source::Pages { huge: true, node: None });
        assert_eq!((large.align, large.total), (HUGE_PAGE, HUGE_PAGE + PAGE));
        let node = CpuConfig { numa_node: Some(0), ..CpuConfig::default() };
        let small = plan(node, 1);
        assert_eq!(small.source, Source::Pages { huge: false, node: Some(0) });
        assert_eq!((small.align, small.total), (PAGE, PAGE));
    }

    #[test]
    fn guards_keep_the_alignment() {
        let guards = Some(Guards { before: 64, after: 16 });
        let config = CpuConfig { guards, ..CpuConfig::default() };
        let small = plan(config, 100);
        assert_eq!((small.before, small.total), (64, 180));
        let large = plan(config, 1 << 20);
        assert_eq!((large.before, large.align), (4096, 4096));
    }

    #[test]
    fn sizes_that_overflow_are_refused_with_the_size() {
        let guards = Some(Guards { before: 64, after: 16 });
        let configs = [
            CpuConfig::default(),
            CpuConfig { guards, ..CpuConfig::default() },
            CpuConfig { huge_pages: true, ..CpuConfig::default() },
            CpuConfig { numa_node: Some(3), guards, ..CpuConfig::default() },
        ];
        for config in configs {
            for bytes in [u64::MAX, u64::MAX - 79, 1 << 63, (1 << 63) - 1] {
                let refused = Plan::new(&config, PAGE, bytes, 1);
                assert_eq!(refused, Err(CpuError::TooLarge { bytes }));
            }
        }
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let check = |config: CpuConfig| match config.validate(PAGE) {
            Err(CpuError::BadConfig { what, .. }) => what,
            other => panic!("{other:?}"),
        };
        let config = CpuConfig::default();
        for align in [0, 4, 48, 8192] {
            assert_eq!(check(CpuConfig { align, ..config }), "align");
        }
        let guards = |before, after| CpuConfig { guards: Some(Guards { before, after }), ..config };
        assert_eq!(check(guards(63, 0)), "guards.before");
        assert_eq!(check(guards(64, u64::MAX)), "guards");
        assert_eq!(config.validate(PAGE), Ok(()));
    }
}
