//! Simulated streams: queues of work, events as positions in them, and what the host has seen.

use std::collections::{BTreeSet, VecDeque};

use alloc_core::backend::Stream;
use alloc_core::{Addr, DeviceId, StreamId};

use crate::clock::Clock;
use crate::ranges::RangeMap;

/// A stream of a [`MockBackend`](crate::MockBackend).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct MockStream {
    pub(crate) backend: u32,
    pub(crate) index: usize,
    pub(crate) device: DeviceId,
}

impl Stream for MockStream {
    fn id(&self) -> StreamId {
        id_of(self.index)
    }

    fn device(&self) -> DeviceId {
        self.device
    }
}

/// Ids are the order of creation.
pub(crate) fn id_of(index: usize) -> StreamId {
    StreamId::new(index as u64)
}

/// Work for a stream: which memory it touches and when it ends.
///
/// Without [`lasting`](Work::lasting) it runs until somebody ends it: the test
/// ([`pass`](crate::MockBackend::pass) and its like), the host by waiting for it, or the seed
/// ([`Builder::ends_by_chance`](crate::Builder::ends_by_chance)).
#[derive(Clone, Debug, Default)]
pub struct Work {
    pub(crate) ranges: Vec<(Addr, u64)>,
    pub(crate) end: End,
}

/// When a piece of work ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum End {
    /// When told, by a host wait, or by chance.
    #[default]
    Open,
    /// When told or by a host wait, never by chance.
    Told,
    /// This many nanoseconds after the work before it on its stream.
    After(u64),
}

impl Work {
    /// Work that touches nothing yet.
    pub fn new() -> Self {
        Work::default()
    }

    /// It reads or writes `bytes` from `addr` on.
    pub fn touching(mut self, addr: Addr, bytes: u64) -> Self {
        self.ranges.push((addr, bytes));
        self
    }

    /// It ends `ns` nanoseconds of simulated time after the work before it.
    pub fn lasting(mut self, ns: u64) -> Self {
        self.end = End::After(ns);
        self
    }

    /// It never ends by chance.
    pub fn endless(mut self) -> Self {
        self.end = End::Told;
        self
    }
}

/// One line of order: a stream, or a stream within a capture.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lane {
    /// Items queued so far; the number of the latest one.
    pub(crate) queued: u64,
    /// What the next item comes after, other than the lane's own items.
    pub(crate) clock: Clock,
    /// Physical ranges → number of the latest item that touches them.
    pub(crate) touched: RangeMap<u64>,
    /// The same for replays of graphs.
    pub(crate) replayed: RangeMap<u64>,
}

impl Lane {
    /// Everything that an event recorded now on `stream` comes after.
    pub(crate) fn now(&self, stream: usize) -> Clock {
        let mut clock = self.clock.clone();
        clock.raise(stream, self.queued);
        clock
    }
}

#[derive(Debug)]
enum Step {
    Work(End),
    /// Waits until `items` items of `stream` are done; `done_ns` is when they were.
    After {
        stream: usize,
        items: u64,
        done_ns: Option<u64>,
    },
}

#[derive(Debug)]
struct Item {
    step: Step,
    queued_ns: u64,
}

#[derive(Debug)]
pub(crate) struct StreamState {
    pub(crate) device: DeviceId,
    pub(crate) lane: Lane,
    /// Addresses → number of the latest item that touches them through these addresses.
    pub(crate) touched_addrs: RangeMap<u64>,
    queue: VecDeque<Item>,
    completed: u64,
    last_end_ns: u64,
}

/// How unfinished work comes to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ending {
    /// The test says so: it ends now.
    Told,
    /// The host waits: time passes until it ends.
    Waited,
}

/// All streams of a backend.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    pub(crate) all: Vec<StreamState>,
    /// Work that the host knows to be finished.
    pub(crate) host: Clock,
    pub(crate) now_ns: u64,
    /// Streams whose queue is not empty.
    busy: BTreeSet<usize>,
}

impl Streams {
    pub(crate) fn add(&mut self, device: DeviceId) -> usize {
        self.all.push(StreamState {
            device,
            lane: Lane::default(),
            touched_addrs: RangeMap::default(),
            queue: VecDeque::new(),
            completed: 0,
            last_end_ns: 0,
        });
        self.all.len() - 1
    }

