//! The caching allocator on trial, and whether a trial notices what is wrong.

use alloc_core::Addr;
use alloc_core::backend::Backend;
use mock_backend::trial::{Trial, TrialConf};
use mock_backend::workload::{Op, Shape, Workload};
use mock_backend::{Fault, Judged, MockBackend, Subject, Work};

use crate::rules::{DEV0, MIB};

/// All options at once.
const ALL: &str = "max_split_size_mb:24,garbage_collection_threshold:0.6,expandable_segments:True,\
                   roundup_power2_divisions:[1:4,2:2,>:8]";

fn shape() -> Shape {
    Shape { live: 40, limits: Some((64 * MIB, 512 * MIB)), ..Shape::default() }
}

#[track_caller]
fn run(conf: &TrialConf, shape: Shape) {
    for seed in 0..6 {
        let mut trial = Trial::new(conf);
        let mut ops = Workload::new(seed, shape).take(200);
        let result = ops.try_for_each(|op| trial.play(&op)).and_then(|()| trial.finish());
        if let Err(failure) = result {
            panic!("seed {seed}: {failure}");
        }
    }
}

#[test]
fn ordinary_segments_agree_with_the_model() {
    run(&TrialConf::pytorch("").capacity(256 * MIB), Shape { limits: None, ..shape() });
    run(&TrialConf::pytorch("max_split_size_mb:24,garbage_collection_threshold:0.6"), shape());
    run(&TrialConf::pytorch("").devices(2, 2), Shape { streams: 4, ..shape() });
}

#[test]
fn expandable_segments_agree_with_the_model() {
    let toggles = Shape { toggles: true, ..shape() };
    run(&TrialConf::pytorch("expandable_segments:True").capacity(512 * MIB), toggles);
    run(&TrialConf::pytorch(ALL).capacity(600 * MIB), toggles);
}

#[test]
fn the_judge_alone_suffices_without_a_model() {
    run(&TrialConf::ours("expandable_segments:True").capacity(512 * MIB), shape());
}

#[test]
fn work_may_end_by_chance() {
    let conf = TrialConf::pytorch("expandable_segments:True").capacity(512 * MIB);
    run(&conf.ends_by_chance(1, 0.2), shape());
}

#[test]
fn injected_failures_are_no_failures_of_the_trial() {
    let conf = TrialConf::pytorch("").capacity(256 * MIB).without_model();
    let mut struck = 0;
    for seed in 0..4 {
        let mut trial = Trial::new(&conf);
        trial.backend().set_faults([Fault::chance(seed, 0.1)]);
        for op in Workload::new(seed, shape()).take(300) {
            trial.play(&op).unwrap();
        }
        struck += trial.backend().fault_counts().1;
        trial.finish().unwrap();
    }
    assert!(struck > 20, "{struck}");
}

/// A trial of 20 operations, then something behind its back; what it says to that.
#[track_caller]
fn caught(behind_its_back: impl FnOnce(&Trial)) -> String {
    let mut trial = Trial::new(&TrialConf::pytorch(""));
    for _ in 0..20 {
        trial.play(&Op::Allocate { bytes: 5000, stream: 0 }).unwrap();
    }
    behind_its_back(&trial);
    let failure = trial.play(&Op::Sync).expect_err("it must notice");
    assert_eq!(failure.operation, 20);
    failure.what
}

#[test]
fn trials_notice_a_difference() {
    let what = caught(|trial| {
        let stream = trial.backend().default_stream(DEV0);
        trial.allocator().allocate_raw(512, &stream).unwrap();
    });
    assert!(what.starts_with("trace: the allocator has [(\"alloc\""), "{what}");
    let what = caught(|trial| trial.allocator().reset_peak_stats(DEV0).unwrap());
    assert!(what.starts_with("inactive_split_bytes.all.peak: the allocator has"), "{what}");
}

#[test]
fn trials_notice_a_broken_rule() {
    let what = caught(|trial| {
        trial.backend().launch(&trial.backend().default_stream(DEV0), {
            Work::new().touching(Addr::new(4096), 1)
        });
    });
    assert!(what.contains("UnallocatedUse"), "{what}");
}

#[test]
fn trials_notice_a_leak() {
    let trial = Trial::new(&TrialConf::pytorch("").without_model());
    let stream = trial.backend().default_stream(DEV0);
    let _kept = trial.backend().acquire(DEV0, 2 * MIB, &stream).unwrap();
    let failure = trial.finish().expect_err("a segment is left");
    assert!(failure.what.starts_with("left behind"), "{failure}");
}

/// An allocator that forgets who used a block is caught on the second hand-out.
#[test]
fn a_forgetful_allocator_is_caught() {
    struct Forgetful(Addr);
    impl Subject for Forgetful {
        type Error = ();
        fn allocate(&self, _: u64, _: &mock_backend::MockStream) -> Result<Addr, ()> {
            Ok(self.0)
        }
        fn free(&self, _: Addr) -> Result<(), ()> {
            Ok(())
        }
        fn record_stream(&self, _: Addr, _: &mock_backend::MockStream) -> Result<(), ()> {
            Ok(())
        }
    }
    let backend = MockBackend::new();
    let (main, side) = (backend.default_stream(DEV0), backend.stream(DEV0));
    let segment = backend.acquire(DEV0, 2 * MIB, &main).unwrap();
    let judged = Judged::new(backend, Forgetful(alloc_core::backend::Segment::base(&segment)));
    let a = judged.allocate(512, &main).unwrap();
    judged.use_on(a, &side).unwrap();
    judged.free(a).unwrap();
    assert!(judged.backend.violations().is_empty());
    judged.allocate(512, &main).unwrap();
    assert_eq!(judged.backend.violations()[0].rule, mock_backend::Rule::EarlyReuse);
}
