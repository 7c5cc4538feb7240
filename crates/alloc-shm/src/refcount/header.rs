//! The first page of a reference-counted map: who it is, and who holds it.
//!
//! ```text
//! offset  word
//!      0  magic
//!      8  version
//!     16  length of the whole object in bytes, this page included
//!     24  the process that created it
//!     32  the pid namespace in which processes are named
//!     40  lock: the process in the critical section, or 0
//!     48  state: 0 live, 1 dead, 2 dead and its name removed
//!     56  count: holds in all, for whoever looks
//!    128  248 holders of 16 bytes: process, number of its holds
//! ```
//!
//! A process is one word ([`ProcessId`]), so a holder comes and goes with a single store, and a
//! process that is killed anywhere leaves a table that says the truth about everybody else. The
//! lock names its owner: whoever finds the owner dead takes it over. Everything but the lock is
//! written under the lock only.

use crate::error::{Error, Result};
use crate::os::region::Region;
use crate::process::{ProcessId, pid_namespace};
use crate::steps::{Step, pass};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes before the data: one page, so that the data begins on one.
pub(crate) const HEADER_BYTES: u64 = 4096;

const MAGIC: u64 = u64::from_le_bytes(*b"gsmcount");
const VERSION: u64 = 1;

const AT_MAGIC: u64 = 0;
const AT_VERSION: u64 = 8;
const AT_LEN: u64 = 16;
const AT_OWNER: u64 = 24;
const AT_NAMESPACE: u64 = 32;
const AT_LOCK: u64 = 40;
const AT_STATE: u64 = 48;
const AT_COUNT: u64 = 56;
const AT_HOLDERS: u64 = 128;
const HOLDER_BYTES: u64 = 16;

/// Processes that can hold one map.
const HOLDERS_MAX: usize = ((HEADER_BYTES - AT_HOLDERS) / HOLDER_BYTES) as usize;

const LIVE: u64 = 0;
const DEAD: u64 = 1;
const REMOVED: u64 = 2;

/// A checked header at the start of a region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header<'a> {
    region: &'a Region,
}

impl<'a> Header<'a> {
    /// Writes the header of a new object of `len` bytes, held once by this process. Nobody else
    /// can see the object yet.
    pub(crate) fn create(region: &'a Region, len: u64) -> Result<Self> {
        let me = ProcessId::current()?;
        let header = Header { region };
        header.word(AT_VERSION).store(VERSION, Ordering::Relaxed);
        header.word(AT_LEN).store(len, Ordering::Relaxed);
        header.word(AT_OWNER).store(me.to_word(), Ordering::Relaxed);
        header.word(AT_NAMESPACE).store(pid_namespace()?.into(), Ordering::Relaxed);
        header.holder(0).set(me, 1);
        header.word(AT_COUNT).store(1, Ordering::Relaxed);
        header.word(AT_MAGIC).store(MAGIC, Ordering::Release);
        Ok(header)
    }

    /// Checks that a region of an object of `len` bytes begins with a header of ours.
    pub(crate) fn check(region: &'a Region, len: u64, object: &str) -> Result<Self> {
        let bad = |why| Err(Error::Header { object: object.to_owned(), why });
        if region.len() < HEADER_BYTES {
            return bad("it is shorter than a header");
        }
        let header = Header { region };
        if header.load(AT_MAGIC) != MAGIC {
            return bad("it does not begin with the magic number");
        }
        if header.load(AT_VERSION) != VERSION {
            return bad("it is of another version");
        }
        if header.load(AT_LEN) != len {
            return bad("its length is not the one it was created with");
        }
        if header.load(AT_NAMESPACE) != u64::from(pid_namespace()?) {
            return Err(Error::Namespace { object: object.to_owned() });
        }
        Ok(header)
    }

    /// The header of a region that has been through [`create`](Header::create) or
    /// [`check`](Header::check).
    pub(crate) fn of_checked(region: &'a Region) -> Self {
        Header { region }
    }

    /// Adds one hold of this process.
    pub(crate) fn join(self, object: &str) -> Result<()> {
        let lock = self.lock()?;
        // A live object whose holders have all died is whole: whoever comes in time keeps it.
        if self.load(AT_STATE) != LIVE {
            return Err(Error::Gone { object: object.to_owned() });
        }
        lock.add(object)
    }

    /// Takes back one hold of this process. If that was the last, `remove_name` is called, alone
    /// among all processes, and never again for this object.
    pub(crate) fn leave(self, remove_name: impl FnOnce() -> Result<()>) -> Result<()> {
        let lock = self.lock()?;
        lock.drop_one();
        lock.bury_if_unheld(remove_name).map(drop)
    }

    /// Removes the name if no living process holds the object; answers whether it did.
    pub(crate) fn reap(self, remove_name: impl FnOnce() -> Result<()>) -> Result<bool> {
        self.lock()?.bury_if_unheld(remove_name)
    }

    /// Holds in all, as last counted.
    pub(crate) fn count(self) -> u64 {
        self.load(AT_COUNT)
    }

    /// The process that created the object.
    pub(crate) fn owner(self) -> Option<ProcessId> {
        ProcessId::from_word(self.load(AT_OWNER))
    }

