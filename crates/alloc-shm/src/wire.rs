//! The bytes of a message: one fixed header, checked before anything in it is believed.
//!
//! ```text
//! offset  bytes  field (little endian)
//!      0      4  magic "GSHM"
//!      4      2  version
//!      6      1  kind
//!      7      1  descriptors that come along: 0 or 1
//!      8      8  check value over the rest, keyed with the sender's session
//!     16      8  number of the message, counted from 0 in each direction
//!     24      8  tag: the user's
//!     32      8  object: the arena's id, or 0
//!     40      8  offset in bytes
//!     48      8  length in bytes
//!     56      8  generation
//!     64      8  total length of the object in bytes
//!     72      …  payload: a name, a note, numbers given back
//! ```
//!
//! The check value tells a stray, altered or replayed message from one of this session. It is no
//! defence against a peer that means harm: what the descriptors really are is checked for that.

use crate::error::Refusal;

/// Bytes of the header.
pub(crate) const HEADER_LEN: usize = 72;
/// The longest payload in bytes.
pub(crate) const PAYLOAD_MAX: usize = 1024;
/// The longest message in bytes.
pub(crate) const MESSAGE_MAX: usize = HEADER_LEN + PAYLOAD_MAX;

const MAGIC: [u8; 4] = *b"GSHM";
const VERSION: u16 = 1;
const CHECK: std::ops::Range<usize> = 8..16;

/// What a message is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Kind {
    /// First message of each side; its object is the session that keys the others.
    Hello = 1,
    /// A descriptor of a range that both sides may write.
    Descriptor = 2,
    /// A descriptor of a range that nobody can write.
    Frozen = 3,
    /// The name of a reference-counted map.
    Named = 4,
    /// An arena's descriptor: once for each peer.
    Arena = 5,
    /// A block of an arena.
    Block = 6,
    /// An arena will not be used any more.
    Retire = 7,
    /// Numbers of messages whose block or name is given back.
    Release = 8,
    /// Bytes of the user's.
    Note = 9,
    /// An arena whose descriptor got lost on the way: to be sent again before its next block.
    Missing = 10,
    /// A request to a broker.
    Request = 11,
    /// A broker's answer.
    Reply = 12,
    /// Bytes of the user's that go with a descriptor of any kind, or none.
    Token = 13,
    /// The same, on loan: kept for until it is given back.
    Loan = 14,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        use Kind::*;
        const ALL: [Kind; 14] = [
            Hello, Descriptor, Frozen, Named, Arena, Block, Retire, Release, Note, Missing,
            Request, Reply, Token, Loan,
        ];
        ALL.into_iter().find(|&kind| kind as u8 == byte)
    }

    /// How many descriptors a message of this kind carries; `None` if that depends.
    fn descriptors(self) -> Option<u8> {
        match self {
            Kind::Descriptor | Kind::Frozen | Kind::Arena => Some(1),
            Kind::Request | Kind::Reply | Kind::Token | Kind::Loan => None,
            _ => Some(0),
        }
    }
}

/// One message without its descriptor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Message {
    pub(crate) kind: Kind,
    pub(crate) descriptors: u8,
    pub(crate) number: u64,
    pub(crate) tag: u64,
    pub(crate) object: u64,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) generation: u64,
    pub(crate) total: u64,
    pub(crate) payload: Vec<u8>,
}

impl Message {
    pub(crate) fn new(kind: Kind) -> Self {
        Message {
            kind,
            descriptors: 0,
            number: 0,
            tag: 0,
            object: 0,
            offset: 0,
            len: 0,
            generation: 0,
            total: 0,
            payload: Vec::new(),
        }
    }

