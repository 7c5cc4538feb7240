//! A map from disjoint ranges of integers to values.

use std::collections::BTreeMap;

/// Disjoint half-open ranges, each with a value. Setting a range overwrites what it covers.
#[derive(Clone, Debug)]
pub(crate) struct RangeMap<V> {
    /// start → (end, value)
    ranges: BTreeMap<u64, (u64, V)>,
}

impl<V> Default for RangeMap<V> {
    fn default() -> Self {
        RangeMap { ranges: BTreeMap::new() }
    }
}

impl<V: Copy> RangeMap<V> {
    /// Gives `start..end` the value `value`.
    pub(crate) fn set(&mut self, start: u64, end: u64, value: V) {
        if start < end {
            self.remove(start, end);
            self.ranges.insert(start, (end, value));
        }
    }

    /// Forgets `start..end`; ranges that stick out of it keep their outer parts.
    pub(crate) fn remove(&mut self, start: u64, end: u64) {
        let covered: Vec<u64> = self.overlapping(start, end).map(|(from, _, _)| from).collect();
        for from in covered {
            if let Some((to, value)) = self.ranges.remove(&from) {
                if from < start {
                    self.ranges.insert(from, (start, value));
                }
                if to > end {
                    self.ranges.insert(end, (to, value));
                }
            }
        }
    }

    /// The ranges that share at least one integer with `start..end`, as (start, end, value), in
    /// ascending order.
    pub(crate) fn overlapping(
        &self,
        start: u64,
        end: u64,
    ) -> impl Iterator<Item = (u64, u64, V)> + '_ {
        let before = self
            .ranges
            .range(..start)
            .next_back()
            .filter(move |(_, (to, _))| *to > start)
            .map(|(from, (to, value))| (*from, *to, *value));
        let inside = self.ranges.range(start..end.max(start)).map(|(f, (t, v))| (*f, *t, *v));
        before.into_iter().chain(inside)
    }

    /// Keeps the ranges whose value satisfies `keep`.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(V) -> bool) {
        self.ranges.retain(|_, (_, value)| keep(*value));
    }

    /// How many ranges there are.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.ranges.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::RangeMap;
    use crate::Rng;

    /// Against one slot per integer, after every operation.
    #[test]
    fn behaves_like_an_array_of_slots() {
        let mut rng = Rng::new(1);
        let mut map = RangeMap::default();
        let mut slots = [None; 64];
        for step in 0..4000u64 {
            let start = rng.below(64);
            let end = rng.between(start, 63);
            let set = rng.chance(0.6);
            match set {
                true => map.set(start, end, step),
                false => map.remove(start, end),
            }
            slots[start as usize..end as usize].fill(set.then_some(step));
            for (at, slot) in slots.iter().enumerate() {
                let found = map.overlapping(at as u64, at as u64 + 1).next().map(|(_, _, v)| v);
                assert_eq!(found, *slot, "integer {at} after step {step}");
            }
        }
    }
}
