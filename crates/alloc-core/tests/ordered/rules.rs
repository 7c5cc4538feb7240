//! Each rule of stream-ordered memory (spec §9.1), and the errors.

use crate::{DEV0, MIB, rig, rig_on};
use alloc_core::backend::{BackendError, ErrorKind, Stream};
use alloc_core::ordered::{
    OrderedAllocator, OrderedConfig, OrderedError, PoolChoice, PoolOptions, PoolReuse,
};
use alloc_core::{Addr, DeviceId};
use mock_backend::{Call, CaptureMode, MockBackend, Work};

const DEFAULT: OrderedConfig = OrderedConfig::default_pool();

#[test]
fn the_pool_is_set_up_to_keep_all_and_to_reuse_in_every_way() {
    let rig = rig(64 * MIB, DEFAULT);
    let options = PoolOptions { reuse: PoolReuse::ALL, release_threshold: u64::MAX };
    assert_eq!(rig.pool.options().unwrap(), options);
    let addr = rig.allocate(2 * MIB, &rig.s0);
    rig.free(addr);
    rig.gpu.sync();
    assert_eq!(rig.pool.stats().unwrap().reserved, 2 * MIB, "kept at synchronisations");
    let none = PoolOptions { reuse: PoolReuse::NONE, release_threshold: 0 };
    rig.pool.set_options(none).unwrap();
    assert_eq!(rig.pool.options().unwrap(), none);
    rig.gpu.sync();
    assert_eq!(rig.pool.stats().unwrap().reserved, 0);
}

#[test]
fn sizes_are_passed_on_as_they_are() {
    let rig = rig(64 * MIB, DEFAULT);
    rig.allocate(1001, &rig.s0);
    let log = rig.gpu.take_log();
    let asked = log.iter().find(|entry| entry.info.call == Call::AllocateOrdered).unwrap();
    assert_eq!(asked.info.bytes, 1001);
    assert_eq!(rig.pool.allocated(), 1001);
}

#[test]
fn memory_of_one_stream_is_freed_there() {
    let rig = rig(64 * MIB, DEFAULT);
    let addr = rig.allocate(2 * MIB, &rig.s0);
    rig.use_on(addr, 2 * MIB, &rig.s0);
    rig.pool.record_use(addr, &rig.s0).unwrap();
    rig.free(addr);
    let log = rig.gpu.take_log();
    let freed = log.iter().find(|entry| entry.info.call == Call::FreeOrdered).unwrap();
    assert_eq!(freed.info.stream, Some(rig.s0.id()));
    assert!(log.iter().all(|entry| entry.info.call != Call::Record), "no events");
    assert_eq!(rig.allocate(2 * MIB, &rig.s0), addr);
    assert_eq!(rig.gpu.violations(), []);
}

#[test]
fn memory_of_several_streams_is_freed_after_all_of_them() {
    let rig = rig(64 * MIB, DEFAULT);
    let addr = rig.allocate(2 * MIB, &rig.s0);
    rig.gpu.order(&rig.s0, &rig.s1);
    rig.use_on(addr, 2 * MIB, &rig.s1);
    rig.use_on(addr, 2 * MIB, &rig.s0);
    rig.free(addr);
    assert_eq!(rig.gpu.violations(), [], "the free is after both");
    assert_ne!(rig.allocate(2 * MIB, &rig.s0), addr, "not even its own stream may have it yet");
    rig.gpu.pass(&rig.s0);
    rig.gpu.pass(&rig.s1);
    assert_eq!(rig.allocate(2 * MIB, &rig.s0), addr);
    assert_eq!(rig.gpu.violations(), []);
}

#[test]
fn a_missing_record_is_found_by_the_judge() {
    let rig = rig(64 * MIB, DEFAULT);
    let addr = rig.allocate(2 * MIB, &rig.s0);
    rig.gpu.order(&rig.s0, &rig.s1);
    rig.gpu.launch(&rig.s1, Work::new().touching(addr, 2 * MIB));
    rig.free(addr);
    assert_eq!(rig.gpu.take_violations()[0].rule, mock_backend::Rule::FreeUnderWork);
}

#[test]
fn the_limit_counts_requests() {
    let limit = Some(10 * MIB);
    let rig = rig(64 * MIB, OrderedConfig { limit, ..DEFAULT });
    let first = rig.allocate(6 * MIB, &rig.s0);
    match rig.pool.allocate(4 * MIB + 1, &rig.s0) {
        Err(OrderedError::OutOfMemory { device, requested, allocated, reserved, limit }) => {
            assert_eq!((device, requested, allocated), (DEV0, 4 * MIB + 1, 6 * MIB));
            assert_eq!((reserved, limit), (Some(6 * MIB), Some(10 * MIB)));
        }
        other => panic!("{other:?}"),
    }
    let second = rig.allocate(4 * MIB, &rig.s0);
    rig.free(first);
    rig.free(second);
    assert_eq!(rig.pool.allocated(), 0);
    rig.pool.set_limit(None);
    rig.allocate(11 * MIB, &rig.s0);
}