    fn lock(self) -> Result<Locked<'a>> {
        let me = ProcessId::current()?;
        pass(Step::LockHeader);
        let lock = self.word(AT_LOCK);
        let take =
            |from| lock.compare_exchange(from, me.to_word(), Ordering::Acquire, Ordering::Relaxed);
        let mut wait = Wait::default();
        loop {
            let Err(owner) = take(0) else { return Ok(Locked { header: self, me }) };
            // Ask `/proc` only when the owner takes long for a handful of stores.
            if wait.is_long() && is_dead(owner)? && take(owner).is_ok() {
                return Ok(Locked { header: self, me });
            }
            if wait.is_hopeless() {
                let why = "a living process has kept its lock for seconds";
                return Err(Error::Header { object: "the map".to_owned(), why });
            }
            wait.a_little();
        }
    }

    fn holder(self, index: usize) -> Holder<'a> {
        let at = AT_HOLDERS + index as u64 * HOLDER_BYTES;
        Holder { process: self.word(at), holds: self.word(at + 8) }
    }

    fn load(self, at: u64) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    fn word(self, at: u64) -> &'a AtomicU64 {
        // `create` and `check` have seen to it that the region is writable and has a whole header.
        self.region.word(at).expect("a header's words are within the region")
    }
}

/// One entry of the table.
struct Holder<'a> {
    process: &'a AtomicU64,
    holds: &'a AtomicU64,
}

impl Holder<'_> {
    fn process(&self) -> Option<ProcessId> {
        ProcessId::from_word(self.process.load(Ordering::Acquire))
    }

    /// The number goes first, so that a process is never in the table without its holds.
    fn set(&self, process: ProcessId, holds: u64) {
        self.holds.store(holds, Ordering::Relaxed);
        pass(Step::AddHolder);
        self.process.store(process.to_word(), Ordering::Release);
    }

    fn clear(&self) {
        self.process.store(0, Ordering::Release);
    }
}

/// The critical section.
struct Locked<'a> {
    header: Header<'a>,
    me: ProcessId,
}

impl<'a> Locked<'a> {
    fn holders(&self) -> impl Iterator<Item = Holder<'a>> + use<'a> {
        let header = self.header;
        (0..HOLDERS_MAX).map(move |index| header.holder(index))
    }

    fn mine(&self) -> Option<Holder<'a>> {
        self.holders().find(|holder| holder.process() == Some(self.me))
    }

    fn add(&self, object: &str) -> Result<()> {
        if let Some(holder) = self.mine() {
            pass(Step::AddHolder);
            holder.holds.fetch_add(1, Ordering::Relaxed);
        } else {
            let free = self.holders().find(|holder| holder.process().is_none());
            let full = || Error::Holders { object: object.to_owned(), max: HOLDERS_MAX };
            free.ok_or_else(full)?.set(self.me, 1);
        }
        self.recount();
        Ok(())
    }

    fn drop_one(&self) {
        let Some(holder) = self.mine() else { return };
        pass(Step::DropHolder);
        if holder.holds.load(Ordering::Relaxed) > 1 {
            holder.holds.fetch_sub(1, Ordering::Relaxed);
        } else {
            holder.clear();
        }
        self.recount();
    }

    /// Drops the dead from the table; answers how many holds are left.
    fn living_holds(&self) -> Result<u64> {
        for holder in self.holders() {
            if let Some(process) = holder.process()
                && process != self.me
                && !process.is_alive()?
            {
                holder.clear();
            }
        }
        Ok(self.recount())
    }

    fn bury_if_unheld(&self, remove_name: impl FnOnce() -> Result<()>) -> Result<bool> {
        let state = self.header.word(AT_STATE);
        if state.load(Ordering::Relaxed) == REMOVED || self.living_holds()? > 0 {
            return Ok(false);
        }
        pass(Step::MarkDead);
        state.store(DEAD, Ordering::Release);
        remove_name()?;
        state.store(REMOVED, Ordering::Release);
        Ok(true)
    }

    /// The count is always computed, never adjusted, so it cannot drift or fall below 0.
    fn recount(&self) -> u64 {
        let holds = self
            .holders()
            .filter(|holder| holder.process().is_some())
            .map(|holder| holder.holds.load(Ordering::Relaxed))
            .sum();
        self.header.word(AT_COUNT).store(holds, Ordering::Release);
        holds
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        pass(Step::UnlockHeader);
        self.header.word(AT_LOCK).store(0, Ordering::Release);
    }
}

/// Whether a word names a process that no longer runs. A word that is 0 by now names none.
fn is_dead(word: u64) -> Result<bool> {
    ProcessId::from_word(word).map_or(Ok(false), |process| Ok(!process.is_alive()?))
}

/// Spins first, yields then, sleeps after that, and gives up in the end: the owner may be stopped,
/// and nobody should hang on it.
#[derive(Default)]
struct Wait {
    rounds: u32,
}

impl Wait {
    const SPINS: u32 = 50;
    const YIELDS: u32 = 200;
    /// With the time that a sleep really takes, some seconds.
    const SLEEPS: u32 = 20_000;

    fn a_little(&mut self) {
        if self.rounds < Self::SPINS {
            std::hint::spin_loop();
        } else if self.rounds < Self::YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_micros(200));
        }
        self.rounds += 1;
    }

    fn is_long(&self) -> bool {
        self.rounds >= Self::YIELDS
    }

    fn is_hopeless(&self) -> bool {
        self.rounds >= Self::SLEEPS
    }
}
