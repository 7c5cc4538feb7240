//! What the broker holds, and who holds it there: plain bookkeeping over handles of any type.

use crate::broker::protocol::{Body, Lifetime, Reason};
use std::collections::{BTreeMap, HashMap};

/// Limits of a broker. What would pass one is refused, and nothing else changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Clients connected at a time.
    pub clients: usize,
    /// Things held at a time; each costs the broker at most one descriptor.
    pub things: usize,
    /// Bytes of all things together.
    pub bytes: u64,
    /// Things that one client has put and that are still there.
    pub things_per_client: usize,
}

impl Default for Limits {
    /// 256 clients, 512 things, 256 of one client, 64 GiB.
    fn default() -> Self {
        Limits { clients: 256, things: 512, bytes: 64 << 30, things_per_client: 256 }
    }
}

/// Counters of a broker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BrokerStats {
    /// Clients connected, the asking one included.
    pub clients: u64,
    /// Things held.
    pub things: u64,
    /// Bytes of all things together.
    pub bytes: u64,
    /// Holds of all clients on all things.
    pub holds: u64,
}

/// A client, for the life of the broker.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct ClientId(pub(crate) u64);

/// A thing and its holders.
#[derive(Debug)]
pub(crate) struct Entry<H> {
    pub(crate) body: Body,
    pub(crate) handle: Option<H>,
    /// Bytes that count against the limit.
    charged: u64,
    maker: ClientId,
    holds: BTreeMap<ClientId, u64>,
    /// Still to be found by name.
    listed: bool,
}

/// Things by generation, and names of those that are listed.
#[derive(Debug)]
pub(crate) struct Store<H> {
    limits: Limits,
    things: BTreeMap<u64, Entry<H>>,
    names: HashMap<String, u64>,
    bytes: u64,
    generation: u64,
}

impl<H> Store<H> {
    pub(crate) fn new(limits: Limits) -> Self {
        let (things, names) = (BTreeMap::new(), HashMap::new());
        Store { limits, things, names, bytes: 0, generation: 0 }
    }

    /// Takes a thing, held once by `client`; answers its generation.
    pub(crate) fn put(
        &mut self,
        client: ClientId,
        body: Body,
        handle: Option<H>,
        charged: u64,
    ) -> Result<u64, Reason> {
        let by_client = self.things.values().filter(|entry| entry.maker == client).count();
        if self.names.contains_key(&body.name) {
            return Err(Reason::Taken);
        }
        if self.things.len() >= self.limits.things || by_client >= self.limits.things_per_client {
            return Err(Reason::TooManyThings);
        }
        if charged > self.limits.bytes - self.bytes {
            return Err(Reason::TooManyBytes);
        }
        self.generation += 1;
        let generation = self.generation;
        self.bytes += charged;
        self.names.insert(body.name.clone(), generation);
        let body = Body { generation, ..body };
        let holds = BTreeMap::from([(client, 1)]);
        let entry = Entry { body, handle, charged, maker: client, holds, listed: true };
        self.things.insert(generation, entry);
        Ok(generation)
    }

    /// The thing of that name, held once more by `client`.
    pub(crate) fn get(&mut self, client: ClientId, name: &str) -> Result<&Entry<H>, Reason> {
        let generation = self.names.get(name).ok_or(Reason::Unknown)?;
        let entry = self.things.get_mut(generation).ok_or(Reason::Unknown)?;
        *entry.holds.entry(client).or_default() += 1;
        Ok(entry)
    }

    /// Ends one hold of `client`.
    pub(crate) fn release(&mut self, client: ClientId, generation: u64) -> Result<(), Reason> {
        let entry = self.things.get_mut(&generation).ok_or(Reason::NotHeld)?;
        let holds = entry.holds.get_mut(&client).ok_or(Reason::NotHeld)?;
        *holds -= 1;
        if *holds == 0 {
            entry.holds.remove(&client);
            self.drop_if_unused(generation);
        }
        Ok(())
    }

    /// Takes the name away: nobody else gets the thing, and it goes with its last hold.
    pub(crate) fn remove(&mut self, name: &str) -> Result<(), Reason> {
        let generation = self.names.remove(name).ok_or(Reason::Unknown)?;
        if let Some(entry) = self.things.get_mut(&generation) {
            entry.listed = false;
        }
        self.drop_if_unused(generation);
        Ok(())
    }

    /// Ends every hold of a client that is gone.
    pub(crate) fn client_gone(&mut self, client: ClientId) {
        let held = self
            .things
            .iter_mut()
            .filter_map(|(&generation, entry)| entry.holds.remove(&client).map(|_| generation));
        let held: Vec<u64> = held.collect();
        held.into_iter().for_each(|generation| self.drop_if_unused(generation));
    }

    fn drop_if_unused(&mut self, generation: u64) {
        let Some(entry) = self.things.get(&generation) else { return };
        let kept = entry.listed && entry.body.lifetime == Lifetime::Kept;
        if kept || !entry.holds.is_empty() {
            return;
        }
        if entry.listed {
            self.names.remove(&entry.body.name);
        }
        self.bytes -= entry.charged;
        self.things.remove(&generation);
    }

