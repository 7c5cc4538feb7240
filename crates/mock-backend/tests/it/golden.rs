//! The reference allocator against recordings of PyTorch on a GPU: every address, every statistic
//! after every operation, every entry of the history, exactly.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use alloc_core::{Addr, StreamId};
use flate2::read::GzDecoder;
use mock_backend::SpanKind;
use mock_backend::model::{Model, ModelAction, ModelConf};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Recording {
    conf: String,
    streams: u64,
    device_total: u64,
    stat_keys: Vec<String>,
    ops: Vec<Op>,
    trace: Vec<Entry>,
}

#[derive(Deserialize)]
struct Op {
    op: Vec<Value>,
    ptr: Option<u64>,
    stats: Vec<i64>,
}

/// Action, address, size, stream.
#[derive(Deserialize)]
struct Entry(String, u64, u64, u64);

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../alloc-lab/tests/golden")
}

fn read(name: &str) -> Recording {
    let file = File::open(folder().join(format!("{name}.json.gz"))).unwrap();
    serde_json::from_reader(std::io::BufReader::new(GzDecoder::new(file))).unwrap()
}

/// Replays a recording; compares as it goes.
struct Replay {
    name: String,
    recording: Recording,
    model: Model,
    /// `segment_map` entries produced so far: the next reservation begins at the next of them.
    maps_seen: Arc<AtomicUsize>,
    produced: usize,
    addrs: HashMap<u64, Addr>,
}

impl Replay {
    fn new(name: &str) -> Self {
        let recording = read(name);
        let of = |action: &str| -> Vec<Addr> {
            let entries = recording.trace.iter().filter(|e| e.0 == action);
            entries.map(|e| Addr::new(e.1)).collect()
        };
        let mut segments = VecDeque::from(of("segment_alloc"));
        let maps = of("segment_map");
        let maps_seen = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&maps_seen);
        let addresses = move |kind, _bytes| match kind {
            SpanKind::Segment => segments.pop_front().expect("one more segment than recorded"),
            SpanKind::Reservation => maps[seen.load(Ordering::Relaxed)],
        };
        let conf = ModelConf::parse(&recording.conf).expect("settings are understood");
        let mut model = Model::new(conf, Box::new(addresses));
        let device = model.add_device(u64::MAX, recording.device_total);
        for stream in 0..recording.streams {
            model.add_stream(StreamId::new(stream), device);
        }
        let (name, addrs) = (name.to_owned(), HashMap::new());
        Replay { name, recording, model, maps_seen, produced: 0, addrs }
    }

    fn run(mut self) {
        for at in 0..self.recording.ops.len() {
            self.step(at);
            self.compare(at);
        }
        assert_eq!(self.produced, self.recording.trace.len(), "{}: entries left over", self.name);
    }

    fn step(&mut self, at: usize) {
        let Op { op, ptr, .. } = &self.recording.ops[at];
        let number = |i: usize| op[i].as_u64().unwrap();
        let stream = |i: usize| StreamId::new(number(i));
        let device = alloc_core::DeviceId::new(0);
        match op[0].as_str().unwrap() {
            "cap" => self.model.set_limit(device, Some(number(1))),
            "alloc" => {
                let addr = self.model.allocate(number(2), stream(3)).unwrap_or(Addr::NULL);
                assert_eq!(Some(addr.get()), *ptr, "{}: address at operation {at}", self.name);
                self.addrs.insert(number(1), addr);
            }
            "free" => self.model.free(self.addrs[&number(1)]),
            "record_stream" => self.model.record_stream(self.addrs[&number(1)], stream(2)),
            "busy" => self.model.busy(stream(1)),
            "sync" => self.model.sync(),
            "empty_cache" => self.model.empty_cache(),
            "reset_peak" => self.model.reset_peak(device),
            "reset_accumulated" => self.model.reset_accumulated(device),
            "expandable" => self.model.set_expandable(op[1].as_bool().unwrap()),
            other => panic!("{}: unknown operation {other}", self.name),
        }
    }

    fn compare(&mut self, at: usize) {
        let stats = self.model.stats(alloc_core::DeviceId::new(0));
        for (key, &expected) in self.recording.stat_keys.iter().zip(&self.recording.ops[at].stats) {
            assert_eq!(stats.get(key), Some(expected), "{}: {key} after operation {at}", self.name);
        }
        for entry in self.model.take_trace() {
            let expected = self.recording.trace.get(self.produced);
            let Some(Entry(action, addr, bytes, stream)) = expected else {
                panic!("{}: surplus {entry:?} at operation {at}", self.name);
            };
            let same_addr = entry.addr.get() == *addr || entry.action == ModelAction::Oom;
            let same = entry.action.name() == action && entry.bytes == *bytes;
            assert!(
                same && same_addr && entry.stream.get() == *stream,
                "{}: operation {at} made {entry:?}, recorded {action} {addr:#x} {bytes} {stream}",
                self.name
            );
            self.produced += 1;
            if entry.action == ModelAction::SegmentMap {
                self.maps_seen.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

macro_rules! recordings {
    ($($test:ident = $name:literal;)*) => {
        $(#[test]
        fn $test() {
            Replay::new($name).run();
        })*

        /// Every recording of the folder is tested, but those of pools and captures, which the
        /// reference does not have.
        #[test]
        fn none_is_left_out() {
            let mut found: Vec<String> = std::fs::read_dir(folder())
                .unwrap()
                .filter_map(|entry| entry.unwrap().file_name().into_string().ok())
                .filter_map(|file| Some(file.strip_suffix(".json.gz")?.to_owned()))
                .filter(|name| !name.starts_with("pools-") && !name.starts_with("graphs-"))
                .collect();
            found.sort();
            assert_eq!(found, [$($name),*]);
        }
    };
}

recordings! {
    default_large = "default-large";
    default_multi = "default-multi";
    default_one = "default-one";
    exp_churn0 = "exp-churn0";
    exp_gc = "exp-gc";
    exp_one = "exp-one";
    exp_tight = "exp-tight";
    exp_toggle = "exp-toggle";
    gc = "gc";
    gc5_large = "gc5-large";
    lseg64 = "lseg64";
    nonsplit = "nonsplit";
    rlist_rest = "rlist-rest";
    roundup4 = "roundup4";
    stats_full = "stats-full";
    streams = "streams";
    tight_default = "tight-default";
    tight_split = "tight-split";
}
