//! Misuse by the caller and broken backends: a clear error each, and nothing changes.

use crate::liar::{Liar, Lie};
use crate::rig::*;
use alloc_core::backend::{ErrorKind, Stream};
use alloc_core::{Addr, AllocError, BackendOp, CachingAllocator, Config, DeviceId, Policy};
use mock_backend::{Call, Fault, MockBackend};

#[track_caller]
fn unknown(result: Result<(), Error>, at: Addr) {
    match result {
        Err(AllocError::UnknownAddress { addr }) => assert_eq!(addr, at),
        other => panic!("{other:?}"),
    }
}

/// Addresses that no block handed out starts at, inside segments and outside (I11), for an allocator in
/// every state.
#[test]
fn addresses_that_are_not_handed_out_are_unknown() {
    for policy in BOTH {
        for text in ["", "expandable_segments:True"] {
            let rig = Rig::new(policy, text);
            let (s0, s1) = (rig.s(0), rig.s(1));
            let before_anything = Addr::new(4096);
            unknown(rig.free_raw(before_anything), before_anything);
            let a = rig.alloc(3 * MIB, &s0);
            let small = rig.alloc(700, &s0);
            let freed = rig.alloc(5 * MIB, &s0);
            let freed_at = freed.addr();
            rig.free(freed);
            let pending = rig.alloc(4 * MIB, &s0);
            let pending_at = pending.addr();
            rig.busy(&s1);
            rig.record(&pending, &s1);
            rig.free(pending);
            let stats = rig.stats(DEV0).unwrap();
            for addr in [
                a.addr() + 1,
                a.addr() + 512,
                a.addr() + 2 * MIB,
                a.addr() + (3 * MIB - 1),
                small.addr() + 512,
                freed_at + MIB,
                pending_at,
                Addr::new(a.addr().get() - 1),
                a.addr() + 80 * GIB,
                Addr::new(1),
                Addr::new(1 << 57),
                Addr::new(u64::MAX),
            ] {
                unknown(rig.free_raw(addr), addr);
                unknown(rig.record_stream_raw(addr, &s1), addr);
                assert_eq!(rig.locate(addr), None);
            }
            assert_eq!(rig.stats(DEV0).unwrap(), stats);
            rig.verify();
        }
    }
}

/// A second free of the same address is refused as long as nobody else got it.
#[test]
fn a_double_free_is_refused() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        for bytes in [1, MIB, 5 * MIB, 30 * MIB] {
            let addr = rig.allocate_raw(bytes, &rig.s(0)).unwrap();
            rig.free_raw(addr).unwrap();
            unknown(rig.free_raw(addr), addr);
            rig.empty();
            unknown(rig.free_raw(addr), addr);
        }
    }
}

/// Freed by address first, then by its allocation: a stale id, which is an error (I10); the allocation
/// comes back with it.
#[test]
fn an_allocation_freed_by_address_is_stale() {
    let rig = Rig::new(Policy::Ours, "");
    let a = rig.allocate(4 * MIB, &rig.s(0)).unwrap();
    rig.free_raw(a.addr()).unwrap();
    unknown(rig.record_stream(&a, &rig.s(1)), a.addr());
    let (addr, refused) = (a.addr(), CachingAllocator::free(&rig, a).unwrap_err());
    assert_eq!(refused.allocation.addr(), addr);
    unknown(Err(refused.error), addr);
    // Its segment gone, the block's id is stale as well.
    rig.empty();
    unknown(CachingAllocator::free(&rig, refused.allocation).map_err(|e| e.error), addr);
    rig.verify();
}

/// Not even where the next request got the same block, which goes on living.
#[test]
fn a_stale_allocation_does_not_free_the_next_one() {
    for (policy, options) in [
        (Policy::Pytorch, ""),
        (Policy::Ours, ""),
        (Policy::Ours, "expandable_segments:True"),
        (Policy::Ours, "expandable_segments:True,ours_waiting_max:0"),
    ] {
        for bytes in [KIB, 4 * MIB] {
            let rig = Rig::new(policy, options);
            let first = rig.allocate(bytes, &rig.s(0)).unwrap();
            rig.free_raw(first.addr()).unwrap();
            let second = rig.alloc(bytes, &rig.s(0));
            assert_eq!(second.addr(), first.addr());
            unknown(rig.record_stream(&first, &rig.s(1)), first.addr());
            let refused = CachingAllocator::free(&rig, first).unwrap_err();
            unknown(Err(refused.error), second.addr());
            assert!(rig.locate(second.addr()).is_some());
            rig.free(second);
        }
    }
}

