//! Expandable segments and the virtual memory beneath them.

use crate::Scenario;
use crate::rig::{FIRST, MIB, Rig};
use alloc_core::backend::{Page, Reservation, VirtualMemory};
use alloc_core::{Addr, Config, DeviceId, Policy};
use cuda_driver::PhysicalMemory;
use cuda_driver::fake::Outcome;
use std::os::fd::AsFd;

pub(crate) const SCENARIOS: &[Scenario] = &[
    ("virtual_memory::pages_move_with_their_data", pages_move),
    ("virtual_memory::one_page_at_two_addresses", two_addresses),
    ("virtual_memory::access_over_a_run", access_over_a_run),
    ("virtual_memory::export_and_import", export_and_import),
    ("virtual_memory::grow_unmap_remap", grow_unmap_remap),
];

const MISSING: &str = "the device has no virtual memory";

fn is_missing(rig: &Rig) -> bool {
    !rig.backend.has_virtual_memory(FIRST).expect("the device exists")
}

fn offset(base: Addr, pages: u64, page: u64) -> Addr {
    Addr::new(base.get() + pages * page)
}

fn pages_move(rig: &Rig) -> Outcome {
    if is_missing(rig) {
        return Outcome::Skipped(MISSING);
    }
    let (backend, stream) = (&rig.backend, rig.stream());
    let unit = backend.granularity(FIRST);
    let range = backend.reserve(FIRST, 64 * unit).expect("addresses");
    let base = range.base();
    let page = backend.create(FIRST, 2 * unit).expect("room");
    assert_eq!(page.bytes(), 2 * unit);
    for (turn, place) in [0, 7, 62].into_iter().enumerate() {
        let at = offset(base, place, unit);
        backend.map(&range, at, &page).expect("maps");
        backend.set_access(&range, at, 2 * unit, FIRST).expect("access");
        if turn == 0 {
            rig.fill(&stream, at, 2 * unit, 5);
        }
        rig.check(&stream, at, 2 * unit, 5);
        assert_eq!(rig.wrong_words(FIRST), 0, "place {place}");
        backend.unmap(&range, at, 2 * unit).expect("unmaps");
    }
    assert!(backend.map(&range, offset(base, 63, unit), &page).is_err(), "over the end");
    backend.destroy(page).expect("destroys");
    backend.unreserve(range).expect("unreserves");
    Outcome::Done
}

fn two_addresses(rig: &Rig) -> Outcome {
    if is_missing(rig) {
        return Outcome::Skipped(MISSING);
    }
    let (backend, stream) = (&rig.backend, rig.stream());
    let unit = backend.granularity(FIRST);
    let range = backend.reserve(FIRST, 8 * unit).expect("addresses");
    let page = backend.create(FIRST, unit).expect("room");
    let (one, two) = (range.base(), offset(range.base(), 4, unit));
    for at in [one, two] {
        backend.map(&range, at, &page).expect("maps");
        backend.set_access(&range, at, unit, FIRST).expect("access");
    }
    rig.fill(&stream, one, unit, 6);
    rig.check(&stream, two, unit, 6);
    assert_eq!(rig.wrong_words(FIRST), 0);
    backend.unmap(&range, one, unit).expect("unmaps");
    rig.check(&stream, two, unit, 6);
    assert_eq!(rig.wrong_words(FIRST), 0, "the other mapping stays");
    backend.unmap(&range, two, unit).expect("unmaps");
    backend.destroy(page).expect("destroys");
    backend.unreserve(range).expect("unreserves");
    Outcome::Done
}

/// One call gives access to pages of several sizes, and none before it.
fn access_over_a_run(rig: &Rig) -> Outcome {
    if is_missing(rig) {
        return Outcome::Skipped(MISSING);
    }
    let (backend, stream) = (&rig.backend, rig.stream());
    let unit = backend.granularity(FIRST);
    let range = backend.reserve(FIRST, 32 * unit).expect("addresses");
    let pages = [1, 10, 3].map(|units| backend.create(FIRST, units * unit).expect("room"));
    let mut at = range.base();
    for page in &pages {
        backend.map(&range, at, page).expect("maps");
        at = Addr::new(at.get() + page.bytes());
    }
    let bytes = 14 * unit;
    backend.set_access(&range, range.base(), bytes, FIRST).expect("access");
    rig.fill(&stream, range.base(), bytes, 9);
    rig.check(&stream, range.base(), bytes, 9);
    assert_eq!(rig.wrong_words(FIRST), 0);
    let mut at = range.base();
    for page in pages {
        let bytes = page.bytes();
        backend.unmap(&range, at, bytes).expect("unmaps");
        backend.destroy(page).expect("destroys");
        at = Addr::new(at.get() + bytes);
    }
    backend.unreserve(range).expect("unreserves");
    Outcome::Done
}

