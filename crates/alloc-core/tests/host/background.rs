//! The background thread.

use crate::support::*;
use alloc_core::PoolId;
use alloc_core::backend::Stream;
use alloc_core::host::HostConfig;
use mock_backend::{Call, MockStream};
use std::time::Duration;

#[test]
fn the_background_thread_starts_with_the_first_miss_and_processes_events() {
    for mut config in [HostConfig::pytorch(), HostConfig::ours()] {
        config.background = true;
        config.background_period = Duration::from_millis(1);
        let rig = Rig::new(machine(), config);
        let stream = rig.stream();
        let a = rig.allocate(16 * MIB);
        rig.use_on(&a, &stream);
        rig.free(a);
        rig.backend.pass(&stream);
        while rig.host.stats().draining_bytes > 0 {
            std::thread::yield_now();
        }
        drop(rig.host);
        rig.backend.assert_clean();
    }
}

#[test]
fn with_the_thread_an_allocation_asks_for_its_own_class_and_on_a_miss_only() {
    let mut config = HostConfig::pytorch();
    config.background = true;
    config.background_period = Duration::from_secs(3600);
    let rig = Rig::new(machine(), config);
    let stream = rig.stream();
    let a = rig.allocate(64);
    let b = rig.allocate(4096);
    // The thread's first look may happen at any time, but never finds anything reached.
    rig.use_on(&a, &stream);
    rig.free(a);
    rig.free(b);
    std::thread::sleep(Duration::from_millis(20));
    let before = rig.calls(Call::Query);
    let b = rig.allocate(4096);
    assert_eq!(rig.calls(Call::Query), before, "a hit asks nothing");
    rig.backend.pass(&stream);
    let a = rig.allocate(64);
    assert_eq!(rig.calls(Call::Query), before + 1, "a miss asks, and is served");
    assert_eq!(rig.calls(Call::Pin), 2);
    rig.free(a);
    rig.free(b);
    rig.finish();
}

#[test]
fn the_default_period_is_a_tenth_of_a_second() {
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        assert_eq!(config.background_period, Duration::from_millis(100));
        assert!(!config.background);
    }
}

#[test]
fn the_thread_starts_when_it_is_asked_for_and_goes_on_when_it_is_not_any_more() {
    for config in [HostConfig::pytorch(), HostConfig::ours()] {
        let rig = Rig::new(machine(), quick(config));
        rig.host.apply("pinned_use_background_threads:False").expect("valid");
        let early = drain(&rig, MIB);
        std::thread::sleep(Duration::from_millis(20));
        assert!(rig.host.stats().draining_bytes > 0, "there is no thread");
        rig.host.apply("pinned_use_background_threads:True").expect("valid");
        let late = drain(&rig, 4 * MIB);
        rig.host.apply("pinned_use_background_threads:False").expect("valid");
        [early, late].iter().for_each(|stream| rig.backend.pass(stream));
        wait_until(|| rig.host.stats().draining_bytes == 0);
        rig.finish();
    }
}

/// Of a private pool each request looks at the events, thread or not.
#[test]
fn private_pools_do_without_the_thread() {
    let config = HostConfig { background: true, ..HostConfig::pytorch() };
    let period = Duration::from_secs(3600);
    let rig = Rig::new(machine(), HostConfig { background_period: period, ..config });
    let captured = rig.stream();
    let id = captured.id();
    rig.host.begin_allocate_to_pool(PoolId(1, 0), move |stream| stream == id).expect("new");
    let stream = drain(&rig, 4096);
    std::thread::sleep(Duration::from_millis(20));
    rig.backend.pass(&stream);
    let before = rig.calls(Call::Query);
    let block = rig.allocate_for(4096, &captured);
    assert_eq!(rig.calls(Call::Query), before + 1);
    assert_eq!(rig.host.stats().draining_bytes, 0);
    rig.host.end_allocate_to_pool(PoolId(1, 0)).expect("begun");
    rig.host.release_pool(PoolId(1, 0)).expect("ended");
    rig.free(block);
    rig.finish();
}

#[test]
fn the_thread_gives_back_what_is_old() {
    let age = Some(Duration::from_secs(60));
    let rig = Rig::new(machine(), HostConfig { cached_age_max: age, ..quick(HostConfig::ours()) });
    let block = rig.allocate(64 * MIB);
    rig.free(block);
    wait_until(|| {
        rig.backend.advance(20_000_000_000);
        rig.pinned() == 0
    });
    rig.finish();
}

/// With a thread that looks often.
fn quick(config: HostConfig) -> HostConfig {
    HostConfig { background: true, background_period: Duration::from_millis(1), ..config }
}

/// Frees a block that is in use on a stream.
fn drain(rig: &Rig, bytes: u64) -> MockStream {
    let stream = rig.stream();
    let block = rig.allocate(bytes);
    rig.use_on(&block, &stream);
    rig.free(block);
    stream
}

fn wait_until(mut is_so: impl FnMut() -> bool) {
    for _ in 0..10_000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("it did not come about within ten seconds");
}
