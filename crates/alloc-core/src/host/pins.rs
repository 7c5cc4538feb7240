//! The pinned segments, what they cost, and the bound on their sum.

use super::backend::{HostBackend, NodeId, PinRequest, PinnedSegment};
use super::error::{HostError, HostOp};
use super::home::Span;
use super::ledger::PinLedger;
use crate::backend::{BackendError, ErrorKind, Refused};
use crate::sync::{Mutex, RwLock};
use crate::units::Addr;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// A pinned segment and what is known about it.
struct Pinned<P> {
    token: P,
    about: About,
    /// Since when it is known to be wholly free, and the stamp of that state.
    idle: Option<(u64, Duration)>,
}

/// What is known about a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct About {
    pub(crate) span: Span,
    pub(crate) node: NodeId,
    /// The pool that it serves.
    pub(crate) pool: u32,
    /// It is never given back while the allocator lives.
    pub(crate) keep: bool,
}

/// Why memory was not pinned.
#[derive(Debug)]
pub(crate) enum PinFailure<E> {
    /// There is no room: what the system said, or `None` if the bound on pinned bytes is in the way.
    NoRoom(Option<E>),
    /// Trying again is no use.
    Failed(HostError<E>),
}

pub(crate) struct PinTable<B: HostBackend> {
    segments: RwLock<BTreeMap<Addr, Pinned<B::Pinned>>>,
    accounts: Mutex<Accounts>,
    /// What `accounts` says, for those in a hurry.
    bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct Accounts {
    ledger: PinLedger,
    /// Bytes that are being pinned right now.
    promised: u64,
}

impl<B: HostBackend> PinTable<B> {
    pub(crate) fn new() -> Self {
        PinTable {
            segments: RwLock::new(BTreeMap::new()),
            accounts: Mutex::new(Accounts::default()),
            bytes: AtomicU64::new(0),
        }
    }

    /// Pins a segment of exactly `request.bytes`, unless more than `limit` would be pinned then.
    pub(crate) fn pin(
        &self,
        backend: &B,
        request: &PinRequest,
        limit: Option<u64>,
        pool: u32,
        keep: bool,
    ) -> Result<Span, PinFailure<B::Error>> {
        self.promise(request.bytes, limit)?;
        let start = backend.now();
        let result = backend.pin(request);
        let took = backend.now().saturating_sub(start);
        let token = match result {
            Ok(token) => token,
            Err(error) => {
                self.accounts.lock().promised -= request.bytes;
                return Err(match error.kind() {
                    ErrorKind::OutOfMemory => PinFailure::NoRoom(Some(error)),
                    _ => PinFailure::Failed(HostError::Backend { op: HostOp::Pin, source: error }),
                });
            }
        };
        let span = Span { base: token.base(), bytes: request.bytes };
        if let Some(why) = self.contract_broken(&token, request) {
            self.accounts.lock().promised -= request.bytes;
            let error = HostError::BadSegment { base: span.base, bytes: token.bytes(), why };
            // If it cannot be given back either, it is leaked: it cannot be used.
            drop(backend.unpin(token));
            return Err(PinFailure::Failed(error));
        }
        {
            let mut accounts = self.accounts.lock();
            accounts.promised -= request.bytes;
            accounts.ledger.pinned(request.bytes);
            self.bytes.fetch_add(request.bytes, Relaxed);
            accounts.ledger.alloc_time.record(took);
        }
        let node = request.node.unwrap_or(NodeId::new(0));
        let about = About { span, node, pool, keep };
        self.segments.write().insert(span.base, Pinned { token, about, idle: None });
        Ok(span)
    }

    fn promise(&self, bytes: u64, limit: Option<u64>) -> Result<(), PinFailure<B::Error>> {
        let mut accounts = self.accounts.lock();
        let pinned = accounts.ledger.allocated_bytes.current();
        let sum = pinned.saturating_add(accounts.promised).saturating_add(bytes);
        if limit.is_some_and(|limit| sum > limit) {
            return Err(PinFailure::NoRoom(None));
        }
        accounts.promised += bytes;
        Ok(())
    }

    fn contract_broken(&self, token: &B::Pinned, request: &PinRequest) -> Option<&'static str> {
        let base = token.base();
        let aligned = base.is_aligned(request.align);
        let end = base.checked_add(request.bytes);
        if token.bytes() < request.bytes {
            return Some("it is shorter than asked for");
        }
        let (false, true, Some(end)) = (base.is_null(), aligned, end) else {
            return Some("it does not start at a possible address");
        };
        let segments = self.segments.read();
        let below = segments.range(..end).next_back();
        below.filter(|(_, other)| other.about.span.base + other.about.span.bytes > base)?;
        Some("it overlaps a segment that is still pinned")
    }

    /// Gives the segment at `base` back. On failure it stays, and `Some(about)` says what it is.
    ///
    /// # Panics
    /// If there is no such segment.
    pub(crate) fn unpin(&self, backend: &B, base: Addr) -> Result<(), (About, B::Error)> {
        let pinned = self.segments.write().remove(&base);
        let Pinned { token, about, .. } = pinned.expect("H8: only pinned segments are given back");
        let start = backend.now();
        let result = backend.unpin(token);
        let took = backend.now().saturating_sub(start);
        match result {
            Ok(()) => {
                let mut accounts = self.accounts.lock();
                accounts.ledger.unpinned(about.span.bytes);
                self.bytes.fetch_sub(about.span.bytes, Relaxed);
                accounts.ledger.free_time.record(took);
                Ok(())
            }
            Err(Refused { value: token, error }) => {
                self.segments.write().insert(base, Pinned { token, about, idle: None });
                Err((about, error))
            }
        }
    }

    /// The segment that holds `addr`.
    pub(crate) fn find(&self, addr: Addr) -> Option<About> {
        let segments = self.segments.read();
        let (_, pinned) = segments.range(..=addr).next_back()?;
        let about = pinned.about;
        (addr - about.span.base < about.span.bytes).then_some(about)
    }

    /// Notes that a segment is wholly free, and answers since when.
    pub(crate) fn idle_since(&self, base: Addr, stamp: u64, now: Duration) -> Duration {
        let mut segments = self.segments.write();
        let Some(pinned) = segments.get_mut(&base) else { return now };
        match pinned.idle {
            Some((known, since)) if known == stamp => since,
            _ => {
                pinned.idle = Some((stamp, now));
                now
            }
        }
    }

    /// Hands a segment over to another pool.
    pub(crate) fn move_to(&self, base: Addr, pool: u32) {
        if let Some(pinned) = self.segments.write().get_mut(&base) {
            pinned.about.pool = pool;
            pinned.idle = None;
        }
    }

    /// All segments, by address.
    pub(crate) fn all(&self) -> Vec<About> {
        self.segments.read().values().map(|pinned| pinned.about).collect()
    }

    /// Bytes pinned now.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    pub(crate) fn ledger(&self) -> PinLedger {
        self.accounts.lock().ledger.clone()
    }

    pub(crate) fn reset_peak(&self) {
        self.accounts.lock().ledger.reset_peak();
    }

    pub(crate) fn reset_accumulated(&self) {
        self.accounts.lock().ledger.reset_accumulated();
    }
}
