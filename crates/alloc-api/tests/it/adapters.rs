//! Reports as they arrive at `tracing` and `metrics`.

use alloc_api::Device;
use alloc_api::report::{
    self, MemoryReporter, MemoryUsage, MetricsReporter, OutOfMemory, TracingReporter,
};
use alloc_core::Addr;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

fn story() {
    let device = Device::cuda(1);
    let usage = |delta, allocated| MemoryUsage {
        addr: Addr::new(0x200),
        delta,
        allocated,
        reserved: 4096,
        device,
    };
    report::usage(|| usage(512, 512));
    report::usage(|| usage(-512, 0));
    report::out_of_memory(|| OutOfMemory { bytes: 9, allocated: 0, reserved: 4096, device });
}

fn observed(reporter: Arc<dyn MemoryReporter>) {
    let _scope = report::scope(reporter);
    story();
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

struct Fields<'a>(&'a mut String);

impl tracing::field::Visit for Fields<'_> {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

impl<S: tracing::Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut line = format!("{} {}", event.metadata().level(), event.metadata().target());
        event.record(&mut Fields(&mut line));
        self.0.lock().push(line);
    }
}

#[test]
fn reports_become_events_of_tracing() {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::registry().with(lines.clone());
    tracing::subscriber::with_default(subscriber, || observed(Arc::new(TracingReporter)));
    let lines = lines.0.lock();
    assert_eq!(lines.len(), 3);
    for (line, words) in lines.iter().zip([
        &["TRACE gpu_alloc::memory", "message=allocate", "delta=512", "device=cuda:1", "addr=512"]
            [..],
        &["TRACE gpu_alloc::memory", "message=free", "delta=-512", "allocated=0"],
        &["WARN gpu_alloc::memory", "message=out of memory", "bytes=9", "reserved=4096"],
    ]) {
        words.iter().for_each(|word| assert!(line.contains(word), "{word} in {line}"));
    }
}

#[test]
fn the_tracing_reporter_listens_only_if_somebody_does() {
    assert!(!TracingReporter.is_enabled());
}

#[test]
fn reports_become_metrics() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || observed(Arc::new(MetricsReporter)));
    let values: BTreeMap<String, DebugValue> = snapshotter
        .snapshot()
        .into_vec()
        .into_iter()
        .map(|(key, _, _, value)| {
            let key = key.key();
            let labels: Vec<_> = key.labels().map(|l| (l.key(), l.value())).collect();
            assert_eq!(labels, [("device", "cuda:1")]);
            (key.name().to_owned(), value)
        })
        .collect();
    for (name, value) in [
        ("gpu_alloc_allocations_total", DebugValue::Counter(1)),
        ("gpu_alloc_frees_total", DebugValue::Counter(1)),
        ("gpu_alloc_allocated_bytes_total", DebugValue::Counter(512)),
        ("gpu_alloc_freed_bytes_total", DebugValue::Counter(512)),
        ("gpu_alloc_out_of_memory_total", DebugValue::Counter(1)),
        ("gpu_alloc_allocated_bytes", DebugValue::Gauge(0.0.into())),
        ("gpu_alloc_reserved_bytes", DebugValue::Gauge(4096.0.into())),
    ] {
        assert_eq!(values.get(name), Some(&value), "{name}");
    }
}