/// Allocations of one allocator are refused by another one, and stay good.
#[test]
fn allocations_of_another_allocator_are_foreign() {
    let rig = Rig::new(Policy::Ours, "");
    let other = Rig::new(Policy::Ours, "");
    let a = rig.alloc(MIB, &rig.s(0));
    let b = other.alloc(MIB, &other.s(0));
    assert_eq!(a.addr(), b.addr(), "even at the same address");
    let foreign = |result: Result<(), Error>| match result {
        Err(AllocError::ForeignAllocation { addr }) => assert_eq!(addr, b.addr()),
        other => panic!("{other:?}"),
    };
    foreign(rig.record_stream(&b, &rig.s(1)));
    let (b_again, error) = rig.try_free(b).unwrap_err();
    let AllocError::ForeignAllocation { .. } = error else { panic!("{error}") };
    rig.free(a);
    other.free(b_again);
}

/// A stream of a device that the backend does not have.
#[test]
fn streams_of_missing_devices_are_refused() {
    let rig = Rig::new(Policy::Ours, "");
    let larger = MockBackend::builder().device(GIB).device(GIB).build();
    let stranger = larger.default_stream(DEV1);
    let refused = |error: Error| {
        let AllocError::NoSuchDevice { device: DEV1, count: 1 } = error else { panic!("{error}") };
    };
    refused(rig.allocate(512, &stranger).unwrap_err());
    refused(rig.allocate_raw(512, &stranger).unwrap_err());
    refused(rig.stream(&stranger).unwrap_err());
    let a = rig.alloc(512, &rig.s(0));
    refused(rig.record_stream(&a, &stranger).unwrap_err());
    refused(rig.record_stream_raw(a.addr(), &stranger).unwrap_err());
    rig.free(a);
}

#[test]
fn devices_that_do_not_exist_are_refused() {
    let rig = Rig::new(Policy::Ours, "");
    for device in [DEV1, DeviceId::new(u16::MAX)] {
        let refused = |error: Error| match error {
            AllocError::NoSuchDevice { device: named, count: 1 } => assert_eq!(named, device),
            other => panic!("{other}"),
        };
        refused(rig.snapshot(device).unwrap_err());
        refused(rig.set_memory_limit(device, Some(1)).unwrap_err());
        refused(rig.set_memory_fraction(device, 0.5).unwrap_err());
        refused(rig.memory_fraction(device).unwrap_err());
    }
}

#[test]
fn fractions_out_of_range_are_refused() {
    let rig = Rig::new(Policy::Ours, "");
    rig.set_memory_fraction(DEV0, 0.5).unwrap();
    for fraction in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
        let error = rig.set_memory_fraction(DEV0, fraction).unwrap_err();
        assert!(matches!(error, AllocError::InvalidArgument { what: "memory fraction", .. }));
        assert!(error.to_string().contains("from 0 to 1"));
    }
    assert_eq!(rig.memory_fraction(DEV0).unwrap(), 0.5);
    rig.set_memory_fraction(DEV0, 0.0).unwrap();
    rig.oom(1, &rig.s(0));
    rig.set_memory_fraction(DEV0, 1.0).unwrap();
    let _a = rig.alloc(1, &rig.s(0));
}

/// 2^60 and more is refused whatever rounding is set, and so cleanly that not even events are
/// looked at.
#[test]
fn requests_of_2_to_the_60_and_more_are_refused() {
    for policy in BOTH {
        for divisions in ["0", "1", "2", "4", "1024", "9223372036854775808"] {
            let text = match divisions {
                "0" => String::new(),
                _ => format!("roundup_power2_divisions:{divisions}"),
            };
            let rig = Rig::new(policy, &text);
            let recorder = Recorder::attached(&rig);
            for size in [1 << 60, (1 << 60) + 1, 1 << 63, u64::MAX] {
                match rig.try_alloc(size, &rig.s(0)) {
                    Err(AllocError::TooLarge { requested }) => assert_eq!(requested, size),
                    other => panic!("{other:?}"),
                }
            }
            assert!(recorder.take().is_empty());
            rig.oom((1 << 60) - 1, &rig.s(0));
            assert_eq!(recorder.names(), ["oom"]);
        }
    }
}

