//! The random sizes and slots of the benchmarks, the same as those of `peers/peer.cpp`.

/// Knuth's generator of MMIX, of which the top 31 bits are used.
#[derive(Clone, Debug)]
pub(super) struct Lcg(pub(super) u64);

/// Logarithm of the smallest size that is drawn.
pub(super) const MIN_LOG: u32 = 9;

impl Lcg {
    #[inline]
    pub(super) fn next(&mut self) -> u32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// A number below `end`, which is not 0.
    #[inline]
    pub(super) fn below(&mut self, end: u32) -> u32 {
        self.next() % end
    }

    /// A size: its logarithm first, evenly from [`MIN_LOG`] to below `max_log`, which is larger; then
    /// evenly from that power of two to below the next.
    #[inline]
    pub(super) fn size(&mut self, max_log: u32) -> u64 {
        let log = MIN_LOG + self.below(max_log - MIN_LOG);
        (1 << log) + u64::from(self.below(1 << log))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected numbers were computed with the code of the peers' driver.
    #[test]
    fn the_numbers_are_those_of_the_peers() {
        let mut lcg = Lcg(7);
        let first: Vec<u32> = (0..4).map(|_| lcg.next()).collect();
        assert_eq!(first, [1_059_165_278, 2_052_263_231, 1_946_856_753, 585_718_673]);
        let mut lcg = Lcg(7);
        let sizes: Vec<u64> = (0..4).map(|_| lcg.size(22)).collect();
        assert_eq!(sizes, [3391, 613_265, 51_459, 47_124]);
    }
}
