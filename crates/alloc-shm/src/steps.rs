//! The steps of every protocol of this crate, so that tests can fail or kill a process at each.
//!
//! Code calls `reach(step)` *before* it takes the step. Without the feature `fault-injection` that
//! call is nothing. With it, a test installs a hook for its thread with `on_step`; what the hook
//! returns is what the step fails with, and a hook may also end the process.

/// One step of a protocol: a system call, or one store to memory that other processes see.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Step {
    /// Open a file, a name or a memfd.
    Open,
    /// Ask for the length of what was opened.
    Stat,
    /// Set the length.
    Size,
    /// Reserve the blocks.
    Reserve,
    /// Map the pages.
    Map,
    /// Close the descriptor that is not kept.
    Close,
    /// Remove the name.
    Unlink,
    /// Advise the kernel how the pages will be read.
    Advise,
    /// Seal a memfd.
    Seal,
    /// Give a finished, nameless file its name.
    Link,
    /// Duplicate a descriptor.
    Duplicate,
    /// Take the lock in a reference-counted map's header.
    LockHeader,
    /// Write a holder into the header.
    AddHolder,
    /// Remove a holder from the header.
    DropHolder,
    /// Declare a reference-counted map dead.
    MarkDead,
    /// Give the header's lock back.
    UnlockHeader,
    /// Write a block's header into its arena.
    Publish,
    /// Send a message.
    Send,
    /// Receive a message.
    Receive,
    /// Give a block, or a name's hold, back to its sender.
    Release,
}

#[cfg(feature = "fault-injection")]
mod hook {
    use super::Step;
    use nix::errno::Errno;
    use std::cell::RefCell;

    type Hook = Box<dyn FnMut(Step) -> Result<(), Errno>>;

    thread_local! {
        static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    }

    /// Calls `hook` before every step that this thread takes, until [`clear`]. The step fails with
    /// the error that `hook` returns.
    pub fn on_step(hook: impl FnMut(Step) -> Result<(), Errno> + 'static) {
        HOOK.with(|slot| *slot.borrow_mut() = Some(Box::new(hook)));
    }

    /// Removes this thread's hook.
    pub fn clear() {
        HOOK.with(|slot| *slot.borrow_mut() = None);
    }

    pub(crate) fn reach(step: Step) -> Result<(), Errno> {
        HOOK.with(|slot| match slot.borrow_mut().as_mut() {
            Some(hook) => hook(step),
            None => Ok(()),
        })
    }
}

#[cfg(feature = "fault-injection")]
pub(crate) use hook::reach;
#[cfg(feature = "fault-injection")]
pub use hook::{clear, on_step};

/// Nothing, in a build without fault injection.
#[cfg(not(feature = "fault-injection"))]
#[inline(always)]
pub(crate) fn reach(_step: Step) -> Result<(), nix::errno::Errno> {
    Ok(())
}

/// A step that cannot fail: a hook may end the process there, but not fail it.
#[inline(always)]
pub(crate) fn pass(step: Step) {
    // What the hook answers is of no use here: the step is a store, and stores do not fail.
    let _ = reach(step);
}
