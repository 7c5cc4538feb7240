//! From the bytes a program asks for to the bytes it gets: rounding, classes, segment sizes.
//!
//! Every number here is PyTorch's (spec §1.1, §2.2, §2.3). All results stay below 2^62 because
//! requests of [`REQUEST_BYTES_MAX`] and more are refused before any arithmetic.

use crate::units::align_up;

/// Rounding quantum and smallest block, in bytes.
pub const BLOCK_BYTES_MIN: u64 = 512;
/// Largest rounded request of the small class, in bytes.
pub const SMALL_BYTES_MAX: u64 = 1 << 20;
/// The same in expandable segments of policy `ours`, in bytes. Handles of the small class are all of
/// the smallest size; what could as well share larger ones belongs to the large class.
pub const OURS_SMALL_BYTES_MAX: u64 = 256 << 10;
/// Segment size and expandable page of the small class, in bytes.
pub const SMALL_SEGMENT_BYTES: u64 = 2 << 20;
/// Rounded requests of the large class below this many bytes share segments.
pub const OWN_SEGMENT_BYTES_MIN: u64 = 10 << 20;
/// Default of the setting `large_segment_size_mb`, in bytes.
pub const LARGE_SEGMENT_BYTES: u64 = 20 << 20;
/// Segments of one large request are multiples of this many bytes.
pub const LARGE_SEGMENT_ROUNDING: u64 = 2 << 20;
/// Requests of this many bytes and more are refused outright: no device has that much.
pub const REQUEST_BYTES_MAX: u64 = 1 << 60;

const _: () = assert!(SMALL_BYTES_MAX <= SMALL_SEGMENT_BYTES);
const _: () = assert!(OURS_SMALL_BYTES_MAX <= SMALL_BYTES_MAX);
const _: () = assert!(OWN_SEGMENT_BYTES_MIN.is_multiple_of(LARGE_SEGMENT_ROUNDING));

/// The two classes of a heap. A block belongs to the class of its segment for life.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum SizeClass {
    /// Rounded requests up to [`SMALL_BYTES_MAX`], or [`OURS_SMALL_BYTES_MAX`].
    Small,
    /// All others.
    Large,
}

impl SizeClass {
    /// Both, in the order in which a private pool is flushed.
    pub const ALL: [SizeClass; 2] = [SizeClass::Small, SizeClass::Large];

    /// The class that serves requests of `rounded` bytes where those up to `small_bytes_max` are
    /// small.
    pub const fn of(rounded: u64, small_bytes_max: u64) -> Self {
        if rounded <= small_bytes_max { SizeClass::Small } else { SizeClass::Large }
    }

    /// Position in tables of two.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// PyTorch's word for it in snapshots: `small` or `large`.
    pub const fn name(self) -> &'static str {
        match self {
            SizeClass::Small => "small",
            SizeClass::Large => "large",
        }
    }
}

/// Number of size intervals that [`RoundupDivisions`] distinguishes.
const INTERVALS: usize = 16;

/// The setting `roundup_power2_divisions`: for each interval [2^k, 2^(k+1)) MiB, how many steps the
/// interval is divided into. 0 is plain rounding to [`BLOCK_BYTES_MIN`].
///
/// 1 should round to the next power of two. PyTorch ignores it (spec §2.2); with
/// [`honouring_one`](Self::honouring_one) it is obeyed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RoundupDivisions {
    table: [u64; INTERVALS],
    honours_one: bool,
}

impl RoundupDivisions {
    /// Plain rounding everywhere.
    pub const NONE: RoundupDivisions =
        RoundupDivisions { table: [0; INTERVALS], honours_one: false };

    /// The same number of divisions for every size. `divisions` must be 0 or a power of two.
    pub const fn uniform(divisions: u64) -> Self {
        RoundupDivisions { table: [divisions; INTERVALS], honours_one: false }
    }

    /// Builds the table of the list form: pairs of (size in MiB, divisions), and the number for
    /// everything above the last key, if given as `rest` together with its position in the list.
    ///
    /// The first key also covers everything below it; gaps between keys stay plain; `rest` fills
    /// what is above the last key before it, and, coming first, everything from 2 MiB on.
    pub(crate) fn from_list(list: &[(ListKey, u64)]) -> Self {
        let mut table = [0; INTERVALS];
        let mut last_index = 0;
        for (position, (key, divisions)) in list.iter().enumerate() {
            match key {
                ListKey::Mib(mib) => {
                    last_index = (mib.ilog2() as usize).min(INTERVALS - 1);
                    let first = if position == 0 { 0 } else { last_index };
                    table[first..=last_index].fill(*divisions);
                }
                ListKey::Rest => table[last_index + 1..].fill(*divisions),
            }
        }
        RoundupDivisions { table, honours_one: false }
    }

    /// The same table, with entries of 1 rounding to powers of two if `yes`.
    #[must_use]
    pub const fn honouring_one(self, yes: bool) -> Self {
        RoundupDivisions { table: self.table, honours_one: yes }
    }