/// Expandable segments without a backend that can: an error wherever they can be asked for.
#[test]
fn expandable_segments_need_virtual_memory() {
    let expandable = config(Policy::Ours, "expandable_segments:True");
    let refused = Alloc::new(MockBackend::new(), expandable.clone()).unwrap_err();
    assert!(matches!(refused, AllocError::NoVirtualMemory));
    assert!(refused.to_string().contains("with_virtual_memory"));
    let alloc = Alloc::new(MockBackend::new(), config(Policy::Ours, "")).unwrap();
    let settings = alloc.settings();
    for result in [alloc.set_expandable_segments(true), alloc.set_settings(expandable.settings)] {
        assert!(matches!(result, Err(AllocError::NoVirtualMemory)));
    }
    assert_eq!(alloc.settings(), settings);
    alloc.set_expandable_segments(false).unwrap();
}

/// A backend that does not know its devices is no backend.
#[test]
fn a_backend_that_cannot_tell_its_size_is_refused() {
    let backend = MockBackend::builder().device(GIB).device(GIB).build();
    backend.set_faults([Fault::nth(2).of(Call::Memory)]);
    let error = Alloc::new(backend, Config::ours()).unwrap_err();
    let AllocError::Backend { op: BackendOp::Memory, source } = &error else { panic!("{error}") };
    assert!(source.is_injected());
    assert!(std::error::Error::source(&error).is_some());
}

/// Only a lack of memory climbs the ladder; other failures come back as they are, with the call.
#[test]
fn other_failures_do_not_climb_the_ladder() {
    for policy in BOTH {
        for kind in [ErrorKind::Other, ErrorKind::Unsupported, ErrorKind::DeviceLost] {
            let rig = Rig::new(policy, "");
            let cached = rig.alloc(4 * MIB, &rig.s(0));
            rig.free(cached);
            rig.backend.set_faults([Fault::nth(1).of(Call::Acquire).kind(kind)]);
            let error = rig.try_alloc(30 * MIB, &rig.s(0)).unwrap_err();
            let AllocError::Backend { op: BackendOp::Acquire, source } = &error else {
                panic!("{error}")
            };
            assert_eq!(alloc_core::backend::BackendError::kind(source), kind);
            assert_eq!(error.is_device_lost(), kind == ErrorKind::DeviceLost);
            assert_eq!(rig.reserved(), 20 * MIB, "the cache is untouched");
            assert_eq!(rig.stat("num_ooms") + rig.stat("num_alloc_retries"), 0);
        }
    }
}

fn lying_allocator(text: &str) -> (Liar, CachingAllocator<Liar>) {
    let liar = Liar::new(MockBackend::builder().device(8 * GIB).strict().build());
    let config = config(Policy::Ours, text);
    let alloc = CachingAllocator::with_virtual_memory(liar.clone(), config).unwrap();
    (liar, alloc)
}

/// A backend that breaks its contract about bases and lengths is found out at once; what it handed
/// out goes back and the allocator stays usable.
#[test]
fn bad_segments_are_found_out() {
    let lies: [(Lie, &str); 6] = [
        (|base, bytes| (base + 512, bytes), "not a multiple of 2 MiB"),
        (|base, bytes| (base, bytes / 2), "not what was asked for"),
        (|base, bytes| (base, bytes * 2), "not what was asked for"),
        (|_, bytes| (Addr::NULL, bytes), "empty or starts at 0"),
        (|_, bytes| (Addr::new(1 << 57), bytes), "beyond 2^57"),
        (|base, _| (base, u64::MAX), "beyond 2^57"),
    ];
    for (lie, complaint) in lies {
        let (liar, alloc) = lying_allocator("");
        let stream = liar.honest.default_stream(DEV0);
        let live = alloc.allocate_raw(5 * MIB, &stream).unwrap();
        liar.lie(lie);
        let error = alloc.allocate(30 * MIB, &stream).unwrap_err();
        assert!(matches!(error, AllocError::BadSegment { .. }), "{error}");
        assert!(error.to_string().contains(complaint), "{error}");
        alloc.check().unwrap();
        assert_eq!(liar.honest.used(DEV0), 20 * MIB, "it went back");
        alloc.allocate_raw(30 * MIB, &stream).unwrap();
        alloc.free_raw(live).unwrap();
        alloc.check().unwrap();
        drop(alloc);
        liar.honest.assert_clean();
    }
}

