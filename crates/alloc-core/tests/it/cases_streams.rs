//! Reports about memory that is used on several streams or devices.

use crate::rig::*;
use alloc_core::backend::Stream;
use alloc_core::{Config, Policy};
use mock_backend::{Call, MockBackend, Work};

/// One queue of events for all streams: a finished event behind an unfinished one was never looked
/// at, so memory seemed to leak while some stream was busy.
#[test]
fn case_a1_a_busy_stream_hides_nothing_of_an_idle_one() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        rig.busy(&rig.s(1));
        let a = rig.alloc(2 * MIB, &rig.s(0));
        let b = rig.alloc(2 * MIB, &rig.s(0));
        let b_addr = b.addr();
        rig.record(&a, &rig.s(1));
        rig.record(&b, &rig.s(2));
        rig.free(a);
        rig.free(b);
        let c = rig.alloc(2 * MIB, &rig.s(0));
        assert_eq!(c.addr(), b_addr);
        assert_eq!(rig.active() - rig.allocated(), 2 * MIB, "a still waits for stream 1");
        assert_eq!(rig.reserved(), 20 * MIB);
    }
}

/// A copy on a side stream read memory that had been handed out again, because the program had not
/// said that the stream used it. The allocator is right both times: without `record_stream` the
/// block comes back at once, with it only after the stream (I7).
#[test]
fn case_a2_only_a_recorded_stream_keeps_the_block() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let s0 = rig.s(0);
        let a = rig.alloc(4 * MIB, &s0);
        let addr = a.addr();
        rig.busy(&rig.s(1));
        rig.free(a);
        let b = rig.alloc(4 * MIB, &s0);
        assert_eq!(b.addr(), addr, "nothing was recorded");
        rig.record(&b, &rig.s(1));
        rig.free(b);
        let c = rig.alloc(4 * MIB, &s0);
        assert_ne!(c.addr(), addr, "stream 1 still uses it");
        rig.pass(&rig.s(1));
        let d = rig.alloc(4 * MIB, &s0);
        assert_eq!(d.addr(), addr);
    }
}

/// Memory of one device, written by a kernel of another one through peer access, was given back
/// under that kernel: a physical free waits for its own device only.
#[test]
fn case_a5_a_release_waits_for_the_other_devices_stream() {
    for policy in BOTH {
        let machine = MockBackend::builder().device(GIB).device(GIB);
        let rig = Rig::on(machine, policy, "");
        let (writer, owner) = (rig.s(1), rig.s1(0));
        let d = rig.alloc(16 * MIB, &owner);
        let (addr, bytes) = (d.addr(), d.bytes());
        rig.backend.launch(&writer, Work::new().touching(addr, bytes).endless());
        rig.record_stream(&d, &writer).unwrap();
        rig.free(d);
        rig.backend.take_log();
        rig.empty();
        let log = rig.backend.take_log();
        let position = |call| log.iter().position(|entry| entry.info.call == call);
        let waited = position(Call::Wait).expect("the event is waited for");
        let released = position(Call::Release).expect("the segment goes back");
        assert!(waited < released);
        assert_eq!(log[waited].info.device, DEV0, "the event belongs to the writer's device");
        assert_eq!(log[waited].waited_for, [writer.id()]);
        assert!(log[released].waited_for.is_empty());
        assert_eq!(rig.stat_of(DEV1, "reserved_bytes.all.current"), 0);
    }
}

/// The event of that use is made on the device of the stream that used the block, not on the
/// block's.
#[test]
fn case_a5_the_event_is_recorded_on_the_using_stream() {
    let rig = Rig::on(MockBackend::builder().device(GIB).device(GIB), Policy::Ours, "");
    let d = rig.alloc(16 * MIB, &rig.s1(0));
    rig.record(&d, &rig.s(1));
    rig.backend.take_log();
    rig.free(d);
    let records = rig.calls(Call::Record);
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].info.device, DEV0);
    assert_eq!(records[0].info.stream, Some(rig.s(1).id()));
}

/// Out of memory although the block only waited for an event: the retry gave cached memory back but
/// did not wait for what was pending. Policy pytorch then gives the block back and takes it anew;
/// ours, which looks again after waiting, hands it out as it is.
#[test]
fn case_a8_pending_memory_is_waited_for_before_giving_up() {
    for policy in BOTH {
        let rig = Rig::of_size(20 * MIB, policy, "");
        let a = rig.alloc(20 * MIB, &rig.s(0));
        rig.busy(&rig.s(1));
        rig.record(&a, &rig.s(1));
        rig.free(a);
        let _b = rig.alloc(20 * MIB, &rig.s(0));
        assert_eq!(rig.stat("num_alloc_retries"), 1);
        assert_eq!(rig.stat("num_ooms"), 0);
        assert_eq!(rig.reserved(), 20 * MIB);
        let given_back = i64::from(policy == Policy::Pytorch);
        assert_eq!(rig.stat("num_device_free"), given_back);
    }
}

