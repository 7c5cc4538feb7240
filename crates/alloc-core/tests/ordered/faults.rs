//! The n-th call to the backend fails, for every n: the error comes out, nothing is lost.

use crate::{MIB, Rig, rig};
use alloc_core::Addr;
use alloc_core::ordered::OrderedConfig;
use mock_backend::{Fault, MockStream, Work};

/// Allocates, or tells that a call failed.
fn try_allocate(rig: &Rig, bytes: u64, stream: &MockStream) -> Option<Addr> {
    let addr = rig.pool.allocate(bytes, stream).ok()?;
    rig.gpu.judge().allocated(addr, bytes, stream);
    Some(addr)
}

/// Frees; after a failure the memory is still allocated, and freed without faults.
fn try_free(rig: &Rig, addr: Addr, bytes: u64) -> bool {
    rig.gpu.judge().freed(addr);
    let allocated = rig.pool.allocated();
    if rig.pool.free(addr).is_ok() {
        return true;
    }
    assert_eq!(rig.pool.allocated(), allocated, "as before the call");
    rig.gpu.judge().still_live(addr, bytes);
    rig.gpu.set_faults([]);
    rig.free(addr);
    false
}

fn scenario(rig: &Rig) {
    let bytes = 3 * MIB;
    let Some(addr) = try_allocate(rig, bytes, &rig.s0) else { return };
    rig.gpu.order(&rig.s0, &rig.s1);
    rig.gpu.launch(&rig.s1, Work::new().touching(addr, bytes));
    rig.pool.record_use(addr, &rig.s1).unwrap();
    if !try_free(rig, addr, bytes) {
        return;
    }
    // No room beside what the pool holds: waits, trims and asks again.
    let Some(larger) = try_allocate(rig, 7 * MIB, &rig.s0) else { return };
    if try_free(rig, larger, 7 * MIB) {
        let _ = rig.pool.empty_cache();
        let _ = rig.pool.stats();
    }
}

#[test]
fn every_call_can_fail() {
    for n in 1.. {
        let rig = rig(8 * MIB, OrderedConfig::private_pool(None));
        rig.gpu.set_faults([Fault::nth(n)]);
        scenario(&rig);
        let struck = rig.gpu.fault_counts().1 > 0;
        rig.gpu.set_faults([]);
        assert_eq!(rig.pool.allocated(), 0, "call {n}");
        drop(rig.pool);
        rig.gpu.sync();
        rig.gpu.assert_clean();
        if !struck && n > 40 {
            break;
        }
    }
}

#[test]
fn held_frees_that_fail_can_be_freed_again() {
    let rig = rig(8 * MIB, OrderedConfig::private_pool(None));
    let addr = rig.allocate(512, &rig.s0);
    let hold = rig.pool.hold_frees();
    rig.gpu.judge().freed(addr);
    rig.pool.free(addr).unwrap();
    rig.gpu.set_faults([Fault::nth(1)]);
    drop(hold);
    assert_eq!(rig.pool.allocated(), 512);
    rig.pool.free(addr).unwrap();
    assert_eq!(rig.pool.allocated(), 0);
    drop(rig.pool);
    rig.gpu.sync();
    rig.gpu.assert_clean();
}
