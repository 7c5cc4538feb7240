//! The contract of the backend traits.

use mock_backend::conformance::{self, Harness};
use own_backend::{HostBackend, HostStream};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

struct Host {
    backend: HostBackend,
    streams: AtomicU64,
}

impl Harness for Host {
    type Backend = HostBackend;

    fn backend(&self) -> &HostBackend {
        &self.backend
    }

    fn stream(&self) -> HostStream {
        HostStream(self.streams.fetch_add(1, Relaxed))
    }

    // Work on the host is over when the call that does it returns.
    fn queue_work(&self, _: &HostStream) {}

    fn synchronize(&self, _: &HostStream) {}
}

#[test]
fn the_backend_keeps_the_contract() {
    conformance::run(|| Host { backend: HostBackend::new(1 << 30), streams: AtomicU64::new(0) });
}