/// Case I1: the driver's pool holds memory that is of no use, and the device has none left.
#[test]
fn lack_of_memory_is_met_by_one_wait_and_one_trim() {
    let reuse = PoolReuse::NONE;
    let options = PoolOptions { reuse, release_threshold: u64::MAX };
    let rig = rig(40 * MIB, OrderedConfig { options, ..DEFAULT });
    let addr = rig.allocate(30 * MIB, &rig.s0);
    rig.free(addr);
    let larger = rig.allocate(36 * MIB, &rig.s0);
    let log = rig.gpu.take_log();
    let count = |call| log.iter().filter(|entry| entry.info.call == call).count();
    assert_eq!((count(Call::Wait), count(Call::TrimPool)), (1, 1));
    assert_eq!(rig.pool.stats().unwrap().reserved, 36 * MIB);
    rig.free(larger);
    match rig.pool.allocate(41 * MIB, &rig.s0) {
        Err(OrderedError::OutOfMemory { requested, allocated, limit: None, .. }) => {
            assert_eq!((requested, allocated), (41 * MIB, 0));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(rig.pool.allocated(), 0, "what failed is not counted");
    rig.allocate(40 * MIB, &rig.s0);
    assert_eq!(rig.gpu.violations(), []);
}

#[test]
fn emptying_the_cache_waits_for_every_stream_that_had_memory() {
    let rig = rig(64 * MIB, DEFAULT);
    let kept = rig.allocate(2 * MIB, &rig.s0);
    for stream in [&rig.s0, &rig.s1] {
        let addr = rig.allocate(2 * MIB, stream);
        rig.gpu.launch(stream, Work::new().touching(addr, 2 * MIB).endless());
        rig.free(addr);
    }
    rig.pool.trim(0).unwrap();
    assert_eq!(rig.pool.stats().unwrap().reserved, 6 * MIB, "a trim alone waits for nothing");
    rig.pool.empty_cache().unwrap();
    assert_eq!(rig.pool.stats().unwrap().reserved, 2 * MIB);
    let usage = rig.pool.stats().unwrap();
    assert_eq!((usage.used, usage.used_peak, usage.reserved_peak), (2 * MIB, 4 * MIB, 6 * MIB));
    rig.pool.reset_peaks().unwrap();
    let usage = rig.pool.stats().unwrap();
    assert_eq!((usage.used_peak, usage.reserved_peak), (2 * MIB, 2 * MIB));
    rig.free(kept);
}

#[test]
fn frees_wait_while_they_are_held() {
    let rig = rig(64 * MIB, DEFAULT);
    let (a, b) = (rig.allocate(512, &rig.s0), rig.allocate(512, &rig.s0));
    let outer = rig.pool.hold_frees();
    let inner = rig.pool.hold_frees();
    rig.free(a);
    assert!(matches!(rig.pool.free(a), Err(OrderedError::UnknownAddress(addr)) if addr == a));
    assert_eq!(rig.pool.allocated(), 512);
    drop(inner);
    let calls = |call| rig.gpu.costs().calls(call);
    assert_eq!(calls(Call::FreeOrdered), 0);
    drop(outer);
    assert_eq!(calls(Call::FreeOrdered), 1);
    rig.free(b);
    assert_eq!(calls(Call::FreeOrdered), 2);
    drop(rig.pool);
    rig.gpu.assert_clean();
}

/// Case I4: memory of a side stream is freed inside a capture that the stream has joined.
#[test]
fn captures_stay_whole() {
    let rig = rig(64 * MIB, DEFAULT);
    let (a, b) = (rig.allocate(MIB, &rig.s1), rig.allocate(MIB, &rig.s0));
    rig.pool.record_use(b, &rig.s1).unwrap();
    rig.gpu.begin_capture(&rig.s0, CaptureMode::Global).unwrap();
    rig.gpu.order(&rig.s0, &rig.s1);
    rig.gpu.launch(&rig.s1, Work::new().touching(a, MIB));
    rig.gpu.order(&rig.s1, &rig.s0);
    let refused = rig.pool.allocate(512, &rig.s1);
    assert!(matches!(refused, Err(OrderedError::Capturing(stream)) if stream == rig.s1.id()));
    assert_eq!(rig.pool.allocated(), 2 * MIB);
    rig.free(a);
    rig.free(b);
    assert_eq!(rig.pool.allocated(), 0);
    let calls = |call| rig.gpu.costs().calls(call);
    assert_eq!((calls(Call::FreeOrdered), calls(Call::Record)), (0, 0), "nothing enters the graph");
    let elsewhere = rig.gpu.stream(DEV0);
    let other = rig.allocate(512, &elsewhere);
    assert_eq!(calls(Call::FreeOrdered), 0, "the capture goes on");
    rig.gpu.end_capture(&rig.s0).unwrap();
    rig.free(other);
    assert_eq!(calls(Call::FreeOrdered), 3, "the noted frees are carried out");
    rig.gpu.sync();
    assert_eq!(rig.gpu.leaks().ordered, []);
}

#[test]
fn nothing_is_null_and_addresses_are_freed_once() {
    let rig = rig(64 * MIB, DEFAULT);
    assert_eq!(rig.pool.allocate(0, &rig.s0).unwrap(), Addr::NULL);
    rig.pool.free(Addr::NULL).unwrap();
    rig.pool.record_use(Addr::NULL, &rig.s0).unwrap();
    let addr = rig.allocate(1024, &rig.s0);
    for wrong in [addr + 512, Addr::new(1)] {
        assert!(matches!(rig.pool.free(wrong), Err(OrderedError::UnknownAddress(_))));
        let recorded = rig.pool.record_use(wrong, &rig.s0);
        assert!(matches!(recorded, Err(OrderedError::UnknownAddress(_))));
    }
    rig.free(addr);
    assert!(matches!(rig.pool.free(addr), Err(OrderedError::UnknownAddress(_))));
    for bytes in [1 << 60, u64::MAX] {
        let refused = rig.pool.allocate(bytes, &rig.s0);
        assert!(matches!(refused, Err(OrderedError::TooLarge { requested }) if requested == bytes));
    }
    assert_eq!(rig.pool.allocated(), 0);
}

#[test]
fn streams_of_other_devices_are_refused() {
    let rig = rig(64 * MIB, DEFAULT);
    let other = rig.gpu.default_stream(DeviceId::new(1));
    let addr = rig.allocate(512, &rig.s0);
    for refused in [rig.pool.allocate(512, &other).map(drop), rig.pool.record_use(addr, &other)] {
        match refused {
            Err(OrderedError::WrongDevice { stream, device, expected }) => {
                assert_eq!((stream, device, expected), (other.id(), DeviceId::new(1), DEV0));
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(rig.gpu.violations(), []);
}

#[test]
fn devices_without_pools_say_so_at_once() {
    let gpu = MockBackend::builder().without_pools().build();
    let unifier = gpu.stream(DEV0);
    for config in [DEFAULT, OrderedConfig::private_pool(None)] {
        match OrderedAllocator::new(gpu.clone(), unifier, config) {
            Err(OrderedError::Backend { source, .. }) => {
                assert_eq!(source.kind(), ErrorKind::Unsupported);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_private_pool_is_bounded_and_ends_with_its_allocator() {
    let rig = rig(64 * MIB, OrderedConfig::private_pool(Some(8 * MIB)));
    let addr = rig.allocate(6 * MIB, &rig.s0);
    let refused = rig.pool.allocate(4 * MIB, &rig.s0);
    assert!(refused.unwrap_err().is_out_of_memory());
    rig.free(addr);
    let clone = rig.pool.clone();
    drop(rig.pool);
    assert_eq!(rig.gpu.leaks().pools, 1);
    drop(clone);
    rig.gpu.sync();
    rig.gpu.assert_clean();
    assert_eq!(rig.gpu.used(DEV0), 0);
}

#[test]
fn memory_that_is_out_outlives_the_allocator() {
    let rig = rig(64 * MIB, OrderedConfig::private_pool(None));
    let addr = rig.allocate(6 * MIB, &rig.s0);
    drop(rig.pool);
    assert_eq!(rig.gpu.leaks().ordered, [(addr, 6 * MIB)]);
    rig.gpu.launch(&rig.s0, Work::new().touching(addr, 6 * MIB));
    assert_eq!(rig.gpu.violations(), [], "it is still there");
}

#[test]
fn a_private_pool_that_cannot_be_set_up_is_given_back() {
    let gpu = MockBackend::new();
    gpu.set_faults([mock_backend::Fault::nth(1).of(Call::PoolOptions)]);
    let unifier = gpu.stream(DEV0);
    let config = OrderedConfig { pool: PoolChoice::Private { bytes_max: None }, ..DEFAULT };
    assert!(OrderedAllocator::new(gpu.clone(), unifier, config).is_err());
    gpu.assert_clean();
}

#[test]
fn errors_say_what_where_and_what_to_do() {
    let config = OrderedConfig { limit: Some(MIB), ..DEFAULT };
    let rig = rig_on(MockBackend::builder().device(4 * MIB).build(), config);
    let text = rig.pool.allocate(2 * MIB, &rig.s0).unwrap_err().to_string();
    for word in ["device 0", "2.00 MiB", "1.00 MiB", "limit"] {
        assert!(text.contains(word), "{word} in {text}");
    }
}
