//! Injected failures: the n-th call, every n-th, or by chance.

use alloc_core::backend::ErrorKind;

use crate::{Call, Rng};

/// A rule by which calls fail. Calls are counted from 1, from the moment the rule is installed.
///
/// ```
/// use mock_backend::{Call, Fault};
/// // The third `map` fails; and any call fails with a probability of 1 %.
/// let plan = [Fault::nth(3).of(Call::Map), Fault::chance(7, 0.01)];
/// # let _ = plan;
/// ```
#[derive(Clone, Debug)]
pub struct Fault {
    call: Option<Call>,
    when: When,
    kind: Option<ErrorKind>,
    seen: u64,
}

#[derive(Clone, Debug)]
enum When {
    Nth(u64),
    Every(u64),
    From(u64),
    Chance(Rng, f64),
}

impl Fault {
    fn new(when: When) -> Self {
        Fault { call: None, when, kind: None, seen: 0 }
    }

    /// The `n`-th call fails, once.
    pub fn nth(n: u64) -> Self {
        Fault::new(When::Nth(n))
    }

    /// Every `n`-th call fails; `n` = 1 means all of them, 0 none.
    pub fn every(n: u64) -> Self {
        Fault::new(When::Every(n))
    }

    /// The `n`-th call and all after it fail.
    pub fn from(n: u64) -> Self {
        Fault::new(When::From(n))
    }

    /// Each call fails with probability `p`, decided by `seed`.
    pub fn chance(seed: u64, p: f64) -> Self {
        Fault::new(When::Chance(Rng::new(seed), p))
    }

    /// Counts and fails calls of this kind only.
    pub fn of(mut self, call: Call) -> Self {
        self.call = Some(call);
        self
    }

    /// The kind of error. Without it: out of memory from calls that take memory
    /// ([`Call::takes_memory`]), [`ErrorKind::Other`] from the rest.
    pub fn kind(mut self, kind: ErrorKind) -> Self {
        self.kind = Some(kind);
        self
    }

    /// Counts this call; the kind of error if it is to fail.
    fn strike(&mut self, call: Call) -> Option<ErrorKind> {
        if self.call.is_some_and(|only| only != call) {
            return None;
        }
        self.seen += 1;
        let fails = match &mut self.when {
            When::Nth(n) => self.seen == *n,
            When::Every(n) => *n > 0 && self.seen.is_multiple_of(*n),
            When::From(n) => self.seen >= *n,
            When::Chance(rng, p) => rng.chance(*p),
        };
        let natural = if call.takes_memory() { ErrorKind::OutOfMemory } else { ErrorKind::Other };
        fails.then(|| self.kind.unwrap_or(natural))
    }
}

/// The rules in force and the calls counted since they were installed.
#[derive(Debug, Default)]
pub(crate) struct FaultPlan {
    faults: Vec<Fault>,
    pub(crate) calls: u64,
    pub(crate) struck: u64,
}

impl FaultPlan {
    pub(crate) fn new(faults: impl IntoIterator<Item = Fault>) -> Self {
        FaultPlan { faults: faults.into_iter().collect(), calls: 0, struck: 0 }
    }

    /// Counts one call in every rule; the first rule that strikes decides the error.
    pub(crate) fn strike(&mut self, call: Call) -> Option<ErrorKind> {
        self.calls += 1;
        let strikes: Vec<_> = self.faults.iter_mut().filter_map(|f| f.strike(call)).collect();
        self.struck += u64::from(!strikes.is_empty());
        strikes.first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing(fault: Fault, calls: &[Call]) -> Vec<usize> {
        let mut plan = FaultPlan::new([fault]);
        (0..calls.len()).filter(|&i| plan.strike(calls[i]).is_some()).collect()
    }

    #[test]
    fn rules_strike_when_they_say() {
        let calls = [Call::Map, Call::Query, Call::Map, Call::Map, Call::Query, Call::Map];
        assert_eq!(failing(Fault::nth(2), &calls), [1]);
        assert_eq!(failing(Fault::nth(2).of(Call::Map), &calls), [2]);
        assert_eq!(failing(Fault::every(2).of(Call::Map), &calls), [2, 5]);
        assert_eq!(failing(Fault::every(0), &calls), []);
        assert_eq!(failing(Fault::from(5), &calls), [4, 5]);
        assert_eq!(failing(Fault::chance(1, 1.0), &calls).len(), 6);
        assert_eq!(failing(Fault::chance(1, 0.0), &calls).len(), 0);
    }

    #[test]
    fn kinds_follow_the_call_unless_chosen() {
        let strike = |fault: Fault, call| FaultPlan::new([fault]).strike(call);
        assert_eq!(strike(Fault::nth(1), Call::Create), Some(ErrorKind::OutOfMemory));
        assert_eq!(strike(Fault::nth(1), Call::Map), Some(ErrorKind::Other));
        let lost = Fault::nth(1).kind(ErrorKind::DeviceLost);
        assert_eq!(strike(lost, Call::Acquire), Some(ErrorKind::DeviceLost));
    }
}