    /// The bytes to send in this session. The payload is at most [`PAYLOAD_MAX`] long.
    pub(crate) fn encode(&self, session: u64) -> Vec<u8> {
        debug_assert!(self.payload.len() <= PAYLOAD_MAX);
        let mut bytes = Vec::with_capacity(HEADER_LEN + self.payload.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&[self.kind as u8, self.descriptors]);
        bytes.extend_from_slice(&[0; 8]);
        let Message { number, tag, object, offset, len, generation, total, .. } = *self;
        for field in [number, tag, object, offset, len, generation, total] {
            bytes.extend_from_slice(&field.to_le_bytes());
        }
        bytes.extend_from_slice(&self.payload);
        let check = check_value(&bytes, session);
        bytes[CHECK].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// Reads a message of this session; for the first message of a side the session is `None`.
    ///
    /// `descriptors` is how many arrived with it.
    pub(crate) fn decode(
        bytes: &[u8],
        session: Option<u64>,
        descriptors: usize,
    ) -> Result<Self, Refusal> {
        let (got, needed) = (bytes.len(), HEADER_LEN);
        if got < needed {
            return Err(Refusal::Truncated { got, needed });
        }
        if got > MESSAGE_MAX {
            return Err(Refusal::TooLong { got, needed: MESSAGE_MAX });
        }
        if bytes[..4] != MAGIC {
            return Err(Refusal::Foreign);
        }
        let version = u16::from_le_bytes([bytes[4], bytes[5]]);
        if version != VERSION {
            return Err(Refusal::Version(version));
        }
        let field = |i: usize| word(&bytes[16 + i * 8..]);
        if word(&bytes[CHECK]) != check_value(bytes, session.unwrap_or_else(|| field(2))) {
            return Err(Refusal::Check);
        }
        let kind = Kind::of(bytes[6]).ok_or(Refusal::Kind(bytes[6]))?;
        let expected = usize::from(kind.descriptors().unwrap_or(bytes[7]));
        if bytes[7] > 1 || usize::from(bytes[7]) != descriptors || descriptors != expected {
            return Err(Refusal::Descriptors { got: descriptors, expected });
        }
        Ok(Message {
            kind,
            descriptors: bytes[7],
            number: field(0),
            tag: field(1),
            object: field(2),
            offset: field(3),
            len: field(4),
            generation: field(5),
            total: field(6),
            payload: bytes[HEADER_LEN..].to_vec(),
        })
    }
}

/// The first eight bytes as a number; the caller has checked that they are there.
fn word(bytes: &[u8]) -> u64 {
    let mut eight = [0; 8];
    eight.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(eight)
}

/// FNV-1a over eight bytes at a time, with a final mix: every single changed byte changes it.
fn check_value(bytes: &[u8], session: u64) -> u64 {
    let mut hash = session ^ 0xcbf2_9ce4_8422_2325 ^ bytes.len() as u64;
    let mut step = |word: u64| {
        hash = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^= hash >> 29;
    };
    step(word(bytes));
    let chunks = bytes[CHECK.end..].chunks_exact(8);
    let mut tail = [0; 8];
    tail[..chunks.remainder().len()].copy_from_slice(chunks.remainder());
    chunks.for_each(|chunk| step(word(chunk)));
    step(u64::from_le_bytes(tail));
    hash
}

/// Numbers as the payload of a [`Kind::Release`].
pub(crate) fn encode_numbers(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// How many numbers one payload holds.
pub(crate) const NUMBERS_MAX: usize = PAYLOAD_MAX / 8;

/// Reads what [`encode_numbers`] wrote.
pub(crate) fn decode_numbers(payload: &[u8]) -> Result<Vec<u64>, Refusal> {
    let chunks = payload.chunks_exact(8);
    if !chunks.remainder().is_empty() || payload.is_empty() {
        return Err(Refusal::Field("a list of numbers of the wrong length"));
    }
    Ok(chunks.map(word).collect())
}

/// A number that no other call on this machine is likely ever to return; never 0.
pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // Each `RandomState` is keyed by the operating system's randomness.
    std::collections::hash_map::RandomState::new().build_hasher().finish().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn messages() -> impl Strategy<Value = Message> {
        let kinds = (1u8..=12).prop_map(|byte| Kind::of(byte).unwrap());
        let numbers = any::<[u64; 7]>();
        let payload = proptest::collection::vec(any::<u8>(), 0..PAYLOAD_MAX);
        (kinds, 0u8..=1, numbers, payload).prop_map(|(kind, descriptors, n, payload)| Message {
            kind,
            descriptors: kind.descriptors().unwrap_or(descriptors),
            number: n[0],
            tag: n[1],
            object: n[2],
            offset: n[3],
            len: n[4],
            generation: n[5],
            total: n[6],
            payload,
        })
    }

    proptest! {
        #[test]
        fn messages_round_trip(message in messages(), session: u64) {
            let bytes = message.encode(session);
            let back = Message::decode(&bytes, Some(session), message.descriptors.into());
            prop_assert_eq!(back, Ok(message));
        }

        #[test]
        fn a_changed_byte_is_refused(
            message in messages(), session: u64, at: prop::sample::Index, flip in 1u8..
        ) {
            let mut bytes = message.encode(session);
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            let refused = Message::decode(&bytes, Some(session), message.descriptors.into());
            prop_assert!(refused.is_err(), "byte {}: {:?}", at, refused);
        }

        #[test]
        fn a_cut_or_lengthened_message_is_refused(message in messages(), session: u64, cut: prop::sample::Index) {
            let bytes = message.encode(session);
            let count = message.descriptors.into();
            let cut = cut.index(bytes.len());
            prop_assert!(Message::decode(&bytes[..cut], Some(session), count).is_err());
            let longer = [&bytes[..], &[0]].concat();
            prop_assert!(Message::decode(&longer, Some(session), count).is_err());
        }

        #[test]
        fn another_session_or_descriptor_count_is_refused(message in messages(), session: u64, other: u64) {
            prop_assume!(session != other);
            let bytes = message.encode(session);
            let count = usize::from(message.descriptors);
            prop_assert_eq!(Message::decode(&bytes, Some(other), count), Err(Refusal::Check));
            let refused = Message::decode(&bytes, Some(session), count + 1);
            let expected = Refusal::Descriptors { got: count + 1, expected: count };
            prop_assert_eq!(refused, Err(expected));
        }

        #[test]
        fn noise_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(Message::decode(&bytes, Some(7), 0).is_err());
        }

        #[test]
        fn numbers_round_trip(numbers in proptest::collection::vec(any::<u64>(), 1..NUMBERS_MAX)) {
            prop_assert_eq!(decode_numbers(&encode_numbers(&numbers)), Ok(numbers));
        }
    }

    #[test]
    fn other_versions_and_strangers_are_told_apart() {
        let mut bytes = Message::new(Kind::Note).encode(1);
        bytes[4] = 9;
        assert_eq!(Message::decode(&bytes, Some(1), 0), Err(Refusal::Version(9)));
        bytes[0] = b'X';
        assert_eq!(Message::decode(&bytes, Some(1), 0), Err(Refusal::Foreign));
        assert!(decode_numbers(&[1, 2, 3]).is_err());
        assert!(decode_numbers(&[]).is_err());
    }
}