    /// Indices of the streams of `device`.
    pub(crate) fn of_device(&self, device: DeviceId) -> Vec<usize> {
        (0..self.all.len()).filter(|&s| self.all[s].device == device).collect()
    }

    /// Queues work; its number.
    pub(crate) fn queue_work(&mut self, stream: usize, end: End) -> u64 {
        self.queue(stream, Step::Work(end))
    }

    /// Orders what follows on `stream` after the event (`clock` is what the event comes after).
    pub(crate) fn queue_after(&mut self, stream: usize, on: (usize, u64), clock: &Clock) {
        let done_ns = (self.all[on.0].completed >= on.1).then_some(0);
        self.queue(stream, Step::After { stream: on.0, items: on.1, done_ns });
        self.all[stream].lane.clock.join(clock);
        self.settle();
    }

    fn queue(&mut self, stream: usize, step: Step) -> u64 {
        let item = Item { step, queued_ns: self.now_ns };
        let state = &mut self.all[stream];
        state.queue.push_back(item);
        state.lane.queued += 1;
        self.busy.insert(stream);
        self.all[stream].lane.queued
    }

    /// Whether the first `items` items of `stream` are done.
    pub(crate) fn reached(&self, stream: usize, items: u64) -> bool {
        self.all[stream].completed >= items
    }

    /// Whether `stream` has unfinished items.
    pub(crate) fn is_busy(&self, stream: usize) -> bool {
        self.busy.contains(&stream)
    }

    /// Ends everything that ends by itself by now.
    pub(crate) fn settle(&mut self) {
        loop {
            let ended: Vec<(usize, u64)> = self
                .busy
                .iter()
                .filter_map(|&s| Some((s, self.natural_end(s).filter(|&e| e <= self.now_ns)?)))
                .collect();
            if ended.is_empty() {
                return;
            }
            for (stream, end_ns) in ended {
                self.end_first(stream, end_ns);
            }
        }
    }

    /// Lets the first unfinished item of each stream end with probability `p`, if it may.
    pub(crate) fn end_by_chance(&mut self, mut chance: impl FnMut() -> bool) {
        for stream in self.busy.clone() {
            let open = matches!(
                self.all[stream].queue.front(),
                Some(Item { step: Step::Work(End::Open), .. })
            );
            if open && chance() {
                self.end_first(stream, self.now_ns);
            }
        }
        self.settle();
    }

    /// Ends the first unfinished work of `stream`; `false` if there is none or it still waits for
    /// another stream.
    pub(crate) fn end_next(&mut self, stream: usize) -> bool {
        let first = self.all[stream].queue.front();
        let is_work = matches!(first, Some(Item { step: Step::Work(_), .. }));
        if is_work {
            self.end_first(stream, self.now_ns);
            self.settle();
        }
        is_work
    }

    /// Ends the first `items` items of `stream` and whatever they wait for. Returns the streams
    /// that had unfinished work among them.
    pub(crate) fn end_through(
        &mut self,
        stream: usize,
        items: u64,
        ending: Ending,
    ) -> BTreeSet<usize> {
        let mut forced = BTreeSet::new();
        let mut goals = vec![(stream, items)];
        while let Some(&(stream, items)) = goals.last() {
            let Some(first) = self.all[stream].queue.front() else {
                goals.pop();
                continue;
            };
            if self.all[stream].completed >= items {
                goals.pop();
                continue;
            }
            let start_ns = self.all[stream].last_end_ns.max(first.queued_ns);
            let end_ns = match &first.step {
                Step::After { stream, items, done_ns: None } => {
                    goals.push((*stream, *items));
                    continue;
                }
                Step::After { done_ns: Some(done_ns), .. } => start_ns.max(*done_ns),
                Step::Work(End::After(ns)) if ending == Ending::Waited => start_ns + ns,
                Step::Work(_) => start_ns.max(self.now_ns),
            };
            if matches!(first.step, Step::Work(_)) {
                forced.insert(stream);
            }
            if ending == Ending::Waited {
                self.now_ns = self.now_ns.max(end_ns);
            }
            self.end_first(stream, end_ns.min(self.now_ns));
        }
        self.settle();
        forced
    }

