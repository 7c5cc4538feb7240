//! Requests and replies, as messages of the [wire](crate::wire).
//!
//! | field | request | reply |
//! |--|--|--|
//! | number | counted by the client | that of its request |
//! | tag | operation | reason; 0 for yes |
//! | object | kind of thing, lifetime | kind of thing, lifetime |
//! | offset | bytes of the payload that are the name | the same |
//! | length | the thing's bytes | the thing's bytes |
//! | generation | of the thing held | of the thing |
//! | payload | name, opaque bytes | name, opaque bytes; or counters |

use crate::error::Refusal;
use crate::wire::{Kind, Message, PAYLOAD_MAX};
use std::fmt;

/// Every broker conversation has this session: the socket itself tells clients apart.
pub(crate) const SESSION: u64 = 0x6272_6f6b_6572;

/// The longest name of a thing in bytes.
pub(crate) const NAME_MAX: usize = 200;
/// The most opaque bytes of a thing.
pub(crate) const OPAQUE_MAX: usize = PAYLOAD_MAX - NAME_MAX;

/// What a thing is, and so what the broker checks before it takes it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ThingKind(pub u32);

impl ThingKind {
    /// A frozen memfd: sealed and backed.
    pub const FROZEN: ThingKind = ThingKind(1);
    /// A file, memfd or shared-memory descriptor that holders may write: long enough and backed.
    pub const SHARED: ThingKind = ThingKind(2);
    /// An arena: sealed so that only its maker writes it.
    pub const ARENA: ThingKind = ThingKind(3);
    /// Memory of another kind (of a device, say): opaque bytes, perhaps a descriptor, unchecked.
    /// Kinds from here up to `u32::MAX` are for users.
    pub const OPAQUE: ThingKind = ThingKind(256);
}

/// How long the broker keeps a thing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Lifetime {
    /// As long as any client holds it; whoever puts it is the first.
    Held,
    /// Until a client removes it.
    Kept,
}

/// Why a broker refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Reason {
    /// There is nothing of that name.
    Unknown,
    /// The name is taken.
    Taken,
    /// The client does not hold that thing.
    NotHeld,
    /// No more things fit.
    TooManyThings,
    /// No more bytes fit.
    TooManyBytes,
    /// No more clients fit.
    TooManyClients,
    /// The descriptor is not what the kind promises, or the request contradicts itself.
    Invalid,
    /// The broker has no descriptor left.
    NoDescriptor,
}

impl Reason {
    const ALL: [Reason; 8] = [
        Reason::Unknown,
        Reason::Taken,
        Reason::NotHeld,
        Reason::TooManyThings,
        Reason::TooManyBytes,
        Reason::TooManyClients,
        Reason::Invalid,
        Reason::NoDescriptor,
    ];

    pub(crate) fn code(self) -> u64 {
        Self::ALL.iter().position(|&reason| reason == self).map_or(0, |index| index as u64 + 1)
    }

    /// The reason of a reply's tag; `None` for yes.
    pub(crate) fn of_code(code: u64) -> Result<Option<Self>, Refusal> {
        match code {
            0 => Ok(None),
            code => match Self::ALL.get(code as usize - 1) {
                Some(&reason) => Ok(Some(reason)),
                None => Err(Refusal::Field("unknown reason")),
            },
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Unknown => "there is nothing of that name",
            Reason::Taken => "the name is taken",
            Reason::NotHeld => "this client does not hold it",
            Reason::TooManyThings => "the broker's limit on things is reached",
            Reason::TooManyBytes => "the broker's limit on bytes is reached",
            Reason::TooManyClients => "the broker's limit on clients is reached",
            Reason::Invalid => "the descriptor is not what its kind promises",
            Reason::NoDescriptor => "the broker has no descriptor left",
        })
    }
}

/// What a client asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Op {
    Put = 1,
    Get = 2,
    /// Ends a hold. Not answered.
    Release = 3,
    /// Removes a kept thing's name; holds go on.
    Remove = 4,
    Stats = 5,
}

impl Op {
    fn of(tag: u64) -> Option<Self> {
        [Op::Put, Op::Get, Op::Release, Op::Remove, Op::Stats]
            .into_iter()
            .find(|&op| op as u64 == tag)
    }
}

