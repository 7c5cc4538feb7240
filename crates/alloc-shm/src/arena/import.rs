//! Arenas on the side that reads them.
#![allow(unsafe_code, reason = "lends ranges that the sender has lent to this process")]

use crate::arena::block::BlockAddr;
use crate::arena::header_words;
use crate::arena::space::BLOCK_HEADER;
use crate::error::{Error, Refusal, Result};
use crate::memfd;
use crate::os::region::{Protection, Region};
use std::os::fd::{AsFd, OwnedFd};

/// Another process's arena, mapped for reading. Needs no descriptor once mapped.
#[derive(Debug)]
pub(crate) struct Import {
    region: Region,
}

impl Import {
    /// Maps an arena of `len` bytes, after checking that its size and its pages are safe.
    pub(crate) fn new(fd: OwnedFd, len: u64) -> Result<Self> {
        memfd::require_published(fd.as_fd(), len)?;
        let region = Region::map(fd.as_fd(), Protection::SharedRead, 0, len).map_err(|source| {
            Error::Mapping { object: "a received arena".to_owned(), bytes: len, source }
        })?;
        Ok(Import { region })
    }

    /// Refuses an address that is not that of a shared block which exists now.
    pub(crate) fn check(&self, addr: BlockAddr) -> Result<()> {
        if addr.offset < BLOCK_HEADER || self.region.range(addr.offset, addr.len).is_err() {
            return Err(Refusal::Field("block outside of its arena").into());
        }
        let [generation, len] = header_words(addr.offset).map(|at| self.region.load(at));
        let (Some(found), Some(len)) = (generation, len) else {
            return Err(Refusal::Field("block not on a boundary").into());
        };
        if found != addr.generation || found == 0 {
            return Err(Refusal::Stale { got: addr.generation, found }.into());
        }
        if len != addr.len {
            return Err(Refusal::Field("length is not the block's").into());
        }
        Ok(())
    }

    /// The bytes of a block that has been through [`check`](Import::check) and is on loan.
    pub(crate) fn bytes(&self, addr: BlockAddr) -> &[u8] {
        // SAFETY: the sender, who alone can write the arena, keeps a shared block unwritten until
        // it is given back, which happens after the last of these references. That the peer runs
        // this protocol is what a channel to it trusts.
        let bytes = unsafe { self.region.bytes(addr.offset, addr.len) };
        bytes.expect("checked when it was received")
    }
}
