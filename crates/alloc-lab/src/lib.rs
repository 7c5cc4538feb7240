#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod bench;
pub mod cli;
pub mod configuration;
pub mod draw;
pub mod engine;
pub mod error;
pub mod fit;
pub mod format;
pub mod machine;
pub mod pages;
pub mod progress;
pub mod replay;
pub mod report;
pub mod units;
pub mod vary;
pub mod verify;
pub mod workload;
