//! Random operations on several streams, under the judge, with every kind of reuse; and threads.

use crate::{MIB, Rig, rig_on};
use alloc_core::ordered::{OrderedConfig, PoolOptions, PoolReuse};
use alloc_core::{Addr, DeviceId};
use mock_backend::{MockBackend, MockStream, Rng, Work};

struct Held {
    addr: Addr,
    bytes: u64,
    home: usize,
}

/// Plays `steps` operations of a seed.
fn play(rig: &Rig, streams: &[MockStream], rng: &mut Rng, steps: u32) {
    let mut held: Vec<Held> = Vec::new();
    for _ in 0..steps {
        match rng.below(10) {
            0..=3 => {
                let (bytes, home) = (1 + rng.below(3 * MIB), rng.below(streams.len() as u64));
                let home = home as usize;
                let Ok(addr) = rig.pool.allocate(bytes, &streams[home]) else { continue };
                rig.gpu.judge().allocated(addr, bytes, &streams[home]);
                held.push(Held { addr, bytes, home });
            }
            4..=6 if !held.is_empty() => {
                let Held { addr, bytes, home } = held[rng.below(held.len() as u64) as usize];
                let on = rng.below(streams.len() as u64) as usize;
                if on != home {
                    rig.gpu.order(&streams[home], &streams[on]);
                }
                rig.gpu.launch(&streams[on], Work::new().touching(addr, bytes));
                rig.pool.record_use(addr, &streams[on]).unwrap();
            }
            7..=8 if !held.is_empty() => {
                let at = rng.below(held.len() as u64) as usize;
                rig.free(held.swap_remove(at).addr);
            }
            9 if rng.below(20) == 0 => rig.pool.empty_cache().unwrap(),
            _ => {}
        }
    }
    held.into_iter().for_each(|held| rig.free(held.addr));
    assert_eq!(rig.pool.allocated(), 0);
}

#[test]
fn the_judge_finds_nothing_with_any_kind_of_reuse() {
    for seed in 0..32_u64 {
        let bit = |n: u64| seed >> n & 1 == 1;
        let reuse = PoolReuse {
            follow_events: bit(0),
            opportunistic: bit(1),
            internal_dependencies: bit(2),
        };
        let release_threshold = if bit(3) { u64::MAX } else { 4 * MIB };
        let options = PoolOptions { reuse, release_threshold };
        let config = OrderedConfig { options, ..OrderedConfig::private_pool(None) };
        let gpu = MockBackend::builder().device(48 * MIB).ends_by_chance(seed, 0.2).strict();
        let rig = rig_on(gpu.build(), config);
        let streams = [rig.s0, rig.s1, rig.gpu.stream(DeviceId::new(0))];
        play(&rig, &streams, &mut Rng::new(seed), 2000);
        drop(rig.pool);
        rig.gpu.sync();
        rig.gpu.assert_clean();
    }
}

#[test]
fn threads_share_an_allocator() {
    let gpu = MockBackend::builder().device(1 << 30).strict().build();
    let rig = rig_on(gpu, OrderedConfig::default_pool());
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let rig = &rig;
            scope.spawn(move || {
                let streams = [(); 2].map(|()| rig.gpu.stream(DeviceId::new(0)));
                let mut rng = Rng::new(seed);
                for _ in 0..1000 {
                    let bytes = 1 + rng.below(MIB);
                    let addr = rig.allocate(bytes, &streams[0]);
                    rig.gpu.order(&streams[0], &streams[1]);
                    rig.gpu.launch(&streams[1], Work::new().touching(addr, bytes));
                    rig.pool.record_use(addr, &streams[1]).unwrap();
                    rig.free(addr);
                }
            });
        }
    });
    assert_eq!(rig.pool.allocated(), 0);
    drop(rig.pool);
    rig.gpu.assert_clean();
}
