//! The face of allocators, from outside.

#![cfg(test)]

mod adapters;
mod allocators;
mod data_ptr;
mod registry;
mod report;
