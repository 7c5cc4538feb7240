//! CPU memory from outside.

#![cfg(test)]

mod collections;
mod memory;
mod profile;