    /// The host learns that everything before `clock` is done.
    pub(crate) fn observe(&mut self, clock: &Clock) {
        self.host.join(clock);
        for stream in clock.streams() {
            let seen = self.host.get(stream);
            let state = &mut self.all[stream];
            if seen >= state.lane.queued {
                state.lane.touched.clear();
                state.lane.replayed.clear();
                state.touched_addrs.clear();
            } else if state.lane.touched.len() + state.lane.replayed.len() > 256 {
                state.lane.touched.retain(|item| item > seen);
                state.lane.replayed.retain(|item| item > seen);
                state.touched_addrs.retain(|item| item > seen);
            }
        }
    }

    /// When the first item of `stream` ends by itself, if that is known.
    fn natural_end(&self, stream: usize) -> Option<u64> {
        let state = &self.all[stream];
        let first = state.queue.front()?;
        let start_ns = state.last_end_ns.max(first.queued_ns);
        match first.step {
            Step::Work(End::After(ns)) => Some(start_ns + ns),
            Step::Work(_) => None,
            Step::After { done_ns, .. } => done_ns.map(|done| done.max(start_ns)),
        }
    }

    fn end_first(&mut self, stream: usize, end_ns: u64) {
        let state = &mut self.all[stream];
        state.queue.pop_front();
        state.completed += 1;
        state.last_end_ns = end_ns;
        let completed = state.completed;
        if state.queue.is_empty() {
            self.busy.remove(&stream);
        }
        self.tell_waiting(stream, completed, end_ns);
    }

    /// Items that wait for an item of `ended` learn when it was done.
    fn tell_waiting(&mut self, ended: usize, completed: u64, end_ns: u64) {
        for &waiting in &self.busy {
            for item in &mut self.all[waiting].queue {
                match &mut item.step {
                    Step::After { stream, items, done_ns: done @ None }
                        if *stream == ended && *items <= completed =>
                    {
                        *done = Some(end_ns);
                    }
                    _ => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Streams {
        let mut streams = Streams::default();
        streams.add(DeviceId::new(0));
        streams.add(DeviceId::new(0));
        streams
    }

    fn after(streams: &mut Streams, stream: usize, on: usize) {
        let clock = streams.all[on].lane.now(on);
        let items = streams.all[on].lane.queued;
        streams.queue_after(stream, (on, items), &clock);
    }

    #[test]
    fn work_ends_in_order_on_the_clock() {
        let mut streams = two();
        streams.queue_work(0, End::After(10));
        streams.queue_work(0, End::After(5));
        after(&mut streams, 1, 0);
        streams.queue_work(1, End::After(100));
        streams.now_ns = 14;
        streams.settle();
        assert!(streams.reached(0, 1) && !streams.reached(0, 2) && !streams.reached(1, 1));
        streams.now_ns = 114;
        streams.settle();
        assert!(streams.reached(0, 2) && streams.reached(1, 1) && !streams.reached(1, 2));
        streams.now_ns = 115;
        streams.settle();
        assert!(streams.reached(1, 2) && !streams.is_busy(1));
    }

    #[test]
    fn a_host_wait_takes_as_long_as_the_work() {
        let mut streams = two();
        streams.queue_work(0, End::After(10));
        streams.queue_work(0, End::After(1000));
        let clock = streams.all[0].lane.now(0);
        streams.queue_after(1, (0, 1), &clock);
        streams.queue_work(1, End::After(5));
        assert_eq!(streams.end_through(1, 2, Ending::Waited), BTreeSet::from([0, 1]));
        assert_eq!(streams.now_ns, 15);
        assert!(!streams.reached(0, 2));
    }

    #[test]
    fn told_work_ends_now_and_takes_what_it_waits_for_along() {
        let mut streams = two();
        streams.queue_work(0, End::Told);
        after(&mut streams, 1, 0);
        streams.queue_work(1, End::After(50));
        assert!(!streams.end_next(1), "it waits for stream 0");
        assert_eq!(streams.end_through(1, 2, Ending::Told), BTreeSet::from([0, 1]));
        assert_eq!(streams.now_ns, 0);
        assert!(!streams.is_busy(0) && !streams.is_busy(1));
    }

    #[test]
    fn chance_spares_endless_work() {
        let mut streams = two();
        streams.queue_work(0, End::Told);
        streams.queue_work(1, End::Open);
        streams.end_by_chance(|| true);
        assert!(streams.is_busy(0) && !streams.is_busy(1));
    }
}