/// The same with a block that is a part of its segment, where giving back cannot help: policy
/// pytorch does not look at the pool again after it has waited, and runs out of memory although a
/// block for the request is free by then. The next try succeeds. Ours has no such failure.
#[test]
fn case_a8_the_pool_is_searched_again_after_waiting() {
    for policy in BOTH {
        let rig = Rig::of_size(20 * MIB, policy, "");
        let s0 = rig.s(0);
        let _keep = rig.alloc(8 * MIB, &s0);
        let a = rig.alloc(8 * MIB, &s0);
        let addr = a.addr();
        rig.busy(&rig.s(1));
        rig.record(&a, &rig.s(1));
        rig.free(a);
        if policy == Policy::Pytorch {
            rig.oom(8 * MIB, &s0);
            assert_eq!(rig.stat("num_ooms"), 1);
        }
        let b = rig.alloc(8 * MIB, &s0);
        assert_eq!(b.addr(), addr);
        assert_eq!(rig.stat("num_ooms"), i64::from(policy == Policy::Pytorch));
    }
}

/// The wait before out of memory was for everything pending although one finished block would do.
/// A stream that has finished is enough: the busy one is not waited for.
#[test]
fn case_a9_a_finished_stream_is_enough() {
    for policy in BOTH {
        let rig = Rig::of_size(40 * MIB, policy, "");
        let s0 = rig.s(0);
        let a = rig.alloc(20 * MIB, &s0);
        let b = rig.alloc(20 * MIB, &s0);
        let addr = a.addr();
        rig.busy(&rig.s(1));
        rig.busy(&rig.s(2));
        rig.record(&a, &rig.s(1));
        rig.record(&b, &rig.s(2));
        rig.free(a);
        rig.free(b);
        rig.pass(&rig.s(1));
        let c = rig.alloc(20 * MIB, &s0);
        assert_eq!(c.addr(), addr);
        assert!(rig.backend.is_busy(&rig.s(2)), "nobody waited for stream 2");
        assert_eq!(rig.stat("num_sync_all_streams"), 0);
    }
}

/// Two streams are busy: policy `ours` waits for the older event only, whatever the streams' order.
#[test]
fn case_a9_one_event_is_enough() {
    for (older, younger) in [(1, 2), (2, 1)] {
        for policy in BOTH {
            let rig = Rig::of_size(40 * MIB, policy, "");
            let s0 = rig.s(0);
            let blocks = [rig.alloc(20 * MIB, &s0), rig.alloc(20 * MIB, &s0)];
            let addr = blocks[0].addr();
            for (block, stream) in blocks.into_iter().zip([older, younger]) {
                rig.busy(&rig.s(stream));
                rig.record(&block, &rig.s(stream));
                rig.free(block);
            }
            let c = rig.alloc(20 * MIB, &s0);
            assert_eq!(rig.backend.is_busy(&rig.s(younger)), policy == Policy::Ours);
            assert!(policy == Policy::Pytorch || c.addr() == addr);
            assert_eq!(rig.stat("num_sync_all_streams"), 1);
        }
    }
}

/// Several streams used the block: it comes back with the last of their events (I5), whichever that
/// is.
#[test]
fn a_block_waits_for_every_stream_that_used_it() {
    for (first, last) in [(1, 2), (2, 1)] {
        for policy in BOTH {
            let rig = Rig::new(policy, "");
            let s0 = rig.s(0);
            let a = rig.alloc(4 * MIB, &s0);
            let addr = a.addr();
            for n in [1, 2] {
                rig.busy(&rig.s(n));
                rig.record(&a, &rig.s(n));
                // Saying it twice changes nothing.
                rig.record(&a, &rig.s(n));
            }
            rig.record(&a, &s0);
            rig.backend.take_log();
            rig.free(a);
            assert_eq!(rig.calls(Call::Record).len(), 2, "one event a stream, none for its own");
            rig.pass(&rig.s(first));
            assert_ne!(rig.alloc(4 * MIB, &s0).addr(), addr);
            rig.pass(&rig.s(last));
            assert_eq!(rig.alloc(4 * MIB, &s0).addr(), addr);
        }
    }
}

/// An event counts as of the time of the free: work queued on the stream later does not delay the
/// block.
#[test]
fn later_work_does_not_delay_a_block() {
    for policy in BOTH {
        let rig = Rig::new(policy, "");
        let a = rig.alloc(4 * MIB, &rig.s(0));
        let addr = a.addr();
        rig.record(&a, &rig.s(1));
        rig.free(a);
        rig.busy(&rig.s(1));
        assert_eq!(rig.alloc(4 * MIB, &rig.s(0)).addr(), addr);
    }
}

/// Streams of two devices have heaps of their own on each; nothing crosses over.
#[test]
fn devices_share_nothing() {
    let machine = MockBackend::builder().device(40 * MIB).device(20 * MIB);
    let rig = Rig::configured(machine, Config::ours());
    let a = rig.alloc(20 * MIB, &rig.s(0));
    rig.free(a);
    let _b = rig.alloc(20 * MIB, &rig.s1(0));
    assert_eq!(rig.stat_of(DEV0, "reserved_bytes.all.current"), 20 << 20);
    assert_eq!(rig.stat_of(DEV1, "reserved_bytes.all.current"), 20 << 20);
    rig.oom(MIB, &rig.s1(1));
    assert_eq!(rig.stat_of(DEV0, "num_ooms"), 0);
    assert_eq!(rig.stat_of(DEV1, "num_ooms"), 1);
    assert_eq!(rig.reserved(), 20 * MIB, "the other device's cache is left alone");
}
