//! Blocks over sockets: between simulated processes, under their judges, and between real ones that
//! are killed.
#![expect(clippy::unwrap_used, reason = "in a test a panic is the report, helpers included")]

mod child;
mod crash;
mod faults;
mod pair;
mod sending;
