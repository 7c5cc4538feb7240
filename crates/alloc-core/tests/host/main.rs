//! The host allocator on the simulator: rules, cases, model, faults, memory.
#![cfg(not(loom))]

mod background;
mod batches;
mod cases;
mod faults;
mod memory;
mod model;
mod naive;
mod ours;
mod pools;
mod rules;
mod rules_state;
mod rules_stats;
mod support;
