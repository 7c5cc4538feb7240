//! Drawings: memory over time, and maps of segments.

pub mod segments;
mod svg;
pub mod timeline;