    /// The divisions in force for a request of `bytes` (> 0), or `None` for plain rounding.
    pub fn for_bytes(&self, bytes: u64) -> Option<u64> {
        let interval = (bytes.ilog2() as usize).saturating_sub(20).min(INTERVALS - 1);
        match self.table[interval] {
            0 => None,
            1 if !self.honours_one => None,
            divisions => Some(divisions),
        }
    }

    /// Whether every request is rounded to the next multiple of [`BLOCK_BYTES_MIN`].
    pub(crate) fn is_plain(&self) -> bool {
        self.table.iter().all(|divisions| *divisions == 0)
    }

    /// The table itself, entry k for sizes in [2^k, 2^(k+1)) MiB.
    pub const fn table(&self) -> &[u64; INTERVALS] {
        &self.table
    }
}

/// Key of one entry of the list form of `roundup_power2_divisions`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ListKey {
    /// A size in MiB, a power of two.
    Mib(u64),
    /// `>`: everything above.
    Rest,
}

/// The rounded size of a request of `bytes`, 0 < `bytes` < [`REQUEST_BYTES_MAX`]: a multiple of
/// [`BLOCK_BYTES_MIN`], never below the request (spec §2.2).
///
/// # Panics
/// If `bytes` is out of range; callers refuse such requests first.
pub fn round_request(bytes: u64, divisions: &RoundupDivisions) -> u64 {
    assert!(bytes > 0 && bytes < REQUEST_BYTES_MAX, "request size is checked before rounding");
    if bytes < BLOCK_BYTES_MIN {
        return BLOCK_BYTES_MIN;
    }
    match divisions.for_bytes(bytes) {
        // The guard keeps every step a multiple of the block quantum.
        Some(divisions) if bytes > BLOCK_BYTES_MIN.saturating_mul(divisions) => {
            round_to_division(bytes, divisions)
        }
        // Below 2^60, so the next multiple exists.
        _ => bytes.next_multiple_of(BLOCK_BYTES_MIN),
    }
}

/// Policy `ours` has few sizes in the small class, so that what is freed is soon asked for again: all
/// multiples of [`BLOCK_BYTES_MIN`] up to sixteen of them, then eight to a power of two. That costs up
/// to an eighth of a class that holds about a hundredth of a program's memory. Of the large class it
/// costs more, so there only where time is short (`heap/variety.rs`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FewSize {
    /// A multiple of [`BLOCK_BYTES_MIN`].
    pub(crate) bytes: u64,
    /// Which one it is, from 1 on.
    pub(crate) number: usize,
}

impl FewSize {
    /// The sizes to a power of two, as a power of two.
    const STEPS: u32 = 3;
    /// The largest, above the small class of any heap. What is larger is asked for so seldom that the
    /// time that it takes does not matter.
    pub(crate) const BYTES_MAX: u64 = 16 << 20;
    /// How many there are, and one more.
    pub(crate) const COUNT: usize = FewSize::of(FewSize::BYTES_MAX).number + 1;

    /// The largest that is not above `bytes`, in bytes; 0 if there is none.
    pub(crate) fn bytes_up_to(bytes: u64) -> u64 {
        let quanta = (1..=bytes / BLOCK_BYTES_MIN).rev();
        let mut sizes = quanta.map(|quanta| FewSize::of(quanta * BLOCK_BYTES_MIN).bytes);
        sizes.find(|size| *size <= bytes).unwrap_or(0)
    }

    /// The least that is not below `rounded`, a multiple of [`BLOCK_BYTES_MIN`].
    #[inline]
    pub(crate) const fn of(rounded: u64) -> Self {
        let last = rounded / BLOCK_BYTES_MIN - 1;
        let step = (last | 1 << FewSize::STEPS).ilog2() - FewSize::STEPS;
        let count = (last >> step) + 1;
        let number = (step << FewSize::STEPS) as u64 + count;
        FewSize { bytes: (count << step) * BLOCK_BYTES_MIN, number: number as usize }
    }
}

/// `bytes` rounded up to one of the `divisions` equal steps of its power-of-two interval.
fn round_to_division(bytes: u64, divisions: u64) -> u64 {
    if bytes.is_power_of_two() {
        return bytes;
    }
    let floor = 1u64 << bytes.ilog2();
    match floor >> divisions.ilog2() {
        0 => floor << 1,
        step => bytes.next_multiple_of(step),
    }
}

