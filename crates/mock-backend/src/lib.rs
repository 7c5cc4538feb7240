//! A deterministic simulated GPU that judges caching allocators.
#![forbid(unsafe_code)]
