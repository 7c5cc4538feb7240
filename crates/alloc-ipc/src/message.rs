//! How a block travels: one message for each piece, then one for the block, which is the loan. All
//! messages of a block have one tag.

use alloc_core::backend::{DeviceKey, TOKEN_BYTES_MAX, Token, TokenKind};
use alloc_core::share::{MemoryId, PieceKind, SharedBlock, SharedPiece};

/// The most bytes that a sender's note may have.
pub const NOTE_BYTES_MAX: usize = 512;

const VERSION: u8 = 1;
const GARBLED: &str = "it ends too early, or has fields that mean nothing";

/// The message of the block itself, less its pieces.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) device: DeviceKey,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) pieces: u32,
    /// Kind and bytes of the token of the producer's event.
    pub(crate) ready: Option<(TokenKind, Vec<u8>)>,
    pub(crate) note: Vec<u8>,
}

impl Head {
    pub(crate) fn of<D>(block: &SharedBlock, ready: Option<&Token<D>>, note: &[u8]) -> Self {
        Head {
            device: block.device,
            offset: block.offset,
            bytes: block.bytes,
            pieces: block.pieces.len() as u32,
            ready: ready.map(|token| (token.kind, token.bytes.clone())),
            note: note.to_vec(),
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        bytes.extend_from_slice(&self.device.0);
        bytes.extend_from_slice(&self.offset.to_le_bytes());
        bytes.extend_from_slice(&self.bytes.to_le_bytes());
        bytes.extend_from_slice(&self.pieces.to_le_bytes());
        let (kind, ready) = match &self.ready {
            Some((kind, ready)) => (kind.0, ready.as_slice()),
            None => (0, [].as_slice()),
        };
        bytes.push(u8::from(self.ready.is_some()));
        bytes.extend_from_slice(&kind.to_le_bytes());
        bytes.extend_from_slice(&(ready.len() as u16).to_le_bytes());
        bytes.extend_from_slice(ready);
        bytes.extend_from_slice(&self.note);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let mut reader = Reader::new(bytes)?;
        let device = DeviceKey(reader.array()?);
        let (offset, bytes) = (reader.u64()?, reader.u64()?);
        let pieces = reader.u32()?;
        let [has_ready] = reader.array()?;
        let kind = TokenKind(reader.u32()?);
        let length = usize::from(u16::from_le_bytes(reader.array()?));
        let ready = reader.take(length)?.to_vec();
        let note = reader.0.to_vec();
        if has_ready > 1 || length > TOKEN_BYTES_MAX || note.len() > NOTE_BYTES_MAX {
            return Err(GARBLED);
        }
        let ready = (has_ready == 1).then_some((kind, ready));
        Ok(Head { device, offset, bytes, pieces, ready, note })
    }
}

/// The message of a piece. The descriptor goes along.
pub(crate) fn encode_piece<D>(piece: &SharedPiece, token: &Token<D>) -> Vec<u8> {
    let kind = match piece.kind {
        PieceKind::Segment => 0,
        PieceKind::Page => 1,
    };
    let mut bytes = vec![VERSION, kind];
    let MemoryId { process, owner, serial } = piece.id;
    for number in [process, owner, serial, piece.bytes] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes.extend_from_slice(&token.kind.0.to_le_bytes());
    bytes.extend_from_slice(&token.bytes);
    bytes
}

pub(crate) fn decode_piece<D>(
    bytes: &[u8],
    descriptor: Option<D>,
) -> Result<(SharedPiece, Token<D>), &'static str> {
    let mut reader = Reader::new(bytes)?;
    let kind = match reader.array()? {
        [0] => PieceKind::Segment,
        [1] => PieceKind::Page,
        _ => return Err(GARBLED),
    };
    let id = MemoryId { process: reader.u64()?, owner: reader.u64()?, serial: reader.u64()? };
    let bytes = reader.u64()?;
    let token_kind = TokenKind(reader.u32()?);
    if reader.0.len() > TOKEN_BYTES_MAX {
        return Err(GARBLED);
    }
    let token = Token { kind: token_kind, bytes: reader.0.to_vec(), descriptor };
    Ok((SharedPiece { id, bytes, kind }, token))
}

/// What is not read yet.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8]) -> Result<Self, &'static str> {
        match bytes.split_first() {
            Some((&VERSION, rest)) => Ok(Reader(rest)),
            Some(_) => Err("it is of another version"),
            None => Err(GARBLED),
        }
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], &'static str> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(GARBLED)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        self.take(N)?.try_into().map_err(|_| GARBLED)
    }

    fn u64(&mut self) -> Result<u64, &'static str> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, &'static str> {
        Ok(u32::from_le_bytes(self.array()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn head() -> impl Strategy<Value = Head> {
        let ready = proptest::option::of((any::<u32>(), vec(any::<u8>(), 0..=TOKEN_BYTES_MAX)));
        let note = vec(any::<u8>(), 0..=NOTE_BYTES_MAX);
        (any::<[u8; 16]>(), any::<[u64; 2]>(), any::<u32>(), ready, note).prop_map(
            |(device, [offset, bytes], pieces, ready, note)| Head {
                device: DeviceKey(device),
                offset,
                bytes,
                pieces,
                ready: ready.map(|(kind, bytes)| (TokenKind(kind), bytes)),
                note,
            },
        )
    }

    proptest! {
        #[test]
        fn heads_round_trip_and_fit(head in head()) {
            let bytes = head.encode();
            prop_assert!(bytes.len() <= 1024, "a channel carries no more");
            prop_assert_eq!(Head::decode(&bytes).unwrap(), head);
        }

        #[test]
        fn pieces_round_trip(
            numbers: [u64; 4], page: bool, kind: u32,
            bytes in vec(any::<u8>(), 0..=TOKEN_BYTES_MAX)
        ) {
            let [process, owner, serial, size] = numbers;
            let id = MemoryId { process, owner, serial };
            let kind_of = if page { PieceKind::Page } else { PieceKind::Segment };
            let piece = SharedPiece { id, bytes: size, kind: kind_of };
            let token = Token { kind: TokenKind(kind), bytes, descriptor: Some(()) };
            let (again, token_again) =
                decode_piece(&encode_piece(&piece, &token), Some(())).unwrap();
            prop_assert_eq!(again, piece);
            prop_assert_eq!((token_again.kind, token_again.bytes), (token.kind, token.bytes));
        }

        /// Whatever arrives is refused or understood; nothing panics.
        #[test]
        fn nonsense_is_refused(bytes in vec(any::<u8>(), 0..400), version: bool) {
            let mut bytes = bytes;
            if let (true, Some(first)) = (version, bytes.first_mut()) {
                *first = VERSION;
            }
            let _ = Head::decode(&bytes);
            let _ = decode_piece::<()>(&bytes, None);
        }
    }

    #[test]
    fn what_ends_too_early_is_refused() {
        let block =
            SharedBlock { device: DeviceKey([3; 16]), offset: 1, bytes: 2, pieces: Vec::new() };
        let token = Token::<()> { kind: TokenKind(7), bytes: vec![1; 64], descriptor: None };
        let bytes = Head::of(&block, Some(&token), b"").encode();
        assert!((0..bytes.len()).all(|length| Head::decode(&bytes[..length]).is_err()));
    }
}