/// What a miss of `rounded` bytes takes from the driver, in bytes (spec §2.3).
pub const fn segment_bytes(rounded: u64, large_segment: u64) -> u64 {
    if rounded <= SMALL_BYTES_MAX {
        SMALL_SEGMENT_BYTES
    } else if rounded < OWN_SEGMENT_BYTES_MIN {
        large_segment
    } else {
        match align_up(rounded, LARGE_SEGMENT_ROUNDING) {
            Some(bytes) => bytes,
            None => panic!("rounded sizes stay far below 2^64"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn plain_rounding_is_tight_for_every_small_size() {
        for bytes in 1..=20_000 {
            let rounded = round_request(bytes, &RoundupDivisions::NONE);
            assert!(rounded >= bytes && rounded - bytes < 512 && rounded.is_multiple_of(512));
        }
    }

    #[test]
    fn few_sizes_are_numbered_and_an_eighth_apart_at_most() {
        let mut sizes = vec![0];
        for rounded in (512..=FewSize::BYTES_MAX).step_by(512) {
            let few = FewSize::of(rounded);
            assert!(few.bytes >= rounded && few.bytes.is_multiple_of(512));
            assert!((few.bytes - rounded) * 8 < rounded, "{rounded} becomes {few:?}");
            assert_eq!(FewSize::of(few.bytes), few);
            if sizes.last() != Some(&few.bytes) {
                sizes.push(few.bytes);
            }
            assert_eq!(few.number, sizes.len() - 1);
        }
        assert_eq!(sizes.len(), FewSize::COUNT);
        assert_eq!(sizes[..17], std::array::from_fn::<u64, 17, _>(|n| 512 * n as u64));
        assert!(sizes.contains(&OURS_SMALL_BYTES_MAX));
        let up_to = [0, 511, 512, 8192, 9215, 9216, FewSize::BYTES_MAX].map(FewSize::bytes_up_to);
        assert_eq!(up_to, [0, 0, 512, 8192, 8192, 9216, FewSize::BYTES_MAX]);
    }

    #[test]
    fn divisions_round_as_the_reference_table() {
        let four = RoundupDivisions::uniform(4);
        let two = RoundupDivisions::uniform(2);
        assert_eq!(round_request(1200, &four), 1536);
        assert_eq!(round_request(5000, &four), 5120);
        assert_eq!(round_request(4200, &two), 6144);
        assert_eq!(round_request(4200, &RoundupDivisions::NONE), 4608);
        assert_eq!(round_request(84 * MIB, &four), 96 * MIB);
        assert_eq!(round_request(64 * MIB, &four), 64 * MIB);
    }

    #[test]
    fn one_division_is_a_power_of_two_where_it_is_honoured() {
        let one = RoundupDivisions::uniform(1);
        assert_eq!(round_request(514 * MIB, &one), 514 * MIB);
        assert_eq!(round_request(514 * MIB, &one.honouring_one(true)), 1024 * MIB);
    }

    #[test]
    fn division_rounding_is_monotone_and_within_its_promise() {
        for divisions in [2, 4, 8, 16] {
            let table = RoundupDivisions::uniform(divisions);
            let mut last = 0;
            for bytes in (1..64 * MIB).step_by(4_093) {
                let rounded = round_request(bytes, &table);
                assert!(rounded >= bytes && rounded >= last && rounded.is_multiple_of(512));
                if bytes > 512 * divisions {
                    assert!(rounded - bytes <= (1 << bytes.ilog2()) / divisions);
                }
                last = rounded;
            }
        }
    }

    #[test]
    fn list_form_fills_as_recorded() {
        use ListKey::{Mib, Rest};
        let list = [(Mib(256), 1), (Mib(512), 2), (Mib(1024), 4), (Rest, 8)];
        let table = RoundupDivisions::from_list(&list);
        assert_eq!(table.table(), &[1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8]);
        let rest_first = RoundupDivisions::from_list(&[(Rest, 2)]);
        assert_eq!(rest_first.table()[..2], [0, 2]);
        let gap = RoundupDivisions::from_list(&[(Mib(4), 2), (Mib(64), 8), (Rest, 4)]);
        assert_eq!(gap.table()[..8], [2, 2, 2, 0, 0, 0, 8, 4]);
        assert_eq!(round_request(84 * MIB, &gap), 88 * MIB);
    }

    #[test]
    fn segment_sizes_at_every_edge() {
        let seg = |rounded| segment_bytes(rounded, LARGE_SEGMENT_BYTES);
        assert_eq!(seg(MIB), 2 * MIB);
        assert_eq!(seg(MIB + 512), 20 * MIB);
        assert_eq!(seg(10 * MIB - 512), 20 * MIB);
        assert_eq!(seg(10 * MIB), 10 * MIB);
        assert_eq!(seg(10 * MIB + 512), 12 * MIB);
        assert_eq!(segment_bytes(9 * MIB, 64 * MIB), 64 * MIB);
        assert_eq!(segment_bytes(12 * MIB + 512, 64 * MIB), 14 * MIB);
    }

    #[test]
    fn the_largest_request_does_not_wrap() {
        for divisions in [0, 1, 2, 16, 1 << 40] {
            let rounded =
                round_request(REQUEST_BYTES_MAX - 1, &RoundupDivisions::uniform(divisions));
            assert!(rounded >= REQUEST_BYTES_MAX - 1);
            assert!(segment_bytes(rounded, LARGE_SEGMENT_BYTES) >= rounded);
        }
    }
}
