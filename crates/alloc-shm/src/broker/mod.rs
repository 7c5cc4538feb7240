//! A small server that holds things for others, so that producers and consumers can come and go.
//!
//! A *thing* is a name, a [kind](ThingKind), a length, a few opaque bytes and, mostly, a
//! descriptor. A client [puts](BrokerClient::put) it; any client of the same user
//! [gets](BrokerClient::get) it by name, with a descriptor of its own. Clients hold things: a hold
//! ends when it is dropped, or when the client dies and the kernel closes its socket. A thing
//! [`Lifetime::Held`] goes with its last hold, one [`Lifetime::Kept`] stays until it is removed.
//!
//! The broker never maps what it holds and trusts no length: before it takes a descriptor it checks
//! what the kind promises. Handles of other memory travel as opaque bytes, with or without a
//! descriptor.
//!
//! ```
//! use alloc_shm::broker::{Broker, BrokerClient, Lifetime, Limits};
//! use alloc_shm::{Draft, SocketAddress};
//!
//! # let label = format!("alloc-shm-doc-{}", std::process::id());
//! let address = SocketAddress::Abstract(label);
//! let broker = Broker::bind(&address, Limits::default())?.spawn()?;
//!
//! let producer = BrokerClient::connect(&address)?;
//! let frozen = Draft::new(4096)?.freeze()?;
//! let hold = producer.put_frozen("weights", &frozen, Lifetime::Kept)?;
//! drop((hold, producer)); // gone; the broker keeps the weights
//!
//! let consumer = BrokerClient::connect(&address)?;
//! let weights = consumer.get("weights")?.into_frozen()?;
//! assert_eq!(weights.len(), 4096);
//! drop(broker);
//! # Ok::<(), alloc_shm::Error>(())
//! ```

mod client;
mod protocol;
mod server;
mod store;

pub use client::{BrokerClient, Hold, Thing};
pub use protocol::{Lifetime, Reason, ThingKind};
pub use server::{Broker, BrokerThread};
pub use store::{BrokerStats, Limits};
