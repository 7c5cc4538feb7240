//! The host allocator on the simulator: rules, cases, model, faults, memory.
#![cfg(not(loom))]

mod rules;
mod support;
