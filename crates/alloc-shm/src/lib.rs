#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("alloc-shm needs Linux: memfd, seals, O_TMPFILE and /proc");

const _: () = assert!(usize::BITS == 64, "lengths are u64 and must fit into a usize");

mod address;
mod arena;
pub mod broker;
mod channel;
mod error;
mod map;
mod memfd;
mod name;
mod os;
mod process;
mod refcount;
mod space;
pub mod steps;
mod sweep;
#[cfg(test)]
#[path = "../tests/it/traces.rs"]
mod traces;
mod wire;

pub use address::SocketAddress;
pub use arena::{
    Arena, ArenaAllocator, ArenaPool, ArenaStats, Block, BlockAddr, PoolConfig, SharedBlock,
};
pub use channel::{Borrowed, Channel, Incoming, Item, Listener, Received, ReceivedBlock};
pub use error::{Error, Refusal, Result};
pub use map::{
    Access, CopyOnWrite, Create, Descriptor, File, FlagMap, FlagTarget, Flags, HasName, Map,
    MapOptions, MayExist, Memfd, Named, ReadOnly, ReadWrite, Unique, Writable,
};
pub use memfd::{Draft, Frozen};
pub use name::{Maker, Name, NameKind, ShmDir};
pub use process::ProcessId;
pub use refcount::SharedMap;
pub use sweep::{Swept, sweep};
