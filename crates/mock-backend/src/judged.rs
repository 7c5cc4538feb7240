//! An allocator under the judge: every hand-out, free and use is reported as it happens.

use std::fmt::Debug;

use alloc_core::{Addr, AllocError, CachingAllocator};

use crate::{MockBackend, MockError, MockStream, Work};

/// What the judge needs to drive an allocator.
pub trait Subject {
    /// Its errors.
    type Error: Debug;

    /// Allocates `bytes` for use on `stream`; 0 bytes may give [`Addr::NULL`].
    ///
    /// # Errors
    /// If there is no memory, or whatever else goes wrong.
    fn allocate(&self, bytes: u64, stream: &MockStream) -> Result<Addr, Self::Error>;

    /// Frees what `allocate` returned.
    ///
    /// # Errors
    /// Then it is still allocated.
    fn free(&self, addr: Addr) -> Result<(), Self::Error>;

    /// Says that an allocation is used on `stream` too.
    ///
    /// # Errors
    /// Then it is not recorded.
    fn record_stream(&self, addr: Addr, stream: &MockStream) -> Result<(), Self::Error>;
}

impl Subject for CachingAllocator<MockBackend> {
    type Error = AllocError<MockError>;

    fn allocate(&self, bytes: u64, stream: &MockStream) -> Result<Addr, Self::Error> {
        self.allocate_raw(bytes, stream)
    }

    fn free(&self, addr: Addr) -> Result<(), Self::Error> {
        self.free_raw(addr)
    }

    fn record_stream(&self, addr: Addr, stream: &MockStream) -> Result<(), Self::Error> {
        self.record_stream_raw(addr, stream)
    }
}

/// An allocator and the machine it runs on, with the judge told of everything. May be shared by
/// threads if the allocator may.
///
/// ```
/// use alloc_core::{CachingAllocator, Config, DeviceId};
/// use mock_backend::{Judged, MockBackend};
///
/// let backend = MockBackend::builder().device(64 << 20).strict().build();
/// let (main, side) = (backend.default_stream(DeviceId::new(0)), backend.stream(DeviceId::new(0)));
/// let allocator = CachingAllocator::new(backend.clone(), Config::pytorch()).unwrap();
/// let judged = Judged::new(backend, allocator);
///
/// let a = judged.allocate(4 << 20, &main).unwrap();
/// judged.use_on(a, &side).unwrap(); // recorded, and work queued that touches it
/// judged.free(a).unwrap();
/// let b = judged.allocate(4 << 20, &main).unwrap();
/// assert_ne!(a, b, "the side stream still works on it");
/// judged.free(b).unwrap();
/// judged.subject.empty_cache().unwrap();
/// judged.finish(); // drops the allocator; nothing may be left
/// ```
#[derive(Debug)]
pub struct Judged<S> {
    /// The machine.
    pub backend: MockBackend,
    /// The allocator; what is done to it directly, the judge does not see.
    pub subject: S,
}

impl<S: Subject> Judged<S> {
    /// Puts `subject`, which runs on `backend`, under the judge.
    pub fn new(backend: MockBackend, subject: S) -> Self {
        Judged { backend, subject }
    }

    /// Allocates.
    ///
    /// # Errors
    /// Those of the allocator.
    pub fn allocate(&self, bytes: u64, stream: &MockStream) -> Result<Addr, S::Error> {
        let addr = self.subject.allocate(bytes, stream)?;
        self.backend.judge().allocated(addr, bytes, stream);
        Ok(addr)
    }

    /// Frees.
    ///
    /// # Errors
    /// Those of the allocator; the allocation is still live then.
    pub fn free(&self, addr: Addr) -> Result<(), S::Error> {
        let bytes = self.backend.judge().freed(addr);
        let result = self.subject.free(addr);
        if let (Err(_), Some(bytes)) = (&result, bytes) {
            self.backend.judge().still_live(addr, bytes);
        }
        result
    }

    /// Records a use without any work.
    ///
    /// # Errors
    /// Those of the allocator.
    pub fn record_stream(&self, addr: Addr, stream: &MockStream) -> Result<(), S::Error> {
        self.subject.record_stream(addr, stream)
    }

    /// Queues work on `stream` that touches all of a live allocation, without recording it: right on
    /// the stream it was allocated for, a client's bug on others.
    pub fn launch_on(&self, addr: Addr, stream: &MockStream) {
        let bytes = self.backend.judge().live_bytes(addr).unwrap_or(1);
        self.backend.launch(stream, Work::new().touching(addr, bytes));
    }

    /// Records the use, then queues the work, as a well-behaved client does.
    ///
    /// # Errors
    /// Those of the allocator; nothing is queued then.
    pub fn use_on(&self, addr: Addr, stream: &MockStream) -> Result<(), S::Error> {
        self.record_stream(addr, stream)?;
        self.launch_on(addr, stream);
        Ok(())
    }

    /// Drops the allocator and asserts that no rule was broken and nothing leaked. The allocator must
    /// be the last handle to itself, and empty or able to give everything back when dropped.
    ///
    /// # Panics
    /// If a rule was broken or something leaked.
    #[track_caller]
    pub fn finish(self) {
        let Judged { backend, subject } = self;
        drop(subject);
        backend.assert_clean();
    }
}
