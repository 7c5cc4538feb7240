//! The command-line laboratory.
#![forbid(unsafe_code)]
fn main() {}
