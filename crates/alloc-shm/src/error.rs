//! What can go wrong, with what was wanted, where, and what helps.

use nix::errno::Errno;

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed operation.
///
/// Whatever failed has given back its descriptor, its mapping and the name it had created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("cannot {op} {object}: {source}")]
    Os {
        /// What was being done.
        op: &'static str,
        /// To what.
        object: String,
        /// What the kernel answered.
        source: Errno,
    },

    /// The file system cannot back the bytes asked for. Nothing has been created.
    ///
    /// Free space there, enlarge the mount (containers: `--shm-size`), or use a memfd.
    #[error(
        "no space for {object}: {wanted} bytes wanted, {free} bytes left on {mount}; free or \
         enlarge it, or use a memfd"
    )]
    NoSpace {
        /// The file that should have held them.
        object: String,
        /// Bytes that were to be reserved.
        wanted: u64,
        /// Bytes that were left on the mount when the reservation failed.
        free: u64,
        /// The mount point.
        mount: String,
    },

    /// The process or the system has no descriptor left. Share many buffers through one arena.
    #[error(
        "no descriptor left to {op} {object} (limit {limit}): raise `ulimit -n`, or put many \
         buffers into one arena"
    )]
    NoDescriptor {
        /// What was being done.
        op: &'static str,
        /// To what.
        object: String,
        /// The process's soft limit.
        limit: u64,
    },

    /// The kernel refused the mapping.
    #[error("cannot map {bytes} bytes of {object}: {source}")]
    Mapping {
        /// What was to be mapped.
        object: String,
        /// How much of it.
        bytes: u64,
        /// What the kernel answered; `ENOMEM` is often the limit `vm.max_map_count`.
        source: Errno,
    },

    /// The name is taken.
    #[error("{object} exists already: attach to it, or choose another name")]
    Exists {
        /// The name.
        object: String,
    },

    /// There is nothing of that name.
    #[error("{object} does not exist: it was never created, or its last holder has left")]
    NotFound {
        /// The name.
        object: String,
    },

    /// The object ends before the range asked for, and this kind of map does not make it longer.
    #[error(
        "{object} is {actual} bytes long but {needed} are needed, and it may not be resized here"
    )]
    TooShort {
        /// What was to be mapped.
        object: String,
        /// Its length in bytes.
        actual: u64,
        /// The length that the range needs.
        needed: u64,
    },

    /// A range outside of a map, an arena or the address space.
    #[error("range of {len} bytes at {offset} does not fit into {size} bytes")]
    Range {
        /// Where the range begins, in bytes.
        offset: u64,
        /// How long it is, in bytes.
        len: u64,
        /// The bytes there are.
        size: u64,
    },

    /// A name, label, prefix or socket path that cannot be used.
    #[error("bad name {name:?}: {why}")]
    Name {
        /// The name.
        name: String,
        /// The rule it breaks.
        why: &'static str,
    },

    /// A combination of [`Flags`](crate::Flags) without a meaning.
    #[error("flags {flags:?}: {why}")]
    Flags {
        /// The flags.
        flags: crate::Flags,
        /// The rule they break.
        why: &'static str,
    },

    /// The object is not a reference-counted map of this version.
    #[error("{object} is no reference-counted map of this version: {why}")]
    Header {
        /// The object.
        object: String,
        /// What does not match.
        why: &'static str,
    },

    /// The reference-counted map's holders have all left; its name is about to go.
    #[error("{object} is gone: its last holder left it")]
    Gone {
        /// The object.
        object: String,
    },

    /// A reference-counted map has no room for another process.
    #[error("{object} is held by {max} processes, the most it can record")]
    Holders {
        /// The object.
        object: String,
        /// The size of its table.
        max: usize,
    },

    /// The object belongs to another pid namespace, where process ids mean other processes.
    ///
    /// Pass a descriptor instead, which needs no process ids.
    #[error("{object} belongs to another pid namespace: pass its descriptor instead")]
    Namespace {
        /// The object.
        object: String,
    },

    /// The arena has no free range large enough.
    #[error(
        "arena full: {wanted} bytes wanted, the largest free range holds {largest}; {live} bytes \
         in {blocks} blocks are in use"
    )]
    ArenaFull {
        /// Payload bytes asked for.
        wanted: u64,
        /// The largest payload that would fit.
        largest: u64,
        /// Payload bytes in use.
        live: u64,
        /// Blocks in use.
        blocks: u64,
    },

    /// A limit set by the user of this crate would be passed.
    #[error("limit on {what} reached: {limit}")]
    Limit {
        /// What is limited.
        what: &'static str,
        /// The limit.
        limit: u64,
    },

    /// The peer sent something that this protocol does not accept.
    #[error("message refused: {0}")]
    Refused(#[from] Refusal),

    /// The peer has closed its end, or died.
    #[error("the peer is gone")]
    PeerGone,

    /// Nothing arrived in time.
    #[error("nothing arrived within {millis} ms")]
    Timeout {
        /// How long was waited.
        millis: u64,
    },

    /// The broker answered with a refusal.
    #[error("broker refused {name:?}: {reason}")]
    Broker {
        /// The thing asked for.
        name: String,
        /// Why it was refused.
        reason: crate::broker::Reason,
    },
}

