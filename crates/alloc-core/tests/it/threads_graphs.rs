//! Real threads that capture, replay and allocate at once, under the judge.

use crate::rig::*;
use alloc_core::{CachingAllocator, Policy};
use mock_backend::{CaptureMode, Judged, MockBackend, MockStream, Rng, Work};

const ROUNDS: usize = 60;
const EAGER_STEPS: usize = 1500;

type Subject = Judged<CachingAllocator<MockBackend>>;

/// Captures graphs on a stream of its own, with side streams, replays them and lets them go.
fn capturing(judged: &Subject, main: MockStream, side: MockStream, seed: u64) {
    let (alloc, backend) = (&judged.subject, &judged.backend);
    let mut rng = Rng::new(seed);
    for _ in 0..ROUNDS {
        let mut memory = alloc.graph_memory();
        memory.expect().unwrap();
        backend.begin_capture(&main, CaptureMode::ThreadLocal).unwrap();
        backend.judge().capture_shares(&main, number(memory.pool()));
        memory.begin(&main).unwrap();
        let mut kept = Vec::new();
        for _ in 0..rng.below(12) {
            let bytes = 1 + rng.below(3 * MIB);
            let block = judged.allocate(bytes, &main).unwrap();
            judged.launch_on(block, &main);
            if rng.chance(0.5) {
                backend.order(&main, &side);
                judged.use_on(block, &side).unwrap();
            }
            if rng.chance(0.5) && backend.is_capturing(&side) {
                backend.order(&side, &main);
            }
            if rng.chance(0.8) { judged.free(block).unwrap() } else { kept.push(block) }
        }
        if backend.is_capturing(&side) {
            backend.order(&side, &main);
        }
        if rng.chance(0.2) {
            backend.invalidate_capture(&main);
            backend.end_capture(&main).unwrap_err();
            memory.abort().unwrap();
        } else {
            let graph = backend.end_capture(&main).unwrap();
            memory.end().unwrap();
            for _ in 0..3 {
                backend.replay(&main, &graph);
                memory.note_replay(&main).unwrap();
            }
            drop(graph);
            memory.reset().unwrap();
        }
        kept.into_iter().for_each(|block| judged.free(block).unwrap());
    }
}

/// Allocates and frees on one stream, with uses on another.
fn eager(judged: &Subject, main: MockStream, side: MockStream, seed: u64) {
    let mut rng = Rng::new(seed);
    let mut live = Vec::new();
    for step in 0..EAGER_STEPS {
        let bytes = 1 + rng.below(2 * MIB);
        if let Ok(block) = judged.allocate(bytes, &main) {
            judged.backend.launch(&main, Work::new().touching(block, bytes));
            if rng.chance(0.3) {
                judged.use_on(block, &side).unwrap();
            }
            live.push(block);
        }
        if live.len() > 8 {
            let at = rng.below(live.len() as u64) as usize;
            judged.free(live.swap_remove(at)).unwrap();
        }
        if step % 200 == 0 {
            judged.subject.empty_cache().unwrap();
        }
    }
    live.into_iter().for_each(|block| judged.free(block).unwrap());
}

#[test]
fn threads_capture_and_allocate_at_once() {
    for policy in [Policy::Pytorch, Policy::Ours] {
        for options in ["expandable_segments:False", "expandable_segments:True"] {
            let options = format!("{options},graph_capture_record_stream_reuse:True");
            // Captures follow each other without a gap, in which memory could go back.
            let builder = MockBackend::builder().device(16 * GIB).strict().ends_by_chance(7, 0.3);
            let backend = builder.build();
            let allocator =
                CachingAllocator::with_virtual_memory(backend.clone(), config(policy, &options))
                    .unwrap();
            let judged = Judged::new(backend.clone(), allocator);
            std::thread::scope(|threads| {
                for n in 0..4 {
                    let [main, side] = [0; 2].map(|_| backend.stream(DEV0));
                    let judged = &judged;
                    threads.spawn(move || match n % 2 {
                        0 => capturing(judged, main, side, n),
                        _ => eager(judged, main, side, n),
                    });
                }
            });
            judged.subject.check().unwrap();
            judged.subject.empty_cache().unwrap();
            let stats = judged.subject.stats(DEV0).unwrap();
            assert_eq!(stats.get("reserved_bytes.all.current"), Some(0));
            assert!(judged.subject.pools(DEV0).unwrap().is_empty());
            judged.finish();
        }
    }
}
