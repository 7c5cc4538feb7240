//! Many blocks in order.

use crate::block::BlockIdx;
use std::fmt::Debug;

/// Longer runs are split, so that insertion moves little.
const RUN_MAX: usize = 64;

/// Blocks by keys that differ, for where there are many: in runs of at most [`RUN_MAX`], which ascend.
/// Within a run blocks descend: the least of all is the last of the first run, where it is cheap to
/// take. Only a run that is the only one may be empty.
///
/// What is long here is kept out of its callers, which mostly do without it.
#[derive(Debug)]
pub(super) struct Runs<K>(Vec<Run<K>>);

type Run<K> = Vec<(K, BlockIdx)>;

impl<K> Default for Runs<K> {
    fn default() -> Self {
        Runs(Vec::new())
    }
}

impl<K: Copy + Ord + Debug> Runs<K> {
    /// The least.
    pub(super) fn first(&self) -> Option<(K, BlockIdx)> {
        self.0.first()?.last().copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first().is_none()
    }

    /// The run that holds `key` or would: the first whose largest key is not below it, or the last.
    fn run_of(&self, key: K) -> usize {
        let below = self.0.partition_point(|run| run.first().is_some_and(|first| first.0 < key));
        below.min(self.0.len().saturating_sub(1))
    }

    #[inline(never)]
    pub(super) fn insert(&mut self, key: K, block: BlockIdx) {
        if self.0.is_empty() {
            self.0.push(Run::new());
        }
        let index = self.run_of(key);
        let run = &mut self.0[index];
        let at = run.partition_point(|entry| entry.0 > key);
        debug_assert!(run.get(at).is_none_or(|next| next.0 != key), "I2: one address twice");
        run.insert(at, (key, block));
        if run.len() > RUN_MAX {
            // The upper half, which comes first, becomes a run of its own above.
            let lower = run.split_off(RUN_MAX / 2);
            let upper = std::mem::replace(run, lower);
            self.0.insert(index + 1, upper);
        }
    }

    /// # Panics
    /// If there is no such key.
    #[inline(never)]
    pub(super) fn remove(&mut self, key: K) {
        let index = self.run_of(key);
        let found = self.0.get(index).map(|run| (run, run.partition_point(|entry| entry.0 > key)));
        let at = found.filter(|(run, at)| run.get(*at).is_some_and(|entry| entry.0 == key));
        let (_, at) = at.unwrap_or_else(|| panic!("I4: {key:?} is not in the index"));
        self.take(index, at);
    }

    pub(super) fn pop_first(&mut self) -> Option<(K, BlockIdx)> {
        let last = self.0.first()?.len().checked_sub(1)?;
        Some(self.take(0, last))
    }

    fn take(&mut self, index: usize, at: usize) -> (K, BlockIdx) {
        let entry = self.0[index].remove(at);
        if self.0[index].is_empty() && self.0.len() > 1 {
            self.0.remove(index);
        }
        entry
    }

    /// The least that is not below `key`.
    #[inline(never)]
    pub(super) fn at_or_above(&self, key: K) -> Option<(K, BlockIdx)> {
        let run = self.0.get(self.run_of(key))?;
        let at = run.partition_point(|entry| entry.0 >= key).checked_sub(1)?;
        Some(run[at])
    }

    /// All, ascending.
    pub(super) fn iter(&self) -> impl Iterator<Item = (K, BlockIdx)> + '_ {
        self.0.iter().flat_map(|run| run.iter().rev().copied())
    }
}
