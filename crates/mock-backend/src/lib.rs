#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod addresses;
mod backend;
mod builder;
mod call;
mod captures;
mod clock;
mod costs;
mod driver;
mod error;
mod event;
mod faults;
mod graphs;
mod host;
mod judge;
mod judged;
mod memory;
mod ordered;
mod pools;
mod ranges;
mod rng;
mod share;
mod sim;
mod streams;
mod violation;

pub mod conformance;
pub mod model;
#[cfg(any(test, feature = "proptest"))]
pub mod strategy;
pub mod trial;
pub mod workload;

pub use addresses::{Fed, Feed, Placement, SpanKind, recorded_segments};
pub use backend::{Judge, MockBackend};
pub use builder::Builder;
pub use call::{Call, CallInfo, LogEntry};
pub use captures::{CaptureError, CaptureMode};
pub use costs::{Costs, FIRST_MAP_NS, call_ns};
pub use error::MockError;
pub use event::MockEvent;
pub use faults::Fault;
pub use graphs::Graph;
pub use host::MockPinned;
pub use judged::{Judged, Subject};
pub use memory::{MockPage, MockReservation, MockSegment};
pub use ordered::{MockOrdered, MockPool};
pub use rng::Rng;
pub use share::{Exchange, MockOpened, MockSharedEvent};
pub use streams::{MockStream, Work};
pub use violation::{Leaks, Rule, Violation};
