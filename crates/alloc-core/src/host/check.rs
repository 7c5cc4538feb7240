//! Violated invariants of the host allocator.
//!
//! | number | what must hold |
//! |---|---|
//! | H1 | the blocks of a span tile it exactly; a span is idle iff it is one free block |
//! | H2 | no two spans or segments overlap |
//! | H3 | no two neighbouring free blocks are unmerged, except the few kept apart |
//! | H4 | a block is in its container's index iff it is free, and found by address iff it is not |
//! | H5 | a draining block waits for as many conditions as refer to it: queued events, open batches, graphs |
//! | H6 | every kept total equals the sum over the blocks |
//! | H7 | the runs that a central heap has lent are the spans of its shards |
//! | H8 | the pinned segments are the spans of the central heaps, or the blocks of the buckets |
//! | H9 | only a live block has uses |
//! | H10 | a class holds only blocks of its sizes |

use std::fmt;

/// The first violated invariant that a check met.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostViolation {
    /// Its number in the table of the module's documentation.
    pub invariant: &'static str,
    /// What exactly is wrong.
    pub what: String,
}

pub(crate) type Violation = HostViolation;

impl fmt::Display for HostViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.invariant, self.what)
    }
}

impl std::error::Error for HostViolation {}

pub(crate) fn ensure(
    holds: bool,
    invariant: &'static str,
    what: impl FnOnce() -> String,
) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(HostViolation { invariant, what: what() }) }
}