    /// The counters, but for the clients, whom the store does not know.
    pub(crate) fn stats(&self) -> BrokerStats {
        let holds = self.things.values().flat_map(|entry| entry.holds.values()).sum();
        BrokerStats { clients: 0, things: self.things.len() as u64, bytes: self.bytes, holds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::rc::Rc;

    const LIMITS: Limits = Limits { clients: 9, things: 4, bytes: 1000, things_per_client: 3 };

    #[derive(Clone, Debug)]
    enum Op {
        Put { client: u64, name: u8, kept: bool, bytes: u64 },
        Get { client: u64, name: u8 },
        Release { client: u64, generation: u64 },
        Remove { name: u8 },
        Gone { client: u64 },
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let (client, name) = (0u64..4, 0u8..5);
        let op = prop_oneof![
            3 => (client.clone(), name.clone(), any::<bool>(), 0u64..500)
                .prop_map(|(client, name, kept, bytes)| Op::Put { client, name, kept, bytes }),
            3 => (client.clone(), name.clone())
                .prop_map(|(client, name)| Op::Get { client, name }),
            3 => (client.clone(), 0u64..30)
                .prop_map(|(client, generation)| Op::Release { client, generation }),
            1 => name.prop_map(|name| Op::Remove { name }),
            1 => client.prop_map(|client| Op::Gone { client }),
        ];
        proptest::collection::vec(op, 1..80)
    }

    /// The same rules, over a plain list.
    #[derive(Default)]
    struct Model {
        things: Vec<Modelled>,
        made: u64,
    }

    struct Modelled {
        generation: u64,
        name: u8,
        listed: bool,
        kept: bool,
        bytes: u64,
        maker: u64,
        holds: Vec<u64>,
    }

    impl Model {
        fn apply(&mut self, op: &Op) -> bool {
            let done = match *op {
                Op::Put { client, name, kept, bytes } => {
                    let total: u64 = self.things.iter().map(|t| t.bytes).sum();
                    let mine = self.things.iter().filter(|t| t.maker == client).count();
                    let fits = self.things.len() < LIMITS.things
                        && mine < LIMITS.things_per_client
                        && total + bytes <= LIMITS.bytes
                        && !self.things.iter().any(|t| t.listed && t.name == name);
                    if fits {
                        self.made += 1;
                        let (generation, holds) = (self.made, vec![client]);
                        let (listed, maker) = (true, client);
                        self.things.push(Modelled {
                            generation,
                            name,
                            listed,
                            kept,
                            bytes,
                            maker,
                            holds,
                        });
                    }
                    fits
                }
                Op::Get { client, name } => {
                    let found = self.things.iter_mut().find(|t| t.listed && t.name == name);
                    found.map(|t| t.holds.push(client)).is_some()
                }
                Op::Release { client, generation } => {
                    let found = self.things.iter_mut().find(|t| t.generation == generation);
                    let hold = found.and_then(|t| {
                        let at = t.holds.iter().position(|&c| c == client)?;
                        Some(t.holds.swap_remove(at))
                    });
                    hold.is_some()
                }
                Op::Remove { name } => {
                    let found = self.things.iter_mut().find(|t| t.listed && t.name == name);
                    found.map(|t| t.listed = false).is_some()
                }
                Op::Gone { client } => {
                    self.things.iter_mut().for_each(|t| t.holds.retain(|&c| c != client));
                    true
                }
            };
            self.things.retain(|t| (t.listed && t.kept) || !t.holds.is_empty());
            done
        }
    }

    fn apply(store: &mut Store<Rc<()>>, op: &Op, handle: &Rc<()>) -> bool {
        let id = ClientId;
        match *op {
            Op::Put { client, name, kept, bytes } => {
                let lifetime = if kept { Lifetime::Kept } else { Lifetime::Held };
                let body = Body { lifetime, ..Body::named(&name.to_string()) };
                store.put(id(client), body, Some(handle.clone()), bytes).is_ok()
            }
            Op::Get { client, name } => store.get(id(client), &name.to_string()).is_ok(),
            Op::Release { client, generation } => store.release(id(client), generation).is_ok(),
            Op::Remove { name } => store.remove(&name.to_string()).is_ok(),
            Op::Gone { client } => {
                store.client_gone(id(client));
                true
            }
        }
    }

    proptest! {
        #[test]
        fn agrees_with_a_naive_model_after_every_operation(ops in ops()) {
            let handle = Rc::new(());
            let mut store = Store::new(LIMITS);
            let mut model = Model::default();
            for op in ops {
                prop_assert_eq!(apply(&mut store, &op, &handle), model.apply(&op), "{:?}", op);
                let expected = BrokerStats {
                    clients: 0,
                    things: model.things.len() as u64,
                    bytes: model.things.iter().map(|t| t.bytes).sum(),
                    holds: model.things.iter().map(|t| t.holds.len() as u64).sum(),
                };
                prop_assert_eq!(store.stats(), expected, "{:?}", op);
                prop_assert_eq!(Rc::strong_count(&handle), model.things.len() + 1);
                let listed = model.things.iter().filter(|t| t.listed).count();
                prop_assert_eq!(store.names.len(), listed);
            }
        }
    }
}