/// A request, or the thing in a reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Body {
    pub(crate) name: String,
    pub(crate) kind: ThingKind,
    pub(crate) lifetime: Lifetime,
    pub(crate) len: u64,
    pub(crate) generation: u64,
    pub(crate) opaque: Vec<u8>,
}

impl Body {
    /// A body that says nothing but a name.
    pub(crate) fn named(name: &str) -> Self {
        Body {
            name: name.to_owned(),
            kind: ThingKind(0),
            lifetime: Lifetime::Held,
            len: 0,
            generation: 0,
            opaque: Vec::new(),
        }
    }

    pub(crate) fn to_message(&self, kind: Kind, number: u64, tag: u64, descriptors: u8) -> Message {
        let kept = u64::from(self.lifetime == Lifetime::Kept) << 32;
        Message {
            descriptors,
            number,
            tag,
            object: u64::from(self.kind.0) | kept,
            offset: self.name.len() as u64,
            len: self.len,
            generation: self.generation,
            payload: [self.name.as_bytes(), &self.opaque].concat(),
            ..Message::new(kind)
        }
    }

    pub(crate) fn of_message(message: &Message) -> Result<Self, Refusal> {
        let bad = |what| Err(Refusal::Field(what));
        let Some((name, opaque)) = message.payload.split_at_checked(message.offset as usize) else {
            return bad("name longer than the payload");
        };
        let Ok(name) = std::str::from_utf8(name) else { return bad("name is not UTF-8") };
        if name.len() > NAME_MAX || opaque.len() > OPAQUE_MAX {
            return bad("name or opaque bytes too long");
        }
        if message.object >> 33 != 0 {
            return bad("unknown lifetime");
        }
        Ok(Body {
            name: name.to_owned(),
            kind: ThingKind(message.object as u32),
            lifetime: if message.object >> 32 == 1 { Lifetime::Kept } else { Lifetime::Held },
            len: message.len,
            generation: message.generation,
            opaque: opaque.to_vec(),
        })
    }
}

/// Reads a request.
pub(crate) fn request(message: &Message) -> Result<(Op, Body), Refusal> {
    if message.kind != Kind::Request {
        return Err(Refusal::Kind(message.kind as u8));
    }
    let op = Op::of(message.tag).ok_or(Refusal::Field("unknown operation"))?;
    let carries = u8::from(message.descriptors > 0);
    if carries > u8::from(op == Op::Put) {
        return Err(Refusal::Descriptors { got: 1, expected: 0 });
    }
    Ok((op, Body::of_message(message)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bodies_round_trip(
            name in ".{0,50}", kind: u32, kept: bool, len: u64, generation: u64,
            opaque in proptest::collection::vec(any::<u8>(), 0..OPAQUE_MAX)
        ) {
            let lifetime = if kept { Lifetime::Kept } else { Lifetime::Held };
            let body = Body { name, kind: ThingKind(kind), lifetime, len, generation, opaque };
            let message = body.to_message(Kind::Request, 3, Op::Put as u64, 1);
            let bytes = message.encode(SESSION);
            let message = Message::decode(&bytes, Some(SESSION), 1).unwrap();
            prop_assert_eq!(request(&message), Ok((Op::Put, body)));
        }
    }

    #[test]
    fn contradictions_are_refused() {
        let good = Body::named("x").to_message(Kind::Request, 0, Op::Get as u64, 0);
        assert!(request(&good).is_ok());
        for bad in [
            Message { tag: 99, ..good.clone() },
            Message { offset: 2, ..good.clone() },
            Message { object: 1 << 40, ..good.clone() },
            Message { descriptors: 1, ..good.clone() },
            Message { kind: Kind::Reply, ..good.clone() },
            Message { payload: vec![0xff], ..good.clone() },
            Message { payload: vec![b'a'; 300], offset: 300, ..good.clone() },
        ] {
            assert!(request(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn reasons_have_codes_of_their_own() {
        for reason in Reason::ALL {
            assert_eq!(Reason::of_code(reason.code()), Ok(Some(reason)));
        }
        assert_eq!(Reason::of_code(0), Ok(None));
        assert!(Reason::of_code(99).is_err());
    }
}