fn export_and_import(rig: &Rig) -> Outcome {
    if is_missing(rig) {
        return Outcome::Skipped(MISSING);
    }
    let (backend, stream) = (&rig.backend, rig.stream());
    let unit = backend.granularity(FIRST);
    let page = backend.create(FIRST, unit).expect("room");
    let Ok(descriptor) = page.memory().export() else {
        backend.destroy(page).expect("destroys");
        return Outcome::Skipped("memory cannot be exported here");
    };
    let context = rig.context(FIRST);
    let imported = PhysicalMemory::import(context, descriptor.as_fd(), unit).expect("imports");
    let range = cuda_driver::AddressRange::reserve(context, 2 * unit, unit).expect("addresses");
    range.map(range.base(), &imported).expect("maps");
    range.set_access(range.base(), unit, context.device()).expect("access");
    let here = backend.reserve(FIRST, unit).expect("addresses");
    backend.map(&here, here.base(), &page).expect("maps");
    backend.set_access(&here, here.base(), unit, FIRST).expect("access");
    rig.fill(&stream, here.base(), unit, 11);
    rig.check(&stream, Addr::new(range.base()), unit, 11);
    assert_eq!(rig.wrong_words(FIRST), 0, "the same memory");
    range.unmap(range.base(), unit).expect("unmaps");
    imported.release().expect("releases");
    range.free().expect("frees");
    backend.unmap(&here, here.base(), unit).expect("unmaps");
    backend.unreserve(here).expect("unreserves");
    backend.destroy(page).expect("destroys");
    Outcome::Done
}

/// An expandable segment grows block by block, loses its middle, and gets it back; the rest keeps
/// its data all the while.
fn grow_unmap_remap(rig: &Rig) -> Outcome {
    if is_missing(rig) {
        return Outcome::Skipped(MISSING);
    }
    for policy in [Policy::Pytorch, Policy::Ours] {
        let mut config = Config::of(policy);
        config.settings.expandable_segments = Some(true);
        let allocator = rig.allocator(config);
        let stream = rig.stream();
        let reserved = || {
            let stats = allocator.stats(DeviceId::new(0)).expect("stats");
            stats.get("reserved_bytes.all.current").expect("known")
        };
        let bytes = 20 * MIB;
        let mut blocks: Vec<_> = (0..8)
            .map(|seed| {
                let block = allocator.allocate(bytes, &stream).expect("room");
                rig.fill(&stream, block.addr(), bytes, seed);
                Some(block)
            })
            .collect();
        let segments = allocator.snapshot(FIRST).expect("snapshot").segments;
        assert_eq!(segments.len(), 1, "{policy:?}: one segment holds them all");
        assert!(segments[0].expandable);
        let full = reserved();

        let middle = blocks[4].take().expect("there");
        let hole = middle.addr();
        allocator.free(middle).expect("frees");
        allocator.empty_cache().expect("unmaps");
        assert!(reserved() < full, "{policy:?}: the hole is given back");
        let again = allocator.allocate(bytes, &stream).expect("room");
        if policy == Policy::Pytorch {
            assert_eq!(again.addr(), hole, "and filled first");
        }
        rig.fill(&stream, again.addr(), bytes, 4);
        blocks[4] = Some(again);
        for (seed, block) in blocks.iter().enumerate() {
            let addr = block.as_ref().expect("there").addr();
            rig.check(&stream, addr, bytes, seed as u32);
        }
        assert_eq!(rig.wrong_words(FIRST), 0, "{policy:?}");
        for block in blocks.into_iter().flatten() {
            allocator.free(block).expect("frees");
        }
        allocator.empty_cache().expect("unmaps");
        assert_eq!(reserved(), 0, "{policy:?}");
        allocator.check().expect("sound");
    }
    Outcome::Done
}
