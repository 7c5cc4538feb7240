//! Developer tasks: `cargo xtask help`.
#![forbid(unsafe_code)]
fn main() {}
