//! Vector clocks: what is known to have happened before what.

/// For each stream, how many of its items are known to come before the holder. Streams that are
/// not listed count 0.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock {
    /// (stream index, number of items), ascending by stream.
    entries: Vec<(usize, u64)>,
}

impl Clock {
    /// How many items of `stream` come before.
    pub(crate) fn get(&self, stream: usize) -> u64 {
        match self.entries.binary_search_by_key(&stream, |e| e.0) {
            Ok(at) => self.entries[at].1,
            Err(_) => 0,
        }
    }

    /// At least `items` items of `stream` come before.
    pub(crate) fn raise(&mut self, stream: usize, items: u64) {
        match self.entries.binary_search_by_key(&stream, |e| e.0) {
            Ok(at) => self.entries[at].1 = self.entries[at].1.max(items),
            Err(_) if items == 0 => {}
            Err(at) => self.entries.insert(at, (stream, items)),
        }
    }

    /// Everything before `other` comes before this one too.
    pub(crate) fn join(&mut self, other: &Clock) {
        for &(stream, items) in &other.entries {
            self.raise(stream, items);
        }
    }

    /// The streams listed.
    pub(crate) fn streams(&self) -> impl Iterator<Item = usize> + '_ {
        self.entries.iter().map(|e| e.0)
    }
}