/// A segment over one that is in use is refused too, but kept: giving it back might take the live
/// one along.
#[test]
fn an_overlapping_segment_is_refused_and_kept() {
    let (liar, alloc) = lying_allocator("");
    let stream = liar.honest.default_stream(DEV0);
    let live = alloc.allocate_raw(30 * MIB, &stream).unwrap();
    // It really lies right behind the live one.
    liar.lie(|base, bytes| (Addr::new(base.get() - 2 * MIB), bytes));
    let error = alloc.allocate(32 * MIB, &stream).unwrap_err();
    assert!(error.to_string().contains("overlaps"), "{error}");
    alloc.check().unwrap();
    assert!(alloc.locate(live).is_some());
    assert_eq!(liar.honest.used(DEV0), 62 * MIB);
    alloc.free_raw(live).unwrap();
    drop(alloc);
    assert_eq!(liar.honest.leaks().segments.len(), 1, "only the refused one");
    assert!(liar.honest.violations().is_empty());
}

/// The same for reservations of address space.
#[test]
fn bad_reservations_are_found_out() {
    let lies: [(Lie, &str); 3] = [
        (|base, bytes| (base + 512, bytes), "not a multiple of 2 MiB"),
        (|base, bytes| (base, bytes / 2 + 512), "not what was asked for"),
        (|_, bytes| (Addr::new(1 << 57), bytes), "beyond 2^57"),
    ];
    for (lie, complaint) in lies {
        let (liar, alloc) = lying_allocator("expandable_segments:True");
        let stream = liar.honest.default_stream(DEV0);
        liar.lie(lie);
        let error = alloc.allocate(30 * MIB, &stream).unwrap_err();
        assert!(matches!(error, AllocError::BadSegment { .. }), "{error}");
        assert!(error.to_string().contains(complaint), "{error}");
        alloc.check().unwrap();
        let addr = alloc.allocate_raw(30 * MIB, &stream).unwrap();
        alloc.free_raw(addr).unwrap();
        alloc.check().unwrap();
        drop(alloc);
        liar.honest.assert_clean();
    }
}

/// A reservation at the place of another one does not take that one's pages along.
#[test]
fn an_overlapping_reservation_is_refused_and_kept() {
    let (liar, alloc) = lying_allocator("expandable_segments:True");
    let stream = liar.honest.default_stream(DEV0);
    let live = alloc.allocate_raw(30 * MIB, &stream).unwrap();
    // The next one lies right behind it.
    liar.lie(|base, bytes| (Addr::new(base.get() - bytes), bytes));
    let error = alloc.allocate(30 * MIB, &liar.honest.stream(DEV0)).unwrap_err();
    assert!(error.to_string().contains("overlaps"), "{error}");
    alloc.check().unwrap();
    let again = alloc.allocate_raw(40 * MIB, &stream).unwrap();
    alloc.free_raw(live).unwrap();
    alloc.free_raw(again).unwrap();
    alloc.check().unwrap();
    drop(alloc);
    let leaks = liar.honest.leaks();
    assert!(leaks.pages.is_empty() && leaks.mappings.is_empty());
    assert_eq!(leaks.reservations.len(), 1, "only the refused one");
    assert!(liar.honest.violations().is_empty());
}

/// What a failed free hands back can be freed later.
#[test]
fn a_free_that_cannot_record_hands_the_block_back() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let a = rig.alloc(4 * MIB, &rig.s(0));
        let addr = a.addr();
        for n in [1, 2, 3] {
            rig.record(&a, &rig.s(n));
        }
        let mut block = a;
        for n in 1..=3 {
            rig.backend.set_faults([Fault::nth(n).of(Call::Record)]);
            let (back, error) = rig.try_free(block).unwrap_err();
            assert!(matches!(error, AllocError::Backend { op: BackendOp::Record, .. }));
            assert_eq!(back.addr(), addr);
            assert_eq!(rig.backend.leaks().events, 0, "the events of the others went back");
            block = back;
        }
        rig.backend.set_faults([]);
        rig.free(block);
        assert_eq!(rig.stream(&rig.s(0)).unwrap().stream().id(), rig.s(0).id());
        assert_eq!(rig.alloc(4 * MIB, &rig.s(0)).addr(), addr);
    }
}
