//! Tests of the simulator from outside.
#![expect(clippy::unwrap_used, reason = "helpers of tests may unwrap like the tests themselves")]

mod conformance;
mod driver;
mod golden;
mod graphs;
mod pools;
mod rules;
mod sharing;
mod trial;
