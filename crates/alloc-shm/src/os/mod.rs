//! The operating system, cut thin: files and memfds, mapped regions, sockets.
//!
//! Everything here answers with the bare `Errno`; callers add what and where. Unsafe code is in
//! `region` (mapping and the bytes behind it) and `socket` (received descriptors), nowhere else in
//! this module.

pub(crate) mod file;
pub(crate) mod region;
pub(crate) mod socket;
