//! Cutting the recorded history into operations.
//!
//! A recording has one history for the whole run. Which entries belong to which operation follows
//! from the operation and from one statistic, so that an engine can be compared as it goes.

use alloc_core::TraceAction;

use crate::format::golden::{Op, TraceRow};

/// What the recording says about the operation whose entries are cut off.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    /// The operation.
    pub(super) op: Op,
    /// Bytes asked for by the allocation that a `free` frees; 0 for any other operation.
    pub(super) freed_bytes: u64,
    /// Whether the freed block came back at once, so that `free_completed` follows.
    pub(super) completed: bool,
    /// Whether the segments were listed afterwards, which leaves a mark.
    pub(super) listed: bool,
}

/// The part of a history that is not yet attributed to an operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cutter<'a> {
    rest: &'a [TraceRow],
}

impl<'a> Cutter<'a> {
    /// Nothing is cut off yet.
    pub(super) fn new(trace: &'a [TraceRow]) -> Self {
        Cutter { rest: trace }
    }

    /// What no operation claimed.
    pub(super) fn rest(&self) -> &'a [TraceRow] {
        self.rest
    }

    /// Cuts off the entries of the next operation.
    pub(super) fn cut(&mut self, facts: Facts) -> &'a [TraceRow] {
        let own = match facts.op {
            Op::Alloc { bytes, .. } if bytes > 0 => self
                .rest
                .iter()
                .position(|row| matches!(row.action, TraceAction::Alloc | TraceAction::Oom))
                .map_or(self.rest.len(), |last| last + 1),
            Op::Free(_) if facts.freed_bytes > 0 => 1 + usize::from(facts.completed),
            Op::EmptyCache | Op::PoolDelete(_) => self
                .rest
                .iter()
                .take_while(|row| {
                    use TraceAction::{FreeCompleted, SegmentFree, SegmentUnmap};
                    matches!(row.action, FreeCompleted | SegmentFree | SegmentUnmap)
                })
                .count(),
            _ => 0,
        };
        let end = (own + usize::from(facts.listed)).min(self.rest.len());
        let (piece, rest) = self.rest.split_at(end);
        self.rest = rest;
        piece
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TraceAction::*;

    fn trace(actions: &[TraceAction]) -> Vec<TraceRow> {
        let row = |(i, &action)| TraceRow { action, addr: i as u64, bytes: 1, stream: 0 };
        actions.iter().enumerate().map(row).collect()
    }

    fn facts(op: Op) -> Facts {
        Facts { op, freed_bytes: 0, completed: false, listed: false }
    }

    fn alloc(bytes: u64) -> Facts {
        facts(Op::Alloc { id: 1, bytes, stream: 0, pool: None, inner: None })
    }

    fn free(freed_bytes: u64, completed: bool) -> Facts {
        Facts { freed_bytes, completed, ..facts(Op::Free(1)) }
    }

    #[test]
    fn every_operation_takes_its_entries() {
        let all = [
            SegmentAlloc,
            Alloc,
            FreeCompleted,
            SegmentFree,
            Oom,
            FreeRequested,
            FreeCompleted,
            FreeRequested,
            FreeCompleted,
            SegmentUnmap,
            SegmentFree,
            Snapshot,
            Alloc,
        ];
        let trace = trace(&all);
        let mut cutter = Cutter::new(&trace);
        let mut at = 0;
        for (facts, entries) in [
            (alloc(9), 2),
            (alloc(0), 0),
            (alloc(9), 3),
            (facts(Op::Sync), 0),
            (free(9, true), 2),
            (free(0, false), 0),
            (free(9, false), 1),
            (Facts { listed: true, ..facts(Op::EmptyCache) }, 4),
            (alloc(9), 1),
            (free(9, true), 0),
        ] {
            assert_eq!(cutter.cut(facts), &trace[at..at + entries], "{facts:?}");
            at += entries;
        }
        assert!(cutter.rest().is_empty());
    }

    #[test]
    fn a_missing_end_takes_what_is_there() {
        let trace = trace(&[SegmentAlloc, SegmentFree]);
        assert_eq!(Cutter::new(&trace).cut(alloc(9)).len(), 2);
    }
}
