//! The host allocator on the simulator: rules, cases, model, faults, memory.
#![cfg(not(loom))]

mod cases;
mod ours;
mod pools;
mod rules;
mod support;