/// Why a message was refused. Its descriptors have been closed and nothing else has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Shorter than it says, or than any message is.
    #[error("truncated: {got} bytes where {needed} are needed")]
    Truncated {
        /// Bytes that arrived.
        got: usize,
        /// Bytes that belong to the message.
        needed: usize,
    },
    /// Longer than it says, or than any message may be.
    #[error("too long: {got} bytes where {needed} are expected")]
    TooLong {
        /// Bytes that arrived.
        got: usize,
        /// Bytes that belong to the message.
        needed: usize,
    },
    /// Not a message of this protocol.
    #[error("not a message of this protocol")]
    Foreign,
    /// A message of another version of this protocol.
    #[error("protocol version {0} is not spoken here")]
    Version(u16),
    /// The check value does not match: altered, or made for another session.
    #[error("altered, or made for another session")]
    Check,
    /// Out of order: repeated, dropped, or sent by someone else.
    #[error("out of order: number {got} where {expected} was due")]
    Sequence {
        /// The number it carries.
        got: u64,
        /// The number that was due.
        expected: u64,
    },
    /// An unknown kind of message, or one that has no place here.
    #[error("kind {0} has no place here")]
    Kind(u8),
    /// A message with more or fewer descriptors than its kind carries.
    #[error("{got} descriptors where {expected} belong")]
    Descriptors {
        /// Descriptors that arrived.
        got: usize,
        /// Descriptors that belong to the message.
        expected: usize,
    },
    /// A field that contradicts the others or the descriptor.
    #[error("{0}")]
    Field(&'static str),
    /// The descriptor lacks a seal that its kind promises.
    #[error("descriptor is not sealed as promised")]
    Unsealed,
    /// The object behind the descriptor is shorter than the message says, or not backed by blocks.
    #[error("object has {actual} backed bytes, the message claims {claimed}")]
    Unbacked {
        /// The bytes that are there.
        actual: u64,
        /// The bytes claimed.
        claimed: u64,
    },
    /// A block of an arena that was never announced.
    #[error("unknown arena {0:#x}")]
    UnknownArena(u64),
    /// The block has been freed, or never was.
    #[error("stale block: generation {got} where the arena has {found}")]
    Stale {
        /// The generation in the message.
        got: u64,
        /// The generation in the arena.
        found: u64,
    },
    /// Something given back that was not lent.
    #[error("release of something that was not lent: number {0}")]
    NotLent(u64),
    /// The peer runs as another user.
    #[error("peer runs as user {got}, not {expected}")]
    Credentials {
        /// The peer's user id.
        got: u32,
        /// The user id that is served.
        expected: u32,
    },
}

impl Error {
    pub(crate) fn os(op: &'static str, object: &(impl ToString + ?Sized), source: Errno) -> Self {
        let object = object.to_string();
        match source {
            Errno::EMFILE | Errno::ENFILE => {
                Error::NoDescriptor { op, object, limit: crate::os::file::descriptor_limit() }
            }
            Errno::EEXIST => Error::Exists { object },
            Errno::ENOENT => Error::NotFound { object },
            _ => Error::Os { op, object, source },
        }
    }
}
