//! Tests with real processes: life cycles, crashes, limits, full file systems, brokers.
//!
//! A test never counts descriptors or mappings of its own process without naming the object, since
//! others run beside it; what must be exact is counted in a process of its own (see `child`).

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test, in helpers too")]

mod broker;
mod child;
mod crash;
mod full;
mod life_cycle;
mod limits;
mod mesh;
mod names;
mod traces;
