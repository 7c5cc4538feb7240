//! The driver calls: their kinds, what a hook sees of one, and the log.

use std::collections::VecDeque;
use std::fmt;

use alloc_core::backend::ErrorKind;
use alloc_core::{Addr, DeviceId, StreamId};

/// A kind of driver call: one for every fallible method of the backend traits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Call {
    /// `Backend::acquire`
    Acquire,
    /// `Backend::release`
    Release,
    /// `Backend::record`
    Record,
    /// `Backend::query`
    Query,
    /// `Backend::wait`
    Wait,
    /// `MemoryInfo::memory`
    Memory,
    /// `VirtualMemory::reserve`
    Reserve,
    /// `VirtualMemory::unreserve`
    Unreserve,
    /// `VirtualMemory::create`
    Create,
    /// `VirtualMemory::destroy`
    Destroy,
    /// `VirtualMemory::map`
    Map,
    /// `VirtualMemory::set_access`
    SetAccess,
    /// `VirtualMemory::unmap`
    Unmap,
    /// [`MockBackend::wait_event`](crate::MockBackend::wait_event): a stream ordered after an event
    WaitEvent,
    /// `HostBackend::pin`
    Pin,
    /// `HostBackend::unpin`
    Unpin,
    /// `CopyData::copy`
    Copy,
    /// `Share::device_key`
    DeviceKey,
    /// `Share::export_segment`
    ExportSegment,
    /// `Share::open_segment`
    OpenSegment,
    /// `Share::close_segment`
    CloseSegment,
    /// `Share::export_event`
    ExportEvent,
    /// `Share::await_event`
    AwaitEvent,
    /// `SharePages::export_page`
    ExportPage,
    /// `SharePages::import_page`
    ImportPage,
    /// `StreamOrdered::create_pool`
    CreatePool,
    /// `StreamOrdered::destroy_pool`
    DestroyPool,
    /// `StreamOrdered::allocate_ordered`
    AllocateOrdered,
    /// `StreamOrdered::free_ordered`
    FreeOrdered,
    /// `StreamOrdered::set_pool_options` and `pool_options`
    PoolOptions,
    /// `StreamOrdered::pool_usage` and `reset_pool_peaks`
    PoolUsage,
    /// `StreamOrdered::trim_pool`
    TrimPool,
    /// `Capture::capture_status`
    CaptureStatus,
    /// `Capture::capture_tips`
    CaptureTips,
    /// `Capture::extend_past`
    ExtendPast,
}

impl Call {
    /// Every kind, in declaration order.
    pub const ALL: [Call; 35] = [
        Call::Acquire,
        Call::Release,
        Call::Record,
        Call::Query,
        Call::Wait,
        Call::Memory,
        Call::Reserve,
        Call::Unreserve,
        Call::Create,
        Call::Destroy,
        Call::Map,
        Call::SetAccess,
        Call::Unmap,
        Call::WaitEvent,
        Call::Pin,
        Call::Unpin,
        Call::Copy,
        Call::DeviceKey,
        Call::ExportSegment,
        Call::OpenSegment,
        Call::CloseSegment,
        Call::ExportEvent,
        Call::AwaitEvent,
        Call::ExportPage,
        Call::ImportPage,
        Call::CreatePool,
        Call::DestroyPool,
        Call::AllocateOrdered,
        Call::FreeOrdered,
        Call::PoolOptions,
        Call::PoolUsage,
        Call::TrimPool,
        Call::CaptureStatus,
        Call::CaptureTips,
        Call::ExtendPast,
    ];

    /// Whether the call takes something that may have run out, so that
    /// [`ErrorKind::OutOfMemory`] is its natural failure.
    pub const fn takes_memory(self) -> bool {
        matches!(
            self,
            Call::Acquire | Call::Create | Call::Reserve | Call::Pin | Call::AllocateOrdered
        )
    }

    /// The name of the trait method.
    pub const fn name(self) -> &'static str {
        match self {
            Call::Acquire => "acquire",
            Call::Release => "release",
            Call::Record => "record",
            Call::Query => "query",
            Call::Wait => "wait",
            Call::Memory => "memory",
            Call::Reserve => "reserve",
            Call::Unreserve => "unreserve",
            Call::Create => "create",
            Call::Destroy => "destroy",
            Call::Map => "map",
            Call::SetAccess => "set_access",
            Call::Unmap => "unmap",
            Call::WaitEvent => "wait_event",
            Call::Pin => "pin",
            Call::Unpin => "unpin",
            Call::Copy => "copy",
            Call::DeviceKey => "device_key",
            Call::ExportSegment => "export_segment",
            Call::OpenSegment => "open_segment",
            Call::CloseSegment => "close_segment",
            Call::ExportEvent => "export_event",
            Call::AwaitEvent => "await_event",
            Call::ExportPage => "export_page",
            Call::ImportPage => "import_page",
            Call::CreatePool => "create_pool",
            Call::DestroyPool => "destroy_pool",
            Call::AllocateOrdered => "allocate_ordered",
            Call::FreeOrdered => "free_ordered",
            Call::PoolOptions => "pool_options",
            Call::PoolUsage => "pool_usage",
            Call::TrimPool => "trim_pool",
            Call::CaptureStatus => "capture_status",
            Call::CaptureTips => "capture_tips",
            Call::ExtendPast => "extend_past",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One call as a hook sees it, before it has any effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CallInfo {
    /// Which call.
    pub call: Call,
    /// The device it is about: of the stream, of the segment, of the page.
    pub device: DeviceId,
    /// The stream, where the call names one (for query and wait: the one the event was recorded
    /// on).
    pub stream: Option<StreamId>,
    /// The address, or [`Addr::NULL`] where there is none yet.
    pub addr: Addr,
    /// The size in bytes; 0 where there is none.
    pub bytes: u64,
}

/// One finished call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogEntry {
    /// Number of the operation, counted over everything told to or asked of the backend.
    pub operation: u64,
    /// The call; `addr` is filled in for calls that returned an address.
    pub info: CallInfo,
    /// `None` if it succeeded.
    pub error: Option<ErrorKind>,
    /// Streams whose unfinished work the host had to wait for in this call, ascending.
    pub waited_for: Vec<StreamId>,
}

/// The latest calls, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Log {
    capacity: usize,
    entries: VecDeque<LogEntry>,
}

impl Log {
    pub(crate) fn new(capacity: usize) -> Self {
        Log { capacity, entries: VecDeque::new() }
    }

    pub(crate) fn push(&mut self, entry: LogEntry) {
        if self.capacity == 0 {
            return;
        }
        if self.entries.len() == self.capacity {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }

    pub(crate) fn take(&mut self) -> Vec<LogEntry> {
        std::mem::take(&mut self.entries).into()
    }
}
